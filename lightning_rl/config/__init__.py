"""The configuration: packaged defaults, and over them a file, a dict, and the command line, composed by Hydra.

Invariant: a composed configuration is valid. An unknown key, a value that does not fit, or one that this release
cannot honour is an error that names the key and what would do.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from hydra import compose as hydra_compose
from hydra import initialize, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_rl.config.schema import Config, Section, TrainConfig
from lightning_rl.errors import Explained

DEFAULTS = "lightning_rl/ppo"  # a Hydra file of one's own begins with `defaults: [lightning_rl/ppo, _self_]`

C = TypeVar("C", bound=Config)
_CONVERSION = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<place>[^`]*)`)?", re.DOTALL)


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
    given: Mapping[str, Any] | DictConfig | None = None,
    *,
    file: Path | None = None,
    command_line: Sequence[str] = (),
    schema: type[C] = Config,  # type: ignore[assignment]
) -> C:
    """The defaults of `schema`, then `file` (YAML), then `given` (a nested dict), then Hydra's `key=value` overrides.

    Raises ConfigError naming the key: unknown (with the nearest valid one), or with a value that does not fit.
    """
    valid = {key.name for key in keys(schema)}
    valid |= {f"{key.name}.*" for key in keys(schema) if _is_dict(key.type)}
    groups = {name.rsplit(".", depth)[0] for name in valid for depth in range(1, name.count(".") + 1)}
    try:
        _check_names(_named_on(command_line), valid, groups)
        layers = [_defaults(schema), _read(file, schema), OmegaConf.create(dict(given or {}))]
        for layer in layers:
            _check_names(_names(layer), valid, groups)
        layers.append(_from_command_line(command_line, schema))
        merged = msgspec.to_builtins(OmegaConf.to_container(OmegaConf.merge(*layers), resolve=True), enc_hook=str)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"the configuration cannot be composed: {error}") from error
    return _checked(merged, schema)


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


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that `compose(file=...)` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(msgspec.to_builtins(config)))


def _defaults(schema: type[Config]) -> Any:
    return OmegaConf.create(msgspec.to_builtins(schema()))


def _store(schema: type[Config]) -> None:
    group, _, name = DEFAULTS.partition("/")
    ConfigStore.instance().store(group=group, name=name, node=_defaults(schema), package="_global_")


def _read(file: Path | None, schema: type[Config]) -> Any:
    if file is None:
        return OmegaConf.create({})
    if not file.is_file():
        raise ConfigError(f"there is no configuration file {file.resolve()}")
    _store(schema)
    with _apart(), initialize_config_dir(str(file.resolve().parent), version_base="1.3"):
        return hydra_compose(file.stem)


def _from_command_line(overrides: Sequence[str], schema: type[Config]) -> Any:
    """The values that the overrides give; Hydra reads them against the defaults."""
    if not overrides:
        return OmegaConf.create({})
    _store(schema)
    with _apart(), initialize(config_path=None, version_base="1.3"):
        composed = hydra_compose(DEFAULTS, [*overrides])
    changed = OmegaConf.create({})
    for name in _named_on(overrides):
        OmegaConf.update(changed, name, OmegaConf.select(composed, name))
    return changed


@contextmanager
def _apart() -> Iterator[None]:
    """Hydra is one per process: put that of an application around us aside, and back again."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def _named_on(overrides: Sequence[str]) -> list[str]:
    for text in overrides:
        if "=" not in text:
            raise ConfigError(f"{text!r} is no key=value")
    return [
        override.key_or_group.replace("/", ".") for override in OverridesParser.create().parse_overrides([*overrides])
    ]


def _names(config: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of a config's leaves."""
    for name in config:
        value = None if OmegaConf.is_missing(config, name) or OmegaConf.is_interpolation(config, name) else config[name]
        if isinstance(value, DictConfig) and value:
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _check_names(names: Sequence[str] | Iterator[str], valid: set[str], groups: set[str]) -> None:
    for name in names:
        if name not in valid | groups and not any(f"{outer}.*" in valid for outer in _outer(name)):
            raise ConfigError(f"config key {name!r} is unknown; did you mean {_nearest(name, valid | groups)}?")


def _is_dict(annotation: Any) -> bool:
    """Whether a key's value may be a dict, whose names are the user's own."""
    return get_origin(annotation) is dict or any(_is_dict(part) for part in get_args(annotation))


def _outer(name: str) -> list[str]:
    """The dotted names that a name lies under."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _nearest(name: str, valid: set[str]) -> str:
    """The likeliest of the names that end alike, two where there are more, or else the one that is written alike."""
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = [other for other in sorted(valid) if other.rsplit(".", 1)[-1] == leaf]
    found = difflib.get_close_matches(name, same_leaf or sorted(valid), n=2 if same_leaf else 1, cutoff=0.0)
    return " or ".join(repr(one.removesuffix(".*")) for one in found)


def _checked(merged: Any, schema: type[C]) -> C:
    try:
        return msgspec.convert(merged, schema)
    except msgspec.ValidationError as error:
        found = _CONVERSION.fullmatch(str(error))
        assert found is not None
        place = found["place"] or ""
        value = OmegaConf.select(OmegaConf.create(merged), place.removesuffix("[...]")) if place else merged
        raise ConfigError(
            f"config key {place} is {value!r}: {found['what'].lower()}{_choices(schema, place)}"
        ) from error


def _choices(schema: type[Config], place: str) -> str:
    """What a key of few values may be."""
    type_of = {key.name: key.type for key in keys(schema)}.get(place.split("[")[0])
    named = [str(choice) for choice in _literals(type_of)]
    return f"; there are {', '.join(named)}" if named else ""


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _literals(part)]
