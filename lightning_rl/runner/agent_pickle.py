"""An agent as bytes for the processes that run it: cloudpickle, and what agents hold that it cannot send.

In a script or a notebook an agent travels by value, with the globals that it uses. SDK clients among them are made anew
where they arrive, with their own connections, functions behind `functools.cache` begin with an empty cache, locks are
free, and context variables have their defaults. What a library only compares by identity, as LangGraph its `MISSING`,
arrives as that library's own there. A script's classes, and what their annotations name, are in `__main__` there too,
where type hints and pickles look for them.
"""

import contextlib
import functools
import importlib
import inspect
import io
import pickle
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, ForwardRef

import cloudpickle

from lightning_rl.errors import Explained

_CLIENTS = frozenset({"OpenAI", "AsyncOpenAI", "Anthropic", "AsyncAnthropic"})
_LOCKS: dict[type, Callable[[], Any]] = {type(made()): made for made in (threading.Lock, threading.RLock)}
_RUNNER = "lightning_rl.runner.process"
_OPTIONS = ("api_key", "auth_token", "organization", "project", "timeout", "max_retries")


class AgentNotPicklable(Explained, TypeError):
    """An agent holds something that cannot be sent to another process."""


def pickled(agent: Any) -> bytes:
    """The agent as bytes that `pickle.loads` reads in another process. Raises AgentNotPicklable."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(agent)
        pickler.dump(pickler.names_of_script())
    except (TypeError, ValueError, RuntimeError, AttributeError, pickle.PicklingError) as error:
        raise AgentNotPicklable(
            f"the agent cannot be sent to the processes that run it: {error}. It uses something that stays in this "
            "process, such as a connection, a lock or an open file: make it within the agent, or in a function with "
            "@functools.cache that the agent calls (but a client of the model in each rollout, whose URL it calls by)"
        ) from error
    return pickle.dumps(_Sent(buffer.getvalue()))


class _Sent:
    """An agent on its way: what arrives is the agent."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._content,)


def _arrived(content: bytes) -> Any:
    unpickler = pickle.Unpickler(io.BytesIO(content))  # one for both: a class is the same one in them
    agent, names = unpickler.load(), unpickler.load()
    main = sys.modules["__main__"]
    if names and getattr(main.__spec__, "name", None) == _RUNNER:  # its own names are no script's
        main = sys.modules["__main__"] = ModuleType("__main__")
    for name, value in names.items():
        vars(main).setdefault(name, value)
    return agent


def _code_in_its_file(code: CodeType) -> tuple[Any, ...]:
    """As cloudpickle's, with the file that the code is from, so that an agent's traceback shows its lines."""
    kind, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return kind, tuple(code.co_filename if each == "<dynamic-code>" else each for each in arguments)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _code_in_its_file}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes: list[type] = []  # of the script, and in this pickle

    def names_of_script(self) -> dict[str, Any]:
        """The script's classes that were pickled, and what their annotations name."""
        script = vars(sys.modules["__main__"])
        names = {name for each in self._classes for name in (each.__name__, *_names_in_annotations(each))}
        return {name: script[name] for name in sorted(names) if name in script}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj.__module__ == "__main__":
            self._classes.append(obj)
        if isinstance(obj, functools._lru_cache_wrapper) and _travels_by_value(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        kind = type(obj)
        if kind.__name__ in _CLIENTS and kind.__module__.partition(".")[0] in ("openai", "anthropic"):
            return _client, (kind, _options(obj))
        if isinstance(obj, ContextVar):
            return _context_variable, (obj.name, *_default_of(obj))
        if isinstance(obj, threading.Thread):
            raise pickle.PicklingError(f"{obj.name!r} is a thread, which runs in this process alone")
        if kind in _LOCKS:
            return _LOCKS[kind], ()  # free, as where its module is imported
        if (place := _place_of_sentinel(obj)) is not None:
            return _at, place
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and isinstance(reduced, tuple):
            _, held = reduced[2]
            for name in _names_in_annotations(obj):
                if name in obj.__globals__:
                    held["__globals__"].setdefault(name, obj.__globals__[name])
        return reduced


def _names_in_annotations(annotated: Any) -> set[str]:
    """The names in annotations that are text, as all are under `from __future__ import annotations`."""
    names: set[str] = set()
    for annotation in getattr(annotated, "__annotations__", {}).values():
        for text in _texts_in(annotation):
            with contextlib.suppress(SyntaxError):
                names.update(compile(text, "annotation", "eval").co_names)
    return names


def _texts_in(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, str):
        yield annotation
    elif isinstance(annotation, ForwardRef):
        yield annotation.__forward_arg__
    else:
        for argument in getattr(annotation, "__args__", ()):
            yield from _texts_in(argument)


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


def _default_of(variable: ContextVar[Any]) -> tuple[Any, ...]:
    try:
        return (Context().run(variable.get),)
    except LookupError:
        return ()


def _context_variable(name: str, *default: Any) -> ContextVar[Any]:
    return ContextVar(name, default=default[0]) if default else ContextVar(name)


def _client(kind: Any, options: dict[str, Any]) -> Any:
    return kind(**options)
