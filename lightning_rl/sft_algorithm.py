"""SFT: supervised training on the answers of recorded calls. `train_step` is the story; its parts are in `sft/`.

The loss is the mean negative log-likelihood of answer tokens. It is the policy gradient of PPO's own actor (`gpg`)
where the advantage of a token is its weight, so models, packing, optimizer, workers and checkpoints are those of PPO.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from omegaconf import DictConfig

from lightning_rl.config import ConfigError, compose, to_yaml
from lightning_rl.config.schema import Config
from lightning_rl.files import write_whole
from lightning_rl.inference.load import located
from lightning_rl.memory.plan import refuse_what_cannot_fit
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.models import Models
from lightning_rl.ppo.reporting import memory_advice, timed
from lightning_rl.sft import examples
from lightning_rl.sft.examples import Example, Examples
from lightning_rl.telemetry import metrics as trackers
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl.telemetry.metrics.about import About
from lightning_rl.training import checkpoint

_OF_ACTOR = {
    "actor/pg_loss": "sft/loss",
    "actor/entropy": "sft/entropy",
    "actor/grad_norm": "sft/grad_norm",
    "actor/lr": "sft/lr",
    "perf/padding_share": "perf/padding_share",
    "perf/shared_share": "perf/shared_share",
}


class SFT:
    """Supervised fine-tuning on traces: the policy learns the answers that another model, or it itself, has given.

    Args:
        config: the keys of PPO (`docs/config.md`); `sft` says which traces.
        traces: folders of runs, and files of `lightning-rl export --what calls`, instead of `sft.traces`.

    After `fit`, `history` has the metrics of every step, `examples` what was learned from.
    """

    console = True  # False: nothing is shown, whatever trainer.logger says

    def __init__(
        self,
        config: Mapping[str, Any] | DictConfig | Config | None = None,
        *,
        traces: str | Path | Sequence[str | Path] | None = None,
    ) -> None:
        self.config = config if isinstance(config, Config) else compose(config)
        if self.config.policies:
            raise ConfigError("policies: SFT trains one policy; train each with a run of its own, sft.models chooses")
        named = self.config.sft.traces if traces is None else traces
        self.sources = [named] if isinstance(named, str | Path) else list(named or ())
        if not self.sources:
            raise ConfigError("sft.traces names nothing to learn from: a run's folder, or a file of `export`")
        self.history: list[dict[str, float]] = []
        self.examples = Examples()
        self.step = 0
        self.run_dir = Path()

    def fit(self, run_dir: str | Path | None = None) -> Path:
        """Train; the folder of the trained model, `run_dir`/model, which PPO takes as `actor_rollout_ref.model.path`.

        Raises ConfigError for a folder that holds a run (`trainer.resume_mode=auto` goes on with it), and for traces
        that cannot be learned from.
        """
        trainer = self.config.trainer
        self.run_dir = Path(run_dir or trainer.default_local_dir or self._new_run_dir()).expanduser()
        checkpoints = self.run_dir / "checkpoints"
        resume = trainer.resume_mode == "auto"
        if trainer.resume_mode == "resume_path":
            raise ConfigError(
                "trainer.resume_mode=resume_path is PPO's: name the model as actor_rollout_ref.model.path"
            )
        if (self.run_dir / "config.yaml").exists() and not resume:
            raise ConfigError(f"{self.run_dir} holds a run: set trainer.resume_mode=auto, or name another folder")
        trackers.check_names(trainer.logger)
        # Before anything is written: a folder with a run in it is not taken again.
        folder, _ = located(self.config.actor_rollout_ref.model.path)
        self.examples = examples.load(self.config, self.sources, resolved_config.loaded_renderer(self.config, folder))
        checkpoints.mkdir(parents=True, exist_ok=True)
        resumed = checkpoint.latest(checkpoints) if resume else None
        torch.manual_seed(self.config.data.seed)
        refuse_what_cannot_fit(as_trained(self.config))
        models = Models(as_trained(self.config), self.run_dir, with_critic=False, resumed=resumed, sampled=False)
        optim = models.config.actor_rollout_ref.actor.optim
        write_whole(self.run_dir / "config.yaml", to_yaml(_with_rate(self.config, optim.lr)).encode())
        total = self.steps()
        try:
            models.train(total)
            self._restore(models, resumed)
            self.history = jsonl.keep_until(self.run_dir / "metrics.jsonl", self.step if resumed else None)
            self._train(models, total)
        finally:
            models.close()
        return checkpoint.final_model(self.run_dir, checkpoints / f"step-{total}")

    def steps(self) -> int:
        """How many steps the config makes of the traces that are trained."""
        trainer = self.config.trainer
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
            found = models.actor.update(models.actor.plan(rows, len(batch)))
            models.actor.offload()
        metrics = {name: found[of_actor] for of_actor, name in _OF_ACTOR.items() if of_actor in found}
        metrics["sft/epoch"] = self.step / self._steps_per_epoch
        metrics["sft/tokens"] = float(sum(one.tokens for one in batch))
        metrics["timing_s/step"] = timing["step"]
        return metrics | self.examples.metrics(self._seen())

    def held_out_loss(self, models: Models) -> dict[str, float]:
        """The mean negative log-likelihood of the answer tokens that are held out, each with weight 1; {} where there
        are none."""
        rows = [sequence for one in self.examples.held_out for sequence in one.sequences]
        if not rows:
            return {}
        models.actor.onload()
        found = np.concatenate(models.actor.log_probs(rows)).astype(np.float64)
        models.actor.offload()
        return {"sft/held_out_loss": float(-found.mean())}

    def _train(self, models: Models, total: int) -> None:
        trainer = self.config.trainer
        names = [name for name in trainer.logger if name != "console" or self.console]
        about = About(name=trainer.experiment_name or self.run_dir.name, config=msgspec.to_builtins(self.config))
        if trainer.project_name:
            about = msgspec.structs.replace(about, project=trainer.project_name)
        opened = trackers.open_trackers(names, self.run_dir, total, began_at=self.step, about=about)
        try:
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
        finally:
            for tracker in opened:
                tracker.close()

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

    def _seen(self) -> int:
        """Tokens that were trained at least once: those of the first pass, as far as it came."""
        return sum(one.tokens for one in self._ordered(0)[: self.step * self.config.data.train_batch_size])

    def _save(self, models: Models) -> None:
        checkpoints = self.run_dir / "checkpoints"
        state = {"step": self.step, "models": models.state_dict(), "rng": checkpoint.rng_state()}
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

    def _new_run_dir(self) -> Path:
        trainer, when = self.config.trainer, time.strftime("%Y%m%d-%H%M%S")
        return Path("runs") / (trainer.project_name or "") / f"{trainer.experiment_name or 'sft'}-{when}"


def as_trained(config: Config) -> Config:
    """The keys with which PPO's actor does supervised training: one optimizer step a batch, on the mean over tokens."""
    ours = config.actor_rollout_ref
    actor = replace(
        ours.actor,
        ppo_mini_batch_size=config.data.train_batch_size,
        ppo_epochs=1,
        loss_agg_mode="token-mean",
        entropy_coeff=0.0,
        use_kl_loss=False,
        policy_loss=replace(ours.actor.policy_loss, loss_mode="gpg"),
    )
    return replace(
        config,
        actor_rollout_ref=replace(ours, actor=actor, rollout=replace(ours.rollout, n=1, name="embedded")),
        algorithm=replace(config.algorithm, use_kl_in_reward=False),
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


def _with_rate(config: Config, rate: float | None) -> Config:
    """The config with the learning rate that its model was given."""
    ours = config.actor_rollout_ref
    optim = replace(ours.actor.optim, lr=rate)
    return replace(config, actor_rollout_ref=replace(ours, actor=replace(ours.actor, optim=optim)))
