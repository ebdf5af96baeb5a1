"""The configuration: packaged defaults, and over them a file, a dict, and the command line, composed by Hydra.

Invariant: a composed configuration is valid. An unknown key, a value that does not fit, or one that this release
cannot honour is an error that names the key and what would do.
"""

import difflib
import functools
import logging
import math
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_rl.config import from_verl, verl_keys
from lightning_rl.config.from_verl import Note, leaves, translate, translate_layer
from lightning_rl.config.schema import Config, PolicySection, Section, TrainConfig
from lightning_rl.errors import Explained

DEFAULTS = "lightning_rl/ppo"  # a Hydra file of one's own begins with `defaults: [lightning_rl/ppo, _self_]`

VERL_DEFAULTS = "ppo_trainer"

SHORT = {"reward": "reward.command"}  # groups that stand for a key in them, where they are given a text

C = TypeVar("C", bound=Config)
_log = logging.getLogger(__name__)
_ONE_AT_A_TIME = threading.RLock()  # Hydra keeps one state for all threads, and msgspec makes its types without a lock
_EACH_POLICY = "policies[...]"
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_CONVERSION = re.compile(r"(?P<what>.*?)(?: - at (?P<names>`key` in )?`\$\.?(?P<place>[^`]*)`)?", re.DOTALL)
_LONGEST_VALUE = 200  # characters
_BOUND = re.compile(r"clip|clamp|threshold|_[lu]b$")  # names of keys that bound something


class ConfigError(Explained, ValueError):
    """A key that does not exist, a value that is missing or does not fit."""


class Key(msgspec.Struct, frozen=True):
    """A key as the schema has it. `kind` is `effect` or `no_effect`; `text` says which effect, or why not."""

    name: str
    type: Any
    default: Any
    kind: str
    text: str


def compose(
    values: Mapping[str, Any] | DictConfig | None = None,
    *,
    file: Path | None = None,
    command_line: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    schema: type[C] = Config,  # type: ignore[assignment]
) -> C:
    """The defaults of `schema`, then `base` (dotted keys), `file` (YAML), `values` (a nested dict), and Hydra's
    `key=value` overrides. verl's keys are taken everywhere (`verl_keys.py`); those without effect are logged in a line.
    With a `base`, which is of verl's defaults, the keys are a script's or a file's of verl's.

    Raises ConfigError naming the key: unknown (with the nearest valid one), refused, or with a value that does not fit.
    """
    with _ONE_AT_A_TIME, _errors():
        layers, notes = _layers(values, file, command_line, schema, is_verl=base is not None)
        _refuse(notes)
        merged = OmegaConf.merge(_defaults(schema), _nested(base or {}), *layers)
        plain = msgspec.to_builtins(OmegaConf.to_container(merged, resolve=True), enc_hook=str)
        config = _checked(plain, schema)
    _report(notes)
    return config


def _refuse(notes: Sequence[Note]) -> None:
    if refused := [note for note in notes if note.kind == "refused"]:
        raise ConfigError("; ".join(f"config key {note.key}={note.value}: {note.text}" for note in refused))


def _report(notes: Sequence[Note]) -> None:
    if idle := [note.key for note in notes if note.reported]:
        _log.warning("without effect here (docs/config.md says why): %s", ", ".join(idle))


def derived(config: C, changes: Mapping[str, Any]) -> C:
    """`config` with the keys of a nested dict changed. Raises ConfigError as `compose` does."""
    with _ONE_AT_A_TIME, _errors():
        schema = type(config)
        layers, notes = _layers(changes, None, (), schema, is_verl=False)
        _refuse(notes)
        merged = OmegaConf.merge(OmegaConf.create(msgspec.to_builtins(config)), *layers)
        plain = msgspec.to_builtins(OmegaConf.to_container(merged, resolve=True), enc_hook=str)
        changed = _checked(plain, schema)
    _report(notes)
    return changed


def notes_of(
    *,
    file: Path | None = None,
    command_line: Sequence[str] = (),
    schema: type[Config] = Config,
    is_verl: bool = False,
) -> list[Note]:
    """What becomes of each key that is given, in order; `is_verl`: by a script or file of verl's. Raises
    ConfigError for one that is unknown."""
    with _ONE_AT_A_TIME, _errors():
        return _layers(None, file, command_line, schema, is_verl=is_verl)[1]


