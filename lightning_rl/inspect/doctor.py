"""What in a run will keep it from learning: each finding with a number, where it was seen, and what to do.

Pure: evidence in, findings out. A check is a function that tells a finding or nothing; each threshold says why it is
where it is.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from lightning_rl.inspect.run_stats import RECENT, Evidence, Tally, UnroutedRollouts
from lightning_rl.trajectories.step_record import RolloutRecord
from lightning_rl_adapters.conventions import USE_THE_GATEWAY
from lightning_rl_adapters.semconv import ForkCause

Severity = Literal["stops learning", "slows learning", "look at it"]
SEVERITIES: tuple[Severity, ...] = ("stops learning", "slows learning", "look at it")

NEARLY_ALL = 0.95  # what is left of a batch is noise then
_MESSAGE = 200  # characters of an error
MUCH = 0.5  # half of what was sampled was sampled for nothing
SOME = 0.1  # below, other noise of training is larger
RETRIED = 0.05  # of the attempts: an engine or a machine that fails now and then stays below
DRIFT_SLOWS = 0.2  # of the calls: each is a beginning of a row that is computed and stored once more
DRIFT_SEEN = 0.01  # of the calls: fewer are agents that were retried or went astray
TRUNCATED = 0.1  # of the calls: some answers are always too long
DEAD_STEPS = 3  # one or two steps may be alike by chance
GAP_SEEN = 0.01  # nats, mean over tokens: float32 engines are below 1e-3, bfloat16 ones about here
GAP_SLOWS = 0.05  # ratios are then off by 5 % before any update, a quarter of the usual clip range
GAP_STOPS = 0.5  # ratios are then off by more than the clip range: most gradients are clipped or wrong
TREND_STEPS = 8  # for a beginning and an end of two steps at least
LONGER = 2.0  # times as long at the end: reasoning that grows as it should doubles over a whole run, if at all
MUCH_LONGER = 4.0  # nothing that learns in a run of usual length grows so
FLAT = 0.05  # of the rewards' range: less is the noise of which tasks a step had
STILL = 1e-4  # nats within a step, mean over tokens: an update that changes the policy moves it by 1e-3 or more
ENTROPY_LEFT = 0.1  # of that at the beginning: samples of a group are then nearly the same

HARMLESS = frozenset({ForkCause.NEW_CONVERSATION, ForkCause.TRUNCATED_BY_CLIENT})
# Tokens that were left out on purpose, or that another finding names.
_EXPECTED = frozenset(
    {"validation", "tuning", "not_selected", "housekeeping", "frozen", "zero_variance", "group_of_one"}
)

_DRIFT = {
    ForkCause.EDITED_TEXT: "send earlier messages back as they were: do not cut, reword or merge them",
    ForkCause.TOOL_CALL_CHANGED: "send an answer's tool calls back as they were, even those that failed",
    ForkCause.SYSTEM_CHANGED: "keep the system message, and put what changes (the time, a state) into the last message",
    ForkCause.TOOLS_CHANGED: "offer the same tools in every turn",
    ForkCause.REASONING_STRIPPED: "choose a chat format that keeps reasoning: actor_rollout_ref.rollout.renderer",
    ForkCause.NOT_APPEND_ONLY: "choose a chat format that only appends: actor_rollout_ref.rollout.renderer",
}
_EXCLUDED = {
    "overlong": "raise data.max_prompt_length or data.max_response_length, or keep conversations shorter",
    "truncated": "raise data.max_prompt_length or data.max_response_length, or keep conversations shorter",
    "undelivered": "give the agent's client a longer time-out: it was gone before its answers were written",
    "superseded": "look why attempts were retried: runner-*.log, server.log",
    "infrastructure": "look why attempts were lost: runner-*.log, server.log",
    "cancelled": "look why rollouts were cancelled",
    "few_successes": "let agents not fail, or lower algorithm.min_successful_rollouts",
    "no_reward": "let agents not fail, and give a reward; or set algorithm.agent_failure=zero, so that failing counts",
    "no_logprob": "let the engine give logprobs, or leave algorithm.rollout_correction (bypass_mode, rollout_*) off",
    "untaught": "give these calls a teacher, where it is not meant so: key and agents of distillation.teacher_models",
    "rejected": "sampler and trainer are apart: look at rollout_corr/kl, or widen rollout_rs_threshold",
    "greedy_logprobs": "sample with a temperature above 0: gateway.sampling, actor_rollout_ref.rollout.temperature",
    "inexact": "use an engine that tells token ids",
    "overshoot": "it is what was sampled past a stop text: shorter answers, or a stop token, save it",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. `number` is a share where `told` says so; `steps` are the first and last it is of, None
    for the whole run; `rollout` is one to look at with `lightning-rl explain`; `advice` is what to do. In a run with
    several policies, `policy` is the one whose learning it is about."""

    name: str
    severity: Severity
    number: float
    told: str
    advice: str
    steps: tuple[int, int] | None = None
    rollout: str | None = None
    policy: str | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a run, worst first, and the numbers that were looked at."""

    run_dir: str
    looked_at: dict[str, float]
    findings: list[Finding]


Check = Callable[[Evidence], "Finding | Iterable[Finding] | None"]


def diagnose(evidence: Evidence) -> Diagnosis:
    """All checks on a run's evidence: those of learning on each of its policies, where it has several."""
    findings = list(_findings(CHECKS_OF_ROLLOUTS, evidence))
    for name, of_policy in _policies(evidence):
        findings += [replace(finding, policy=name) for finding in _findings(CHECKS_OF_LEARNING, of_policy)]
    return Diagnosis(
        run_dir=evidence.run_dir,
        looked_at=looked_at(evidence),
        findings=sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)),
    )


