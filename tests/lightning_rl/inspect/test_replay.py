"""Rollouts that were really recorded, run again without a model: through each door, and with an agent that changed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import lightning_rl as lrl
from lightning_rl.agents.agent import as_agent
from lightning_rl.cli import app
from lightning_rl.errors import Explained
from lightning_rl.inspect import recorded
from lightning_rl.inspect.replay import GatewaySetup, NotReplayable, Replay, replay
from lightning_rl.inspect.rollout_source import resources_of
from lightning_rl.store.contract import RolloutTrace
from tests.lightning_rl.inspect import replayed
from tests.lightning_rl.inspect.replayed import KINDS, every_way
from tests.proxy.engines.service import Service, running

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "examples" / "sql_agent" / "checkpoint"
TOKENS = GatewaySetup(tokenizer=CHECKPOINT, renderer="qwen3")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tutorial's model, one rollout of each kind."""
    folder = tmp_path_factory.mktemp("recorded")
    tasks = [{"kind": kind, "i": i} for i, kind in enumerate(KINDS)]
    lrl.Trainer(every_way, n_runners=4, run_dir=folder).fit(lrl.Baseline(CHECKPOINT, renderer="qwen3"), tasks)
    return folder


def again(run_dir: Path, kind: str, agent: Any = every_way, setting: GatewaySetup = TOKENS) -> Replay:
    trace, resources = read(run_dir, kind)
    return replay(trace, as_agent(agent), resources, setting)


def read(run_dir: Path, kind: str) -> tuple[RolloutTrace, dict[str, Any]]:
    with recorded.opened(run_dir) as connection:
        name = f"-{KINDS.index(kind)}-0.{(run_dir / 'run.id').read_text()}"
        trace = recorded.trace(connection, recorded.find(connection, name))
        return trace, resources_of(connection, trace.rollout.resources_id)


@pytest.mark.smoke
@pytest.mark.e2e
@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_gets_again_what_it_got_whichever_way_it_asks(run_dir: Path, kind: str) -> None:
    found = again(run_dir, kind)
    assert found.divergence is None
    assert found.agrees, found
    assert found.calls_replayed == {"chat": 2, "parallel": 5, "responses": 2, "silent": 0}.get(kind, 1)
    if kind == "fails":
        assert found.now is not None
        assert found.now.error == found.recorded.error == "KeyError: 'this agent has a bug'"
    if kind == "emits":
        assert found.now is not None
        assert found.now.rewards == {"polite": 0.5, "reward": 2.0}
        assert found.now.call_rewards == [("first", 0.25)]


@pytest.mark.e2e
def test_a_request_that_was_not_recorded_stops_it_with_the_first_difference(run_dir: Path) -> None:
    found = again(run_dir, "chat", replayed.changed)
    told = found.divergence
    assert not found.agrees
    assert told is not None
    assert (found.calls_replayed, found.calls_recorded, told.call) == (1, 2, 2)
    assert told.text is not None
    assert told.recorded_text is not None
    assert told.text.startswith(" then what")
    assert not told.recorded_text.startswith(" then")
    assert told.before is not None
    assert told.before.endswith("and")
    assert told.message == 2
    assert told.recorded_message == {"role": "user", "content": "and"}
    assert told.new_message == {"role": "user", "content": "and then what"}
    assert found.now is not None
    assert found.now.error is not None
    assert "this replay is over" in found.now.error


@pytest.mark.smoke
@pytest.mark.e2e
def test_a_call_more_and_a_call_less_do_not_agree(run_dir: Path) -> None:
    more, less = again(run_dir, "chat", replayed.asks_on), again(run_dir, "chat", replayed.asks_less)
    assert more.divergence is not None
    assert more.divergence.why.endswith("was asked 2 times, and the agent asks once more: what call 1 was asked")
    assert (less.divergence, less.calls_replayed, less.agrees) == (None, 1, False)


