"""PPO: the training loop that is its own documentation.

A step rolls out `n` times per task, reads the finished rollouts back as rows, estimates advantages over rollouts,
updates the policy, and publishes its weights. Sampler and trainer are compared on the first batch, tokens are
accounted for after every step: a run stops rather than train on wrong data.

A run that is resumed starts at its last checkpoint and asks for the same rollouts again under the same ids: what the
store already holds of them is trained on as it is, the rest is sampled.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from omegaconf import DictConfig

from lightning_rl import tracking
from lightning_rl.algorithms import correction, step_batch, step_record
from lightning_rl.algorithms.base import NEUTRAL, Algorithm, Dataset, Endpoint
from lightning_rl.algorithms.conservation import ConservationError, TokenAccount
from lightning_rl.algorithms.credits import estimator_of, gdpo_weights, overlong_buffer_of, strategy_of
from lightning_rl.algorithms.grading import Grader
from lightning_rl.algorithms.metrics import rollout_metrics, timed
from lightning_rl.algorithms.problems import Problems
from lightning_rl.algorithms.selection import selection
from lightning_rl.algorithms.step_batch import Rules, StepBatch
from lightning_rl.algorithms.step_record import StepRecord
from lightning_rl.algorithms.trajectories import Trajectory, informative, trajectory_of
from lightning_rl.config import ConfigError, compose, to_yaml
from lightning_rl.config.schema import Config, Rollout, ValKwargs
from lightning_rl.data import load_tasks
from lightning_rl.errors import Explained
from lightning_rl.files import write_whole
from lightning_rl.inference.embedded import EmbeddedPolicy
from lightning_rl.rewards import GroupReward
from lightning_rl.rl.advantages import Estimator
from lightning_rl.rl.baselines import OutcomeEstimator
from lightning_rl.rl.correction import Rules as RatioRules
from lightning_rl.rl.losses import loss_named
from lightning_rl.store.contract import RolloutConfig, RolloutRequest, RolloutTrace
from lightning_rl.tracking import jsonl
from lightning_rl.tracking.about import About
from lightning_rl.training import checkpoint
from lightning_rl.training.actor import Actor, ActorConfig
from lightning_rl.training.batch import TrainingSequence
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import Strategy

_PAUSE_LEASE_SECONDS = 120.0  # a trainer that dies in mid-update does not park its agents for ever


class SamplerMismatch(Explained, RuntimeError):
    """The engine's log probabilities are not the trainer's: training on them would be wrong in silence."""


class PPO(Algorithm):
    """Proximal policy optimisation with group-relative advantages.

    Args:
        config: verl's keys (`docs/config.md`).
        select: which calls of the policy are trained; the others are context. Beside `algorithm.train_agents`.
        credit: how rewards become the credit of calls, instead of `algorithm.credit.strategy`.
        estimator: how credits become advantages (`rl.advantages`), instead of `algorithm.adv_estimator`.
        reward: what gives the rollouts of a group their rewards (`lightning_rl.rewards`), instead of the config's.
    """

    console = True  # False: nothing is shown, whatever trainer.logger says

    def __init__(
        self,
        config: Mapping[str, Any] | DictConfig | Config | None = None,
        *,
        select: Callable[[Call], bool] | None = None,
        credit: Strategy | None = None,
        estimator: Estimator | OutcomeEstimator | None = None,
        reward: GroupReward | None = None,
    ) -> None:
        self.config = config if isinstance(config, Config) else compose(config)
        self._select = selection(self.config.algorithm.train_agents, select)
        algorithm = self.config.algorithm
        self._rules = _rules(self.config, credit, estimator)
        self._rule = _name(credit) if credit else algorithm.credit.function or algorithm.credit.strategy
        self._estimator = _name(estimator) if estimator else algorithm.adv_estimator
        self._correction = _correction(self.config)
        _check_loss(self.config)
        self._grader = Grader.of(self.config.reward, reward)
        self.step = 0
        self.policy_version = 0
        self.batches_taken = 0  # of tasks, for training
        self.history: list[dict[str, float]] = []
        self.n_runners = self.config.actor_rollout_ref.rollout.agent.num_workers
        self.resume = self.config.trainer.resume_mode == "auto"

    def default_run_dir(self) -> Path:
        """See `Algorithm`."""
        trainer, folder = self.config.trainer, super().default_run_dir()
        name = folder.name if trainer.experiment_name is None else f"{trainer.experiment_name}-{folder.name}"
        return folder.parent / (trainer.project_name or "") / name

    def prepare(self, train_dataset: Dataset | None, val_dataset: Dataset | None) -> tuple[Dataset, Dataset]:
        """The datasets given, or the files that the config names. Raises ConfigError where they make not one step."""
        tasks = tasks_of("train", train_dataset, self.config.data.train_files)
        held_out = tasks_of("val", val_dataset, self.config.data.val_files)
        if self.config.trainer.val_only and not held_out:
            raise ConfigError("trainer.val_only needs validation tasks: a val_dataset, or data.val_files")
        self.steps(len(tasks))
        return tasks, held_out

    def open(self, run_dir: Path) -> Endpoint:
        """Load the model and start the embedded engine."""
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.name != "embedded":
            raise ConfigError(f"actor_rollout_ref.rollout.name {rollout.name!r} cannot be started; there is 'embedded'")
        tracking.check_names(self.config.trainer.logger)
        self.run_dir = run_dir
        write_whole(run_dir / "config.yaml", to_yaml(self.config).encode())
        self._began_ns = time.time_ns()
        self._checkpoint = checkpoint.latest(run_dir / "checkpoints") if self.resume else None
        torch.manual_seed(self.config.data.seed)
        self.policy = EmbeddedPolicy(
            self.config.actor_rollout_ref.model.path,
            weights=self._checkpoint,
            trained=True,
            device=self.config.trainer.device,
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=rollout.max_model_len,
            threads=rollout.num_threads,
        )
        self.policy.start()
        self.model, self.engine = self.policy.model, self.policy.engine
        if self.config.actor_rollout_ref.model.enable_gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.account = TokenAccount(self.policy.name)
        return Endpoint(
            model=self.policy.name,
            tokenizer=str(self.policy.folder),
            renderer=rollout.renderer,
            history=rollout.history,
            unknown_model=self.config.gateway.unknown_model,
            engines=[self.policy.registration()],
        )

    def watch(self) -> None:
        """Raise what ended the engine, when something has."""
        self.engine.check()

    def close(self) -> None:
        """Stop the engine."""
        if hasattr(self, "policy"):
            self.policy.close()

    def run(self, train_dataset: Dataset, val_dataset: Dataset) -> None:
        """Train on `train_dataset` and report on `val_dataset`."""
        config = self.config.trainer
        total = self.steps(len(train_dataset))
        self.actor = Actor(self.model, _actor_config(self.config, total), pad_id=self.model.config.pad_token_id or 0)
        self._go_on()
        self._problems = Problems(self.run_dir, max_tokens=self._max_tokens)
        names = [name for name in config.logger if name != "console" or self.console]
        if "console" in names and self.config.actor_rollout_ref.model.path is None:
            print("model: the tutorial's small one, to try things out; name yours with actor_rollout_ref.model.path")
        told = {"name": config.experiment_name or self.run_dir.name, "config": msgspec.to_builtins(self.config)}
        about = About(**told | ({"project": config.project_name} if config.project_name else {}))
        self._trackers = tracking.open_trackers(names, self.run_dir, total, began_at=self.step, about=about)
        try:
            self._publish_resources()
            if val_dataset and (config.val_before_train or config.val_only) and self.step == 0:
                self._log(self.validate(val_dataset))
            self._supply = islice(self._batches(train_dataset), self.batches_taken, None)
            while self.step < total:
                self.step += 1
                metrics = self.train_step(self._next_batch())
                if val_dataset and (self._due(config.test_freq) or self.step == total):
                    metrics |= self.validate(val_dataset)
                if self._due(config.save_freq) or self.step == total:
                    self.save()
                self._log(metrics)
        finally:
            for tracker in self._trackers:
                tracker.close()

    def steps(self, tasks: int) -> int:
        """How many training steps the config makes of so many tasks. Raises ConfigError where it is not one."""
        if self.config.trainer.val_only:
            return 0
        if not tasks:
            raise ConfigError("train_dataset is empty; PPO needs tasks to learn from")
        config = self.config.trainer
        if tasks < self._batch_size:
            raise ConfigError(
                f"{tasks} tasks are fewer than data.train_batch_size={self._batch_size}: not one step; "
                f"give more tasks, or set data.train_batch_size={tasks} or less"
            )
        return config.total_training_steps or config.total_epochs * (tasks // self._batch_size)

    def train_step(self, tasks: Sequence[tuple[int, Any]]) -> dict[str, float]:
        """One step on (task index, task) pairs; its metrics."""
        timing: dict[str, float] = {}
        version = self.policy_version
        with timed(timing, "step"):
            with timed(timing, "gen"):
                rolled_out, trajectories = self._rolled_out(tasks)
            with timed(timing, "adv"):
                batch = step_batch.build(trajectories, self._rules)
            with timed(timing, "old_log_prob"):
                metrics = self._set_old_log_probs(batch.sequences)
                metrics |= self._correct(batch) | batch.metrics()
            self._account_for(batch)
            plan = self.actor.plan(batch.sequences, len(trajectories))
            self._write_record(step_batch.records(batch, plan))
            with timed(timing, "update_actor"), self._memory_advice():
                metrics |= self.actor.update(plan)
            with timed(timing, "update_weights"):
                self._publish_weights()
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        return metrics | rollout_metrics(rolled_out, timing, version) | self._check_tokens(rolled_out)

    def validate(self, val_dataset: Dataset) -> dict[str, float]:
        """Roll out the validation tasks under validation sampling; `val/...` metrics."""
        timing: dict[str, float] = {}
        with timed(timing, "testing"):
            n = self.config.actor_rollout_ref.rollout.val_kwargs.n
            trajectories = self.roll_out("val", list(enumerate(val_dataset)), n)
        for trajectory in trajectories:
            self._exclude(trajectory, "validation")
        rewards = [t.reward for t in trajectories if t.reward is not None]
        return {
            "val/reward": float(np.mean(rewards)) if rewards else 0.0,
            "val/calls": float(np.mean([t.calls for t in trajectories])),
            "timing_s/testing": timing["testing"],
        } | self._check_tokens(trajectories)

    def _next_batch(self) -> list[tuple[int, Any]]:
        self.batches_taken += 1
        return next(self._supply)

    def _rolled_out(self, tasks: Sequence[tuple[int, Any]]) -> tuple[list[Trajectory], list[Trajectory]]:
        """All rollouts of a step, and those to be trained: with `filter_groups` those of groups that say something, for
        which further batches of tasks are rolled out as needed."""
        n, rule = self.config.actor_rollout_ref.rollout.n, self.config.algorithm.filter_groups
        rolled_out = self.roll_out("train", tasks, n)
        if not rule.enable:
            return rolled_out, rolled_out
        chosen = informative(rolled_out, rule.metric)
        batches = 1
        while len(chosen) < self._batch_size and batches < rule.max_num_gen_batches:
            more = self.roll_out("train", self._next_batch(), n, generation=batches)
            rolled_out += more
            chosen += informative(more, rule.metric)
            batches += 1
        trained, surplus = chosen[: self._batch_size], chosen[self._batch_size :]
        why_not = {group[0].group_id: None for group in trained} | {group[0].group_id: "surplus" for group in surplus}
        for trajectory in rolled_out:
            if reason := why_not.get(trajectory.group_id, "zero_variance"):
                self._exclude(trajectory, reason)
        return rolled_out, [trajectory for group in trained for trajectory in group]

    def roll_out(self, mode: str, tasks: Sequence[tuple[int, Any]], n: int, *, generation: int = 0) -> list[Trajectory]:
        """Ask for `n` rollouts of each task, and read them back as they end. Groups are in the order of `tasks`.

        `generation` tells batches of one step apart, which may have a task in common.
        """
        prefix = f"{mode}-{self.config.data.seed}-{self.step}" + (f".{generation}" if generation else "")
        agent = self.config.actor_rollout_ref.rollout.agent
        requests = [
            RolloutRequest(
                task=task,
                mode=mode,  # type: ignore[arg-type]
                rollout_id=f"{prefix}-{index}-{k}",
                group_id=f"{prefix}-{index}",
                config=RolloutConfig(max_attempts=agent.max_attempts, timeout_seconds=agent.timeout_seconds),
                metadata={"task_index": f"{index}-{k}", "step": self.step},
            )
            for index, task in tasks
            for k in range(n)
        ]
        overlong = self.config.data.overlong
        read = partial(
            trajectory_of,
            agent_failure=self._agent_failure(),
            max_tokens=None if overlong.startswith("truncate") else self._max_tokens,
            began_ns=self._began_ns,
            model=self.policy.name,
            select=self._select,
            weights=self.config.algorithm.credit.weights,
            whole=overlong == "drop_rollout",
        )
        if self._grader is None:
            trajectories = self.finished(requests, read)
        else:
            traces: list[RolloutTrace] = self.finished(requests, lambda trace: trace)
            trajectories = [read(trace) for trace in self._grader.graded(traces, self.store, self.policy.name)]
        self._earlier_tokens -= sum(trajectory.earlier_tokens for trajectory in trajectories)
        self._problems.report(f"step {self.step}" if mode == "train" else "validation", trajectories)
        return trajectories

    def save(self) -> Path:
        """Write a checkpoint that `transformers` loads and that a run resumes from; its folder."""
        folder = self.run_dir / "checkpoints" / f"step-{self.step}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "policy_version": self.policy_version,
            "batches_taken": self.batches_taken,
            "actor": self.actor.state_dict(),
            "account": self.account.state_dict(),
            "rng": torch.get_rng_state(),
        }
        return checkpoint.save(self.model, self.policy.folder, folder, state)

    def _go_on(self) -> None:
        """Take up where the run folder's last checkpoint stands; a fresh run has none."""
        if self._checkpoint is not None:
            state = checkpoint.load_state(self._checkpoint)
            self.step, self.policy_version = state["step"], state["policy_version"]
            self.batches_taken = state.get("batches_taken", self.step)  # checkpoints of earlier releases have none
            self.actor.load_state_dict(state["actor"])
            self.account.load_state_dict(state["account"])
            torch.set_rng_state(state["rng"])
            self.engine.update_weights(self.model, self.policy_version)
            self.store.resume(self.policy.name, self.policy_version)
        self.history = jsonl.keep_until(self.run_dir / "metrics.jsonl", self.step) if self.resume else []
        # What the store holds beyond the checkpoint is pending until its rollouts are read again.
        self._earlier_tokens = self._received(self.store.state()) - self.account.entered
        self._began_at = self.step

    def _account_for(self, batch: StepBatch) -> None:
        """Enter every token of a step's rollouts as trained or excluded."""
        for part in batch.parts:
            self.account.train(part.trained)
            for reasons in (part.trajectory.excluded, part.excluded):
                for reason, tokens in reasons.items():
                    self.account.exclude(reason, tokens)

    def _write_record(self, rollouts: list[step_record.RolloutRecord]) -> None:
        config = self.config
        record = StepRecord(
            step=self.step,
            policy_version=self.policy_version,
            rule=self._rule,
            loss_agg_mode=config.actor_rollout_ref.actor.loss_agg_mode,
            rollouts=rollouts,
            estimator=self._estimator,
        )
        step_record.write(self.run_dir, record)

    def _set_old_log_probs(self, sequences: list[TrainingSequence]) -> dict[str, float]:
        """Old log probabilities: the sampler's (bypass) or the trainer's own; and how far the two are apart."""
        bypass = self.config.algorithm.rollout_correction.bypass_mode
        if bypass:
            for sequence in sequences:
                sequence.old_log_probs = sequence.rollout_log_probs
        first = self.step == self._began_at + 1
        if bypass and not first:
            return {}
        gaps = [np.zeros(1, np.float32)]
        for sequence, own in zip(sequences, self.actor.log_probs(sequences), strict=True):
            if not sequence.cut_context:
                gaps.append(np.abs(own - sequence.rollout_log_probs))
            if not bypass:
                sequence.old_log_probs = own
        gap = np.concatenate(gaps)
        largest = float(np.nanmax(gap))
        if first and largest > self.config.trainer.sampler_tolerance:
            raise SamplerMismatch(
                f"on the first batch sampler and trainer log probabilities differ by up to {largest:.3g} "
                f"(trainer.sampler_tolerance is {self.config.trainer.sampler_tolerance:g}): the engine does not run "
                "the model that is trained; check its weights, dtype, chat format and cache"
            )
        return {"training/rollout_probs_diff_max": largest, "training/rollout_probs_diff_mean": float(np.nanmean(gap))}

    def _correct(self, batch: StepBatch) -> dict[str, float]:
        """Weigh and reject by how far sampler and trainer are apart; with the sampler's numbers alone, nothing."""
        if self.config.algorithm.rollout_correction.bypass_mode:
            return {}
        return correction.correct(batch, self._correction)

    def _publish_resources(self) -> None:
        """Publish the policy under the name `main_llm`, with the sampling of training and of validation."""
        main_llm = {"type": "proxy_llm", "model": self.policy.name, **self._sampling_parameters()}
        self.store.publish({"main_llm": main_llm})

    def _sampling_parameters(self) -> dict[str, dict[str, float | int]]:
        rollout, limit = self.config.actor_rollout_ref.rollout, self.config.data.max_response_length
        agents_own = self.config.gateway.sampling == "agent"
        return {
            "sampling_parameters": {"max_tokens": limit} if agents_own else _sampling(rollout, limit),
            "val_sampling_parameters": _sampling(rollout.val_kwargs, limit),
        }

    def _publish_weights(self) -> None:
        """Give the engine the new weights while calls wait at the gateway."""
        self.policy_version += 1
        self.store.pause(self.policy.name, lease_seconds=_PAUSE_LEASE_SECONDS)
        self.engine.update_weights(self.model, self.policy_version)
        self.store.resume(self.policy.name, self.policy_version)

    def _check_tokens(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """The account of tokens, and how often the gateway began a conversation anew, by cause.

        Raises ConservationError naming those of `trajectories` whose records are not what engines handed over.
        """
        state = self.store.state()
        forks = {f"gateway/{name}": float(n) for name, n in state["counters"].items() if name.startswith("fork_")}
        pending = int(state["tokens_pending"]) + self._earlier_tokens
        try:
            return forks | self.account.check(self._received(state), pending)
        except ConservationError as error:
            error.add_note(self._whose_tokens(trajectories))
            raise

    def _whose_tokens(self, trajectories: Sequence[Trajectory]) -> str:
        """Which rollouts do not hold the tokens that the gateway counted for them."""
        received = self.store.tokens_received([trajectory.rollout_id for trajectory in trajectories])
        recorded = {t.rollout_id: t.sampled_tokens + sum(t.excluded.values()) for t in trajectories}
        wrong = [
            f"{rollout_id} (received {received[rollout_id]}, recorded {tokens})"
            for rollout_id, tokens in recorded.items()
            if received.get(rollout_id, tokens) != tokens
        ]
        if wrong:
            return f"these rollouts do not hold what engines handed over for them: {', '.join(wrong)}"
        return "each rollout of this step holds what engines handed over for it: the loss is outside of them"

    def _received(self, state: Mapping[str, Any]) -> int:
        return int(state["models"][self.policy.name]["tokens_received"])

    @contextmanager
    def _memory_advice(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                actor = self.config.actor_rollout_ref.actor
                error.add_note(
                    f"the update of step {self.step} ran out of memory: lower "
                    f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu (now {actor.ppo_max_token_len_per_gpu}), or "
                    "set actor_rollout_ref.model.enable_gradient_checkpointing=true, and resume the run"
                )
            raise

    def _exclude(self, trajectory: Trajectory, reason: str) -> None:
        """Enter all of a trajectory's tokens as excluded: by `reason`, where nothing excluded them before."""
        self._exclude_parts(trajectory)
        self.account.exclude(reason, trajectory.sampled_tokens - sum(trajectory.left_out.values()))

    def _exclude_parts(self, trajectory: Trajectory) -> None:
        for parts in (trajectory.excluded, trajectory.left_out):
            for reason, tokens in parts.items():
                self.account.exclude(reason, tokens)

    def _batches(self, dataset: Dataset) -> Iterator[list[tuple[int, Any]]]:
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
        return self.config.data.train_batch_size

    @property
    def _max_tokens(self) -> int:
        return self.config.data.max_tokens


VERL = PPO


def _name(given: Any) -> str:
    """How a function of the user's is called in the records."""
    return getattr(getattr(given, "function", given), "__qualname__", type(given).__name__)


def _check_loss(config: Config) -> None:
    """Raises ConfigError for a loss that there is not, before a model is loaded."""
    try:
        loss_named(_actor_config(config, 1).loss_mode)
    except ValueError as error:
        raise ConfigError(f"actor_rollout_ref.actor.policy_loss: {error}") from error


def _rules(config: Config, strategy: Strategy | None, estimator: Estimator | OutcomeEstimator | None = None) -> Rules:
    algorithm, overlong = config.algorithm, config.data.overlong
    bypass = algorithm.rollout_correction.bypass_mode
    if bypass and overlong == "truncate_left":
        raise ConfigError(
            "data.overlong=truncate_left needs old log probabilities of the shorter context, which the sampler cannot "
            "give: set algorithm.rollout_correction.bypass_mode=false, or another data.overlong"
        )
    return Rules(
        strategy=strategy or strategy_of(algorithm),
        estimator=estimator_of(config, strategy, estimator),
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        gamma=algorithm.gamma,
        reward_weights=gdpo_weights(config),
        overlong_buffer=overlong_buffer_of(config),
        groups_of_one=algorithm.groups_of_one,
        groups_without_variance=algorithm.groups_without_variance,
        overlong=overlong,
        max_tokens=config.data.max_tokens,
        need_log_probs=bypass or _correction(config).active,
    )


def _correction(config: Config) -> RatioRules:
    return correction.rules_of(
        config.algorithm.rollout_correction,
        overlong=config.data.overlong,
        loss_mode=config.actor_rollout_ref.actor.policy_loss.loss_mode,
    )


def _actor_config(config: Config, training_steps: int) -> ActorConfig:
    actor = config.actor_rollout_ref.actor
    rows = actor.ppo_micro_batch_size_per_gpu
    dynamic = rows is None if actor.use_dynamic_bsz is None else actor.use_dynamic_bsz
    loss, sampler = actor.policy_loss, config.algorithm.rollout_correction
    by_sampler = loss.loss_mode == "bypass_mode" or (sampler.bypass_mode and loss.loss_mode == "vanilla")
    return ActorConfig(
        loss_mode=sampler.loss_type if by_sampler else loss.loss_mode,
        clip_cov_ratio=loss.clip_cov_ratio,
        clip_cov_lb=loss.clip_cov_lb,
        clip_cov_ub=loss.clip_cov_ub,
        kl_cov_ratio=loss.kl_cov_ratio,
        ppo_kl_coef=loss.ppo_kl_coef,
        dro_beta=loss.dro_beta,
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        rollout_is=sampler.rollout_is,
        rollout_is_threshold=sampler.rollout_is_threshold,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_loss_type=actor.kl_loss_type,
        mini_batch_rollouts=actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
        micro_batch_rows=None if dynamic else rows,
        log_prob_rows=config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
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
        betas=actor.optim.betas,
        weight_decay=actor.optim.weight_decay,
    )


def _sampling(section: Rollout | ValKwargs, max_tokens: int) -> dict[str, float | int]:
    return {
        **NEUTRAL,
        "temperature": section.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
        "max_tokens": max_tokens,
    }


def tasks_of(name: str, dataset: Dataset | None, files: str | list[str] | None) -> Dataset:
    """The tasks that `fit` was given, or else those of `data.<name>_files`. Raises ConfigError where both are there."""
    if dataset is not None and files is not None:
        raise ConfigError(
            f"tasks come from data.{name}_files={files!r} and from fit's {name}_dataset: give one of them"
        )
    return load_tasks(files) if files is not None else dataset or []
