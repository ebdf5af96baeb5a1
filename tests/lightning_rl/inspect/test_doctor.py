"""`lightning-rl doctor`: each finding where it is to be found, and not where it is not."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from lightning_rl.cli import doctor as command
from lightning_rl.cli import report as report_command
from lightning_rl.errors import Explained
from lightning_rl.inspect import doctor, draw
from lightning_rl.inspect.doctor import Finding, diagnose
from lightning_rl.inspect.run_stats import RECENT, Evidence, RunSettings, Tally, gather
from lightning_rl.store.contract import ErrorInfo, Reward
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.step_record import RolloutRecord, StepRecord
from lightning_rl_adapters import semconv
from lightning_rl_adapters.semconv import ForkCause
from tests.adapters.words import say
from tests.lightning_rl.inspect.runs import (
    TALK,
    call_record,
    metrics_of,
    open_store,
    record,
    rollout_record,
    step_of,
    write_run,
)

BUG = ErrorInfo(type="ValueError", message="no")
STOPPED = ErrorInfo(type="SessionEnded", message="the run has ended", infrastructure=True)
LOST = ErrorInfo(type="EngineError", message="gone", infrastructure=True)
CHECKS = (*doctor.CHECKS_OF_ROLLOUTS, *doctor.CHECKS_OF_LEARNING)
GOOD: dict[str, Any] = {"calls": TALK}
TEACHER_ALONE = {
    "enabled": True,
    "teacher_models": {"big": {"model_path": "x"}},
    "distillation_loss": {"use_task_rewards": False},
}
BYPASS = {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
LENGTHS = [8.0] * 4 + [64.0] * 4


def several(count: int, **how: Any) -> list[dict[str, Any]]:
    """So many rollouts like this."""
    return [GOOD | how] * count


def group(step: int, number: int, rewards: Sequence[float | None], advantage: float) -> list[RolloutRecord]:
    """The records of a group; a reward of None took no part in it."""
    return [
        rollout_record(f"r{step}-{number}-{i}", f"g{number}", reward, advantage) for i, reward in enumerate(rewards)
    ]


def steps_of(*groups: tuple[Sequence[float | None], float]) -> list[StepRecord]:
    """One step of these groups: their rewards, and the advantage of their calls."""
    return [
        step_of(1, *(one for n, (rewards, advantage) in enumerate(groups) for one in group(1, n, rewards, advantage)))
    ]


def trend(name: str, values: Sequence[float]) -> list[dict[str, float]]:
    return [metrics_of(step, **{name: value}) for step, value in enumerate(values, start=1)]


def forked(count: int, cause: ForkCause) -> list[dict[str, Any]]:
    """Ten rollouts of two calls, in `count` of which the second began anew."""
    return several(count, forks={2: {semconv.FORK_CAUSE: cause.value}}) + several(10 - count)


def run_of(
    folder: Path,
    rollouts: Sequence[Mapping[str, Any]] | None = None,
    steps: Sequence[StepRecord] | None = None,
    metrics: Sequence[Mapping[str, float]] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A healthy run, but for what is given."""
    with open_store(folder) as store:
        for number, how in enumerate(several(10) if rollouts is None else rollouts):
            record(store, f"r{number}", **how)
    return write_run(
        folder,
        steps=steps_of(*[([0.0, 1.0], 1.0)] * 4) if steps is None else steps,
        metrics=[metrics_of(step) for step in range(1, 13)] if metrics is None else metrics,
        config=config or {},
    )


def findings(run: Path | Evidence) -> dict[str, Finding]:
    evidence = run if isinstance(run, Evidence) else gather(run)
    return {finding.name: finding for finding in diagnose(evidence).findings}


def evidence_of(**known: Any) -> Evidence:
    """What is known of a run of 50 rollouts: two attempts each, 1000 calls, no steps but those that are given."""
    given: dict[str, Any] = {"metrics": [], "steps": [], "settings": RunSettings(), "rollouts": 50, "calls": 1000}
    return Evidence(**given | {"run_dir": "run", "trains": True, "attempts": 100} | known)