def _layers(
    values: Mapping[str, Any] | DictConfig | None,
    file: Path | None,
    command_line: Sequence[str],
    schema: type[Config],
    *,
    is_verl: bool,
) -> tuple[list[DictConfig], list[Note]]:
    """What is given, over the defaults, with our keys alone; and what became of each key."""
    defaults = _defaults(schema)
    layers, notes = [], []
    for layer in (_read(file, schema), OmegaConf.create(dict(values or {}))):
        own_layer, of_layer = translate_layer(_lengthened(_undotted(layer)), defaults, is_verl=is_verl)
        layers.append(own_layer)
        notes += of_layer
    overridden, of_command_line = _from_command_line(command_line, schema, is_verl=is_verl)
    notes += of_command_line
    _check_names((note.key for note in notes if note.kind == "same"), schema)
    return [*layers, overridden], [_without_effect(note, _keys_by_name(schema)) for note in notes]


def _undotted(layer: DictConfig) -> DictConfig:
    """A layer whose outermost keys may be written as on the command line. Raises ConfigError for one given twice."""
    if not any("." in str(name) for name in layer):
        return layer
    plain = OmegaConf.to_container(layer)  # references stay as they are written
    assert isinstance(plain, dict)
    for name, times in Counter(name for name, _ in leaves(plain)).items():
        if times > 1:
            raise ConfigError(f"config key {name} is given twice, once in a group of its own: leave one out")
    return _nested({str(name): value for name, value in plain.items()})


def _lengthened(layer: DictConfig) -> DictConfig:
    """A layer with the names that `SHORT` ones stand for."""
    short = {name: layer[name] for name in SHORT if isinstance(OmegaConf.select(layer, name), str)}
    if not short:
        return layer
    plain = OmegaConf.to_container(layer)  # references stay as they are written
    assert isinstance(plain, dict)
    rest = OmegaConf.create({name: value for name, value in plain.items() if name not in short})
    for name, value in short.items():
        OmegaConf.update(rest, SHORT[name], value, force_add=True)
    return rest


def _without_effect(note: Note, keys_by_name: Mapping[str, Key]) -> Note:
    """The note of a key of the schema that has no effect says so."""
    key = keys_by_name.get(note.key)
    if note.kind != "same" or key is None or key.kind == "effect":
        return note
    return Note(note.key, note.value, "accepted", key.text, reported=note.value != key.default)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration cannot be composed: {error}") from error


def keys(schema: type[Section] = TrainConfig, prefix: str = "") -> Iterator[Key]:
    """Every key of a schema, dotted, in the order in which they stand there."""
    annotations = get_type_hints(schema, include_extras=True)
    for info in msgspec.structs.fields(schema):
        annotation = annotations[info.name]
        name = f"{prefix}{info.name}"
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from keys(annotation, f"{name}.")
            continue
        meta = annotation.__metadata__[-1]
        extra = meta.extra or {}
        default = info.default_factory() if info.default is msgspec.NODEFAULT else info.default
        kind = "no_effect" if "no_effect" in extra else "effect"
        bounded: Any = Annotated[(annotation.__origin__, *annotation.__metadata__)]
        yield Key(name, bounded, default, kind, meta.description or "")


def changed_keys(config: Section) -> set[str]:
    """The dotted keys whose values are other than their defaults."""
    return {key.name for key in keys(type(config)) if attrgetter(key.name)(config) != key.default}


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that `compose(file=...)` reads back, and `read_back` much faster."""
    return OmegaConf.to_yaml(OmegaConf.create(msgspec.to_builtins(config)))


def read_back(file: Path, schema: type[C]) -> C:
    """What `to_yaml` wrote, without composing it anew. A file that does not fit as it stands, since somebody changed it
    or another release wrote it, is composed. Raises ConfigError as `compose` does."""
    try:
        return msgspec.convert(
            yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)), schema
        )
    except (yaml.YAMLError, msgspec.ValidationError):
        return compose(file=file, schema=schema)


@functools.cache
def _keys_by_name(schema: type[Config]) -> Mapping[str, Key]:
    return {key.name: key for key in keys(schema)}


@functools.cache
def _valid_names(schema: type[Config]) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the keys, with `name.*` where a value is a dict, and the names of their groups."""
    keys_by_name = _keys_by_name(schema)
    valid = {*keys_by_name, *(f"{key.name}.*" for key in keys_by_name.values() if _is_dict(key.type))}
    groups = {name.rsplit(".", depth)[0] for name in valid for depth in range(1, name.count(".") + 1)}
    return frozenset(valid), frozenset(groups)


@functools.cache
def _defaults(schema: type[Config]) -> Any:
    """The defaults, which nobody changes: merging copies them."""
    return OmegaConf.create(msgspec.to_builtins(schema()))


