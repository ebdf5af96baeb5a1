"""PPO: the training loop that is its own documentation. `train_step` is the story; the parts stand beside this file.

A step rolls out `n` times per task, reads the finished rollouts back as rows, asks actor, reference and critic about
their tokens, estimates advantages, updates critic and actor, and publishes the policy's weights. Sampler and trainer
are compared on the first batch, tokens are accounted for after every step: a run stops rather than train on wrong data.

When rollouts are asked for is the schedule's matter (`schedules.py`); the step on a batch of them is one.

A run that is resumed starts at its last checkpoint and asks for the same rollouts again under the same ids: what the
store already holds of them is trained on as it is, the rest is sampled.
"""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from lightning_rl.algorithms.base import Algorithm, Dataset, Endpoint
from lightning_rl.algorithms.watchdog import Watchdog
from lightning_rl.config import ConfigError, backends, compose, to_yaml
from lightning_rl.config.schema import Config
from lightning_rl.errors import Explained
from lightning_rl.files import write_whole
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.inspect.live_findings import Findings
from lightning_rl.inspect.run_stats import RECENT
from lightning_rl.loops.configured import configured_agents
from lightning_rl.loops.loop_registry import loops_of
from lightning_rl.ppo import batch as step_batch
from lightning_rl.ppo import collector, resolved_config, rollout_correction, summary
from lightning_rl.ppo.async_rollouts import InFlight
from lightning_rl.ppo.batch import StepBatch
from lightning_rl.ppo.collector import Tasks
from lightning_rl.ppo.early_stopping import TuningRecord
from lightning_rl.ppo.estimators import kl_controller_of, needs_critic, needs_greedy
from lightning_rl.ppo.metrics import rollout_metrics, timed
from lightning_rl.ppo.models import Models
from lightning_rl.ppo.schedules import Schedule
from lightning_rl.ppo.token_ledger import TokenLedger
from lightning_rl.rewards import GroupReward
from lightning_rl.rewards.training_rewards import Grader
from lightning_rl.rl.advantages import Estimator
from lightning_rl.rl.baselines import OutcomeEstimator
from lightning_rl.runner.launch import MOST
from lightning_rl.store.contract import Rollout, RolloutRequest, RolloutTrace
from lightning_rl.store.errors import NotFound, StoreError
from lightning_rl.telemetry import metrics, traces
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl.telemetry.metrics.about import About
from lightning_rl.telemetry.traces.writer import Writer
from lightning_rl.training import checkpoint
from lightning_rl.training.batch import MiniBatch, TrainingSequence
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.call_filter import selection
from lightning_rl.trajectories.reader import reader
from lightning_rl.trajectories.run_warnings import Problems
from lightning_rl.trajectories.step_record import StepRecord
from lightning_rl.trajectories.token_account import TokenAccount
from lightning_rl.trajectories.trajectory import Trajectory, informative
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import Strategy

_WAIT_SECONDS = 2.0  # between two looks at the processes of a run
_GREEDY = "greedy-"  # what the groups of greedy rollouts begin with
_PAUSE_LEASE_SECONDS = 120.0  # a trainer that dies in mid-update does not park its agents for ever
_OUTAGE_LEASE_SECONDS = 1800.0  # an engine starts again
_log = logging.getLogger(__name__)


class SamplerMismatch(Explained, RuntimeError):
    """The engine's log probabilities are not the trainer's: training on them would be wrong in silence."""