INEXACT = msgspec.structs.replace(say(1, "", "", exact=False), logprobs=None)
SILENT = msgspec.structs.replace(TALK[0], logprobs=None)
ANEW = [say(number, "a " * number, "b") for number in (1, 2, 3)]
EDITED = {number: {semconv.FORK_CAUSE: ForkCause.EDITED_TEXT.value} for number in (2, 3)}
CUT = say(1, "a", "b", finish_reason="length")
GDPO = {
    "algorithm": {
        "adv_estimator": "gdpo",
        "gdpo_reward_keys": ["reward", "tone", "kl_penalty"],
        "gdpo_reward_weights": [1.0, 2.0, 1.0],
    }
}
WEIGHTS = {"algorithm": {"credit": {"weights": {"reward": 1.0, "tone": 0.5}}}}

# What is wrong with the run; the finding, how bad, and its number.
SICK: list[tuple[dict[str, Any], str, str, float]] = [
    ({"steps": steps_of(*[([1.0, 1.0], 0.0)] * 4)}, "groups_without_variance", "stops learning", 1.0),
    (
        {"steps": steps_of(*[([1.0, 1.0], 0.0)] * 2, *[([0.0, 1.0], 1.0)] * 2)},
        "groups_without_variance", "slows learning", 0.5,
    ),
    # Whitened, or compared by other rewards than the one that counts.
    (
        {"steps": [step_of(1, *(msgspec.structs.replace(one, alike=True) for one in group(1, 0, [0.0, 1.0], 0.5)))]},
        "groups_without_variance", "stops learning", 1.0,
    ),
    ({"steps": steps_of(*[([1.0, None], 0.0)] * 4)}, "groups_of_one", "stops learning", 1.0),
    (
        {"steps": steps_of(([1.0], 1.0)), "config": {"algorithm": {"groups_of_one": "raw"}}},
        "groups_of_one", "look at it", 1.0,
    ),
    ({"rollouts": [*several(9, calls=TALK[:1]), {"calls": [INEXACT]}]}, "missing_token_ids", "slows learning", 0.1),
    ({"rollouts": several(3, calls=[INEXACT])}, "missing_token_ids", "stops learning", 1.0),
    ({"rollouts": several(3, calls=[SILENT])}, "missing_logprobs", "look at it", 1.0),
    ({"rollouts": several(3, calls=[SILENT]), "config": BYPASS}, "missing_logprobs", "stops learning", 1.0),
    ({"rollouts": forked(1, ForkCause.EDITED_TEXT)}, "drift_edited_text", "look at it", 0.05),
    ({"rollouts": forked(4, ForkCause.EDITED_TEXT)}, "drift_edited_text", "slows learning", 0.2),
    ({"rollouts": forked(10, ForkCause.REASONING_STRIPPED)}, "drift_reasoning_stripped", "slows learning", 0.5),
    ({"rollouts": [*several(3, calls=ANEW, forks=EDITED), GOOD]}, "history_rewritten", "look at it", 1.0),
    ({"rollouts": several(2, calls=[CUT]) + several(8, calls=[TALK[0]])}, "truncation", "look at it", 0.2),
    ({"rollouts": several(2, calls=[CUT])}, "truncation", "slows learning", 1.0),
    ({"metrics": trend("training__rollout_probs_diff_mean", [0.02] * 3)}, "logprob_mismatch", "look at it", 0.02),
    ({"metrics": trend("training__rollout_probs_diff_mean", [0.1] * 3)}, "logprob_mismatch", "slows learning", 0.1),
    ({"metrics": trend("training__rollout_probs_diff_mean", [2.0] * 3)}, "logprob_mismatch", "stops learning", 2.0),
    ({"rollouts": [*several(3), GOOD | {"error": BUG}]}, "agent_error_ValueError", "look at it", 0.25),
    ({"rollouts": several(3, error=BUG)}, "agent_error_ValueError", "stops learning", 1.0),
    (
        {"rollouts": [*several(2), GOOD | {"error": LOST, "attempts": 2}]},
        "infrastructure_retries", "slows learning", 0.5,
    ),
    ({"rollouts": [*several(3), GOOD | {"reward": None}]}, "no_reward", "look at it", 0.25),
    ({"rollouts": several(4, reward=None)}, "no_reward", "stops learning", 1.0),
    ({"rollouts": [GOOD, {"calls": []}]}, "rollouts_without_calls", "slows learning", 0.5),
    (
        {"rollouts": [GOOD, *several(3, calls=[], seen="gen_ai")]},
        "calls_beside_the_gateway_gen_ai", "slows learning", 1.0,
    ),
    (
        {"rollouts": [*several(2, calls=[], seen="openinference"), *several(2, calls=[])]},
        "calls_beside_the_gateway_openinference", "slows learning", 0.5,
    ),
    (
        {"metrics": [metrics_of(n, critic__score__max=0.0, critic__score__min=0.0) for n in (1, 2, 3)]},
        "dead_reward", "stops learning", 0.0,
    ),
    ({"metrics": trend("actor__ppo_k3_kl", [2e-6] * 8)}, "policy_stands_still", "stops learning", 2e-6),
    ({"metrics": trend("rollouts__lost_rewards", [1.0, 2.0])}, "lost_rewards", "look at it", 3.0),
    ({"metrics": trend("response_length__mean", LENGTHS)}, "exploding_lengths", "slows learning", 8.0),
    ({"metrics": trend("response_length__mean", [8.0] * 6 + [16.0] * 2)}, "exploding_lengths", "look at it", 2.0),
    ({"metrics": trend("actor__entropy", [1.0] * 6 + [0.05] * 2)}, "entropy_collapse", "slows learning", 0.05),
    ({"metrics": trend("tokens__excluded__overlong", [20.0])}, "excluded_overlong", "look at it", 0.2),
    ({"metrics": trend("tokens__excluded__undelivered", [60.0])}, "excluded_undelivered", "slows learning", 0.6),
    (
        {"metrics": trend("tokens__excluded__greedy_logprobs", [60.0])},
        "excluded_greedy_logprobs", "slows learning", 0.6,
    ),
    (
        {"metrics": [metrics_of(1, tokens__trained=0.0, tokens__excluded__not_selected=90.0)]},
        "excluded_not_selected", "stops learning", 0.9,
    ),
    ({"config": WEIGHTS}, "reward_never_given_tone", "slows learning", 0.5),
    (
        {"config": {"algorithm": {"credit": {"weights": {"tone": 0.5}}}}},
        "reward_never_given_tone", "stops learning", 0.5,
    ),
    ({"config": GDPO}, "reward_never_given_tone", "slows learning", 2.0),
]  # fmt: skip

