"""The examples run as their pages say: tools of three SDKs and of a config, recorded as their warm start foresaw; two
learn."""

import asyncio
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.calculator import agent as calculator
from examples.calculator import warm_start
from examples.calculator.data import make
from examples.calculator.train import train
from examples.calculator.warm_start import Conversation, encode, says
from examples.claude_loop.agent import claude_loop
from examples.describer_builder import train as game
from examples.describer_builder.warm_start import make_model as make_game_model
from examples.gsm8k import problems
from examples.gsm8k import warm_start as gsm8k
from examples.gsm8k.reward import compute_score
from examples.search import agent as search
from examples.search import corpus
from examples.search.train import teach as teach_search
from lightning_rl.agents.resources import LLM
from lightning_rl.config import compose
from lightning_rl.config.schema import TrainConfig
from lightning_rl.ppo_algorithm import PPO
from lightning_rl.store.contract import Rollout, RolloutTrace
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.tools import ResultLimits, ToolCall, TrajectoryTools
from lightning_rl.tools.config import load_tools
from lightning_rl.trainer import Trainer
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.trajectory import trajectory_of
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_proxy.rendering.load import load_renderer
from tests.proxy.engines.service import running

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "examples"
Configure = Callable[..., TrainConfig]  # of overrides


def traces(folder: Path) -> dict[str, RolloutTrace]:
    """What a run's store holds of every rollout."""
    store = SqlStore(f"sqlite:///{folder / 'store.db'}")
    rollouts, cursor = store.page(limit=1000)
    while cursor is not None:
        more, cursor = store.page(cursor=cursor, limit=1000)
        rollouts += more
    return store.traces([rollout.rollout_id for rollout in rollouts])


