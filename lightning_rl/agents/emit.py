"""What an agent may say on its way: rewards, messages, objects, exceptions, operations.

Emitting works inside a rollout of a runner; outside of one it is a no-op, so that a decorated function stays an
ordinary function. What is wrong with a value is said in both.
"""

import functools
import inspect
import json
import reprlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, overload

from lightning_rl.agents.values import finite
from lightning_rl_adapters.text import encodable

if TYPE_CHECKING:
    from lightning_rl.agents.emitted import Emitted

F = TypeVar("F", bound=Callable[..., Any])

_REPR = reprlib.Repr()
_REPR.maxother = _REPR.maxstring = 200
_NOTHING: Any = object()


def emit_reward(
    value: float | Mapping[str, float],
    name: str = "reward",
    *,
    call_id: str | None = None,
    policy: str | None = None,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Record a reward of the running rollout; the one named `reward` is the final one, the last of a name wins.

    With a `call_id` it is a reward of that call alone, and never the final one: the `id` of the answer, of whatever SDK
    (of several choices: of the first), or the id of a tool call in it. A call's rewards add up.

    Of several policies, `policy` names the one that counts with it, in the place of the final one: it is the same as a
    reward of that `name`.

    Of several rewards by name, the one under `primary_key` is recorded as `name`, the others under their own names.
    `attributes` are recorded with the reward; one that links it to an answer (`make_link_attributes`) is a `call_id`.

    Raises ValueError for a value that is not a finite number, for several without a `primary_key` that is one of them,
    and for a policy beside a name; TypeError for a name or a call id that is no text.
    """
    if policy is not None and name != "reward":
        raise ValueError(f"emit_reward: policy={policy!r} is the reward's name, and name={name!r} too; give one")
    named = _text(name if policy is None else policy, "emit_reward: a name")
    beside = flattened(attributes or {})
    called = (_linked_call(beside) if beside else None) if call_id is None else _text(call_id, "emit_reward: a call_id")
    if called == "":
        raise ValueError("emit_reward: the call_id is empty; give the id of an answer or of a tool call")
    rewards = _by_name(value, named, primary_key)
    emitted = _running()
    if emitted is not None:
        for each, number in rewards.items():
            emitted.reward(number, each, called, beside)


def _by_name(value: object, name: str, primary_key: str | None) -> dict[str, float]:
    """The rewards under the names that they are recorded by. Raises ValueError."""
    if not isinstance(value, Mapping):
        if primary_key is not None:
            raise ValueError(f"emit_reward: primary_key={primary_key!r} is for several rewards, got {value!r}")
        return {name: finite(value, f"emit_reward(name={name!r})")}
    if primary_key not in value:
        raise ValueError(f"emit_reward: of {sorted(map(str, value))} name the final one: primary_key=...")
    rewards = {encodable(str(each)): finite(number, f"emit_reward, {each!r}") for each, number in value.items()}
    if name != primary_key and name in rewards:
        raise ValueError(f"emit_reward: the final reward is recorded as {name!r}, and another one has that name")
    return {name if each == primary_key else each: number for each, number in rewards.items()}


def flattened(attributes: Mapping[str, Any], prefix: str = "") -> dict[str, str | bool | int | float]:
    """Nested attributes with dotted names, as spans hold them: `{"a": {"b": [1]}}` is `{"a.b.0": 1}`.

    Raises TypeError for a value that is no text, number or boolean.
    """
    flat: dict[str, str | bool | int | float] = {}
    for name, value in attributes.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            flat |= flattened({str(index): each for index, each in enumerate(value)}, f"{prefix}{name}.")
        elif isinstance(value, str | bool | int | float):
            flat[f"{prefix}{name}"] = encodable(value) if isinstance(value, str) else value
        else:
            raise TypeError(f"attribute {prefix}{name} is text, a number or a boolean, got {value!r}")
    return flat


def _linked_call(attributes: Mapping[str, Any]) -> str | None:
    """The id of the answer that the attributes of `make_link_attributes` link a reward to."""
    from lightning_rl_adapters import semconv  # an agent that links nothing loads nothing for it

    for name, value in attributes.items():
        if name.startswith(f"{semconv.LINK}.") and name.endswith(".key_match") and value == "gen_ai.response.id":
            return str(attributes.get(name.removesuffix("key_match") + "value_match"))
    return None


def emit_message(text: str, *, attributes: Mapping[str, Any] | None = None) -> None:
    """Record a remark, with `attributes` beside it. Raises TypeError for what is no text."""
    checked = _text(text, "emit_message: a message")
    beside = flattened(attributes or {})
    emitted = _running()
    if emitted is not None:
        emitted.message(checked, beside)


def emit_object(value: Any, *, attributes: Mapping[str, Any] | None = None) -> None:
    """Record a JSON-able value, with `attributes` beside it. Raises TypeError for any other."""
    try:
        encoded = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"emit_object: the object cannot be written as JSON: {error}") from error
    beside = flattened(attributes or {})
    emitted = _running()
    if emitted is not None:
        emitted.object(encoded, beside)


def emit_exception(error: BaseException, *, attributes: Mapping[str, Any] | None = None) -> None:
    """Record an exception that the agent has handled, with `attributes` beside it. Raises TypeError for another
    value."""
    if not isinstance(error, BaseException):
        raise TypeError(f"emit_exception: an exception is recorded, got {error!r}")
    beside = flattened(attributes or {})
    emitted = _running()
    if emitted is not None:
        emitted.exception(error, beside)


@overload
def operation(function: F, /) -> F: ...
@overload
def operation(name: str | None = None, *, inputs: Any = None) -> "Operation": ...
def operation(name: Any = None, *, inputs: Any = None) -> Any:
    """Record a step of the agent: its name, inputs, and output or exception. Steps inside it are its children.

    As a decorator of a function, sync or async, `@operation` or `@operation("name")`, or around a block:

        with operation("search", inputs={"query": query}) as step:
            step.output = search(query)

    What JSON cannot hold is recorded as its `repr`, shortened.
    """
    return Operation(name, inputs) if name is None or isinstance(name, str) else Operation(None)(name)


class Operation:
    """A step to be recorded, by decorating a function or by entering it, once. `output` is what a block comes to."""

    def __init__(self, name: str | None, inputs: Any = None) -> None:
        self.output: Any = _NOTHING
        self._name = name
        self._inputs = inputs
        self._block: AbstractContextManager[Callable[[str], None]] | None = None

    def __call__(self, function: F) -> F:
        """The function, recorded. Raises TypeError for what only looks like one: a class, or a generator."""
        if not callable(function) or inspect.isclass(function) or generates(function):
            raise TypeError(
                f"operation: {function!r} is no function that returns; put `with operation(name):` around the block"
            )
        if self._inputs is not None:
            raise TypeError("operation: inputs are for a block; a function's are its arguments")
        name = self._name or getattr(function, "__qualname__", type(function).__name__)

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if _running() is None:
                return function(*args, **kwargs)
            with Operation(name, _arguments(function, args, kwargs)) as step:
                step.output = function(*args, **kwargs)
                return step.output

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            if _running() is None:
                return await function(*args, **kwargs)
            with Operation(name, _arguments(function, args, kwargs)) as step:
                step.output = await function(*args, **kwargs)
                return step.output

        return cast(F, awaited if inspect.iscoroutinefunction(function) else recorded)

    def __enter__(self) -> Self:
        if not self._name:
            raise ValueError("operation: a block needs a name: `with operation(name):`")
        emitted = _running()
        if emitted is not None:
            if self._block is not None:
                raise RuntimeError(f"operation {self._name!r} was entered before; make one for every block")
            self._block = emitted.operation(self._name, None if self._inputs is None else _json_of(self._inputs))
            self._tell_output = self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._block is None:
            return None
        if error is None and self.output is not _NOTHING:
            self._tell_output(_json_of(self.output))
        return self._block.__exit__(kind, error, trace)


def _running() -> "Emitted | None":
    # The first rollout of a process loads that module. Before, nobody collects anything, and nothing is loaded for it.
    if "lightning_rl.agents.emitted" not in sys.modules:
        return None
    from lightning_rl.agents.emitted import running

    return running()


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{where} is text, got {value!r}")
    return encodable(value)


def generates(function: Any) -> bool:
    """Whether calling it makes a generator, which runs nothing yet."""
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the names of the parameters, where they fit."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {"args": args, "kwargs": kwargs}


def _json_of(value: Any) -> str:
    """A value as JSON. Parts that JSON cannot hold are written as their `repr`, shortened."""
    try:
        return json.dumps(value, default=_REPR.repr)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_REPR.repr(value))