def _findings(checks: Iterable[Check], evidence: Evidence) -> Iterator[Finding]:
    for check in checks:
        result = check(evidence)
        yield from [result] if isinstance(result, Finding) else result or ()


def _policies(evidence: Evidence) -> Sequence[tuple[str | None, Evidence]]:
    """Whose learning is looked at: the run's, or that of each of its policies, by name."""
    return [*evidence.policies.items()] or [(None, evidence)]


def looked_at(evidence: Evidence) -> dict[str, float]:
    """The numbers that say how a run fares, those that are known; those of a policy behind its name."""
    numbers: dict[str, float | None] = {
        "steps": len(evidence.metrics) if evidence.trains else None,
        "rollouts": evidence.rollouts,
        "calls": evidence.calls,
        "share of calls whose token ids are known": _share(evidence.calls - _seen(evidence, "inexact"), evidence.calls),
        "share of calls cut off by their length": _share(_seen(evidence, "length"), evidence.calls),
    }
    for name, of_policy in _policies(evidence):
        prefix = "" if name is None else f"{name}: "
        numbers |= {f"{prefix}{label}": number for label, number in _of_learning(of_policy).items()}
    return {name: float(number) for name, number in numbers.items() if number is not None}


def _of_learning(evidence: Evidence) -> dict[str, float | None]:
    rows, recent = evidence.metrics, evidence.metrics[-RECENT:]
    groups = [group for group in _groups(evidence) if len(group) > 1]
    return {
        "reward of the first steps": _mean(_values(rows, "critic/score/mean")[: _edge(rows)]),
        "reward of the last steps": _mean(_values(rows, "critic/score/mean")[-_edge(rows) :]),
        f"entropy of the last {len(recent)} steps": _mean(_values(recent, "actor/entropy")),
        "mean distance of sampler and trainer": _mean(_values(recent, "training/rollout_probs_diff_mean")),
        f"share of received tokens that are trained, last {len(recent)} steps": _trained_share(rows),
        "share of groups with variance": _share(sum(not _alike(group) for group in groups), len(groups)),
    }


def _groups_without_variance(evidence: Evidence) -> Finding | None:
    groups = [group for group in _groups(evidence) if len(group) > 1]
    alike = [group for group in groups if _alike(group)]
    share = _share(len(alike), len(groups)) or 0.0
    if share < MUCH or not evidence.settings.rewards_count:
        return None
    same = all(map(_same_rewards, alike))
    trait = (
        "rewards that are all the same" if same else "rollouts of which the estimator finds none better than another"
    )
    return Finding(
        name="groups_without_variance",
        severity="stops learning" if share >= NEARLY_ALL else "slows learning",
        number=share,
        told=f"{share:.0%} of {len(groups)} groups have {trait}: their advantages do not differ",
        advice="take tasks that are solved sometimes, raise actor_rollout_ref.rollout.n or the temperature, or give "
        "finer rewards",
        steps=_steps(evidence),
        rollout=alike[-1][0].rollout_id,
    )


