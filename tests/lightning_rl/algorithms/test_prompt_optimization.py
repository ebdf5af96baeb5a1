"""Prompts that an agent takes by name are improved by what its rollouts were rewarded with."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from gepa.strategies.instruction_proposal import InstructionProposalSignature

import lightning_rl as lrl
from lightning_rl.agents.agent import AgentSignature
from lightning_rl.algorithms.prompt_optimization import NothingMeasured, _Reflections, _Search, places
from lightning_rl.config import ConfigError
from lightning_rl.store.contract import Rollout
from lightning_rl.store.sql import SqlStore
from tests.proxy.engines.service import running

TASKS = [{"number": number} for number in range(6)]
PROMPT = {"prompt_template": "Count to {number}."}


def agent(task: dict[str, int], llm: lrl.LLM, prompt_template: lrl.PromptTemplate) -> dict[str, float]:
    """Rewarded by how politely it was asked, if it asks at all."""
    text = prompt_template.format(number=task["number"])
    if "now" in text:
        raise RuntimeError("no haste")
    chat: Any = [{"role": "user", "content": text}]
    llm.openai().chat.completions.create(model=llm.model, messages=chat, max_tokens=4)
    return {"reward": text.lower().count("please") / 4, "words": float(len(text.split()))}


class Reflects:
    """A scripted reflection model, and what it was asked."""

    def __init__(self, *prompts: str) -> None:
        self.answers: Iterator[str] = iter(prompts)
        self.asked: list[str] = []

    def __call__(self, text: str) -> str:
        self.asked.append(text)
        return f"Here it is:\n```\n{next(self.answers)}\n```"


def rollouts_of(run_dir: Path) -> list[Rollout]:
    store = SqlStore(f"sqlite:///{run_dir}/store.db")
    rollouts, _ = store.page(limit=1000)
    store.close()
    return rollouts


def search(reflect: Callable[[str], str], **how: Any) -> lrl.PromptOptimization:
    return lrl.PromptOptimization(PROMPT, reflect, **{"budget": 30, **how})


@pytest.mark.e2e
@pytest.mark.smoke
def test_the_best_prompt_is_found_and_each_step_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reflect = Reflects(
        "Please count.",  # lacks its place
        "Count to {number} now.",  # the agent fails
        "Count to {number}, please.",
        "Please count to {number}, please.",
        *["Count to {number}."] * 20,
    )
    found = search(reflect, seed=3)
    with caplog.at_level(logging.WARNING):
        lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(found, TASKS[:4], TASKS[4:])
    assert "a new prompt is left out: prompt_template: it lacks the places number" in caplog.text
    assert found.best == {"prompt_template": lrl.PromptTemplate("Please count to {number}, please.")}
    assert [(one.parents, one.reward) for one in found.candidates] == [([], 0.0), ([0], 0.25), ([1], 0.5)]
    assert [one.mean for one in found.evaluations] == [0.0, 0.5]
    kept = json.loads((tmp_path / "prompts.json").read_text())
    assert kept["best"] == {"prompt_template": "Please count to {number}, please."}
    assert len(kept["candidates"]) == 3

    # What the reflection model saw: the prompt, the conversation, the rewards, and the rule for places.
    assert all(
        part in reflect.asked[0] for part in ("Count to {number}.", "user: Count to ", '"reward": 0.0', "{number}.")
    )
    rollouts = rollouts_of(tmp_path)
    failed = [one for one in rollouts if one.status == "failed"]
    assert failed
    assert all(one.error is not None and "no haste" in one.error.message for one in failed)
    # No prompt was run twice on a task.
    assert len({(one.resources_id, one.group_id) for one in rollouts}) == len(rollouts)
    # Each prompt is a version of the run's resources, and says how it came about.
    assert len({one.resources_id for one in rollouts}) == 4


@pytest.mark.e2e
def test_a_search_that_was_stopped_takes_the_same_way_and_asks_nobody_twice(tmp_path: Path) -> None:
    prompts = ["Count to {number}, please.", "Please count to {number}, please.", *["Count to {number}."] * 20]

    class Stopped(Exception):
        pass

    class Stops(Reflects):
        def __call__(self, text: str) -> str:
            if len(self.asked) == 1:
                raise Stopped
            return super().__call__(text)

    with pytest.raises(Stopped):
        lrl.Trainer(agent, n_runners=4, run_dir=tmp_path / "stopped").fit(search(Stops(*prompts)), TASKS[:4], TASKS[4:])
    rest = Reflects(*prompts[1:])
    resumed = search(rest, resume=True)
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path / "stopped").fit(resumed, TASKS[:4], TASKS[4:])
    whole = Reflects(*prompts)
    unbroken = search(whole)
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path / "whole").fit(unbroken, TASKS[:4], TASKS[4:])
    assert resumed.candidates == unbroken.candidates
    assert len(rest.asked) == len(whole.asked) - 1
    assert len(rollouts_of(tmp_path / "stopped")) == len(rollouts_of(tmp_path / "whole"))


@pytest.mark.e2e
@pytest.mark.smoke
def test_an_outage_of_the_model_is_no_reward_and_is_made_up_for(tmp_path: Path) -> None:
    with running() as service:
        service.tokens = False
        down = False

        def reply(body: dict[str, Any]) -> str:
            if down:
                raise OSError("the service is away")
            return "one"

        service.reply = reply

        def reflect(text: str) -> str:
            nonlocal down
            down = True
            return "Count to {number}, please."

        def tried(reflection: Callable[[str], str], **how: Any) -> lrl.PromptOptimization:
            made = search(reflection, budget=12, batch_size=1, model="theirs", base_url=service.url, api_key="x", **how)
            lrl.Trainer(agent, n_runners=2, run_dir=tmp_path).fit(made, TASKS[:2])
            return made

        with pytest.raises(
            NothingMeasured, match=r"(?s)infrastructure ended all 1 rollouts of group train-.*runs them again"
        ):
            tried(reflect)
        down = False
        found = tried(Reflects(*["Please count to {number}, please."] * 9), resume=True)
        assert [one.reward for one in found.candidates] == sorted({one.reward for one in found.candidates})
        assert len(found.candidates) > 1


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        ("Here it is:\n```\nCount {number}\n```\nGood luck.", "Count {number}"),
        ("```text\nCount {number}\n```sql\nselect 1\n```\n```", "Count {number}\n```sql\nselect 1\n```"),
        ("Count {number} like\n```sql\nselect 1\n```\nplease", "Count {number} like\n```sql\nselect 1\n```\nplease"),
        ("Count {number}", "Count {number}"),
        ("Here it is:\n```plaintext\nCount {number}\n```\n", "Count {number}"),
        ("I kept {number}:\n ```yaml\nCount {number}\n```", "Count {number}"),
        ("Count {number} like\n```sql\nselect 1\n```", "Count {number} like\n```sql\nselect 1\n```"),
        ("Count {{ number }} like\n```\n1\n```", "Count {{ number }} like\n```\n1\n```"),
        ("```Markdown\nCount {number}\n```", "Count {number}"),
        ("```jinja2\nCount {number}\n```", "Count {number}"),
    ],
)
def test_a_prompt_may_show_code(answer: str, prompt: str, tmp_path: Path) -> None:
    reflections = _Reflections(lambda _: answer, tmp_path / "reflections.jsonl")
    heard = _Search(search(Reflects()), reflections).reflect("better?")
    assert InstructionProposalSignature.output_extractor(heard)["new_instruction"] == prompt


def test_what_the_reflection_model_answered_is_heard_again_in_its_order(tmp_path: Path) -> None:
    answers = iter(["one", "two", "three"])
    for heard in (["one", "two"], ["one", "two", "three"]):
        reflections = _Reflections(lambda _: next(answers), tmp_path / "reflections.jsonl")
        assert [reflections("better?") for _ in heard] == heard


@pytest.mark.parametrize(
    ("prompt", "asked", "not_asked"),
    [
        (lrl.PromptTemplate("{a} of {b}"), ["as they are written: {a}, {b}. ", "Other braces must be doubled."], []),
        (lrl.PromptTemplate("{{ a }}", engine="jinja"), ["as they are written: {{ a }}. "], ["Other braces"]),
        (lrl.PromptTemplate("nothing"), ["Other braces must be doubled."], ["must hold"]),
    ],
)
def test_the_reflection_model_is_told_which_places_to_keep(
    prompt: lrl.PromptTemplate, asked: list[str], not_asked: list[str]
) -> None:
    made = lrl.PromptOptimization({"p": prompt}, Reflects(), budget=30)
    said = made._instruction("p")
    assert all(part in said for part in asked)
    assert not any(part in said for part in not_asked)
    assert made.unfit("p", prompt.template) is None


def test_a_reflection_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    reflections = _Reflections(cast(Any, lambda prompt: None), tmp_path / "reflections.jsonl")
    search = _Search(cast(Any, None), reflections)
    with pytest.raises(TypeError, match="the reflection function gave a NoneType; it must give the answer's text"):
        search.reflect("better?")
    assert isinstance(search.failure, TypeError)
    assert not (tmp_path / "reflections.jsonl").exists()


def test_a_budget_for_no_round_and_no_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="used up before a prompt was tried: 2 validation tasks and a round of 3"):
        search(Reflects(), budget=7).prepare(TASKS[:4], TASKS[4:])
    assert search(Reflects(), budget=8).prepare(TASKS[:4], TASKS[4:]) == (TASKS[:4], TASKS[4:])
    with pytest.raises(ValueError, match="batch_size is 0; a round takes at least one task"):
        search(Reflects(), batch_size=0)
    with pytest.raises(ConfigError, match="no training tasks"):
        search(Reflects()).prepare([], TASKS)
    with pytest.raises(TypeError, match=r"prompts are a dict by the names of the agent's parameters, .* got 'Count"):
        lrl.PromptOptimization("Count {table}", lambda text: text, budget=9)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no prompt to improve"):
        lrl.PromptOptimization({}, Reflects(), budget=9)


def test_an_agent_that_takes_another_prompt_is_told(tmp_path: Path) -> None:
    named = lrl.PromptOptimization({"greeting": "Hello"}, Reflects(), budget=30)
    with pytest.raises(AgentSignature, match="nothing fills parameter 'prompt_template'"):
        lrl.Trainer(agent, run_dir=tmp_path).fit(named, TASKS)


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (lrl.PromptTemplate("{a} and {b.c} {{not}} {d[0]!r:>3}"), {"a", "b", "d"}),
        (lrl.PromptTemplate("{{ a }} and {{b.c}} {not}", engine="jinja"), {"a", "b"}),
        (lrl.PromptTemplate("nothing"), set()),
    ],
)
def test_places_are_what_the_agent_fills(prompt: lrl.PromptTemplate, found: set[str]) -> None:
    assert places(prompt) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{number} is fine", None),
        ("none", "it lacks the places number"),
        ("{number} {other}", "nothing fills its places other"),
        ('{number} {"a": 1}', "its places cannot be read"),
        ("{number} {}", "its places cannot be read"),
    ],
)
def test_a_text_that_the_agent_could_not_fill_is_told(text: str, why: str | None) -> None:
    said = search(Reflects()).unfit("prompt_template", text)
    assert (said is None) if why is None else (said is not None and said.startswith(why))
