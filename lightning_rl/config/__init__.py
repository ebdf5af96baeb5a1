"""The configuration: packaged defaults, merged with what the user gives. Every key in it has an effect.

Keys are verl's. An unknown key is an error that names the nearest valid one.
"""

import difflib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from omegaconf import DictConfig, OmegaConf


class ConfigError(ValueError):
    """A key that does not exist, a value that is missing or does not fit."""


def compose(overrides: Mapping[str, Any] | DictConfig | None = None) -> DictConfig:
    """The packaged defaults with `overrides` (a nested dict) merged into them, read-only.

    Raises ConfigError naming an unknown key and the nearest valid one, and a required key that was left out.
    """
    defaults = OmegaConf.create(files(__package__).joinpath("ppo.yaml").read_text())
    given = OmegaConf.create(dict(overrides) if overrides is not None else {})
    assert isinstance(defaults, DictConfig)
    assert isinstance(given, DictConfig)
    valid = _keys(defaults)
    for key in _keys(given):
        if key not in valid:
            raise ConfigError(f"config key {key!r} is unknown; did you mean {_nearest(key, valid)!r}?")
    merged = OmegaConf.merge(defaults, given)
    assert isinstance(merged, DictConfig)
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise ConfigError(f"config keys without a value: {', '.join(missing)}")
    OmegaConf.set_readonly(merged, True)
    return merged


def _keys(config: DictConfig, prefix: str = "") -> list[str]:
    """Every dotted key, inner and outer."""
    keys: list[str] = []
    for name in map(str, config):
        key = f"{prefix}{name}"
        keys.append(key)
        value = None if OmegaConf.is_missing(config, name) else config[name]
        if isinstance(value, DictConfig):
            keys += _keys(value, f"{key}.")
    return keys


def _nearest(key: str, valid: list[str]) -> str:
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [other for other in valid if other.rsplit(".", 1)[-1] == leaf]
    return (difflib.get_close_matches(key, same_leaf or valid, n=1, cutoff=0.0) or [valid[0]])[0]
