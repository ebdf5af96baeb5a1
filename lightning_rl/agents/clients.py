"""SDK clients whose connections are shared: one of each kind in a process; of asynchronous ones, in an event loop.

Making a client loads certificates, which costs more than a call. A client for one endpoint is a copy that shares the
connections, so closing it closes nothing.

A process that is forked for one rollout would make them anew, and with its first call what the SDK makes of its types.
So `warm_up` and `make_for_forked` do that once, before.
"""

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio
import openai

if TYPE_CHECKING:
    import anthropic

_UNUSED: Any = {"base_url": "http://unused.invalid/v1", "api_key": "unused"}  # every copy has its own
_of_process: dict[str, Any] = {}
_making = threading.RLock()
_of_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]]" = weakref.WeakKeyDictionary()
_of_next_loop: dict[str, Any] = {}  # made before it was there
_of_forked: dict[str, Any] = {}
_of_loop_of_forked: dict[str, Any] = {}


def http_client() -> Any:
    """The `httpx.Client` of the process, as the `openai` SDK sets one up."""
    return _in_process("http", lambda: _unclosable(openai.DefaultHttpxClient))


def async_http_client() -> Any:
    """The `httpx.AsyncClient` of the running event loop; outside of one, a new one."""
    return _in_loop("http", lambda: _unclosable(openai.DefaultAsyncHttpxClient))


def openai_client() -> openai.OpenAI:
    """A client without an endpoint: `with_options(base_url=..., api_key=...)` gives it one."""
    client: openai.OpenAI = _in_process("openai", lambda: openai.OpenAI(**_UNUSED, http_client=http_client()))
    return client


def async_openai_client() -> openai.AsyncOpenAI:
    """The same, of the running event loop; outside of one, a new one."""
    client: openai.AsyncOpenAI = _in_loop(
        "openai", lambda: openai.AsyncOpenAI(**_UNUSED, http_client=async_http_client())
    )
    return client


def anthropic_client() -> "anthropic.Anthropic":
    """As `openai_client`, of Anthropic's SDK, which must be installed."""
    import anthropic

    def make() -> anthropic.Anthropic:
        return anthropic.Anthropic(**_UNUSED, http_client=_unclosable(anthropic.DefaultHttpxClient))

    client: anthropic.Anthropic = _in_process("anthropic", make)
    return client


def async_anthropic_client() -> "anthropic.AsyncAnthropic":
    """As `async_openai_client`, of Anthropic's SDK, which must be installed."""
    import anthropic

    def make() -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**_UNUSED, http_client=_unclosable(anthropic.DefaultAsyncHttpxClient))

    client: anthropic.AsyncAnthropic = _in_loop("anthropic", make)
    return client


def make_for_forked() -> None:
    """Make the clients of each process that is forked from this one, which itself uses none of them: connections are
    not shared by processes. Those of Anthropic's SDK where it is loaded."""
    for of, openai_kind, anthropic_kind, http in (
        (_of_forked, "OpenAI", "Anthropic", "DefaultHttpxClient"),
        (_of_loop_of_forked, "AsyncOpenAI", "AsyncAnthropic", "DefaultAsyncHttpxClient"),
    ):
        of["http"] = _unclosable(getattr(openai, http))
        of["openai"] = getattr(openai, openai_kind)(**_UNUSED, http_client=of["http"])
        if (sdk := sys.modules.get("anthropic")) is not None:
            of["anthropic"] = getattr(sdk, anthropic_kind)(**_UNUSED, http_client=_unclosable(getattr(sdk, http)))


def warm_up() -> None:
    """Have `openai` make what it makes with its first call, by one with tools that is answered here.

    Before an agent's modules are loaded: they may record all calls.
    """
    httpx: Any = sys.modules[openai.DefaultHttpxClient.__mro__[1].__module__]  # of openai 2 httpx, of openai 3 httpx2
    function = {"name": "add", "arguments": "{}"}
    assistant_message: Any = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    messages: list[Any] = [
        {"role": "system", "content": "-"},
        {"role": "user", "content": "-"},
        assistant_message,
        {"role": "tool", "tool_call_id": "1", "content": "-"},
    ]
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    answer = {
        "id": "-",
        "object": "chat.completion",
        "created": 0,
        "model": "-",
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message": assistant_message}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    call: Any = {"model": "-", "messages": messages, "tools": [tool]}
    with openai.DefaultHttpxClient(transport=transport) as http:
        openai.OpenAI(**_UNUSED, http_client=http).chat.completions.create(**call)

    async def call_again() -> None:
        async with openai.DefaultAsyncHttpxClient(transport=transport) as http:
            await openai.AsyncOpenAI(**_UNUSED, http_client=http).chat.completions.create(**call)
        await anyio.sleep(0)  # what connections wait with, loaded when it is first used

    loop = asyncio.new_event_loop()  # not by asyncio.run, after which this thread has no current loop for the agent
    try:
        loop.run_until_complete(call_again())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def _unclosable(kind: Any) -> Any:
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


def _begin_anew() -> None:
    """A process that was forked shares no connections with its parent, and no lock that a thread there holds."""
    global _making, _of_process, _of_forked, _of_next_loop, _of_loop_of_forked
    _making = threading.RLock()
    _of_process, _of_forked = _of_forked, {}
    _of_next_loop, _of_loop_of_forked = _of_loop_of_forked, {}


if hasattr(os, "register_at_fork"):  # nobody forks on Windows
    os.register_at_fork(after_in_child=_begin_anew)


def _in_loop(name: str, make: Callable[[], Any]) -> Any:
    """Connections belong to the event loop that opened them, so each has its own client. Outside of any, as in a sync
    agent whose framework runs a loop for each call, it is one for the caller alone."""
    global _of_next_loop
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return make()
    with _making:
        if (own := _of_loops.get(loop)) is None:
            own = _of_loops[loop] = _of_next_loop
            _of_next_loop = {}
    if name not in own:
        own[name] = make()
    return own[name]
