"""What `doctor` looks at, gathered from a run's folder in one pass: metrics, step records, calls, attempts.

Invariant: whatever the length of a run, what is kept of it in memory is counts, numbers, and the newest few steps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import sqlalchemy as sa

from lightning_rl.config.policies import RunPolicy, policies_of
from lightning_rl.config.schema import Config
from lightning_rl.inspect import call, folder, recorded
from lightning_rl.store import schema
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import NOT_COUNTED, ErrorInfo
from lightning_rl.store.life_cycle import ENDED
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.step_record import RolloutRecord, StepRecord
from lightning_rl.trajectories.termination import ended_by, refused_prompt
from lightning_rl_adapters import conventions, semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.conventions import ConventionDiagnosis

RECENT = 20  # steps: a run of some hundred steps changes little within them, and they hold hundreds of groups
_COMPARED = 64  # rollouts of the newest step whose logprobs are compared one by one
_READ = 64  # newest rollouts without calls whose agents' own spans are read


class Tally(msgspec.Struct):
    """How often something was seen, and the newest rollout that it was seen in."""

    count: int = 0
    rollout: str | None = None

    def add(self, rollout_id: str) -> None:
        """One more."""
        self.count += 1
        self.rollout = rollout_id


class RewrittenHistory(msgspec.Struct):
    """Rollouts of three calls and more: `of` all of them, `rollouts` those whose every later call began anew. `times`
    is the sum, over the latter, of how many times the tokens of their longest call all of them have together."""

    of: int = 0
    rollouts: Tally = msgspec.field(default_factory=Tally)
    times: float = 0.0


class UnroutedRollouts(msgspec.Struct):
    """Rollouts that asked the gateway nothing, and whose agents' own spans, of one convention, tell of LLM calls.

    `with_ids` of them have token ids; `diagnosis` is of a call that has none.
    """

    rollouts: Tally = msgspec.field(default_factory=Tally)
    with_ids: int = 0
    diagnosis: ConventionDiagnosis | None = None


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The run's keys that decide how bad a finding is."""

    weights: Mapping[str, float] = {}
    compared: Mapping[str, float] = {}
    bypass_mode: bool = False
    groups_of_one: str = "zero"
    rewards_count: bool = True
    learning_rate: float | None = None


class Evidence(msgspec.Struct, kw_only=True):
    """A run in numbers.

    `metrics` are the lines of its training steps, `steps` the newest `RECENT` records. Calls and attempts are those of
    training rollouts, of all where none is for training: `seen` tallies calls by what is wrong with them (`inexact`,
    `no_logprobs`, `length`, and causes of forks), `errors` attempts by the type of the agent's error (`messages` has
    the newest of each), `infrastructure` those that were lost otherwise. `failed_silently` counts those of the rollouts
    `without_calls` whose agents failed. `gaps` has, of the newest step, how far sampler and trainer are apart, by
    rollout.
    `rewritten` are rollouts whose agent writes its history anew for every call. Of the newest `beside_of` rollouts
    without calls, `beside` has, by convention, how agents called beside the gateway, and `refused_prompts` counts those
    whose first prompt was too long, by what to do.

    Of a run with several policies, `policies` has what is known of the learning of each that learns, by name: its
    metrics under the names that they have in a run of one policy, its records, its keys.
    """

    run_dir: str
    metrics: list[dict[str, float]]
    steps: list[StepRecord]
    settings: RunSettings
    trains: bool
    rollouts: int = 0
    calls: int = 0
    attempts: int = 0
    seen: dict[str, Tally] = {}
    errors: dict[str, Tally] = {}
    messages: dict[str, str] = {}
    infrastructure: dict[str, Tally] = {}
    without_reward: Tally = msgspec.field(default_factory=Tally)
    without_calls: Tally = msgspec.field(default_factory=Tally)
    failed_silently: int = 0
    rewritten: RewrittenHistory = msgspec.field(default_factory=RewrittenHistory)
    beside: dict[str, UnroutedRollouts] = {}
    beside_of: int = 0
    refused_prompts: dict[str, int] = {}
    reward_names: set[str] = set()
    gaps: dict[str, float] = {}
    policies: "dict[str, Evidence]" = {}


