"""Which attempts got no answer here to a call: an agent that failed then is not to blame."""

_REMEMBERED = 65536  # attempts


class CallFailures:
    """What was answered with a 5xx and not asked again with success since, by attempt and body."""

    def __init__(self) -> None:
        self._failures: dict[tuple[str, str], dict[bytes, str]] = {}

    def of(self, name: tuple[str, str]) -> str | None:
        """What went wrong with a call of this attempt that was not answered later; None where nothing did."""
        failures = self._failures.get(name)
        return next(reversed(failures.values())) if failures else None

    def note(self, name: tuple[str, str], body_key: bytes, problem: str) -> None:
        """A call of the attempt failed; `body_key` stands for its request, b"" for calls that found no gateway."""
        self._failures.setdefault(name, {})[body_key] = problem
        if len(self._failures) > _REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def end(self, name: tuple[str, str], body_key: bytes) -> None:
        """The request was answered."""
        failures = self._failures.get(name)
        if failures is not None:
            failures.pop(body_key, None)
            if not failures:
                del self._failures[name]
