"""A teacher that is told more than the policy was: what it is asked, what it says, and that nobody else is told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

import lightning_rl as lrl
from lightning_rl.config import ConfigError
from lightning_rl.ppo import policy_learner
from lightning_rl.ppo.batch import StepBatch
from lightning_rl.ppo.privileged import TaughtCall, messages_with_text
from lightning_rl.telemetry.metrics.jsonl import read as read_metrics
from lightning_rl_proxy.rendering.load import load_renderer
from tests.lightning_rl.ppo.agents import two_calls
from tests.lightning_rl.ppo.test_ppo import CHECKPOINT, config

SECRET = "xyzzy"
RENDERER = load_renderer(CHECKPOINT, "qwen3", "policy")


def settings(weights: str = "present", lr: float = 1e-4, **more: Any) -> Any:
    own = {
        "actor_rollout_ref": {"actor": {"optim": {"lr": lr}}},
        "distillation": {"enabled": True, "teacher_models": {"itself": {"weights": weights}}},
    }
    merged = OmegaConf.merge(config(val_before_train=False), own, more)
    found: Any = OmegaConf.to_container(merged)
    return found


def tells(call: TaughtCall) -> str | None:
    """Something to the first call of each rollout and something else to the second; nothing to those of task 3."""
    assert len(call.group) == 1
    assert call.group[0].rollout_id != call.rollout.rollout_id
    assert [len(one.calls) for one in (call.rollout, *call.group)] == [2, 2]
    if call.task == 3:
        return None
    return f"{SECRET} {call.task}" + (" again" if call.call.parent_id else "")


class _Seen:
    """The batches of a run, as its teachers have left them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[StepBatch] = []
        teach = policy_learner.teach

        def seen(batch: StepBatch, *rest: Any) -> Any:
            found = teach(batch, *rest)
            self.batches.append(batch)
            return found

        monkeypatch.setattr(policy_learner, "teach", seen)


def test_the_teacher_scores_the_sampled_tokens_behind_the_prompt_that_tells_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _Seen(monkeypatch)
    loss = {"loss_mode": "k1", "topk": 4}
    algorithm = lrl.PPO(settings(distillation={"distillation_loss": loss}), privileged=tells)
    lrl.Trainer(two_calls, n_runners=4, run_dir=tmp_path / "run").fit(algorithm, [0, 1, 2, 3])
    [batch] = seen.batches
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    checked = 0
    for part in batch.parts:
        task, spoken = part.trajectory.task, part.trajectory.spoken
        for sequence in part.sequences:
            assert sequence.teacher_log_probs is not None
            for call_id, where, _ in sequence.trained_by_call():
                said = sequence.teacher_log_probs[where]
                if task == 3:
                    assert np.isnan(said).all()
                    continue
                path = part.trajectory.forest.nodes[call_id].path()
                text = f"{SECRET} {task}" + (" again" if len(path) == 2 else "")
                ids = RENDERER.render(messages_with_text(spoken[path[0].call.call_id].messages, text), None)
                for node in path:
                    ids += node.call.prompt_ids if node is not path[0] else []
                    before, ids = ids, ids + node.call.response_ids
                assert SECRET in RENDERER.tokenizer.decode(ids)
                logits = model(torch.tensor([ids])).logits[0, len(before) - 1 : -1].float()
                expected = logits.log_softmax(-1)[torch.arange(len(ids) - len(before)), ids[len(before) :]]
                assert said == pytest.approx(expected.detach().numpy(), abs=1e-4)
                assert (said != sequence.rollout_log_probs[where]).any()
                checked += 1
    assert checked == 12
    [row] = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["distillation/untaught_calls"] == 4
    assert 0.5 < row["distillation/taught_share"] < 1
    assert row["tokens/received"] == row["tokens/trained"]
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(files) > 5
    assert not [file for file in files if SECRET.encode() in file.read_bytes()]
    for part in batch.parts:
        assert all(SECRET not in RENDERER.tokenizer.decode(s.token_ids.tolist()) for s in part.sequences)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("weights", "lora"),
    [("initial", 0), ("initial", 2), ("averaged", 0)],
)
def test_the_policy_as_its_own_teacher(tmp_path: Path, weights: str, lora: int) -> None:
    """What it is not told anything new by, it is as far from as it has moved; resumed, the average goes on."""
    changes = {"actor_rollout_ref": {"model": {"lora_rank": lora}}, "trainer": {"total_training_steps": 3}}
    changes["distillation"] = {"distillation_loss": {"loss_mode": "k2", "use_policy_gradient": False}}
    given = settings(weights, 0.02, **changes)
    lrl.Trainer(two_calls, n_runners=4, run_dir=tmp_path / "run").fit(lrl.PPO(given), [0, 1, 2, 3])
    first, *_, last = (row["distillation/abs_loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert first < 1e-6
    assert last > 1e-5


def averaged(folder: Path, steps: list[int], workers: int = 1) -> list[float]:
    """The losses of a run whose teacher is its average, stopped and resumed after some of the steps."""
    teacher = {"teacher_models": {"itself": {"weights": "averaged", "rate": 0.5}}}
    for total in steps:
        trainer = {"total_training_steps": total, "resume_mode": "auto", "n_gpus_per_node": workers}
        algorithm = lrl.PPO(settings("averaged", 0.01, trainer=trainer, distillation=teacher), privileged=tells)
        # One call at a time: in another batch a number is rounded otherwise, and now and then another token is sampled.
        lrl.Trainer(two_calls, n_runners=1, run_dir=folder).fit(algorithm, [0, 1, 2, 3])
    return [row["distillation/loss"] for row in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.e2e
def test_an_averaged_teacher_is_kept_in_checkpoints(tmp_path: Path) -> None:
    whole = averaged(tmp_path / "whole", [4])
    assert len(set(whole)) == 4
    assert averaged(tmp_path / "parts", [2, 4]) == whole


def test_functions_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match="a privileged function is told to a teacher, and there is none"):
        lrl.PPO(config(), privileged=tells)
    with pytest.raises(ConfigError, match=r"distillation\.privileged and PPO\(privileged"):
        lrl.PPO(settings(distillation={"privileged": f"{__name__}:tells"}), privileged=tells)
    with pytest.raises(ConfigError, match="weights=averaged is of whole models, and an adapter is trained"):
        lrl.PPO(settings("averaged", actor_rollout_ref={"model": {"lora_rank": 2}}))
    with pytest.raises(ConfigError, match="weights=present is the policy itself, which teaches nothing"):
        lrl.PPO(settings("present"))
    with pytest.raises(ConfigError, match="has no 'telling'"):
        lrl.PPO(settings(distillation={"privileged": f"{__name__}:telling"}))
    assert lrl.PPO(settings(distillation={"privileged": f"{__name__}:tells"})).rules.privileged is tells


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("ab ", max_size=4)), max_size=4))
def test_the_text_stands_in_the_first_user_message(messages: list[tuple[str, str]]) -> None:
    before = [{"role": role, "content": content} for role, content in messages]
    told = messages_with_text(before, "TEXT")
    [where] = [index for index, message in enumerate(told) if "TEXT" in message["content"]]
    assert told[where]["role"] == "user"
    assert all(message["role"] != "user" for message in told[:where])
    assert [message["content"].replace("\n\nTEXT", "").replace("TEXT", "") for message in told][: len(before)] == [
        message["content"] for message in before
    ]
