"""Agents: the decorated function stays a function, arguments come by name, rewards are checked."""

import asyncio
import functools
import math
import pickle
import tomllib
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest

import lightning_rl as lrl
from lightning_rl.agents.agent import AgentSignature, as_agent, run_agent
from lightning_rl.agents.emit import emit_message, emit_reward
from lightning_rl.agents.emitted import Emitted
from lightning_rl.runner.agent_pickle import pickled
from lightning_rl.store.contract import Attempt, Claim, Rollout, RolloutConfig

RESOURCE = {
    "type": "llm", "model": "m", "base_url": "http://x/rollout/r1/attempt/a1/v1",
    "anthropic_base_url": "http://x/rollout/r1/attempt/a1", "api_key": "key", "sampling_parameters": {"top_p": 0.9},
}  # fmt: skip


def claim(mode: Any = "train", **resources: dict[str, Any]) -> Claim:
    rollout = Rollout(
        rollout_id="r1", task={"n": 2}, mode=mode, status="running", group_id=None, agent=None, resources_id=None,
        config=RolloutConfig(), metadata={}, attempt_count=1, created_at=0.0,
    )  # fmt: skip
    attempt = Attempt(
        attempt_id="a1", rollout_id="r1", sequence=1, status="running", worker_id="w", lease_expires_at=1.0,
        started_at=0.0,
    )  # fmt: skip
    return Claim(rollout=rollout, attempt=attempt, resources={"main_llm": RESOURCE} | resources)


@lrl.rollout
def doubles(task: dict[str, int], llm: lrl.LLM) -> float:
    """Doubles."""
    assert llm.base_url.endswith("/v1")
    return 2.0 * task["n"]


def test_a_decorated_function_is_still_that_function() -> None:
    llm = lrl.LLM(model="m", base_url="http://x/v1", api_key="k")
    assert doubles({"n": 4}, llm) == 8.0
    assert doubles.__name__ == "doubles"
    assert doubles.__doc__ == "Doubles."


def test_arguments_are_injected_by_name() -> None:
    seen: dict[str, Any] = {}

    @lrl.rollout
    def agent(task: Any, llm: lrl.LLM, judge: "lrl.LLM", resources: Any, rollout: Any, more: int = 3) -> float:
        seen.update(llm=llm, judge=judge, resources=resources, rollout=rollout, more=more)
        return 1.0

    assert run_agent(agent, claim(judge=RESOURCE | {"model": "judge"})) == {"reward": 1.0}
    assert (seen["llm"].model, seen["judge"].model, seen["more"]) == ("m", "judge", 3)
    assert seen["rollout"].rollout_id == "r1"
    assert isinstance(seen["resources"]["main_llm"], lrl.ProxyLLM)


def test_a_parameter_that_nothing_fills_is_named_at_once() -> None:
    with pytest.raises(TypeError, match="nothing fills parameter 'database'"):

        @lrl.rollout
        def agent(task: Any, llm: lrl.LLM, database: str) -> float:
            return 0.0


def test_async_functions_run() -> None:
    @lrl.rollout
    async def agent(task: dict[str, int], llm: lrl.LLM) -> float:
        await asyncio.sleep(0)
        emit_reward(0.5, name="style")
        return 1.0

    assert run_agent(agent, claim()) == {"style": 0.5, "reward": 1.0}


def test_class_agents_resolve_their_llm_and_know_the_mode() -> None:
    class Agent(lrl.Agent):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            assert resources["main_llm"].resolve(rollout).api_key == "key"
            return 1.0

        async def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 0.25

    assert run_agent(as_agent(Agent), claim()) == {"reward": 1.0}
    assert run_agent(as_agent(Agent()), claim("val")) == {"reward": 0.25}


@pytest.mark.parametrize("name", ["base_url", "anthropic_base_url", "api_key", "env"])
def test_a_proxy_llm_says_how_to_come_by_what_an_llm_has(name: str) -> None:
    policy = lrl.ProxyLLM(model="m")
    with pytest.raises(AttributeError, match=rf'resources\["main_llm"\]\.resolve\(rollout\)\.{name}'):
        getattr(policy, name)
    with pytest.raises(AttributeError, match="'ProxyLLM' object has no attribute 'x'"):
        _ = policy.x
    assert not hasattr(policy, "base_url")


def test_emitted_rewards_are_kept_by_name_the_last_wins() -> None:
    @lrl.rollout
    def agent(task: Any) -> None:
        emit_reward(0.1)
        emit_reward(0.9)

    assert run_agent(agent, claim()) == {"reward": 0.9}


