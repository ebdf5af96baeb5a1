"""Training over the same stored rollouts ends with the same weights, bit by bit, whether they are traced or not."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.training import checkpoint
from tests.lightning_rl.control_plane.test_otlp_export import Receiver, receiver  # noqa: F401 - a fixture
from tests.lightning_rl.ppo.agents import looks_up
from tests.lightning_rl.ppo.test_ppo_resume import assert_same, stored

CHECKPOINT = Path(__file__).parents[4] / "examples" / "sql_agent" / "checkpoint"
TASKS, STEPS = [0, 1, 2, 3], 2

pytestmark = pytest.mark.e2e


def train(run_dir: Path, **trace: Any) -> list[dict[str, float]]:
    config: dict[str, Any] = {
        "data": {"train_batch_size": 4, "max_response_length": 8},
        "actor_rollout_ref": {
            "model": {"path": str(CHECKPOINT)},
            "actor": {"optim": {"lr": 1e-3}},
            "rollout": {"n": 2, "renderer": "qwen3", "max_model_len": 128, "trace": trace},
        },
        "trainer": {"total_training_steps": STEPS, "logger": ["jsonl"], "resume_mode": "auto", "project_name": "p"},
    }
    lrl.Trainer(looks_up, n_runners=4, run_dir=run_dir).fit(lrl.PPO(config), TASKS)
    return read(run_dir / "metrics.jsonl")


@pytest.fixture(scope="module")
def untraced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("untraced")
    assert not [name for row in train(run_dir) for name in row if name.startswith("trace/")]
    return run_dir


def copy_recorded(run_dir: Path, other: Path) -> None:
    """What another run goes on from: the recorded rollouts, and the run's id, which ends their ids."""
    for name in ("store.db", "run.id"):
        shutil.copy(run_dir / name, other / name)


def assert_same_end(one: Path, other: Path) -> None:
    ends = [run_dir / "checkpoints" / f"step-{STEPS}" for run_dir in (one, other)]
    weights = [(end / "model.safetensors").read_bytes() for end in ends]
    assert weights[0] == weights[1] != (CHECKPOINT / "model.safetensors").read_bytes()
    states = [checkpoint.load_state(end) for end in ends]
    for state in states:
        state.pop("rng")  # of the process that samples too: how many numbers it drew depends on what was stored
    assert_same(*states)


@pytest.mark.long
def test_mlflow_shows_the_rollouts_and_changes_nothing(
    untraced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    copy_recorded(untraced, tmp_path)
    rows = train(tmp_path, backend="mlflow", token2text=True, max_samples_per_step_per_worker=3)
    assert stored(tmp_path) == stored(untraced)
    assert_same_end(untraced, tmp_path)
    assert rows[-1]["trace/left_out"] == 0
    page = (CHECKPOINT.parents[2] / "docs" / "metrics.md").read_text()
    assert all(f"`{name}`" in page for row in rows for name in row if name.startswith("trace/"))
    client: Any = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    traces = client.search_traces(locations=[client.get_experiment_by_name("p").experiment_id])
    groups = [trace.info.tags["lightning_rl.group_id"] for trace in traces]
    assert {group: groups.count(group) for group in groups} == dict.fromkeys(set(groups), 2)  # all of a task's
    assert len(groups) == STEPS * 3 * 2
    for trace in traces:
        names = {span.span_id: span.name for span in trace.data.spans}
        [tool] = trace.search_spans(name="look up")
        assert names[tool.parent_id] == "lightning_rl.call"
        assert tool.inputs == {"number": int(trace.info.tags["lightning_rl.group_id"].split("-")[-1].split(".")[0])}
        call = trace.search_spans(name="lightning_rl.call")[0]
        assert names[call.parent_id] == "lightning_rl.rollout"
        assert call.inputs["text"].endswith("<|im_start|>assistant\n")
        failed = tool.inputs == {"number": 3}
        assert (trace.info.state, bool(tool.events)) == (("ERROR", True) if failed else ("OK", False))


def test_an_otlp_endpoint_changes_nothing_even_where_it_takes_nothing(
    untraced: Path,
    tmp_path: Path,
    receiver: Receiver,  # noqa: F811
) -> None:
    receiver.status = 400
    copy_recorded(untraced, tmp_path)
    train(tmp_path, backend="otlp", otlp_endpoint=receiver.url)
    assert receiver.came.is_set()
    assert_same_end(untraced, tmp_path)
