"""What a run says of itself: metrics to the trackers, the step records, and warnings of what keeps it from learning.

At its end it says what became of the reward, where everything is, and what to type next. Metrics have verl's names
where verl has them.
"""

import logging
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Literal

import msgspec
import numpy as np
import torch

from lightning_rl.config.policies import policies_of
from lightning_rl.config.schema import Config, FilterGroups
from lightning_rl.files import finished
from lightning_rl.inspect.live_findings import Findings
from lightning_rl.inspect.run_stats import RECENT
from lightning_rl.ppo.batch import StepBatch
from lightning_rl.ppo.models import Models
from lightning_rl.ppo.run_state import RunState
from lightning_rl.processes import cores
from lightning_rl.store.contract import RolloutTrace
from lightning_rl.telemetry import metrics as trackers
from lightning_rl.telemetry import traces
from lightning_rl.telemetry.generations import Generations
from lightning_rl.telemetry.metrics.about import About
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.run_warnings import Problems
from lightning_rl.trajectories.step_record import StepRecord
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_adapters.credit import FINAL

_EDGE = 4  # the first and the last quarter of the steps are a run's beginning and end
_log = logging.getLogger(__name__)


class Reporter:
    """Where the numbers, records and traces of one run go; whoever makes one calls `close`.

    Args:
        config: the run's.
        state: it says the run folder, and where a resumed run continues.
        models: their tokenizer writes the traces; of several policies those of the first.
        total_steps: how many steps the run makes.
        console: whether a person reads along.
    """

    def __init__(self, config: Config, state: RunState, models: Models, total_steps: int, *, console: bool) -> None:
        self._run_dir = state.run_dir
        self._records = step_record.folders(config.policies)
        earlier = {
            policy: step_record.read_all(state.run_dir, newest=RECENT, until=state.step, policy=folder)
            for policy, folder in self._records.items()
            if state.resumed
        }
        self._findings = Findings(state.run_dir, config, earlier)
        count = any(not policy.config.distillation.without_rewards for policy in policies_of(config))
        self.warnings = Problems(
            state.run_dir,
            max_tokens=config.data.max_tokens,
            rewards_count=count,
            summed=config.algorithm.credit.weights or (),
        )
        if console:
            for line in first_lines(models):
                print(line)
            print(f"to look at the run as it goes: lightning-rl dashboard {shlex.quote(str(state.run_dir))}")
        trainer = config.trainer
        names = trackers.of_run(trainer.logger, console=console)
        about = {"name": trainer.experiment_name or state.run_dir.name, "config": msgspec.to_builtins(config)}
        about |= {"project": trainer.project_name} if trainer.project_name else {}
        self._trackers = trackers.open_trackers(
            names, state.run_dir, total_steps, began_at=state.step, about=About(**about)
        )
        self._traces = traces.open_writer(config, state.run_dir, models.tokenizer)
        self._generations = {
            name: Generations(folder, models.tokenizer)
            for name, folder in (("train", trainer.rollout_data_dir), ("val", trainer.validation_data_dir))
            if folder is not None
        }
        self._lap_at = perf_counter()

    def close(self) -> None:
        """Write what waits, and close trackers and traces."""
        if self._traces is not None:
            self._traces.close()
        for tracker in self._trackers:
            tracker.close()

    def lap(self) -> float:
        """Seconds since it was asked last, or since the last line of metrics that no training step has made."""
        former, self._lap_at = self._lap_at, perf_counter()
        return self._lap_at - former

    def log(self, step: int, metrics: dict[str, float], history: list[dict[str, float]]) -> None:
        """Append the step's metrics to `history`, give them to the trackers, and warn of what they show."""
        if self._traces is not None:
            metrics |= self._traces.metrics()
        history.append({"step": float(step), **metrics})
        for tracker in self._trackers:
            tracker.log(step, metrics)
        if "rollouts/rows" in metrics:
            self._findings.look(history)
        else:
            self.lap()

    def write_record(self, record: StepRecord, policy: str) -> None:
        """Write down what a step makes of the rollouts of a policy."""
        step_record.write(self._run_dir, record, self._records[policy])
        self._findings.add(record, policy)

    def write_generations(self, name: Literal["train", "val", "tune"], step: int, of: Sequence[Trajectory]) -> None:
        """Write what was sampled in a step, or in a validation after it, where the config names a folder for that."""
        if name in self._generations:
            self._generations[name].write(step, of)

    def traced(
        self, batch: str, groups: Sequence[str], read: Callable[[RolloutTrace], Trajectory]
    ) -> Callable[[RolloutTrace], Trajectory]:
        """`read`, which also gives rollouts of chosen groups to the trace writer; what is read is the same."""
        if self._traces is None:
            return read
        writer, chosen = self._traces, self._traces.chosen(batch, groups)

        def read_and_trace(trace: RolloutTrace) -> Trajectory:
            if trace.rollout.group_id in chosen:
                writer.put(trace)
            return read(trace)

        return read_and_trace


