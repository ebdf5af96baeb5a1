"""What a step does with the rollouts of one policy. `learn` is the story; its parts are beside this file.

A run has one of these, or one for each of its policies: each has its own models, optimizer, versions, account of
tokens, and calls that wait while its own weights are sent.
"""

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_rl.config import ConfigError
from lightning_rl.config.policies import RunPolicy, base_of_adapter, engine_of_adapters, samples_adapter
from lightning_rl.files import newest_checkpoints
from lightning_rl.inference.load import load_model
from lightning_rl.ppo import batch as step_batch
from lightning_rl.ppo import reporting, resolved_config, rollout_correction
from lightning_rl.ppo.batch import StepBatch
from lightning_rl.ppo.estimators import kl_controller_of, needs_critic
from lightning_rl.ppo.models import Models, SharedEngine
from lightning_rl.ppo.privileged import PrivilegedRows, warn_of_untaught
from lightning_rl.ppo.reporting import Reporter, memory_advice, timed
from lightning_rl.ppo.resolved_config import StepRules
from lightning_rl.ppo.rollout_correction import SamplerCheck
from lightning_rl.ppo.run_state import PolicyState, RunState
from lightning_rl.ppo.teachers import begin_to_teach, teach
from lightning_rl.ppo.token_ledger import TokenLedger
from lightning_rl.ppo.weight_sync import WeightSync
from lightning_rl.rl.losses import loss_named
from lightning_rl.store.run_store import RunStore
from lightning_rl.training import checkpoint, lora
from lightning_rl.training.batch import MiniBatch
from lightning_rl.training.distributed import cluster
from lightning_rl.training.model_traits import has_dropout
from lightning_rl.training.teacher import ServedTeacher
from lightning_rl.trajectories.step_record import CallRecord, RolloutRecord, StepRecord
from lightning_rl.trajectories.trajectory import Trajectory

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearnerParts:
    """What a policy works with from a run's beginning to its end."""

    sampler: SamplerCheck
    ledger: TokenLedger
    weights: WeightSync
    reporter: Reporter


