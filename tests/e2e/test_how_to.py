"""The how-to pages do what they say: their code trains as it stands, their commands answer as they show."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands import forked
from tests.lightning_rl.memory.models import QWEN_15B
from tests.pages import ROOT
from tests.proxy.engines.service import running

pytestmark = pytest.mark.e2e
PAGES = ROOT / "docs" / "how-to"
RUN = "runs/20261231-120000"
MY_AGENT = """
def agent(task, llm):
    chat = [{"role": "user", "content": task["question"]}]
    answer = llm.openai().chat.completions.create(model=llm.model, messages=chat)
    return float(task["answer"] in answer.choices[0].message.content)


tasks = [{"question": "cars: size id\\nHow many cars are there?", "answer": "count"}] * 8
"""


def files_of(page: str, folder: Path, kinds: str = "python|typescript") -> list[str]:
    """Write the page's files into the folder; each block of code is one, named in its first line."""
    text = (PAGES / page).read_text()
    blocks = re.findall(rf"^```(?:{kinds})\n(?:#|//) (\w+\.(?:py|ts))\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == len(re.findall(rf"^```(?:{kinds})\n", text, re.MULTILINE))
    for name, code in blocks:
        (folder / name).write_text(code)
    return [name for name, _ in blocks]


def run_in(place: Path, *command: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=place, env=os.environ | env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines_of(page: str) -> list[str]:
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.strip().splitlines()]


@pytest.mark.parametrize("page", ["langgraph-agent.md", pytest.param("base-url-agent.md", marks=pytest.mark.long)])
def test_the_agent_of_the_page_trains(page: str, tmp_path: Path) -> None:
    assert "train.py" in files_of(page, tmp_path)
    printed = run_in(tmp_path, "train.py")
    assert re.findall(r"^step (\d)/2  reward 0\.[1-9]\d*", printed, re.MULTILINE) == ["1", "2"]


def test_a_prompt_is_found_that_is_better_on_tasks_that_the_search_never_saw(tmp_path: Path) -> None:
    files_of("better-prompts.md", tmp_path)
    printed = run_in(tmp_path, "prompts.py")
    assert "candidate 0: mean reward 0.000\n" in printed
    assert "val, the best: accuracy 1.000" in printed
    [unseen] = re.findall(r"^train: accuracy (\S+),", printed, re.MULTILINE)  # of the baseline, on the last tasks
    assert float(unseen) >= 0.5


@pytest.mark.long
def test_an_algorithm_of_ones_own_runs_from_a_baseline_and_from_the_ground_up(tmp_path: Path) -> None:
    assert files_of("own-algorithm.md", tmp_path) == ["pass_at_k.py", "ask_a_service.py"]
    assert re.search(r"^pass@4: (0\.\d+|1\.0+)$", run_in(tmp_path, "pass_at_k.py"), re.MULTILINE)
    code = (tmp_path / "ask_a_service.py").read_text()
    with running() as service:
        service.reply = lambda request: "5" if request["temperature"] < 1.0 else "6"
        (tmp_path / "ask_a_service.py").write_text(code.replace("http://127.0.0.1:8000/v1", service.url))
        printed = run_in(tmp_path, "ask_a_service.py")
        assert sorted(request["temperature"] for request in service.requests) == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert "{0.0: 0.5, 0.5: 0.5, 1.0: 0.5}" in printed


@pytest.mark.long
def test_a_judge_gives_the_rewards(tmp_path: Path) -> None:
    files_of("reward-from-a-judge.md", tmp_path)
    code = (tmp_path / "train.py").read_text()
    assert code.count("https://api.openai.com/v1") == 1
    with running() as service:
        service.reply = ranks_all
        (tmp_path / "train.py").write_text(code.replace("https://api.openai.com/v1", service.url))
        printed = run_in(tmp_path, "train.py", OPENAI_API_KEY="sk-judge")
        assert 1 <= len(service.requests) <= 4  # a group whose answers are all alike is not asked about
        assert "The shorter of two right queries" in str(service.requests[0]["messages"])
        assert set(service.keys) == {"Bearer sk-judge"}
    assert re.search(r"^step 1/1  reward 0\.[3-7]", printed, re.MULTILINE)  # around one half, whatever was answered


def ranks_all(request: dict[str, Any]) -> str:
    """The first answer is the best, and so on."""
    asked = json.loads(request["messages"][1]["content"])
    return json.dumps({"ranking": [[int(number)] for number in asked["answers"]]})


@pytest.mark.long
def test_a_plan_for_a_card_names_keys(tmp_path: Path) -> None:
    [line] = lines_of("one-24gb-gpu.md")
    QWEN_15B.save_pretrained(tmp_path)  # config.json alone
    words = [word.replace("Qwen/Qwen2.5-1.5B-Instruct", str(tmp_path)) for word in shlex.split(line)]
    printed = run_in(tmp_path, "-m", "lightning_rl", *words[1:])
    shown = re.findall(r"^```text\n(.*?)^```", (PAGES / "one-24gb-gpu.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    at = 0
    for expected in (line for line in shown.splitlines() if line != "..."):
        at = printed.index(expected, at)  # in this order


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an agent of one's own and the finished run that the pages name."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "my_agent.py").write_text(MY_AGENT)
    (folder / "tasks.jsonl").write_text(
        '{"question": "cars: size id\\nHow many cars are there?", "answer": "count"}\n' * 8
    )
    keys = ["agent=my_agent:agent", "data.train_files=tasks.jsonl", "data.train_batch_size=8"]
    run_in(folder, "-m", "lightning_rl", "train", *keys, "trainer.total_training_steps=1", "--run-dir", RUN)
    return folder


@pytest.mark.parametrize("line", [*lines_of("what-was-trained.md"), *lines_of("does-not-learn.md")])
def test_a_command_looks_at_the_run(line: str, place: Path, tmp_path: Path) -> None:
    words = shlex.split(line)[1:]
    if words[0] == "dashboard":
        return  # its test is a browser's (tests/browser)
    done = forked(place, tmp_path, words, os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.long
def test_dev_shows_what_would_be_trained(place: Path) -> None:
    files_of("what-was-trained.md", place)
    assert re.search(r"row 1: \d+ tokens, \d+ to be trained, exact: true", run_in(place, "look.py"))


@pytest.mark.long
def test_a_finished_run_goes_on_for_more_steps(place: Path) -> None:
    first, more = lines_of("resume.md")
    assert "this run is finished" in run_in(place, "-m", "lightning_rl", *shlex.split(first)[1:])
    assert "step 4/4  reward" in run_in(place, "-m", "lightning_rl", *shlex.split(more)[1:])


@pytest.mark.long
def test_a_script_that_was_stopped_goes_on(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(MY_AGENT)
    files_of("resume.md", tmp_path)
    first = subprocess.Popen([sys.executable, "-u", "resumed.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / RUN / "checkpoints" / "step-1").exists():
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGINT)
    assert "step 2/2" not in first.communicate(timeout=60)[0]
    printed = run_in(tmp_path, "resumed.py")
    assert "step 2/2  reward" in printed
    assert "step 1/2" not in printed