# What looks like it and is not.
WELL: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"steps": steps_of(([1.0, 1.0], 0.0), *[([0.0, 1.0], 1.0)] * 2)}, "groups_without_variance"),
    ({"steps": steps_of(*[([1.0, 1.0], 0.5)] * 4)}, "groups_without_variance"),  # calls had rewards of their own
    ({"steps": steps_of(*[([1.0], 0.0)] * 4, *[([0.0, 1.0], 1.0)] * 2)}, "groups_without_variance"),  # groups of one
    ({"steps": steps_of(*[([1.0], 0.5)] * 4)}, "groups_of_one"),  # compared with a critic's values
    (
        {"steps": steps_of(*[([1.0, 1.0], 0.0)] * 4), "config": {"distillation": TEACHER_ALONE}},
        "groups_without_variance",
    ),
    ({"rollouts": several(3, calls=[msgspec.structs.replace(INEXACT, trainable=False)])}, "missing_token_ids"),
    ({"rollouts": forked(10, ForkCause.NEW_CONVERSATION)}, "drift_new_conversation"),
    ({"rollouts": several(9, calls=[*TALK, ANEW[2]], forks={3: EDITED[3]})}, "history_rewritten"),
    ({"rollouts": forked(10, ForkCause.TRUNCATED_BY_CLIENT)}, "drift_truncated_by_client"),
    ({"rollouts": several(11) + several(1, calls=[CUT])}, "truncation"),
    ({"rollouts": [*several(10), GOOD | {"mode": "val", "error": BUG}]}, "agent_error_ValueError"),
    ({"rollouts": [*several(2), GOOD | {"error": STOPPED, "attempts": 2}]}, "infrastructure_retries"),
    ({"rollouts": several(4, reward=None, call_rewards=[Reward(value=1.0, call_id="any")])}, "no_reward"),
    ({"rollouts": several(4, reward={"reward": 1.0, "tone": 0.0}), "config": WEIGHTS}, "reward_never_given_tone"),
    ({"metrics": [metrics_of(n, critic__score__max=0.0, critic__score__min=0.0) for n in (1, 2)]}, "dead_reward"),
    (
        {
            "metrics": [metrics_of(n, critic__score__max=0.0, critic__score__min=0.0) for n in range(1, 9)],
            "config": {"distillation": TEACHER_ALONE},
        },
        "dead_reward",
    ),
    ({"rollouts": several(4, reward=None), "config": {"distillation": TEACHER_ALONE}}, "no_reward"),
    ({"rollouts": several(3, seen="gen_ai")}, "calls_beside_the_gateway_gen_ai"),  # they called the gateway, too
    (
        {"rollouts": several(2, calls=[], seen="openinference"), "metrics": trend("tokens__from_spans", [16.0])},
        "rollouts_without_calls",
    ),
    (
        {"rollouts": several(2, calls=[], seen="openinference"), "metrics": trend("tokens__from_spans", [16.0])},
        "calls_beside_the_gateway_openinference",
    ),
    ({"metrics": trend("response_length__mean", [8.0, 80.0])}, "exploding_lengths"),
    ({"metrics": trend("actor__ppo_k3_kl", [1e-3] * 8)}, "policy_stands_still"),
    ({"metrics": trend("actor__ppo_k3_kl", [0.0] * 8)}, "policy_stands_still"),  # steps of one update
    (
        {"metrics": [metrics_of(n, actor__ppo_k3_kl=1e-6, critic__score__mean=n / 9) for n in range(1, 9)]},
        "policy_stands_still",
    ),
    (
        {"metrics": [metrics_of(n, actor__ppo_k3_kl=1e-6, critic__score__mean=0.97) for n in range(1, 9)]},
        "policy_stands_still",
    ),
    ({"metrics": trend("actor__entropy", [1.0] * 6 + [0.2] * 2)}, "entropy_collapse"),
    ({"metrics": trend("tokens__excluded__validation", [60.0])}, "excluded_validation"),
    ({"metrics": trend("tokens__excluded__tuning", [60.0])}, "excluded_tuning"),
    ({"metrics": trend("tokens__excluded__not_selected", [60.0])}, "excluded_not_selected"),
    (
        {
            "metrics": trend("tokens__excluded__greedy_logprobs", [60.0]),
            "steps": [msgspec.structs.replace(step, estimator="remax") for step in steps_of(([1.0, 0.0], 1.0))],
        },
        "excluded_greedy_logprobs",
    ),
    ({"metrics": trend("tokens__excluded__overlong", [2000.0] * (RECENT + 2))}, "excluded_overlong"),  # long ago
]


