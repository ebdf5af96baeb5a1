"""SDK clients whose connections are shared: one of each kind in a process; of asynchronous ones, in an event loop.

Making a client loads certificates, which costs more than a call. A client for one endpoint is a copy that shares the
connections, so closing it closes nothing.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import openai

if TYPE_CHECKING:
    import anthropic

_UNUSED: Any = {"base_url": "http://unused.invalid/v1", "api_key": "unused"}  # every copy has its own
_of_process: dict[str, Any] = {}
_making = threading.RLock()
_of_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]]" = weakref.WeakKeyDictionary()


def http_client() -> Any:
    """The `httpx.Client` of the process, as the `openai` SDK sets one up."""
    return _in_process("http", lambda: _kept(openai.DefaultHttpxClient))


def async_http_client() -> Any:
    """The `httpx.AsyncClient` of the running event loop. Raises RuntimeError outside of one."""
    return _in_loop("http", lambda: _kept(openai.DefaultAsyncHttpxClient))


def openai_client() -> openai.OpenAI:
    """A client without an endpoint: `with_options(base_url=..., api_key=...)` gives it one."""
    found: openai.OpenAI = _in_process("openai", lambda: openai.OpenAI(**_UNUSED, http_client=http_client()))
    return found


def async_openai_client() -> openai.AsyncOpenAI:
    """The same, of the running event loop. Raises RuntimeError outside of one."""
    found: openai.AsyncOpenAI = _in_loop(
        "openai", lambda: openai.AsyncOpenAI(**_UNUSED, http_client=async_http_client())
    )
    return found


def anthropic_client() -> "anthropic.Anthropic":
    """As `openai_client`, of Anthropic's SDK, which must be installed."""
    import anthropic

    def make() -> anthropic.Anthropic:
        return anthropic.Anthropic(**_UNUSED, http_client=_kept(anthropic.DefaultHttpxClient))

    found: anthropic.Anthropic = _in_process("anthropic", make)
    return found


def async_anthropic_client() -> "anthropic.AsyncAnthropic":
    """As `async_openai_client`, of Anthropic's SDK, which must be installed."""
    import anthropic

    def make() -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**_UNUSED, http_client=_kept(anthropic.DefaultAsyncHttpxClient))

    found: anthropic.AsyncAnthropic = _in_loop("anthropic", make)
    return found


def load() -> None:
    """Load what clients and their first calls need, so that processes forked from this one do not: half a second."""
    _ = openai_client().chat.completions  # openai loads what is behind each name when it is first used


def _kept(kind: Any) -> Any:
    """A client of that class which stays open when one of those that use it is closed."""

    class Kept(kind):  # type: ignore[misc]
        def close(self) -> None:
            pass

        async def aclose(self) -> None:
            pass

    return Kept()


def _in_process(name: str, make: Callable[[], Any]) -> Any:
    """Threads that need one at once wait for the first of them to make it: rollouts begin together."""
    if name not in _of_process:
        with _making:
            if name not in _of_process:
                _of_process[name] = make()
    return _of_process[name]


def _forget() -> None:
    """A process that was forked shares no connections with its parent, and no lock that a thread there holds."""
    global _making
    _making = threading.RLock()
    _of_process.clear()


os.register_at_fork(after_in_child=_forget)


def _in_loop(name: str, make: Callable[[], Any]) -> Any:
    """Connections belong to the event loop that opened them, so each has its own client."""
    own = _of_loops.setdefault(asyncio.get_running_loop(), {})
    if name not in own:
        own[name] = make()
    return own[name]
