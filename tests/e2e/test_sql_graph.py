"""The tutorial of `examples/sql_agent`: the graph's paths, its prompts, its training by name, and its page."""

import json
import os
import random
import re
import shlex
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from transformers import AutoTokenizer

from examples.sql_agent import graph_warm_start, report, warm_start
from examples.sql_agent.data import write_set
from examples.sql_agent.graph import query_in, sql_graph
from examples.sql_agent.graph_teacher import Teacher, missing
from examples.sql_agent.report import Habits, Turn
from examples.sql_agent.train_graph import Setting, reward, small, train
from lightning_rl_adapters import semconv
from lightning_rl_proxy.rendering.load import load_renderer
from tests.e2e.test_examples import recorded
from tests.proxy.engines.service import running

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sql_agent"
PAGE = ROOT / "docs" / "tutorials" / "sql_agent.md"
MODEL = graph_warm_start.OUT
NODES = ("write", "check", "rewrite")


class Scripted(BaseChatModel):
    """Answers with `script` in turn; `asked` has who asked what."""

    script: list[str]
    asked: list[tuple[str, str]] = []  # noqa: RUF012  # pydantic's, which copies it

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        [message] = messages
        self.asked.append((run_manager.metadata["langgraph_node"], message.text))
        answer = self.script[len(self.asked) - 1]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(answer))])


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Questions of databases that no set has, those with a value of a text column first."""
    made = write_set(tmp_path_factory.mktemp("databases"), "few", 5_000_000, 4, 18)
    return sorted(made, key=lambda task: "'" not in task["gold"])


def test_an_accepted_query_is_the_last(tasks: list[dict[str, str]]) -> None:
    task = tasks[0]
    model = Scripted(script=[task["gold"], "done"])
    state = sql_graph(model).invoke(task)
    assert state == {
        "schema": task["schema"],
        "question": task["question"],
        "database": task["database"],
        "query": task["gold"],
        "result": state["result"],
        "feedback": "done",
        "turn": 1,
    }
    assert reward(task, state) == 1.0
    asked = f"{task['schema']}\n{task['question']}"
    assert model.asked == [("write", asked), ("check", f"{asked}\n{task['gold']}\n{state['result']}\ndone?")]


def test_a_rejected_query_is_rewritten_with_what_the_check_said(tasks: list[dict[str, str]]) -> None:
    task = tasks[0]
    model = Scripted(script=["SELECT red", "no: WHERE", task["gold"], "done"])
    state = sql_graph(model).invoke(task)
    assert (state["query"], state["turn"], reward(task, state)) == (task["gold"], 2, 1.0)
    assert [node for node, _ in model.asked] == ["write", "check", "rewrite", "check"]
    error = "error: no such column: red"
    assert model.asked[2][1] == f"{task['schema']}\n{task['question']}\nSELECT red\n{error}\nno: WHERE"


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_no_more_queries_are_written_than_allowed_and_the_last_is_not_checked(
    turns: int, tasks: list[dict[str, str]]
) -> None:
    model = Scripted(script=["SELECT 1", "no", "SELECT 2", "no", "SELECT 3", "no"])
    state = sql_graph(model, turns=turns).invoke(tasks[0])
    assert (state["query"], state["turn"], reward(tasks[0], state)) == (f"SELECT {turns}", turns, 0.0)
    assert len(model.asked) == 2 * turns - 1


@pytest.mark.parametrize(
    ("answer", "query"),
    [
        (" SELECT 1 \n", "SELECT 1"),
        ("Here:\n```sql\nSELECT 1\nFROM a\n```\nas you asked", "SELECT 1\nFROM a"),
        ("```SQL\nSELECT 1\n```", "SELECT 1"),
        ("```sqlite\nSELECT 1\n```", "SELECT 1"),
        ("```\nSELECT 1\n```", "SELECT 1"),
        ("```sql\nSELECT 1\n```\nno, better\n```sql\nSELECT 2\n```", "SELECT 2"),
        ("```sql\nSELECT 1 -- and then it was cut", "SELECT 1 -- and then it was cut"),
        ("```python\n1\n```", "```python\n1\n```"),
        ("", ""),
    ],
)
def test_a_query_is_what_stands_in_the_last_fence(answer: str, query: str) -> None:
    assert query_in(answer) == query


def test_a_query_can_only_read(tasks: list[dict[str, str]]) -> None:
    task = tasks[0]
    before = Path(task["database"]).read_bytes()
    table = task["schema"].partition(":")[0]
    state = sql_graph(Scripted(script=[f"DELETE FROM {table}", "done"])).invoke(task)
    assert state["result"] == "error: not authorized"
    assert Path(task["database"]).read_bytes() == before


def test_each_node_may_have_a_model_of_its_own(tasks: list[dict[str, str]]) -> None:
    models = {node: Scripted(script=[said]) for node, said in zip(NODES, ("SELECT 1", "no", "SELECT 2"), strict=True)}
    assert sql_graph(models, turns=2).invoke(tasks[0])["query"] == "SELECT 2"
    assert [node for model in models.values() for node, _ in model.asked] == ["write", "check", "rewrite"]


def test_braces_in_what_stands_in_a_prompt_are_left_alone(tasks: list[dict[str, str]]) -> None:
    task = tasks[0] | {"question": "What is {query} of {0}?"}
    model = Scripted(script=["SELECT '{}'", "done"])
    sql_graph(model).invoke(task)
    assert [prompt.count("{query}") for _, prompt in model.asked] == [1, 1]


def test_the_graph_knows_nothing_of_training() -> None:
    look = "import sys, examples.sql_agent.graph; print([m for m in sys.modules if m.startswith('lightning_rl')])"
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The teacher, and the model that copies it.


def test_the_teachers_prompts_are_the_ids_that_the_gateway_makes(tasks: list[dict[str, str]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    mine, gateways = warm_start.make_renderer(tokenizer), load_renderer(MODEL, "auto", "")
    rng = random.Random(0)
    seen = Counter[str]()
    for task in tasks:
        teacher = Teacher(gold=task["gold"], rng=rng)
        sql_graph(teacher).invoke(task)
        for messages in teacher.said:
            ids, mask = warm_start.encode(mine, tokenizer, messages)
            asked = len(ids) - sum(mask)
            assert ids[:asked] == gateways.render(messages[:1], None)
            told = gateways.parse("c", ids[:asked], ids[asked:], None, "stop", [])
            assert told.content == messages[1]["content"]
            seen[messages[1]["content"].split()[0]] += 1
    assert set(seen) == {"SELECT", "done", "no:"}


@pytest.mark.parametrize(
    ("query", "gold", "says"),
    [
        ("SELECT a FROM b WHERE c='red'", "SELECT a FROM b WHERE c='RED'", "case"),
        ("SELECT a FROM b ORDER BY c", "SELECT a FROM b ORDER BY c DESC", "DESC"),
        ("SELECT a FROM b", "SELECT a FROM b ORDER BY c DESC", "ORDER BY"),
        ("SELECT sum(a) FROM b", "SELECT avg(a) FROM b", "avg"),
        ("SELECT count(*) FROM b WHERE c>=3", "SELECT count(*) FROM b WHERE c>3", ">"),
        ("SELECT id FROM b", "SELECT count(*) FROM b", "count"),
    ],
)
def test_the_teachers_check_names_what_is_missing(query: str, gold: str, says: str) -> None:
    assert missing(query, gold) == says


def test_the_checkpoint_is_the_quickstarts_in_all_but_its_weights() -> None:
    base = EXAMPLE / "checkpoint"
    assert {path.name for path in MODEL.iterdir()} == {path.name for path in base.iterdir()}
    for path in MODEL.glob("*.json"):
        assert path.read_text() == (base / path.name).read_text()
    weights = "model.safetensors"
    assert (MODEL / weights).stat().st_size == (base / weights).stat().st_size
    assert (MODEL / weights).read_bytes() != (base / weights).read_bytes()


# What the report counts.


def test_the_report_counts_what_each_node_did() -> None:
    habits = Habits()
    habits.add([Turn("write", "a", False, "done")])  # wrong, accepted
    habits.add([Turn("write", "a", True, "done")])
    habits.add([Turn("write", "a", False, "no"), Turn("rewrite", "b", True, "done")])  # mended
    habits.add([Turn("write", "a", True, "no"), Turn("rewrite", "b", False, "no"), Turn("rewrite", "c", False)])
    assert [(part, whole) for _, part, whole in habits.rows()] == [(2, 4), (2, 3), (2, 3), (1, 2), (0, 1), (2, 4)]
    assert habits + Habits() == habits
    assert all(part == whole == 0 for _, part, whole in Habits().rows())


# Whole runs.


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """The tutorial's setting with fewer questions, each asked less often."""
    setting = small(tmp_path_factory.mktemp("data"))
    config: dict[str, Any] = json.loads(json.dumps(setting.config))
    config["data"]["train_batch_size"] = config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 8
    config["actor_rollout_ref"]["rollout"]["n"] = 4
    config["trainer"]["test_freq"] = 1
    return replace(setting, tasks={name: tasks[:16] for name, tasks in setting.tasks.items()}, config=config)


