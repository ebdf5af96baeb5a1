"""torchvision without its compiled operators, in the processes of a vLLM for the CPU.

vLLM reads images with torchvision's Python code alone. But the wheels of the package index are built for CUDA: where
torch is not, their library is not loaded, and the import ends at the first operator that it should have brought. Here
those are declared without a body: nothing computes with them. A wheel whose library loads is left as it is.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

OPERATORS = ("nms", "qnms")
kept = []  # a declaration lasts as long as its library


class _Before:
    """Asked for a module's place; does its work at the first import of torchvision."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(_Before)
            spec = PathFinder.find_spec(name)
            if spec is not None and spec.origin is not None:
                _declare(Path(spec.origin).parent)
        return None


def _declare(folder: Path) -> None:
    import torch

    try:
        for library in folder.glob("_C*.so"):
            torch.ops.load_library(library)
            return
    except OSError:
        pass
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    kept.append(library)


sys.meta_path.insert(0, _Before)
