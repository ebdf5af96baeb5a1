"""Several policies in one attempt: which of them answers a call, how it is sampled, and whose pause holds it up."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from lightning_rl_adapters import semconv
from lightning_rl_proxy.recording.ledger import AttemptInfo, AttemptPolicy
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.proxy.conftest import MODEL, MemoryLedger, ScriptedEngine, Served

POLICIES = (
    AttemptPolicy(name="planner", model=MODEL, agents="planner|plan_.*|exec.*", sampling={"temperature": 0.9}),
    AttemptPolicy(name="executor", model="executor-run7", agents="executor", sampling={"temperature": 0.4}),
)


class OfPolicies(MemoryLedger):
    """Every attempt has both policies."""

    async def attempt(self, rollout_id: str, attempt_id: str) -> AttemptInfo | None:
        return AttemptInfo(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            mode="train",
            open=attempt_id not in self.closed,
            sampling={"temperature": 0.9},
            seed_key=rollout_id,
            policy=MODEL,
            policies=POLICIES,
        )


@pytest.fixture
def several(served: Served, tokenizer: FastTokenizer) -> Served:
    """A gateway with engines of both policies, and one of a model that is none of them."""
    ledger = OfPolicies()
    served.ledger = served.gateway.attempts._ledger = served.gateway._recorder._ledger = ledger  # type: ignore[assignment]
    for model in ("executor-run7", "judge"):
        engine: Any = ScriptedEngine(tokenizer)
        engine.model = model
        served.run(_registered(served, engine))
    return served


def _registered(served: Served, engine: Any) -> Any:
    async def register() -> None:
        served.gateway.router.register(engine)

    return register


def say(served: Served, model: str, agent: str | None = None, attempt_id: str = "a1") -> str:
    client = openai.OpenAI(base_url=served.base_url("r1", attempt_id, agent), api_key=served.key("r1", attempt_id))
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "one"}])
    return answer.model


@pytest.mark.parametrize(
    ("model", "agent", "answers"),
    [
        pytest.param("gpt-4o", "executor", "executor-run7", id="the tag, whatever the name"),
        pytest.param("planner", "executor", "executor-run7", id="the tag against the name"),
        pytest.param("gpt-4o", "plan_writer", MODEL, id="a tag that matches"),
        pytest.param("gpt-4o", "executive", MODEL, id="a tag that is like another's name"),
        pytest.param("executor", "somebody", "executor-run7", id="the name, where the tag says nothing"),
        pytest.param("executor", None, "executor-run7", id="the name that the run has for it"),
        pytest.param("executor-run7", None, "executor-run7", id="the name that the engine has"),
        pytest.param("gpt-4o", None, MODEL, id="the first, where nothing is said"),
        pytest.param("gpt-4o", "plan", MODEL, id="a part of a tag is no match"),
        pytest.param("judge", "executor", "judge", id="another model by its name"),
    ],
)
def test_the_tag_decides_then_the_name_then_the_first(
    several: Served, model: str, agent: str | None, answers: str
) -> None:
    assert say(several, model, agent) == answers
    several.seal()
    [call] = several.ledger.calls()
    assert (call.model, call.agent) == (answers, agent)
    [span] = [span for span in several.ledger.spans if span.name == semconv.CALL_SPAN]
    assert span.attributes[semconv.REQUEST_MODEL] == model


def test_each_is_sampled_in_its_own_way(several: Served) -> None:
    for agent in ("planner", "executor"):
        say(several, "any", agent)
    several.seal()
    assert [call.temperature for call in several.ledger.calls()] == [0.9, 0.4]


def test_an_unknown_name_is_refused_where_that_is_asked_and_a_policys_own_is_known(several: Served) -> None:
    several.gateway.router._refuses_unknown = True
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4o'"):
        say(several, "gpt-4o", "executor")
    assert say(several, "executor") == "executor-run7"


def test_while_one_is_paused_the_others_answer(several: Served) -> None:
    several.run(lambda: several.gateway.pause("executor-run7"))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(say, several, "any", "executor", "a2")
        several.eventually(lambda: bool(several.gateway.state()["models"]["executor-run7"]["parked"]))
        assert say(several, "any", "planner") == MODEL
        several.run(lambda: several.gateway.resume("executor-run7", None))
        assert waiting.result(20) == "executor-run7"


def test_conversations_of_two_policies_are_two_trees(several: Served) -> None:
    """The same messages to another policy continue nothing: its tokens are not the other's."""
    for agent in ("planner", "executor"):
        client = openai.OpenAI(base_url=several.base_url(agent=agent), api_key=several.key())
        messages: list[Any] = [{"role": "user", "content": "one"}]
        first = client.chat.completions.create(model="any", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "two"}]
        client.chat.completions.create(model="any", messages=messages)
    several.seal()
    calls = several.ledger.calls()
    assert [call.model for call in calls] == [MODEL, MODEL, "executor-run7", "executor-run7"]
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, None, calls[2].call_id]