class _SpanAttributes(msgspec.Struct):
    cause: str | None = msgspec.field(name=semconv.FORK_CAUSE, default=None)
    finish_reasons: list[str] = msgspec.field(name=semconv.FINISH_REASONS, default_factory=list)
    logprobs: bytes | None = msgspec.field(name=semconv.LOGPROBS, default=None)
    exact: bool = msgspec.field(name=semconv.EXACT, default=True)
    trainable: bool = msgspec.field(name=semconv.TRAINABLE, default=True)
    prompt_ids: bytes = msgspec.field(name=semconv.PROMPT_IDS, default=b"")
    response_ids: bytes = msgspec.field(name=semconv.RESPONSE_IDS, default=b"")


class _CallStats(recorded.Named):
    attributes: _SpanAttributes


_SEVERAL = 3  # calls of a rollout, from which on it tells something that each begins anew
_GOES_ON = -1
_CALL = msgspec.msgpack.Decoder(_CallStats)


def gather(run_dir: Path) -> Evidence:
    """The evidence of a run. Raises NotRecorded where it cannot be read."""
    evidence = _of_folder(run_dir)
    with recorded.opened(run_dir) as connection:
        return _with_recorded(connection, evidence)


def gather_at(servers: Sequence[HttpStore], run_id: str | None, run_dir: Path | None) -> Evidence:
    """The evidence of a run whose rollouts servers have (`run_id` None: all that they have), and of its folder, where
    it is here. All of it is copied for that. Raises what the servers' calls raise, and NotRecorded."""
    at_server = Evidence(run_dir=servers[0].url, metrics=[], steps=[], settings=RunSettings(), trains=False)
    evidence = at_server if run_dir is None else _of_folder(run_dir)
    with recorded.copied(servers, run_id) as connection:
        return _with_recorded(connection, evidence)


def is_of_training(row: Mapping[str, float]) -> bool:
    """Whether metrics are those of a training step. Where no rollout was given a reward there is no score."""
    return "critic/score/mean" in row or "rollouts/rows" in row


def _of_folder(run_dir: Path) -> Evidence:
    """What a run's folder says without its store."""
    config = folder.config_of(run_dir)
    rows = _rows(run_dir / "metrics.jsonl")
    metrics = [row for row in rows if is_of_training(row)]
    # A run that an earlier release went on with from an earlier step has records of steps that it does anew.
    until = max((int(row["step"]) for row in rows), default=None)
    if config is None:
        steps = folder.steps(run_dir, RECENT, until=until)
        return Evidence(
            run_dir=str(run_dir.resolve()), metrics=metrics, steps=steps, settings=RunSettings(), trains=False
        )
    records = step_record.folders(config.policies)
    of_policies = {name: folder.steps(run_dir, RECENT, policy, until=until) for name, policy in records.items()}
    return of_run(run_dir, config, metrics, of_policies)


def of_run(
    run_dir: Path, config: Config, metrics: list[dict[str, float]], steps: Mapping[str, Sequence[StepRecord]]
) -> Evidence:
    """What is known of a run without its store; `steps` are the newest records, by policy ("" where it is the only
    one)."""
    policies = policies_of(config)

    def evidence_of(policy: RunPolicy, own: list[dict[str, float]]) -> Evidence:
        newest = list(steps.get(policy.name, ()))
        settings = settings_of(policy.config)
        return Evidence(run_dir=str(run_dir.resolve()), metrics=own, steps=newest, settings=settings, trains=True)

    first = evidence_of(policies[0], metrics)
    if config.policies:
        first.policies = {
            policy.name: evidence_of(policy, [_of_policy(policy.name, row) for row in metrics])
            for policy in policies
            if policy.train_every and policy.checkpoints_of is None
        }
    return first


