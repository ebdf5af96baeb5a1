"""What this machine is, for a report: its GPUs as the driver knows them, and the versions of what computes on them."""

import platform
import subprocess
import sys
from importlib import metadata

import psutil
import torch

from lightning_rl.processes.gpus import nvidia_smi

_PACKAGES = ("lightning-rl", "triton", "transformers", "vllm", "sglang", "ray", "flash-attn", "torchao")
_ASK_VLLM = "import importlib.metadata as m; print(m.version('vllm'))"


def without_gpu() -> str | None:
    """Why nothing here can compute on a GPU; None: it can."""
    if torch.cuda.is_available():
        return None
    listed = len(nvidia_smi("index"))
    if not listed:
        return "there is no GPU: nvidia-smi is not there, or finds none"
    if torch.version.cuda is None:
        return (
            f"nvidia-smi lists {listed} GPUs, and torch {torch.__version__} is built without CUDA: install a CUDA build"
        )
    return f"nvidia-smi lists {listed} GPUs, and torch {torch.__version__} can use none: look at the driver's version"


def facts(vllm_python: str | None = None) -> list[tuple[str, str]]:
    """Names and values, a line each. `vllm_python`: the interpreter of vLLM's environment, where that is another."""
    gib = psutil.virtual_memory().total / 2**30
    found = [("system", platform.platform()), ("processor", f"{psutil.cpu_count()} cores, {gib:.0f} GiB")]
    for index, name, memory, driver in nvidia_smi("index", "name", "memory.total", "driver_version"):
        found.append((f"GPU {index}", f"{name}, {memory} MiB, driver {driver}"))
    found += [
        ("torch", torch.__version__),
        ("CUDA of torch", str(torch.version.cuda)),
    ]  # a build says so in its version
    found.append(("python", platform.python_version()))
    found += [(name, version) for name in _PACKAGES if (version := _version(name))]
    if vllm_python and vllm_python != sys.executable:
        found.append(("vllm of its own environment", _asked(vllm_python)))
    commit = _said("git", "rev-parse", "--short", "HEAD")
    return [*found, ("commit", commit)] if commit else found


def used_memory() -> int:
    """MiB that are in use on the fullest GPU, by whomever; 0 where there is none."""
    return max((int(used) for [used] in nvidia_smi("memory.used") if used.isdigit()), default=0)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _asked(python: str) -> str:
    return _said(python, "-c", _ASK_VLLM) or "none found"


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
