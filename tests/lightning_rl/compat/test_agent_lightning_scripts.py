"""Scripts of Agent-lightning run with the import changed: arguments of its Trainer, hooks, rewards, and every name."""

import asyncio
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

import lightning_rl as agl
from lightning_rl.agents.agent import as_agent, run_agent
from lightning_rl.agents.emitted import Emitted
from lightning_rl.compat.agent_lightning import hooked
from lightning_rl.compat.agent_lightning_names import INSTEAD
from lightning_rl.config import ConfigError
from lightning_rl.viewer import run_folder
from tests.lightning_rl.agents.test_agent import claim

NAMES = json.loads((Path(__file__).parents[2] / "data/agent_lightning_names.json").read_text())
SCRIPTS = json.loads((Path(__file__).parents[2] / "data/agent_lightning_scripts.json").read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_scripts_config_composes_and_its_calls_are_taken_as_they_are_written(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, calls = SCRIPTS[script]["config"], SCRIPTS[script]["calls"]
    monkeypatch.setattr(logging.Logger, "setLevel", lambda *of: None)
    names: dict[str, Any] = {
        "agl": agl, "config": config, "algorithm": agl.VERL(config), "n_runners": 4, "store": None, "debug": True,
        "args": SimpleNamespace(debug=False), "tracer": agl.OtelTracer(), "adapter": agl.LlmProxyTraceToTriplet(),
        "external_store_address": "http://127.0.0.1:9",
    }  # fmt: skip
    monkeypatch.setenv("LIGHTNING_RL_ADMIN_KEY", "key")
    for active_agent in (None, "write"):
        for call in calls:
            eval(call, names | {"active_agent": active_agent})


def test_every_public_name_is_there_or_says_what_to_write_instead() -> None:
    names = {name for of_version in NAMES.values() for name in of_version}
    missing = {name for name in names if name not in agl.__all__}
    assert len(names) > 170
    assert missing == set(INSTEAD)
    for name in missing:
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': .+ \(docs/coming-from"):
            getattr(agl, name)
    for name in agl.__all__:
        assert getattr(agl, name) is not None


@pytest.mark.parametrize(
    "adapter",
    [{"agent_match": "write"}, agl.TracerTraceToTriplet(agent_match="write"), agl.LlmProxyTraceToTriplet("write")],
)
def test_an_adapter_says_whose_calls_are_trained(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = agl.VERL()
    trainer = agl.Trainer(algorithm=algorithm, n_runners=2, adapter=adapter, tracer=agl.OtelTracer(), store=None)
    monkeypatch.setattr(trainer, "_run", lambda *of: None)
    trainer.fit(lambda task, llm: 1.0, train_dataset=[1])
    pattern = str(algorithm.config.algorithm.train_agents)
    assert [bool(re.fullmatch(pattern, name)) for name in ("write", "rewrite", "check")] == [True, True, False]
    assert algorithm.rules.select is not None


def test_an_adapter_that_cannot_be_followed_is_an_error() -> None:
    with pytest.raises(TypeError, match="a reward names its call"):
        agl.Trainer(algorithm=agl.VERL(), adapter={"reward_match": "first_sibling"})
    with pytest.raises(TypeError, match="takes no adapter"):
        agl.Trainer(algorithm=agl.VERL(), adapter=object())
    with pytest.raises(TypeError, match="Baseline trains no agents"):
        agl.Trainer(algorithm=agl.Baseline(), adapter={"agent_match": "x"}).fit(lambda task, llm: 1.0, [1])
    other = agl.VERL({"algorithm": {"train_agents": "read"}})
    with pytest.raises(ConfigError, match="train_agents is 'read', and agent_match"):
        agl.Trainer(algorithm=other, adapter={"agent_match": "write"}).fit(lambda task, llm: 1.0, [1])
    agl.Trainer(algorithm=other, adapter={"agent_match": None})


def test_a_dataset_is_taken_before_the_files_that_the_configuration_names() -> None:
    algorithm = agl.VERL({"data": {"train_files": "missing.parquet", "val_files": "no.parquet", "train_batch_size": 2}})
    assert algorithm.prepare([1, 2], [3]) == ([1, 2], [3])


class Notes(agl.Hook):
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        self.seen.append(f"start {rollout.task}")

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        self.seen.append(f"trace {[span.name for span in tracer.get_last_trace()]}")
        raise LookupError("of the hook")

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        self.seen.append(f"end {[span.name for span in spans]}")


class OfAnotherRelease(agl.Hook):
    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any) -> None: ...  # type: ignore[override]

    def on_trace_start(self, **_: Any) -> None:  # type: ignore[override]
        raise LookupError("not async")


def plain(task: Any, llm: agl.LLM) -> float:
    agl.emit_message("hi")
    return 1.0


async def awaited(task: Any, llm: agl.LLM) -> float:
    await asyncio.sleep(0)
    return plain(task, llm)


def broken(task: Any, llm: agl.LLM) -> float:
    agl.emit_message("hi")
    raise ValueError("of the agent")


@pytest.mark.parametrize("function", [plain, awaited, broken])
def test_hooks_run_around_an_attempt_and_what_they_raise_is_logged(
    function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    notes = Notes()
    agent = hooked(as_agent(function), [OfAnotherRelease(), notes])
    assert cloudpickle.loads(cloudpickle.dumps(agent)) is not None
    if function is broken:
        with pytest.raises(ValueError, match="of the agent"):
            run_agent(agent, claim())
    else:
        assert run_agent(agent, claim()) == {"reward": 1.0}
    emitted = "['lightning_rl.message']"
    assert notes.seen == [f"start {claim().rollout.task}", f"trace {emitted}", f"end {emitted}"]
    assert "LookupError: of the hook" in caplog.text
    with pytest.raises(TypeError, match=r"hooks are of the class lrl\.Hook"):
        hooked(as_agent(plain), [object()])  # type: ignore[list-item]


def collected(say: Any) -> Emitted:
    emitted = Emitted("r1", "a1")
    with emitted.collecting():
        say()
    return emitted


def test_several_rewards_have_a_primary_one_and_attributes_link_one_to_its_call() -> None:
    both = collected(
        lambda: agl.emit_reward({"task": 1.0, "style": 0.5}, primary_key="task", attributes={"a": {"b": [1]}})
    )
    assert both.rewards == {"reward": 1.0, "style": 0.5}
    assert [span.attributes["a.b.0"] for span in both.spans] == [1, 1]  # type: ignore[index]
    link = agl.make_link_attributes({"gen_ai.response.id": "chatcmpl-1"}) | agl.make_tag_attributes(["fast"])
    linked = collected(lambda: agl.emit_reward(0.5, attributes=link))
    assert linked.rewards == {}
    assert [(each.value, each.call_id) for each in linked.call_rewards] == [(0.5, "chatcmpl-1")]
    for value, key, message in (
        ({"a": 1.0}, None, "name the final one"),
        ({"a": 1.0}, "b", "name the final one"),
        ({"a": "x"}, "a", "finite"),
        ({"a": 1.0, "reward": 2.0}, "a", "another one has that name"),
        (1.0, "a", "is for several rewards"),
    ):
        with pytest.raises(ValueError, match=message):
            agl.emit_reward(value, primary_key=key)  # type: ignore[arg-type]


def test_annotations_are_recorded_and_rewards_of_functions_are_emitted() -> None:
    seen = collected(lambda: agl.emit_annotation({"stage": {"name": "plan"}}))
    assert [span.name for span in seen.spans] == ["lightning_rl.object"]
    with pytest.raises(ValueError, match="use emit_reward"):
        agl.emit_annotation({"agentlightning.reward": [{"name": "primary", "value": 1.0}]})

    @agl.reward
    def graded(answer: str) -> float:
        return float(answer == "4")

    @agl.reward
    async def judged(answer: str) -> float:
        return 0.25

    assert collected(lambda: graded("4")).rewards == {"reward": 1.0}
    assert collected(lambda: asyncio.run(judged("4"))).rewards == {"reward": 0.25}


@pytest.mark.parametrize("decorate", [agl.llm_rollout, agl.llm_rollout(), agl.llm_rollout(strip_proxy=True)])
def test_a_function_of_an_llm_has_a_decorator_of_its_own(decorate: Any) -> None:
    assert run_agent(decorate(plain), claim()) == {"reward": 1.0}


def test_logging_is_set_up_for_us_and_for_named_loggers(tmp_path: Path) -> None:
    agl.setup_logging("DEBUG", apply_to=["agentlightning", "chartqa_agent"])
    try:
        assert [logging.getLogger(name).level for name in ("lightning_rl", "chartqa_agent")] == [logging.DEBUG] * 2
        assert agl.configure_logger("WARNING", "agentlightning.run").name == "lightning_rl.run"
    finally:
        for name in ("lightning_rl", "lightning_rl_proxy", "chartqa_agent", "lightning_rl.run"):
            logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.mark.e2e
def test_dev_takes_the_agent_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dev = agl.Trainer(algorithm=agl.VERL(), n_runners=1, hooks=Notes()).dev(plain, train_dataset=["a"], n_tasks=1)
    assert (len(dev.trajectories), run_folder.state(dev.run_dir)) == (1, "finished")
    with pytest.raises(TypeError, match="dev takes tasks"):
        agl.Trainer().dev(plain)
