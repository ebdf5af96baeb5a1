"""The rollouts of a step: what is requested, how finished rollouts are read, and which groups are worth training.

Under `sync` a step requests its rollouts and waits for them. Under the other schedules groups are in flight ahead of
the trainer (`off_policy/`), and a step takes those whose turn it is.

Invariant: every rollout that is read here and not handed to training is entered in the token ledger with a reason.
"""

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any, Literal

import msgspec
import numpy as np

from lightning_rl.algorithms.asked_before import again_id, with_lost_groups_anew
from lightning_rl.algorithms.base import Algorithm, Dataset
from lightning_rl.algorithms.watchdog import Watchdog
from lightning_rl.config.schema import Config, FilterGroups
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.estimators import needs_greedy
from lightning_rl.ppo.off_policy.async_rollouts import InFlight
from lightning_rl.ppo.off_policy.schedules import Schedule
from lightning_rl.ppo.policy_learner import PolicyLearner
from lightning_rl.ppo.reporting import Reporter, named_rewards, timed
from lightning_rl.ppo.resolved_config import StepRules
from lightning_rl.ppo.run_state import RunState
from lightning_rl.ppo.token_ledger import RunLedger
from lightning_rl.store.contract import SEED_KEY, Mode, Rollout, RolloutConfig, RolloutRequest, RolloutTrace
from lightning_rl.store.errors import NotFound
from lightning_rl.store.run_store import RunStore
from lightning_rl.trajectories.reader import reader
from lightning_rl.trajectories.trajectory import ACCURACY, Trajectory, informative

Tasks = Sequence[tuple[int, Any]]  # (index in the dataset, task)

_WAIT_SECONDS = 2.0  # between two looks at the processes of a run
_METRIC = "algorithm.filter_groups.metric"
_GREEDY = "greedy-"  # prefix of the groups of greedy rollouts
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """What the rollouts of one request have in common.

    Their ids begin with `name`, behind `again.` where an earlier session lost them, and end with `run`: a run that is
    resumed requests the same ones, and no other run has them. What they are sampled with does not depend on `run`.
    Without `resources_id` they get the latest resources.
    `ahead`: another step than `step` may train them.
    """

    name: str
    mode: Mode
    step: int
    run: str
    resources_id: str
    ahead: bool = False


@dataclass(frozen=True)
class Collected:
    """The rollouts of a step: all of them, those to be trained, why others are not (by rollout), and the metrics of an
    off-policy schedule."""

    rolled_out: list[Trajectory]
    trained: list[Trajectory]
    left_out: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def begun(self) -> list[Trajectory]:
        """Those that were not cancelled, as no longer needed, before they made a call."""
        return [one for one in self.rolled_out if one.calls or self.left_out.get(one.rollout_id) != "surplus"]

    def not_trained(self, policy: str) -> list[tuple[Trajectory, str]]:
        """A policy's part of the rollouts that are left out, with the reasons."""
        others = (one for one in self.rolled_out if one.rollout_id in self.left_out)
        return [(one.of(policy), self.left_out[one.rollout_id]) for one in others]


