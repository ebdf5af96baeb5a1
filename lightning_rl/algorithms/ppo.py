"""PPO: the training loop that is its own documentation.

A step rolls out `n` times per task, reads the finished rollouts back as rows, estimates advantages over rollouts,
updates the policy, and publishes its weights. Sampler and trainer are compared on the first batch, tokens are
accounted for after every step: a run stops rather than train on wrong data.
"""

import copy
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from lightning_rl import tracking
from lightning_rl.algorithms.base import Algorithm, Endpoint
from lightning_rl.algorithms.conservation import TokenAccount
from lightning_rl.algorithms.trajectories import Trajectory, trajectory_of
from lightning_rl.config import ConfigError, compose
from lightning_rl.inference.engine import EmbeddedEngine
from lightning_rl.inference.load import load_model, model_folder
from lightning_rl.inference.server import EngineServer
from lightning_rl.rl import advantages
from lightning_rl.store.contract import RolloutRequest
from lightning_rl.training import checkpoint
from lightning_rl.training.actor import Actor, ActorConfig
from lightning_rl.training.batch import TrainingSequence, sequence_of

_WAIT_SECONDS = 10.0
_PAUSE_LEASE_SECONDS = 120.0  # a trainer that dies in mid-update does not park its agents for ever


class SamplerMismatch(RuntimeError):
    """The engine's log probabilities are not the trainer's: training on them would be wrong in silence."""


