"""`typing.TypedDict` for pydantic, which before Python 3.12 takes only that of `typing_extensions`.

Invariant: the same keys, types and required keys.
"""

import sys
import types
import typing
from typing import Annotated, Any, Union, get_args, get_origin

import typing_extensions


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