class Collector:
    """Requests a run's rollouts and reads them as they end. It is the `Rollouts` of the groups in flight.

    Args:
        algorithm: requests rollouts of its store and waits for them (`ask`, `finished`, `ended`).
        config: the run's.
        rules: who grades rollouts, and the schedule.
        state: the run's counters.
        learners: the policies of the run, which have begun.
        reporter: warns of what went wrong in rollouts, and writes their traces.
        dataset: the tasks of training.

    Publishes the policies' resources, and requests again what a resumed run had in flight. `greedy` has the step's
    greedy rollouts, by the group that they are compared with.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        config: Config,
        rules: StepRules,
        state: RunState,
        learners: Sequence[PolicyLearner],
        reporter: Reporter,
        dataset: Dataset,
    ) -> None:
        self._algorithm = algorithm
        self._config = config
        self._rules = rules
        self._state = state
        self._learners = learners
        self._reward_names = set(config.policies).union(*map(_rewards_of, learners))
        self._models = [learner.state.account.model for learner in learners]
        self.ledger = RunLedger({learner.name: learner.parts.ledger for learner in learners}, algorithm.store)
        self._reporter = reporter
        self._watchdog = Watchdog(algorithm.store, algorithm.watchdog_seconds)
        self._read_one = _reader(config, rules, learners)
        self._resources, self._greedy_resources = publish_resources(algorithm.store, config, learners)
        self.greedy: dict[str, Trajectory] = {}
        state.note_tasks(len(dataset), shuffled=config.data.shuffle)
        batches = shuffled_batches(config, dataset)
        self._supply = islice(batches, state.batches_taken if rules.schedule is None else 0, None)
        self.in_flight = None if rules.schedule is None else self._first_in_flight(rules.schedule, batches)

    def collect(self, steps_left: int) -> Collected:
        """The rollouts of the step that begins, which is one of `steps_left`."""
        self.greedy.clear()
        return self._of_this_step() if self.in_flight is None else self._of_those_in_flight(self.in_flight, steps_left)

    def next_batch(self) -> Tasks:
        """The tasks of the next training batch of a `sync` run."""
        self._state.batches_taken += 1
        return next(self._supply)

    def measure(self, name: Literal["val", "tune"], dataset: Dataset) -> tuple[dict[str, float], float | None]:
        """Roll out the tasks under validation sampling; metrics, and the mean reward, None where no rollout has one.
        Nothing of it is trained."""
        timing: dict[str, float] = {}
        with timed(timing, "testing"):
            n = self._config.actor_rollout_ref.rollout.val_kwargs.n
            trajectories = self.roll_out(name, list(enumerate(dataset)), n)
        self._reporter.write_generations(name, self._state.step, trajectories)
        for trajectory in trajectories:
            self.ledger.exclude(trajectory, "validation" if name == "val" else "tuning")
        rewards = [t.given_reward for t in trajectories if t.given_reward is not None]
        reward = float(np.mean(rewards)) if rewards else None
        if reward is None:
            _log.warning("step %d: no rollout of %r has a reward: nothing is measured", self._state.step, name)
        return {
            **({} if reward is None else {f"{name}/reward": reward}),
            f"{name}/calls": float(np.mean([t.calls for t in trajectories])),
            "timing_s/testing" if name == "val" else "timing_s/tuning": timing["testing"],
            **{f"{name}/reward/{each}": value for each, value in named_rewards(trajectories).items()},
        } | self.check_tokens(), reward

    def check_tokens(self) -> dict[str, float]:
        """See `TokenLedger.check`."""
        return self.ledger.check([] if self.in_flight is None else self.in_flight.rollout_ids)

    def roll_out(
        self, name: Literal["train", "val", "tune"], tasks: Tasks, n: int, *, generation: int = 0
    ) -> list[Trajectory]:
        """Request `n` rollouts of each task, and read them as they end. Groups are in the order of `tasks`. Where the
        estimator compares with greedy rollouts, one of each task is requested beside them.

        `generation` distinguishes batches of one step, which may have a task in common.
        """
        step = self._state.step
        prefix = f"{name}-{self._config.data.seed}-{step}" + (f".{generation}" if generation else "")
        mode: Mode = "train" if name == "train" else "val"
        sampled, greedy = self._requests(self._purpose(prefix, mode, step), tasks, n)
        self.ledger.ask([str(request.rollout_id) for request in sampled + greedy])
        trajectories = self._read(
            partial(self._algorithm.finished, sampled + greedy),
            traced=(f"{name} {step}", [str(request.group_id) for request in sampled]),
            when={"val": "validation", "tune": "tuning"}.get(name, f"step {step}"),
            trained=name == "train" and not self._config.algorithm.filter_groups.enable,
        )
        self._note_greedy(self._without_lost(trajectories[len(sampled) :]))
        return self._without_lost(trajectories[: len(sampled)])

    # What the groups in flight ask of it.

    def ask(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """See `async_rollouts.Rollouts`."""
        self.ledger.ask([str(request.rollout_id) for request in requests])
        return self._algorithm.ask(requests)

    def ended(self, rollout_ids: Sequence[str], wait_seconds: float) -> list[Rollout]:
        """See `async_rollouts.Rollouts`."""
        return self._algorithm.ended(rollout_ids, self._watchdog, wait_seconds)

    def read(self, rollout_ids: Sequence[str]) -> list[Trajectory]:
        """See `async_rollouts.Rollouts`."""
        step, traces_by_id = self._state.step, self._algorithm.store.traces(rollout_ids)
        traces = [traces_by_id[rollout_id] for rollout_id in rollout_ids]
        groups = [str(trace.rollout.group_id) for trace in traces]
        sampled = [group for group in groups if not group.startswith(_GREEDY)]
        trajectories = self._read(
            lambda read: [read(trace) for trace in traces],
            traced=(f"train {step}", sampled),
            when=f"step {step}",
            trained=True,
        )
        for trajectory in trajectories:
            self.ledger.hold(trajectory)
        if (rule := self._config.algorithm.filter_groups).enable:
            self._warn_of_metric(rule, trajectories)
        return trajectories

    def cancel(self, rollout_ids: Sequence[str]) -> None:
        """See `async_rollouts.Rollouts`."""
        for rollout_id in rollout_ids:
            self._algorithm.store.cancel(rollout_id)

    def is_there(self, rollout_id: str) -> bool:
        """See `async_rollouts.Rollouts`."""
        try:
            self._algorithm.store.rollout(rollout_id)
        except NotFound:
            return False
        return True

    def _read(
        self,
        traces: Callable[[Callable[[RolloutTrace], Any]], list[Any]],
        *,
        traced: tuple[str, Sequence[str]],
        when: str,
        trained: bool,
    ) -> list[Trajectory]:
        """Read finished rollouts, with the rewards that training gives.

        `traces` calls a function on each trace, in order. `traced` names the batch and its groups, some of which have
        their traces written. About those that are `trained` teachers are asked as they end,
        unless a grader is yet to say whether they count. Warns of what went wrong in
        rollouts of `when`.
        """
        grader, ahead = self._rules.grader, [one for one in self._learners if trained and one.asks_ahead]

        def read_one(trace: RolloutTrace) -> Trajectory:
            trajectory = self._read_one(trace)
            if not trajectory.group_id.startswith(_GREEDY):
                for learner in ahead:
                    learner.ask_ahead(trajectory)
            return trajectory

        if grader is None:
            trajectories = traces(self._reporter.traced(*traced, read_one))
        else:
            read = self._reporter.traced(*traced, self._read_one)
            graded = grader.graded(traces(lambda trace: trace), self._algorithm.store, self._models)
            trajectories = [read(trace) for trace in graded]
        self._reporter.warnings.report(when, trajectories)
        for policy in (learner.policy for learner in self._learners):
            if policy.reward is not None and policy.reward == policy.name:
                self._reporter.warnings.report_misspelt_policy(policy.name, self._reward_names, trajectories)
            elif policy.reward is not None:
                key = f"policies.{policy.name}.reward"
                self._reporter.warnings.report_missing_reward(key, policy.reward, trajectories)
            for name in policy.config.algorithm.compared_rewards:
                self._reporter.warnings.report_missing_reward("algorithm.gdpo_reward_keys", name, trajectories)
        return trajectories

    def _of_this_step(self) -> Collected:
        """`sync`: a batch of tasks is rolled out; with `filter_groups` further ones, until enough groups differ in
        their rewards."""
        tasks = self.next_batch()
        n, rule = self._config.actor_rollout_ref.rollout.n, self._config.algorithm.filter_groups
        if not rule.enable:
            rolled_out = self.roll_out("train", tasks, n)
            return Collected(rolled_out, rolled_out)
        batches = (
            self.roll_out("train", self.next_batch() if number else tasks, n, generation=number)
            for number in range(rule.max_num_gen_batches)
        )
        rolled_out, trained, reasons = with_variance(batches, self._config.data.train_batch_size, rule.metric)
        self._warn_of_metric(rule, rolled_out)
        left_out = {t.rollout_id: reasons[t.group_id] for t in rolled_out if t.group_id in reasons}
        for trajectory in rolled_out:
            if trajectory.rollout_id in left_out:
                self.ledger.exclude(trajectory, left_out[trajectory.rollout_id])
        return Collected(rolled_out, trained, left_out)

    def _warn_of_metric(self, rule: FilterGroups, trajectories: Sequence[Trajectory]) -> None:
        if rule.metric != ACCURACY:
            self._reporter.warnings.report_missing_reward(_METRIC, rule.metric, trajectories)

    def _of_those_in_flight(self, in_flight: InFlight, steps_left: int) -> Collected:
        """Off-policy: the groups whose turn it is."""
        batch_size = self._config.data.train_batch_size
        groups_left = steps_left * batch_size
        in_flight.idle_seconds = 0.0
        self._watchdog.begin()
        handed_over = in_flight.hand_over(self._state.updates, groups_left, _WAIT_SECONDS)
        stale = sum(reason == "stale" for _, reason in handed_over.left_out)
        if groups_left <= batch_size:
            handed_over.left_out += [(group, "surplus") for group in in_flight.cancel(_WAIT_SECONDS)]
        trained = [trajectory for group in handed_over.groups for trajectory in self._without_greedy(group)]
        rolled_out, left_out = list(trained), dict[str, str]()
        for group, reason in handed_over.left_out:
            for trajectory in self._without_greedy(group):
                self.ledger.exclude(trajectory, reason)
                rolled_out.append(trajectory)
                left_out[trajectory.rollout_id] = reason
        self._state.batches_taken = -(-in_flight.next_place // batch_size)
        ahead = {
            "schedule/groups_in_flight": float(len(in_flight)),
            "schedule/groups_queued": float(handed_over.queued),
            "schedule/groups_stale": float(stale),
            "timing_s/sampling_idle": in_flight.idle_seconds,
        }
        return Collected(rolled_out, trained, left_out, ahead)

    def _first_in_flight(self, schedule: Schedule, batches: Iterable[Tasks]) -> InFlight:
        """The groups in flight as training begins: none, or those that a resumed run left there."""
        rule, batch_size = self._config.algorithm.filter_groups, self._config.data.train_batch_size
        state = self._state.in_flight or {"asked": self._state.batches_taken * batch_size, "groups": []}
        return InFlight(
            schedule,
            batches,
            self._requests_of_group,
            self,
            why_not=lambda group, _: why_not(rule, schedule, group, self._versions()),
            most=rule.max_num_gen_batches * batch_size if rule.enable else None,
            state=state,
        )

    def _versions(self) -> dict[str, int]:
        """The policy version of each policy."""
        return {learner.name: learner.state.policy_version for learner in self._learners}

    def _requests_of_group(self, batch: int, task: tuple[int, Any]) -> list[RolloutRequest]:
        """The rollouts of a group: what `sync` would request in step `batch`."""
        name = f"train-{self._config.data.seed}-{batch}"
        purpose = self._purpose(name, "train", batch, ahead=True)
        sampled, greedy = self._requests(purpose, [task], self._config.actor_rollout_ref.rollout.n)
        return sampled + greedy

    def _purpose(self, name: str, mode: Mode, step: int, *, ahead: bool = False) -> Purpose:
        return Purpose(
            name=name, mode=mode, step=step, run=self._state.run_id, resources_id=self._resources, ahead=ahead
        )

    def _requests(self, purpose: Purpose, tasks: Tasks, n: int) -> tuple[list[RolloutRequest], list[RolloutRequest]]:
        """`n` rollouts of each task, and the greedy ones that they are compared with; where a run is resumed also what
        it had asked for and lost."""
        sampled, greedy = requests(self._config, purpose, tasks, n), list[RolloutRequest]()
        if purpose.mode == "train" and self._greedy_resources is not None:
            compared = replace(purpose, name=f"{_GREEDY}{purpose.name}", resources_id=self._greedy_resources)
            greedy = requests(self._config, compared, tasks, 1)
        if self._algorithm.resume:
            store = self._algorithm.store
            return with_lost_groups_anew(sampled, store), with_lost_groups_anew(greedy, store)
        return sampled, greedy

    def _without_greedy(self, group: list[Trajectory]) -> list[Trajectory]:
        there = self._without_lost(group)
        self._note_greedy([trajectory for trajectory in there if _is_greedy(trajectory)])
        return [trajectory for trajectory in there if not _is_greedy(trajectory)]

    def _without_lost(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Those that were not asked for again since infrastructure had lost them: these count in the account of tokens
        alone."""
        ids = {trajectory.rollout_id for trajectory in trajectories}
        lost = {rollout_id for rollout_id in ids if again_id(rollout_id) in ids}
        for trajectory in trajectories:
            if trajectory.rollout_id in lost:
                self.ledger.exclude(trajectory, "infrastructure")
        return [trajectory for trajectory in trajectories if trajectory.rollout_id not in lost]

    def _note_greedy(self, trajectories: Sequence[Trajectory]) -> None:
        """Keep greedy rollouts for those that are compared with them."""
        for trajectory in trajectories:
            self.ledger.exclude(trajectory, "greedy_logprobs")
            self.greedy[trajectory.group_id.removeprefix(_GREEDY)] = trajectory


