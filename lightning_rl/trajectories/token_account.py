"""The conservation law: tokens received from engines = trained + excluded, by reason + pending.

Gateways count what engines hand over for the rollouts of a run; this account counts what training does with the rows
that were cut from the recorded spans. The two sides meet only here, so a token lost or doubled anywhere between stops
the run.
"""

from collections import Counter
from typing import Any

from lightning_rl.errors import Explained


class ConservationError(Explained, RuntimeError):
    """Tokens were lost or doubled between engine and training: the run must not go on."""


class TokenAccount:
    """What became of one model's sampled tokens, cumulative over a run.

    `received` counts those that engines handed over for rollouts that were entered.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.received = 0
        self.trained = 0
        self.excluded: Counter[str] = Counter()

    def train(self, tokens: int) -> None:
        """Enter tokens that an update consumes."""
        self.trained += tokens

    def exclude(self, reason: str, tokens: int) -> None:
        """Enter tokens that no update will ever see."""
        if tokens:
            self.excluded[reason] += tokens

    @property
    def entered(self) -> int:
        """All tokens whose end is known."""
        return self.trained + sum(self.excluded.values())

    def state_dict(self) -> dict[str, Any]:
        """The account, for a checkpoint."""
        return {"received": self.received, "trained": self.trained, "excluded": dict(self.excluded)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an account that was saved."""
        self.trained, self.excluded = state["trained"], Counter(state["excluded"])
        self.received = state["received"]

    def check(self, pending: int) -> dict[str, float]:
        """The account as metrics; `pending` tokens are of rollouts that were not entered.

        Raises ConservationError where it does not balance.
        """
        received, entered = self.received + pending, self.entered
        if received != entered + pending:
            reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(self.excluded.items()))
            raise ConservationError(
                f"model {self.model!r}: engines handed over {received} tokens, but {self.trained} trained + "
                f"{entered - self.trained} excluded ({reasons or 'none'}) + {pending} pending = {entered + pending}"
            )
        metrics = {"tokens/received": received, "tokens/trained": self.trained, "tokens/pending": pending}
        metrics |= {f"tokens/excluded/{reason}": n for reason, n in self.excluded.items()}
        return {name: float(value) for name, value in metrics.items()}
