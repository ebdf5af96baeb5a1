"""The account of tokens, held against what the gateway counted: checked after every step, whatever is in flight."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_rl.ppo.batch import StepBatch
from lightning_rl.store.client import HttpStore
from lightning_rl.trajectories.token_account import ConservationError, TokenAccount
from lightning_rl.trajectories.trajectory import Trajectory


class TokenLedger:
    """An account with what it is held against: the tokens that the gateway counted, as the store tells them, and those
    that agents' own spans told of.

    Invariant: what was sampled for a rollout, by this process or an earlier one, is pending until it is entered as
    trained or excluded.
    """

    def __init__(self, account: TokenAccount, store: HttpStore) -> None:
        self.account = account
        self._store = store
        entered = account.entered - account.from_spans  # of those that the gateway counted
        self._earlier = int(store.state()["tokens_earlier"].get(account.model, 0)) - entered
        self._in_flight: set[str] = set()

    def ask(self, rollout_ids: Iterable[str]) -> None:
        """Take note of rollouts that are asked for: their tokens are pending until they are entered."""
        self._in_flight.update(rollout_ids)

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

    def check(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """The account as metrics, and how often the gateway began a conversation anew, by cause.

        Raises ConservationError naming those of `trajectories` whose records are not what engines handed over.
        """
        state, sealed = self._store.unread(sorted(self._in_flight))
        pending = int(state["tokens_pending"]) + sealed + self._earlier
        forks = {f"gateway/{name}": float(n) for name, n in state["counters"].items() if name.startswith("fork_")}
        try:
            return forks | self.account.check(self._received(state), pending)
        except ConservationError as error:
            error.add_note(self._whose_tokens(trajectories))
            raise

    def _settle(self, trajectory: Trajectory) -> None:
        """A rollout is entered: its tokens, of this run and of earlier ones, are no longer pending."""
        self._in_flight.discard(trajectory.rollout_id)
        self._earlier -= trajectory.earlier_tokens
        self.account.from_spans += trajectory.span_tokens

    def _whose_tokens(self, trajectories: Sequence[Trajectory]) -> str:
        """Which rollouts do not hold the tokens that the gateway counted for them."""
        received = self._store.tokens_received([trajectory.rollout_id for trajectory in trajectories])
        recorded = {t.rollout_id: t.sampled_tokens + sum(t.excluded.values()) - t.span_tokens for t in trajectories}
        wrong = [
            f"{rollout_id} (received {received[rollout_id]}, recorded {tokens})"
            for rollout_id, tokens in recorded.items()
            if received.get(rollout_id, tokens) != tokens
        ]
        if wrong:
            return f"these rollouts do not hold what engines handed over for them: {', '.join(wrong)}"
        return "each rollout of this step holds what engines handed over for it: the loss is outside of them"

    def _received(self, state: Mapping[str, Any]) -> int:
        return int(state["models"][self.account.model]["tokens_received"])
