"""PPO: the training loop that is its own documentation. `train_step` is the story; its parts are in `ppo/`.

A step rolls out `n` times per task, and each policy learns from its part of the finished rollouts
(`ppo/policy_learner.py`): it reads them as rows, asks actor, reference and critic about their tokens, estimates
advantages, updates critic and actor, and publishes its weights. Sampler and trainer are compared on the first batch,
and the account of tokens is checked after every step: a run stops rather than train on wrong data.

When rollouts are requested is decided by the schedule (`ppo/off_policy/`); what a step does with a batch is the same
in all.

A run that is resumed starts at its last checkpoint and requests the same rollouts again under the same ids: those that
the store already holds are trained as they are, the rest is sampled.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig

from lightning_rl.algorithms.base import Dataset, Endpoint
from lightning_rl.config import backends, derived, to_yaml
from lightning_rl.config.policies import named, policies_of
from lightning_rl.config.schema import Config
from lightning_rl.configured_algorithm import ConfiguredAlgorithm, composed
from lightning_rl.data.dataset import dataset_of
from lightning_rl.files import note_finished, note_unfinished, write_whole
from lightning_rl.inference.load import located
from lightning_rl.memory.plan import refuse_what_cannot_fit
from lightning_rl.ppo import reporting, resolved_config, run_state
from lightning_rl.ppo import tasks as tasks_of_run
from lightning_rl.ppo.cards import check_apart
from lightning_rl.ppo.collector import Collected, Collector
from lightning_rl.ppo.models import Models
from lightning_rl.ppo.policy_learner import Learners, PolicyLearner
from lightning_rl.ppo.privileged import Privileged
from lightning_rl.ppo.reporting import Reporter, rollout_metrics, timed
from lightning_rl.ppo.run_state import RunState, TuningRecord
from lightning_rl.rewards import GroupReward
from lightning_rl.rewards.training_rewards import fetch
from lightning_rl.rl.advantages import Estimator
from lightning_rl.rl.baselines import OutcomeEstimator
from lightning_rl.telemetry import metrics as trackers
from lightning_rl.telemetry import traces
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl.training import checkpoint
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import Strategy

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunParts:
    """What a run works with from its beginning to its end."""

    rollouts: Collector
    reporter: Reporter


class Hooks:
    """verl's hooks, in the order in which they are called. They do nothing here; subclasses of PPO override them."""

    def on_init_end(self) -> None:
        """Models are built, and the checkpoint of a resumed run is loaded."""

    def on_train_begin(self) -> None:
        """Before the first step of this process, and before its first validation."""

    def on_step_begin(self) -> None:
        """`step` is the one that begins."""

    def on_sample_begin(self) -> None:
        """Before the step's rollouts are requested."""

    def on_sample_end(self, trajectories: Sequence[Trajectory]) -> None:
        """The step's rollouts have ended."""

    def on_validate_begin(self) -> None:
        """Before validation tasks are rolled out."""

    def on_validate_end(self, metrics: dict[str, float]) -> None:
        """`metrics` are those of the validation; what is put into them is logged."""

    def on_step_end(self, metrics: dict[str, float]) -> None:
        """The step is done, validated where due; what is put into `metrics` is logged. Saving comes after."""


