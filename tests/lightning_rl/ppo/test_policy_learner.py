"""Policies of one run are rendered by one gateway, so they write chats alike."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import lightning_rl as lrl
from lightning_rl.config import ConfigError
from lightning_rl.inference.embedded import EmbeddedPolicy
from tests.lightning_rl.ppo.test_ppo import CHECKPOINT


def swap_two_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))


def write_chats_otherwise(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"renderer": "prime-qwen3"}))


@pytest.mark.parametrize(("change", "what"), [(swap_two_tokens, "tokenizer"), (write_chats_otherwise, "chat format")])
def test_models_that_write_chats_otherwise_are_refused_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], what: str
) -> None:
    other = shutil.copytree(CHECKPOINT, tmp_path / "other")
    change(other)
    monkeypatch.setattr(EmbeddedPolicy, "start", lambda _: pytest.fail("an engine starts"))
    algorithm = lrl.PPO(policies={"one": {}, "two": {"actor_rollout_ref": {"model": {"path": str(other)}}}})
    message = f"policies.two.actor_rollout_ref.model.path: its {what} is another one than that of policies.one"
    with pytest.raises(ConfigError, match=message):
        algorithm.open(tmp_path)
    algorithm.close()
