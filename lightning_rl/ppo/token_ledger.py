"""The account of tokens, held against what gateways counted: checked after every step, whatever is in flight."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from lightning_rl.config.policies import named
from lightning_rl.ppo.batch import StepBatch
from lightning_rl.store.run_store import RunStore
from lightning_rl.trajectories.token_account import ConservationError, TokenAccount
from lightning_rl.trajectories.trace_views import why_excluded
from lightning_rl.trajectories.trajectory import Trajectory, trajectory_of
from lightning_rl_proxy.recording.ledger import AttemptTokens

_LATE_SECONDS = 30.0  # for a gateway that stood still to store what its calls came to
_AGAIN_SECONDS = 0.2


class TokenLedger:
    """An account with what it is held against: the tokens that gateways counted for the rollouts of this run, and those
    that agents' own spans told of.

    An attempt whose gateway is gone counts with what is recorded of it. Where such a gateway only stood still, it may
    record calls of an attempt that was superseded in the meantime, behind the reading of its rollout: these are read
    when they are stored, and excluded. Invariant: a rollout that was asked for is in flight until it is entered, once,
    as trained or excluded.
    """

    def __init__(self, account: TokenAccount, store: RunStore) -> None:
        self.account = account
        self._store = store
        self._pending: set[str] = set()  # rollouts that are asked for, and not entered yet
        self._ended: dict[str, Mapping[str, int]] = {}  # of these: what each attempt recorded
        self._entered: dict[str, Mapping[str, int]] = {}  # since the last check: what each attempt recorded
        self._checked: set[str] = set()  # entered before that

    def ask(self, rollout_ids: Iterable[str]) -> None:
        """Take note of rollouts that are asked for: their tokens are pending until they are entered."""
        self._pending.update(rollout_ids)

    def hold(self, trajectory: Trajectory) -> None:
        """Take note of a rollout that has ended, and is entered later: an attempt of it whose gateway is gone counts as
        pending with what it recorded."""
        if trajectory.rollout_id in self._pending:
            self._ended[trajectory.rollout_id] = trajectory.recorded_tokens

    def enter(self, batch: StepBatch) -> None:
        """Enter every token of a step's rollouts as trained or excluded."""
        for part in batch.parts:
            self._settle(part.trajectory)
            self.account.train(part.trained)
            for reasons in (part.trajectory.excluded, part.excluded):
                for reason, tokens in reasons.items():
                    self.account.exclude(reason, tokens)

    def exclude(self, trajectory: Trajectory, reason: str) -> None:
        """Enter all of a trajectory's tokens as excluded: by `reason`, where nothing excluded them before."""
        self._settle(trajectory)
        for parts in (trajectory.excluded, trajectory.left_out):
            for earlier, tokens in parts.items():
                self.account.exclude(earlier, tokens)
        self.account.exclude(reason, trajectory.sampled_tokens - sum(trajectory.left_out.values()))

    def check(self, in_flight: Collection[str] = ()) -> dict[str, float]:
        """The account as metrics.

        Raises ConservationError naming the rollouts whose records are not what engines handed over, and those that were
        asked for and are neither entered nor `in_flight`.
        """
        if forgotten := sorted(self._pending.difference(in_flight)):
            raise ConservationError(f"rollouts were neither trained nor excluded, and are not in flight: {forgotten}")
        counted = self._counted()
        wrong = self._receive(counted)
        pending = sum(self._handed_over(each) for each in counted.values() if each.rollout_id in self._pending)
        pending += sum(_of_others(recorded, counted) for recorded in self._ended.values())
        try:
            return self.account.check(pending)
        except ConservationError as error:
            error.add_note(_cause_of_loss(wrong))
            raise

    def _settle(self, trajectory: Trajectory) -> None:
        """A rollout is entered: its tokens are no longer pending. What was entered before is not received again."""
        self._pending.discard(trajectory.rollout_id)
        self._ended.pop(trajectory.rollout_id, None)
        if trajectory.rollout_id not in self._checked and trajectory.rollout_id not in self._entered:
            self._entered[trajectory.rollout_id] = trajectory.recorded_tokens
            self.account.receive_spans(trajectory.span_tokens)

    def _counted(self) -> Mapping[str, AttemptTokens]:
        """What gateways counted, once what attempts that do not count recorded late is entered."""
        until = time.monotonic() + _LATE_SECONDS
        while True:
            counted = self._store.tokens_of(sorted([*self._pending, *self._entered]))
            behind = {
                attempt_id: each.rollout_id
                for attempt_id, each in counted.items()
                if each.rollout_id in self._entered and self._unrecorded(attempt_id, each) > 0
            }
            if not behind or not self._read_late(behind, counted) or time.monotonic() > until:
                return counted
            time.sleep(_AGAIN_SECONDS)

    def _read_late(self, behind: Mapping[str, str], counted: Mapping[str, AttemptTokens]) -> bool:
        """Enter what is recorded by now of these attempts, but for those that count; whether more is to come."""
        more = False
        for rollout_id, trace in self._store.traces(sorted(set(behind.values()))).items():
            read = trajectory_of(trace, agent_failure=None, model=self.account.model)
            for each in trace.attempts:
                attempt_id = each.attempt.attempt_id
                reason = why_excluded(trace.rollout, each.attempt)
                if attempt_id not in behind or reason is None or attempt_id == trace.rollout.counting_attempt_id:
                    continue
                before = self._entered[rollout_id].get(attempt_id, 0)
                missing = self._unrecorded(attempt_id, counted[attempt_id])
                late = min(read.recorded_tokens[attempt_id] - before, missing)
                if late > 0:
                    self.account.exclude(reason, late)
                    self._entered[rollout_id] = {**self._entered[rollout_id], attempt_id: before + late}
                more = more or late < missing
        return more

    def _unrecorded(self, attempt_id: str, attempt: AttemptTokens) -> int:
        """Tokens that were handed over, and neither given up nor recorded when the rollout was read."""
        given_up = attempt.lost.get(self.account.model, 0)
        return self._handed_over(attempt) - given_up - self._entered[attempt.rollout_id].get(attempt_id, 0)

    def _receive(self, counted: Mapping[str, AttemptTokens]) -> list[str]:
        """Enter what engines handed over for the rollouts that were entered since the last check; those of which the
        records say otherwise."""
        lost = 0
        received = {rollout_id: _of_others(recorded, counted) for rollout_id, recorded in self._entered.items()}
        for each in counted.values():
            if each.rollout_id in received:
                given_up = each.lost.get(self.account.model, 0)
                received[each.rollout_id] += self._handed_over(each) - given_up
                lost += given_up
        self.account.received += sum(received.values()) + lost
        self.account.exclude("recording_lost", lost)
        wrong = [
            f"{rollout_id} (received {received[rollout_id]}, recorded {sum(recorded.values())})"
            for rollout_id, recorded in self._entered.items()
            if received[rollout_id] != sum(recorded.values())
        ]
        self._checked.update(self._entered)
        self._entered.clear()
        return wrong

    def _handed_over(self, attempt: AttemptTokens) -> int:
        return attempt.received.get(self.account.model, 0)