def _of_policy(name: str, row: Mapping[str, float]) -> dict[str, float]:
    """The metrics of one policy in a step of a run with several."""
    prefix = f"{name}/"
    own = {metric.removeprefix(prefix): value for metric, value in row.items() if metric.startswith(prefix)}
    return {"step": row["step"], **own}


def _with_recorded(connection: sa.Connection, evidence: Evidence) -> Evidence:
    """The evidence with what the store has."""
    _look(connection, evidence)
    evidence.reward_names |= {name for step in evidence.steps for rollout in step.rollouts for name in rollout.rewards}
    for each in (evidence, *evidence.policies.values()):
        if each.steps and not each.settings.bypass_mode:
            each.gaps = dict(_gaps(connection, each.steps[-1].rollouts[:_COMPARED]))
        each.rollouts, each.reward_names = evidence.rollouts, evidence.reward_names
    return evidence


def settings_of(config: Config) -> RunSettings:
    """The keys of a run that findings depend on."""
    return RunSettings(
        weights=config.algorithm.credit.weights or {},
        compared=config.algorithm.compared_rewards,
        bypass_mode=config.algorithm.rollout_correction.bypass_mode,
        groups_of_one=config.algorithm.groups_of_one,
        rewards_count=not config.distillation.without_rewards,
        learning_rate=config.actor_rollout_ref.actor.optim.lr,
    )


def _rows(metrics: Path) -> list[dict[str, float]]:
    """The lines of a metrics file, none where there is no file."""
    return jsonl.read(metrics) if metrics.is_file() else []


def _look(connection: sa.Connection, evidence: Evidence) -> None:
    """Enter the store's rollouts, attempts and calls."""
    table = schema.rollouts.c
    rows = connection.execute(sa.select(table.rollout_id, table.mode, table.status).order_by(table.position)).all()
    training = [row for row in rows if row.mode == "train"] or rows
    status = {row.rollout_id: row.status for row in training}
    evidence.rollouts = len(status)
    called = _look_at_calls(connection, evidence, status)
    failed = _look_at_attempts(connection, evidence, status)
    silent = [one for one, how in status.items() if how in ENDED and how != "cancelled" and one not in called]
    for rollout_id in silent:
        evidence.without_calls.add(rollout_id)
        evidence.failed_silently += rollout_id in failed
    _look_for_calls(connection, evidence, silent[-_READ:])


def _look_for_calls(connection: sa.Connection, evidence: Evidence, silent: Sequence[str]) -> None:
    """Enter, of rollouts that have no call of the gateway's, what agents' own spans tell of LLM calls, and loops of
    prompts that were too long."""
    evidence.beside_of = len(silent)
    for rollout_id in silent:
        attempts = recorded.trace(connection, rollout_id).attempts
        why = refused_prompt(ended_by(span for attempt in attempts for span in attempt.spans))
        if why is not None:
            evidence.refused_prompts[why] = evidence.refused_prompts.get(why, 0) + 1
        from_spans = [conventions.told_of(attempt.spans) for attempt in attempts]
        with_ids = {name for each in from_spans for name in each.conventions}
        without = {each.convention: each for one in from_spans for each in one.diagnoses}
        for name in sorted(with_ids | without.keys()):
            unrouted = evidence.beside.setdefault(name, UnroutedRollouts())
            unrouted.rollouts.add(rollout_id)
            unrouted.with_ids += name in with_ids
            unrouted.diagnosis = without.get(name, unrouted.diagnosis)