@pytest.mark.e2e
def test_an_agent_that_swallows_the_refusal_is_told_of_all_the_same(run_dir: Path) -> None:
    found = again(run_dir, "chat", replayed.swallows)
    assert found.divergence is not None
    assert found.divergence.message == 0
    assert found.divergence.new_message == {"role": "user", "content": "something else"}
    assert not found.agrees


@pytest.mark.e2e
def test_other_sampling_parameters_are_told_and_do_not_agree(run_dir: Path) -> None:
    found = again(run_dir, "chat", replayed.hotter)
    assert found.calls_replayed == 2
    assert found.other_sampling == {1: {"top_p": [1.0, 0.5]}}
    assert not found.agrees


@pytest.mark.e2e
def test_the_command_says_what_agrees_and_its_code_is_0_only_then(run_dir: Path) -> None:
    trace, _ = read(run_dir, "chat")
    rollout_id, agents = trace.rollout.rollout_id, ROOT / "tests/lightning_rl/inspect/replayed.py"

    def command(*words: str) -> Result:
        return CliRunner().invoke(app, ["replay", str(run_dir), rollout_id, *words], env={"COLUMNS": "200"})

    where = ["--tokenizer", str(CHECKPOINT), "--renderer", "qwen3"]
    good = command("--agent", f"{agents}:every_way", *where)
    assert good.exit_code == 0, good.output
    assert "2 of 2 replayed" in good.stdout
    assert good.stdout.endswith("All of it agrees.\n")
    bad = command("--agent", f"{agents}:changed", *where)
    assert bad.exit_code == 1
    assert "user: and then what" in bad.stdout
    assert bad.stdout.endswith("It does not agree.\n")
    assert bad.stderr == ""
    told = json.loads(command("--agent", f"{agents}:changed", *where, "--json").stdout)
    assert (told["agrees"], told["divergence"]["call"]) == (False, 2)
    nameless = command()
    assert isinstance(nameless.exception, Explained)
    assert "give --agent" in str(nameless.exception)
    kept = command("--agent", f"{agents}:every_way", "--renderer", "qwen3")
    assert kept.exit_code == 0, kept.output  # the run's folder has its tokenizer


# Services that tell of no tokens


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running() as service:
        service.tokens = False
        service.reply = lambda body: f"{len(body['messages'])} messages"
        yield service


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, service: Service) -> Path:
    folder = tmp_path_factory.mktemp("service")
    tasks = [{"kind": kind, "i": i} for i, kind in enumerate(KINDS)]
    tasks = [task if task["kind"] != "completions" else {"kind": "silent", "i": 0} for task in tasks]
    lrl.Trainer(every_way, n_runners=4, run_dir=folder).fit(lrl.Baseline("gpt", base_url=service.url), tasks)
    return folder


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["chat", "stream", "parallel", "responses", "messages", "fails"])
def test_a_services_answers_are_replayed_by_equal_messages(served: Path, service: Service, kind: str) -> None:
    asked = len(service.requests)
    found = again(served, kind, setting=GatewaySetup())
    assert found.agrees, found
    assert found.calls_replayed == {"chat": 2, "parallel": 5, "responses": 2}.get(kind, 1)
    assert len(service.requests) == asked


@pytest.mark.e2e
def test_other_messages_to_a_service_stop_it_too(served: Path) -> None:
    found = again(served, "chat", replayed.changed, GatewaySetup())
    assert found.divergence is not None
    assert (found.divergence.call, found.divergence.message) == (2, 2)
    assert found.divergence.recorded_message == {"role": "user", "content": "and"}


@pytest.mark.e2e
def test_what_cannot_be_replayed_is_refused_in_words(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(NotReplayable, match="name its folder with --tokenizer"):
        again(run_dir, "chat", setting=GatewaySetup())
    with pytest.raises(NotReplayable, match=r"holds no tokenizer\.json"):
        again(run_dir, "chat", setting=GatewaySetup(tokenizer=tmp_path))