def _groups_of_one(evidence: Evidence) -> Finding | None:
    groups = _groups(evidence)
    silent = evidence.settings.groups_of_one != "raw"
    alone = [group[0] for group in groups if len(group) == 1]
    # A critic, a greedy rollout or the batch may be what they are compared with.
    lone = [one.rollout_id for one in alone if not silent or not any(call.advantage for call in one.calls.values())]
    share = _share(len(lone), len(groups)) or 0.0
    if not lone or not evidence.settings.rewards_count:
        return None
    return Finding(
        name="groups_of_one",
        severity=_by_share(share, MUCH) if silent else "look at it",
        number=share,
        told=f"{share:.0%} of {len(groups)} groups have one rollout with a reward: nothing to compare it with",
        advice="set actor_rollout_ref.rollout.n to 2 or more; where agents failed, algorithm.agent_failure=zero lets "
        "their rollouts count",
        steps=_steps(evidence),
        rollout=lone[-1],
    )


def _inexact(evidence: Evidence) -> Finding | None:
    share = _share(_seen(evidence, "inexact"), evidence.calls)
    if not share:
        return None
    return Finding(
        name="missing_token_ids",
        severity=_by_share(share, MUCH),
        number=share,
        told=f"of {share:.1%} of {evidence.calls} calls nobody told the token ids: none of their rows is trained",
        advice="use an engine that tells token ids (the embedded one, vLLM, SGLang) for what is to be trained",
        rollout=evidence.seen["inexact"].rollout,
    )


def _no_logprobs(evidence: Evidence) -> Finding | None:
    share = _share(_seen(evidence, "no_logprobs"), evidence.calls)
    if not share:
        return None
    needed = evidence.settings.bypass_mode
    return Finding(
        name="missing_logprobs",
        severity=_by_share(share, MUCH) if needed else "look at it",
        number=share,
        told=f"{share:.1%} of {evidence.calls} calls have no logprobs: "
        + ("their tokens cannot be trained" if needed else "the sampler cannot be checked against the trainer"),
        advice="let the engine give logprobs"
        + (", or leave algorithm.rollout_correction.bypass_mode off" if needed else ""),
        rollout=evidence.seen["no_logprobs"].rollout,
    )


def _rewritten(evidence: Evidence) -> Finding | None:
    counts = evidence.rewritten
    share = _share(counts.rollouts.count, counts.of) or 0.0
    if share < MUCH:
        return None
    times = counts.times / counts.rollouts.count
    return Finding(
        name="history_rewritten",
        severity="look at it",
        number=share,
        told=f"in {counts.rollouts.count} of {counts.of} rollouts of three calls and more every call begins anew: each "
        f"is a row of its own, and together they have {times:.1f} times the tokens of the longest",
        advice="all of it is trained, it costs more. Some frameworks write their history anew on principle "
        "(docs/works-with.md: DSPy, LlamaIndex's ReActAgent); an agent with tool calls makes one row. Where the calls "
        "have nothing in common, nothing is lost",
        rollout=counts.rollouts.rollout,
    )


def _drift(evidence: Evidence) -> Iterator[Finding]:
    for cause in ForkCause:
        tally = evidence.seen.get(cause)
        share = _share(_seen(evidence, cause), evidence.calls) or 0.0
        if cause in HARMLESS or tally is None or share < DRIFT_SEEN:
            continue
        yield Finding(
            name=f"drift_{cause}",
            severity="slows learning" if share >= DRIFT_SLOWS else "look at it",
            number=share,
            told=f"{share:.1%} of {evidence.calls} calls could not continue the conversation before ({cause}): its "
            "beginning is computed and stored again",
            advice=_DRIFT[cause],
            rollout=tally.rollout,
        )


