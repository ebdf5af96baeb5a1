"""`docs/config.md`, written from the schema: `python -m lightning_rl.config.reference > docs/config.md`."""

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lightning_rl.config import Key, keys
from lightning_rl.config.schema import Section
from lightning_rl.config.verl_keys import RULES, Rule

_HEAD = """\
# Configuration

Generated from `lightning_rl/config/schema.py` by `make docs`; a test compares the two.

The keys are verl's. They are given as a dict, `lrl.PPO({"data": {"train_batch_size": 8}})` or
`{"data.train_batch_size": 8}`, on the command line, `lightning-rl train data.train_batch_size=8` (Hydra's syntax), or
in a YAML file, `lightning-rl train --config my.yaml`; the command line wins over the file, both over the defaults. A
Hydra file may begin with `defaults: [lightning_rl/ppo, _self_]`. `lightning-rl train ... --dry-run` prints what it
comes to.

An unknown key is an error that names the nearest valid one; so is a value that does not fit. A key that another one
leaves unread, `actor.kl_loss_coef` where `actor.use_kl_loss` is false, is told of as a run begins. Keys of verl's that
are not in the tables of the first two sections [stand in the last](#verls-other-keys).

## Keys with an effect

| key | values | default | effect |
|---|---|---|---|
"""
_NO_EFFECT = """
## Accepted without effect

Configurations of verl and Agent-lightning work unchanged; these keys of theirs change nothing here.

| key | default | because |
|---|---|---|
"""
_OF_VERL = """
## verl's other keys

What becomes of the keys of verl's `ppo_trainer` tree that are not above, or that take other values there. The first
line that fits a key holds; `*` is any part of a name. null asks for nothing, everywhere.

| verl's key | here | what it becomes, or why |
|---|---|---|
"""


def page() -> str:
    """The text of `docs/config.md`."""
    all_keys = list(keys())
    text = _HEAD
    text += "".join(
        f"| `{key.name}` | {_type(key.type)} | {_default(key)} | {key.text} |\n"
        for key in all_keys
        if key.kind == "effect"
    )
    text += _NO_EFFECT
    text += "".join(f"| `{key.name}` | {_default(key)} | {key.text} |\n" for key in all_keys if key.kind == "no_effect")
    text += _OF_VERL
    text += "".join(f"| {', '.join(f'`{name}`' for name in rule.patterns)} | {_verdict(rule)} |\n" for rule in RULES)
    return text


def _verdict(rule: Rule) -> str:
    if rule.kind == "refused":
        return f"refused | {rule.text}"
    if rule.values is None:
        return f"{rule.kind} | {rule.text}"
    if rule.off:
        return f"accepted where off | otherwise refused: {rule.instead}"
    values = ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in rule.values)
    return f"{rule.kind}: {values} | {rule.text}; otherwise refused: {rule.instead}"


def _default(key: Key) -> str:
    return f"`{json.dumps(key.default)}`"


def _type(annotation: Any) -> str:
    """A type as a reader of YAML knows it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0]) + _bounds(parts[1:])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in parts)
    if origin is list:
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return f"{_type(parts[1])} by name"
    if origin is tuple:
        return f"{len(parts)} x {_type(parts[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "keys"
    names = {Any: "any value", int: "int", float: "number", str: "text", bool: "true, false", type(None): "null"}
    return names[annotation]


def _bounds(metas: tuple[Any, ...]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(meta, name)}"
        for meta in metas
        for name, sign in signs.items()
        if getattr(meta, name) is not None
    ]
    return " " + " and ".join(bounds) if bounds else ""


if __name__ == "__main__":
    print(page(), end="")
