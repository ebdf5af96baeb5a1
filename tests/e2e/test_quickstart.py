"""The quickstart as a newcomer runs it, for a fixed number of steps: the agent learns, and what it leaves is true."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import calls_of

STEPS = 16

pytestmark = [pytest.mark.e2e, pytest.mark.smoke]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of one finished run, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    command = [sys.executable, "-m", "lightning_rl", "quickstart", "--steps", str(STEPS), "--run-dir", "run"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=folder, env=offline, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run", done.stdout


@pytest.fixture(scope="module")
def metrics(run: tuple[Path, str]) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run[0] / "metrics.jsonl").read_text().splitlines()]


def all_rollouts(store: SqlStore) -> list[tuple[str, str]]:
    """The id and mode of every rollout of a store."""
    found, cursor = [], None
    while True:
        rollouts, cursor = store.page(cursor=cursor, limit=1000)
        found += [(rollout.rollout_id, rollout.mode) for rollout in rollouts]
        if cursor is None:
            return found


def test_the_agent_learns(metrics: list[dict[str, float]]) -> None:
    first, last = (row["val/reward"] for row in (metrics[0], metrics[-1]))
    assert 0.3 < first < 0.6
    assert last > first + 0.15
    sampled = [row["critic/rewards/mean"] for row in metrics if "critic/rewards/mean" in row]
    assert sum(sampled[-5:]) / 5 > sum(sampled[:5]) / 5 + 0.1


def test_sampler_and_trainer_agree(metrics: list[dict[str, float]]) -> None:
    assert metrics[1]["training/rollout_probs_diff_max"] < 5e-5  # transformers' own float32 rounding is up to 2e-5


def test_every_token_of_the_store_is_in_the_account(run: tuple[Path, str], metrics: list[dict[str, float]]) -> None:
    store = SqlStore(f"sqlite:///{run[0] / 'store.db'}")
    tokens: Counter[str] = Counter()
    for rollout_id, mode in all_rollouts(store):
        for attempt in store.traces([rollout_id])[rollout_id].attempts:
            for call in calls_of(attempt.spans):
                tokens[mode] += len(call.response_ids)
                assert call.logprobs is not None
                assert all(math.isfinite(p) and p <= 1e-6 for p in call.logprobs)
    last = metrics[-1]
    assert last["tokens/received"] == sum(tokens.values())
    assert last["tokens/trained"] == tokens["train"]
    assert last["tokens/excluded/validation"] == tokens["val"]


def test_calls_carry_the_version_that_sampled_them(run: tuple[Path, str]) -> None:
    store = SqlStore(f"sqlite:///{run[0] / 'store.db'}")
    for rollout_id, mode in all_rollouts(store):
        if mode == "train":
            step = int(rollout_id.split("-")[2])
            for attempt in store.traces([rollout_id])[rollout_id].attempts:
                for call in calls_of(attempt.spans):
                    assert set(call.policy_versions()) <= {step - 1}


def test_the_checkpoint_is_the_trained_model(run: tuple[Path, str]) -> None:
    folder = run[0] / "checkpoints" / f"step-{STEPS}"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) <= model.config.vocab_size
    store = SqlStore(f"sqlite:///{run[0] / 'store.db'}")
    group = f"val-0-{STEPS}-0.{(run[0] / 'run.id').read_text()}"
    [trace] = store.traces([r.rollout_id for r in store.page(group_id=group)[0]]).values()
    call = calls_of(trace.attempts[0].spans)[0]
    ids = torch.tensor([call.prompt_ids + call.response_ids])
    with torch.no_grad():
        log_probs = model(ids).logits[0].log_softmax(-1)
    n = len(call.prompt_ids)
    found = [log_probs[n - 1 + i, token].item() for i, token in enumerate(call.response_ids)]
    assert found == pytest.approx(call.logprobs, abs=1e-4)


def test_what_is_printed_is_what_was_recorded(run: tuple[Path, str], metrics: list[dict[str, float]]) -> None:
    folder, printed = run
    assert f"step {STEPS}/{STEPS}" in printed
    assert f"{metrics[0]['val/reward']:.3f} -> {metrics[-1]['val/reward']:.3f} in {STEPS} steps" in printed
    assert f"{int(metrics[-1]['tokens/received'])} tokens came from the engine" in printed
    assert "before: reward 0" in printed
    assert "after: reward 1" in printed
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_conversations_are_in_the_store_as_messages(run: tuple[Path, str]) -> None:
    store = SqlStore(f"sqlite:///{run[0] / 'store.db'}")
    group = f"val-0-0-0.{(run[0] / 'run.id').read_text()}"
    [trace] = store.traces([rollout.rollout_id for rollout in store.page(group_id=group)[0]]).values()
    first = trace.attempts[0].spans[0].attributes
    assert first[semconv.INPUT_MESSAGES][0]["role"] == "user"
    assert first[semconv.OUTPUT_MESSAGES][0]["role"] == "assistant"


def test_keys_are_private(run: tuple[Path, str]) -> None:
    assert (run[0] / "admin.key").stat().st_mode & 0o077 == 0