def requests(config: Config, purpose: Purpose, tasks: Tasks, n: int) -> list[RolloutRequest]:
    """`n` rollouts of each task, group by group, in the order of `tasks`."""
    agent, name, step = config.actor_rollout_ref.rollout.agent, purpose.name, purpose.step
    return [
        RolloutRequest(
            task=task,
            mode=purpose.mode,
            rollout_id=f"{name}-{index}-{k}.{purpose.run}",
            group_id=f"{name}-{index}.{purpose.run}",
            resources_id=purpose.resources_id,
            config=RolloutConfig(max_attempts=agent.max_attempts, timeout_seconds=agent.timeout_seconds),
            metadata={"task_index": f"{index}-{k}", "step": step, SEED_KEY: f"{name}-{index}-{k}"}
            | ({"ahead": True} if purpose.ahead else {}),
        )
        for index, task in tasks
        for k in range(n)
    ]


def shuffled_batches(config: Config, dataset: Dataset) -> Iterator[Tasks]:
    """(index, task) pairs, `train_batch_size` at a time; every epoch in another order, the remainder is dropped."""
    order, size = list(range(len(dataset))), config.data.train_batch_size
    shuffle = random.Random(config.data.seed)
    while True:
        if config.data.shuffle:
            shuffle.shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            yield [(i, _task(dataset, i)) for i in order[start : start + size]]