def recorded(folder: Path) -> list[tuple[Rollout, list[Call], list[dict[str, Any]]]]:
    """Every rollout of a run, its calls, and the attributes of their spans."""
    return [
        (
            trace.rollout,
            calls_of(trace.attempts[-1].spans),
            [dict(span.attributes) for span in trace.attempts[-1].spans if span.name == semconv.CALL_SPAN],
        )
        for trace in traces(folder).values()
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


@pytest.mark.parametrize(
    ("folder", "teach"),
    [(warm_start.TUTORIAL, warm_start.teach), (gsm8k.FOLDER / "checkpoint", gsm8k.teach)],
    ids=["calculator", "gsm8k"],
)
def test_what_the_teacher_writes_is_read_back_as_it_was_meant(
    folder: Path, teach: Callable[[random.Random], Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call in the warm start's ids is one that the gateway makes a tool call of."""
    monkeypatch.chdir(ROOT)
    renderer = load_renderer(folder, "auto", "")
    rng = random.Random(0)
    seen = set()
    for _ in range(20):
        conversation = teach(rng)
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


@pytest.fixture
def word_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """The config of the word problems as a checkout has it, without validation, and overridden as one says."""
    monkeypatch.chdir(ROOT)
    problems.write(tmp_path)
    own = [f"data.train_files={tmp_path / 'train.jsonl'}", "data.val_files=null", "trainer.logger=[jsonl]"]
    file = gsm8k.FOLDER / "config.yaml"
    return lambda *overrides: compose(file=file, command_line=[*own, *overrides], schema=TrainConfig)


def test_the_steps_of_a_problem_are_what_the_tools_of_the_config_say(word_problems: Configure) -> None:
    """And the calculator pays for each result of the solution once; nothing else is paid for."""
    tools = load_tools(word_problems().actor_rollout_ref.rollout.multi_turn)
    assert {type(tool).__name__ for tool in tools} == {"Calculator", "FunctionTool"}

    async def results(made: problems.Problem) -> list[tuple[str, str, float]]:
        kwargs = {n: of["create_kwargs"] for n, of in problems.task(made)["extra_info"]["tools_kwargs"].items()}
        calls = [ToolCall("1", step.tool, json.dumps(step.arguments)) for step in made.steps]
        asked = [*calls, calls[-1], ToolCall("2", "calculator", '{"sum": "2**9"}')]
        async with TrajectoryTools(tools, ResultLimits(), create_kwargs=kwargs) as opened:
            return [(found.name, str(found.content), found.reward) for found in await opened.run(asked)]

    rng, seen = random.Random(0), set()
    for _ in range(50):
        made = problems.problem(rng)
        *found, again, unreadable = asyncio.run(results(made))
        paid = {"calculator": 0.1, "pieces": -0.02}
        said = [(step.tool, str(step.result)) for step in made.steps]
        assert [(name, content) for name, content, _ in found] == said
        distinct = len({text for name, text in said if name == "calculator"})
        assert sum(reward for name, _, reward in found if name == "calculator") == pytest.approx(0.1 * distinct)
        assert {reward for name, _, reward in found if name == "pieces"} <= {paid["pieces"]}
        assert again == ("calculator", str(made.answer), 0.0)
        assert unreadable == ("calculator", "error", 0.0)
        assert made.answer >= 0
        seen |= {(len(made.steps), made.steps[0].tool)}
    assert seen == set(itertools.product((2, 3), paid))


@pytest.mark.parametrize(
    ("said", "score"),
    [("#### 17", 1.0), ("So it is 17.\n#### 17", 1.0), ("#### 1\n#### 17", 1.0), ("#### 17\n#### 1", 0.0), ("17", 0.0),
     ("#### 170", 0.0), ("#### -17", 0.0), ("", 0.0)],
)  # fmt: skip
def test_the_word_problems_reward_is_for_the_number_after_the_last_mark(said: str, score: float) -> None:
    assert compute_score("word_problems", said, "17", None) == score


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


@pytest.mark.e2e
@pytest.mark.long
def test_two_policies_win_the_game_more_often_than_one_can(tmp_path: Path) -> None:
    """One policy wins a third of the games at most: of a word and the next but one, it answers one as it must."""
    made = game.train(tmp_path / "run", "two", make_game_model(tmp_path / "model"), steps=32)
    won = [row["critic/score/mean"] for row in made.history if "critic/score/mean" in row]
    assert sum(won[-4:]) / 4 > 0.5


@pytest.mark.agents
def test_the_search_is_trained(tmp_path: Path) -> None:
    start = warm_start.make_model(tmp_path / "model", teacher=teach_search, steps=2)
    tasks = {name: tasks[:16] for name, tasks in corpus.make().items()}
    train(tmp_path / "run", start, agent=search.search_agent, tasks=tasks, steps=1)
    for rollout, calls, _ in recorded(tmp_path / "run"):
        assert calls[0].prompt_ids == prompt(rollout.task["question"], search.TOOLS)


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.agents
@pytest.mark.timeout(300)
def test_word_problems_are_trained_with_the_rewards_of_both_tools(word_problems: Configure, tmp_path: Path) -> None:
    """No agent: the loop asks, runs the tools of both registries, and credit counts what they gave."""
    run, size = tmp_path / "run", ["data.train_batch_size=8", "actor_rollout_ref.rollout.n=4"]
    Trainer(run_dir=run).fit(PPO(word_problems(*size, "trainer.total_training_steps=2")))
    given: Counter[str] = Counter()
    of_rollouts = traces(run)
    for step in step_record.read_all(run):
        for rollout in step.rollouts:
            found = trajectory_of(of_rollouts[rollout.rollout_id], agent_failure=None)
            to_go = found.rewards.final or 0.0
            for node in sorted(found.forest.nodes.values(), key=lambda node: -node.call.number):
                of_call = found.rewards.of_calls.get(node.call.call_id, {})
                given.update(name for name, value in of_call.items() if value)
                to_go += sum(of_call.values())
                assert rollout.calls[node.call.call_id].credit == pytest.approx(to_go)
    assert given.keys() == {"calculator", "pieces"}
    assert min(given.values()) > 5
    *_, last = read(run / "metrics.jsonl")
    assert last["rollouts/agent_failed"] == 0
    assert last["tokens/received"] == last["tokens/trained"] > 0
    assert len(of_rollouts) == 64


@pytest.mark.agents
@pytest.mark.timeout(900)
def test_the_loop_of_tools_learns_to_finish_word_problems(word_problems: Configure, tmp_path: Path) -> None:
    Trainer(run_dir=tmp_path / "run").fit(PPO(word_problems("trainer.total_training_steps=12")))
    rewards = [row["critic/score/mean"] for row in read(tmp_path / "run" / "metrics.jsonl")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1


@pytest.mark.agents
def test_the_word_problems_checkpoint_is_made_by_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenizer, of which every prompt is made, is the one that is committed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gsm8k, "CONVERSATIONS", 200)
    gsm8k.main(tmp_path / "made", steps=2)
    kept = gsm8k.FOLDER / "checkpoint"
    assert {file.name for file in (tmp_path / "made").iterdir()} == {file.name for file in kept.iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "made" / name).read_text() == (kept / name).read_text()


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_shows_the_code_that_there_is(page: Path) -> None:
    """Code in the pages is cut out of the examples' own files."""
    root = ROOT / "examples" / page.stem
    code = "\n".join(file.read_text() for file in sorted(root.glob("*.py")))
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        assert block in code
