"""Agent-lightning's names: what they do here, and what is said of those that there are not."""

import asyncio
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import cloudpickle
import httpx
import pytest

import lightning_rl as agl
from lightning_rl.agents.agent import AgentSignature, as_agent, run_agent
from lightning_rl.compat.agent_lightning import agent_match_of
from tests.lightning_rl.agents.test_agent import claim

Task = dict[str, int]


class Plain(agl.LitAgent[Task]):
    def __init__(self, factor: float) -> None:  # does not call ours
        self.factor = factor

    def rollout(self, task: Task, resources: agl.NamedResources, rollout: agl.Rollout) -> float | None:
        assert rollout.input is task is rollout.task  # type: ignore[attr-defined]
        return self.factor * task["n"]


class Async(agl.LitAgent[Task]):
    async def rollout_async(self, task: Task, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        return float(task["n"])


class TwoAsync(Async):
    def __init__(self, trained_agents: str | None = None) -> None:
        super().__init__(trained_agents=trained_agents)

    async def training_rollout_async(self, task: Task, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        return 10.0 * await self.rollout_async(task, resources, rollout)


class Validates(Plain):
    def validation_rollout(self, task: Task, resources: Mapping[str, Any], rollout: Any) -> float:
        return -1.0


@pytest.mark.parametrize(
    ("agent", "train", "val"),
    [(Plain(2.0), 4.0, 4.0), (Async, 2.0, 2.0), (TwoAsync, 20.0, 2.0), (Validates(2.0), 4.0, -1.0)],
    ids=["rollout", "rollout_async", "training_rollout_async", "validation_rollout"],
)
def test_the_method_of_the_mode_is_run(agent: Any, train: float, val: float) -> None:
    sent = cloudpickle.loads(cloudpickle.dumps(as_agent(agent)))
    assert run_agent(sent, claim()) == {"reward": train}
    assert run_agent(sent, claim("val")) == {"reward": val}


def test_a_class_with_methods_of_both_kinds_is_refused_when_it_is_defined() -> None:
    with pytest.raises(AgentSignature, match="Mixed defines validation_rollout and rollout_async: give all"):

        class Mixed(agl.LitAgent[Task]):
            def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
                return 0.0

            async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
                return 0.0


def test_a_class_without_a_rollout_says_which_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="LitAgent defines no rollout"):
        run_agent(agl.LitAgent(), claim())

    class OnlyTrains(agl.LitAgent[Task]):
        async def training_rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            return 0.0

    with pytest.raises(NotImplementedError, match="OnlyTrains defines no rollout_async"):
        run_agent(OnlyTrains(), claim("val"))


def test_who_is_trained_is_said_by_the_configuration() -> None:
    assert TwoAsync(trained_agents=None) is not None
    with pytest.raises(AgentSignature, match=r"algorithm\.train_agents='write'"):
        TwoAsync(trained_agents="write")


def test_there_is_no_callback_to_attach() -> None:
    handler = Plain(1.0).tracer.get_langchain_handler()  # type: ignore[func-returns-value]
    assert handler is None


def test_the_model_is_found_by_rollout_and_attempt() -> None:
    seen: list[Any] = []

    @agl.rollout
    def agent(task: Any, llm: agl.LLM, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        main = cast(agl.ProxyLLM, resources["main_llm"])
        attempt = rollout.attempt  # type: ignore[attr-defined]
        seen.extend([main.get_base_url(rollout.rollout_id, attempt.attempt_id), llm.endpoint, main])
        return 1.0

    run_agent(agent, claim())
    assert seen[0] == seen[1] == "http://x/key/key/v1"
    for rollout_id, attempt_id in (("r1", "a2"), ("r2", "a1"), ("r1", "a")):
        with pytest.raises(ValueError, match="is not the one that runs here"):
            seen[2].get_base_url(rollout_id, attempt_id)


def test_an_endpoint_holds_a_key_of_any_letters() -> None:
    key = "lrl-attempt:r:a:1?#@%"
    sent: list[httpx.Request] = []
    transport = httpx.MockTransport(lambda request: sent.append(request) or httpx.Response(200))  # type: ignore[func-returns-value]
    llm = agl.LLM(model="m", base_url="http://x/rollout/r/attempt/a/v1", api_key=key)
    with httpx.Client(transport=transport) as client:
        client.get(llm.endpoint + "/models", headers={"authorization": "Bearer token-abc123"})
    [request] = sent
    assert (request.url.host, request.url.path) == ("x", f"/key/{key}/v1/models")


def test_an_endpoint_elsewhere_is_the_url_that_it_was_given() -> None:
    assert agl.LLM(endpoint="http://x/v1", model="m", api_key="sk").endpoint == "http://x/v1"


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ({"tracer": object()}, "the gateway records the calls"),
        ({"store": object()}, r"LightningStoreClient"),
        ({"n_workers": 3}, "n_runners"),
        ({"initial_resources": {}}, r"gateway\.backends"),
        ({"n_runner": 3}, "no argument 'n_runner'"),
    ],
)
def test_arguments_of_its_trainer_say_what_to_write_instead(argument: Any, instead: str) -> None:
    with pytest.raises(TypeError, match=instead):
        agl.Trainer(algorithm=agl.Baseline(), **argument)


def test_an_argument_that_is_not_given_is_none() -> None:
    assert agl.Trainer(algorithm=agl.Baseline(), n_runners=4, store=None, tracer=None).n_runners == 4


def test_the_async_methods_can_be_called_as_they_are() -> None:
    assert asyncio.run(TwoAsync().validation_rollout_async({"n": 3}, {}, None)) == 3.0  # type: ignore[arg-type]


def test_what_is_logged_goes_to_the_file_though_logging_was_set_up_before(tmp_path: Path) -> None:
    loggers = [logging.getLogger(name) for name in (None, "lightning_rl", "lightning_rl_proxy", "mine")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    try:
        for _ in range(2):
            agl.setup_logging("INFO", apply_to=["mine", "agentlightning.x"], files=tmp_path / "run.log")
        logging.getLogger("lightning_rl.x").info("one")
        logging.getLogger("mine").info("two")
        assert [line.rpartition(" ")[2] for line in (tmp_path / "run.log").read_text().splitlines()] == ["one", "two"]
        with pytest.raises(TypeError, match="takes one file for all that is logged"):
            agl.setup_logging(files={"mine": "x"})  # type: ignore[arg-type]
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers = handlers


def test_an_expression_may_begin_with_its_flags() -> None:
    match = agent_match_of({"agent_match": "(?i)writer"})
    assert match is not None
    assert [bool(re.fullmatch(match, name)) for name in ("The Writer", "reader")] == [True, False]
