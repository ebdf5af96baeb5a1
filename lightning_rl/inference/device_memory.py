"""Memory that nobody uses any more goes back to the device: other processes have a use for it."""

import gc

import torch


def free_unused_memory() -> None:
    """Give what torch's allocator keeps for later back to the GPU; nothing on a CPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