@pytest.mark.parametrize(("run", "name", "severity", "number"), SICK, ids=[f"{name}-{how}" for _, name, how, _ in SICK])
def test_a_finding_is_told_with_its_number(
    run: dict[str, Any], name: str, severity: str, number: float, tmp_path: Path
) -> None:
    found = findings(run_of(tmp_path, **run))
    assert name in found, found
    assert found[name].severity == severity
    assert found[name].number == pytest.approx(number)


@pytest.mark.parametrize(("run", "name"), WELL, ids=[name or "healthy" for _, name in WELL])
def test_what_only_looks_like_it_is_not_told(run: dict[str, Any], name: str, tmp_path: Path) -> None:
    found = findings(run_of(tmp_path, **run))
    assert name not in found
    assert name or not found


def test_groups_that_are_alike_for_different_reasons_are_told_as_those_of_the_estimator(tmp_path: Path) -> None:
    whitened = [msgspec.structs.replace(one, alike=True) for one in group(1, 1, [0.0, 1.0], 0.5)]
    found = findings(run_of(tmp_path, steps=[step_of(1, *group(1, 0, [1.0, 1.0], 0.0), *whitened)]))
    assert "rollouts of which the estimator finds none better" in found["groups_without_variance"].told


def test_a_policy_that_stands_still_names_the_learning_rate(tmp_path: Path) -> None:
    config = {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}}}
    folder = run_of(tmp_path, metrics=trend("actor__ppo_k3_kl", [2e-6] * 8), config=config)
    assert "raise actor_rollout_ref.actor.optim.lr (now 1e-06)" in findings(folder)["policy_stands_still"].advice


