"""A program as an agent: it is started for each task, finds its model by its environment, and is judged."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.agents.agent import agent_of_run
from lightning_rl.agents.resources import LLM
from lightning_rl.command_agent.agent import reached
from lightning_rl.command_agent.template import CommandError
from lightning_rl.config import ConfigError, compose
from lightning_rl.loops.configured import configured_agents
from lightning_rl.ppo_algorithm import PPO
from lightning_rl.sandboxes import SandboxUnusable
from tests.lightning_rl.command_agent.conftest import Recorded, Run
from tests.proxy.conftest import Served

PYTHON = sys.executable
ASKS = """
import json, os, sys, urllib.request
where, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
request = urllib.request.Request(where + "/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer", "w").write(answer)
"""
TASK = {"prompt": 'What\'s "$HOME"?', "expected": "it's", "files": {"ask.py": ASKS, "src/kept": "as it was"}}


def test_a_program_asks_its_model_and_a_command_judges_what_it_did(
    run: Run, served: Served, recorded: Recorded, tokenizer: Any
) -> None:
    served.engine.script.append("it's here")
    agent = lrl.CommandAgent(f"{PYTHON} ask.py {{prompt}}", reward="grep -q {expected} answer && cat src/kept")
    assert run(agent, TASK).returned == 1.0
    calls, rows = recorded()
    assert str(TASK["prompt"]) in tokenizer.decode(calls[0].prompt_ids)
    assert len(rows) == 1


def test_a_test_that_fails_is_a_reward_of_zero_and_one_that_cannot_run_an_error(run: Run) -> None:
    assert run(lrl.CommandAgent("true", reward="exit 7"), TASK).returned == 0.0
    with pytest.raises(CommandError, match=r"reward\.command.*pytets"):
        run(lrl.CommandAgent("true", reward="pytets -q"), TASK)
    with pytest.raises(CommandError, match="no-such"):
        run(lrl.CommandAgent("/no-such {prompt}"), TASK)


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("exit 0", 1.0),
        ("exit 3", 0.0),
        ("echo 0.25 > $LIGHTNING_RL_REWARD; exit 3", 0.25),
        ("""echo '{"reward": 1, "speed": 0.5}' > $LIGHTNING_RL_REWARD""", {"reward": 1.0, "speed": 0.5}),
    ],
)
def test_a_reward_is_what_is_written_or_else_the_status(script: str, reward: Any, run: Run) -> None:
    own = lrl.CommandAgent(f'sh -c "{script}"' if '"' not in script else "sh program")
    task = {"prompt": "", "files": {"program": script}}
    assert run(own, task).returned == reward
    assert run(lrl.CommandAgent("true", reward="sh program"), task).returned == reward
    assert run(lrl.CommandAgent("sh program", judged_elsewhere=True), task).returned is None


def test_what_is_written_and_is_no_reward_is_an_error(run: Run) -> None:
    with pytest.raises(CommandError, match=r"neither a number nor JSON.*good"):
        run(lrl.CommandAgent("true", reward="echo good > $LIGHTNING_RL_REWARD"), TASK)


def test_the_program_sees_neither_the_task_nor_where_the_command_will_write(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = "python3 -c \"import json,os; print(json.load(open(os.environ['LIGHTNING_RL_TASK']))['expected'])\""
    run(lrl.CommandAgent('sh -c "env; ls -R .."', reward=f"{judge}; env"), TASK)
    shown, _, judged = capsys.readouterr().out.partition("it's\n")
    assert "LIGHTNING_RL_" not in shown.replace("LIGHTNING_RL_PROGRAM=", "")
    assert "expected" not in shown
    assert "LIGHTNING_RL_REWARD" in judged


def test_files_are_there_before_the_program_and_tests_only_after_it(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"repos/a/main": "wrong", "tests/a/main": "right", "tests/a/check": "cat main; cat seen"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sandbox = {
        "files": f"{tmp_path}/repos/{{name}}",
        "tests": f"{tmp_path}/tests/{{name}}",
        "setup": "echo $GREETING {name} > set-up",
        "environment": {"GREETING": "hello"},
        "folder": "inner",
    }
    program = "sh -c 'ls > seen; cat main set-up >> seen; pwd >> seen'"
    run(lrl.CommandAgent(program, reward="sh check", sandbox=sandbox), {"prompt": "", "name": "a"})
    told = capsys.readouterr().out
    assert told.startswith("right")
    assert "main\nseen\nset-up\nwronghello a\n" in told
    assert "check" not in told
    assert told.endswith("/inner\n")


def test_links_out_of_the_folder_are_told_of(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "repo" / "src").mkdir(parents=True)
    (tmp_path / "repo" / "main").write_text("main")
    (tmp_path / "repo" / "src" / "inside").symlink_to("../main")
    (tmp_path / "repo" / "src" / "node_modules").symlink_to("../../elsewhere")
    run(lrl.CommandAgent("cat src/inside", sandbox={"files": str(tmp_path / "repo")}), {"prompt": ""})
    told = capsys.readouterr().out
    assert "and so nowhere here: src/node_modules -> ../../elsewhere]" in told
    assert told.endswith("main")


@pytest.mark.parametrize("program", ["rm -rf $PWD", "mv ../work ../gone", "rm -rf $HOME", "rm -rf ../../work ../home"])
def test_a_program_that_removes_its_folder_or_home_is_judged(program: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "check").write_text("echo checked")
    agent = lrl.CommandAgent(f"sh -c '{program}'", reward="sh check && ls answer", sandbox={"tests": str(tmp_path)})
    assert run(agent, TASK).returned == 0.0


def test_a_program_that_leaves_a_file_in_the_place_of_its_home_has_failed_itself(run: Run) -> None:
    with pytest.raises(CommandError, match=r"left something else in the place of .*: nothing is judged"):
        run(lrl.CommandAgent("sh -c 'rm -rf $HOME; touch $HOME'", reward="true"), TASK)


def test_a_program_whose_time_is_over_is_judged_by_what_it_did(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    agent = lrl.CommandAgent(
        "sh -c 'echo done > answer; sleep 60'", reward="grep done answer", sandbox={"timeout_seconds": 0.5}
    )
    done = run(agent, TASK)
    assert done.returned == 1.0
    assert "ended after 0.5 s" in capsys.readouterr().out
    assert done.emitted.trouble is not None
    assert done.emitted.trouble.message == "the program 'sh' was ended after 0.5 s"


def test_coding_agents_find_what_they_read(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"codex": "cat $CODEX_HOME/config.toml", "claude": "env"}
    for name in files:
        agent = lrl.CommandAgent(f"sh {name} {{prompt}}", model_context_window=4321)
        assert run(agent, {"prompt": "x", "files": files}).returned == 1.0
    told = capsys.readouterr().out
    assert "model_context_window = 4321" in told
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW=4321" in told
    assert "CLAUDE_CONFIG_DIR=" in told


def test_a_place_that_nothing_fills_is_named(run: Run) -> None:
    with pytest.raises(CommandError, match=r"\{question\} is no field of the task, which has \['expected'"):
        run(lrl.CommandAgent("true {question}"), TASK)
    with pytest.raises(CommandError, match=r"sandbox\.files: there is no folder /nowhere/it's"):
        run(lrl.CommandAgent("true", sandbox={"files": "/nowhere/{expected}"}), TASK)
    with pytest.raises(CommandError, match="setup ended with status 9"):
        run(lrl.CommandAgent("true", sandbox={"setup": "exit 9"}), TASK)


def test_what_cannot_run_is_refused_when_it_is_made() -> None:
    with pytest.raises(CommandError, match=r"no program 'clade'"):
        lrl.CommandAgent("clade -p {prompt}")
    for key in ("files", "tests"):
        with pytest.raises(CommandError, match=rf"sandbox\.{key}: there is no folder /nowhere"):
            lrl.CommandAgent("true", sandbox={key: "/nowhere"})
    with pytest.raises(CommandError, match="No closing quotation"):
        lrl.CommandAgent("sh -c 'x")
    with pytest.raises(CommandError, match="empty"):
        lrl.CommandAgent(" ")
    with pytest.raises(SandboxUnusable, match="imag"):
        lrl.CommandAgent("true", sandbox={"imag": "x"})


def test_it_travels_to_runners() -> None:
    agent = pickle.loads(pickle.dumps(lrl.CommandAgent("true {prompt}", reward="x", sandbox={"setup": "y"})))
    assert (agent.command, agent.reward, agent.sandbox.setup) == ("true {prompt}", "x", "y")


def test_a_gateway_that_a_sandbox_cannot_reach_is_said_or_named_otherwise() -> None:
    llm = LLM("m", "http://127.0.0.1:7000/rollout/r/attempt/a/v1", "k", "http://127.0.0.1:7000/rollout/r/attempt/a")
    assert reached(llm, None, shares_network=True) is llm
    with pytest.raises(SandboxUnusable, match=r"sandbox\.gateway_url"):
        reached(llm, None, shares_network=False)
    moved = reached(llm, "https://tunnel.example/x", shares_network=False)
    assert moved.base_url == "https://tunnel.example/x/rollout/r/attempt/a/v1"
    assert moved.anthropic_base_url == "https://tunnel.example/x/rollout/r/attempt/a"
    assert moved.api_key == "k"
    assert moved.endpoint == "https://tunnel.example/x/key/k/v1"


def test_the_configuration_names_the_program_and_its_reward(run: Run) -> None:
    keys = ["command=sh -c 'test {a} = {b}'", "reward=exit 0", "sandbox.environment={A: b}"]
    config = compose(command_line=keys)
    agent = agent_of_run(None, configured_agents(config))
    assert isinstance(agent, lrl.CommandAgent)
    assert (agent.command, agent.reward) == ("sh -c 'test {a} = {b}'", "exit 0")
    assert agent.sandbox.environment == {"A": "b"}
    assert run(agent, {"a": "1", "b": "2"}).returned == 1.0
    assert compose({"reward": "exit 0"}).reward.command == "exit 0"
    referring = compose({"reward": "exit 0", "command": "${data.train_files}", "data": {"train_files": "true"}})
    assert (referring.command, referring.reward.command) == ("true", "exit 0")
    judged = compose({"command": "true", "reward": {"reward_model": {"enable": True, "model_path": "x"}}})
    elsewhere = agent_of_run(None, configured_agents(judged))
    assert isinstance(elsewhere, lrl.CommandAgent)
    assert elsewhere.judged_elsewhere
    with pytest.raises(ConfigError, match=r"reward\.command and reward\.judge\.model"):
        PPO({"command": "true", "reward": {"command": "x", "judge": {"model": "m", "base_url": "http://x"}}})
