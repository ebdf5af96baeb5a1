"""The conservation law: tokens received from engines = trained + excluded, by reason + pending.

The gateway counts what engines hand over; this account counts what training does with the rows that were cut from the
recorded spans. The two sides meet only here, so a token lost or doubled anywhere between stops the run.
"""

from collections import Counter


class ConservationError(RuntimeError):
    """Tokens were lost or doubled between engine and training: the run must not go on."""


class TokenAccount:
    """What became of one model's sampled tokens, cumulative over a run."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.trained = 0
        self.excluded: Counter[str] = Counter()

    def train(self, tokens: int) -> None:
        """Enter tokens that an update consumes."""
        self.trained += tokens

    def exclude(self, reason: str, tokens: int) -> None:
        """Enter tokens that no update will ever see."""
        if tokens:
            self.excluded[reason] += tokens

    def check(self, received: int, pending: int) -> dict[str, float]:
        """The account as metrics. Raises ConservationError where it does not balance."""
        entered = self.trained + sum(self.excluded.values())
        if received != entered + pending:
            reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(self.excluded.items()))
            raise ConservationError(
                f"model {self.model!r}: engines handed over {received} tokens, but {self.trained} trained + "
                f"{entered - self.trained} excluded ({reasons or 'none'}) + {pending} pending = {entered + pending}"
            )
        metrics = {"tokens/received": received, "tokens/trained": self.trained, "tokens/pending": pending}
        metrics |= {f"tokens/excluded/{reason}": n for reason, n in self.excluded.items()}
        return {name: float(value) for name, value in metrics.items()}
