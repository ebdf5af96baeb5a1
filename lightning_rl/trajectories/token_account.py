"""The conservation law: tokens received from engines = trained + excluded, by reason + pending.

The gateway counts what engines hand over; this account counts what training does with the rows that were cut from the
recorded spans. The two sides meet only here, so a token lost or doubled anywhere between stops the run.
"""

from collections import Counter
from typing import Any

from lightning_rl.errors import Explained


class ConservationError(Explained, RuntimeError):
    """Tokens were lost or doubled between engine and training: the run must not go on."""


class TokenAccount:
    """What became of one model's sampled tokens, cumulative over a run.

    `from_spans` are those that agents' own spans told of: they are received when the trace of their rollout is read,
    since no gateway counted them.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.trained = 0
        self.excluded: Counter[str] = Counter()
        self.from_spans = 0

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
        return {"trained": self.trained, "excluded": dict(self.excluded), "from_spans": self.from_spans}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an account that was saved."""
        self.trained, self.excluded = state["trained"], Counter(state["excluded"])
        self.from_spans = state.get("from_spans", 0)  # accounts of earlier releases have none

    def check(self, received: int, pending: int) -> dict[str, float]:
        """The account as metrics; `received` and `pending` are the gateway's. Raises ConservationError where it does
        not balance."""
        entered = self.entered
        if received + self.from_spans != entered + pending:
            told = f" and agents' spans told of {self.from_spans}" if self.from_spans else ""
            reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(self.excluded.items()))
            raise ConservationError(
                f"model {self.model!r}: engines handed over {received} tokens{told}, but {self.trained} trained + "
                f"{entered - self.trained} excluded ({reasons or 'none'}) + {pending} pending = {entered + pending}"
            )
        received += self.from_spans
        metrics = {"tokens/received": received, "tokens/trained": self.trained, "tokens/pending": pending}
        if self.from_spans:
            metrics["tokens/from_spans"] = self.from_spans
        metrics |= {f"tokens/excluded/{reason}": n for reason, n in self.excluded.items()}
        return {name: float(value) for name, value in metrics.items()}