def still(moved: float, first: float = 0.5, last: float = 0.5) -> Evidence:
    """A run whose reward goes from `first` to `last`, of 0 to 1, and whose policy moves so far within a step."""
    means = [first] * 4 + [last] * 4
    return evidence_of(
        metrics=[metrics_of(n, actor__ppo_k3_kl=moved, critic__score__mean=mean) for n, mean in enumerate(means)]
    )


# How much of it there is, and how bad that is: on both sides of each threshold.
EDGES: list[tuple[str, Callable[[Any], Evidence], dict[Any, str | None]]] = [
    (
        "agent_error_ValueError", lambda count: evidence_of(errors={"ValueError": Tally(count, "r")}),
        {49: "look at it", 50: "slows learning", 94: "slows learning", 95: "stops learning"},
    ),
    (
        "infrastructure_retries", lambda count: evidence_of(infrastructure={"EngineError": Tally(count, "r")}),
        {4: "look at it", 5: "slows learning"},
    ),
    (
        "drift_edited_text", lambda count: evidence_of(seen={ForkCause.EDITED_TEXT: Tally(count, "r")}),
        {9: None, 10: "look at it", 199: "look at it", 200: "slows learning"},
    ),
    (
        "truncation", lambda count: evidence_of(seen={"length": Tally(count, "r")}),
        {99: None, 100: "look at it", 499: "look at it", 500: "slows learning"},
    ),
    (
        "logprob_mismatch", lambda nats: evidence_of(metrics=trend("training__rollout_probs_diff_mean", [nats])),
        {
            0.009: None, 0.01: "look at it", 0.049: "look at it", 0.05: "slows learning", 0.49: "slows learning",
            0.5: "stops learning",
        },
    ),
    (
        "excluded_overlong", lambda tokens: evidence_of(metrics=trend("tokens__excluded__overlong", [tokens])),
        {9: None, 10: "look at it", 49: "look at it", 50: "slows learning", 94: "slows learning", 95: "stops learning"},
    ),
    (
        "exploding_lengths",
        lambda times: evidence_of(metrics=trend("response_length__mean", [100.0] * 6 + [100.0 * times] * 2)),
        {1.9: None, 2: "look at it", 3.9: "look at it", 4: "slows learning"},
    ),
    (
        "exploding_lengths",
        lambda steps: evidence_of(metrics=trend("response_length__mean", [8.0] * (steps - 2) + [64.0] * 2)),
        {7: None, 8: "slows learning"},
    ),
    (
        "entropy_collapse", lambda left: evidence_of(metrics=trend("actor__entropy", [1.0] * 6 + [left] * 2)),
        {0.11: None, 0.1: "slows learning"},
    ),
    ("policy_stands_still", still, {9e-5: "stops learning", 1.1e-4: None}),
    (
        "policy_stands_still", lambda last: still(1e-6, first=0.5, last=last),
        {0.44: None, 0.46: "stops learning", 0.54: "stops learning", 0.56: None},
    ),
    ("policy_stands_still", lambda mean: still(1e-6, mean, mean), {0.89: "stops learning", 0.91: None}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "run", "much", "severity"),
    [(name, run, much, severity) for name, run, edges in EDGES for much, severity in edges.items()],
    ids=[f"{name}-{much}" for name, _, edges in EDGES for much in edges],
)
def test_how_much_there_is_of_it_says_how_bad_it_is(
    name: str, run: Callable[[Any], Evidence], much: Any, severity: str | None
) -> None:
    found = findings(run(much)).get(name)
    assert (found and found.severity) == severity


