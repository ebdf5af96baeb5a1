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

    `received` counts those that engines handed over for rollouts that were entered. `from_spans` are those of them that
    agents' own spans told of: they are received when the trace of their rollout is read, since no gateway counted them.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.received = 0
        self.trained = 0
        self.excluded: Counter[str] = Counter()
        self.from_spans = 0

    def receive_spans(self, tokens: int) -> None:
        """Enter tokens that agents' own spans told of."""
        self.received += tokens
        self.from_spans += tokens

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
        return {
            "received": self.received,
            "trained": self.trained,
            "excluded": dict(self.excluded),
            "from_spans": self.from_spans,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an account that was saved."""
        self.trained, self.excluded = state["trained"], Counter(state["excluded"])
        self.received = state.get("received", self.entered)  # accounts of earlier releases have neither
        self.from_spans = state.get("from_spans", 0)

    def check(self, pending: int) -> dict[str, float]:
        """The account as metrics; `pending` tokens are of rollouts that were not entered.

        Raises ConservationError where it does not balance.
        """
        received, entered = self.received + pending, self.entered
        if received != entered + pending:
            note = f" ({self.from_spans} of them told of by agents' spans)" if self.from_spans else ""
            reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(self.excluded.items()))
            raise ConservationError(
                f"model {self.model!r}: engines handed over {received} tokens{note}, but {self.trained} trained + "
                f"{entered - self.trained} excluded ({reasons or 'none'}) + {pending} pending = {entered + pending}"
            )
        metrics = {"tokens/received": received, "tokens/trained": self.trained, "tokens/pending": pending}
        if self.from_spans:
            metrics["tokens/from_spans"] = self.from_spans
        metrics |= {f"tokens/excluded/{reason}": n for reason, n in self.excluded.items()}
        return {name: float(value) for name, value in metrics.items()}