class RunLedger:
    """The ledgers of a run's policies, by their names."""

    def __init__(self, ledgers: Mapping[str, TokenLedger], store: RunStore) -> None:
        self._ledgers = ledgers
        self._store = store

    def ask(self, rollout_ids: Collection[str]) -> None:
        """See `TokenLedger.ask`."""
        for ledger in self._ledgers.values():
            ledger.ask(rollout_ids)

    def hold(self, trajectory: Trajectory) -> None:
        """See `TokenLedger.hold`, of the parts of all policies."""
        for name, ledger in self._ledgers.items():
            ledger.hold(trajectory.of(name))

    def exclude(self, trajectory: Trajectory, reason: str) -> None:
        """See `TokenLedger.exclude`, of the parts of all policies."""
        for name, ledger in self._ledgers.items():
            ledger.exclude(trajectory.of(name), reason)

    def check(self, in_flight: Collection[str] = ()) -> dict[str, float]:
        """See `TokenLedger.check`, also of all policies together; and how often the gateway began a conversation anew,
        by cause."""
        counters = self._store.state()["counters"]
        metrics = {f"gateway/{name}": float(n) for name, n in counters.items() if name.startswith("fork_")}
        together: Counter[str] = Counter()
        for policy, ledger in self._ledgers.items():
            account = ledger.check(in_flight)
            metrics |= named(policy, account)
            together.update(account)
        return metrics | dict(together)


def _of_others(recorded: Mapping[str, int], counted: Mapping[str, AttemptTokens]) -> int:
    """The recorded tokens of attempts that no gateway counts any more."""
    return sum(tokens for attempt_id, tokens in recorded.items() if attempt_id not in counted)


def _cause_of_loss(wrong: list[str]) -> str:
    """Which rollouts do not hold the tokens that gateways counted for them."""
    if wrong:
        return f"these rollouts do not hold what engines handed over for them: {', '.join(wrong)}"
    return "each rollout of this step holds what engines handed over for it: the loss is outside of them"