def test_a_reward_of_a_call_is_never_the_final_one() -> None:
    @lrl.rollout
    def agent(task: Any) -> float | None:
        emit_reward(0.5, call_id="chatcmpl-c1")
        return task["returned"]  # type: ignore[no-any-return]

    for returned, rewards in ((1.0, {"reward": 1.0}), (None, None)):
        asked, emitted = claim(), Emitted("r1", "a1")
        asked.rollout.task["returned"] = returned
        assert run_agent(agent, asked, emitted=emitted) == rewards
        assert [(reward.name, reward.value, reward.call_id) for reward in emitted.call_rewards] == [
            ("reward", 0.5, "chatcmpl-c1")
        ]


def test_what_an_agent_emitted_before_it_failed_is_there() -> None:
    def agent(task: Any) -> None:
        emit_message("here")
        emit_reward(0.5, call_id="msg_c1")
        raise LookupError

    emitted = Emitted("r1", "a1")
    with pytest.raises(LookupError):
        run_agent(as_agent(agent), claim(), emitted=emitted)
    assert [reward.reward_id for reward in emitted.call_rewards] == ["a1-call-0"]
    assert [span.name for span in emitted.spans] == ["lightning_rl.message", "lightning_rl.reward"]


def test_returned_rewards_are_not_emitted_ones() -> None:
    emitted = Emitted("r1", "a1")
    assert run_agent(as_agent(lambda task: {"reward": 1, "style": 2}), claim(), emitted=emitted) == {
        "reward": 1.0, "style": 2.0,
    }  # fmt: skip
    assert (emitted.rewards, emitted.spans) == ({}, [])


def test_no_reward_is_none() -> None:
    assert run_agent(as_agent(lambda task: None), claim()) is None


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", [1.0], np.ones(2), np.array(["1"])], ids=str)
def test_what_is_no_finite_number_is_refused_with_the_rollouts_name(reward: Any) -> None:
    with pytest.raises(ValueError, match="rollout r1: a reward must be a finite number"):
        run_agent(as_agent(lambda task: reward), claim())


@pytest.mark.parametrize("reward", [True, np.bool_(True), np.float32(1), np.array(1), np.array([1.0])], ids=repr)
def test_one_number_is_a_reward_whoever_made_it(reward: Any) -> None:
    assert run_agent(as_agent(lambda task: {"reward": reward, "half \ud83d": 2}), claim()) == {
        "reward": 1.0, "half \\ud83d": 2.0,
    }  # fmt: skip


def test_several_rewards_need_a_final_one_and_two_final_ones_are_refused() -> None:
    assert run_agent(as_agent(lambda task: {"reward": 1, "style": 0.5}), claim()) == {"reward": 1.0, "style": 0.5}
    with pytest.raises(ValueError, match="without one named 'reward'"):
        run_agent(as_agent(lambda task: {"style": 0.5}), claim())

    def two(task: Any) -> float:
        emit_reward(1.0)
        return 0.0

    with pytest.raises(ValueError, match="rollout r1 has two final rewards"):
        run_agent(as_agent(two), claim())


def test_agents_of_modules_travel_by_reference_and_local_ones_by_value() -> None:
    assert pickle.loads(cloudpickle.dumps(doubles)) is doubles
    factor = 5

    @lrl.rollout
    def local(task: dict[str, int]) -> float:
        return float(factor * task["n"])

    assert pickle.loads(cloudpickle.dumps(local))({"n": 2}) == 10.0


class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor, self.rollout = factor, "an attribute of its own"

    def __call__(self, task: dict[str, int], factor: int = 0) -> float:
        return float((factor or self.factor) * task["n"])


@pytest.mark.parametrize("function", [Scaled(5), functools.partial(Scaled(2), factor=5)], ids=["object", "partial"])
def test_what_is_called_like_a_function_is_an_agent_and_travels(function: Any) -> None:
    agent = pickle.loads(pickled(as_agent(function)))
    assert run_agent(agent, claim()) == {"reward": 10.0}


def test_what_nothing_can_call_is_named_without_a_name_of_its_own() -> None:
    with pytest.raises(AgentSignature, match=r"functools.partial\(.*: nothing fills parameter 'other'"):
        as_agent(functools.partial(lambda task, other: 1.0))


def test_a_runner_may_await_in_its_own_way() -> None:
    @lrl.rollout
    async def agent(task: Any) -> float:
        return 1.0

    def on_a_loop_of_its_own(awaitable: Awaitable[Any]) -> Any:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(awaitable)
        finally:
            loop.close()

    assert run_agent(agent, claim(), on_a_loop_of_its_own) == {"reward": 1.0}