def _store(schema: type[Config]) -> None:
    group, _, name = DEFAULTS.partition("/")
    ConfigStore.instance().store(group=group, name=name, node=_defaults(schema), package="_global_")
    ConfigStore.instance().store(name=VERL_DEFAULTS, node={})  # files of verl's begin with it; see `base` of `compose`


def _read(file: Path | None, schema: type[Config]) -> Any:
    if file is None:
        return OmegaConf.create({})
    if not file.is_file():
        raise ConfigError(f"there is no configuration file {file.resolve()}")
    if file.suffix != ".yaml":  # Hydra would look for the file of this name that does, and may find another one
        raise ConfigError(f"the name of the configuration file {file} does not end with .yaml: rename it")
    _store(schema)
    with _apart(), initialize_config_dir(str(file.resolve().parent), version_base="1.3"), warnings.catch_warnings():
        # verl's files look for its own defaults where its source may not be; ours stand in for them.
        warnings.filterwarnings("ignore", message="provider=hydra.searchpath")
        return hydra_compose(file.stem)


def _from_command_line(
    overrides: Sequence[str], schema: type[Config], *, is_verl: bool
) -> tuple[DictConfig, list[Note]]:
    """The values that the overrides give, and what became of each. A key may stand in the defaults or not: `+` in front
    of it changes nothing. `~` makes it null."""
    of_verl: list[tuple[str, Any]] = []
    own_values: list[tuple[str, Any]] = []
    for override in _parsed(overrides, schema):
        name = override.key_or_group.replace("/", ".")
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line!r} gives {name} several values; a run takes one")
        value = None if override.is_delete() else override.value()
        pairs = list(leaves({name: value}))
        if all(from_verl.knows(*each) for each in pairs):
            of_verl += pairs
        else:
            own_values.append((name, value))
    # Converted keys give way to ours, so the translation is told of those, too.
    translation = translate([*own_values, *of_verl], is_verl=is_verl)
    changed = OmegaConf.create({})
    for name, value in [*own_values, *translation.ours[len(own_values) :]]:
        OmegaConf.update(changed, name, value, force_add=True)
    shown = [Note(name, value, "same") for name, value in own_values]
    return changed, [*shown, *translation.notes[len(own_values) :]]


@contextmanager
def _apart() -> Iterator[None]:
    """Hydra is one per process: put that of an application around us aside, and back again."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def _parsed(overrides: Sequence[str], schema: type[Config]) -> list[Override]:
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(f"{text!r} is no key=value")
    return [_parsed_one(text, schema) for text in overrides]


def _parsed_one(text: str, schema: type[Config]) -> Override:
    """An override as Hydra reads it; where a text is asked for and Hydra sees none, the text as it stands.

    So a command with braces, brackets, quotes or commas needs no quoting for Hydra beside the shell's, nor does a
    file's name with a letter that Hydra's grammar has not. Raises ConfigError for a list or dict that is none of its.
    """
    parser = OverridesParser.create()
    name, _, value = text.partition("=")
    bare = name.lstrip("+")
    if bare in SHORT:
        text, name = f"{SHORT[bare]}={value}", SHORT[bare]
    is_text = name.lstrip("+") in _texts(schema)
    try:
        parsed = parser.parse_override(text)
    except HydraException as error:
        if not is_text and value.lstrip().startswith(("[", "{", "'", '"')):
            raise ConfigError(
                f"{text!r} cannot be read: {error}. In a list or dict, a text with a letter beyond ASCII or with one "
                'of #()[]{}\'&!=,~ stands between quotes: data.train_files=["a (1).jsonl"]'
            ) from error
    else:
        if not is_text or (not parsed.is_sweep_override() and isinstance(parsed.value(), str | None)):
            return parsed
    try:
        return parser.parse_override(f"{name}={_quoted(value)}")
    except HydraException as error:
        raise ConfigError(f"{text!r}: the key cannot be read: {error}") from error


def _quoted(text: str) -> str:
    """A text as Hydra's grammar quotes it: a backslash is one, but before a quote and at the end."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text) + "'"


@functools.cache
def _texts(schema: type[Config]) -> frozenset[str]:
    """The keys whose value is a text, and nothing else."""
    return frozenset(name for name, key in _keys_by_name(schema).items() if key.type.__origin__ in (str, str | None))


def _nested(values: Mapping[str, Any]) -> DictConfig:
    config = OmegaConf.create({})
    for name, value in values.items():
        OmegaConf.update(config, name, value, merge=True, force_add=True)
    return config