class PPO(Hooks, ConfiguredAlgorithm):
    """Proximal policy optimisation.

    Args:
        config: verl's keys (`docs/config.md`).
        policies: the key `policies`: several policies that one agent asks, by name, each with the keys that differ from
            the others' (`docs/policies.md`).
        select: which calls of the policy are trained; the others are context. Beside `algorithm.train_agents`.
        credit: how rewards become the credit of calls, instead of `algorithm.credit.strategy`.
        estimator: how credits become advantages (`rl.advantages`), instead of `algorithm.adv_estimator`.
        reward: what gives the rollouts of a group their rewards (`lightning_rl.rewards`), instead of the config's.
        privileged: what a call's teacher is told and the policy is not (`docs/distillation.md`), instead of
            `distillation.privileged`.
        tune_dataset: tasks that the best checkpoint and early stopping go by, instead of `data.tune_files`.
    """

    learner = PolicyLearner  # what each policy of the run is made with
    asks_for: int

    def __init__(
        self,
        config: Mapping[str, Any] | DictConfig | Config | None = None,
        *,
        policies: Mapping[str, Mapping[str, Any]] | None = None,
        select: Callable[[Call], bool] | None = None,
        credit: Strategy | None = None,
        estimator: Estimator | OutcomeEstimator | None = None,
        reward: GroupReward | None = None,
        privileged: Privileged | None = None,
        tune_dataset: Dataset | None = None,
    ) -> None:
        super().__init__(config if policies is None else derived(composed(config), {"policies": policies}))
        self._rules_of = functools.partial(
            resolved_config.step_rules,
            select=select,
            credit=credit,
            estimator=estimator,
            reward=reward,
            privileged=privileged,
        )
        self.rules = self._rules_of(self.config)
        for idle in resolved_config.keys_left_unread(self.config, self.rules.batch.estimator):
            _log.warning("%s", idle)
        self.learners = self._learners()
        self.state = RunState(self.config)
        self.history: list[dict[str, float]] = []
        self.asks_for = resolved_config.rollouts_at_once(self.config, self.rules.schedule)
        self.max_restarts = self.config.trainer.max_restarts
        self._tune_dataset = dataset_of(tune_dataset, "tune_dataset")
        self._total_steps = 0  # of the tasks that `prepare` has seen
        self._parts: RunParts | None = None  # there from `run` on

    @property
    def models(self) -> Models:
        """Policy, reference and critic; of several policies those of the first."""
        assert self.learners.opened, "the run is not open"
        return self.learners[0].models

    @property
    def policy(self) -> Any:
        """The policy with its engine."""
        return self.models.policy

    @property
    def parts(self) -> RunParts:
        """What the run works with."""
        assert self._parts is not None, "the run has not begun"
        return self._parts

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return self.state.run_dir

    @property
    def step(self) -> int:
        """The step that is running, or the last one that was made."""
        return self.state.step

    @property
    def policy_version(self) -> int:
        """The number of weight updates behind the policy, of several the first."""
        return self.learners[0].state.policy_version

    @property
    def tuning(self) -> TuningRecord:
        """The best step on the tuning set, and whether the run ends early."""
        return self.state.tuning

    # What the Trainer calls.

    def train_only(self, agents: str) -> None:
        """See `Algorithm`. Raises ConfigError where `algorithm.train_agents` says otherwise."""
        self.config = resolved_config.with_train_agents(self.config, agents)
        self.rules = self._rules_of(self.config)
        self.learners = self._learners()

    def prepare(self, train_dataset: Dataset | None, val_dataset: Dataset | None) -> tuple[Dataset, Dataset]:
        """The datasets given, or the files that the config names. Raises ConfigError where they make not one step,
        or nothing gives their rollouts a reward."""
        arguments = train_dataset, val_dataset, self._tune_dataset
        datasets = tasks_of_run.datasets(self.config, *arguments)
        if self.config.data.filter_overlong_prompts:
            folder, _ = located(self.config.actor_rollout_ref.model.path)
            datasets = tasks_of_run.without_overlong(self.config, folder, datasets)
        self.rules = replace(self.rules, grader=tasks_of_run.grader_of(self.config, self.rules.grader, datasets))
        tasks, held_out, self._tune_dataset = datasets
        self._total_steps = self.steps(len(tasks))
        return tasks, held_out

    def is_done(self, run_dir: Path) -> bool:
        """See `Algorithm`."""
        end = reporting.end_of(run_dir)
        newest = None if end is None else checkpoint.latest(run_dir / "checkpoints")
        if end is None or newest is None or newest.name != f"step-{end.made}":
            return False
        if end.goes_on(self._total_steps, self.config.trainer.early_stopping.patience):
            return False
        self.state = RunState(self.config, run_dir)
        self.state.step, self.history = end.made, jsonl.history(run_dir / "metrics.jsonl")
        if self.shows:
            total = max(end.made, self._total_steps)
            print(f"this run is finished, with {end.made} of {total} steps: there is nothing left to do")
            print("\n".join(self.summary()))
        return True

    def summary(self) -> list[str]:
        """What became of the run so far, for a person: the reward before and after, its folder, what to do next."""
        return reporting.summary_lines(self.run_dir, self.history, reporting.trained_last(self.run_dir))

    def steps(self, tasks: int) -> int:
        """How many training steps the config makes of so many tasks. Raises ConfigError where it is not one."""
        return resolved_config.training_steps(self.config, tasks)

    def open(self, run_dir: Path) -> Endpoint:
        """Load the models and start the engine."""
        helpers = backends.registrations(self.config.gateway)
        trackers.check_names(self.config.trainer.logger)
        traces.check(self.config.actor_rollout_ref.rollout.trace)
        fetch(self.rules.grader)
        if not self.resume:  # of a run that goes on, what it goes on with stays until all of the new is checked
            write_whole(run_dir / "config.yaml", to_yaml(self.config).encode())
        resumed = checkpoint.latest(run_dir / "checkpoints") if self.resume else self._begin_from(run_dir)
        self.state = RunState(self.config, run_dir, resumed)
        self.state.check_policies([learner.name for learner in self.learners])
        refuse_what_cannot_fit(self.config)
        self.learners.open(self.state, resumed, tell=print if self.shows else None)
        for learner in self.learners:
            learner.start(self.served_name(learner.name or learner.rendered_as))
        first, *others = self.learners
        if not self.config.policies:
            self.config = first.config
        if not self.resume:
            write_whole(run_dir / "config.yaml", to_yaml(self.config).encode())
        served = [learner.models.policy for learner in self.learners]
        engines = [each for policy in served for each in policy.registrations()]
        endpoint = resolved_config.endpoint(
            first.config, first.rendered_as, first.models.tokenizer, [*engines, *helpers]
        )
        return msgspec.structs.replace(
            endpoint, served_as=served[0].name, more_models=[other.models.policy.name for other in others]
        )

    def _learners(self) -> Learners:
        policies = policies_of(self.config)
        check_apart(policies)
        rules = [self._rules_of(policy.config) if policy.name else self.rules for policy in policies]
        return Learners(map(self.learner, policies, rules))

    def _begin_from(self, run_dir: Path) -> Path | None:
        """The checkpoint of another run that this one begins with, in its own folder; None where it begins anew."""
        source = resolved_config.resume_from(self.config)
        return None if source is None else run_state.begin_from(source, run_dir)

    def watch(self) -> None:
        """Raise what ended an engine, when something has."""
        self.learners.watch()

    def close(self) -> None:
        """Stop the engines, and the processes that train."""
        self.learners.close()

    def run(self, train_dataset: Dataset, val_dataset: Dataset) -> None:
        """Train on `train_dataset` and report on `val_dataset`."""
        state, total = self.state, self.steps(len(train_dataset))
        self._total_steps = total
        weights = self.learners.prepare(self.store, total)
        load = {one.name: partial(one.load_state_dict, weights=weights[one.name]) for one in self.learners}
        state.restore(load, synchronous=self.rules.schedule is None)
        if self.resume:
            write_whole(self.run_dir / "config.yaml", to_yaml(self.config).encode())
        written, last_step = self.run_dir / "metrics.jsonl", state.step if state.resumed else None
        self.history = jsonl.keep_until(written, last_step) if self.resume else []
        state.begin_session(self.run_id, self.began_ns)
        note_unfinished(self.run_dir)
        for each in weights.values():
            each.wake()
        self.on_init_end()
        reporter = Reporter(self.config, state, self.models, total, console=self.shows)
        try:
            for learner in self.learners:
                learner.begin(self.store, weights[learner.name], reporter)
            rollouts = Collector(self, self.config, self.rules, state, self.learners, reporter, train_dataset)
            self._parts = RunParts(rollouts, reporter)
            if uncorrected := resolved_config.uncorrected(self.config):
                _log.warning("%s", uncorrected)
            self.on_train_begin()
            self._train(total, val_dataset)
            if total:
                state.export_final_model()
            note_finished(self.run_dir, asked=total, made=self.step, patience=self.tuning.patience or 0)
        finally:
            reporter.close()
        if self.shows:
            print("\n".join(self.summary()))

    def _train(self, total: int, val_dataset: Dataset) -> None:
        """All steps that are left, with validation, tuning and checkpoints where due."""
        config, state, tuning = self.config.trainer, self.state, self.tuning
        if not state.resumed and (config.val_before_train or config.val_only):
            if measured := self._measure(val_dataset):
                self._log(measured)
            if tuning.best_step == 0:
                self.save()  # no later step may be better
        while state.step < total and not tuning.stop:
            state.step += 1
            self.on_step_begin()
            metrics = self.train_step()
            if _due(state.step, config.test_freq) or state.step == total:
                metrics |= self._measure(val_dataset)
            self.on_step_end(metrics)
            self._log(metrics)  # before the checkpoint: a run that resumes from it does not log the step again
            last = state.step == total or tuning.stop is not None
            if last or _due(state.step, config.save_freq) or tuning.best_step == state.step:
                self.save()
        if tuning.stop:
            _log.warning("%s", tuning.stop)

    # A step.

    def train_step(self) -> dict[str, float]:
        """One step: the batch that the schedule gives is rolled out, and each policy learns from its part; metrics."""
        parts, timing = self.parts, dict[str, float]()
        metrics: dict[str, float] = {}
        with timed(timing, "step"):
            with timed(timing, "gen"):
                self.on_sample_begin()
                collected = parts.rollouts.collect(self._total_steps - self.step + 1)
                self.on_sample_end(collected.rolled_out)
            if self.config.trainer.all_failed == "stop":
                parts.reporter.warnings.check(f"step {self.step}", collected.rolled_out)
            for learner in self.learners:
                metrics |= self._learn(learner, collected)
            self.state.updates += any(learner.updated for learner in self.learners)
            parts.reporter.write_generations("train", self.step, collected.trained)
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()} | collected.metrics
        rolled_out, spent = collected.begun, timing["gen"] if self.rules.schedule is None else parts.reporter.lap()
        return metrics | rollout_metrics(rolled_out, spent, self.state.began_ns) | parts.rollouts.check_tokens()

    def _learn(self, learner: PolicyLearner, collected: Collected) -> dict[str, float]:
        """What one policy makes of the step's rollouts; its metrics."""
        name, version = learner.name, learner.state.policy_version
        rolled_out = [trajectory.of(name) for trajectory in collected.rolled_out]
        trained = [trajectory.of(name) for trajectory in collected.trained]
        metrics, timing = learner.learn(trained, self.parts.rollouts.greedy, collected.not_trained(name))
        metrics |= {f"timing_s/{part}": seconds for part, seconds in timing.items()}
        metrics |= reporting.staleness(rolled_out, version)
        return named(name, metrics | (reporting.policy_metrics(rolled_out) if name else {}))

    def _log(self, metrics: dict[str, float]) -> None:
        for learner in self.learners:
            metrics |= named(learner.name, {"training/policy_version": float(learner.state.policy_version)})
        self.parts.reporter.log(self.step, metrics, self.history)

    def validate(self, val_dataset: Dataset) -> dict[str, float]:
        """Roll out the validation tasks under validation sampling; `val/...` metrics."""
        self.on_validate_begin()
        metrics, _ = self.parts.rollouts.measure("val", val_dataset)
        self.on_validate_end(metrics)
        return metrics

    def tune(self) -> dict[str, float]:
        """Roll out the tuning tasks as in validation: is the policy the best so far? `tune/...` metrics."""
        metrics, reward = self.parts.rollouts.measure("tune", self._tune_dataset or [])
        self.tuning.measured(self.step, reward)
        return metrics | {"tune/best_step": float(self.tuning.best_step or 0)}

    def save(self) -> Path:
        """Write a checkpoint that `transformers` loads and that a run resumes from; its folder."""
        in_flight = self.parts.rollouts.in_flight
        return self.state.save(
            self.learners.export,
            {learner.name: learner.state_dict() for learner in self.learners},
            None if in_flight is None else in_flight.state_dict(),
        )

    def _measure(self, val_dataset: Dataset) -> dict[str, float]:
        """What is due together: validation, and the tuning set."""
        metrics = self.validate(val_dataset) if val_dataset else {}
        return metrics | (self.tune() if self._tune_dataset and not self.config.trainer.val_only else {})


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


VERL = PPO
"""Agent-lightning's name of `PPO`."""
