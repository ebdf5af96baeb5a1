"""Loaded into a test's vLLM server: each of its steps waits while a file is there.

A tiny model's steps keep the engine's interpreter so busy that a pause, an abort or a count of what runs waits until
all is sampled. A large model's steps leave room, and so do these.
"""

import os
import time

from vllm.v1.sample.logits_processor import LogitsProcessor

_FILE = os.environ["SLOW_STEPS_FILE"]
_SECONDS = 0.02


class SlowSteps(LogitsProcessor):
    """Changes no logits."""

    def __init__(self, vllm_config, device, is_pin_memory) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False  # one that is would be left out of greedy steps

    def update_state(self, batch_update) -> None:
        pass

    def apply(self, logits):
        if os.path.exists(_FILE):
            time.sleep(_SECONDS)
        return logits
