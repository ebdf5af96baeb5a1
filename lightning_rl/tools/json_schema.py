"""A JSON schema made simple for models: every type written where it is used, no titles.

Invariant: it says the same as before. A type that contains itself cannot be written out: it stays under `$defs`.
"""

import sys
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

import typing_extensions

_REF = "#/$defs/"
_MAPS = ("properties", "$defs", "patternProperties", "dependentSchemas")  # of schemas by names, which are no keywords
_VALUES = ("default", "const", "enum", "examples", "required")  # data, which may look like anything


def inlined(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` without references to `defs`, but of the types that contain themselves."""
    circular = {name for name in defs if name in _reached(defs[name], defs)}
    made: dict[str, Any] = _written(schema, defs, circular)
    needed = {name: _written(defs[name], defs, circular) for name in sorted(_reached(schema, defs) & circular)}
    return made | ({"$defs": needed} if needed else {})


def _written(node: Any, defs: Mapping[str, Any], circular: set[str]) -> Any:
    if isinstance(node, list):
        return [_written(one, defs, circular) for one in node]
    if not isinstance(node, Mapping):
        return node
    name = _name(node)
    if name is not None and name not in circular:
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _written({**defs[name], **beside}, defs, circular)
    return {
        key: _child(key, value, defs, circular)
        for key, value in node.items()
        if key not in ("title", "discriminator")  # the latter repeats what the alternatives' constants say
    }


def _child(key: str, value: Any, defs: Mapping[str, Any], circular: set[str]) -> Any:
    if key in _VALUES:
        return value
    if key in _MAPS:
        return {name: _written(one, defs, circular) for name, one in value.items()}
    return _written(value, defs, circular)


def _name(node: Mapping[str, Any]) -> str | None:
    ref = node.get("$ref")
    return ref.removeprefix(_REF) if isinstance(ref, str) else None


def _reached(schema: Any, defs: Mapping[str, Any]) -> set[str]:
    """The names of the types that a schema leads to."""
    names: set[str] = set()
    open_ = _names(schema)
    while open_:
        name = open_.pop()
        if name not in names:
            names.add(name)
            open_ |= _names(defs[name])
    return names


def _names(node: Any) -> set[str]:
    if isinstance(node, list):
        return {name for one in node for name in _names(one)}
    if not isinstance(node, Mapping):
        return set()
    name = _name(node)
    inner = {inner_name for key, value in node.items() if key not in _VALUES for inner_name in _names(value)}
    return inner | ({name} if name is not None else set())


def with_known_typed_dicts(hint: Any, open_: tuple[Any, ...] = ()) -> Any:
    """The hint with each `typing.TypedDict` in it replaced by its like."""
    if sys.version_info >= (3, 12):
        return hint
    if typing.is_typeddict(hint):
        return hint if hint in open_ or type(hint).__module__ != "typing" else _alike(hint, (*open_, hint))
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[(with_known_typed_dicts(args[0], open_), *hint.__metadata__)]
    inner = tuple(with_known_typed_dicts(one, open_) for one in args)
    if not args or all(new is old for new, old in zip(inner, args, strict=True)):
        return hint
    if origin in (Union, types.UnionType):
        return Union[inner]  # noqa: UP007 - made of a tuple
    return origin[inner]


def _alike(hint: Any, open_: tuple[Any, ...]) -> Any:
    fields = typing.get_type_hints(hint, include_extras=True)
    marked = {
        name: typing_extensions.Required[with_known_typed_dicts(one, open_)]
        if name in hint.__required_keys__
        else typing_extensions.NotRequired[with_known_typed_dicts(one, open_)]
        for name, one in fields.items()
    }
    made: Any = typing_extensions.TypedDict(hint.__name__, marked)  # type: ignore[misc]
    made.__doc__ = hint.__doc__
    return made
