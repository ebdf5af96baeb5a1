"""How orders to a server of vLLM or SGLang fail."""

from lightning_rl.errors import Explained


class Unreached(Explained, RuntimeError):
    """A server does not answer."""


class ServerRefused(Explained, RuntimeError):
    """A server answered with an error, of HTTP `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class WeightsRefused(Explained, RuntimeError):
    """A server did not take weights; the message says which and why."""


class ServerEnded(Explained, RuntimeError):
    """A server of the run's own has ended more often than it is started again; the message says why."""