def test_the_worse_of_what_was_logged_and_what_was_compared_counts() -> None:
    logged = trend("training__rollout_probs_diff_mean", [0.02])
    for gaps, number in (({"r0": 0.1, "r1": 0.3}, 0.2), ({"r0": 0.0}, 0.02)):
        assert findings(evidence_of(metrics=logged, gaps=gaps))["logprob_mismatch"].number == pytest.approx(number)


def test_one_step_that_moves_little_is_no_policy_that_stands_still() -> None:
    found = findings(evidence_of(metrics=trend("actor__ppo_k3_kl", [1e-3] * 7 + [1e-6])))
    assert "policy_stands_still" not in found


def test_what_agents_failed_with_is_named_where_most_of_the_silent_ones_failed() -> None:
    for failed, do in ((1, "llm.base_url"), (2, "mend what the agent failed with")):
        silent = evidence_of(without_calls=Tally(3, "r"), failed_silently=failed)
        assert do in findings(silent)["rollouts_without_calls"].advice


def test_no_reward_is_missed_before_a_rollout_has_ended() -> None:
    settings = RunSettings(weights={"tone": 0.5})
    assert findings(evidence_of(settings=settings, rollouts=0, calls=0)) == {}
    assert list(findings(evidence_of(settings=settings))) == ["reward_never_given_tone"]


def test_what_was_long_ago_is_not_told() -> None:
    """Something else than in the newest steps went wrong from the second to the fifth."""
    rows = [
        metrics_of(n, rollouts__lost_rewards=float(1 < n < 6), tokens__excluded__overlong=min(n, 5) * 100.0)
        for n in range(1, RECENT + 7)
    ]
    assert findings(evidence_of(metrics=rows)) == {}
    assert set(findings(evidence_of(metrics=rows[:10]))) == {"lost_rewards", "excluded_overlong"}


def test_where_teachers_alone_teach_a_group_of_one_lacks_nothing() -> None:
    alone = steps_of(([1.0], 0.0))
    assert "groups_of_one" in findings(evidence_of(steps=alone))
    assert findings(evidence_of(steps=alone, settings=RunSettings(rewards_count=False))) == {}


def test_the_rollout_to_look_at_is_the_newest_of_those_that_it_is_about() -> None:
    two = [step_of(step, *group(step, 0, [1.0, 1.0], 0.0), *group(step, 1, [0.0, 1.0], 1.0)) for step in (1, 2)]
    cut = msgspec.structs.replace(call_record(None, []), left_out="overlong")
    for step in two:
        step.rollouts.append(rollout_record(f"cut-{step.step}", "g2", None, calls=0))
        step.rollouts[-1].calls["c"] = cut
    lost = trend("rollouts__lost_rewards", [1.0])
    more = trend("tokens__excluded__overlong", [20.0])
    found = findings(evidence_of(steps=two, metrics=[lost[0] | more[0]]))
    told = {name: finding.rollout for name, finding in found.items()}
    assert told == {"groups_without_variance": "r2-0-0", "excluded_overlong": "cut-2", "lost_rewards": "r2-0-0"}


def test_the_share_of_calls_whose_ids_are_known_is_told() -> None:
    looked_at = diagnose(evidence_of(seen={"inexact": Tally(100, "r"), "length": Tally(20, "r")})).looked_at
    assert looked_at["share of calls whose token ids are known"] == 0.9
    assert looked_at["share of calls cut off by their length"] == 0.02


@pytest.mark.long
def test_every_check_has_been_seen_to_speak(tmp_path: Path) -> None:
    spoke = set()
    for number, (run, *_) in enumerate(SICK):
        evidence = gather(run_of(tmp_path / str(number), **run))
        for check in CHECKS:
            told = check(evidence)
            if isinstance(told, Finding) or list(told or ()):
                spoke.add(check)
    assert spoke == set(CHECKS)


def test_causes_of_forks_that_do_harm_all_have_advice() -> None:
    assert set(doctor._DRIFT) | doctor.HARMLESS == set(ForkCause)