def first_lines(models: Models) -> Iterator[str]:
    """The model and the learning rate where the config left them open, and the cores where a container has not all."""
    policy = models.config.actor_rollout_ref
    if policy.model.path is None:
        yield "model: the tutorial's small one, to try things out; name yours with actor_rollout_ref.model.path"
    if models.learning_rate_by_size:
        rate = policy.actor.optim.lr
        yield f"learning rate: {rate:g}, by the model's size; choose another with actor_rollout_ref.actor.optim.lr"
    if (limit := cores.limit()) is not None and limit < (all_cores := os.cpu_count() or 1):
        threads = torch.get_num_threads()
        yield f"cores: this container may use {limit} of {all_cores}; torch computes with {threads} (OMP_NUM_THREADS)"


def skipped(batch: StepBatch, step: int, rule: FilterGroups, policy: str = "") -> dict[str, float]:
    """Say why a step updates nothing, or not the one of several policies."""
    reasons: Counter[str] = Counter()
    for part in batch.parts:
        reasons.update(part.trajectory.excluded, **part.excluded)
    tokens = ", ".join(f"{n} tokens excluded as {reason}" for reason, n in sorted(reasons.items()))
    kinds = Counter(
        "were cancelled"
        if part.trajectory.cancelled
        else "were lost to infrastructure"
        if part.trajectory.lost
        else "made no call"
        for part in batch.parts
        if part.trajectory.lost or part.trajectory.calls == 0
    )
    why = [f"{count} of {len(batch.parts)} rollouts {what}" for what, count in sorted(kinds.items())]
    why += [tokens] * bool(tokens)
    if "not_selected" in reasons:
        why.append(f"algorithm.train_agents or PPO(select=...) chooses among calls of {_agents(batch)}")
    if not batch.parts:
        what = "rewards" if rule.metric == "reward" else f"rewards named {rule.metric}"
        filtered = f"in {rule.max_num_gen_batches} batches no group has {what} that differ (algorithm.filter_groups)"
        why.append(filtered if rule.enable else "there are no rollouts")
    what = f"nothing of policy {policy}" if policy else "nothing"
    _log.warning("step %d updates %s: %s", step, what, "; ".join(why))
    return {"training/skipped": 1.0}


def _agents(batch: StepBatch) -> str:
    """The agents that made the calls of a step, and how many each made."""
    nodes = (node for part in batch.parts for node in part.trajectory.forest.nodes.values())
    counts = Counter(node.call.agent for node in nodes)
    return ", ".join(f"{name or 'agents without a name'} ({count})" for name, count in counts.most_common())


@contextmanager
def memory_advice(config: Config, step: int, *, of_critic: bool = False) -> Iterator[None]:
    """Add to an update that runs out of memory which keys to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            actor, critic = config.actor_rollout_ref.actor, config.critic
            tokens = critic.ppo_max_token_len_per_gpu if of_critic else actor.ppo_max_token_len_per_gpu
            updated, model = ("critic",) * 2 if of_critic else ("actor_rollout_ref.actor", "actor_rollout_ref")
            error.add_note(
                f"the update of step {step} ran out of memory: lower "
                f"{updated}.ppo_max_token_len_per_gpu (now {tokens}), or set "
                f"{model}.model.enable_gradient_checkpointing=true, and resume the run"
            )
        raise


def staleness(trajectories: Sequence[Trajectory], policy_version: int) -> dict[str, float]:
    """How many updates old the tokens are that are to update the weights of this version."""
    made = [node.call for t in trajectories for node in t.forest.nodes.values()]
    ages = [(policy_version - part.version, part.end - part.start) for call in made for part in call.versions]
    return {
        "training/staleness/mean": sum(age * n for age, n in ages) / max(sum(n for _, n in ages), 1),
        "training/staleness/max": float(max((age for age, _ in ages), default=0)),
    }


def policy_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What a policy did in rollouts, and what it counted with."""
    rewards = [t.given_reward for t in trajectories if t.given_reward is not None]
    scores = {"mean": fmean(rewards), "max": max(rewards), "min": min(rewards)} if rewards else {}
    return {f"critic/score/{name}": value for name, value in scores.items()} | {
        "num_turns/mean": float(np.mean([t.calls for t in trajectories] or [0])),
        "response_length/mean": float(np.mean([t.sampled_tokens for t in trajectories] or [0])),
        **{f"rollouts/reward/{name}": value for name, value in named_rewards(trajectories).items()},
    }