class PPO(Algorithm):
    """Proximal policy optimisation with group-relative advantages, under verl's config keys (see `config/ppo.yaml`)."""

    def __init__(self, config: Mapping[str, Any] | DictConfig | None = None) -> None:
        self.config = compose(config)
        self.step = 0
        self.policy_version = 0
        self.history: list[dict[str, float]] = []

    def open(self, run_dir: Path) -> Endpoint:
        """Load the model and start the embedded engine."""
        model_config, rollout = self.config.actor_rollout_ref.model, self.config.actor_rollout_ref.rollout
        if rollout.name != "embedded":
            raise ConfigError(f"actor_rollout_ref.rollout.name {rollout.name!r} is unknown; there is 'embedded'")
        if self.config.algorithm.adv_estimator != "grpo":
            raise ConfigError(
                f"algorithm.adv_estimator {self.config.algorithm.adv_estimator!r} is unknown; there is 'grpo'"
            )
        self.run_dir = run_dir
        self.model_path = model_folder(model_config.path)
        # Under its id a hub's model finds its renderer by itself.
        self.model_name = self.model_path.name if Path(model_config.path).is_dir() else str(model_config.path)
        torch.manual_seed(self.config.data.seed)
        self.model: Any = load_model(self.model_path, device=_device(self.config.trainer.device))
        self.engine = EmbeddedEngine(
            copy.deepcopy(self.model),
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=rollout.max_model_len,
            threads=rollout.num_threads,
        )
        self.engine.start()
        self.engine_server = EngineServer(self.engine)
        self.engine_server.start()
        self.account = TokenAccount(self.model_name)
        engine = {"model": self.model_name, "kind": "embedded", "url": self.engine_server.url, "policy_version": 0}
        return Endpoint(
            model=self.model_name, tokenizer=str(self.model_path), renderer=rollout.renderer, engines=[engine]
        )

    def close(self) -> None:
        """Stop the engine."""
        if hasattr(self, "engine_server"):
            self.engine_server.stop()
        if hasattr(self, "engine"):
            self.engine.stop()

    def run(self, train_dataset: Sequence[Any] | None, val_dataset: Sequence[Any] | None = None) -> None:
        """Train on `train_dataset` and report on `val_dataset`."""
        if not train_dataset:
            raise ValueError("train_dataset is empty; PPO needs tasks to learn from")
        config = self.config.trainer
        batches = self._batches(train_dataset)
        total = config.total_training_steps or config.total_epochs * (len(train_dataset) // self._batch_size)
        if total < 1:
            raise ConfigError(
                f"{len(train_dataset)} tasks are fewer than data.train_batch_size={self._batch_size}: not one step"
            )
        self.actor = Actor(self.model, _actor_config(self.config, total), pad_id=self.model.config.pad_token_id or 0)
        self._trackers = tracking.open_trackers(list(config.logger), self.run_dir, total)
        try:
            self._publish_resources()
            if val_dataset and config.val_before_train:
                self._log(self.validate(val_dataset))
            for self.step, tasks in zip(range(1, total + 1), batches, strict=False):
                metrics = self.train_step(tasks)
                if val_dataset and (self._due(config.test_freq) or self.step == total):
                    metrics |= self.validate(val_dataset)
                if self._due(config.save_freq) or self.step == total:
                    self.save()
                self._log(metrics)
        finally:
            for tracker in self._trackers:
                tracker.close()

    def train_step(self, tasks: Sequence[tuple[int, Any]]) -> dict[str, float]:
        """One step on (task index, task) pairs; its metrics."""
        timing: dict[str, float] = {}
        with _timed(timing, "step"):
            with _timed(timing, "gen"):
                trajectories = self.roll_out("train", tasks, self.config.actor_rollout_ref.rollout.n)
            with _timed(timing, "adv"):
                sequences = self._sequences(trajectories)
            with _timed(timing, "old_log_prob"):
                metrics = self._set_old_log_probs(sequences)
            with _timed(timing, "update_actor"):
                metrics |= self.actor.update(sequences)
            with _timed(timing, "update_weights"):
                self._publish_weights()
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        return metrics | _rollout_metrics(trajectories, timing) | self._check_tokens()

    def validate(self, val_dataset: Sequence[Any]) -> dict[str, float]:
        """Roll out the validation tasks under validation sampling; `val/...` metrics."""
        timing: dict[str, float] = {}
        with _timed(timing, "testing"):
            n = self.config.actor_rollout_ref.rollout.val_kwargs.n
            trajectories = self.roll_out("val", list(enumerate(val_dataset)), n)
        for trajectory in trajectories:
            self._exclude(trajectory, "validation")
        rewards = [t.reward for t in trajectories if t.reward is not None]
        return {
            "val/reward": float(np.mean(rewards)) if rewards else 0.0,
            "val/calls": float(np.mean([t.calls for t in trajectories])),
            "timing_s/testing": timing["testing"],
        } | self._check_tokens()

    def roll_out(self, mode: str, tasks: Sequence[tuple[int, Any]], n: int) -> list[Trajectory]:
        """Ask for `n` rollouts of each task, and read them back as they end. Groups are in the order of `tasks`."""
        prefix = f"{mode}-{self.config.data.seed}-{self.step}"
        requests = [
            RolloutRequest(
                task=task,
                mode=mode,  # type: ignore[arg-type]
                rollout_id=f"{prefix}-{index}-{k}",
                group_id=f"{prefix}-{index}",
                metadata={"task_index": f"{index}-{k}", "step": self.step},
            )
            for index, task in tasks
            for k in range(n)
        ]
        self.store.enqueue(requests)
        waiting = {str(request.rollout_id) for request in requests}
        ended: dict[str, Trajectory] = {}
        while waiting:
            self.check()
            finished = [r.rollout_id for r in self.store.wait(sorted(waiting), wait_seconds=_WAIT_SECONDS)]
            for trace in self.store.traces(finished).values():
                ended[trace.rollout.rollout_id] = trajectory_of(
                    trace, agent_failure=self._agent_failure(), max_tokens=self._max_tokens
                )
            waiting.difference_update(finished)
        return [ended[str(request.rollout_id)] for request in requests]

    def save(self) -> Path:
        """Write a checkpoint that `transformers` loads; its folder."""
        folder = self.run_dir / "checkpoints" / f"step-{self.step}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        return checkpoint.save(self.model, self.model_path, folder)

    def _sequences(self, trajectories: list[Trajectory]) -> list[TrainingSequence]:
        """Advantages over the rollouts that have a reward, spread over their calls; then the rows that train."""
        rewarded = [t for t in trajectories if t.reward is not None]
        estimates = advantages.grpo(
            [t.reward for t in rewarded if t.reward is not None],
            [t.group_id for t in rewarded],
            norm_by_std=self.config.algorithm.norm_adv_by_std_in_grpo,
        )
        advantage = dict(zip((t.rollout_id for t in rewarded), estimates.tolist(), strict=True))
        sequences: list[TrainingSequence] = []
        for i, trajectory in enumerate(trajectories):
            if trajectory.reward is None:
                self._exclude(trajectory, "no_reward")
                continue
            for reason, tokens in trajectory.excluded.items():
                self.account.exclude(reason, tokens)
            for row in trajectory.rows:
                if row.excluded is not None:
                    self.account.exclude(row.excluded, sum(row.loss_mask))
                    continue
                calls = {call_id for call_id in row.call_ids if call_id is not None}
                sequence = sequence_of(row, i, dict.fromkeys(calls, advantage[trajectory.rollout_id]))
                sequences.append(sequence)
        return [sequence for sequence in sequences if self._usable(sequence)]

    def _usable(self, sequence: TrainingSequence) -> bool:
        """Leave out the tokens that lack what the update needs of them; whether any are left."""
        if self.config.algorithm.rollout_correction.bypass_mode:
            known = ~np.isnan(sequence.rollout_log_probs)
            self.account.exclude("no_logprob", int((~known).sum()))
            sequence.keep(known)
        self.account.train(len(sequence.trained))
        return len(sequence.trained) > 0

    def _set_old_log_probs(self, sequences: list[TrainingSequence]) -> dict[str, float]:
        """Old log probabilities: the sampler's (bypass) or the trainer's own; and how far the two are apart."""
        bypass = self.config.algorithm.rollout_correction.bypass_mode
        if bypass:
            for sequence in sequences:
                sequence.old_log_probs = sequence.rollout_log_probs
        if bypass and self.step > 1:
            return {}
        gaps = [np.zeros(1, np.float32)]
        for sequence, own in zip(sequences, self.actor.log_probs(sequences), strict=True):
            gaps.append(np.abs(own - sequence.rollout_log_probs))
            if not bypass:
                sequence.old_log_probs = own
        gap = np.concatenate(gaps)
        largest = float(np.nanmax(gap))
        if self.step == 1 and largest > self.config.trainer.sampler_tolerance:
            raise SamplerMismatch(
                f"on the first batch sampler and trainer log probabilities differ by up to {largest:.3g} "
                f"(trainer.sampler_tolerance is {self.config.trainer.sampler_tolerance:g}): the engine does not run "
                "the model that is trained; check its weights, dtype, chat format and cache"
            )
        return {"training/rollout_probs_diff_max": largest, "training/rollout_probs_diff_mean": float(np.nanmean(gap))}

    def _publish_resources(self) -> None:
        """Publish the policy under the name `main_llm`, with the sampling of training and of validation."""
        rollout, limit = self.config.actor_rollout_ref.rollout, self.config.data.max_response_length
        self.store.publish(
            {
                "main_llm": {
                    "type": "proxy_llm",
                    "model": self.model_name,
                    "sampling_parameters": _sampling(rollout, limit),
                    "val_sampling_parameters": _sampling(rollout.val_kwargs, limit),
                }
            }
        )

    def _publish_weights(self) -> None:
        """Give the engine the new weights while calls wait at the gateway."""
        self.policy_version += 1
        self.store.pause(self.model_name, lease_seconds=_PAUSE_LEASE_SECONDS)
        self.engine.update_weights(self.model, self.policy_version)
        self.store.resume(self.model_name, self.policy_version)

    def _check_tokens(self) -> dict[str, float]:
        state = self.store.state()
        received = int(state["models"][self.model_name]["tokens_received"])
        return self.account.check(received, int(state["tokens_pending"]))

    def _exclude(self, trajectory: Trajectory, reason: str) -> None:
        """Enter all of a trajectory's tokens as excluded: by `reason`, where nothing excluded them before."""
        for earlier, tokens in trajectory.excluded.items():
            self.account.exclude(earlier, tokens)
        self.account.exclude(reason, trajectory.sampled_tokens - trajectory.excluded.get("undelivered", 0))

    def _batches(self, dataset: Sequence[Any]) -> Iterator[list[tuple[int, Any]]]:
        """(index, task) pairs, `train_batch_size` at a time; every epoch in another order; what is over is dropped."""
        order = list(range(len(dataset)))
        shuffle = random.Random(self.config.data.seed)
        while True:
            if self.config.data.shuffle:
                shuffle.shuffle(order)
            for start in range(0, len(order) - self._batch_size + 1, self._batch_size):
                yield [(i, dataset[i]) for i in order[start : start + self._batch_size]]

    def _log(self, metrics: dict[str, float]) -> None:
        metrics["training/policy_version"] = float(self.policy_version)
        self.history.append({"step": float(self.step), **metrics})
        for tracker in self._trackers:
            tracker.log(self.step, metrics)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _agent_failure(self) -> float | None:
        rule = self.config.algorithm.agent_failure
        return {"zero": 0.0, "exclude": None}[rule] if isinstance(rule, str) else float(rule)

    @property
    def _batch_size(self) -> int:
        return int(self.config.data.train_batch_size)

    @property
    def _max_tokens(self) -> int:
        return int(self.config.data.max_prompt_length + self.config.data.max_response_length)


VERL = PPO


def _rollout_metrics(trajectories: list[Trajectory], timing: Mapping[str, float]) -> dict[str, float]:
    rewards = [t.reward for t in trajectories if t.reward is not None] or [0.0]
    rows = [row for t in trajectories for row in t.rows]
    calls = sum(t.calls for t in trajectories)
    groups = Counter(t.group_id for t in trajectories)
    return {
        "critic/rewards/mean": float(np.mean(rewards)),
        "critic/rewards/max": float(np.max(rewards)),
        "critic/rewards/min": float(np.min(rewards)),
        "num_turns/mean": calls / max(len(trajectories), 1),
        "response_length/mean": float(np.mean([t.sampled_tokens for t in trajectories])),
        "row_length/mean": float(np.mean([len(row.token_ids) for row in rows] or [0])),
        "rollouts/rows": float(len(rows)),
        "rollouts/agent_failed": float(sum(t.agent_failed for t in trajectories)),
        "rollouts/without_reward": float(sum(t.reward is None for t in trajectories)),
        "rollouts/groups_of_one": float(sum(size == 1 for size in groups.values())),
        "perf/calls_per_s": calls / timing["gen"],
        "perf/tokens_per_s": sum(t.sampled_tokens for t in trajectories) / timing["gen"],
    }


def _actor_config(config: DictConfig, training_steps: int) -> ActorConfig:
    actor = config.actor_rollout_ref.actor
    dynamic = actor.use_dynamic_bsz
    return ActorConfig(
        mini_batch_rollouts=actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
        micro_batch_rows=None if dynamic else actor.ppo_micro_batch_size_per_gpu,
        micro_batch_tokens=actor.ppo_max_token_len_per_gpu if dynamic else None,
        ppo_epochs=actor.ppo_epochs,
        clip_ratio_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
        entropy_coeff=actor.entropy_coeff,
        grad_clip=actor.grad_clip,
        lr=actor.optim.lr,
        lr_warmup_steps=actor.optim.lr_warmup_steps,
        lr_scheduler_type=actor.optim.lr_scheduler_type,
        min_lr_ratio=actor.optim.min_lr_ratio,
        training_steps=training_steps,
        betas=(actor.optim.betas[0], actor.optim.betas[1]),
        weight_decay=actor.optim.weight_decay,
    )


def _sampling(section: DictConfig, max_tokens: int) -> dict[str, float | int]:
    return {
        "temperature": section.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
        "max_tokens": max_tokens,
    }


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@contextmanager
def _timed(timing: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timing[name] = time.perf_counter() - start
