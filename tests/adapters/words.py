"""Calls whose tokens are words, so that a failing test prints sentences, and the tree that they form."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rl.inspect import draw
from lightning_rl.inspect.explain import explain
from lightning_rl.store.contract import Attempt, AttemptTrace, Rollout, RolloutConfig, RolloutTrace
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, VersionRange, to_span
from lightning_rl_adapters.rows import Row

_VOCABULARY: dict[str, int] = {}  # grows with what is said; a word keeps its id


def ids(text: str) -> list[int]:
    """One id per word."""
    return [_VOCABULARY.setdefault(word, len(_VOCABULARY) + 1) for word in text.split()]


def words(token_ids: Sequence[int]) -> str:
    """The inverse of `ids`."""
    known = list(_VOCABULARY)
    return " ".join(known[token_id - 1] for token_id in token_ids)


def say(number: int, asked: str, answered: str, *, after: int | None = None, **more: Any) -> Call:
    """Call `number` (from 1), continuing call `after`; `asked` is what it adds to the prompt."""
    said = ids(answered)
    given = {"model": "policy", "temperature": 1.0, "finish_reason": "stop"} | more
    return Call(
        call_id=f"c{number}",
        rollout_id="r",
        attempt_id="a1",
        number=number - 1,
        parent_id=None if after is None else f"c{after}",
        prompt_ids=ids(asked),
        response_ids=said,
        logprobs=[-1.0] * len(said),
        versions=[VersionRange(0, 0, len(said))] if said else [],
        **given,
    )


def trained(row: Row) -> str:
    """The row's words, those that are trained in brackets, and why it is left out."""
    pieces = " ".join(piece for piece, _ in draw.row_words(row, words))
    return f"{pieces} ({row.excluded})" if row.excluded else pieces


def attempt_of(
    calls: Sequence[Call], attempt_id: str = "a1", sequence: int = 1, *, status: Any = "succeeded",
    forks: Mapping[int, Mapping[str, Any]] | None = None,
) -> AttemptTrace:  # fmt: skip
    """An attempt that recorded these calls; `forks` are attributes of calls by their numbers from 1."""
    spans = [
        to_span(
            call,
            **{
                semconv.INPUT_MESSAGES: [{"role": "user", "content": words(call.prompt_ids)}],
                semconv.OUTPUT_MESSAGES: [{"role": "assistant", "content": words(call.response_ids)}],
                **(forks or {}).get(call.number + 1, {}),
            },
        )
        for call in calls
    ]
    attempt = Attempt(
        attempt_id=attempt_id, rollout_id="r", sequence=sequence, status=status, worker_id="w", lease_expires_at=0.0,
        started_at=0.0, reward=1.0 if status == "succeeded" else None,
    )  # fmt: skip
    return AttemptTrace(attempt=attempt, spans=spans, rewards=[])


def rollout_of(*attempts: AttemptTrace, counting: str | None = "a1", status: Any = "succeeded") -> RolloutTrace:
    """A rollout of these attempts."""
    rollout = Rollout(
        rollout_id="r", task={"question": "?"}, mode="train", status=status, group_id=None, agent=None,
        resources_id=None, config=RolloutConfig(), metadata={}, attempt_count=len(attempts), created_at=0.0,
        attempt_id=attempts[-1].attempt.attempt_id, counting_attempt_id=counting,
        reward=None if counting is None else 1.0,
    )  # fmt: skip
    return RolloutTrace(rollout=rollout, attempts=list(attempts))


def drawn(calls: Sequence[Call]) -> str:
    """The trees of these calls, for a failing test's message."""
    [attempt] = explain(rollout_of(attempt_of(calls))).attempts
    return "\n" + "\n".join(draw.trees(attempt.calls))
