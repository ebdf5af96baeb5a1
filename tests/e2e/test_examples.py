"""The examples run as their pages say: tools of three SDKs, recorded as their warm start foresaw; one learns."""

import asyncio
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from examples.calculator import agent as calculator
from examples.calculator import warm_start
from examples.calculator.data import make
from examples.calculator.train import train
from examples.calculator.warm_start import Conversation, encode, says
from examples.claude_loop.agent import claude_loop
from examples.search import agent as search
from examples.search import corpus
from examples.search.train import teach as teach_search
from lightning_rl.resources import LLM
from lightning_rl.store.contract import Rollout
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_proxy.rendering import load_renderer
from tests.proxy.engines.service import running

PAGES = Path(__file__).parents[2] / "docs" / "examples"


def recorded(folder: Path) -> list[tuple[Rollout, list[Call], list[dict[str, Any]]]]:
    """Every rollout of a run, its calls, and the attributes of their spans."""
    store = SqlStore(f"sqlite:///{folder / 'store.db'}")
    rollouts, cursor = store.page(limit=1000)
    while cursor is not None:
        more, cursor = store.page(cursor=cursor, limit=1000)
        rollouts += more
    traces = store.traces([rollout.rollout_id for rollout in rollouts])
    return [
        (
            trace.rollout,
            calls_of(trace.attempts[-1].spans),
            [dict(span.attributes) for span in trace.attempts[-1].spans],
        )
        for trace in traces.values()
    ]


def prompt(question: str, tools: list[Any]) -> list[int]:
    """The ids that the warm start has of a first prompt."""
    renderer = load_renderer(warm_start.TUTORIAL, "auto", "")
    example = encode(renderer, Conversation([{"role": "user", "content": question}, says("1")], tools))
    return example.ids[: len(example.ids) - sum(example.mask)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [('{"sum": "37+22"}', "59"), ('{"sum": "22-37"}', "-15"), ('{"sum": "2**9"}', "error"), ('{"sum": 3}', "error"),
     ("{}", "error"), ("[1]", "error"), ("{", "error"), ('{"sum": "1+1; import os"}', "error")],
)  # fmt: skip
def test_the_calculator_takes_sums_and_nothing_else(arguments: str, told: str) -> None:
    assert calculator.calculate_json(arguments) == told


def test_held_out_sums_are_answered_by_the_calculator() -> None:
    for task in make()["heldout"]:
        assert calculator.calculate({"sum": task["sum"]}) == task["answer"]
        assert calculator.reward(task, f" {task['answer']}\n") == 1.0
        assert calculator.reward(task, f"{task['answer']}0") == 0.0


def test_what_the_teacher_writes_is_read_back_as_it_was_meant() -> None:
    """A call in the warm start's ids is one that the gateway makes a tool call of."""
    renderer = load_renderer(warm_start.TUTORIAL, "auto", "")
    rng = random.Random(0)
    seen = set()
    for _ in range(20):
        conversation = warm_start.teach(rng)
        example = encode(renderer, conversation)
        starts = [i for i in range(1, len(example.mask)) if example.mask[i] and not example.mask[i - 1]]
        for start, message in zip(starts, [m for m in conversation.messages if m["role"] == "assistant"], strict=True):
            end = example.mask.index(0, start) if 0 in example.mask[start:] else len(example.mask)
            ids = example.ids[start:end]
            answer = renderer.parse("c", example.ids[:start], ids, None, "stop", list(conversation.tools))
            assert answer.content == message["content"]
            meant = [call["function"] for call in message.get("tool_calls", [])]
            found = [call["function"] for call in answer.tool_calls]
            assert [(one["name"], json.loads(one["arguments"])) for one in found] == [
                (one["name"], one["arguments"]) for one in meant
            ]
            seen.add(len(found))
    assert seen == {0, 1}


def test_the_search_finds_the_document_with_the_rarest_words() -> None:
    documents = ["anna lives in rome", "ben lives in rome", "rome is known for shoes"]
    assert search.best("anna", documents) == documents[0]
    assert search.best("Ben lives", documents) == documents[1]
    assert search.best("rome known", documents) == documents[2]
    assert search.best("oslo", documents) == "nothing"
    assert search.find('{"q": "ben"}', documents) == documents[1]
    assert search.find('{"q": 1}', documents) == search.find("{", documents) == "error"


def test_every_question_of_the_corpora_is_answered_by_two_searches_at_most() -> None:
    for task in corpus.make()["heldout"]:
        documents = corpus.make_corpus(task["corpus"]).documents
        name = next(word for word in task["question"].rstrip("?").split() if word in corpus.NAMES)
        town = search.best(name, documents).split()[-1]
        answers = {town, search.best(f"{town} known", documents).split()[-1]}
        assert task["answer"] in answers


def test_the_searching_teacher_is_right_more_often_than_not() -> None:
    rng = random.Random(0)
    last = [teach_search(rng).messages[-1]["content"] for _ in range(50)]
    assert {said in corpus.TOWNS for said in last} == {True, False}


