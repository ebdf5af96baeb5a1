"""Whether a server can do its work now, part by part: what it stores in, what it records in, who samples."""

from collections.abc import Mapping

OK = "ok"


def checks(
    *, started: bool, store_writable: bool, recording: str | None, engines: Mapping[str, str | None]
) -> dict[str, str]:
    """What each part says: `ok`, or what is wrong with it.

    `recording` and each of `engines` are None where nothing is wrong.
    """
    found = {
        "server": OK if started else "starting",
        "store": OK if store_writable else "cannot be written",
        "journal": recording or OK,
    }
    if not engines:
        return found | {"engines": "none is registered; use POST /api/v1/engines"}
    return found | {f"engine {name}": trouble or OK for name, trouble in engines.items()}
