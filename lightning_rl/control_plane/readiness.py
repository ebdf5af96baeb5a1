"""Whether a server can do its work now, part by part: what it stores in, what it records in, who samples."""

from collections.abc import Mapping

OK = "ok"
_ENGINE = "engine "


def checks(
    *, started: bool, store_writable: bool, recording: str | None, engines: Mapping[str, str | None]
) -> dict[str, str]:
    """What each part says: `ok`, or what is wrong with it.

    `recording` and each of `engines` are None where nothing is wrong.
    """
    states = {
        "server": OK if started else "starting",
        "store": OK if store_writable else "cannot be written, or does not answer",
        "journal": recording or OK,
    }
    if not engines:
        return states | {"engines": "none is registered; use POST /api/v1/engines"}
    return states | {f"{_ENGINE}{name}": trouble or OK for name, trouble in engines.items()}


def is_ready(states: Mapping[str, str]) -> bool:
    """Whether the server can do its work: all parts are well, but for engines whose model has another one."""
    models: dict[str, bool] = {}
    for name, state in states.items():
        if name.startswith(_ENGINE):  # `engine MODEL N`; a chat backend has no number
            model, _, number = name.removeprefix(_ENGINE).rpartition(" ")
            key = model if model and number.isdecimal() else name
            models[key] = models.get(key, False) or state == OK
        elif state != OK:
            return False
    return all(models.values())