def _truncation(evidence: Evidence) -> Finding | None:
    share = _share(_seen(evidence, "length"), evidence.calls) or 0.0
    if share < TRUNCATED:
        return None
    return Finding(
        name="truncation",
        severity="slows learning" if share >= MUCH else "look at it",
        number=share,
        told=f"{share:.0%} of {evidence.calls} calls were cut off by the length of their answer",
        advice="raise data.max_response_length (or the agent's own max_tokens), or reward short answers",
        rollout=evidence.seen["length"].rollout,
    )


def _mismatch(evidence: Evidence) -> Finding | None:
    logged = _values(evidence.metrics[-RECENT:], "training/rollout_probs_diff_mean")
    gaps = [*logged, *evidence.gaps.values()]
    worst = max(evidence.gaps, key=lambda rollout: evidence.gaps[rollout], default=None)
    number = max(_mean(logged) or 0.0, _mean(list(evidence.gaps.values())) or 0.0)
    if not gaps or number < GAP_SEEN:
        return None
    return Finding(
        name="logprob_mismatch",
        severity="stops learning" if number >= GAP_STOPS else "slows learning" if number >= GAP_SLOWS else "look at it",
        number=number,
        told=f"the sampler's and the trainer's logprobs differ by {number:.3g} nats in the mean",
        advice="give engine and trainer the same dtype, weights and chat format; where older weights sampled "
        "(training/staleness) some of it is meant: lower actor.optim.lr or trainer.max_off_policy_threshold",
        steps=_steps(evidence) if logged else _last_step(evidence),
        rollout=worst,
    )


def _agent_errors(evidence: Evidence) -> Iterator[Finding]:
    for kind, tally in evidence.errors.items():
        share = tally.count / evidence.attempts
        yield Finding(
            name=f"agent_error_{kind}",
            severity=_by_share(share, MUCH, below="look at it"),
            number=share,
            told=f"{tally.count} of {evidence.attempts} attempts failed in the agent: {kind}"
            f"{_shown(evidence.messages.get(kind, ''))}",
            advice="the traceback is in runner-*.log of the run's folder",
            rollout=tally.rollout,
        )


def _shown(message: str) -> str:
    """An error's message behind its type, on one line."""
    line = " ".join(message.split())
    return f": {line[:_MESSAGE]}{'...' if len(line) > _MESSAGE else ''}" if line else ""


def _infrastructure(evidence: Evidence) -> Finding | None:
    count = sum(tally.count for tally in evidence.infrastructure.values())
    share = _share(count, evidence.attempts)
    if not share:
        return None
    kinds = ", ".join(f"{kind} {tally.count}" for kind, tally in evidence.infrastructure.items())
    return Finding(
        name="infrastructure_retries",
        severity="slows learning" if share >= RETRIED else "look at it",
        number=share,
        told=f"{count} of {evidence.attempts} attempts were lost to infrastructure ({kinds})",
        advice="look into runner-*.log and server.log, in the run's folder or where server and runners were started; "
        "docs/troubleshooting.md has the usual",
        rollout=next(reversed(evidence.infrastructure.values())).rollout,
    )


def _no_reward(evidence: Evidence) -> Finding | None:
    if not evidence.settings.rewards_count:
        return None
    return _of_rollouts(
        evidence,
        evidence.without_reward,
        name="no_reward",
        text="ended without a reward, and count as failed",
        advice="return a number, or call emit_reward, on every way out of the agent",
    )


def _trains_spans(evidence: Evidence) -> bool:
    """Whether the run trains on calls that only agents' own spans tell of (`algorithm.train_spans`)."""
    return sum(_values(evidence.metrics, "tokens/from_spans")) > 0


def _without_calls(evidence: Evidence) -> Finding | None:
    if _trains_spans(evidence):
        return None
    do = list(evidence.refused_prompts)
    if evidence.failed_silently > evidence.without_calls.count / 2:
        do.append(
            "mend what the agent failed with, which is found below: where the gateway refused its calls, server.log of "
            "the run's folder says why"
        )
    elif not do or sum(evidence.refused_prompts.values()) < evidence.beside_of:
        do.append(
            "let the agent use llm.base_url and llm.api_key, those of its own rollout: keep no client for another"
        )
    return _of_rollouts(
        evidence,
        evidence.without_calls,
        name="rollouts_without_calls",
        text="made no call to the model: they count in their group and train nothing",
        advice="; or ".join(do),
    )


