"""What a reward function sees of a rollout: the policy's last answer, and the conversation that led there."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lightning_rl.rewards.finished import finished_rollout
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call
from tests.adapters.test_conventions import recorded
from tests.adapters.words import attempt_of, rollout_of, say


def seen(calls: list[Call], model: str | None = "policy", said: dict[int, Any] | None = None, **of_rollout: Any) -> Any:
    """`said` are messages of calls, by number from 1, as answered."""
    forks = {number: {semconv.OUTPUT_MESSAGES: [message]} for number, message in (said or {}).items()}
    attempt = attempt_of(calls, forks=forks)
    rollout = msgspec.structs.replace(rollout_of(attempt).rollout, **of_rollout)
    return finished_rollout(rollout, attempt.spans, model)


def contents(rollout: Any) -> list[str]:
    return [message["content"] for message in rollout.messages]


def test_the_conversation_is_the_last_calls_path_from_its_root() -> None:
    calls = [say(1, "a", "b"), say(2, "c", "d", after=1), say(3, "e", "f", after=1), say(4, "g", "h", after=2)]
    rollout = seen(calls)
    assert (rollout.answer, contents(rollout)) == ("h", ["a", "b", "c", "d", "g", "h"])
    assert rollout.answer_ids == calls[-1].response_ids != []
    assert [message["role"] for message in rollout.messages] == ["user", "assistant"] * 3


def test_the_answer_that_arrived_last_counts_wherever_it_stands() -> None:
    rollout = seen([say(1, "a", "b"), say(2, "x", "y"), say(3, "c", "d", after=1)])
    assert (rollout.answer, contents(rollout)) == ("d", ["a", "b", "c", "d"])
    rollout = seen([say(1, "a", "b"), say(2, "c", "d", after=1), say(3, "x", "y")])
    assert (rollout.answer, contents(rollout)) == ("y", ["x", "y"])


def test_helpers_answers_do_not_count() -> None:
    calls = [say(1, "a", "b"), say(2, "x", "y", model="helper")]
    assert seen(calls).answer == "b"
    assert seen(calls, "helper").answer == "y"
    assert seen(calls, None).answer == "y"


def test_an_answer_that_the_agent_never_saw_does_not_count() -> None:
    assert seen([say(1, "a", "b"), say(2, "c", "d", after=1, delivered=False)]).answer == "b"


def test_a_rollout_without_calls_said_nothing() -> None:
    for calls in ([], [say(1, "a", "b", model="helper")], [say(1, "a", "b", delivered=False)]):
        rollout = seen(calls)
        assert (rollout.answer, rollout.messages, rollout.answer_ids) == ("", [], [])


def test_reasoning_and_tool_calls_are_no_answer() -> None:
    thought = {"role": "assistant", "content": "Four.", "reasoning_content": "2+2, so 4"}
    assert seen([say(1, "a", "b")], said={1: thought}).answer == "Four."
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert seen([say(1, "a", "b")], said={1: called}).answer == ""


def test_an_answer_in_parts_is_their_text() -> None:
    parts = [
        {"type": "text", "text": "Fo"},
        {"type": "image_url", "image_url": {"url": "u"}},
        {"type": "text", "text": "ur."},
    ]
    assert seen([say(1, "a", "b")], said={1: {"role": "assistant", "content": parts}}).answer == "Four."


def test_it_has_the_task_the_group_and_the_agents_rewards() -> None:
    rollout = seen([say(1, "a", "b")], group_id="g", rewards={"reward": 1.0, "format": 0.5})
    assert (rollout.rollout_id, rollout.group_id, rollout.task) == ("r", "g", {"question": "?"})
    assert rollout.rewards == {"reward": 1.0, "format": 0.5}
    assert seen([say(1, "a", "b")]).group_id == "r", "a rollout without a group is its own"


def test_of_an_agent_that_never_called_the_gateway_its_own_spans_are_read() -> None:
    attempt = attempt_of([])
    for name in ("gen_ai", "openllmetry_before_1_0", "openinference"):
        found = finished_rollout(rollout_of(attempt).rollout, recorded(name), "policy")
        assert (found.answer, contents(found)[:2]) == ("I add.", ["Add.", "1 + 2?"]), name
        assert finished_rollout(rollout_of(attempt).rollout, recorded(name), "other").messages == []


def test_of_an_agent_that_called_the_gateway_its_own_spans_count_nothing() -> None:
    attempt = attempt_of([say(1, "a", "b")])
    found = finished_rollout(rollout_of(attempt).rollout, [*attempt.spans, *recorded("gen_ai")], "policy")
    assert contents(found) == ["a", "b"]


def test_of_its_own_spans_the_first_answer_of_the_last_conversation_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def conversation(question: str, *answers: str) -> Any:
        said = [{"role": "assistant", "content": answer} for answer in answers]
        return SimpleNamespace(prompt=[{"role": "user", "content": question}], answers=said)

    both = [conversation("a", "b"), conversation("c", "d", "e")]
    monkeypatch.setattr("lightning_rl_adapters.conventions.conversations", lambda spans, model: both)
    assert contents(seen([])) == ["c", "d"]