def test_sampler_and_trainer_are_compared_token_by_token_and_the_worst_rollout_named(tmp_path: Path) -> None:
    """The store says -1 for each token."""
    near, far = call_record(None, [-1.0, -1.0]), call_record([1], [-1.5])
    of_less = call_record(None, [-9.0, -9.0], cut_context=True)  # which the sampler had more context for
    rollouts = [
        msgspec.structs.replace(rollout_record(f"r{n}", "g", float(n), 1.0), calls={f"r{n}-c1": of})
        for n, of in enumerate([near, far, of_less])
    ]
    folder = run_of(tmp_path, steps=[step_of(3, *rollouts)], metrics=[])
    assert gather(folder).gaps == {"r0": 0.0, "r1": 0.5}
    found = findings(folder)["logprob_mismatch"]
    assert (found.number, found.rollout, found.steps) == (0.25, "r1", (3, 3))
    write_run(folder, config=BYPASS)
    assert "logprob_mismatch" not in findings(folder), "the record holds the sampler's own"


def test_an_agent_that_called_beside_the_gateway_is_told_where_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    found = findings(run_of(tmp_path / "1", rollouts=several(2, calls=[], seen="openllmetry_before_1_0")))
    finding = found["calls_beside_the_gateway_openllmetry"]
    assert finding.severity == "stops learning"
    assert finding.told == (
        "in 2 of 2 rollouts without calls, the agent's own openllmetry spans tell of calls to 'policy' at "
        "http://127.0.0.1:1/v1/ that have messages, and no prompt token ids, no response token ids, no logprobs"
    )
    assert "point the agent's client at the gateway (llm.base_url, llm.api_key)" in finding.advice
    found = findings(run_of(tmp_path / "2", rollouts=several(2, calls=[], seen="openinference")))
    told_of_ids = found["calls_beside_the_gateway_openinference"].told
    assert "2 have token ids in the agent's own spans (triplets?source=otel)" in told_of_ids
    assert "they are trained where algorithm.train_spans=true says so" in told_of_ids


def test_a_loop_whose_first_prompt_was_too_long_is_told_for_what(tmp_path: Path) -> None:
    """It was told to use the gateway, which refused it."""
    refused = several(2, calls=[], ended_by="row_length")
    advice = findings(run_of(tmp_path / "1", rollouts=refused))["rollouts_without_calls"].advice
    assert advice.startswith("the first prompt, with the tools, has no room in data.max_prompt_length + data.max_resp")
    assert "llm.base_url" not in advice
    found = findings(run_of(tmp_path / "2", rollouts=[*refused, *several(1, calls=[])]))
    assert "; or let the agent use llm.base_url" in found["rollouts_without_calls"].advice


def test_agents_that_fail_without_a_call_are_told_what_they_failed_with(tmp_path: Path) -> None:
    refused = ErrorInfo(
        type="BadRequestError", message="Error code: 400 -\n response_format is not supported" + "." * 200
    )
    found = findings(run_of(tmp_path, rollouts=[*several(3, calls=[], error=refused), GOOD]))
    assert "attempts failed in the agent: BadRequestError: Error code: 400 - response_format is not supported.." in (
        told_of := found["agent_error_BadRequestError"].told
    )
    assert told_of.endswith("...")
    assert len(told_of) < 300
    advice = found["rollouts_without_calls"].advice
    assert "mend what the agent failed with" in advice
    assert "server.log" in advice
    assert "llm.base_url" not in advice
    lost = findings(run_of(tmp_path / "lost", rollouts=[*several(3, calls=[], error=LOST), GOOD]))
    assert "mend what the agent failed with" not in lost["rollouts_without_calls"].advice


def test_a_finding_names_a_rollout_to_look_at(tmp_path: Path) -> None:
    overlong = msgspec.structs.replace(rollout_record("r7", "g", 1.0), left_out="overlong")
    folder = run_of(
        tmp_path,
        rollouts=[*several(3), GOOD | {"error": BUG}, *several(3)],
        steps=[step_of(1, overlong, *group(1, 0, [0.0, 1.0], 1.0))],
        metrics=trend("tokens__excluded__overlong", [20.0]),
    )
    found = findings(folder)
    assert found["agent_error_ValueError"].rollout == "r3"
    assert found["excluded_overlong"].rollout == "r7"