def named_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each reward by name, over the rollouts that were given one, without the final one."""
    by_name: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.rewards.named.items():
            by_name.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(by_name.items()) if name != FINAL}


def rollout_metrics(trajectories: list[Trajectory], seconds: float, began_ns: int) -> dict[str, float]:
    """Rewards, lengths, failures and speeds of the rollouts that `seconds` were spent on. Calls from before `began_ns`
    (nanoseconds) took none of these: a run that is resumed has found them."""
    rows = [row for t in trajectories for row in t.rows]
    calls = sum(t.calls for t in trajectories)
    made = [node.call for t in trajectories for node in t.forest.nodes.values()]
    sampled = [call for call in made if call.start_ns >= began_ns]
    ended = Counter(t.ended_by for t in trajectories if t.ended_by is not None)
    return {f"rollouts/ended_by/{why}": float(count) for why, count in ended.items()} | {
        **policy_metrics(trajectories),
        "row_length/mean": float(np.mean([len(row.token_ids) for row in rows] or [0])),
        "rollouts/rows": float(len(rows)),
        "rollouts/agent_failed": float(sum(t.agent_failed for t in trajectories)),
        "rollouts/without_reward": float(sum(t.given_reward is None for t in trajectories)),
        "rollouts/without_calls": float(sum(t.calls == 0 and not t.cancelled for t in trajectories)),
        "rollouts/calls_of_other_models": float(sum(t.other_calls for t in trajectories)),
        "rollouts/lost_rewards": float(sum(t.lost_rewards for t in trajectories)),
        "rollouts/cut_by_length": sum(call.finish_reason == "length" for call in made) / max(calls, 1),
        "perf/calls_per_s": len(sampled) / seconds,
        "perf/tokens_per_s": sum(call.sampled_tokens for call in sampled) / seconds,
    }


@contextmanager
def timed(timing: dict[str, float], name: str) -> Iterator[None]:
    """Enter the seconds that the block took into `timing`."""
    start = perf_counter()
    yield
    timing[name] = perf_counter() - start


class Finished(msgspec.Struct, frozen=True):
    """A run that has come to its end: the steps that it was to make, those that it made (fewer where it stopped
    early), and its patience (0: it would never stop early; None: an earlier release did not say)."""

    asked: int
    made: int
    patience: int | None = None

    def goes_on(self, steps: int, patience: int | None) -> bool:
        """Whether it has something left to do when it is to make so many steps, with so much patience."""
        if self.made >= steps:
            return False
        more_patient = bool(self.patience) and (patience is None or patience > (self.patience or 0))
        return steps != self.asked or more_patient


def end_of(run_dir: Path) -> Finished | None:
    """How a run of PPO came to its end; None where none has, or its model is not there."""
    ending = finished(run_dir)
    return msgspec.convert(ending, Finished) if ending and (run_dir / "model").is_dir() else None


def summary_lines(run_dir: Path, history: Sequence[Mapping[str, float]], rollout: str | None) -> list[str]:
    """What became of a run. `history` are the metrics of all steps, `rollout` is one that the last step trained."""
    text = []
    for label, name in (("reward", "critic/score/mean"), ("held-out", "val/reward"), ("tuning", "tune/reward")):
        values = [(int(row["step"]), row[name]) for row in history if name in row]
        if name == "critic/score/mean":
            values = _edges(values)
        if values:
            text.append(f"{label:<12}{_change(values)}")
    folder = shlex.quote(str(run_dir))
    text.append(f"{'run':<12}{run_dir}")
    if (run_dir / "model").is_dir():
        text.append(f"{'model':<12}{run_dir / 'model'}")
    text.append(f"{'next':<12}lightning-rl dashboard {folder}")
    text.append(f"{'':<12}lightning-rl report {folder}")
    text.append(f"{'':<12}lightning-rl doctor {folder}")
    if rollout is not None:
        text.append(f"{'':<12}lightning-rl explain {rollout} --run-dir {folder}")
    return text


def trained_last(run_dir: Path) -> str | None:
    """The first rollout of the last step's record that made a call."""
    records = step_record.read_all(run_dir, newest=1)
    return next((one.rollout_id for record in records for one in record.rollouts if one.calls), None)


def _change(values: Sequence[tuple[int, float]]) -> str:
    (first, before), (last, after) = values[0], values[-1]
    if first == last:
        return f"{after:.3f} (step {last})"
    return f"{before:.3f} -> {after:.3f} (step {first} to {last})"


def _edges(values: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The first and the last value, each the mean of a quarter of the steps: a step alone is noise."""
    edge = len(values) // _EDGE
    if edge < 2:
        return [*values]
    before, after = (sum(value for _, value in part) / edge for part in (values[:edge], values[-edge:]))
    return [(values[0][0], before), (values[-1][0], after)]
