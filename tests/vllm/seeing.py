"""A real vLLM server whose model sees, and what engine and trainer compute of an image."""

from pathlib import Path

import pytest

from tests import seeing
from tests.vllm.server import PYTHON, Server

TORCHVISION = PYTHON.parents[1] / "seeing"
MAKE = f"{PYTHON.parent}/pip install --no-deps --target {TORCHVISION} torchvision==0.28.0"
PIL = ("--mm-processor-kwargs", '{"use_fast": false}')  # the trainer's way to resize; torchvision's is another
_OPERATORS = Path(__file__).parent / "torchvision_ops"


def make_folder(folder: Path) -> Path:
    """A tiny model in dimensions that vLLM takes on a CPU."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    return seeing.make_folder(folder, hidden_size=128, intermediate_size=128, rope_parameters=rope)


class SeeingServer(Server):
    """A server of the model in `folder`."""

    def __init__(self, log: Path, folder: Path, *flags: str) -> None:
        if not TORCHVISION.exists():
            raise FileNotFoundError(f"{TORCHVISION} is not there; vLLM's Qwen2-VL needs torchvision: {MAKE}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{_OPERATORS}:{TORCHVISION}")
            super().__init__(log, "--hf-overrides", "{}", *flags, model=folder)
