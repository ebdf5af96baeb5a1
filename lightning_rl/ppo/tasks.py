"""The tasks of a run: those that were given, or of files; at most so many; none whose prompt is known to be too long.

Invariant: the same tasks, config and seed give the same datasets, so that a run that is resumed finds its tasks again.
"""

import logging
from itertools import chain
from pathlib import Path

import numpy as np

from lightning_rl.agents.task_fields import LoopTaskError
from lightning_rl.algorithms.base import Dataset
from lightning_rl.config import ConfigError
from lightning_rl.config.schema import Config, Data
from lightning_rl.data import load_tasks
from lightning_rl.data.dataset import dataset_of
from lightning_rl.loops.first_prompts import FirstPrompts
from lightning_rl.loops.loop_registry import loops_of
from lightning_rl.ppo import resolved_config
from lightning_rl.rewards.by_data_source import DataSourceReward, unscored
from lightning_rl.rewards.training_rewards import Grader
from lightning_rl_proxy.errors import GatewayError

Datasets = tuple[Dataset, Dataset, Dataset]  # of training, validation and tuning

_log = logging.getLogger(__name__)


def datasets(config: Config, train: Dataset | None, val: Dataset | None, tune: Dataset | None) -> Datasets:
    """The datasets that were given, or those of the files that the config names: training, validation, tuning.

    Raises ConfigError where one that the config needs is missing, or its agent loop refuses a task.
    """
    data, trainer = config.data, config.trainer
    tasks = at_most(data.train_max_samples, tasks_of("train", train, data.train_files), data)
    held_out = at_most(data.val_max_samples, tasks_of("val", val, data.val_files), data)
    tuning = tasks_of("tune", tune, data.tune_files)
    if (loops := loops_of(config)) is not None:
        for dataset in (tasks, held_out, tuning):
            loops.check(dataset)
        if (unused := loops.unused_tools(chain(tasks, held_out, tuning))) is not None:
            _log.warning("%s", unused)
    if trainer.val_only and not held_out:
        raise ConfigError("trainer.val_only needs validation tasks: a val_dataset, or data.val_files")
    if trainer.early_stopping.patience is not None and not tuning:
        raise ConfigError(
            "trainer.early_stopping goes by a tuning set, for the validation set is only reported: give PPO a "
            "tune_dataset, or set data.tune_files"
        )
    return tasks, held_out, tuning


def tasks_of(name: str, dataset: Dataset | None, files: str | list[str] | None) -> Dataset:
    """The tasks that `fit` was given, or else those of `data.<name>_files`."""
    if dataset is not None and files is not None:
        _log.info("tasks are fit's %s_dataset; data.%s_files=%r is not read", name, name, files)
    if dataset is None and files is not None:
        dataset = dataset_of(load_tasks(files), f"data.{name}_files")
    return dataset or []


def at_most(most: int, tasks: Dataset, data: Data) -> Dataset:
    """The first `most` tasks, or with `data.shuffle` as many by `data.seed`, as verl takes them; below 1: all."""
    if not 0 < most < len(tasks):
        return tasks
    chosen = np.random.default_rng(data.seed).choice(len(tasks), size=most, replace=False).tolist()
    return [tasks[index] for index in (chosen if data.shuffle else range(most))]


def without_overlong(config: Config, folder: Path, splits: Datasets) -> Datasets:
    """The datasets without the tasks whose first prompt has more than `data.max_prompt_length` tokens;
    all tasks where the config does not ask for that. Logs how many of how many are left out.

    `folder` is the policy's.
    """
    if not config.data.filter_overlong_prompts:
        return splits
    if (loops := loops_of(config)) is None:
        _log.warning(
            "data.filter_overlong_prompts has no effect: an agent writes its prompts itself, and they are known "
            "when it asks; rows that are too long are treated as data.overlong says"
        )
        return splits
    prompts = FirstPrompts(loops, resolved_config.loaded_renderer(config, folder))
    limit, (train, val, tune) = config.data.max_prompt_length, splits
    return (
        _within(limit, prompts, "training", train),
        _within(limit, prompts, "validation", val),
        _within(limit, prompts, "tuning", tune),
    )


def grader_of(config: Config, grader: Grader | None, splits: Datasets) -> Grader | None:
    """What grades the rollouts: `grader` where there is one; else, where no loop gives a reward, the scorers of the
    tasks' `data_source`; None where the agents' own rewards count.

    Raises ConfigError where nothing would give a reward.
    """
    loops, (train, val, tune) = loops_of(config), splits
    if grader is not None or loops is None or loops.rewards_any(train or val):
        return grader
    if (why := unscored([*train, *val, *(tune or ())])) is None:
        return Grader(DataSourceReward(), concurrency=1)
    if config.distillation.without_rewards:
        return None
    raise ConfigError(
        f"nothing gives the rollouts a reward: the loop {loops.default} gives none, there is no reward function and no "
        f"judge (reward.judge.model), and {why}"
    )


def _within(limit: int, prompts: FirstPrompts, name: str, tasks: Dataset) -> Dataset:
    fitting, refused = [], []
    for index, task in enumerate(tasks):
        try:
            tokens = prompts.tokens(task)
        except (LoopTaskError, GatewayError) as error:
            refused.append(f"task {index}: {error}")
        else:
            if tokens is None or tokens <= limit:
                fitting.append(task)
    if len(fitting) == len(tasks):
        return tasks
    _log.warning(
        "data.filter_overlong_prompts: %d of %d %s tasks are left out: their prompts have more than "
        "data.max_prompt_length=%d tokens%s",
        len(tasks) - len(fitting),
        len(tasks),
        name,
        limit,
        f", or cannot be rendered ({len(refused)}; {refused[0]})" if refused else "",
    )
    return fitting