def _rewards_of(learner: PolicyLearner) -> set[str]:
    """The names of rewards that the keys of a policy give."""
    policy, algorithm = learner.policy, learner.policy.config.algorithm
    return {*(algorithm.credit.weights or ()), *algorithm.compared_rewards, policy.reward or policy.name}


def _task(dataset: Dataset, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:
        error.add_note(f"raised by train_dataset[{index}]")
        raise


def with_variance(
    batches: Iterable[list[Trajectory]], groups: int, metric: str
) -> tuple[list[Trajectory], list[Trajectory], dict[str, str]]:
    """DAPO's dynamic sampling: take batches until `groups` groups differ in `metric`.

    Returns all rollouts, those that are trained, and why each group of the others is not, by group id.
    """
    rolled_out: list[Trajectory] = []
    chosen: list[list[Trajectory]] = []
    for batch in batches:
        rolled_out += batch
        chosen += informative(batch, metric)
        if len(chosen) >= groups:
            break
    trained = chosen[:groups]
    trained_ids = {group[0].group_id for group in trained}
    reasons = {t.group_id: "zero_variance" for t in rolled_out if t.group_id not in trained_ids}
    reasons |= {group[0].group_id: "surplus" for group in chosen[groups:]}
    return rolled_out, [trajectory for group in trained for trajectory in group], reasons


def why_not(rule: FilterGroups, schedule: Schedule, group: list[Trajectory], versions: Mapping[str, int]) -> str | None:
    """Why a group that has ended is not trained on weights of these versions, by policy; None: it is."""
    sampled = [trajectory for trajectory in group if not _is_greedy(trajectory)]
    for policy, version in versions.items():
        calls = [node.call for t in sampled for node in t.of(policy).forest.nodes.values()]
        oldest = min((part.version for call in calls for part in call.versions), default=version)
        if version - oldest > schedule.threshold:
            return "stale"
    return "zero_variance" if rule.enable and not informative(sampled, rule.metric) else None


def publish_resources(store: RunStore, config: Config, learners: Sequence[PolicyLearner]) -> tuple[str, str | None]:
    """Publish the policy as `main_llm`, with its sampling in training and in validation; of several the first is that,
    and each has its own name; and the frozen models of `gateway.backends` by their names.

    Before it, where an estimator needs greedy rollouts, greedy ones. Returns the ids of both, which are the same when
    the run is resumed.
    """
    frozen: dict[str, dict[str, Any]] = {
        name: {"type": "proxy_llm", "model": name} for name in config.gateway.frozen_models()
    }
    sampled, greedy = (frozen | _policies(learners, greedy=each) for each in (False, True))
    greedy_id = None
    if any(needs_greedy(learner.rules.batch.estimator) for learner in learners):
        greedy_id = _published(store, "greedy", greedy)
    return _published(store, "policy", sampled), greedy_id


def _policies(learners: Sequence[PolicyLearner], *, greedy: bool) -> dict[str, dict[str, Any]]:
    """The policies as resources, `greedy` in training too."""
    resources: dict[str, dict[str, Any]] = {}
    for learner in learners:
        sampling: dict[str, Any] = resolved_config.sampling_parameters(learner.config)
        if greedy:
            sampling |= {"sampling_parameters": resolved_config.greedy_sampling(learner.config)}
        resource = {"type": "proxy_llm", "model": learner.state.account.model, **sampling}
        if learner.name:
            resource |= {"agents": learner.policy.agents}
            resources[learner.name] = resource
        resources.setdefault("main_llm", resource)
    return resources


def _reader(
    config: Config, rules: StepRules, learners: Sequence[PolicyLearner]
) -> Callable[[RolloutTrace], Trajectory]:
    """What reads a finished rollout: of several policies as a whole, with what each of them learns from."""
    messages = rules.privileged is not None
    own = {
        one.name: reader(one.config, one.state.account.model, one.rules.select, one.policy.reward, messages=messages)
        for one in learners
    }
    if "" in own:
        return own[""]
    whole = reader(config, [one.state.account.model for one in learners], rules.select)

    def read(trace: RolloutTrace) -> Trajectory:
        return together(whole(trace), {name: each(trace) for name, each in own.items()})

    return read


def together(whole: Trajectory, of_policies: Mapping[str, Trajectory]) -> Trajectory:
    """A rollout of several policies. Where its agent gave policies rewards of their own and none to the whole, their
    mean is the final reward, also of policies without one of their own."""
    rewards = [one.reward for one in of_policies.values() if not one.agent_failed and one.reward is not None]
    parts = dict(of_policies)
    if whole.agent_failed and whole.error is None and rewards:
        final = fmean(rewards)
        whole = _rewarded(whole, final)
        parts = {name: _rewarded(one, final) if one.agent_failed else one for name, one in parts.items()}
    return msgspec.structs.replace(whole, of_policies=parts)


def _rewarded(trajectory: Trajectory, final: float) -> Trajectory:
    rewards = msgspec.structs.replace(trajectory.rewards, final=final)
    return msgspec.structs.replace(trajectory, agent_failed=False, reward=final, rewards=rewards)


def _published(store: RunStore, name: str, resources: dict[str, dict[str, Any]]) -> str:
    """Publish resources under an id that says what they are."""
    digest = hashlib.blake2b(msgspec.json.encode(resources), digest_size=8).hexdigest()
    return store.publish(resources, f"{name}-{digest}").resources_id


def _is_greedy(trajectory: Trajectory) -> bool:
    return trajectory.group_id.startswith(_GREEDY)