@pytest.fixture(scope="module")
def run_dir(few: Setting, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step that trained `write` and `rewrite`."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(few, folder, agents="write|rewrite", steps=1)
    return folder


@pytest.mark.long
@pytest.mark.e2e
def test_only_the_named_nodes_are_trained_and_the_others_are_counted(run_dir: Path) -> None:
    sampled = Counter[tuple[str, bool]]()
    for rollout, calls, _ in recorded(run_dir):
        for call in calls:
            sampled[rollout.mode, call.agent in ("write", "rewrite")] += call.sampled_tokens
            assert call.agent in NODES
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert sampled["train", False] > 0
    assert last["tokens/trained"] == sampled["train", True]
    assert last["tokens/excluded/not_selected"] == sampled["train", False] + sampled["val", False]
    assert last["tokens/excluded/validation"] == sampled["val", True]
    assert last["tokens/received"] == sampled.total()


@pytest.mark.e2e
def test_each_call_is_a_tree_of_its_own_and_its_prompt_is_the_warm_starts(run_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    renderer = warm_start.make_renderer(tokenizer)
    for rollout, calls, spans in recorded(run_dir):
        assert rollout.status == "succeeded"
        told = {span[semconv.AGENT] for span in spans if semconv.AGENT in span}
        assert told <= set(NODES)
        script = [tokenizer.decode(call.response_ids, skip_special_tokens=True) for call in calls]
        replayed = Scripted(script=script)
        state = sql_graph(replayed).invoke(rollout.task)
        assert rollout.reward == reward(rollout.task, state)
        assert [node for node, _ in replayed.asked] == [call.agent for call in calls]
        for call, (_, prompt) in zip(calls, replayed.asked, strict=True):
            assert call.parent_id is None
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "done"}]
            ids, mask = warm_start.encode(renderer, tokenizer, messages)
            assert call.prompt_ids == ids[: len(ids) - sum(mask)]


