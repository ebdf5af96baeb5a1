"""A step's groups are graded: in order, several at a time, and nothing but finite rewards comes of it."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.config import ConfigError, compose
from lightning_rl.rewards import FinishedRollout
from lightning_rl.rewards.checked import RewardError
from lightning_rl.rewards.functions import RewardFunction, RewardFunctionError
from lightning_rl.rewards.grading import as_graded, from_config, grade, graded_before, late_rewards
from lightning_rl.rewards.judge import RankingJudge
from lightning_rl.store.contract import Reward
from tests.lightning_rl.rewards.rollouts import finished, group
from tests.proxy.engines.service import running


def lengths(rollouts: Sequence[FinishedRollout]) -> list[float]:
    return [len(rollout.answer) for rollout in rollouts]


@given(st.lists(st.lists(st.text(max_size=3), max_size=4), max_size=8), st.integers(1, 4))
def test_every_rollout_has_its_own_reward_whatever_the_concurrency(answers: list[list[str]], concurrency: int) -> None:
    groups = [group(*texts, group_id=f"g{n}") for n, texts in enumerate(answers)]
    graded = grade(lengths, groups, concurrency=concurrency)
    assert graded == [[{"reward": float(len(text))} for text in texts] for texts in answers]


def test_as_many_groups_are_graded_at_once_as_allowed_and_no_more() -> None:
    barrier, threads = threading.Barrier(3), set()

    def meets(rollouts: Sequence[FinishedRollout]) -> list[float]:
        threads.add(threading.current_thread())
        barrier.wait(20)  # fewer than three would wait for ever
        return [1.0]

    assert len(grade(meets, [group("a")] * 6, concurrency=3)) == 6
    assert len(threads) == 3


def test_one_at_a_time_is_in_the_callers_own_thread() -> None:
    """Functions that set a signal's alarm work nowhere else."""
    threads: set[Any] = set()
    grade(lambda rollouts: threads.add(threading.current_thread()) or [0.0], [group("a"), group("b")], concurrency=1)
    assert threads == {threading.main_thread()}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_async_function_runs_on_one_event_loop(concurrency: int) -> None:
    """A client that it keeps belongs to a loop."""
    loops = set()

    async def asked(rollouts: Sequence[FinishedRollout]) -> list[float]:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return lengths(rollouts)

    groups = [group("a", "bb"), group("ccc", group_id="g1")]
    assert grade(asked, groups, concurrency=concurrency) == [[{"reward": 1.0}, {"reward": 2.0}], [{"reward": 3.0}]]
    grade(asked, groups, concurrency=concurrency)
    assert len(loops) == 1

    async def leaves(rollouts: Sequence[FinishedRollout]) -> list[float]:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"SystemExit\(3\) in an async function"):
        grade(leaves, groups, concurrency=concurrency)

    async def fails(rollouts: Sequence[FinishedRollout]) -> list[float]:
        raise ValueError("no judge")

    with pytest.raises(ValueError, match="no judge") as error:
        grade(fails, groups[:1], concurrency=concurrency)
    assert error.value.__notes__ == ["while group g was graded (2 rollouts)"]


def test_several_rewards_by_name_are_kept() -> None:
    given = [{"reward": 1, "format": True}, {"reward": 0.5}]
    assert grade(lambda _: given, [group("a", "b")], concurrency=1) == [[{"reward": 1.0, "format": 1.0}, given[1]]]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([1.0], "group g: the reward function returned 1 rewards for 2 rollouts"),
        ([1.0] * 3, "returned 3 rewards for 2"),
        (1.0, "returned float for 2 rollouts; return a list"),
        ("ab", "returned 2 rewards"),
        ([1.0, float("nan")], "rollout g-1: the reward is nan"),
        ([1.0, None], "rollout g-1: the reward is None, of type NoneType"),
        ([1.0, {"format": 1.0}], r"rollout g-1: the rewards \['format'\] have none named 'reward'"),
        ([1.0, {"reward": 1.0, "format": float("inf")}], "rollout g-1: the reward 'format' is inf"),
    ],
)
@pytest.mark.parametrize("concurrency", [1, 2])
def test_what_is_no_list_of_rewards_is_named(given: Any, told: str, concurrency: int) -> None:
    with pytest.raises(RewardError, match=told):
        grade(lambda _: given, [group("a", "b")], concurrency=concurrency)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_first_error_is_raised_with_its_group_and_ends_the_grading(concurrency: int) -> None:
    asked = []

    def fails(rollouts: Sequence[FinishedRollout]) -> list[float]:
        asked.append(rollouts[0].group_id)
        raise LookupError(rollouts[0].group_id)

    groups = [group("a", group_id=f"g{n}") for n in range(50)]
    with pytest.raises(LookupError) as raised:
        grade(fails, groups, concurrency=concurrency)
    assert raised.value.__notes__ == [f"while group {raised.value} was graded (1 rollouts)"]
    assert len(asked) < len(groups)
    if concurrency == 1:
        assert asked == ["g0"]