class PPO(Algorithm):
    """Proximal policy optimisation.

    Args:
        config: verl's keys (`docs/config.md`).
        select: which calls of the policy are trained; the others are context. Beside `algorithm.train_agents`.
        credit: how rewards become the credit of calls, instead of `algorithm.credit.strategy`.
        estimator: how credits become advantages (`rl.advantages`), instead of `algorithm.adv_estimator`.
        reward: what gives the rollouts of a group their rewards (`lightning_rl.rewards`), instead of the config's.
        tune_dataset: tasks that the best checkpoint and early stopping go by, instead of `data.tune_files`.

    Subclasses may override the hooks `on_...`, which do nothing here: they are called at verl's points.
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
        tune_dataset: Dataset | None = None,
    ) -> None:
        self.config = config if isinstance(config, Config) else compose(config)
        self.configured_agents = configured_agents(self.config)
        algorithm = self.config.algorithm
        self._select = selection(algorithm.train_agents, select)
        self._rules = resolved_config.rules(self.config, credit, estimator)
        self._ratio_rules = resolved_config.ratio_rules(self.config)
        resolved_config.check(self.config, self._rules.estimator)
        self._rule = (
            resolved_config.name_of(credit) if credit else algorithm.credit.function or algorithm.credit.strategy
        )
        self._estimator = resolved_config.name_of(estimator) if estimator else algorithm.adv_estimator
        self._grader = Grader.of(self.config.reward, reward)
        self._tune_dataset = tune_dataset
        self._begin()
        self.history: list[dict[str, float]] = []
        self._greedy: dict[str, float] = {}  # rewards of greedy rollouts by the group whose task they have
        self._greedy_resources: str | None = None
        rollout = self.config.actor_rollout_ref.rollout
        self._schedule = resolved_config.schedule(self.config)
        at_once = self._batch_size if self._schedule is None else self._schedule.before
        self.n_runners = rollout.agent.num_workers or min(MOST, at_once * rollout.n)
        self.watchdog_seconds = self.config.trainer.watchdog_seconds
        self.isolation = rollout.agent.isolation
        self.ray = rollout.agent.ray if rollout.agent.ray.address is not None else None
        self.resume = self.config.trainer.resume_mode == "auto"
        self._traces: Writer | None = None
        self.max_restarts = self.config.trainer.max_restarts

    def _begin(self) -> None:
        """What training starts with; a run that is opened again forgets what is in no checkpoint."""
        stopping = self.config.trainer.early_stopping
        self.tuning = TuningRecord(patience=stopping.patience, min_delta=stopping.min_delta)
        self._kl_controller = kl_controller_of(self.config)
        self.step = 0
        self.policy_version = 0
        self.batches_taken = 0  # of tasks, for training
        self._left_in_flight: dict[str, Any] | None = None  # by the run that is resumed
        self._compared = False  # sampler with trainer, on tokens of the same weights
        self.run_id = ""  # ends the ids of its rollouts
        self._resumed = False
        self._lr_follows = False  # from the model: the config has none

    # The hooks, in the order in which they are called.

    def on_init_end(self) -> None:
        """Models are built, and what a resumed run goes on from is loaded."""

    def on_train_begin(self) -> None:
        """Before the first step of this process, and before its first validation."""

    def on_step_begin(self) -> None:
        """`step` is the one that begins."""

    def on_sample_begin(self) -> None:
        """Before the step's rollouts are asked for."""

    def on_sample_end(self, trajectories: Sequence[Trajectory]) -> None:
        """The step's rollouts have ended."""

    def on_validate_begin(self) -> None:
        """Before validation tasks are rolled out."""

    def on_validate_end(self, metrics: dict[str, float]) -> None:
        """`metrics` are those of the validation; what is put into them is logged."""

    def on_step_end(self, metrics: dict[str, float]) -> None:
        """The step is done, validated where due; what is put into `metrics` is logged. Saving comes after."""

    # What the Trainer calls.

    def default_run_dir(self) -> Path:
        """See `Algorithm`."""
        trainer, folder = self.config.trainer, super().default_run_dir()
        name = folder.name if trainer.experiment_name is None else f"{trainer.experiment_name}-{folder.name}"
        return folder.parent / (trainer.project_name or "") / name

    def prepare(self, train_dataset: Dataset | None, val_dataset: Dataset | None) -> tuple[Dataset, Dataset]:
        """The datasets given, or the files that the config names. Raises ConfigError where they make not one step."""
        data, trainer = self.config.data, self.config.trainer
        tasks = resolved_config.tasks_of("train", train_dataset, data.train_files)
        held_out = resolved_config.tasks_of("val", val_dataset, data.val_files)
        self._tune_dataset = resolved_config.tasks_of("tune", self._tune_dataset, data.tune_files)
        if (loops := loops_of(self.config)) is not None:
            for dataset in (tasks, held_out, self._tune_dataset):
                loops.check(dataset)
        if trainer.val_only and not held_out:
            raise ConfigError("trainer.val_only needs validation tasks: a val_dataset, or data.val_files")
        if trainer.early_stopping.patience is not None and not self._tune_dataset:
            raise ConfigError(
                "trainer.early_stopping goes by a tuning set, for the validation set is only reported: give PPO a "
                "tune_dataset, or set data.tune_files"
            )
        self._asked = self.steps(len(tasks))
        return tasks, held_out

    def is_done(self, run_dir: Path) -> bool:
        """See `Algorithm`."""
        end = summary.end_of(run_dir)
        if end is None or end.asked != self._asked:
            return False
        newest = checkpoint.latest(run_dir / "checkpoints")
        if newest is None or newest.name != f"step-{end.made}":
            return False
        self.run_dir, self.step, self.history = run_dir, end.made, jsonl.read(run_dir / "metrics.jsonl")
        if self._tells:
            print(f"this run is finished, with {end.made} of {end.asked} steps: there is nothing left to do")
            print("\n".join(self.summary()))
        return True

    def summary(self) -> list[str]:
        """What became of the run so far, for a person: the reward before and after, its folder, what to do next."""
        records = step_record.read_all(self.run_dir, newest=1)
        trained = [one.rollout_id for record in records for one in record.rollouts if one.calls]
        return summary.lines(self.run_dir, self.history, trained[0] if trained else None)

    def open(self, run_dir: Path) -> Endpoint:
        """Load the models and start the engine."""
        self._begin()
        rollout = self.config.actor_rollout_ref.rollout
        helpers = backends.registrations(self.config.gateway)
        metrics.check_names(self.config.trainer.logger)
        traces.check(rollout.trace)
        self.run_dir = run_dir
        write_whole(run_dir / "config.yaml", to_yaml(self.config).encode())
        self._checkpoint = checkpoint.latest(run_dir / "checkpoints") if self.resume else None
        torch.manual_seed(self.config.data.seed)
        with_critic = needs_critic(self.config, self._rules.estimator)
        self.models = Models(self.config, run_dir, with_critic=with_critic, resumed=self._checkpoint)
        self._lr_follows = self.config.actor_rollout_ref.actor.optim.lr is None
        self.policy, self.config = self.models.policy, self.models.config
        write_whole(run_dir / "config.yaml", to_yaml(self.config).encode())
        self._state = None if self._checkpoint is None else checkpoint.load_state(self._checkpoint)
        self.models.start(0 if self._state is None else self._state["policy_version"])
        self.account = TokenAccount(self.policy.name)
        return Endpoint(
            model=self.policy.name,
            tokenizer=str(self.models.tokenizer),
            renderer=resolved_config.renderer(self.config),
            history=rollout.history,
            chat_template_kwargs=resolved_config.chat_template_kwargs(self.config),
            special_tokens_in_text=self.config.gateway.special_tokens_in_text,
            unknown_model=self.config.gateway.unknown_model,
            otlp_endpoint=self.config.gateway.otlp_endpoint,
            engines=[*self.policy.registrations(), *helpers],
        )

    def watch(self) -> None:
        """Raise what ended the engine, when something has."""
        self.policy.check()

    def close(self) -> None:
        """Stop the engine, and the processes that train."""
        if hasattr(self, "policy"):
            try:
                self.policy.close()
            finally:
                self.models.close()

    def run(self, train_dataset: Dataset, val_dataset: Dataset) -> None:
        """Train on `train_dataset` and report on `val_dataset`."""
        config, total = self.config.trainer, self.steps(len(train_dataset))
        self._total = total
        self.models.train(total)
        if isinstance(self.policy, VllmPolicy):
            self.policy.on_outage = self._park
        self._go_on()
        summary.note_end(self.run_dir, None)
        self.on_init_end()
        self._trackers = self._opened_trackers(total)
        self._traces = traces.open_writer(self.config, self.run_dir, self.models.tokenizer)
        try:
            self._publish_resources()
            if self._schedule is None:
                self._supply = islice(self._batches(train_dataset), self.batches_taken, None)
            else:
                self._in_flight = self._first_in_flight(self._schedule, train_dataset)
                if uncorrected := resolved_config.uncorrected(self.config):
                    _log.warning("%s", uncorrected)
            self.on_train_begin()
            if not self._resumed and (config.val_before_train or config.val_only):
                if measured := self._measure(val_dataset):
                    self._log(measured)
                if self.tuning.best_step == 0:
                    self.save()  # no step may come to be better
            while self.step < total and not self.tuning.stop:
                self.step += 1
                self.on_step_begin()
                metrics = self.train_step()
                if self._due(config.test_freq) or self.step == total:
                    metrics |= self._measure(val_dataset)
                self.on_step_end(metrics)
                self._log(metrics)  # before the checkpoint: a run that goes on from there tells of the step no more
                last = self.step == total or self.tuning.stop is not None
                if last or self._due(config.save_freq) or self.tuning.best_step == self.step:
                    self.save()
            if self.tuning.stop:
                _log.warning("%s", self.tuning.stop)
            if total:
                best = self.tuning.best_step
                checkpoint.final_model(self.run_dir, self._folder(self.step if best is None else best))
                summary.note_end(self.run_dir, summary.Finished(asked=total, made=self.step))
        finally:
            if self._traces is not None:
                self._traces.close()
            for tracker in self._trackers:
                tracker.close()
        if self._tells:
            print("\n".join(self.summary()))

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

    # A step.

    def train_step(self) -> dict[str, float]:
        """One step on the batch that the schedule gives; its metrics."""
        timing: dict[str, float] = {}
        version, models = self.policy_version, self.models
        metrics: dict[str, float] = {}
        with timed(timing, "step"):
            with timed(timing, "gen"):
                rolled_out, trajectories = self._rolled_out()
            if self.config.trainer.all_failed == "stop":
                self._problems.check(f"step {self.step}", rolled_out)
            self._rest_engine()
            models.actor.onload()
            batch = step_batch.read(trajectories, self._rules)
            with timed(timing, "old_log_prob"):
                metrics |= self._set_old_log_probs(batch)
            if models.reference is not None:
                with timed(timing, "ref"):
                    models.set_reference_log_probs(batch.sequences)
            if models.has_values:
                with timed(timing, "values"):
                    models.set_values(batch.sequences)
            with timed(timing, "adv"):
                step_batch.estimate(batch, replace(self._rules, kl_coef=self._kl_coef), self._greedy)
                metrics |= self._correct(batch)
            metrics |= batch.metrics()
            self._steer_kl(batch)
            self.token_ledger.enter(batch)
            plan = models.actor.plan(batch.sequences, len(trajectories))
            self._write_record(step_batch.records(batch, plan))
            metrics |= self._update(batch, plan, timing) if plan else self._skipped(batch)
            models.actor.offload()
            self._wake_engine()
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        if "actor/first_k3_kl" in metrics:
            metrics["training/mismatch_kl"] = metrics.get("rollout_corr/k3_kl", metrics["actor/first_k3_kl"])
        if self._schedule is not None:
            metrics |= self._ahead
        spent = timing["gen" if self._schedule is None else "step"]
        return metrics | rollout_metrics(rolled_out, spent, version) | self.token_ledger.check(rolled_out)

    def validate(self, val_dataset: Dataset) -> dict[str, float]:
        """Roll out the validation tasks under validation sampling; `val/...` metrics."""
        self.on_validate_begin()
        metrics, _ = self._measured("val", "validation", val_dataset)
        self.on_validate_end(metrics)
        return metrics

    def tune(self) -> dict[str, float]:
        """Roll out the tuning tasks as in validation: is the policy the best so far? `tune/...` metrics."""
        metrics, reward = self._measured("tune", "tuning", self._tune_dataset or [])
        self.tuning.measured(self.step, reward)
        return metrics | {"tune/best_step": float(self.tuning.best_step or 0)}

    def roll_out(
        self, mode: str, tasks: Tasks, n: int, *, generation: int = 0, name: str | None = None
    ) -> list[Trajectory]:
        """Ask for `n` rollouts of each task, and read them back as they end. Groups are in the order of `tasks`. Where
        the estimator compares with greedy rollouts, one of each task is asked for beside them.

        `generation` tells batches of one step apart, which may have a task in common; `name` is what their ids begin
        with, else `mode`.
        """
        prefix = f"{name or mode}-{self.config.data.seed}-{self.step}" + (f".{generation}" if generation else "")
        asked = collector.requests(self.config, prefix, mode, tasks, n, self.step, run=self.run_id)
        sampled = len(asked)
        if mode == "train" and self._greedy_resources is not None:
            greedy = f"{_GREEDY}{prefix}"
            asked += collector.requests(
                self.config, greedy, mode, tasks, 1, self.step, run=self.run_id, resources_id=self._greedy_resources
            )
        read = reader(self.config, self.policy.name, self._select, self._began_ns)
        read = self._traced(f"{name or mode} {self.step}", [str(request.group_id) for request in asked[:sampled]], read)
        if self._grader is None:
            trajectories = self.finished(asked, read)
        else:
            traces: list[RolloutTrace] = self.finished(asked, lambda trace: trace)
            trajectories = [read(trace) for trace in self._grader.graded(traces, self.store, self.policy.name)]
        when = {"val": "validation", "tune": "tuning"}.get(name or mode, f"step {self.step}")
        self._problems.report(when, trajectories)
        self._note_greedy(trajectories[sampled:])
        return trajectories[:sampled]

    def _traced(
        self, batch: str, groups: Sequence[str], read: Callable[[RolloutTrace], Trajectory]
    ) -> Callable[[RolloutTrace], Trajectory]:
        """`read`, which hands the rollouts of chosen groups on to whom writes traces; what is read is the same."""
        if self._traces is None:
            return read
        writer, chosen = self._traces, self._traces.chosen(batch, groups)

        def handing_on(trace: RolloutTrace) -> Trajectory:
            if trace.rollout.group_id in chosen:
                writer.put(trace)
            return read(trace)

        return handing_on

    def read_back(self, rollout_ids: Sequence[str]) -> list[Trajectory]:
        """Rollouts of training that have ended, in this order, with the rewards that training gives."""
        found = self.store.traces(rollout_ids)
        traces = [found[rollout_id] for rollout_id in rollout_ids]
        if self._grader is not None:
            traces = self._grader.graded(traces, self.store, self.policy.name)
        groups = [str(trace.rollout.group_id) for trace in traces]
        sampled = [group for group in groups if not group.startswith(_GREEDY)]
        read = reader(self.config, self.policy.name, self._select, self._began_ns)
        read = self._traced(f"train {self.step}", sampled, read)
        trajectories = [read(trace) for trace in traces]
        self._problems.report(f"step {self.step}", trajectories)
        return trajectories

    def _rolled_out(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """All rollouts of a step, and those to be trained."""
        self.on_sample_begin()
        self._greedy.clear()
        rolled_out, trained = self._of_this_step() if self._schedule is None else self._handed_over()
        self.on_sample_end(rolled_out)
        return rolled_out, trained

    def _of_this_step(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """`sync`: a batch of tasks is rolled out; with `filter_groups` further ones as needed, and groups are trained
        that say something."""
        tasks = self._next_batch()
        n, rule = self.config.actor_rollout_ref.rollout.n, self.config.algorithm.filter_groups
        if not rule.enable:
            rolled_out = trained = self.roll_out("train", tasks, n)
        else:
            batches = (
                self.roll_out("train", self._next_batch() if number else tasks, n, generation=number)
                for number in range(rule.max_num_gen_batches)
            )
            rolled_out, trained, why_not = collector.with_variance(batches, self._batch_size, rule.metric)
            for trajectory in rolled_out:
                if trajectory.group_id in why_not:
                    self.token_ledger.exclude(trajectory, why_not[trajectory.group_id])
        return rolled_out, trained

    def _handed_over(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """Off-policy: the groups whose turn it is, of those in flight."""
        in_flight, left = self._in_flight, (self._total - self.step + 1) * self._batch_size
        in_flight.idle_seconds = 0.0
        self._of_run.watchdog.begin()
        found = in_flight.hand_over(self.policy_version, left, _WAIT_SECONDS)
        stale = sum(reason == "stale" for _, reason in found.left_out)
        if left <= self._batch_size:
            found.left_out += [(group, "surplus") for group in in_flight.cancel(_WAIT_SECONDS)]
        trained = [trajectory for group in found.taken for trajectory in self._without_greedy(group)]
        rolled_out = list(trained)
        for group, reason in found.left_out:
            for trajectory in self._without_greedy(group):
                self.token_ledger.exclude(trajectory, reason)
                rolled_out.append(trajectory)
        self.batches_taken = -(-in_flight.asked // self._batch_size)
        self._ahead = {
            "schedule/groups_in_flight": float(len(in_flight)),
            "schedule/groups_queued": float(found.queued),
            "schedule/groups_stale": float(stale),
            "timing_s/sampling_idle": in_flight.idle_seconds,
        }
        return rolled_out, trained

    def _first_in_flight(self, schedule: Schedule, dataset: Dataset) -> InFlight:
        """The groups in flight as training begins: none, or those that a run which is resumed has left there."""
        rule, self._of_run = self.config.algorithm.filter_groups, _OfRun(self)
        left = self._left_in_flight or {"asked": self.batches_taken * self._batch_size, "groups": []}
        return InFlight(
            schedule,
            self._batches(dataset),
            self._requests_of,
            self._of_run,
            why_not=self._why_not,
            most=rule.max_num_gen_batches * self._batch_size if rule.enable else None,
            **left,
        )

    def _requests_of(self, batch: int, task: tuple[int, Any]) -> list[RolloutRequest]:
        """The rollouts of a group: what `sync` would ask for in step `batch`."""
        prefix, n = f"train-{self.config.data.seed}-{batch}", self.config.actor_rollout_ref.rollout.n
        asked = collector.requests(self.config, prefix, "train", [task], n, batch, run=self.run_id, ahead=True)
        if self._greedy_resources is None:
            return asked
        greedy, resources = f"{_GREEDY}{prefix}", self._greedy_resources
        return asked + collector.requests(
            self.config, greedy, "train", [task], 1, batch, run=self.run_id, resources_id=resources, ahead=True
        )

    def _why_not(self, group: list[Trajectory], version: int) -> str | None:
        """Why a group that has ended is not trained on weights of this version."""
        sampled, rule = [t for t in group if not _is_greedy(t)], self.config.algorithm.filter_groups
        versions = [part.version for t in sampled for node in t.forest.nodes.values() for part in node.call.versions]
        if self._schedule is not None and version - min(versions, default=version) > self._schedule.threshold:
            return "stale"
        return "zero_variance" if rule.enable and not informative(sampled, rule.metric) else None

    def _without_greedy(self, group: list[Trajectory]) -> list[Trajectory]:
        self._note_greedy([trajectory for trajectory in group if _is_greedy(trajectory)])
        return [trajectory for trajectory in group if not _is_greedy(trajectory)]

    def _note_greedy(self, trajectories: Sequence[Trajectory]) -> None:
        """Keep the rewards of greedy rollouts for those that they are compared with."""
        for trajectory in trajectories:
            self.token_ledger.exclude(trajectory, "greedy_logprobs")
            if trajectory.reward is not None:
                self._greedy[trajectory.group_id.removeprefix(_GREEDY)] = trajectory.reward

    def _set_old_log_probs(self, batch: StepBatch) -> dict[str, float]:
        """Old log probabilities: the sampler's (bypass) or the trainer's own; and how far the two are apart."""
        sequences = batch.sequences
        bypass = self.config.algorithm.rollout_correction.bypass_mode
        if bypass:
            for sequence in sequences:
                sequence.old_log_probs = sequence.rollout_log_probs
        first = not self._compared
        if bypass and not first:
            return {}
        gaps, of_these_weights = [np.zeros(1, np.float32)], [np.zeros(1, np.float32)]
        for sequence, own in zip(sequences, self.models.actor.log_probs(sequences), strict=True):
            if not sequence.cut_context:
                gaps.append(np.abs(own - sequence.rollout_log_probs))
                of_these_weights.append(gaps[-1][self._sampled_by_these_weights(batch, sequence)])
            if not bypass:
                sequence.old_log_probs = own
        gap = np.concatenate(gaps)
        largest = float(np.nanmax(gap))
        tolerance = resolved_config.sampler_tolerance(self.config)
        self._compared = self._compared or sum(map(len, of_these_weights)) > 1
        if first and np.nanmax(np.concatenate(of_these_weights)) > tolerance:
            raise SamplerMismatch(
                f"on the first batch sampler and trainer log probabilities differ by up to {largest:.3g} "
                f"(trainer.sampler_tolerance is {tolerance:g}): the engine does not run the model that is trained; "
                "check its weights, dtype, chat format and cache"
            )
        return {"training/rollout_probs_diff_max": largest, "training/rollout_probs_diff_mean": float(np.nanmean(gap))}

    def _sampled_by_these_weights(self, batch: StepBatch, sequence: TrainingSequence) -> NDArray[np.bool_]:
        """Which trained tokens of a sequence the weights sampled that the step begins with, [K].

        In `sync` these are all that this session has sampled. A version that an earlier session made beyond the
        checkpoint has the number of another that this one makes.
        """
        same = np.ones(len(sequence.trained), dtype=bool)
        nodes = batch.parts[sequence.rollout].trajectory.forest.nodes
        for call_id, where, places in sequence.trained_by_call():
            call = nodes[call_id].call
            if call.end_ns < self._began_ns and self.policy_version != self._began_version:
                same[where] = False
            elif self._schedule is not None:
                versions = call.policy_versions()
                same[where] = [versions[place] == self.policy_version for place in places]
        return same

    def _correct(self, batch: StepBatch) -> dict[str, float]:
        """Weigh and reject by how far sampler and trainer are apart; with the sampler's numbers alone, nothing."""
        if self.config.algorithm.rollout_correction.bypass_mode:
            return {}
        return rollout_correction.correct(batch, self._ratio_rules)

    @property
    def _kl_coef(self) -> float:
        return 0.0 if self._kl_controller is None else self._kl_controller.value

    def _steer_kl(self, batch: StepBatch) -> None:
        if self._kl_controller is not None and batch.kl is not None:
            self._kl_controller.update(batch.kl, len(batch.parts))

    def _update(self, batch: StepBatch, plan: list[MiniBatch], timing: dict[str, float]) -> dict[str, float]:
        """Update the critic, then the policy, unless the critic warms up; publish the policy's new weights."""
        metrics: dict[str, float] = {}
        models, warming_up = self.models, self.step <= self.config.trainer.critic_warmup
        if models.critic is not None:
            with timed(timing, "update_critic"), self._memory_advice(of_critic=True):
                metrics |= models.critic.update(models.critic.plan(batch.sequences, len(batch.parts)))
        elif warming_up:
            with timed(timing, "update_critic"), self._memory_advice():
                metrics |= models.actor.update(plan, values_alone=True)
        if not warming_up:
            with timed(timing, "update_actor"), self._memory_advice():
                metrics |= models.actor.update(plan)
            with timed(timing, "update_weights"):
                self._publish_weights()
        return metrics

    def _skipped(self, batch: StepBatch) -> dict[str, float]:
        """Say why a step updates nothing."""
        reasons: Counter[str] = Counter()
        for part in batch.parts:
            reasons.update(part.trajectory.excluded, **part.excluded)
        tokens = ", ".join(f"{n} tokens excluded as {reason}" for reason, n in sorted(reasons.items()))
        silent = sum(part.trajectory.calls == 0 for part in batch.parts)
        why = [f"{silent} of {len(batch.parts)} rollouts made no call"] * bool(silent) + [tokens] * bool(tokens)
        _log.warning("step %d updates nothing: %s", self.step, "; ".join(why) or "there are no rollouts")
        return {"training/skipped": 1.0}

    def _publish_weights(self) -> None:
        """Give the engine the new weights while calls wait at the gateway."""
        self.policy_version += 1
        # Where rollouts are in flight they go on over the update: waiting for their ends would be what sync does.
        mode = "drain" if self._schedule is None else "keep"
        self.store.pause(self.policy.name, mode=mode, lease_seconds=_PAUSE_LEASE_SECONDS)
        self.models.send_weights(self.policy_version)
        self.store.resume(self.policy.name, self.policy_version)

    def _rest_engine(self) -> None:
        """Let an engine on the trainer's GPU give its memory to the update."""
        if isinstance(self.policy, VllmPolicy) and self.config.actor_rollout_ref.rollout.free_cache_engine:
            self.store.pause(self.policy.name, lease_seconds=_OUTAGE_LEASE_SECONDS)
            self.policy.sleep()

    def _wake_engine(self) -> None:
        """The same back, where no update of its weights has done so."""
        if isinstance(self.policy, VllmPolicy) and self.config.actor_rollout_ref.rollout.free_cache_engine:
            self.policy.wake()
            self.store.resume(self.policy.name)

    def _park(self, outage: bool) -> None:
        """Let calls wait at the gateway while no engine is there, rather than fail."""
        try:
            if outage:
                self.store.pause(self.policy.name, deadline_seconds=0, lease_seconds=_OUTAGE_LEASE_SECONDS)
            else:
                self.store.resume(self.policy.name)
        except StoreError as error:  # so calls fail, and agents are told to try again
            _log.warning("calls do not wait for the engine that starts again: %s", error)

    def _write_record(self, of_rollouts: list[step_record.RolloutRecord]) -> None:
        record = StepRecord(
            step=self.step,
            policy_version=self.policy_version,
            rule=self._rule,
            loss_agg_mode=self.config.actor_rollout_ref.actor.loss_agg_mode,
            rollouts=of_rollouts,
            estimator=self._estimator,
        )
        step_record.write(self.run_dir, record)
        self._findings.add(record)

    @contextmanager
    def _memory_advice(self, *, of_critic: bool = False) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
                tokens = critic.ppo_max_token_len_per_gpu if of_critic else actor.ppo_max_token_len_per_gpu
                updated, model = ("critic",) * 2 if of_critic else ("actor_rollout_ref.actor", "actor_rollout_ref")
                error.add_note(
                    f"the update of step {self.step} ran out of memory: lower "
                    f"{updated}.ppo_max_token_len_per_gpu (now {tokens}), or set "
                    f"{model}.model.enable_gradient_checkpointing=true, and resume the run"
                )
            raise

    # Measuring.

    def _measure(self, val_dataset: Dataset) -> dict[str, float]:
        """What is due together: validation, and the tuning set."""
        metrics = self.validate(val_dataset) if val_dataset else {}
        return metrics | (self.tune() if self._tune_dataset and not self.config.trainer.val_only else {})

    def _measured(self, name: str, reason: str, dataset: Dataset) -> tuple[dict[str, float], float]:
        timing: dict[str, float] = {}
        with timed(timing, "testing"):
            n = self.config.actor_rollout_ref.rollout.val_kwargs.n
            trajectories = self.roll_out("val", list(enumerate(dataset)), n, name=name)
        for trajectory in trajectories:
            self.token_ledger.exclude(trajectory, reason)
        rewards = [t.reward for t in trajectories if t.reward is not None]
        reward = float(np.mean(rewards)) if rewards else 0.0
        return {
            f"{name}/reward": reward,
            f"{name}/calls": float(np.mean([t.calls for t in trajectories])),
            "timing_s/testing" if name == "val" else "timing_s/tuning": timing["testing"],
        } | self.token_ledger.check(trajectories), reward

    # Checkpoints.

    def save(self) -> Path:
        """Write a checkpoint that `transformers` loads and that a run resumes from; its folder."""
        folder = self._folder(self.step)
        folder.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "policy_version": self.policy_version,
            "batches_taken": self.batches_taken,
            "in_flight": None if self._schedule is None else self._in_flight.state_dict(),
            "account": self.account.state_dict(),
            "tuning": self.tuning.state_dict(),
            "kl_coef": self._kl_coef,
            "models": self.models.state_dict(),
            "rng": checkpoint.rng_state(),
        }
        saved = checkpoint.save(folder, export=self.models.export, state=state)
        keep = self.config.trainer.max_actor_ckpt_to_keep
        best = () if self.tuning.best_step is None else (self._folder(self.tuning.best_step),)
        checkpoint.prune(folder.parent, keep, protect=best)
        return saved

    def _folder(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / f"step-{step}"

    def _go_on(self) -> None:
        """Take up where the run folder's last checkpoint stands; a fresh run has none."""
        self._resumed = self._state is not None
        if (state := self._state) is not None:
            self._state = None
            self.step, self.policy_version = state["step"], state["policy_version"]
            self.batches_taken = state["batches_taken"]
            self._left_in_flight = state.get("in_flight")
            if self._schedule is None and self._left_in_flight is not None and self._left_in_flight["groups"]:
                raise ConfigError(
                    "the checkpoint has rollouts in flight, and trainer.schedule=sync would drop them: resume with the "
                    "config.yaml of the run's folder"
                )
            self.models.load_state_dict(state["models"])
            self.account.load_state_dict(state["account"])
            self.tuning.load_state_dict(state["tuning"])
            if self._kl_controller is not None:
                self._kl_controller.value = state["kl_coef"]
            checkpoint.set_rng_state(state["rng"])
            self.models.send_weights(self.policy_version)
            self.store.resume(self.policy.name, self.policy_version)
        written = self.run_dir / "metrics.jsonl"
        self.history = jsonl.keep_until(written, self.step if self._resumed else None) if self.resume else []
        self.token_ledger = TokenLedger(self.account, self.store)
        self._began_version, now = self.policy_version, self.store.state()
        self.run_id = str(now["store_id"])
        self._began_ns = int(now["began_ns"])  # what was sampled before it, earlier runs have sampled
        earlier = step_record.read_all(self.run_dir, newest=RECENT, until=self.step) if self._resumed else ()
        self._findings = Findings(self.run_dir, self.config, earlier)
        self._problems = Problems(self.run_dir, max_tokens=self.config.data.max_tokens)

    # Tasks, resources, trackers.

    def _batches(self, dataset: Dataset) -> Iterator[list[tuple[int, Any]]]:
        """(index, task) pairs, `train_batch_size` at a time; every epoch in another order; what is over is dropped."""
        order = list(range(len(dataset)))
        shuffle = random.Random(self.config.data.seed)
        while True:
            if self.config.data.shuffle:
                shuffle.shuffle(order)
            for start in range(0, len(order) - self._batch_size + 1, self._batch_size):
                yield [(i, dataset[i]) for i in order[start : start + self._batch_size]]

    def _next_batch(self) -> list[tuple[int, Any]]:
        self.batches_taken += 1
        return next(self._supply)

    def _publish_resources(self) -> None:
        """Publish the policy under the name `main_llm`, with the sampling of training and of validation; before it,
        where greedy rollouts are needed, a greedy one, whose id is the same when the run is resumed."""
        main_llm = {"type": "proxy_llm", "model": self.policy.name, **resolved_config.sampling_parameters(self.config)}
        if needs_greedy(self._rules.estimator):
            greedy = {"main_llm": {**main_llm, "sampling_parameters": resolved_config.greedy_sampling(self.config)}}
            digest = hashlib.blake2b(msgspec.json.encode(greedy), digest_size=8).hexdigest()
            self._greedy_resources = self.store.publish(greedy, f"greedy-{digest}").resources_id
        self.store.publish({"main_llm": main_llm})

    def _opened_trackers(self, total: int) -> list[Any]:
        config = self.config.trainer
        names = [name for name in config.logger if name != "console" or self.console]
        if self._tells and self.config.actor_rollout_ref.model.path is None:
            print("model: the tutorial's small one, to try things out; name yours with actor_rollout_ref.model.path")
        if self._tells and self._lr_follows:
            rate = self.config.actor_rollout_ref.actor.optim.lr
            print(f"learning rate: {rate:g}, by the model's size; choose another with actor_rollout_ref.actor.optim.lr")
        told = {"name": config.experiment_name or self.run_dir.name, "config": msgspec.to_builtins(self.config)}
        about = About(**told | ({"project": config.project_name} if config.project_name else {}))
        return metrics.open_trackers(names, self.run_dir, total, began_at=self.step, about=about)

    def _log(self, metrics: dict[str, float]) -> None:
        metrics["training/policy_version"] = float(self.policy_version)
        if self._traces is not None:
            metrics |= self._traces.metrics()
        self.history.append({"step": float(self.step), **metrics})
        for tracker in self._trackers:
            tracker.log(self.step, metrics)
        if "critic/score/mean" in metrics:
            self._findings.look(self.history)

    @property
    def _tells(self) -> bool:
        """Whether a person reads along."""
        return self.console and "console" in self.config.trainer.logger

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    @property
    def _batch_size(self) -> int:
        return self.config.data.train_batch_size


class _OfRun:
    """Rollouts of a run in flight; see `in_flight.Rollouts`."""

    def __init__(self, ppo: PPO) -> None:
        self._ppo = ppo
        self.watchdog = Watchdog(ppo.store, ppo.watchdog_seconds)

    def ask(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        self._ppo.token_ledger.ask(str(request.rollout_id) for request in requests)
        return self._ppo.ask(requests)

    def ended(self, rollout_ids: Sequence[str], wait_seconds: float) -> list[Rollout]:
        return self._ppo.ended(rollout_ids, self.watchdog, wait_seconds)

    def read(self, rollout_ids: Sequence[str]) -> list[Trajectory]:
        return self._ppo.read_back(rollout_ids)

    def cancel(self, rollout_ids: Sequence[str]) -> None:
        for rollout_id in rollout_ids:
            self._ppo.store.cancel(rollout_id)

    def is_there(self, rollout_id: str) -> bool:
        try:
            self._ppo.store.rollout(rollout_id)
        except NotFound:
            return False
        return True


def _is_greedy(trajectory: Trajectory) -> bool:
    return trajectory.group_id.startswith(_GREEDY)


VERL = PPO