@pytest.mark.e2e
def test_the_report_reads_the_run(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "learning.png"
    words = ["report", str(run_dir), "--picture", str(picture), "--transcript"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        report.main()
    printed = capsys.readouterr().out
    run = report.read_run(run_dir)
    assert (run.agents, run.seed, set(run.curve)) == ("write|rewrite", 0, {0, 1})
    assert report.habits_of(run.before).answered == round(run.curve[0] * 16)
    assert report.habits_of(run.after).answered == round(run.curve[1] * 16)
    assert f"| `write\\|rewrite` | 0 | {run.curve[0]:.3f} | {run.curve[1]:.3f} |" in printed
    assert picture.stat().st_size > 5000


@pytest.mark.agents
@pytest.mark.timeout(1800)
def test_the_graph_learns_and_its_check_too(tmp_path: Path) -> None:
    train(small(tmp_path / "data"), tmp_path / "run", steps=16)
    run = report.read_run(tmp_path / "run")
    before, after = report.habits_of(run.before), report.habits_of(run.after)
    assert 0.3 < run.curve[0] < 0.6
    assert run.curve[16] > run.curve[0] + 0.2
    assert after.wrong_rejected / after.wrong_checked > before.wrong_rejected / before.wrong_checked + 0.2


# The page.


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's scripts."""
    folder = tmp_path_factory.mktemp("page")
    for block in blocks("python"):
        if found := re.match(r"# (\w+\.py)\n", block):
            (folder / found[1]).write_text(block)
    return folder


def run_in(place: Path, script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, script], cwd=place, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_shows_the_code_that_there_is(place: Path) -> None:
    """Each block of Python is a script that the tests run, or is cut out of the example's own files."""
    code = "\n".join(file.read_text() for file in sorted(EXAMPLE.glob("*.py")))
    pieces = [block for block in blocks("python") if not block.startswith("# ")]
    assert len(pieces) >= 3
    for piece in pieces:
        assert piece in code
    assert {script.name for script in place.glob("*.py")} == {"look.py", "production.py", "chat_openai.py"}


@pytest.mark.long
@pytest.mark.e2e
def test_the_page_runs_the_commands_that_there_are() -> None:
    """What follows `python -m` takes the options that the page gives it."""
    given: dict[str, set[str]] = {}
    for line in "".join(blocks("sh")).splitlines():
        words = shlex.split(line)
        if words[:2] == ["python", "-m"]:
            given.setdefault(words[2], set()).update(word for word in words if word.startswith("--"))
    for module, options in given.items():
        asked = [sys.executable, "-m", module, "--help"]
        told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert [option for option in options if option not in told] == []


@pytest.mark.long
def test_the_graph_asks_another_service_in_production(place: Path, tmp_path: Path) -> None:
    database = place / "shoes.sqlite"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE shoes (id INTEGER PRIMARY KEY, cost, size, status, country)")
        connection.execute("INSERT INTO shoes VALUES (1, 9, 1, 'open', 'peru')")
        connection.commit()
    query = "SELECT count(*) FROM shoes WHERE cost<28"
    with running() as service:
        service.tokens = False
        service.script.extend(["SELECT shoes", "no: count", query, "done"])
        script = (place / "production.py").read_text().replace("http://127.0.0.1:8000/v1", service.url)
        (place / "here.py").write_text(script)
        assert run_in(place, "here.py") == f"{query}\n1\n"
        assert len(service.requests) == 4
        assert service.keys[0] == "Bearer sk-..."


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_look_before_training_shows_each_nodes_calls(place: Path) -> None:
    printed = run_in(place, "look.py")
    assert "agent write: finish reason stop" in printed
    assert "agent check: finish reason stop" in printed
    assert re.search(r"row 1: \d+ tokens, \d+ to be trained, exact: true", printed)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(900)
def test_chat_openai_names_its_nodes_by_their_doors(place: Path, few: Setting) -> None:
    tasks = list(few.tasks["train"][:4])
    trial = f"\n\nlrl.Trainer(sql_agent).dev({tasks!r}, n_tasks=4, model={str(MODEL)!r})\n"
    (place / "trial.py").write_text((place / "chat_openai.py").read_text() + trial)
    printed = run_in(place, "trial.py")
    assert "error" not in re.findall(r"^  (\w+)", printed, re.MULTILINE)
    named = re.findall(r"^    call \d+, agent (\w+): finish reason", printed, re.MULTILINE)
    assert {"write", "check"} <= set(named) <= set(NODES)
    assert len(named) == len(re.findall(r"^    call \d+.*finish reason", printed, re.MULTILINE))