def _beside_the_gateway(evidence: Evidence) -> Iterator[Finding]:
    for convention, beside in () if _trains_spans(evidence) else evidence.beside.items():
        share = beside.rollouts.count / evidence.beside_of
        yield Finding(
            name=f"calls_beside_the_gateway_{convention}",
            severity=_by_share(share * evidence.without_calls.count / evidence.rollouts, MUCH, below="look at it"),
            number=share,
            told=f"in {beside.rollouts.count} of {evidence.beside_of} rollouts without calls, {_as_they_say(beside)}",
            advice=USE_THE_GATEWAY if beside.diagnosis is None else beside.diagnosis.advice,
            rollout=beside.rollouts.rollout,
        )


def _as_they_say(beside: UnroutedRollouts) -> str:
    """How agents called, as their own spans tell it, and what of it there is."""
    parts = []
    if (lacks := beside.diagnosis) is not None:
        where = "" if lacks.server is None else f" at {lacks.server}"
        parts.append(
            f"the agent's own {lacks.convention} spans tell of calls to {lacks.model!r}{where} that have "
            f"{' and '.join(lacks.told) or 'nothing of the conversation'}, and no {', no '.join(lacks.missing)}"
        )
    if beside.with_ids:
        parts.append(
            f"{beside.with_ids} have token ids in the agent's own spans (triplets?source=otel): the gateway did not "
            "see them sampled, so they are trained where algorithm.train_spans=true says so"
        )
    return "; ".join(parts)


def _dead_reward(evidence: Evidence) -> Finding | None:
    rows = evidence.metrics
    values = {row[f"critic/score/{of}"] for row in rows for of in ("min", "max") if f"critic/score/{of}" in row}
    if len(rows) < DEAD_STEPS or len(values) != 1 or not evidence.settings.rewards_count:
        return None
    [value] = values
    return Finding(
        name="dead_reward",
        severity="stops learning",
        number=value,
        told=f"every reward of all {len(rows)} steps is {value:g}: there is nothing to learn from",
        advice="look whether the reward function sees the answer at all; then take easier (or harder) tasks",
        steps=_span(rows),
        rollout=_newest_rollout(evidence),
    )


def _stands_still(evidence: Evidence) -> Finding | None:
    """A reward that goes nowhere, short of the best one, while updates leave the policy where it is."""
    rows = evidence.metrics
    moved = _mean(_values(rows, "actor/ppo_k3_kl"))  # 0 where each step is one update: it says nothing there
    first, last = _trend(evidence, "critic/score/mean")
    highest = max(_values(rows, "critic/score/max"), default=0.0)
    room = highest - min(_values(rows, "critic/score/min"), default=0.0)
    if not moved or moved >= STILL or len(rows) < TREND_STEPS or not room:
        return None
    if abs(last - first) >= FLAT * room or highest - last < 2 * FLAT * room:
        return None
    rate = evidence.settings.learning_rate
    now = "" if rate is None else f" (now {rate:g})"
    return Finding(
        name="policy_stands_still",
        severity="stops learning",
        number=moved,
        told=f"the reward went from {first:.3g} to {last:.3g} in {len(rows)} steps, and within one the policy "
        f"moves by {moved:.1g} nats",
        advice=f"raise actor_rollout_ref.actor.optim.lr{now}, tenfold at a time until the reward moves; null takes one "
        "by the model's size, ten times as much with lora_rank",
        steps=_span(rows),
        rollout=_newest_rollout(evidence),
    )


def _unused_names(evidence: Evidence) -> Iterator[Finding]:
    settings, reward_names = evidence.settings, evidence.reward_names
    named = {"algorithm.credit.weights": settings.weights, "algorithm.gdpo_reward_keys": settings.compared}
    for key, weights in named.items():
        for name in (name for name in weights if evidence.rollouts and name not in reward_names):
            yield Finding(
                name=f"reward_never_given_{name}",
                severity="slows learning" if reward_names & weights.keys() else "stops learning",
                number=weights[name],
                told=f"{key} has {name!r} (weight {weights[name]:g}), and no rollout gave a reward of that name; given "
                f"were {', '.join(sorted(reward_names)) or 'none at all'}",
                advice=f"emit_reward(..., name={name!r}) in the agent, or take the name out of {key}",
                rollout=_newest_rollout(evidence),
            )


