"""PPO on calls that agents' own spans tell of: engine beside the gateway, OTLP, rows, and an account that closes."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lightning_rl as lrl
from lightning_rl.cli import app
from lightning_rl.config import ConfigError
from lightning_rl.ppo.rollout_correction import SamplerMismatch
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trajectories import step_record
from tests.lightning_rl.ppo.span_agents import ENGINE, asks_both, asks_the_engine
from tests.lightning_rl.ppo.test_ppo import config

pytestmark = pytest.mark.e2e


class TellsItsEngine(lrl.PPO):
    """Its agents know where the engine is, as those of a server of one's own do."""

    def open(self, run_dir: Path) -> Any:
        endpoint = super().open(run_dir)
        self.environment.setenv(ENGINE, endpoint.engines[0]["url"])
        return endpoint


def trained(
    tmp_path: Path, environment: pytest.MonkeyPatch, agent: Any, *, spans: bool = True, val: Any = None, **more: Any
) -> tuple[list[dict[str, float]], list[step_record.StepRecord]]:
    algorithm = TellsItsEngine(config(**more) | {"algorithm": {"train_spans": spans}})
    algorithm.environment = environment
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3], val_dataset=val)
    return read(tmp_path / "metrics.jsonl"), list(step_record.read_all(tmp_path))


@pytest.mark.smoke
def test_an_agent_that_never_called_the_gateway_is_trained_from_its_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, steps = trained(tmp_path, monkeypatch, asks_the_engine, val=[4], total_training_steps=2)
    last = rows[-1]
    calls = [call for step in steps for rollout in step.rollouts for call in rollout.calls.values()]
    assert len(calls) == 2 * 8 * 2
    assert last["tokens/trained"] == sum(call.trained_tokens for call in calls) > 0
    # What no gateway counted is received as its spans are read: training's, and validation's.
    assert last["tokens/from_spans"] == last["tokens/received"]
    excluded = sum(value for name, value in last.items() if name.startswith("tokens/excluded/"))
    assert last["tokens/received"] == last["tokens/trained"] + excluded + last["tokens/pending"]
    assert last["tokens/excluded/validation"] > 0
    assert last["rollouts/rows"] == 8  # the second turn continues the first
    shown = CliRunner().invoke(app, ["explain", steps[0].rollouts[0].rollout_id, "--run-dir", str(tmp_path)])
    assert shown.output.count("8 tokens trained") == 2
    assert "row 1: 39 tokens, 16 to be trained, exact: true" in shown.output
    assert max(row.get("actor/grad_norm", 0.0) for row in rows) > 0


def test_a_call_that_gateway_and_span_tell_of_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [row], [step] = trained(tmp_path, monkeypatch, asks_both)
    assert [len(rollout.calls) for rollout in step.rollouts] == [2] * 8
    beside = sum(list(rollout.calls.values())[1].trained_tokens for rollout in step.rollouts)
    assert row["tokens/from_spans"] == beside
    assert row["tokens/received"] == row["tokens/trained"] > beside > 0


@pytest.mark.long
def test_the_account_of_a_resumed_run_closes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"resume_mode": "auto", "save_freq": 1}
    [first], _ = trained(tmp_path, monkeypatch, asks_both, total_training_steps=1, **more)
    rows, steps = trained(tmp_path, monkeypatch, asks_both, total_training_steps=2, **more)
    assert [step.step for step in steps] == [1, 2]
    last = rows[-1]
    assert last["tokens/from_spans"] > first["tokens/from_spans"] > 0
    assert last["tokens/received"] == last["tokens/trained"] > first["tokens/trained"]


@pytest.mark.long
def test_without_the_key_spans_train_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [row], [step] = trained(tmp_path, monkeypatch, asks_both, spans=False)
    assert [len(rollout.calls) for rollout in step.rollouts] == [1] * 8
    assert "tokens/from_spans" not in row


def test_ids_that_the_policy_did_not_sample_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongEngine(TellsItsEngine):
        def open(self, run_dir: Path) -> Any:
            import torch

            endpoint = super().open(run_dir)
            weights = {name: w + 0.05 * torch.randn_like(w) for name, w in self.models.model.named_parameters()}
            self.policy.update_weights(weights, 0)
            return endpoint

    algorithm = WrongEngine(config() | {"algorithm": {"train_spans": True}})
    algorithm.environment = monkeypatch
    with pytest.raises(SamplerMismatch, match=r"on the first batch the log probabilities of sampler .* are up to"):
        lrl.Trainer(asks_the_engine, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])


def test_a_schedule_that_bounds_the_age_of_tokens_refuses_spans() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.train_spans=true .* set trainer\.schedule=sync"):
        lrl.PPO(config(schedule="async") | {"algorithm": {"train_spans": True}})
