"""SFT: supervised training on the answers of recorded calls. `train_step` is the story; its parts are in `sft/`.

The calls are in folders and files (`fit`), or the agent is run with a teacher first (`Trainer(agent).fit(sft, tasks)`).

The loss is the mean negative log-likelihood of answer tokens. It is the policy gradient of PPO's own actor (`gpg`)
where the advantage of a token is its weight, so models, packing, optimizer, workers and checkpoints are those of PPO.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from omegaconf import DictConfig

from lightning_rl.algorithms.base import Dataset, Endpoint
from lightning_rl.config import ConfigError, to_yaml
from lightning_rl.config.schema import Config
from lightning_rl.configured_algorithm import ConfiguredAlgorithm
from lightning_rl.files import make_run_dir, note_finished, note_unfinished, owned, write_whole
from lightning_rl.inference.load import located
from lightning_rl.loops.loop_registry import loops_of
from lightning_rl.memory.plan import refuse_what_cannot_fit
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo import tasks as tasks_of_run
from lightning_rl.ppo.models import Models
from lightning_rl.ppo.reporting import memory_advice, timed
from lightning_rl.rewards.training_rewards import Grader, fetch
from lightning_rl.sft import examples
from lightning_rl.sft.examples import Example, Examples
from lightning_rl.sft.teacher import TeacherBaseline
from lightning_rl.sft.traces import TracedCall
from lightning_rl.telemetry import metrics as trackers
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl.telemetry.metrics.about import About
from lightning_rl.training import checkpoint

_log = logging.getLogger(__name__)
_CONFIG = "config.yaml"  # in the run folder
_OF_ACTOR = {
    "actor/pg_loss": "sft/loss",
    "actor/entropy": "sft/entropy",
    "actor/grad_norm": "sft/grad_norm",
    "actor/lr": "sft/lr",
    "perf/padding_share": "perf/padding_share",
    "perf/shared_share": "perf/shared_share",
}


class SFT(ConfiguredAlgorithm):
    """Supervised fine-tuning on traces: the policy learns the answers that another model, or it itself, has given.

    Args:
        config: the keys of PPO (`docs/config.md`); `sft` says which traces.
        traces: folders of runs, and files of `lightning-rl export --what calls`, instead of `sft.traces`. `fit` trains.
        teacher: a model with which the agent is run first, instead of `sft.teacher`: one of `gateway.backends`, a
            folder, or an id of the hub. Then `Trainer(agent).fit(sft, tasks)` runs it and trains.

    Afterwards `history` has the metrics of every step, `examples` what was learned from, and `model` is the folder of
    the trained model, `run_dir`/model, which PPO takes as `actor_rollout_ref.model.path`.
    """

    unnamed = "sft"

    def __init__(
        self,
        config: Mapping[str, Any] | DictConfig | Config | None = None,
        *,
        traces: str | Path | Sequence[str | Path] | None = None,
        teacher: str | Path | None = None,
    ) -> None:
        super().__init__(config)
        if self.config.policies:
            raise ConfigError("policies: SFT trains one policy; train each with a run of its own, sft.models chooses")
        if self.config.trainer.resume_mode == "resume_path":
            raise ConfigError(
                "trainer.resume_mode=resume_path is PPO's: name the model as actor_rollout_ref.model.path"
            )
        named = self.config.sft.traces if traces is None else traces
        self.sources = [named] if isinstance(named, str | Path) else list(named or ())
        if teacher is not None:
            self.config = replace(self.config, sft=replace(self.config.sft, teacher=str(teacher)))
        if not self.sources and self.config.sft.teacher is None:
            raise ConfigError(
                "sft.traces names nothing to learn from: a run's folder, or a file of `export`; or name sft.teacher"
            )
        self.history: list[dict[str, float]] = []
        self.examples = Examples()
        self.step = 0
        self._trained: set[str] = set()  # the rollouts that were in a batch so far
        self.run_dir = Path()
        self.teacher = (
            None if self.config.sft.teacher is None else TeacherBaseline(self.config, self.config.sft.teacher)
        )
        self._grader: Grader | None = None

    @property
    def model(self) -> Path:
        """The folder of the trained model."""
        return self.run_dir / "model"

    def fit(self, run_dir: str | Path | None = None) -> Path:
        """Train on the traces that are named; returns `model`.

        Raises ConfigError for a folder that holds a run (`trainer.resume_mode=auto` goes on with it), for traces that
        cannot be learned from, and where there is a teacher, who needs an agent and tasks.
        """
        if self.teacher is not None:
            raise ConfigError("a teacher's rollouts need the agent and tasks: lrl.Trainer(agent).fit(sft, tasks)")
        self.run_dir = self.run_folder(None if run_dir is None else Path(run_dir))
        if (self.run_dir / _CONFIG).exists() and not self.resume:
            raise ConfigError(f"{self.run_dir} holds a run: set trainer.resume_mode=auto, or name another folder")
        self._read()
        make_run_dir(self.run_dir)
        with owned(self.run_dir):
            return self._learn()

    # What the Trainer calls, where there is a teacher.

    def answer_for(self, names: Sequence[str]) -> None:
        """See `Algorithm`: the teacher plays every part that no frozen model has."""
        if self.teacher is None:
            return  # `prepare` says so
        frozen = self.config.gateway.frozen_models()
        others = [name for name in names if name not in frozen]
        self.teacher.answer_for(others)
        self.resources = ("main_llm", *frozen, *others)

    def prepare(self, train_dataset: Dataset | None, val_dataset: Dataset | None) -> tuple[Dataset, Dataset]:
        """The tasks given, or those of `data.train_files`. Raises ConfigError where there is no teacher to answer
        them, no task, or nothing that would give a reward where one is asked for."""
        if self.teacher is None:
            raise ConfigError("SFT learns from traces alone: call fit(run_dir), or name a teacher that runs the agent")
        if val_dataset:
            raise ConfigError("SFT holds out a share of the groups itself (sft.held_out): leave the val_dataset out")
        data = self.config.data
        tasks = tasks_of_run.tasks_of("train", train_dataset, data.train_files)
        tasks = tasks_of_run.at_most(data.train_max_samples, tasks, data)
        if not tasks:
            raise ConfigError("there is no task for the teacher: give fit some, or set data.train_files")
        if (loops := loops_of(self.config)) is not None:
            loops.check(tasks)
        self._grader = tasks_of_run.grader_of(self.config, Grader.of(self.config.reward, None), (tasks, [], []))
        return tasks, []

    def open(self, run_dir: Path) -> Endpoint:
        """See `Algorithm`."""
        self.run_dir, teacher = run_dir, self._its_teacher
        trackers.check_names(self.config.trainer.logger)
        teacher.run_id, teacher.shares_server, teacher.resume = self.run_id, self.shares_server, self.resume
        endpoint = teacher.open(run_dir)
        if not self.resume:  # of a run that goes on, what it goes on with stays until all of the new is checked
            write_whole(run_dir / _CONFIG, to_yaml(self.config).encode())
        return endpoint

    def watch(self) -> None:
        """See `Algorithm`."""
        self._its_teacher.watch()

    def close(self) -> None:
        """See `Algorithm`."""
        self._its_teacher.close()

    def run(self, train_dataset: Dataset, val_dataset: Dataset) -> None:
        """Let the teacher answer, then train. What it has answered in this folder before, it is not asked again."""
        teacher = self._its_teacher
        teacher.store, teacher.check, teacher.began_ns = self.store, self.check, self.began_ns
        fetch(self._grader)
        traces, evaluation = teacher.answer(train_dataset, self._grader)
        if self.shows:
            print(evaluation)
        teacher.close()  # the policy gets its memory
        self._read(list(teacher.calls(traces)))
        self._learn()

    @property
    def _its_teacher(self) -> TeacherBaseline:
        assert self.teacher is not None, "prepare has refused to run without"
        return self.teacher

    def _read(self, taught: Sequence[TracedCall] = ()) -> None:
        """Read the traces, and what a teacher has answered. Nothing is written: what cannot be learned from leaves a
        folder that is free for the next run."""
        trackers.check_names(self.config.trainer.logger)
        folder, _ = located(self.config.actor_rollout_ref.model.path)
        renderer = resolved_config.loaded_renderer(self.config, folder)
        teacher = None if self.teacher is None else self.teacher.gateway_name
        self.examples = examples.load(self.config, self.sources, renderer, taught=taught, teacher=teacher)

    def _learn(self) -> Path:
        """Train in `run_dir` on `examples`."""
        checkpoints = self.run_dir / "checkpoints"
        checkpoints.mkdir(exist_ok=True)
        resumed = checkpoint.latest(checkpoints) if self.resume else None
        torch.manual_seed(self.config.data.seed)
        refuse_what_cannot_fit(as_trained(self.config), sampled=False)
        models = Models(as_trained(self.config), self.run_dir, with_critic=False, resumed=resumed, sampled=False)
        rate = models.config.actor_rollout_ref.actor.optim.lr
        config = replace(self.config, sft=replace(self.config.sft, lr=rate))
        total = self.steps()
        opened: list[trackers.Tracker] = []
        try:
            try:
                models.train(total)
                self._restore(models, resumed)
                write_whole(self.run_dir / _CONFIG, to_yaml(config).encode())
                self.history = jsonl.keep_until(self.run_dir / "metrics.jsonl", self.step if resumed else None)
                note_unfinished(self.run_dir)
                opened += self._trackers(total)
                self._train(models, total, opened)
            finally:
                models.close()
            model = checkpoint.final_model(self.run_dir, checkpoints / f"step-{max(total, self.step)}")
            note_finished(self.run_dir)
        finally:
            for tracker in opened:
                tracker.close()
        return model

    def steps(self) -> int:
        """How many steps the config makes of the traces that are trained."""
        sft, trainer = self.config.sft, self.config.trainer
        if sft.total_training_steps or sft.total_epochs:
            return sft.total_training_steps or (sft.total_epochs or 1) * self._steps_per_epoch
        return trainer.total_training_steps or trainer.total_epochs * self._steps_per_epoch

    @property
    def _steps_per_epoch(self) -> int:
        return -(-len(self.examples.trained) // self.config.data.train_batch_size)

    def train_step(self, models: Models) -> dict[str, float]:
        """One optimizer step on the batch that is due; its metrics."""
        batch, timing = self._batch(self.step), dict[str, float]()
        rows = weighted(batch)
        with timed(timing, "step"), memory_advice(self.config, self.step):
            models.actor.onload()
            actor_metrics = models.actor.update(models.actor.plan(rows, len(batch)))
            models.actor.offload()
        self._trained.update(one.rollout_id for one in batch)
        metrics = {name: actor_metrics[of_actor] for of_actor, name in _OF_ACTOR.items() if of_actor in actor_metrics}
        metrics["sft/epoch"] = self.step / self._steps_per_epoch
        metrics["sft/tokens"] = float(sum(one.tokens for one in batch))
        metrics["timing_s/step"] = timing["step"]
        return metrics | self.examples.metrics(self._trained_tokens())

    def held_out_loss(self, models: Models) -> dict[str, float]:
        """The mean negative log-likelihood of the answer tokens that are held out, each with weight 1; {} where there
        are none."""
        rows = [sequence for one in self.examples.held_out for sequence in one.sequences]
        if not rows:
            return {}
        models.actor.onload()
        log_probs = np.concatenate(models.actor.log_probs(rows)).astype(np.float64)
        models.actor.offload()
        return {"sft/held_out_loss": float(-log_probs.mean())}

    def _trackers(self, total: int) -> list[trackers.Tracker]:
        trainer = self.config.trainer
        names = trackers.of_run(trainer.logger, console=self.console)
        about = About(name=trainer.experiment_name or self.run_dir.name, config=msgspec.to_builtins(self.config))
        if trainer.project_name:
            about = msgspec.structs.replace(about, project=trainer.project_name)
        return trackers.open_trackers(names, self.run_dir, total, began_at=self.step, about=about)

    def _train(self, models: Models, total: int, opened: Sequence[trackers.Tracker]) -> None:
        trainer = self.config.trainer
        if self.step == 0 and trainer.val_before_train:
            self._log(opened, self.held_out_loss(models))
        while self.step < total:
            self.step += 1
            metrics = self.train_step(models)
            if self._due(trainer.test_freq, total):
                metrics |= self.held_out_loss(models)
            self._log(opened, metrics)
            if self._due(trainer.save_freq, total):
                self._save(models)

    def _log(self, opened: Sequence[trackers.Tracker], metrics: dict[str, float]) -> None:
        if metrics:
            self.history.append({"step": float(self.step), **metrics})
            for tracker in opened:
                tracker.log(self.step, metrics)

    def _due(self, every: int, total: int) -> bool:
        return self.step == total or (every > 0 and self.step % every == 0)

    def _batch(self, step: int) -> list[Example]:
        """The rollouts of a step: every epoch has all of them, with `data.shuffle` in another order."""
        epoch, place = divmod(step - 1, self._steps_per_epoch)
        size = self.config.data.train_batch_size
        return self._ordered(epoch)[place * size : (place + 1) * size]

    def _ordered(self, epoch: int) -> list[Example]:
        trained, data = self.examples.trained, self.config.data
        if not data.shuffle:
            return trained
        order = np.random.default_rng([data.seed, epoch]).permutation(len(trained))
        return [trained[index] for index in order]

    def _trained_tokens(self) -> int:
        """Tokens that were trained at least once."""
        return sum(one.tokens for one in self.examples.trained if one.rollout_id in self._trained)

    def _save(self, models: Models) -> None:
        checkpoints = self.run_dir / "checkpoints"
        state = {
            "step": self.step,
            "trained": sorted(self._trained),
            "order": self._order_of_now,
            "models": models.state_dict(),
            "rng": checkpoint.rng_state(),
        }
        checkpoint.save(checkpoints / f"step-{self.step}", export=models.export, state=state)
        checkpoint.prune(checkpoints, self.config.trainer.max_actor_ckpt_to_keep)

    def _restore(self, models: Models, resumed: Path | None) -> None:
        if resumed is None:
            return
        saved = checkpoint.open_state(resumed)
        if "batches_taken" in saved:
            raise ConfigError(f"{resumed} is a checkpoint of PPO: name another folder for SFT")
        self.step = saved["step"]
        models.load_state_dict(saved["models"])
        checkpoint.set_rng_state(saved["rng"])
        # A checkpoint of an earlier release does not say: then what the traces of now make of its steps.
        first = self._ordered(0)[: self.step * self.config.data.train_batch_size]
        self._trained = set(saved.get("trained", [one.rollout_id for one in first]))
        if saved.get("order", self._order_of_now) != self._order_of_now:
            _log.warning(
                "the traces, data.train_batch_size, data.shuffle or data.seed are not those of the run so far: of the "
                "epoch in which it goes on some rollouts are trained twice, and some not at all"
            )
        if overlap := sum(one.rollout_id in self._trained for one in self.examples.held_out):
            _log.warning(
                "%d of the %d rollouts that are held out were trained before: sft/held_out_loss is none of unseen ones",
                overlap,
                len(self.examples.held_out),
            )

    @property
    def _order_of_now(self) -> str:
        """What the order of the batches hangs on, as a digest."""
        data, names = self.config.data, [one.rollout_id for one in self.examples.trained]
        encoded = msgspec.json.encode([data.train_batch_size, data.shuffle, data.seed, names])
        return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def as_trained(config: Config) -> Config:
    """The keys with which PPO's actor does supervised training: one optimizer step a batch, on the mean over tokens."""
    section = config.actor_rollout_ref
    actor = replace(
        section.actor,
        ppo_mini_batch_size=config.data.train_batch_size,
        ppo_epochs=1,
        loss_agg_mode="token-mean",
        entropy_coeff=0.0,
        use_kl_loss=False,
        policy_loss=replace(section.actor.policy_loss, loss_mode="gpg"),
        optim=replace(section.actor.optim, lr=section.actor.optim.lr if config.sft.lr is None else config.sft.lr),
    )
    return replace(
        config,
        actor_rollout_ref=replace(section, actor=actor, rollout=replace(section.rollout, n=1, name="embedded")),
        algorithm=replace(config.algorithm, use_kl_in_reward=False, adv_estimator="grpo"),  # which needs no critic
        critic=replace(config.critic, enable=False),
        distillation=replace(config.distillation, enabled=False),
    )


def weighted(batch: Sequence[Example]) -> list[Any]:
    """The rows of a batch, numbered by rollout; their advantages make the loss a mean over tokens, weighted by rollout.

    The actor divides by the count of tokens, so a rollout's weight is given in units of the mean weight of a token.
    """
    tokens = sum(one.tokens for one in batch)
    mean = sum(one.weight * one.tokens for one in batch) / tokens
    return [
        replaced(row, rollout=rollout, advantages=np.full(len(row.trained), one.weight / mean, np.float32))
        for rollout, one in enumerate(batch)
        for row in one.sequences
    ]
