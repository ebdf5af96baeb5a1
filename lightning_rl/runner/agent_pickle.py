"""An agent as bytes for the processes that run it: cloudpickle, and what agents hold that it cannot send.

In a script or a notebook an agent travels by value, with the globals that it uses. SDK clients among them are made anew
where they arrive, with connections of their own, and functions behind `functools.cache` begin with an empty cache.
What a library only compares by identity, as LangGraph its `MISSING`, arrives as that library's own there.
"""

import functools
import importlib
import inspect
import io
import pickle
import sys
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

from lightning_rl.errors import Explained

_CLIENTS = frozenset({"OpenAI", "AsyncOpenAI", "Anthropic", "AsyncAnthropic"})
_OPTIONS = ("api_key", "auth_token", "organization", "project", "timeout", "max_retries")


class AgentNotPicklable(Explained, TypeError):
    """An agent holds something that cannot be sent to another process."""


def pickled(agent: Any) -> bytes:
    """The agent as bytes that `pickle.loads` reads in another process. Raises AgentNotPicklable."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(agent)
    except (TypeError, ValueError, RuntimeError, AttributeError, pickle.PicklingError) as error:
        raise AgentNotPicklable(
            f"the agent cannot be sent to the processes that run it: {error}. It uses something that stays in this "
            "process, such as a connection, a lock or an open file: make it within the agent, or in a function with "
            "@functools.cache that the agent calls (but a client of the model in each rollout, whose URL it calls by)"
        ) from error
    return buffer.getvalue()


def _code_in_its_file(code: CodeType) -> tuple[Any, ...]:
    """As cloudpickle's, with the file that the code is from, so that an agent's traceback shows its lines."""
    kind, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return kind, tuple(code.co_filename if each == "<dynamic-code>" else each for each in arguments)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _code_in_its_file}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, functools._lru_cache_wrapper) and _travels_by_value(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        kind = type(obj)
        if kind.__name__ in _CLIENTS and kind.__module__.partition(".")[0] in ("openai", "anthropic"):
            return _client, (kind, _options(obj))
        if (place := _place_of_sentinel(obj)) is not None:
            return _at, place
        return super().reducer_override(obj)


def _place_of_sentinel(obj: Any) -> tuple[str, str] | None:
    """The module and the name there of an object without state that a module holds: only its identity means anything.
    None for anything else, and for what an agent's script holds, which travels by value."""
    kind = type(obj)
    if kind is object:
        modules = [name for name in sys.modules if name != "__main__"]
    elif getattr(obj, "__dict__", None) == {} and kind.__module__ not in ("builtins", "__main__"):
        modules = [kind.__module__]
    else:
        return None
    for module in modules:
        for name, value in list(getattr(sys.modules.get(module), "__dict__", {}).items()):
            if value is obj:
                return module, name
    return None


def _at(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _travels_by_value(function: Any) -> bool:
    """Whether another process cannot import it by its name."""
    return function.__module__ == "__main__" or "<locals>" in function.__qualname__


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _options(client: Any) -> dict[str, Any]:
    """What a client was made with. Raises PicklingError for an HTTP client of the user's own, which is not known."""
    if not type(client._client).__module__.startswith(type(client).__module__.partition(".")[0]):
        raise pickle.PicklingError(f"a module-level {type(client).__name__} with an http_client of its own")
    parameters = inspect.signature(type(client)).parameters
    options = {name: getattr(client, name, None) for name in _OPTIONS if name in parameters}
    return {
        **{name: value for name, value in options.items() if value is not None},
        "base_url": str(client.base_url),
        "default_headers": dict(client._custom_headers),
        "default_query": dict(client._custom_query),
    }


def _client(kind: Any, options: dict[str, Any]) -> Any:
    return kind(**options)