def _lost_rewards(evidence: Evidence) -> Finding | None:
    rows = evidence.metrics[-RECENT:]
    lost = sum(_values(rows, "rollouts/lost_rewards"))
    if not lost:
        return None
    return Finding(
        name="lost_rewards",
        severity="look at it",
        number=lost,
        told=f"{lost:.0f} rewards were given to calls that their attempt did not make: they reach nothing",
        advice="give emit_reward the id of the answer, or of one of its tool calls, as the client got it",
        steps=_span(rows),
        rollout=_newest_rollout(evidence),
    )


def _lengths(evidence: Evidence) -> Finding | None:
    first, last = _trend(evidence, "response_length/mean")
    if not first or last / first < LONGER:
        return None
    return Finding(
        name="exploding_lengths",
        severity="slows learning" if last / first >= MUCH_LONGER else "look at it",
        number=last / first,
        told=f"rollouts sample {last:.0f} tokens at the end, {first:.0f} at the beginning",
        advice="look whether longer is rewarded or whether answers repeat themselves; "
        "actor_rollout_ref.actor.loss_agg_mode=token-mean weighs long rollouts less",
        steps=_span(evidence.metrics),
        rollout=_newest_rollout(evidence),
    )


def _entropy(evidence: Evidence) -> Finding | None:
    first, last = _trend(evidence, "actor/entropy")
    if not first or last / first > ENTROPY_LEFT:
        return None
    return Finding(
        name="entropy_collapse",
        severity="slows learning",
        number=last / first,
        told=f"the entropy fell from {first:.3g} to {last:.3g} nats: the samples of a group are nearly the same",
        advice="lower actor_rollout_ref.actor.optim.lr, or raise actor_rollout_ref.actor.clip_ratio_high or "
        "entropy_coeff; where the reward is high already, it is done",
        steps=_span(evidence.metrics),
        rollout=_newest_rollout(evidence),
    )


def _nothing_selected(evidence: Evidence, share: float) -> Finding:
    return Finding(
        name="excluded_not_selected",
        severity="stops learning",
        number=share,
        told=f"no token is trained, and {share:.0%} of those that were sampled are left out as not_selected",
        advice="algorithm.train_agents, or PPO(select=...), chooses no call: `lightning-rl explain` shows the agent of "
        "each call, which the regular expression must match as a whole",
        steps=_span(evidence.metrics[-RECENT:]),
        rollout=_left_out(evidence, "not_selected"),
    )


def _excluded(evidence: Evidence) -> Iterator[Finding]:
    received = _grown(evidence.metrics, "tokens/received")
    prefix = "tokens/excluded/"
    # The rollouts that REMAX compares with are greedy on purpose.
    expected = _EXPECTED | ({"greedy_logprobs"} if any(step.estimator == "remax" for step in evidence.steps) else set())
    names = evidence.metrics[-1] if evidence.metrics else {}
    for name in names:
        reason = name.removeprefix(prefix)
        share = _share(_grown(evidence.metrics, name), received) or 0.0
        if reason == "not_selected" and not _grown(evidence.metrics, "tokens/trained"):
            yield _nothing_selected(evidence, share)
        if not name.startswith(prefix) or reason in expected or share < SOME:
            continue
        yield Finding(
            name=f"excluded_{reason}",
            severity=_by_share(share, MUCH, below="look at it"),
            number=share,
            told=f"{share:.0%} of the tokens that were sampled are left out as {reason}",
            advice=_EXCLUDED.get(reason, "docs/concepts/forest.md says what the reason means"),
            steps=_span(evidence.metrics[-RECENT:]),
            rollout=_left_out(evidence, reason),
        )


