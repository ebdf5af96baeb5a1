"""`Trainer.dev` prints rows as `explain` draws them, and with their words."""

from types import SimpleNamespace
from typing import Any

from lightning_rl.inspect.dev import describe
from lightning_rl.store.contract import AttemptTrace
from lightning_rl.trajectories.trajectory import trajectory_of
from lightning_rl_adapters import semconv
from tests.adapters.words import attempt_of, rollout_of, say, words
from tests.lightning_rl.inspect.pictures import BEST_OF_N

WORDS: Any = SimpleNamespace(decode=words)


def printed(attempt: AttemptTrace) -> list[str]:
    trace = rollout_of(attempt)
    return [line.plain for line in describe(trace, trajectory_of(trace, agent_failure=0.0), WORDS)]


def test_rows_of_a_fork_say_which_calls_they_hold_and_train() -> None:
    lines = printed(BEST_OF_N)
    rows = lines.index("  rows    3")
    assert lines[rows + 1 : rows + 4] == [
        "    row 1: 9 tokens, 2 to be trained, exact: true",
        "      calls [1] [2]",
        "      Here is the question.[Understood.]What is 2+2?[Five.]",
    ]
    assert "      calls 1 [4] [5]" in lines
    assert "    call 5, continues call 4: finish reason stop" in lines
    assert "    call 1: prompt 4 tokens, response 1 tokens, reward 1, exact: true" in lines
    assert "           user  Are you sure?" in lines


def test_a_conversation_of_one_line_prints_no_list_of_calls() -> None:
    lines = printed(attempt_of([say(1, "a", "b"), say(2, "c", "d", after=1)]))
    assert [line for line in lines if "calls" in line] == ["  calls   2"]
    assert lines[-1] == "      a[b]c[d]"


def test_a_call_that_the_agent_left_before_its_end_is_drawn() -> None:
    attempt = attempt_of([say(1, "a", "b", delivered=False)])
    del attempt.spans[0].attributes[semconv.OUTPUT_MESSAGES]
    lines = printed(attempt)
    assert lines[lines.index("           user  a") + 1] == "      no whole answer: the agent left before its end"
