"""Algorithms that a config describes: what the Trainer needs to know of them comes from the same keys in all."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_rl.algorithms.base import Algorithm
from lightning_rl.config import ConfigError, compose
from lightning_rl.config.schema import Config
from lightning_rl.loops.configured import configured_agents


def composed(config: Mapping[str, Any] | DictConfig | Config | None) -> Config:
    """The whole config, of the keys that differ from the defaults. Raises ConfigError."""
    if config is not None and not isinstance(config, Mapping | DictConfig | Config):
        raise ConfigError(
            f"the config is {config!r:.80}: give a dict of keys, or of a file what OmegaConf.load makes of it"
        )
    return config if isinstance(config, Config) else compose(config)


class ConfiguredAlgorithm(Algorithm):
    """An algorithm with a `config`: how many rollouts run at once, in which folder the run is, what is resumed."""

    console = True  # False: nothing is shown, whatever trainer.logger says
    unnamed = ""  # what its run folders are called where trainer.experiment_name is null

    def __init__(self, config: Mapping[str, Any] | DictConfig | Config | None = None) -> None:
        self.config = composed(config)
        trainer, agent = self.config.trainer, self.config.actor_rollout_ref.rollout.agent
        self.configured_agents = configured_agents(self.config)
        self.n_runners = agent.max_concurrent_rollouts
        self.watchdog_seconds = trainer.watchdog_seconds
        self.isolation = agent.isolation
        self.resources = ("main_llm", *self.config.policies, *self.config.gateway.frozen_models())
        self.ray = agent.ray if agent.ray.address is not None else None
        self.resume = trainer.resume_mode == "auto"
        self.named_run_dir = None if trainer.default_local_dir is None else Path(trainer.default_local_dir).expanduser()

    @property
    def shows(self) -> bool:
        """Whether a person reads along."""
        return self.console and "console" in self.config.trainer.logger

    def default_run_dir(self) -> Path:
        """See `Algorithm`."""
        trainer, when = self.config.trainer, time.strftime("%Y%m%d-%H%M%S")
        name = "-".join(filter(None, (trainer.experiment_name or self.unnamed, when)))
        return Path("runs") / (trainer.project_name or "") / name