def test_an_llm_points_sdks_at_itself() -> None:
    llm = lrl.LLM(
        model="m", base_url="http://x/rollout/r/attempt/a/v1", anthropic_base_url="http://x/rollout/r/attempt/a",
        api_key="secret",
    )  # fmt: skip
    assert llm.env()["OPENAI_BASE_URL"] == llm.base_url
    assert llm.env()["ANTHROPIC_BASE_URL"] == llm.anthropic_base_url
    assert llm.for_agent("writer").base_url == "http://x/rollout/r/attempt/a/agent/writer/v1"
    assert llm.for_agent("writer").for_agent("critic").base_url == "http://x/rollout/r/attempt/a/agent/critic/v1"
    assert "secret" not in repr(llm)


def test_an_llm_points_coding_agents_at_itself() -> None:
    llm = lrl.LLM('a "model"', "http://x/rollout/r/attempt/a/v1", "secret", "http://x/rollout/r/attempt/a")
    config = tomllib.loads(llm.codex_config(32768))
    provider = config["model_providers"][config["model_provider"]]
    assert (config["model"], config["model_context_window"]) == (llm.model, 32768)
    assert (provider["base_url"], llm.env()[provider["env_key"]]) == (llm.base_url, "secret")
    assert "secret" not in llm.codex_config()
    assert "model_context_window" not in tomllib.loads(llm.codex_config())
    environment = llm.claude_code_env(32768)
    assert environment.items() >= {**llm.env(), "ANTHROPIC_API_KEY": "", "ANTHROPIC_AUTH_TOKEN": "secret"}.items()
    assert {environment[name] for name in environment if name.endswith("_MODEL")} == {llm.model}
    assert environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "32768"
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in llm.claude_code_env()


def test_importing_the_package_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    program = (
        "import lightning_rl, sys; print([m for m in ('torch', 'transformers', 'sqlalchemy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"


def test_every_public_name_is_there_and_unknown_ones_are_named() -> None:
    assert all(getattr(lrl, name) is not None for name in lrl.__all__)
    assert set(lrl.__all__) <= set(dir(lrl))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lrl.nonsense


@pytest.mark.parametrize(
    "annotation", ["Optional[lrl.LLM]", "Annotated[LLM, 'a judge']", "None | LLM", "typing.Optional[LLM]"]
)
def test_annotations_that_are_text_are_read(annotation: str) -> None:
    def agent(task: Any, judge: Any = None, others: Any = None) -> float:
        return 1.0

    agent.__annotations__ |= {"judge": annotation, "others": "dict[str, LLM] | None"}
    assert lrl.rollout(agent)._injected == {"judge": "judge"}


def test_a_parameter_takes_the_model_of_its_name_or_its_default_or_is_an_error_before_the_run() -> None:
    seen: list[Any] = []

    @lrl.rollout
    def agent(task: Any, judge: lrl.LLM, customer: lrl.LLM | None = None, critic: "lrl.LLM | None" = None) -> float:
        seen.append((judge.model, customer, critic and critic.model))
        return 1.0

    named = {name: RESOURCE | {"model": name} for name in ("judge", "critic")}
    run_agent(agent, claim(**named))
    run_agent(agent, claim(judge=named["judge"]))
    assert seen == [("judge", None, "critic"), ("judge", None, None)]
    backends = {"judge": {"kind": "openai", "url": "http://127.0.0.1:9/v1", "remote_model": "m"}}
    agent.check_resources(lrl.PPO({"gateway": {"backends": backends}}).resources)
    with pytest.raises(AgentSignature, match=r"parameter 'judge'; this run publishes .'main_llm'.: name one in"):
        lrl.Trainer(agent).fit(lrl.PPO(), [1])


class Calls:
    def __call__(self, task: Any) -> float:
        return 1.0


class Needy(lrl.Agent):
    def __init__(self, key: str) -> None:
        self.key = key


class Yielding(lrl.Agent):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> Iterator[float]:
        yield 1.0


def yielding(task: Any) -> Iterator[float]:
    yield 1.0


async def yielding_later(task: Any) -> AsyncIterator[float]:
    yield 1.0


def by_keyword(*, task: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        (Calls, "Calls is a class: give an object of it, which is called with a task"),
        (Needy, "Needy is a class that cannot be made without arguments .*'key'.: give an object of it"),
        (by_keyword, "by_keyword takes no task: its first parameter is the task, given by position"),
        (Yielding, "Yielding.rollout yields: an agent returns its reward"),
        (yielding, "yielding yields: an agent returns its reward"),
        (yielding_later, "yielding_later yields: an agent returns its reward"),
        (lambda **task: 1.0, "takes no task: its first parameter is the task, given by position"),
    ],
)
def test_what_cannot_be_called_with_a_task_is_refused(agent: Any, problem: str) -> None:
    with pytest.raises(AgentSignature, match=problem):
        as_agent(agent)
    as_agent(Calls())
