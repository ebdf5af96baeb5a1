"""What machines of services have in common: no network of ours, an SDK that may be missing, errors of its own."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from lightning_rl.sandboxes import SandboxError, SandboxUnusable

LIFE_SECONDS = 3600  # what is never closed ends by itself


class ServiceSandbox:
    """Subclass it as a `Sandbox`. `errors` are the SDK's exceptions, `module:name` each; they become a SandboxError."""

    home = "/tmp/lightning_rl"
    shares_network = False
    service: ClassVar[str]
    package: ClassVar[str]
    errors: ClassVar[tuple[str, ...]]
    needs_image: ClassVar[bool] = True

    def __init__(self, image: str | None = None, options: Sequence[str] = ()) -> None:
        if image is None and self.needs_image:
            raise SandboxUnusable(
                f"sandbox.kind={self.package} needs an image of a registry: sandbox.image=python:3.12"
            )
        if options:
            raise SandboxUnusable(f"sandbox.kind={self.package} takes no options")
        self.image = image
        self._box: Any = None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What the SDK raises inside the block is a SandboxError; that it is not there, too."""
        try:
            places = [place.partition(":") for place in self.errors]
            errors = tuple(getattr(importlib.import_module(module), name) for module, _, name in places)
        except ImportError as error:
            raise SandboxError(
                f"sandbox.kind={self.package} needs {self.service}'s SDK: pip install {self.package}"
            ) from error
        try:
            yield
        except errors as error:
            raise SandboxError(f"{self.service}: {error}") from error
