"""The account of tokens against what gateways counted: each rollout is entered once, and what is missing has a name."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from lightning_rl.ppo import token_ledger
from lightning_rl.ppo.batch import BatchRules
from lightning_rl.ppo.token_ledger import RunLedger, TokenLedger
from lightning_rl.store.contract import RolloutTrace
from lightning_rl.trajectories.token_account import ConservationError, TokenAccount
from lightning_rl.trajectories.trajectory import Trajectory, trajectory_of
from lightning_rl_proxy.recording.ledger import AttemptTokens
from tests.adapters.forests import make_call
from tests.lightning_rl.ppo.test_batch import build, rollout
from tests.lightning_rl.trajectories.test_trajectory import trace


class Counted:
    """What gateways say of attempts, by their ids; each rollout has the attempt of its name."""

    def __init__(self, **received: int) -> None:
        self.attempts = {name: AttemptTokens(rollout_id=name, received={"m": n}) for name, n in received.items()}
        self.stored: list[RolloutTrace] = []  # what each reading of a trace finds

    def tokens_of(self, rollout_ids: Sequence[str]) -> dict[str, AttemptTokens]:
        return {name: each for name, each in self.attempts.items() if each.rollout_id in rollout_ids}

    def traces(self, rollout_ids: Sequence[str]) -> dict[str, RolloutTrace]:
        return {name: self.stored.pop(0) for name in rollout_ids if self.stored}

    def state(self) -> dict[str, Any]:
        return {"counters": {"fork_edited_text": 2, "calls": 9}}


def sampled(name: str, tokens: int, *more: Any) -> Trajectory:
    """A rollout of so many sampled tokens, which its attempt has recorded."""
    found = rollout(name, make_call(0, None, response=tokens), *more)
    return replace(found, recorded_tokens={name: found.sampled_tokens})


def ledger(gateways: Any, *asked: str) -> TokenLedger:
    made = TokenLedger(TokenAccount("m"), gateways)
    made.ask(asked)
    return made


def test_tokens_are_pending_until_their_rollout_is_entered_and_received_once() -> None:
    books = ledger(Counted(a=3, b=4), "a", "b")
    assert books.check(["a", "b"]) == {"tokens/received": 7.0, "tokens/trained": 0.0, "tokens/pending": 7.0}
    books.enter(build([sampled("a", 3)], BatchRules()))
    one = {"tokens/received": 7.0, "tokens/trained": 3.0, "tokens/pending": 4.0}
    assert [books.check(["b"]), books.check(["b"])] == [one, one]
    books.exclude(sampled("b", 4), "stale")
    assert books.check() == {
        "tokens/received": 7.0, "tokens/trained": 3.0, "tokens/pending": 0.0, "tokens/excluded/stale": 4.0,
    }  # fmt: skip


def test_a_rollout_that_is_entered_twice_stops_the_run() -> None:
    books = ledger(Counted(a=3), "a")
    books.exclude(sampled("a", 3), "stale")
    books.check()
    books.exclude(sampled("a", 3), "stale")
    with pytest.raises(ConservationError, match="handed over 3 tokens, but 0 trained \\+ 6 excluded") as twice:
        books.check()
    assert "the loss is outside of them" in twice.value.__notes__[0]


def test_a_rollout_that_is_neither_entered_nor_in_flight_stops_the_run() -> None:
    with pytest.raises(ConservationError, match=r"neither trained nor excluded.*\['b'\]"):
        ledger(Counted(a=3, b=4), "a", "b").check(["a"])


def test_what_was_left_out_before_keeps_its_reason_and_is_excluded_once() -> None:
    books = ledger(Counted(a=7), "a")
    books.exclude(sampled("a", 3, make_call(1, 0, response=4, delivered=False)), "frozen")
    found = books.check()
    assert (found["tokens/excluded/undelivered"], found["tokens/excluded/frozen"]) == (4, 3)


def test_what_a_step_does_not_train_is_excluded_by_its_own_reason() -> None:
    books = ledger(Counted(a=9), "a")
    superseded = replace(sampled("a", 3, make_call(1, 0, response=4, delivered=False)), excluded={"superseded": 2})
    batch = build([replace(superseded, recorded_tokens={"a": 9})], BatchRules())
    batch.parts[0].keep([np.array([True, False, True])], "rejected")
    books.enter(batch)
    found = books.check()
    assert found["tokens/trained"] == 2
    assert {name.rpartition("/")[2]: n for name, n in found.items() if "excluded" in name} == {
        "superseded": 2, "undelivered": 4, "rejected": 1,
    }  # fmt: skip


def test_what_nothing_is_trained_of_is_excluded_by_its_own_reason_before_that_of_the_rollout() -> None:
    books = ledger(Counted(a=5), "a")
    books.exclude(replace(sampled("a", 3), excluded={"superseded": 2}, recorded_tokens={"a": 5}), "stale")
    found = books.check()
    assert (found["tokens/excluded/superseded"], found["tokens/excluded/stale"]) == (2, 3)


def test_tokens_that_agents_spans_tell_of_are_received_with_their_rollout() -> None:
    books = ledger(Counted(), "a")
    books.exclude(replace(sampled("a", 3), recorded_tokens={"a": 0}, span_tokens=3), "stale")
    found = books.check()
    assert (found["tokens/received"], found["tokens/from_spans"]) == (3, 3)


def test_one_that_nobody_asked_for_is_not_waited_for() -> None:
    books = ledger(Counted())
    books.hold(sampled("a", 3))
    assert books.check()["tokens/pending"] == 0


def test_records_that_were_given_up_are_excluded_by_name() -> None:
    gateways = Counted(a=5)
    gateways.attempts["a"] = replace(gateways.attempts["a"], lost={"m": 2, "another": 7})
    books = ledger(gateways, "a")
    books.exclude(sampled("a", 3), "stale")
    found = books.check()
    assert (found["tokens/received"], found["tokens/excluded/recording_lost"]) == (5, 2)


def test_an_attempt_whose_gateway_is_gone_counts_with_what_is_recorded_of_it() -> None:
    books = ledger(Counted(), "a")
    books.exclude(sampled("a", 3), "stale")
    assert books.check()["tokens/received"] == 3


def test_of_one_that_ended_and_waits_it_is_pending() -> None:
    books = ledger(Counted(b=4), "a", "b")
    books.hold(sampled("a", 3))
    books.hold(sampled("b", 4))
    assert books.check(["a", "b"])["tokens/pending"] == 7.0
    books.exclude(sampled("a", 3), "stale")
    told = books.check(["b"])
    assert (told["tokens/received"], told["tokens/pending"]) == (7.0, 4.0)


def test_a_rollout_whose_records_lack_tokens_is_named() -> None:
    books = ledger(Counted(a=3, b=5), "a", "b")
    for name in "ab":
        books.exclude(sampled(name, 3), "stale")
    with pytest.raises(ConservationError) as lost:
        books.check()
    assert lost.value.__notes__ == [
        "these rollouts do not hold what engines handed over for them: b (received 5, recorded 3)"
    ]


@pytest.mark.parametrize("stored", [[3, 5], [5]])
def test_what_a_superseded_attempt_records_behind_the_reading_of_its_rollout_is_excluded(
    stored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(first: int) -> RolloutTrace:
        return trace([make_call(0, None, response=first)], [make_call(0, None, response=4)], counting=1)

    monkeypatch.setattr(token_ledger, "_AGAIN_SECONDS", 0.0)
    gateways = Counted()
    gateways.attempts = {f"a{i}": AttemptTokens(rollout_id="r", received={"m": n}) for i, n in enumerate((5, 4))}
    gateways.stored = [read(first) for first in stored]
    books = ledger(gateways, "r")
    books.exclude(trajectory_of(read(3), agent_failure=None, model="m"), "stale")
    told = books.check()
    assert (told["tokens/received"], told["tokens/excluded/superseded"]) == (9.0, 5.0)
    assert gateways.stored == []


@pytest.mark.parametrize("mode", ["train", "val"])
@pytest.mark.parametrize("stored", [3, 5])
def test_what_the_attempt_that_counts_does_not_hold_is_waited_for_by_nobody(
    mode: Any, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(tokens: int) -> RolloutTrace:
        found = trace([make_call(0, None, response=tokens)], counting=0)
        return replace(found, rollout=replace(found.rollout, mode=mode))

    monkeypatch.setattr(token_ledger, "_AGAIN_SECONDS", 1e6)
    gateways = Counted()
    gateways.attempts = {"a0": AttemptTokens(rollout_id="r", received={"m": 5})}
    gateways.stored = [read(stored)]
    books = ledger(gateways, "r")
    books.exclude(trajectory_of(read(3), agent_failure=None, model="m"), "stale")
    with pytest.raises(ConservationError):
        books.check()


def test_the_policies_of_a_run_have_accounts_of_their_own_and_one_together() -> None:
    gateways: Any = Counted(a=3)
    books = {name: ledger(gateways) for name in ("p", "q")}
    books["q"].account.model = "another"
    run = RunLedger(books, gateways)
    run.ask(["a", "b"])
    gateways.attempts["b"] = AttemptTokens(rollout_id="b", received={"another": 5})
    held = {name: replace(sampled("a", 3), recorded_tokens={"gone": n}) for name, n in (("p", 1), ("q", 2))}
    run.hold(replace(held["p"], of_policies=held))
    waiting = run.check(["a", "b"])
    assert (waiting["p/tokens/pending"], waiting["q/tokens/pending"]) == (3 + 1, 5 + 2)
    mine, other = sampled("a", 3), replace(rollout("a"), recorded_tokens={"a": 0})
    run.exclude(replace(mine, of_policies={"p": mine, "q": other}), "stale")
    found = run.check(["b"])
    assert (found["p/tokens/received"], found["q/tokens/received"], found["tokens/received"]) == (3, 5, 8)
    assert {name: n for name, n in found.items() if name.startswith("gateway/")} == {"gateway/fork_edited_text": 2}