def test_after_an_error_no_further_group_is_begun() -> None:
    asked, over = [], threading.Event()

    def fails_first(rollouts: Sequence[FinishedRollout]) -> list[float]:
        asked.append(rollouts[0].group_id)
        if rollouts[0].group_id == "g0":
            raise LookupError
        over.wait(20)
        return [0.0]

    with pytest.raises(LookupError):
        grade(fails_first, [group("a", group_id=f"g{n}") for n in range(20)], concurrency=2)
    over.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rewards"):
            thread.join(20)
    assert len(asked) <= 3, "two at a time, and one that began before the error was seen"


@pytest.mark.parametrize("concurrency", [1, 2])
def test_what_was_graded_before_an_error_is_handed_on_first(concurrency: int) -> None:
    def fails_last(rollouts: Sequence[FinishedRollout]) -> list[float]:
        if rollouts[0].group_id == "g2":
            raise LookupError
        return [1.0]

    graded = as_graded(fails_last, [group("a", group_id=f"g{n}") for n in range(3)], concurrency=concurrency)
    place, rewards = next(graded)
    assert place in range(concurrency)
    assert rewards == [{"reward": 1.0}]
    with pytest.raises(LookupError):
        list(graded)


# From the config


def section(**given: Any) -> Any:
    return compose({"reward": given}).reward


def test_a_config_without_rewards_names_none() -> None:
    assert from_config(section()) is None


def test_a_config_names_a_function(tmp_path: Any) -> None:
    (tmp_path / "f.py").write_text("def mine(data_source, solution_str, ground_truth, extra_info, by): return by")
    function = {"path": str(tmp_path / "f.py"), "name": "mine", "reward_kwargs": {"by": 2}}
    made = from_config(section(custom_reward_function=function))
    assert isinstance(made, RewardFunction)
    assert grade(made, [[finished("4")]], concurrency=2) == [[{"reward": 2.0}]]
    with pytest.raises(RewardFunctionError):
        from_config(section(custom_reward_function=function | {"name": "yours"}))


def test_a_config_names_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a-key")
    with running() as service:
        service.script.append('{"ranking": [[1, 2]]}')
        asked = {"model": "j", "base_url": service.url, "api_key_env": "JUDGE_KEY", "rubric": "short", "concurrency": 3}
        made = from_config(section(judge=asked | {"timeout_seconds": 5.0}))
        assert isinstance(made, RankingJudge)
        assert grade(made, [group("a", "b")], concurrency=3) == [[{"reward": 0.5}] * 2]
        assert (service.keys, made.rubric, made._client.timeout) == (["Bearer a-key"], "short", 5.0)
        assert [made._free.acquire(blocking=False) for _ in range(4)] == [True, True, True, False]


def test_function_and_judge_together_are_an_error() -> None:
    with pytest.raises(ConfigError, match="are set, and each gives the final reward"):
        from_config(section(custom_reward_function={"path": "f.py"}, judge={"model": "j"}))
    with pytest.raises(ConfigError, match=r"reward\.command and reward\.judge\.model are set"):
        from_config(section(command="true", judge={"model": "j"}))


def test_a_judge_without_its_key_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
        from_config(section(judge={"model": "j", "api_key_env": "JUDGE_KEY"}))


def test_a_service_elsewhere_that_is_asked_without_a_key_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    for host in ("127.0.0.1:9", "localhost:9", "judges.example.com"):
        from_config(section(judge={"model": "j", "base_url": f"http://{host}/v1", "api_key_env": "JUDGE_KEY"}))
    [told] = caplog.messages
    assert "JUDGE_KEY is not set, so http://judges.example.com/v1 is asked without a key" in told
    caplog.clear()
    monkeypatch.setenv("JUDGE_KEY", "a-key")
    from_config(section(judge={"model": "j", "base_url": "http://judges.example.com/v1", "api_key_env": "JUDGE_KEY"}))
    assert caplog.messages == []


def test_another_services_key_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "of-another-service")
    with running() as service:
        service.script.append('{"ranking": [[1, 2]]}')
        made = from_config(section(judge={"model": "j", "base_url": service.url, "api_key_env": "JUDGE_KEY"}))
        grade(made, [group("a", "b")], concurrency=1)
        assert service.keys == ["Bearer none"]


# To the store


@given(st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False, allow_infinity=False)))
def test_late_rewards_have_ids_that_the_store_takes_and_are_known_again(named: dict[str, float]) -> None:
    rewards = late_rewards(named)
    ids = [reward.reward_id for reward in rewards]
    assert len(set(ids)) == len(ids)
    assert msgspec.json.decode(msgspec.json.encode(rewards), type=list[Reward]) == rewards
    assert graded_before([Reward(value=9.0), Reward(value=9.0, reward_id="w1"), *rewards]) == named


def test_a_late_reward_may_have_a_long_name() -> None:
    rewards = late_rewards({"x" * 64: 1.0, "x" * 65: 2.0})
    assert msgspec.json.decode(msgspec.json.encode(rewards), type=list[Reward]) == rewards
    assert [str(reward.reward_id)[:8] for reward in rewards] == ["graded-x", "graded-~"]


def test_the_id_of_a_late_reward_says_its_name() -> None:
    assert [reward.reward_id for reward in late_rewards({"reward": 1.0})] == ["graded-reward"]
