"""`lightning-rl plan` and the plan of `--dry-run`, as a person types them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_rl.cli import app
from tests.lightning_rl.memory.models import ONE_LAYER


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a config.json and nothing else."""
    ONE_LAYER.save_pretrained(tmp_path)
    return f"actor_rollout_ref.model.path={tmp_path}"


def test_a_plan_of_a_model_of_which_only_its_config_is_here(model: str) -> None:
    found = CliRunner().invoke(app, ["plan", "--gpu", "24", model])
    assert found.exit_code == 0, found.output
    assert "it fits as it is" in found.output
    assert "update of the policy" in found.output
    assert "tokens/s sampled" in found.output


@pytest.mark.long
def test_each_policy_has_a_plan(model: str) -> None:
    words = ["plan", "--gpu", "24", model, "policies.writer.train_every=1", "policies.judge.train_every=0"]
    said = CliRunner().invoke(app, words).output
    assert said.index("policy writer:") < said.index("it fits as it is") < said.index("policy judge:")
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).output)["policies"].keys() == {"writer", "judge"}


@pytest.mark.long
def test_a_plan_as_json_and_its_status(model: str) -> None:
    runner = CliRunner()
    fits = json.loads(runner.invoke(app, ["plan", "--gpus", "8x24", "--json", model]).output)
    assert fits["changes"] == {}
    assert fits["memory"] == 24 * 2**30
    low, high = fits["trained_tokens_per_second"]
    assert 0 < low < high
    small = runner.invoke(app, ["plan", "--gpu", "0.01", "--json", model])
    assert small.exit_code == 1
    assert json.loads(small.output)["as_given"]["problems"]
    assert json.loads(small.output)["fits"] is False


@pytest.mark.long
def test_a_plan_says_who_is_on_which_gpu_and_what_cannot_be(model: str) -> None:
    runner, rollout = CliRunner(), "actor_rollout_ref.rollout."
    words = ["plan", "--gpus", "2x24", model, f"{rollout}name=vllm"]
    assert "training on GPU 0, vLLM on GPU 1\n" in runner.invoke(app, [*words, f"{rollout}devices=apart"]).output
    shared = runner.invoke(app, [*words, "--json"])  # all of them train
    assert json.loads(shared.output)["gpus"] == {"trainer": [0, 1], "vllm": [[0]], "shared": True}
    both = runner.invoke(app, [*words, "trainer.devices=[0]", f"{rollout}devices=[0]"])
    assert both.exit_code == 1
    assert "both name GPU 0" in str(both.exception)


def test_gpus_are_named_where_there_are_none(model: str) -> None:
    found = CliRunner().invoke(app, ["plan", model])
    assert found.exit_code == 1
    assert "say which ones are meant" in str(found.exception)
