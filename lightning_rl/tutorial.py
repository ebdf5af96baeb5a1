"""Where the tutorial lives: packaged in the wheel, beside the package in a checkout."""

from pathlib import Path

_EXAMPLE = "sql_agent"


def folder() -> Path:
    """The tutorial's folder (`agent.py`, `train.py`, `checkpoint/`). Raises FileNotFoundError without one."""
    package = Path(__file__).parent
    for examples in (package / "_examples", package.parent / "examples"):
        if (examples / _EXAMPLE / "train.py").exists():
            return examples / _EXAMPLE
    raise FileNotFoundError(f"the tutorial {_EXAMPLE} is neither in {package} nor beside it; reinstall lightning-rl")


def checkpoint() -> Path:
    """The tutorial's model: 0.9M parameters, small enough for any machine."""
    return folder() / "checkpoint"
