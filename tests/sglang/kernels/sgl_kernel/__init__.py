"""SGLang's kernels, where there are none: the package has builds for GPUs and for CPUs with AVX512.

On any CPU SGLang computes a plain model by torch alone; it imports the names of kernels all the same. Each is here, and
raises where it is called.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on this CPU")

    return absent