def _look_at_calls(connection: sa.Connection, evidence: Evidence, status: Mapping[str, str]) -> set[str]:
    """Tally the calls; the rollouts that made some."""
    called: set[str] = set()
    begun: dict[str, list[int]] = {}  # by rollout: the bytes of each call's ids, or `_GOES_ON`
    for one in recorded.calls(connection, _CALL):
        called.add(one.rollout_id)
        if one.rollout_id not in status or not one.attributes.trainable:
            continue
        evidence.calls += 1
        for mark in _marks(one.attributes):
            evidence.seen.setdefault(mark, Tally()).add(one.rollout_id)
        lengths = begun.setdefault(one.rollout_id, [])
        anew = not lengths or one.attributes.cause is not None
        lengths.append(len(one.attributes.prompt_ids) + len(one.attributes.response_ids) if anew else _GOES_ON)
    _tally_rewritten(evidence.rewritten, begun)
    return called


def _tally_rewritten(rewritten: RewrittenHistory, begun: Mapping[str, Sequence[int]]) -> None:
    for rollout_id, lengths in begun.items():
        if len(lengths) >= _SEVERAL:
            rewritten.of += 1
            if _GOES_ON not in lengths:
                rewritten.rollouts.add(rollout_id)
                rewritten.times += sum(lengths) / max(*lengths, 1)


def _marks(attributes: _SpanAttributes) -> Iterator[str]:
    if not attributes.exact:
        yield "inexact"
    elif attributes.logprobs is None:
        yield "no_logprobs"
    if attributes.finish_reasons[:1] == ["length"]:
        yield "length"
    if attributes.cause is not None:
        yield attributes.cause


def _look_at_attempts(connection: sa.Connection, evidence: Evidence, status: Mapping[str, str]) -> set[str]:
    """Tally the attempts; the rollouts whose agents failed in the last one."""
    failed: set[str] = set()
    table = schema.attempts.c
    query = sa.select(table.rollout_id, table.status, table.reward, table.rewards, table.error)
    rewarded: dict[str, bool] = {}
    for row in connection.execute(query.order_by(table.started_at)):
        if row.rollout_id not in status:
            continue
        error = None if row.error is None else msgspec.json.decode(row.error, type=ErrorInfo)
        if error is not None and error.type in NOT_COUNTED:
            continue  # somebody stopped the run, or its runner
        evidence.attempts += 1
        named = set(msgspec.json.decode(row.rewards) if row.rewards else ())
        evidence.reward_names |= named
        failed.discard(row.rollout_id)
        if error is not None:
            kinds = evidence.infrastructure if error.infrastructure else evidence.errors
            kinds.setdefault(error.type, Tally()).add(row.rollout_id)
            if not error.infrastructure:
                evidence.messages[error.type] = error.message.strip()
                failed.add(row.rollout_id)
        elif row.status == "succeeded":
            rewarded[row.rollout_id] = row.reward is not None or not evidence.settings.weights.keys().isdisjoint(named)
    table = schema.rewards.c
    names = connection.execute(sa.select(table.name, table.rollout_id, table.call_id)).all()
    evidence.reward_names |= {row.name for row in names if row.rollout_id in status}
    of_calls = {row.rollout_id for row in names if row.call_id is not None}
    for rollout_id, holds in rewarded.items():
        if not holds and rollout_id not in of_calls:
            evidence.without_reward.add(rollout_id)
    return failed


def _gaps(connection: sa.Connection, rollouts: Iterable[RolloutRecord]) -> Iterator[tuple[str, float]]:
    """The mean distance between sampler and trainer over each rollout's trained tokens, where both are known and of the
    same context."""
    for rollout in rollouts:
        if not any(each.old_log_probs for each in rollout.calls.values()):
            continue
        apart: list[float] = []
        for attempt in recorded.trace(connection, rollout.rollout_id).attempts:
            for one in calls_of(attempt.spans):
                record = rollout.calls.get(one.call_id)
                if record is not None and not record.cut_context and one.logprobs is not None:
                    trainers = call.trainer_logprobs(record, len(one.response_ids))
                    apart += [abs(value - one.logprobs[place]) for place, value in trainers.items()]
        if apart:
            yield rollout.rollout_id, sum(apart) / len(apart)
