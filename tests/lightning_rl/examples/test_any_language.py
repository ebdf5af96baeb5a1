"""The agent in shell and curl is trained, joined to a server by curl alone, and recorded token by token."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from examples.any_language.serve import serving
from examples.any_language.train import AGENT, TASKS, train
from lightning_rl.agents.resources import LLM
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, RolloutRequest
from lightning_rl_adapters import semconv

pytestmark = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")
QUESTION = TASKS[0]["question"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with serving(tmp_path_factory.mktemp("server")) as url_and_key:
        yield url_and_key


def sh(script: str, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    command = ["sh", str(AGENT.parent / script), *arguments]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120)


def test_a_rollout_by_curl_alone_is_recorded_and_rewarded(server: tuple[str, str]) -> None:
    url, key = server
    done = sh("rollout.sh", QUESTION, "", LIGHTNING_RL_URL=url, LIGHTNING_RL_ADMIN_KEY=key)
    assert (done.returncode, done.stderr) == (0, "")
    answer, reward, *calls = done.stdout.splitlines()
    assert answer.startswith("answer: ")
    assert reward == "reward: 1"
    assert len(calls) == 2
    assert all("prompt tokens" in call for call in calls)
    assert calls[-1].endswith("reward 1")
    [rollout] = [r for r in HttpStore(url, key).rollouts() if r.task == {"question": QUESTION, "answer": ""}]
    assert (rollout.status, rollout.reward) == ("succeeded", 1.0)


def test_an_agent_that_fails_is_a_failed_rollout(server: tuple[str, str], tmp_path: Path) -> None:
    shutil.copy(AGENT.parent / "rollout.sh", tmp_path)
    (tmp_path / "agent.sh").write_text("exit 3\n")
    url, key = server
    env = {"LIGHTNING_RL_URL": url, "LIGHTNING_RL_ADMIN_KEY": key}
    done = subprocess.run(
        ["sh", str(tmp_path / "rollout.sh"), "fail", "x"], env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "reward: none" in done.stdout
    [rollout] = [r for r in HttpStore(url, key).rollouts() if r.task == {"question": "fail", "answer": "x"}]
    assert rollout.status == "failed"


def test_without_a_server_the_script_says_so_and_fails() -> None:
    done = sh("rollout.sh", QUESTION, "x", LIGHTNING_RL_URL="http://127.0.0.1:1", LIGHTNING_RL_ADMIN_KEY="k")
    assert done.returncode != 0
    assert "curl" in done.stderr


def test_a_streamed_answer_is_printed_and_recorded(server: tuple[str, str]) -> None:
    store = HttpStore(*server)
    claim = store.start(RolloutRequest(task=QUESTION))
    done = sh("stream.sh", QUESTION, **msgspec.convert(claim.resources["main_llm"], LLM).env())
    assert (done.returncode, done.stderr) == (0, "")
    rollout_id = claim.rollout.rollout_id
    store.finish(rollout_id, claim.attempt.attempt_id, Finish(status="succeeded", reward=0.0))
    [span] = store.traces([rollout_id])[rollout_id].attempts[0].spans
    assert span.attributes[semconv.DIALECT] == "messages"
    assert span.attributes[semconv.OUTPUT_MESSAGES][0]["content"] == done.stdout.removesuffix("\n")


@pytest.mark.e2e
@pytest.mark.long
def test_the_shell_agent_is_trained(tmp_path: Path) -> None:
    ppo = train(tmp_path / "run", tasks=TASKS[:2], epochs=2)
    assert [step["step"] for step in ppo.history] == [1, 2]
    assert all(step["training/policy_version"] == step["step"] for step in ppo.history)
    assert all(step["num_turns/mean"] == 2 and step["critic/rewards/mean"] > 0 for step in ppo.history)
