"""A logits processor of vLLM: the n-th token of a request is the n-th of the script that came with it.

vLLM loads it in its own processes (`--logits-processors forced_tokens:ForcedTokens`, this folder on PYTHONPATH). The
script is `extra_args["script"]` of the request's sampling parameters; a request without one is sampled as ever, and so
is what comes behind a script's end. Raw logprobs are of the logits before this, and stay the model's own.
"""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class ForcedTokens(LogitsProcessor):
    """Lets one token of the vocabulary be, for each row of the batch that has a script."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}  # script, and what was sampled so far, which grows

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        script = _script(sampling_params)
        if script is not None and not (script and all(isinstance(token, int) for token in script)):
            raise ValueError(f"extra_args['script'] is no list of token ids: {script!r}")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (script, sampled) in self._rows.items():
            if len(sampled) < len(script):
                logits[row] = float("-inf")
                logits[row, script[len(sampled)]] = 0.0
        return logits


def _script(params: SamplingParams) -> list[int] | None:
    return (params.extra_args or {}).get("script")


def _state(params: SamplingParams, _: list[int] | None, sampled: list[int]) -> tuple[list[int], list[int]] | None:
    script = _script(params)
    return None if script is None else (script, sampled)
