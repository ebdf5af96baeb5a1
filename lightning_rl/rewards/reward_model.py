"""A reward model: a classifier with one output, trained on preferences, that scores a conversation as a whole.

The conversation is written by the model's own chat template, as its makers show it, and the score is the output at its
last token, as `transformers` computes it.
"""

import functools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_rl.config import ConfigError
from lightning_rl.rewards import FinishedRollout
from lightning_rl.rewards.checked import RewardError

_KEY = "reward.reward_model.model_path"


class RewardModel:
    """A sequence classifier with one label, as a `GroupReward`: its output for each rollout's conversation.

    Args:
        path: its folder, or an id of the hub.
        dtype: `float32` or `bfloat16`, in which it is held and computed.
        device: `cpu`, `cuda`, or `auto`: a GPU where there is one. It is there while it scores, and waits in main
            memory.

    It is loaded when it is first asked; `fetch` takes it from the hub before. Raises ConfigError for a folder that
    holds no such model.
    """

    def __init__(self, path: str, *, dtype: str = "bfloat16", device: str = "auto") -> None:
        self.path, self._dtype, self._device_name = path, dtype, device
        self._lock = threading.Lock()
        self._placing, self._blocks = threading.Lock(), 0
        check(path)

    def fetch(self) -> None:
        """Take it from the hub, if need be, and read its tokenizer: what is wrong with it is told before any rollout.

        Raises ConfigError for a model that is no classifier with one output, or whose tokenizer has no chat template,
        and what the hub raises.
        """
        _check(self.path, json.loads((self._folder / "config.json").read_bytes()))
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"{_KEY}={self.path!r}: its tokenizer has no chat template, which writes the conversations that it "
                "scores: put the one it was trained with into its folder, as chat_template.jinja"
            )

    def __call__(self, rollouts: Sequence[FinishedRollout]) -> list[float]:
        """The scores of the rollouts, in their order; 0.0 for one that made no call.

        Raises:
            RewardError: naming the rollout, where its conversation cannot be written or is longer than the model takes.
        """
        import torch

        with self.placed(), self._lock, torch.inference_mode():
            return [self._score(self._model, rollout) if rollout.messages else 0.0 for rollout in rollouts]

    @contextmanager
    def placed(self) -> Iterator[None]:
        """The model is on its device within the block, and within others that go on: a step is scored in one."""
        with self._placing:
            if not self._blocks:
                self._model.to(self._device)
            self._blocks += 1
        try:
            yield
        finally:
            with self._placing:
                self._blocks -= 1
                if not self._blocks:
                    self._model.to("cpu")

    def _score(self, model: Any, rollout: FinishedRollout) -> float:
        import torch

        ids = self.token_ids(rollout)
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and len(ids) > longest:
            raise RewardError(
                f"rollout {rollout.rollout_id}: its conversation has {len(ids)} tokens, and the reward model "
                f"{self.path} takes {longest}: let rollouts be shorter, or take another model"
            )
        # One by one: in a batch, where an answer ends is found by the padding token, which answers may end with.
        return float(model(input_ids=torch.tensor([ids], device=self._device)).logits[0, 0])

    def token_ids(self, rollout: FinishedRollout) -> list[int]:
        """The conversation as the model is given it. Raises RewardError."""
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(rollout.messages, tokenize=False, add_generation_prompt=False)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RewardError(
                f"rollout {rollout.rollout_id}: the chat template of the reward model {self.path} cannot write its "
                f"conversation: {type(error).__name__}: {error}"
            ) from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @functools.cached_property
    def _folder(self) -> Path:
        from lightning_rl.inference.load import model_folder

        return model_folder(self.path)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder)

    @functools.cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForSequenceClassification

        self.fetch()
        dtype = getattr(torch, self._dtype)
        return AutoModelForSequenceClassification.from_pretrained(self._folder, dtype=dtype).eval()

    @functools.cached_property
    def _device(self) -> Any:
        from lightning_rl.inference.load import device_of

        return device_of(self._device_name)


def check(path: str) -> None:
    """Raises ConfigError where `path` is neither an id of the hub nor the folder of a classifier with one output."""
    from lightning_rl.inference.load import is_model_id

    file = Path(path) / "config.json"
    if file.is_file():
        _check(path, json.loads(file.read_bytes()))
    elif Path(path).is_dir() or not is_model_id(path):
        raise ConfigError(f"{_KEY}={path!r} is neither the folder of a model nor a model id (owner/name)")


def _check(path: str, config: dict[str, Any]) -> None:
    architectures = config.get("architectures") or []
    labels = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    if not any(name.endswith("ForSequenceClassification") for name in architectures) or labels != 1:
        raise ConfigError(
            f"{_KEY}={path!r} is no reward model: that is a ...ForSequenceClassification with one label, and this is "
            f"{', '.join(architectures) or 'a model that names no class'} with {labels}; a model that judges in words "
            "is given by reward.judge"
        )