def told(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(command.run)
    done = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_of_several_policies_each_is_judged_by_its_own_numbers_records_and_keys(tmp_path: Path) -> None:
    def row(step: int) -> dict[str, float]:
        well, still = metrics_of(step), metrics_of(step, critic__score__min=0.5, critic__score__max=0.5)
        more = {"steady": metrics_of(step, actor__entropy=1.0 / step**2), "frozen": still}
        return well | {f"{name}/{key}": value for name, own in more.items() for key, value in own.items()}

    weights = {"algorithm": {"credit": {"weights": {"tone": 1.0}}}}
    policies = {"first": {}, "steady": weights, "frozen": {"train_every": 0}}
    run_dir = run_of(tmp_path, metrics=[row(step) for step in range(1, 13)], config={"policies": policies})
    for record_ in steps_of(*[([1.0, 1.0], 0.0)] * 4):
        step_record.write(run_dir, record_, "steady")

    found = diagnose(gather(run_dir))
    assert {(finding.policy, finding.name) for finding in found.findings} == {
        ("steady", "entropy_collapse"),
        ("steady", "groups_without_variance"),
        ("steady", "reward_never_given_tone"),
    }
    assert found.looked_at["steady: share of groups with variance"] == 0
    assert found.looked_at["rollouts"] == 10
    told = "\n".join(draw.diagnosis(found))
    assert "entropy_collapse of policy steady: the entropy fell from" in told


def test_a_healthy_run_is_told_so_with_the_numbers_looked_at(tmp_path: Path) -> None:
    printed = told("--run-dir", str(run_of(tmp_path)))
    assert "nothing was found that keeps this run from learning" in printed
    for line in (
        "12  steps",
        "10  rollouts",
        "20  calls",
        "1  share of groups with variance",
        "0.5  reward of the last",
    ):
        assert line in printed, printed


def test_the_worst_comes_first_and_each_says_what_to_do(tmp_path: Path) -> None:
    folder = run_of(tmp_path, rollouts=[*several(3), GOOD | {"error": BUG}], steps=steps_of(*[([1.0, 1.0], 0.0)] * 4))
    printed = told("--run-dir", str(folder))
    assert printed.index("stops learning:") < printed.index("groups_without_variance") < printed.index("look at it:")
    assert "do      take tasks that are solved sometimes" in printed
    assert f"see     lightning-rl explain r3 --run-dir {folder}" in printed
    assert told(str(folder)) == printed
    as_json = json.loads(told("--run-dir", str(folder), "--json"))
    assert [finding["severity"] for finding in as_json["findings"]] == ["stops learning", "look at it"]


@pytest.mark.parametrize("told_twice", [command, report_command])
def test_two_folders_are_one_too_many(tmp_path: Path, told_twice: Any) -> None:
    app = typer.Typer()
    app.command()(told_twice.run)
    done = CliRunner().invoke(app, [str(tmp_path), "--run-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "given twice" in done.output


def test_a_run_that_has_just_begun_is_read(tmp_path: Path) -> None:
    with open_store(tmp_path):
        pass
    assert "nothing was found" in told("--run-dir", str(tmp_path))


def test_steps_that_a_resumed_run_does_anew_are_not_read_as_they_were(tmp_path: Path) -> None:
    dead = [step_of(step, *group(step, 0, [1.0, 1.0], 0.0)) for step in range(5, 30)]
    folder = run_of(
        tmp_path, steps=[*steps_of(*[([0.0, 1.0], 1.0)] * 4), *dead], metrics=[metrics_of(1), metrics_of(2)]
    )
    assert [step.step for step in gather(folder).steps] == [1]
    assert "groups_without_variance" not in findings(folder)


def test_the_half_line_of_a_run_that_died_is_no_line(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 13, "critic/rew')
    assert len(gather(folder).metrics) == 12


def test_a_folder_that_holds_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(Explained, match="holds no run"):
        told("--run-dir", str(tmp_path))


def test_looking_changes_nothing(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    told("--run-dir", str(folder))
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
