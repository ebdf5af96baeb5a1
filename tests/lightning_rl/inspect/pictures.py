"""The conversations of `docs/concepts/forest.md`, and how they are drawn there."""

from typing import Any

from lightning_rl.inspect import draw
from lightning_rl.inspect.explain import explain
from lightning_rl.store.contract import AttemptTrace
from lightning_rl_adapters import forest, rows, semconv
from lightning_rl_adapters.call import calls_of
from tests.adapters.words import attempt_of, rollout_of, say, trained


def fork(cause: semconv.ForkCause, message: int, role: str, token: int) -> dict[str, Any]:
    """What the gateway records of a fork."""
    return {
        semconv.FORK_CAUSE: cause.value,
        semconv.FORK_AT: {"message": message, "role": role, "token": token},
    }


SUB_AGENT = attempt_of(
    [
        say(1, "Plan a trip.", "I ask the map."),
        say(2, "How far is Rome?", "Let me look.", agent="map"),
        say(3, "Hello?", "One moment.", after=1),
        say(4, "The table says 900 km.", "900 km.", after=2, agent="map"),
        say(5, "The map says 900 km.", "Then take the train.", after=3),
    ],
    forks={2: fork(semconv.ForkCause.NEW_CONVERSATION, 0, "user", 0)},
)
BEST_OF_N = attempt_of(
    [
        say(1, "Here is the question.", "Understood."),
        say(2, "What is 2+2?", "Five.", after=1),
        say(3, "What is 2+2?", "Four.", after=1),
        say(4, "What is 2+2?", "Four.", after=1),
        say(5, "Are you sure?", "Yes, four.", after=4),
    ]
)
COMPACTION = attempt_of(
    [
        say(1, "Fix the bug.", "Read the file."),
        say(2, "It has 900 lines.", "Find the loop.", after=1),
        say(3, "Fix the bug. Find the loop. It is at 7.", "Change line 7."),
        say(4, "It works.", "Done.", after=3, delivered=False),
    ],
    forks={3: fork(semconv.ForkCause.TRUNCATED_BY_CLIENT, 1, "assistant", 3)},
)


def picture(attempt: AttemptTrace) -> str:
    """The attempt as `lightning-rl explain` draws it, less its first line."""
    [view] = explain(rollout_of(attempt)).attempts
    _, *lines = draw.attempt(view)
    return "".join(f"{line.removeprefix('  ').rstrip()}\n" for line in lines)


def written(attempt: AttemptTrace) -> str:
    """The attempt's rows in words, as `Trainer.dev` prints them."""
    tree = forest.build(calls_of(attempt.spans))
    cut = rows.cut(tree, {})
    return "".join(f"row {number}  {trained(row)}\n" for number, row in enumerate(cut, start=1))


BLOCKS = [picture(SUB_AGENT), picture(BEST_OF_N), written(BEST_OF_N), picture(COMPACTION)]
