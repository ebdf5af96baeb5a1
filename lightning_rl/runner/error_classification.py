"""Whose fault an agent's exception is: its own, or that of the server it was given.

Invariant: only what names our server's address (or our own client's `Unreachable`), and an `InfrastructureError`,
counts as infrastructure, so an agent whose own tools cannot connect has failed by itself and is not retried.
"""

import traceback
from collections.abc import Iterator

from lightning_rl.errors import InfrastructureError
from lightning_rl.store.contract import Claim, ErrorInfo
from lightning_rl.store.errors import Unreachable
from lightning_rl_adapters.text import encodable

_AIOHTTPS = "aiohttp.client_exceptions.ClientError"
_ENDS = 16 * 1024  # characters that are kept of the beginning, and of the end


def error_info(error: BaseException, claim: Claim) -> ErrorInfo:
    """The exception as it is recorded: as text that can be encoded, of a long one its beginning and its end."""
    shown = traceback.TracebackException.from_exception(error)  # which comes through exceptions that cannot be shown
    return ErrorInfo(
        type=type(error).__name__,
        message=_shortened(str(shown)),
        traceback=_shortened("".join(shown.format())),
        infrastructure=is_infrastructure(error, claim),
    )


def _shortened(text: str) -> str:
    text = encodable(text)
    left_out = len(text) - 2 * _ENDS
    return text if left_out <= 0 else f"{text[:_ENDS]}\n[... {left_out} characters left out ...]\n{text[-_ENDS:]}"


def is_infrastructure(error: BaseException, claim: Claim) -> bool:
    """Whether the server of this claim could not be reached, or failed with a 5xx.

    The exceptions of HTTP clients (openai, anthropic, httpx, requests) carry the request, and a status where there was
    an answer; of aiohttp's the request is found where they were raised. A time-out is the agent's: it chose how long to
    wait.
    """
    servers = [resource["anthropic_base_url"] for resource in claim.resources.values() if "base_url" in resource]
    for cause in _causes(error):
        if isinstance(cause, Unreachable | InfrastructureError):
            return True
        url = _requested_url(cause)
        to_server = any(url.startswith(server) for server in servers)
        status = _status(cause)
        failed = status is None or status >= 500
        if to_server and failed and "Timeout" not in type(cause).__name__:
            return True
    return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and what is in groups (of an `asyncio.TaskGroup`, say)."""
    seen: set[int] = set()
    open_causes = [error]
    while open_causes:
        cause = open_causes.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            open_causes += cause.exceptions
        if (before := cause.__cause__ or cause.__context__) is not None:
            open_causes.append(before)


def _status(error: BaseException) -> int | None:
    """The status that was answered, where one was (openai and aiohttp keep it in the error, httpx and requests in the
    answer)."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            if isinstance(status := getattr(holder, name, None), int):
                return status
    return None


def _requested_url(error: BaseException) -> str:
    try:
        request = getattr(error, "request", None)
    except RuntimeError:  # httpx: this error belongs to no request
        return ""
    return str(getattr(request, "url", "")) or _url_of_aiohttp(error)


def _url_of_aiohttp(error: BaseException) -> str:
    if not any(f"{kind.__module__}.{kind.__name__}" == _AIOHTTPS for kind in type(error).__mro__):
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).startswith("aiohttp."):
            url = frame.f_locals.get("url") or getattr(frame.f_locals.get("self"), "url", "")
            if url:
                return str(url)
    return ""
