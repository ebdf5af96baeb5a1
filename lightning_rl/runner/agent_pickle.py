"""An agent as bytes for the processes that run it: cloudpickle, and what agents hold that it cannot send.

In a script or a notebook an agent travels by value, with the globals that it uses. SDK clients among them are made anew
where they arrive, with their own connections, functions behind `functools.cache` begin with an empty cache, and
context variables have their defaults. What a library only compares by identity, as LangGraph its `MISSING`,
arrives as that library's own there. A script's classes, and what their annotations name, are in `__main__` there too,
where type hints and pickles look for them.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextvars import Context, ContextVar
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, ForwardRef, Literal, get_origin

import cloudpickle

from lightning_rl.errors import Explained

_CLIENTS = frozenset({"OpenAI", "AsyncOpenAI", "Anthropic", "AsyncAnthropic"})
_FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, pickle.PicklingError)
_MOST_OF_A_NAME = 2**20  # bytes of what an annotation names; more is no type
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
    except _FAILURES as error:
        raise AgentNotPicklable(
            f"the agent cannot be sent to the processes that run it: {error}{pickler.where()}. It uses something that "
            "stays in this process, such as a connection, a lock or an open file: make it within the agent, in a "
            "module beside the script, or in a function with @functools.cache that the agent calls (but a client of "
            "the model in each rollout, whose URL it calls by)"
        ) from error
    return pickle.dumps(_Sent(_arrived, buffer.getvalue()))


class _Sent:
    """Something on its way, as `content`: what arrives is what `arrived` makes of it."""

    def __init__(self, arrived: Callable[[bytes], Any], content: bytes) -> None:
        self._reduced = arrived, (content,)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def _arrived(content: bytes) -> Any:
    unpickler = pickle.Unpickler(io.BytesIO(content))  # one for both: a class is the same one in them
    agent, names = unpickler.load(), unpickler.load()
    main = sys.modules["__main__"]
    if names and getattr(getattr(main, "__spec__", None), "name", None) == _RUNNER:  # its own names are no script's
        main = sys.modules["__main__"] = ModuleType("__main__")
    for name, value in names.items():
        vars(main).setdefault(name, value)
    return agent


class _SmallBuffer(io.BytesIO):
    """Raises OverflowError once more is written than what an annotation names should take."""

    def write(self, content: Any, /) -> int:
        if self.tell() + memoryview(content).nbytes > _MOST_OF_A_NAME:
            raise OverflowError(f"more than {_MOST_OF_A_NAME} bytes")
        return super().write(content)


def _arrived_apart(content: bytes) -> Any:
    """What an annotation names, or where it cannot be loaded `Any`."""
    try:
        return pickle.loads(content)
    except Exception:  # noqa: BLE001 - an import that fails, say, of what is only named
        return Any


def _code_in_its_file(code: CodeType) -> tuple[Any, ...]:
    """As cloudpickle's, with the file that the code is from, so that an agent's traceback shows its lines."""
    kind, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return kind, tuple(code.co_filename if each == "<dynamic-code>" else each for each in arguments)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _code_in_its_file}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO, *, annotations: bool = True) -> None:
        super().__init__(file)
        self._annotations = annotations  # whether functions are sent with what theirs name
        self._classes: list[type] = []  # of the script, and in this pickle
        self._globals: dict[str, Any] = {}  # that functions in this pickle use
        self._sent_apart: dict[int, _Sent | None] = {}  # what annotations name, by id

    def names_of_script(self) -> dict[str, Any]:
        """The script's classes that were pickled, and what their annotations name."""
        script, names = vars(sys.modules["__main__"]), dict[str, Any]()
        for each in self._classes:
            names |= self._in_annotations(each, script)
        return names | {each.__name__: each for each in self._classes if script.get(each.__name__) is each}

    def where(self) -> str:
        """The global value that cannot be sent, as part of an error. Empty where none is found. What was met last is
        looked at first: others that cannot be sent use it."""
        for name, value in reversed(self._globals.items()):
            try:
                _Pickler(io.BytesIO(), annotations=False).dump(value)
            except Exception:  # noqa: BLE001 - whatever it is, the value cannot be sent
                if not isinstance(value, FunctionType | type):  # of which what they use is the cause
                    return f", in {name!r} of the script (a {type(value).__module__}.{type(value).__qualname__})"
        return ""

    def _place_of_sentinel(self, obj: Any) -> tuple[str, str] | None:
        """The module and the name there of an object without state that a module holds: only its identity means
        anything. None for anything else, and for what an agent's script holds, which travels by value."""
        kind = type(obj)
        if kind in (object, ContextVar):
            return self._held.get(id(obj))
        if kind.__module__ in ("builtins", "__main__") or not _is_stateless(obj):
            return None
        held = getattr(sys.modules.get(kind.__module__), "__dict__", {})
        return next(((kind.__module__, name) for name, value in list(held.items()) if value is obj), None)

    @functools.cached_property
    def _held(self) -> dict[int, tuple[str, str]]:
        """Where each `object()` and context variable is that a module holds, by its id."""
        modules = [(name, module) for name, module in list(sys.modules.items()) if name != "__main__"]
        return {
            id(value): (module_name, name)
            for module_name, module in reversed(modules)
            for name, value in list(getattr(module, "__dict__", {}).items())
            if type(value) in (object, ContextVar)
        }

    def _in_annotations(self, annotated: Any, names: Mapping[str, Any]) -> dict[str, Any]:
        """What the names in annotations stand for, each sent for itself: the agent does not need it."""
        found = {name: self._apart(names[name]) for name in sorted(_names_in_annotations(annotated)) if name in names}
        return {name: sent for name, sent in found.items() if sent is not None}

    def _apart(self, obj: Any) -> "_Sent | None":
        """None for what cannot be sent, or is large."""
        if id(obj) not in self._sent_apart:
            buffer = _SmallBuffer()
            try:
                _Pickler(buffer, annotations=False).dump(obj)
                pickle.loads(buffer.getvalue())
                self._sent_apart[id(obj)] = _Sent(_arrived_apart, buffer.getvalue())
            except Exception:  # noqa: BLE001 - the agent works without; who reads its hints hears of the name
                self._sent_apart[id(obj)] = None
        return self._sent_apart[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj.__module__ == "__main__":
            self._classes.append(obj)
        if isinstance(obj, functools._lru_cache_wrapper) and _travels_by_value(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        kind = type(obj)
        if kind.__name__ in _CLIENTS and kind.__module__.partition(".")[0] in ("openai", "anthropic"):
            return _client, (kind, _options(obj))
        if kind is ContextVar and id(obj) not in self._held:
            return _context_variable, (obj.name, *_default_of(obj))
        if kind is functools.cached_property:  # it holds a lock, before Python 3.12
            return _cached_property, (obj.func, obj.attrname)
        if (place := self._place_of_sentinel(obj)) is not None:
            return _at, (*place, kind)
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and isinstance(reduced, tuple):
            _, held = reduced[2]
            self._globals |= held["__globals__"]
            if self._annotations:
                held["__globals__"] = self._in_annotations(obj, obj.__globals__) | held["__globals__"]
        return reduced


def _is_stateless(obj: Any) -> bool:
    """Whether it is of a class of its own that holds nothing, and is pickled as any object."""
    own_ways = {"__slots__", "__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__"}
    plain = type(obj).__bases__ == (object,) and not own_ways & vars(type(obj)).keys()
    return plain and getattr(obj, "__dict__", None) == {}


def _names_in_annotations(annotated: Any) -> set[str]:
    """The names in annotations that are text, as all are under `from __future__ import annotations`."""
    names: set[str] = set()
    annotations = getattr(annotated, "__annotations__", None)
    for annotation in annotations.values() if isinstance(annotations, dict) else ():
        for text in _texts_in(annotation):
            with contextlib.suppress(SyntaxError):
                parsed = ast.walk(ast.parse(text, mode="eval"))
                names |= {node.id for node in parsed if isinstance(node, ast.Name)}
    return names


def _texts_in(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, str):
        yield annotation
    elif isinstance(annotation, ForwardRef):
        yield annotation.__forward_arg__
    elif get_origin(annotation) is not Literal:  # whose texts are values
        arguments = getattr(annotation, "__args__", ())
        for argument in arguments if isinstance(arguments, tuple) else ():
            yield from _texts_in(argument)


def _at(module: str, name: str, kind: type) -> Any:
    """What the module holds by that name here, or where that is another thing here, a new one."""
    held = None
    with contextlib.suppress(ImportError):
        held = getattr(importlib.import_module(module), name, None)
    if type(held) is kind:
        return held
    return ContextVar(name) if kind is ContextVar else object.__new__(kind)


def _travels_by_value(function: Any) -> bool:
    """Whether another process cannot import it by its name."""
    return function.__module__ == "__main__" or "<locals>" in function.__qualname__


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Any, name: str | None) -> Any:
    made: functools.cached_property[Any] = functools.cached_property(function)
    made.attrname = name
    return made


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