def scripted(*tool_calls: tuple[str, str]) -> list[dict[str, Any]]:
    """Answers of a service, each calling one tool."""
    return [
        {"content": "", "tool_calls": [{"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}}]}
        for i, (n, a) in enumerate(tool_calls)
    ]


def test_the_search_agent_searches_until_it_answers() -> None:
    task = next(task for task in corpus.make()["train"] if task["question"].startswith("What"))
    documents = corpus.make_corpus(task["corpus"]).documents
    name = task["question"].rstrip("?").split()[-2]
    town = search.best(name, documents).split()[-1]
    with running() as service:
        service.tokens = False
        service.script.extend(
            [*scripted(("find", json.dumps({"q": name})), ("find", json.dumps({"q": f"{town} known"}))), task["answer"]]
        )
        llm = LLM(model="m", base_url=service.url, api_key="k")
        assert search.search_agent(task, llm) == 1.0
    results = [message["content"] for message in service.requests[-1]["messages"] if message["role"] == "tool"]
    assert results == [search.best(name, documents), search.best(f"{town} known", documents)]


def test_the_desk_hands_over_with_the_tools_that_the_teacher_knows() -> None:
    pytest.importorskip("agents", reason="needs openai-agents")

    from examples.handoff.agent import handoff
    from examples.handoff.train import DESK_TOOLS, RECKONER_TOOLS

    task = {"question": "What is 37 + 22?", "answer": "59"}
    with running() as service:
        service.tokens = False
        service.script.extend([*scripted(("transfer_to_reckoner", "{}"), ("calc", '{"sum": "37+22"}')), "59"])
        llm = LLM(model="m", base_url=service.url, api_key="k", anthropic_base_url=service.url.removesuffix("/v1"))
        object.__setattr__(llm, "for_agent", lambda name: llm)
        assert asyncio.run(handoff.function(task, llm)) == 1.0
    assert [request["tools"] for request in service.requests] == [DESK_TOOLS, RECKONER_TOOLS, RECKONER_TOOLS]
    assert service.requests[-1]["messages"][-1]["content"] == "59"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_start.make_model(tmp_path_factory.mktemp("examples") / "model")


@pytest.mark.agents
@pytest.mark.timeout(900)
def test_the_agent_learns_to_use_its_calculator(model: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", model, steps=8)
    alone: dict[str, list[bool]] = {"1": [], "8": []}
    for rollout, calls, spans in recorded(tmp_path / "run"):
        assert calls[0].prompt_ids == prompt(rollout.task["question"], calculator.TOOLS)
        step = rollout.rollout_id.split("-")[2]
        if rollout.mode == "train" and step in alone:
            alone[step].append("tool_call" not in json.dumps(spans[0][semconv.OUTPUT_MESSAGES]))
    before, after = (sum(found) / len(found) for found in alone.values())
    assert before > 0.2
    assert after < before / 2, "it does without the calculator as often as before"


@pytest.mark.agents
@pytest.mark.timeout(900)
def test_anthropics_tools_are_the_same_tokens(model: Path, tmp_path: Path) -> None:
    """The loop of Anthropic's SDK is recorded token by token as the one of OpenAI's, so the same model serves it."""
    tasks = make()
    train(tmp_path / "run", model, agent=claude_loop, tasks={**tasks, "heldout": tasks["heldout"][:8]}, steps=1)
    used = 0
    for rollout, calls, spans in recorded(tmp_path / "run"):
        assert {span[semconv.DIALECT] for span in spans} == {"messages"}
        assert calls[0].prompt_ids == prompt(rollout.task["question"], calculator.TOOLS)
        for earlier, later in itertools.pairwise(calls):
            assert later.parent_id == earlier.call_id, "a tool's result continues the call that asked for it"
            used += 1
    assert used > 10


@pytest.mark.agents
def test_the_search_is_trained(tmp_path: Path) -> None:
    start = warm_start.make_model(tmp_path / "model", teacher=teach_search, steps=2)
    tasks = {name: tasks[:16] for name, tasks in corpus.make().items()}
    train(tmp_path / "run", start, agent=search.search_agent, tasks=tasks, steps=1)
    for rollout, calls, _ in recorded(tmp_path / "run"):
        assert calls[0].prompt_ids == prompt(rollout.task["question"], search.TOOLS)


@pytest.mark.agents
def test_the_handoff_is_trained_and_each_call_has_its_agents_name(tmp_path: Path) -> None:
    pytest.importorskip("agents", reason="needs openai-agents")
    from examples.handoff.agent import handoff
    from examples.handoff.train import DESK_TOOLS, teach

    start = warm_start.make_model(tmp_path / "model", teacher=teach, steps=2)
    tasks = {name: tasks[:16] for name, tasks in make().items()}
    train(tmp_path / "run", start, agent=handoff, tasks=tasks, steps=1)
    for rollout, calls, _ in recorded(tmp_path / "run"):
        assert rollout.status == "succeeded"
        assert calls[0].agent == "desk"
        assert {call.agent for call in calls} <= {"desk", "reckoner"}
        assert calls[0].prompt_ids == prompt(rollout.task["question"], DESK_TOOLS)


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_shows_the_code_that_there_is(page: Path) -> None:
    """Code in the pages is cut out of the examples' own files."""
    root = Path(__file__).parents[2] / "examples" / page.stem
    code = "\n".join(file.read_text() for file in sorted(root.glob("*.py")))
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        assert block in code
