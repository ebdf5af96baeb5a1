"""`lightning-rl train` as a person types it: the plan, the run, going on, and one clear line for what is wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from lightning_rl import tutorial
from lightning_rl.cli import preflight
from lightning_rl.config import compose
from tests.commands import forked

AGENT = """
import openai

from lightning_rl import LLM

async def solve(task: dict, llm: LLM) -> float:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat = [{"role": "user", "content": task["question"]}]
        answer = await client.chat.completions.create(model=llm.model, messages=chat)
    return float(len(answer.choices[0].message.content) % 2)

async def fails(task: dict, llm: LLM) -> float:
    raise LookupError(f"no table for {task['question']}")

def takes_nothing(): ...

def takes_more(task, model): ...
"""
SMALL = [
    "data.train_batch_size=2",
    "data.max_response_length=8",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",  # the plan traces rows of so many tokens
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "broken.py").write_text("import notthere\n")
    tasks = "".join(json.dumps({"question": f"number {i}"}) + "\n" for i in range(4))
    (tmp_path / "tasks.jsonl").write_text(tasks)
    return tmp_path


OFFLINE = {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def lightning_rl(place: Path, *words: str, fails: bool = False, traceback: bool = False) -> Any:
    if "--dry-run" in words:
        import lightning_rl.ppo_algorithm  # noqa: F401  # loaded once, not in every fork

        done = forked(place, place, words, os.environ | OFFLINE)
    else:
        command = [sys.executable, "-m", "lightning_rl", *words]
        env = os.environ | OFFLINE
        done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    assert traceback or 'File "/' not in done.stderr.replace(f'File "{place}', ""), done.stderr
    return done


@pytest.mark.e2e
@pytest.mark.long
def test_the_shortest_command_trains(place: Path) -> None:
    words = ["agent=my_agent:solve", "data.train_files=tasks.jsonl", "data.train_batch_size=4"]
    done = lightning_rl(place, "train", *words)
    assert re.search(r"step 1/1  reward \d\.\d+", done.stdout)
    assert done.stdout.startswith(
        "loading torch and transformers\nmodel: the tutorial's small one, to try things out; name yours with actor_roll"
    )
    [model] = re.findall(r"^model +(.+)$", done.stdout, re.MULTILINE)
    assert (Path(model) / "model.safetensors").exists()


@pytest.mark.long
@pytest.mark.e2e
def test_a_run_ends_with_what_came_of_it_and_a_finished_one_says_so_at_once(place: Path) -> None:
    words = ["agent=my_agent.py:solve", "data.train_files=tasks.jsonl", *SMALL, "--run-dir", "run"]
    done = lightning_rl(place, "train", *words)
    lines = done.stdout.splitlines()
    run, (rate,) = place / "run", [line for line in lines if line.startswith("learning rate: ")]
    assert rate.startswith("learning rate: 0.0003, by the model's size")
    assert re.fullmatch(r"reward {6}\d\.\d{3} -> \d\.\d{3} \(step 1 to 2\)", lines[-7])
    assert lines[-6:-1] == [
        f"run         {run}", f"model       {run / 'model'}", f"next        lightning-rl dashboard {run}",
        f"            lightning-rl report {run}", f"            lightning-rl doctor {run}",
    ]  # fmt: skip
    explain = lines[-1].split()
    assert explain[:2] == ["lightning-rl", "explain"]
    assert f"run  {run}" in lightning_rl(place, *explain[1:]).stdout
    before = (run / "store.db").stat().st_mtime_ns
    again = lightning_rl(place, "train", "--resume", "run").stdout.splitlines()
    assert again[1] == "this run is finished, with 2 of 2 steps: there is nothing left to do"
    assert again[2:] == lines[-7:]
    fewer = lightning_rl(place, "train", "--resume", "run", "trainer.total_training_steps=1").stdout.splitlines()
    assert fewer[1:] == again[1:]
    assert (run / "store.db").stat().st_mtime_ns == before


@pytest.mark.long
@pytest.mark.e2e
def test_an_agent_that_fails_in_all_rollouts_of_a_step_ends_the_run_with_its_traceback(place: Path) -> None:
    words = ["agent=my_agent.py:fails", "data.train_files=tasks.jsonl", *SMALL, "trainer.total_training_steps=1"]
    done = lightning_rl(place, "train", *words, fails=True, traceback=True)
    assert "error: step 1: the agent failed in all 4 rollouts, first in train-0-1-" in done.stderr
    assert 'my_agent.py", line 13, in fails' in done.stderr
    assert "LookupError: no table for number" in done.stderr
    assert "trainer.all_failed=go_on" in done.stderr
    assert "goes on with it" not in done.stderr
    lightning_rl(place, "train", *words, "trainer.all_failed=go_on")


@pytest.mark.e2e
@pytest.mark.long
def test_a_finished_run_goes_on_when_it_is_given_more_steps(place: Path) -> None:
    words = ["agent=my_agent.py:solve", "data.train_files=tasks.jsonl", *SMALL, "--run-dir", "run", "--json"]
    first = json.loads(lightning_rl(place, "train", *words).stdout)
    assert (first["steps"], first["run_dir"]) == (2, str(place / "run"))
    longer = ["train", "--resume", "run", "trainer.total_epochs=2", "--json"]
    refused = lightning_rl(place, *longer, "algorithm.adv_estimator=gae", fails=True)
    assert "resume with the config.yaml of the run's folder" in refused.stderr  # which is as it was
    more = json.loads(lightning_rl(place, *longer).stdout)
    assert more["steps"] == 4
    assert more["metrics"]["tokens/received"] > first["metrics"]["tokens/received"]
    assert more["metrics"]["tokens/received"] == more["metrics"]["tokens/trained"]
    steps = [json.loads(line)["step"] for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_the_plan_says_what_would_be_done_and_does_nothing(place: Path) -> None:
    words = ["agent=my_agent:solve", "data.train_files=tasks.jsonl", *SMALL]
    done = lightning_rl(place, "train", *words, "--dry-run")
    assert re.search(r"^steps +2$", done.stdout, re.MULTILINE)
    assert re.search(r"^train tasks +4$", done.stdout, re.MULTILINE)
    assert "ppo_mini_batch_size: 32" in done.stdout
    assert not (place / "runs").exists()


@pytest.mark.long
def test_the_plan_looks_at_the_model_the_interpreter_and_memory(place: Path) -> None:
    words = ["agent=my_agent:solve", "data.train_files=tasks.jsonl", *SMALL, "--dry-run"]
    printed = json.loads(lightning_rl(place, "train", *words, "--json").stdout)
    plan = printed["plan"]
    assert (plan["rollouts_per_step"], printed["config"]["data"]["train_batch_size"]) == (4, 2)
    assert plan["learning_rate"] == 3e-4
    assert 500_000 < plan["parameters"] < 2_000_000
    assert re.fullmatch(r"\d\.\d GiB at most \(.*\); \d+\.\d GiB are free", plan["memory"])
    on_a_gpu = json.loads(lightning_rl(place, "train", *words, "--json", "--gpus", "24").stdout)["plan"]
    assert re.fullmatch(r"\d\.\d GiB at most \(.*\), on 24 GiB", on_a_gpu["memory"])
    shutil.copytree(tutorial.checkpoint(), place / "lacks")
    (place / "lacks" / "model.safetensors").unlink()
    shutil.copytree(tutorial.checkpoint(), place / "bare")
    (place / "bare" / "tokenizer_config.json").write_text("{}")
    (place / "empty").write_text("#!/bin/sh\nexit 1\n")
    (place / "empty").chmod(0o755)
    vllm = "actor_rollout_ref.rollout.name=vllm"
    for overrides, message in (
        (["actor_rollout_ref.model.path=./nowhere"], "is neither a folder nor a model id"),
        (
            ["distillation.enabled=true", "distillation.teacher_models={big:{model_path:./gone}}"],
            "distillation.teacher_models.big.model_path='./gone' is neither a folder nor a model id",
        ),
        (["actor_rollout_ref.model.path=lacks"], "has no *.safetensors"),
        (["actor_rollout_ref.model.path=bare"], "no renderer is known for model 'bare'"),
    ):
        assert message in lightning_rl(place, "train", *words, *overrides, fails=True).stderr
    for python, message in (
        ("./nowhere", "is no Python that starts"),
        ("./empty", "there is no vLLM in the environment of ./empty"),
    ):  # a laptop plans what a cluster runs
        said = lightning_rl(place, "train", *words, vllm, f"actor_rollout_ref.rollout.python={python}").stdout
        assert "NONE HERE, AND IT WOULD NOT BEGIN" in said
        assert message in " ".join(said.split())


@pytest.mark.long
def test_a_graph_is_an_agent_too(place: Path) -> None:
    (place / "my_graph.py").write_text("def graph(model): ...\n")
    langgraph = "actor_rollout_ref.rollout.multi_turn.langgraph"
    words = [f"{langgraph}.path=my_graph.py:graph", f"{langgraph}.graph_config.recursion_limit=9", *SMALL]
    plan = json.loads(
        lightning_rl(place, "train", *words, "data.train_files=tasks.jsonl", "--dry-run", "--json").stdout
    )
    assert plan["plan"]["agent"] == "my_graph.py:graph"
    wrong = lightning_rl(
        place, "train", f"{langgraph}.path=my_graph.py:grap", "data.train_files=tasks.jsonl", "--dry-run", fails=True
    )
    assert "did you mean 'graph'?" in wrong.stderr
    both = ["agent=my_agent:solve", *words, "data.train_files=tasks.jsonl", "--dry-run"]
    assert "name two agents: leave one out" in lightning_rl(place, "train", *both, fails=True).stderr


@pytest.mark.long
def test_tasks_may_be_in_any_of_the_known_files(place: Path) -> None:
    tasks = datasets.Dataset.from_list([{"question": f"number {i}"} for i in range(4)])
    tasks.save_to_disk(place / "tasks")
    tasks.to_parquet(place / "tasks.parquet")
    tasks.to_csv(place / "tasks.csv")
    files = "data.train_files=[tasks.jsonl,tasks.csv,tasks.parquet,tasks]"
    done = lightning_rl(place, "train", "agent=my_agent:solve", files, *SMALL, "--dry-run", "--json")
    assert json.loads(done.stdout)["plan"]["train_tasks"] == 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.train_files=tasks.jsonl"], "name the agent: lightning-rl train agent=module:function"),
        (["agent=my_agent:solve"], "name the tasks: data.train_files=tasks.jsonl"),
        (["agent=my_agent:slove", "data.train_files=tasks.jsonl"], "has no 'slove'; did you mean 'solve'?"),
        (["agent=your_agent:solve", "data.train_files=tasks.jsonl"], "there is no module 'your_agent'"),
        (["agent=your_agent.py:solve", "data.train_files=tasks.jsonl"], "there is no file"),
        (["agent=broken:solve", "data.train_files=tasks.jsonl"], "ModuleNotFoundError: No module named 'notthere'"),
        (["agent=broken.py:lacks", "data.train_files=tasks.jsonl"], 'broken.py", line 1'),
        (["agent=my_agent:takes_nothing", "data.train_files=tasks.jsonl"], "takes no task: its first parameter is the"),
        (
            ["agent=my_agent:takes_more", "data.train_files=tasks.jsonl"],
            "nothing fills parameter 'model'; name",
        ),
        (["agent=solve", "data.train_files=tasks.jsonl"], "is neither module:function nor path/to/file.py:function"),
        (["agent=my_agent:solve", "data.train_files=task.jsonl"], "task.jsonl"),
        (["agent=my_agent:solve", "data.train_files=tasks.jsonl"], "4 tasks are fewer than data.train_batch_size=32"),
        (["agent=my_agent:solve", "data.train_file=tasks.jsonl"], "did you mean 'data.train_files'?"),
        (
            ["agent=my_agent:solve", "data.train_files=tasks.jsonl", "--server", "http://127.0.0.1:9"],
            "the runners of http://127.0.0.1:9 have the agent: leave agent=my_agent:solve out",
        ),
        (["data.train_files=tasks.jsonl", "--server", "127.0.0.1:9"], "--server 127.0.0.1:9 is no URL; give http"),
        (["--resume", "nowhere"], "holds no run of `lightning-rl train`"),
        (["--config", "nowhere.yaml"], "there is no configuration file"),
    ],
)
def test_what_is_wrong_is_one_line(words: list[str], message: str, place: Path) -> None:
    done = lightning_rl(place, "train", *words, "--dry-run", fails=True)
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "broken.py" in message or "notthere" in message or len(done.stderr.strip().splitlines()) == 1


def test_a_file_that_is_not_there_is_told_of_at_once(place: Path) -> None:
    done = lightning_rl(place, "train", "agent=my_agent:solve", "data.train_files=task.jsonl", fails=True)
    assert "task.jsonl; did you mean 'tasks.jsonl'?" in done.stderr
    assert "loading" not in done.stdout  # which takes seconds
    too_long = f"data.train_files={'x' * 300}.jsonl"
    assert (
        ".jsonl cannot be read: File name too long"
        in lightning_rl(place, "train", "agent=my_agent:solve", too_long, fails=True).stderr
    )


def test_a_run_of_a_server_or_a_script_is_gone_on_with_there(place: Path) -> None:
    run_dir = place / "attached"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("agent: my_agent:solve\n")
    (run_dir / "server.url").write_text("http://127.0.0.1:9")
    done = lightning_rl(place, "train", "--resume", "attached", fails=True)
    assert "attached to http://127.0.0.1:9, where its rollouts are: add --server http://127.0.0.1:9" in done.stderr
    (run_dir / "config.yaml").write_text("trainer: {total_epochs: 2}\n")
    (run_dir / "server.url").unlink()
    done = lightning_rl(place, "train", "--resume", "attached", fails=True)
    assert "is of a script or a notebook, and only that names its agent: go on there, by lrl.Trainer" in done.stderr


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param(
            "actor_rollout_ref.model.path=no-such/model",
            "no folder here, and could not be taken from the hub",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "actor_rollout_ref.model.path=./nowhere", "is neither a folder nor a model id", marks=pytest.mark.long
        ),
        pytest.param(
            "actor_rollout_ref.model.path=./bare",
            "no renderer is known for model 'bare'; name one that fits its chat",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "actor_rollout_ref.rollout.renderer=quen3",
            "renderer 'quen3' is unknown; did you mean 'qwen3'?",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "actor_rollout_ref.rollout.name=vllm", "there is no vLLM in that environment", marks=pytest.mark.long
        ),
    ],
)
def test_what_cannot_start_is_one_line(override: str, message: str, place: Path) -> None:
    shutil.copytree(tutorial.checkpoint(), place / "bare")
    (place / "bare" / "tokenizer_config.json").write_text("{}")
    words = ["agent=my_agent:solve", "data.train_files=tasks.jsonl", *SMALL, override]
    done = lightning_rl(place, "train", *words, fails=True)
    assert "error: " in done.stderr
    assert message in done.stderr


def test_help_teaches(place: Path) -> None:
    assert "lightning-rl quickstart" in lightning_rl(place, "--help").stdout
    taught = lightning_rl(place, "train", "--help").stdout
    assert "lightning-rl train agent=my_agent:solve data.train_files=tasks.jsonl" in taught
    assert "--dry-run" in taught


def test_the_shell_completes_commands(place: Path) -> None:
    asked = {
        **os.environ,
        "_LIGHTNING_RL_COMPLETE": "complete_bash",
        "COMP_WORDS": "lightning-rl tr",
        "COMP_CWORD": "1",
    }
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'lightning-rl'; from lightning_rl.__main__ import main; main()",
    ]
    done = subprocess.run(command, env=asked, capture_output=True, text=True)
    assert "train" in done.stdout.split()
    assert "--install-completion" in lightning_rl(place, "--help").stdout


def test_the_plan_says_whose_an_engine_is() -> None:
    model = {"model": {"lora_rank": 2}}
    urls = {"rollout": {"name": "vllm", "server_urls": ["http://127.0.0.1:1"]}}
    policies = {"planner": {}, "executor": {}, "judge": {"actor_rollout_ref": urls}}
    assert preflight.engine(compose({"actor_rollout_ref": model})) == "embedded"
    said = preflight.engine(compose({"actor_rollout_ref": model, "policies": policies}))
    assert said == "embedded for planner and executor; vllm for judge"
    said = preflight.engine(compose({"policies": policies}))
    assert said == "embedded for planner; embedded for executor; vllm for judge"