class PolicyLearner:
    """One policy of a run: what it trains, and how.

    Args:
        policy: its keys, and in which steps it learns.
        rules: how its batches are made.

    `run` is the run's state, `rendered_as` the name by which its chat format is known. `models` are there from `open`
    on, `state` from `start` on, `parts` from `begin` on.
    """

    run: RunState
    models: Models
    state: PolicyState
    parts: LearnerParts

    def __init__(self, policy: RunPolicy, rules: StepRules) -> None:
        self.policy = policy
        self.name = policy.name
        self.config = policy.config
        self.rules = rules
        self._kl_controller = kl_controller_of(policy.config)
        self.rendered_as = ""
        self._privileged: PrivilegedRows | None = None
        self._warned: set[str] = set()
        self.updated = False  # by the last step

    # The run begins.

    def open(self, run: RunState, resumed: Path | None, learners: "Learners") -> None:
        """Load the models of the run, those of a checkpoint where there is one.

        `learners` are all of the run: of adapters over the same weights the trainer has these once, and so has the
        engine, which samples all of them.
        """
        self.run = run
        torch.manual_seed(self.config.data.seed)
        folder = run.run_dir / "policies" / self.name if self.name else run.run_dir
        folder.mkdir(parents=True, exist_ok=True)
        weights = None if resumed is None else resumed / self.name
        with_critic = needs_critic(self.config, self.rules.batch.estimator)
        shared = self._shared_engine(learners)
        self.models = Models(self.config, folder, with_critic=with_critic, resumed=weights, shared=shared)
        self.config = self.models.config
        self.rendered_as = self.models.policy.name
        if self.rules.privileged is not None:
            renderer = resolved_config.loaded_renderer(self.config, self.models.policy.folder)
            longest = getattr(self.models.policy.model.config, "max_position_embeddings", None)
            self._privileged = PrivilegedRows(self.rules.privileged, renderer, longest)
        base = base_of_adapter(self.config)
        for other in learners.opened:
            if base is not None and base_of_adapter(other.config) == base:
                lora.share_base(self.models.model, other.models.model)
                return

    def _shared_engine(self, learners: "Learners") -> SharedEngine | None:
        own = engine_of_adapters(self.config)
        same = [each for each in learners if own is not None and engine_of_adapters(each.config) == own]
        if len(same) < 2 and not samples_adapter(self.config):
            return None
        ranks = [each.config.actor_rollout_ref.model.lora_rank for each in same]
        return SharedEngine(ranks, [each.models for each in learners.opened if each in same])

    def start(self, served_name: str) -> None:
        """Start the engine, which is asked for by this name."""
        self.models.policy.name = served_name
        self.state = PolicyState(self._kl_controller, served_name)
        self.models.start(self.run.saved_version(self.name))

    def prepare(self, store: RunStore, steps: int) -> WeightSync:
        """Make what is trained, for a run of so many steps; what sends its weights."""
        weights = WeightSync(self.config, store, self.models)
        weights.sleep()  # the trainer is made in the engine's room
        if why := learns_nothing(self.policy, steps):
            _log.warning("%s", why)
        updates = self.policy.updates(steps)
        self.models.train(max(1, updates) if steps else 0)
        weights.watch_outages()
        return weights

    def begin(self, store: RunStore, weights: WeightSync, reporter: Reporter) -> None:
        """The checkpoint is loaded, and the engine samples: from here on the policy learns."""
        sampler = SamplerCheck(
            bypass=self.config.algorithm.rollout_correction.bypass_mode,
            off_policy=self.rules.schedule is not None,
            tolerance=resolved_config.sampler_tolerance(self.config),
            began_ns=self.run.began_ns,
            began_version=self.state.policy_version,
        )
        self.parts = LearnerParts(sampler, TokenLedger(self.state.account, store), weights, reporter)

    def close(self) -> None:
        """Stop the engine, and the processes that train."""
        try:
            self.models.policy.close()
        finally:
            self.models.close()

    # A step.

    def learn(
        self,
        trajectories: list[Trajectory],
        greedy: Mapping[str, Trajectory],
        left_out: Sequence[tuple[Trajectory, str]] = (),
    ) -> tuple[dict[str, float], dict[str, float]]:
        """One step on its trajectories; metrics, and how many seconds each part took.

        `greedy` are greedy rollouts, by the group that they are compared with. `left_out` are those that were rolled
        out beside the trajectories, each with why it is not trained.
        """
        before = self.state.policy_version
        others = [_not_trained(trajectory, reason, left_out=reason) for trajectory, reason in left_out]
        self.updated = False
        learns = self.policy.learns_in(self.run.step)
        if not learns or self.policy.checkpoints_of is not None:
            for trajectory in trajectories:
                self.parts.ledger.exclude(trajectory, "frozen")
            self.write_record([*(_not_trained(each, "frozen") for each in trajectories), *others], before)
            if learns and self.policy.checkpoints_of is not None:
                self._take_checkpoint(self.policy.checkpoints_of)
            self.updated = self.state.policy_version > before
            return {}, {}
        models, parts, timing = self.models, self.parts, dict[str, float]()
        metrics: dict[str, float] = {}
        parts.weights.sleep()
        models.actor.onload()
        batch = step_batch.read(trajectories, self.rules.batch)
        in_update = self._update_finds_old_log_probs(len(trajectories))
        if not in_update:
            with timed(timing, "old_log_prob"):
                metrics |= self.set_old_log_probs(batch)
        elif not parts.sampler.compared:
            with timed(timing, "old_log_prob"):
                own = models.actor.log_probs(batch.sequences)
                metrics |= parts.sampler.compare(batch, own, self.state.policy_version)
        if models.reference is not None:
            with timed(timing, "ref"):
                batch.put(reference_log_probs=models.reference.log_probs(batch.sequences))
        if models.teachers:
            with timed(timing, "teacher"):
                metrics |= self._teach(batch)
        if models.has_values:
            with timed(timing, "values"):
                batch.put(values=models.values(batch.sequences))
        with timed(timing, "adv"):
            compared = {group: step_batch.counted(one.of(self.name), self.rules.batch) for group, one in greedy.items()}
            baselines = {group: reward for group, reward in compared.items() if reward is not None}
            step_batch.estimate(batch, replace(self.rules.batch, kl_coef=self.state.kl_coef), baselines)
            if not in_update and not self.config.algorithm.rollout_correction.bypass_mode:
                metrics |= rollout_correction.correct(batch, self.rules.correction)
            step_batch.whiten(batch, self.rules.batch)
        metrics |= batch.metrics()
        self.state.update_kl_coef(batch.kl, len(batch.parts))
        parts.ledger.enter(batch)
        plan = models.actor.plan(batch.sequences, len(trajectories))
        try:
            if plan:
                metrics |= self.update(batch, plan, timing)
            else:
                rule = self.config.algorithm.filter_groups
                metrics |= reporting.skipped(batch, self.run.step, rule, self.name)
            if plan and in_update:
                metrics |= rollout_correction.update_metrics(batch, self.rules.correction)
        finally:  # an update that fails is looked into, too
            self.write_record([*step_batch.records(batch, plan), *others], before)
        models.actor.offload()
        parts.weights.wake()
        self.updated = self.state.policy_version > before
        if "actor/first_k3_kl" in metrics:
            metrics["training/mismatch_kl"] = metrics.get("rollout_corr/k3_kl", metrics["actor/first_k3_kl"])
        return metrics, timing

    @property
    def asks_ahead(self) -> bool:
        """Whether teachers can be asked about a rollout while others of its step still run."""
        served = any(isinstance(teacher, ServedTeacher) for teacher in self.models.teachers.values())
        return served and self._privileged is None

    def ask_ahead(self, trajectory: Trajectory) -> None:
        """Ask the teachers on servers about a rollout that has ended."""
        begin_to_teach(trajectory.of(self.name), self.rules.batch, self.models.teachers, self.config)

    def _teach(self, batch: StepBatch) -> dict[str, float]:
        """Ask the teachers about the batch."""
        untaught = teach(batch, self.models.teachers, self.config, self._privileged)
        if self._privileged is None:
            return {}
        warn_of_untaught(untaught, self._warned)
        return {"distillation/untaught_calls": float(sum(untaught.values()))}

    def _take_checkpoint(self, policy: str) -> None:
        """Take the weights of a policy in one of the run's newest checkpoints, by the seed; where there is none yet, or
        the one is broken, nothing changes."""
        there = newest_checkpoints(self.run.run_dir / "checkpoints", self.policy.pool)
        if not there:
            return
        chosen = random.Random(f"{self.config.data.seed}-{self.run.step}").choice(there)
        if wrong := checkpoint.fault(chosen):
            _log.warning("policy %s stays as it is: checkpoint %s is broken: %s", self.name, chosen, wrong)
            return
        own = dict(self.models.model.named_parameters())
        saved_model = load_model(chosen / policy, next(iter(own.values())).dtype)
        self.parts.weights.begin_training()
        with torch.no_grad():
            for name, weight in saved_model.named_parameters():
                own[name].copy_(weight)
        self.publish_weights()

    def set_old_log_probs(self, batch: StepBatch) -> dict[str, float]:
        """Old log probabilities: the sampler's (bypass) or the trainer's own; and how far the two are apart."""
        return self.parts.sampler.set_old_log_probs(batch, self.models.actor.log_probs, self.state.policy_version)

    def _update_finds_old_log_probs(self, rollouts: int) -> bool:
        """Whether the old log probabilities are those that the update's own forward pass finds, so that none is needed
        before: of one mini-batch they are of the same weights. Not where something asks for them before the update
        (a correction, a distance from the reference in the rewards, a loss that prepares for the whole mini-batch), nor
        where dropout makes each pass another one.

        The first batch of a session is no exception, though a pass of its own compares it with the sampler: that pass
        may be cut into other micro-batches, whose last bits differ, and a resumed run would not end as one that was not
        stopped."""
        actor, config = self.models.actor.config, self.config
        return (
            rollouts <= actor.mini_batch_rollouts
            and not self._critic_warms_up
            and not config.algorithm.rollout_correction.bypass_mode
            and not self.rules.correction.active
            and not self.state.kl_coef
            and loss_named(actor.loss_mode).prepare is None
            and not has_dropout(self.models.model)
        )

    @property
    def _critic_warms_up(self) -> bool:
        """Whether the step is one of the first `critic_warmup` in which this policy learns."""
        return self.policy.updates(self.run.step) <= self.config.trainer.critic_warmup

    def update(self, batch: StepBatch, plan: list[MiniBatch], timing: dict[str, float]) -> dict[str, float]:
        """Update the critic, then the policy, unless the critic warms up; publish the policy's new weights."""
        metrics: dict[str, float] = {}
        models, step, warming_up = self.models, self.run.step, self._critic_warms_up
        if models.critic is not None:
            with timed(timing, "update_critic"), memory_advice(self.config, step, of_critic=True):
                metrics |= models.critic.update(models.critic.plan(batch.sequences, len(batch.parts)))
        elif warming_up:
            with timed(timing, "update_critic"), memory_advice(self.config, step):
                metrics |= models.actor.update(plan, values_alone=True)
        if not warming_up:
            self.parts.weights.begin_training()
            with timed(timing, "update_actor"), memory_advice(self.config, step):
                metrics |= models.actor.update(plan)
                models.average_teachers()
            with timed(timing, "update_weights"):
                self.publish_weights()
        return metrics

    def publish_weights(self) -> None:
        """Make the updated weights the next policy version, and give them to the engine."""
        self.state.policy_version += 1
        self.parts.weights.publish(self.state.policy_version)

    def write_record(self, of_rollouts: list[RolloutRecord], version: int) -> None:
        """Write down what the step, which began with this policy version, makes of its rollouts."""
        record = StepRecord(
            step=self.run.step,
            policy_version=version,
            rule=self.rules.credit,
            loss_agg_mode=self.config.actor_rollout_ref.actor.loss_agg_mode,
            rollouts=of_rollouts,
            estimator=self.rules.estimator,
        )
        self.parts.reporter.write_record(record, self.name)

    # A checkpoint.

    def export(self, folder: Path) -> None:
        """Write policy and tokenizer: of several into a folder of the policy's name."""
        own = folder / self.name
        own.mkdir(exist_ok=True)
        self.models.export(own)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights."""
        return self.state.state_dict() | {"models": self.models.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any], weights: WeightSync) -> None:
        """Go on from a saved state, and give the engine its weights."""
        self.models.load_state_dict(saved["models"])
        self.state.load_state_dict(saved)
        weights.restore(self.state.policy_version)


def learns_nothing(policy: RunPolicy, steps: int) -> str | None:
    """Why a policy that is to learn learns nothing in a run of so many steps; None where it learns."""
    updates, warm_up = policy.updates(steps), policy.config.trainer.critic_warmup
    if steps and policy.train_every and not updates:
        return (
            f"policies.{policy.name}.train_from={policy.train_from} holds policy {policy.name} back in all of the "
            f"run's {steps} steps: it learns nothing in this run"
        )
    if warm_up and 0 < updates <= warm_up:
        who = f"policy {policy.name}" if policy.name else "the policy"
        return (
            f"trainer.critic_warmup={warm_up} holds {who} back in all of its {updates} updates: it learns nothing in "
            "this run"
        )
    return None


def _not_trained(trajectory: Trajectory, reason: str, *, left_out: str | None = None) -> RolloutRecord:
    """The record of a rollout from which the policy does not learn; `left_out` where no policy does."""
    return RolloutRecord(
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        reward=trajectory.reward,
        rewards=trajectory.rewards.named,
        agent_failed=trajectory.agent_failed,
        left_out=left_out,
        calls={call_id: CallRecord(left_out=reason) for call_id in trajectory.forest.nodes},
    )


class Learners(list[PolicyLearner]):
    """The policies of a run, the first of which answers whoever asks for none by name; `opened` are those whose models
    are loaded."""

    def __init__(self, learners: Iterable[PolicyLearner]) -> None:
        super().__init__(learners)
        self.opened: list[PolicyLearner] = []
        self._joined_ray = False

    def open(self, run: RunState, resumed: Path | None, tell: Callable[[str], None] | None) -> None:
        """Load the models of all, and `tell` which devices they are on. Raises ConfigError where their chat formats
        differ."""
        self.opened.clear()
        for learner in self:
            learner.open(run, resumed, self)
            self.opened.append(learner)
            if tell is not None and (where := learner.models.cards.line()):
                tell(where)
        _check_chat_formats(self)

    def prepare(self, store: RunStore, steps: int) -> dict[str, WeightSync]:
        """Make what is trained, for a run of so many steps; what sends each one's weights, by its name.

        Ray is joined for the workers of all of several: each would ask for those of its own.
        """
        if len(self) > 1 and self[0].config.trainer.workers > 1:
            needs = [learner.models.worker_need() for learner in self]
            self._joined_ray = cluster.join(sum(workers for workers, _ in needs), sum(size for _, size in needs))
        return {learner.name: learner.prepare(store, steps) for learner in self}

    def watch(self) -> None:
        """Raise what ended an engine, when something has."""
        for learner in self.opened:
            learner.models.policy.check()

    def export(self, folder: Path) -> None:
        """Write policies and tokenizers."""
        for learner in self:
            learner.export(folder)

    def close(self) -> None:
        """Stop the engines, and the processes that train."""
        with ExitStack() as all_of_them:
            if self._joined_ray:
                self._joined_ray = False
                all_of_them.callback(cluster.leave)
            for learner in self.opened:
                all_of_them.callback(learner.close)


def _check_chat_formats(learners: Sequence[PolicyLearner]) -> None:
    """Raises ConfigError where policies write chats in different ways: one gateway renders for all of them."""
    from lightning_rl_proxy.rendering.fingerprint import fingerprint_of

    first = learners[0]
    for other in learners[1:]:
        if other.models.policy.folder == first.models.policy.folder:
            continue
        here, there = (
            fingerprint_of(resolved_config.loaded_renderer(each.config, each.models.policy.folder))
            for each in (first, other)
        )
        if here[:2] != there[:2]:
            difference = "tokenizer" if here.vocabulary != there.vocabulary else "chat format"
            raise ConfigError(
                f"policies.{other.name}.actor_rollout_ref.model.path: its {difference} is another one than that of "
                f"policies.{first.name}, and policies of a run share both: take models of one family"
            )