CHECKS_OF_ROLLOUTS: tuple[Check, ...] = (
    _no_reward,
    _lost_rewards,
    _without_calls,
    _beside_the_gateway,
    _agent_errors,
    _infrastructure,
    _inexact,
    _no_logprobs,
    _truncation,
    _rewritten,
    _drift,
)
CHECKS_OF_LEARNING: tuple[Check, ...] = (
    _dead_reward,
    _stands_still,
    _groups_without_variance,
    _groups_of_one,
    _unused_names,
    _mismatch,
    _excluded,
    _lengths,
    _entropy,
)


def _of_rollouts(evidence: Evidence, tally: Tally, *, name: str, text: str, advice: str) -> Finding | None:
    share = _share(tally.count, evidence.rollouts)
    if not share:
        return None
    return Finding(
        name=name,
        severity=_by_share(share, MUCH, below="look at it"),
        number=share,
        told=f"{tally.count} of {evidence.rollouts} rollouts {text}",
        advice=advice,
        rollout=tally.rollout,
    )


def _by_share(share: float, much: float, *, below: Severity = "slows learning") -> Severity:
    if share >= NEARLY_ALL:
        return "stops learning"
    return "slows learning" if share >= much else below


def _groups(evidence: Evidence) -> list[list[RolloutRecord]]:
    """The groups of the newest steps: their rollouts that have a reward."""
    groups: defaultdict[tuple[int, str], list[RolloutRecord]] = defaultdict(list)
    for step in evidence.steps:
        for rollout in step.rollouts:
            if rollout.reward is not None:
                groups[step.step, rollout.group_id].append(rollout)
    return list(groups.values())


def _alike(group: Sequence[RolloutRecord]) -> bool:
    """Whether nothing in a group is better than anything else."""
    if group[0].alike:
        return True
    return _same_rewards(group) and not any(call.advantage for rollout in group for call in rollout.calls.values())


def _same_rewards(group: Sequence[RolloutRecord]) -> bool:
    return len({rollout.reward for rollout in group}) == 1


def _left_out(evidence: Evidence, reason: str) -> str | None:
    """The newest rollout of which something was left out for this reason."""
    for step in reversed(evidence.steps):
        for rollout in step.rollouts:
            if reason in {rollout.left_out, *(call.left_out for call in rollout.calls.values())}:
                return rollout.rollout_id
    return None


def _newest_rollout(evidence: Evidence) -> str | None:
    return next((rollout.rollout_id for step in reversed(evidence.steps) for rollout in step.rollouts), None)


def _seen(evidence: Evidence, mark: str) -> int:
    return evidence.seen.get(mark, Tally()).count


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _values(rows: Sequence[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _edge(rows: Sequence[object]) -> int:
    """How many steps are a run's beginning, or its end: a quarter."""
    return max(1, len(rows) // 4)


def _trend(evidence: Evidence, name: str) -> tuple[float, float]:
    """The means of a metric at the beginning and at the end; (0, 0) where the run is too short to say."""
    values = _values(evidence.metrics, name)
    if len(values) < TREND_STEPS:
        return 0.0, 0.0
    edge = _edge(values)
    return sum(values[:edge]) / edge, sum(values[-edge:]) / edge


def _grown(rows: Sequence[dict[str, float]], name: str) -> float:
    """By how much a number that only grows has grown in the newest steps."""
    if not rows:
        return 0.0
    before = rows[-RECENT - 1].get(name, 0.0) if len(rows) > RECENT else 0.0
    return rows[-1].get(name, 0.0) - before


def _trained_share(rows: Sequence[dict[str, float]]) -> float | None:
    return _share(_grown(rows, "tokens/trained"), _grown(rows, "tokens/received"))


def _span(rows: Sequence[dict[str, float]]) -> tuple[int, int] | None:
    return (int(rows[0]["step"]), int(rows[-1]["step"])) if rows else None


def _steps(evidence: Evidence) -> tuple[int, int] | None:
    return (evidence.steps[0].step, evidence.steps[-1].step) if evidence.steps else _span(evidence.metrics[-RECENT:])


def _last_step(evidence: Evidence) -> tuple[int, int] | None:
    return (evidence.steps[-1].step, evidence.steps[-1].step) if evidence.steps else None
