"""The GPUs of this machine: which there are, and memory that nobody uses any more going back to them.

Invariant: a GPU has one name here, the one by which CUDA_VISIBLE_DEVICES tells a child process of it; looking does not
initialise CUDA.
"""

import gc
import os
import shutil
import subprocess

import torch

_ASK_SECONDS = 30.0


def visible() -> list[str]:
    """The names of the GPUs that this process sees: those of CUDA_VISIBLE_DEVICES, else the indices of all."""
    if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in names.split(",") if name.strip() not in ("", "-1")]
    count = torch.cuda.device_count() if torch.version.cuda else len(nvidia_smi("index"))
    return [str(index) for index in range(count)]


def nvidia_smi(*fields: str) -> list[list[str]]:
    """What the driver's `nvidia-smi` says of each GPU, field by field (`nvidia-smi --help-query-gpu`); []: there is no
    such program, or it finds no GPU."""
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    query = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=_ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if result.returncode:
        return []
    return [[value.strip() for value in line.split(",")] for line in result.stdout.splitlines() if line.strip()]


def free_unused_memory() -> None:
    """Give what torch's allocator keeps for later back to the GPU; nothing on a CPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
