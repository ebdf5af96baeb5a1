"""From a function to the JSON schema of its arguments, and from a model's JSON to the arguments themselves.

Invariant: one set of types makes both. What the schema promises is what the function gets: a nested model arrives as
that model, an enum as its member; what does not fit is refused before the function is called.
"""

import difflib
import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin

from docstring_parser import DocstringStyle
from docstring_parser import parse as parse_docstring
from pydantic import PydanticInvalidForJsonSchema, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError

from lightning_rl.agents.emit import generates
from lightning_rl.tools.errors import ToolError, WrongArguments
from lightning_rl.tools.json_schema import inlined, with_known_typed_dicts
from lightning_rl.tools.schemas import OpenAIFunctionToolSchema

_NO_TYPE = (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation, PydanticUserError)


class Signature:
    """The arguments of a function, as the model sees them and as the function takes them.

    Raises:
        ToolError: naming function and argument, for what a schema needs and is not there: a docstring, a type, a
            description; and for `*args`, `**kwargs`, generators and classes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.called = place_of(function)
        self.signature = _signature(function, self.called)
        plain, bound = _plain(function)
        self.name = _name(function)
        visible = {name: one for name, one in self.signature.parameters.items() if name not in bound}
        for parameter in visible.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ToolError(
                    f"{self.called}: {parameter} cannot be told to a model; name each argument, or give schema="
                )
            if isinstance(parameter.default, FieldInfo):
                raise ToolError(
                    f"{self.called}: the default of argument {parameter.name!r} is pydantic's Field(...), which is "
                    f"for models; write {parameter.name}: Annotated[type, Field(...)]"
                )
        doc = parse_docstring(_docstring(function, plain, self.called), style=DocstringStyle.GOOGLE)
        self.description = (doc.description or "").strip()
        descriptions = {one.arg_name: " ".join((one.description or "").split()) for one in doc.params}
        hints = _hints(plain, self.called)
        self._adapters = {name: self._adapter(one, hints) for name, one in visible.items()}
        self._required = [name for name, one in visible.items() if one.default is one.empty]
        self.parameters = self._schema(visible, hints, descriptions)

    def bind(self, arguments: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments, checked and converted.

        Raises:
            WrongArguments: naming each one that is unknown, missing, or of the wrong type.
        """
        wrong = [self._unknown(name) for name in arguments if name not in self._adapters]
        wrong += [f"missing: {name}" for name in self._required if name not in arguments]
        values = {}
        for name, value in arguments.items():
            if name in self._adapters:
                try:
                    values[name] = self._adapters[name].validate_json(json.dumps(value))
                except ValidationError as error:
                    wrong += _wrong(name, error)
        if wrong:
            raise WrongArguments("; ".join(wrong))
        return bound_arguments(self.signature, values)

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._adapters, n=1)
        return f"unknown: {name}" + (f" (did you mean {near[0]}?)" if near else "")

    def _adapter(self, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> TypeAdapter[Any]:
        if parameter.name not in hints:
            raise ToolError(
                f"{self.called}: argument {parameter.name!r} has no type hint; write {parameter.name}: str, say"
            )
        hint = with_known_typed_dicts(hints[parameter.name])
        if parameter.default is None:
            hint = typing.Optional[hint]  # noqa: UP045 - a hint may be a string or a TypeVar, which know no `|`
        try:
            return TypeAdapter(hint)
        except _NO_TYPE as error:
            raise self._no_type(parameter.name, hint, error) from error

    def _no_type(self, name: str, hint: Any, error: Exception) -> ToolError:
        first = str(error).splitlines()[0]
        return ToolError(f"{self.called}: argument {name!r} of type {_type_name(hint)} has no JSON schema: {first}")

    def _schema(
        self, visible: Mapping[str, inspect.Parameter], hints: Mapping[str, Any], descriptions: Mapping[str, str]
    ) -> dict[str, Any]:
        for name, adapter in self._adapters.items():  # one by one, so that an error can name its argument
            try:
                adapter.json_schema()
            except _NO_TYPE as error:
                raise self._no_type(name, hints[name], error) from error
        made, shared = TypeAdapter.json_schemas([(name, "validation", one) for name, one in self._adapters.items()])
        properties = {}
        for name, parameter in visible.items():
            one = dict(made[name, "validation"])
            properties[name] = one | {"description": self._description(name, hints[name], one, descriptions)}
            if parameter.default is not parameter.empty:
                properties[name] |= _default(self._adapters[name], parameter.default)
        parameters = {"type": "object", "properties": properties, "required": self._required}
        return inlined(parameters, shared.get("$defs", {}))

    def _description(self, name: str, hint: Any, made: Mapping[str, Any], descriptions: Mapping[str, str]) -> str:
        annotated = [text for text in get_args(hint)[1:] if isinstance(text, str)] if _is_annotated(hint) else []
        own = str(made.get("description", "")) if _is_annotated(hint) else ""
        description = descriptions.get(name) or next(iter(annotated), "") or own
        if not description:
            near = difflib.get_close_matches(name, descriptions.keys() - self._adapters.keys(), n=1)
            hint_at = f"; its docstring describes {near[0]!r}" if near else ""
            raise ToolError(
                f"{self.called}: argument {name!r} has no description; add `{name}: what it is` under `Args:` in the "
                f"docstring{hint_at}"
            )
        return description


class AsWritten:
    """The arguments of a function whose schema was given: as the model wrote them.

    Raises:
        ToolError: the schema names an argument that the function does not take.
    """

    def __init__(self, function: Callable[..., Any], schema: OpenAIFunctionToolSchema) -> None:
        called = place_of(function)
        self.signature = _signature(function, called)
        kinds = {one.kind for one in self.signature.parameters.values()}
        self._any_name = inspect.Parameter.VAR_KEYWORD in kinds
        parameters = schema.function.parameters
        self._required = set(parameters.required) | {
            one.name
            for one in self.signature.parameters.values()
            if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        }
        strange = [name for name in parameters.properties if not self._takes(name)]
        if strange:
            raise ToolError(f"{called}: its schema has the argument {strange[0]!r}, which the function does not take")

    def bind(self, arguments: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments.

        Raises:
            WrongArguments: naming each one that is unknown or missing.
        """
        wrong = [f"unknown: {name}" for name in arguments if not self._takes(name)]
        wrong += [f"missing: {name}" for name in sorted(self._required) if name not in arguments]
        if wrong:
            raise WrongArguments("; ".join(wrong))
        return bound_arguments(self.signature, arguments)

    def _takes(self, name: str) -> bool:
        return self._any_name or name in self.signature.parameters


def bound_arguments(signature: inspect.Signature, values: Mapping[str, Any]) -> inspect.BoundArguments:
    """The call of a function with these values by name, positional-only ones too."""
    names = set(signature.parameters)
    arguments = {name: values[name] for name in signature.parameters if name in values}
    bound = inspect.BoundArguments(signature, arguments)
    bound.apply_defaults()
    for one in signature.parameters.values():
        if one.kind is one.VAR_KEYWORD:
            bound.arguments[one.name] = {name: value for name, value in values.items() if name not in names}
    return bound


def place_of(function: Callable[..., Any]) -> str:
    """A function and where it stands, for errors."""
    plain, _ = _plain(function)
    code = getattr(inspect.unwrap(plain), "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"tool function {_name(function)!r}{where}"


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; of partials and callable objects too."""
    plain, _ = _plain(function)
    return inspect.iscoroutinefunction(plain)


def _plain(function: Callable[..., Any]) -> tuple[Callable[..., Any], set[str]]:
    """The function behind partials and callable objects, and the arguments that partials have fixed by name."""
    bound: set[str] = set()
    while isinstance(function, functools.partial):
        bound |= function.keywords.keys()
        function = function.func
    if inspect.isroutine(function) or inspect.isclass(function):
        return function, bound
    return type(function).__call__, bound


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _signature(function: Callable[..., Any], called: str) -> inspect.Signature:
    plain, _ = _plain(function)
    if inspect.isclass(plain):
        raise ToolError(f"{called} is a class; give a function, or subclass BaseTool for a tool with state")
    if generates(plain):
        raise ToolError(f"{called} is a generator; a tool returns its result")
    try:
        return inspect.signature(function)
    except ValueError as error:  # of some functions in C nobody can tell
        raise ToolError(f"{called}: its arguments cannot be read; give schema=, or wrap it in a function") from error


def _docstring(function: Callable[..., Any], plain: Callable[..., Any], called: str) -> str:
    outer = type(function) if plain is type(function).__call__ else plain
    text = inspect.getdoc(plain) if plain.__doc__ else None
    text = text or (inspect.getdoc(outer) if outer.__doc__ else None)
    if not text:
        raise ToolError(f"{called} has no docstring; say what the tool does, and each argument under `Args:`")
    return text


def _hints(plain: Callable[..., Any], called: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(plain, include_extras=True)
    except (NameError, AttributeError, TypeError) as error:
        raise ToolError(f"{called}: a type hint cannot be read: {error}; name types that its module has") from error


def _default(adapter: TypeAdapter[Any], default: Any) -> dict[str, Any]:
    try:
        value = adapter.dump_python(default, mode="json", warnings="none")
        json.dumps(value, allow_nan=False)
    except (PydanticSerializationError, TypeError, ValueError):  # a sentinel: the model cannot write it either
        return {}
    return {"default": value}


def _wrong(name: str, error: ValidationError) -> list[str]:
    def at(where: tuple[Any, ...]) -> str:
        return ".".join(map(str, (name, *where)))

    errors = error.errors(include_url=False, include_context=False)
    return [f"{at(one['loc'])}: {one['msg']}, not {_short(one['input'])}" for one in errors]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated


def _type_name(hint: Any) -> str:
    return getattr(hint, "__name__", None) or str(hint)
