"""Which calls are trained: those left out are context in their rows, and counted by name."""

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

import lightning_rl as lrl
from lightning_rl.config import ConfigError
from lightning_rl.store.contract import Attempt, AttemptTrace, Rollout, RolloutConfig, RolloutTrace
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trajectories.call_filter import selection
from lightning_rl.trajectories.trajectory import Trajectory, trajectory_of
from lightning_rl_adapters.call import to_span
from tests.adapters.forests import make_call


def trajectory(calls: list[Any], agents: str | None, function: Any = None, **limits: Any) -> Trajectory:
    """One rollout with these calls, of which `selection(agents, function)` are trained."""
    attempt = Attempt(
        attempt_id="a1", rollout_id="r", sequence=1, status="succeeded", worker_id="w", lease_expires_at=0, started_at=0
    )
    rollout = Rollout(
        rollout_id="r", task=None, mode="train", status="succeeded", group_id=None, agent=None, resources_id=None,
        config=RolloutConfig(), metadata={}, attempt_count=1, created_at=0.0, counting_attempt_id="a1", reward=1.0,
    )  # fmt: skip
    spans = [to_span(call) for call in calls]
    trace = RolloutTrace(rollout=rollout, attempts=[AttemptTrace(attempt=attempt, spans=spans, rewards=[])])
    return trajectory_of(trace, agent_failure=0.0, select=selection(agents, function), **limits)


def trained(found: Trajectory) -> set[str]:
    return {call_id for row in found.rows for call_id in row.call_ids if call_id is not None and row.excluded is None}


def named(number: int, parent: int | None, agent: str | None, response: int = 2) -> Any:
    return msgspec.structs.replace(make_call(number, parent, response=response), agent=agent)


def test_without_a_selection_every_call_is_trained() -> None:
    found = trajectory([named(0, None, None), named(1, 0, "judge")], None)
    assert (trained(found), found.left_out) == ({"c0", "c1"}, {})


def test_housekeeping_is_not_trained_unless_it_is_named() -> None:
    calls = [named(0, None, None), named(1, None, "housekeeping"), named(2, None, "writer.housekeeping")]
    for found in (trajectory(calls, None), trajectory(calls, None, lambda _: True)):
        assert (trained(found), found.left_out) == ({"c0"}, {"housekeeping": 4})
    assert trajectory(calls, "writer").left_out == {"housekeeping": 4, "not_selected": 2}
    assert trained(trajectory(calls, ".*")) == {"c0", "c1", "c2"}


def test_a_regex_matches_whole_names_of_agents() -> None:
    calls = [named(0, None, "write"), named(1, None, "rewrite"), named(2, None, "writer"), named(3, None, None)]
    found = trajectory(calls, "write|rewrite")
    assert trained(found) == {"c0", "c1"}
    assert found.left_out == {"not_selected": 4}
    assert [row.excluded for row in found.rows] == [None, None, "not_selected", "not_selected"]


def test_a_call_that_is_left_out_stays_as_context_of_those_that_continue_it() -> None:
    found = trajectory([named(0, None, "judge", response=3), named(1, 0, "write", response=2)], "write")
    [row] = found.rows
    assert sum(row.loss_mask) == 2
    assert row.excluded_calls == {"c0": "not_selected"}
    assert len(row.token_ids) == len(row.loss_mask) > 5


def test_a_function_decides_beside_the_regex() -> None:
    calls = [named(0, None, "write"), named(1, None, "write")]
    assert trained(trajectory(calls, None, lambda call: call.number == 1)) == {"c1"}
    assert trained(trajectory(calls, "judge", lambda call: call.number == 1)) == set()


def test_what_is_left_out_of_a_row_that_is_too_long_is_counted_once() -> None:
    found = trajectory([named(0, None, "judge", response=3), named(1, 0, "write", response=2)], "write", max_tokens=1)
    assert found.left_out == {"not_selected": 3}
    assert sum(sum(row.loss_mask) for row in found.rows if row.excluded == "overlong") == 2
    assert found.sampled_tokens == 5


def test_a_regex_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.train_agents '\(' is no regular expression"):
        lrl.PPO({"algorithm": {"train_agents": "("}})


@lrl.rollout
async def two_agents(task: int, llm: lrl.LLM) -> float:
    """A writer and a judge behind tagged URLs."""
    for name in ("writer", "judge"):
        tagged = llm.for_agent(name)
        async with openai.AsyncOpenAI(base_url=tagged.base_url, api_key=tagged.api_key) as client:
            chat: Any = [{"role": "user", "content": f"{name} {task}"}]
            await client.chat.completions.create(model=llm.model, messages=chat)
    return float(task % 2)


@pytest.mark.e2e
def test_only_the_writer_is_trained_and_the_account_balances(tmp_path: Path) -> None:
    config = {
        "data": {"train_batch_size": 2, "max_response_length": 8},
        "algorithm": {"train_agents": "writer"},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "trainer": {"logger": ["jsonl"]},
    }
    lrl.Trainer(two_agents, n_runners=4, run_dir=tmp_path).fit(lrl.PPO(config), [0, 1], [0])
    row = read(tmp_path / "metrics.jsonl")[-1]
    assert row["tokens/trained"] > 0
    assert row["tokens/excluded/not_selected"] > 0
    assert row["gateway/fork_new_conversation"] >= 4, "each rollout's second agent begins a conversation of its own"
    assert row["tokens/received"] == sum(
        value for name, value in row.items() if name == "tokens/trained" or name.startswith("tokens/excluded/")
    )