def _check_names(names: Sequence[str] | Iterator[str], schema: type[Config]) -> None:
    valid, groups = _valid_names(schema)
    for name in names:
        if name not in valid and name not in groups and not any(f"{outer}.*" in valid for outer in _outer(name)):
            all_names = valid | groups | verl_keys.NAMES
            near = _nearest(name, all_names)
            hint = f"did you mean {near}?" if near else "docs/config.md has all there are"
            raise ConfigError(f"config key {name!r} is unknown; {hint}")


def _is_dict(annotation: Any) -> bool:
    """Whether a key's value may be a dict, whose names are the user's own."""
    return get_origin(annotation) is dict or any(_is_dict(part) for part in get_args(annotation))


def _outer(name: str) -> list[str]:
    """The dotted names that a name lies under."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


_ALIKE = 0.5  # of two names, by difflib's ratio: less is another word
_ALIKE_IN_SECTION = 0.6  # of what stands behind a section that both have


def _nearest(name: str, valid: frozenset[str]) -> str:
    """The likeliest of the names that end alike, three where there are more, or else the one that is written alike; ""
    where none is."""
    section, _, rest = name.partition(".")
    leaf = rest.rsplit(".", 1)[-1] or section
    same_leaf = [other for other in sorted(valid) if other.rsplit(".", 1)[-1] == leaf]
    of_section = [other.removeprefix(f"{section}.") for other in sorted(valid) if other.startswith(f"{section}.")]
    if not any(other.startswith(f"{section}.") for other in same_leaf) and (
        near := difflib.get_close_matches(rest, of_section, n=1, cutoff=_ALIKE_IN_SECTION)
    ):
        return repr(f"{section}.{near[0].removesuffix('.*')}")
    matches = difflib.get_close_matches(
        name, same_leaf or sorted(valid), n=3 if same_leaf else 1, cutoff=0.0 if same_leaf else _ALIKE
    )
    return " or ".join(repr(one.removesuffix(".*")) for one in matches)


def _checked(merged: Any, schema: type[C]) -> C:
    _refuse_unusable(merged, "")
    try:
        return msgspec.convert(merged, schema)
    except msgspec.ValidationError as error:
        match = _CONVERSION.fullmatch(str(error))
        assert match is not None
        place, problem = match["place"] or "", match["what"]
        if place.startswith(_EACH_POLICY):
            place = _of_policy(merged["policies"], place)
            if field := _UNKNOWN.fullmatch(problem):
                names = PolicySection.__struct_fields__
                near = _nearest(field[1], frozenset(names))
                hint = f"did you mean {near}?" if near else f"there are {', '.join(names)}"
                raise ConfigError(f"config key '{place}.{field[1]}' is unknown; {hint}") from error
        value = _at(merged, place) if place else merged
        subject = f"a name in {place} of {sorted(value)}" if match["names"] else f"config key {place}"
        shown = "" if match["names"] else f" is {value!r:.{_LONGEST_VALUE}}"
        raise ConfigError(f"{subject}{shown}: {problem[0].lower()}{problem[1:]}{_choices(schema, place)}") from error


def _of_policy(policies: Mapping[str, Any], place: str) -> str:
    """A place in each policy as that in the first one that is not as it should be."""
    for name, policy in policies.items():
        try:
            msgspec.convert(policy, PolicySection)
        except msgspec.ValidationError:
            return place.replace(_EACH_POLICY, f"policies.{name}")
    return place


def _refuse_unusable(value: Any, name: str) -> None:
    """Raises ConfigError for NaN, and for infinities where they are not of a bound, which bounds nothing then."""
    if isinstance(value, float) and not math.isfinite(value) and (math.isnan(value) or not _BOUND.search(name)):
        raise ConfigError(f"config key {name} is {value}: give a finite number")
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        _refuse_unusable(inner, f"{name}.{key}" if name else str(key))


def _at(merged: Any, place: str) -> Any:
    """What stands at a place; where it is in each entry of a table (`[...]`), by the entries' names."""
    table, in_each, rest = place.partition("[...].")
    value = OmegaConf.select(OmegaConf.create(merged), table.removesuffix("[...]"))
    if not in_each:
        return value
    entries = enumerate(value) if OmegaConf.is_list(value) else value.items()
    return {name: OmegaConf.select(entry, rest) for name, entry in entries if OmegaConf.is_config(entry)}


def _choices(schema: type[Config], place: str) -> str:
    """What a key of few values may be."""
    type_of = {key.name: key.type for key in keys(schema)}.get(place.split("[")[0])
    named = [str(choice) for choice in _literals(type_of)]
    return f"; there are {', '.join(named)}" if named else ""


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _literals(part)]
