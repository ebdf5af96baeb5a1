"""A configuration with verl's keys becomes one of ours, by the table in `verl_keys.py`.

Invariant: every key that is given ends as a key of the schema, or in a note that says what became of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_rl.config import verl_keys


class Note(NamedTuple):
    """What became of one key: it is `same` (ours, as it is), `converted`, `accepted` without effect, or `refused`.

    `text` says our keys and values, why it changes nothing, or what to write instead. `reported`: somebody who runs the
    configuration is to be told.
    """

    key: str
    value: Any
    kind: Literal["same", "converted", "accepted", "refused"]
    text: str = ""
    reported: bool = False


class Translation(NamedTuple):
    """Our keys with their values, in the order in which they were given, and a note for each key that was given."""

    ours: list[tuple[str, Any]]
    notes: list[Note]


def translate(pairs: Sequence[tuple[str, Any]], *, is_verl: bool = False) -> Translation:
    """What dotted keys with their values become; a later one wins over an earlier one. `is_verl`: they are those of a
    script or file of verl's, and mean what they mean there.

    A key that is converted gives way to ours, where both are given: `data.overlong` wins over `data.truncation`.
    """
    own_values: list[tuple[str, Any]] = []
    notes: list[Note] = []
    beside = dict(pairs)
    for key, value in pairs:
        converted, note = _translated(key, value, beside, is_verl=is_verl)
        remaining = {name: each for name, each in converted.items() if name == key or name not in beside}
        if converted and not remaining:
            note = Note(key, value, "accepted", f"{', '.join(converted)} is given too, and holds")
        own_values += remaining.items()
        notes.append(note)
    return Translation(own_values, notes)


def translate_layer(layer: DictConfig, defaults: DictConfig, *, is_verl: bool = False) -> tuple[DictConfig, list[Note]]:
    """A layer of a configuration with our keys alone; its references are looked up in it, and in `defaults`. `is_verl`
    as in `translate`."""
    plain = OmegaConf.to_container(layer)
    assert isinstance(plain, dict)
    verl_names = [name for name, value in leaves(plain) if knows(name, value)]
    whole = OmegaConf.merge(defaults, layer) if verl_names else layer
    others = [Note(name, value, "same") for name, value in leaves(plain) if not knows(name, value)]
    translation = translate(
        [*((note.key, note.value) for note in others), *((name, _select(whole, name)) for name in verl_names)],
        is_verl=is_verl,
    )
    for name in verl_names:
        _remove(plain, name.split("."))
    rest = OmegaConf.create(plain)
    for name, value in translation.ours[len(others) :]:
        OmegaConf.update(rest, name, value, force_add=True)
    return rest, [*others, *translation.notes[len(others) :]]


def knows(key: str, value: Any = None) -> bool:
    """Whether a key is one of verl's that has a rule, or a group of such keys that is empty."""
    return verl_keys.rule_of(key) is not None or (value == {} and verl_keys.rule_of(f"{key}.*") is not None)


def leaves(config: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted names of a nested mapping's leaves, with their values. An empty mapping is a leaf."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _select(config: Any, key: str) -> Any:
    """A value with its references followed; one that leads nowhere stays as it is written. `???` is null."""
    try:
        value = OmegaConf.select(config, key)
    except OmegaConfBaseException:
        *outer, leaf = key.split(".")
        parent = OmegaConf.select(config, ".".join(outer)) if outer else config
        value = OmegaConf.to_container(parent)[leaf]  # type: ignore[call-overload, index]
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _remove(config: dict[Any, Any], path: Sequence[str]) -> None:
    """Take a key out, and the groups that are empty without it."""
    name, *rest = path
    if rest:
        _remove(config[name], rest)
    if not rest or not config[name]:
        del config[name]


def _translated(key: str, value: Any, beside: Mapping[str, Any], *, is_verl: bool) -> tuple[dict[str, Any], Note]:
    rule = verl_keys.rule_of(key)
    if rule is None:
        empty = value == {} and knows(key, value)
        return ({}, Note(key, value, "accepted", "it is empty")) if empty else ({key: value}, Note(key, value, "same"))
    if value is None:
        return {}, Note(key, value, "accepted", "null asks for nothing")
    if is_verl and rule.in_verl:
        return {}, Note(key, value, "accepted", rule.in_verl, reported=True)
    if rule.values is not None and value not in rule.values:
        return {}, Note(key, value, "refused", rule.instead)
    if rule.convert is None:
        return {}, Note(key, value, "accepted", rule.text, reported=not rule.off)
    converted = rule.convert(value, beside)
    if not converted:
        return {}, Note(key, value, "accepted", "off, as always here")
    if converted == {key: value}:
        return converted, Note(key, value, "same")
    return converted, Note(key, value, "converted", ", ".join(f"{name}={each}" for name, each in converted.items()))
