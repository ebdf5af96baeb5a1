"""What went wrong is told once per kind, with how often, what, and what to do."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_rl.store.contract import ErrorInfo
from lightning_rl.trajectories.run_warnings import AllFailed, InfrastructureFailed, Problems
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_adapters import forest
from lightning_rl_adapters.credit import Rewards
from lightning_rl_adapters.rows import Row
from tests.adapters.forests import make_call

METRIC = "algorithm.filter_groups.metric"


def trajectory(name: str = "r", **fields: Any) -> Trajectory:
    given = {
        "reward": 1.0, "rewards": Rewards(final=1.0), "forest": forest.build([]), "rows": [], "calls": 1,
        "sampled_tokens": 0, "excluded": {}, "agent_failed": False,
    }  # fmt: skip
    return Trajectory(rollout_id=name, group_id="g", **(given | fields))


def failed(message: str, *, infrastructure: bool = False) -> Trajectory:
    error = ErrorInfo(type="ValueError", message=message, infrastructure=infrastructure)
    return trajectory(agent_failed=not infrastructure, error=error)


@pytest.fixture
def problems() -> Problems:
    return Problems(Path("/run"), max_tokens=9)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return texts


def test_nothing_wrong_is_nothing_told(problems: Problems, caplog: pytest.LogCaptureFixture) -> None:
    problems.report("step 1", [trajectory(), trajectory()])
    assert told(caplog) == []


def test_failures_that_are_worth_more_than_rollouts_that_end_well_are_told(
    problems: Problems, caplog: pytest.LogCaptureFixture
) -> None:
    crashed = trajectory(agent_failed=True, error=ErrorInfo(type="ValueError", message="no"), reward=0.0)
    problems.report("step 1", [crashed, trajectory(reward=0.5), trajectory(reward=-0.5)])
    assert len(told(caplog)) == 1
    less = trajectory(agent_failed=True, error=crashed.error, reward=-2.0)
    problems.report("step 1", [crashed, less, trajectory(reward=-1.0)])
    assert told(caplog) == [], "the least of them is less than the mean"
    problems.report("step 2", [crashed, trajectory(reward=-1.0), trajectory(reward=-0.5)])
    [pays] = told(caplog)
    assert pays.startswith(
        "step 2: 1 of 3 rollouts failed and count as 0, more than the mean of those that ended well (-0.75)"
    )


def test_nothing_is_wrong_with_cancelled_rollouts(problems: Problems, caplog: pytest.LogCaptureFixture) -> None:
    cancelled = trajectory(calls=0, reward=None, cancelled=True)
    problems.report("step 1", [cancelled, trajectory()])
    problems.check("step 1", [cancelled, cancelled])
    problems.report_missing_reward("algorithm.filter_groups.metric", "speed", [cancelled])
    assert told(caplog) == []
    with pytest.raises(AllFailed, match="step 2: all 1 rollouts made no call to the model"):
        problems.check("step 2", [cancelled, trajectory(calls=0)])


def test_a_client_that_is_kept_for_other_rollouts_is_guessed_at(
    problems: Problems, caplog: pytest.LogCaptureFixture
) -> None:
    calls_of_three = trajectory(forest=forest.build([make_call(number, None) for number in range(3)]), calls=3)
    problems.report("step 1", [calls_of_three, *[trajectory(calls=0)] * 3])
    [plain] = told(caplog)
    assert plain.startswith("step 1: 3 of 4 rollouts made no call to the model: ")
    problems.report("step 2", [calls_of_three, *[trajectory(calls=0, other_calls=1)] * 2])
    assert told(caplog) == [], "they called other models by themselves"
    problems.report("step 2", [calls_of_three, *[trajectory(calls=0)] * 2])
    [guessed] = told(caplog)
    assert guessed.startswith("step 2: 2 of 3 rollouts made no call, and others have at least as many conversations")
    problems.check("step 3", [calls_of_three, *[trajectory(calls=0)] * 2])
    problems.check("step 3", [calls_of_three, calls_of_three, *[trajectory()] * 4, *[trajectory(calls=0)] * 4])
    with pytest.raises(
        AllFailed, match=r"step 4: 4 of 6 rollouts made no call, .*if it is meant so, set trainer.all_f"
    ):
        problems.check("step 4", [calls_of_three, calls_of_three, *[trajectory(calls=0)] * 4])


@pytest.mark.parametrize("what", [{"ended_by": "context"}, {"error": ErrorInfo(type="ValueError", message="no")}])
def test_who_had_a_reason_to_make_no_call_has_made_none_as_another(
    what: dict[str, Any], problems: Problems, caplog: pytest.LogCaptureFixture
) -> None:
    calls_of_three = trajectory(forest=forest.build([make_call(number, None) for number in range(3)]), calls=3)
    problems.report("step 1", [calls_of_three, trajectory(calls=0, **what)])
    [text] = told(caplog)
    assert "as that other" not in text


def test_one_error_of_many_rollouts_is_one_line(problems: Problems, caplog: pytest.LogCaptureFixture) -> None:
    problems.report("step 1", [failed("rollout train-0-1-3 returned nan"), failed("rollout train-0-1-4 returned nan")])
    problems.report("step 2", [failed("rollout train-0-2-1 returned nan")])
    [text] = told(caplog)
    assert text.startswith("step 1: 2 of 2 rollouts failed in the agent and count as algorithm.agent_failure says: ")
    assert "ValueError: rollout train-0-1-3 returned nan (tracebacks are in runner-*.log where the runners run)" in text


def test_ids_of_letters_make_no_other_error_of_one(problems: Problems, caplog: pytest.LogCaptureFixture) -> None:
    problems.report("step 1", [failed(f"container {name} is gone") for name in ("deadbeefcafe", "feedfacebeef")])
    assert told(caplog)[0].startswith("step 1: 2 of 2 rollouts failed in the agent")


def test_another_reason_to_make_no_call_is_told_too(problems: Problems, caplog: pytest.LogCaptureFixture) -> None:
    problems.report("step 1", [trajectory(calls=0), trajectory(calls=0, ended_by="context")])
    assert [text.partition(" rollouts ")[0] for text in told(caplog)] == ["step 1: 1 of 2"] * 2


def test_an_error_without_words_is_told_by_its_type(problems: Problems, caplog: pytest.LogCaptureFixture) -> None:
    problems.report("step 1", [failed(" ")])
    assert "says: ValueError: (no message) (tracebacks" in told(caplog)[0]
    with pytest.raises(InfrastructureFailed, match=r"ValueError: \(no message\)"):
        problems.check("step 1", [failed("", infrastructure=True)])
    with pytest.raises(AllFailed, match="ValueError: no traceback"):
        problems.check("step 1", [failed("no traceback")])


def test_where_all_agents_failed_the_first_traceback_is_shown_and_of_infrastructure_the_last_error(
    problems: Problems,
) -> None:
    def named(name: str, infrastructure: bool) -> Trajectory:
        error = ErrorInfo(type="E", message=name, traceback=f"line of {name}\n", infrastructure=infrastructure)
        return trajectory(name, agent_failed=not infrastructure, error=error)

    with pytest.raises(AllFailed, match=r"first in r0:\s+line of r0\s+Mend"):
        problems.check("step 1", [named("r0", False), named("r1", False)])
    with pytest.raises(InfrastructureFailed, match=r"last in r1:\s+E: r1\s+Mend"):
        problems.check("step 1", [named("r0", True), named("r1", True)])


def test_where_some_agents_failed_and_none_of_the_others_gave_a_reward_nothing_can_be_learned(
    problems: Problems,
) -> None:
    both = [trajectory("r0", agent_failed=True), msgspec.structs.replace(failed("why"), rollout_id="r1")]
    with pytest.raises(AllFailed, match=r"in 1 of 2 rollouts, and gave no reward in the others, first in r1:\s+.*why"):
        problems.check("step 1", both)
    problems.check("step 1", [*both, trajectory("r2")])
    Problems(Path("/run"), rewards_count=False).check("step 1", both)


def test_another_error_is_told_too(problems: Problems, caplog: pytest.LogCaptureFixture) -> None:
    problems.report("step 1", [failed("a")])
    problems.report("step 2", [failed("b")])
    assert len(told(caplog)) == 2


def test_infrastructure_is_not_the_agents_fault(problems: Problems, caplog: pytest.LogCaptureFixture) -> None:
    problems.report("step 1", [failed("gone", infrastructure=True)])
    assert "left out, since infrastructure failed on every attempt; the last error: ValueError: gone" in told(caplog)[0]


def test_rows_that_are_too_long_are_told(problems: Problems, caplog: pytest.LogCaptureFixture) -> None:
    row = Row(
        token_ids=[1] * 10,
        loss_mask=[1] * 10,
        logprobs=[0.0] * 10,
        rewards=[0.0] * 10,
        policy_versions=[0] * 10,
        call_ids=["c"] * 10,
        temperature=[1.0] * 10,
        model="m",
        excluded="overlong",
    )
    problems.report("step 1", [trajectory(rows=[row])])
    assert "have rows of more than 9 tokens, which are not trained: raise data.max_prompt_length" in told(caplog)[0]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({"lost_rewards": 2}, "gave rewards to calls that they did not make"),
        ({"agent_failed": True}, "ended without a reward: return a number, or call emit_reward"),
        ({"calls": 0}, "made no call to the model: the agent must use llm.base_url and llm.api_key"),
        ({"calls": 0, "printed": "[node ended with status 1]"}, "what it printed last: [node ended with status 1])"),
        (
            {"calls": 0, "ended_by": "context"},
            "the first prompt, with the tools, has no room in the engine's context, ",
        ),
    ],
)
def test_silent_failures_are_told(
    what: dict[str, Any], text: str, problems: Problems, caplog: pytest.LogCaptureFixture
) -> None:
    problems.report("step 1", [trajectory(**what)])
    [warning] = told(caplog)
    assert text in warning
    assert ("printed last" in warning) == ("printed" in what)


def test_of_a_long_error_the_ends_are_shown(problems: Problems, caplog: pytest.LogCaptureFixture) -> None:
    problems.report("step 1", [failed("a page: " + "x" * 100_000 + " which is no JSON")])
    [text] = told(caplog)
    assert len(text) < 1000
    assert "a page: xxx" in text
    assert "xxx which is no JSON (tracebacks" in text
    with pytest.raises(AllFailed) as raised:
        problems.check("step 1", [failed("y" * 100_000)])
    assert len(str(raised.value)) < 5000
    assert raised.value.comes_again


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({"agent_failed": True}, "all 2 rollouts ended without a reward: return a number, or call emit_reward"),
        ({"calls": 0}, "all 2 rollouts made no call to the model: the agent must use llm.base_url and llm.api_key"),
    ],
)
def test_a_step_of_which_nothing_can_be_learned_ends_the_run(
    what: dict[str, Any], text: str, problems: Problems
) -> None:
    with pytest.raises(AllFailed, match=f"step 1: {text}"):
        problems.check("step 1", [trajectory(**what)] * 2)
    problems.check("step 1", [trajectory(), trajectory(**what), failed("a")])
    problems.check("step 1", [failed("gone", infrastructure=True), trajectory(**what)])
    problems.check("step 1", [failed("a"), failed("gone", infrastructure=True)])


def test_a_step_that_was_lost_to_infrastructure_ends_the_run_which_may_go_on(problems: Problems) -> None:
    text = r"step 1: infrastructure failed on every attempt of all 2 rollouts, last in r:\s+ValueError: gone\s+Mend it"
    with pytest.raises(InfrastructureFailed, match=text) as raised:
        problems.check("step 1", [failed("gone", infrastructure=True)] * 2)
    assert not raised.value.comes_again
    problems.check("step 1", [failed("gone", infrastructure=True), trajectory()])
    problems.check("step 1", [])


def test_a_reward_that_a_key_names_and_nobody_gives_is_told_once(
    problems: Problems, caplog: pytest.LogCaptureFixture
) -> None:
    given = [trajectory(rewards=Rewards(final=1.0, named={"polite": 1.0})), trajectory()]
    problems.report_missing_reward(METRIC, "acc", [failed("a")])
    for name in ("reward", "polite", "acc", "acc"):
        problems.report_missing_reward(METRIC, name, given)
    problems.report_missing_reward("policies.white.reward", "polite", given)
    problems.report_missing_reward(METRIC, "prec", given)
    assert told(caplog) == [
        f"algorithm.filter_groups.metric={name}: none of 2 rollouts has a reward of that name; there are polite, reward"
        for name in ("acc", "prec")
    ]


def test_a_reward_whose_name_is_nearly_a_policys_is_told(problems: Problems, caplog: pytest.LogCaptureFixture) -> None:
    names = ("withe", "black", "solved", "judged", "planned", "code", "Critic", "executer")
    given = [trajectory(rewards=Rewards(final=1.0, named=dict.fromkeys(names, 1.0))), trajectory()]
    policies = ("white", "white", "black", "blakc", "solver", "judge", "planner", "coder", "critic", "executor")
    for policy in policies:
        problems.report_misspelt_policy(policy, ["black", "executer"], given)
    assert [re.findall("'(.*?)'", text) for text in told(caplog)] == [
        ["withe", "white", "white"],
        ["Critic", "critic", "critic"],
    ]


def test_rewards_that_the_weights_do_not_name_are_told_with_them(caplog: pytest.LogCaptureFixture) -> None:
    problems = Problems(Path("/run"), summed={"nosuch": 1.0})
    given = [trajectory(agent_failed=True, reward=0.0, rewards=Rewards(named={"reward": 1.0, "short": 0.5}))]
    problems.report("step 1", given)
    words = r"algorithm.credit.weights adds up \(nosuch\); given were reward, short"
    assert re.search(f"1 of 1 rollouts gave none of the rewards that {words}", told(caplog)[0])
    with pytest.raises(AllFailed, match=f"all 1 rollouts gave none of the rewards that {words}"):
        problems.check("step 1", given)
    with pytest.raises(AllFailed, match="ended without a reward: return a number"):
        problems.check("step 1", [trajectory(agent_failed=True, rewards=Rewards())])


def test_where_rewards_count_nothing_none_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    problems = Problems(Path("/run"), rewards_count=False)
    problems.check("step 1", [trajectory(agent_failed=True)])
    problems.report("step 1", [trajectory(agent_failed=True, reward=0.0), trajectory(reward=-1.0)])
    assert told(caplog) == []
