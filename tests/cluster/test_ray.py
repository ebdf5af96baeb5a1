"""Runners on the machines of a Ray cluster: a machine that vanishes costs its attempts a retry, and a run nothing."""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import lightning_rl as lrl
from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane.launch import launch
from lightning_rl.processes.service_keys import ADMIN_KEY, RUNNER_KEY
from lightning_rl.store.client import HttpStore
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl_adapters.call import calls_of
from tests.cluster.hosts import Hosts, hosts
from tests.lightning_rl.ppo.test_ppo import CHECKPOINT

pytestmark = pytest.mark.cluster
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # machines of the cluster cannot import a test
WAIT_SECONDS = 120
GROUP, TASKS, STEPS = 2, 3, 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Hosts]:
    with hosts() as made:
        made.add("doomed")
        made.add("safe")
        yield made


def agent(task: dict[str, Any], llm: lrl.LLM) -> float:
    """Two calls, with a wait between them: on the doomed machine until that is gone, elsewhere until it runs two agents
    (or the others would be done before it has begun), and in the second step until the machine that takes its place
    runs agents too."""
    import secrets
    import time
    from pathlib import Path

    import openai

    client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
    chat: Any = [{"role": "user", "content": task["question"]}]
    first = client.chat.completions.create(model=llm.model, messages=chat)
    folder, place = Path(task["folder"]), os.environ["PLACE"]
    (folder / f"{place}-{secrets.token_hex(4)}").touch()
    assert "LIGHTNING_RL_RUNNER_KEY" not in os.environ
    while place == "doomed":
        time.sleep(1)
    while len(list(folder.glob("doomed-*"))) < 2:
        time.sleep(0.1)
    while task["second"] and not list(folder.glob("late-*")):
        time.sleep(0.1)
    chat += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "and"}]
    second = client.chat.completions.create(model=llm.model, messages=chat)
    return float(len(second.choices[0].message.content) % 2)


def config(address: str, **ray: Any) -> dict[str, Any]:
    return {
        "data": {"train_batch_size": TASKS, "max_response_length": 8, "shuffle": False},
        "actor_rollout_ref": {
            "rollout": {"n": GROUP, "max_model_len": 128, "agent": {"ray": {"address": address, **ray}}},
        },
        "trainer": {"total_training_steps": STEPS, "logger": ["jsonl"], "test_freq": -1},
    }


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)


@pytest.mark.smoke
def test_a_machine_that_vanishes_costs_its_attempts_a_retry_and_training_goes_on(
    cluster: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two machines, two rollouts at once on each. One is killed with two of them, another joins later."""
    monkeypatch.setenv(RUNNER_KEY, "a-runner-key-of-more-than-16-characters")
    tasks = [
        {"question": f"number {number}", "folder": str(tmp_path), "second": number >= TASKS}
        for number in range(STEPS * TASKS)
    ]
    seen: list[int] = []

    def vanish() -> None:
        until(lambda: len(list(tmp_path.glob("doomed-*"))) == 2)
        seen.append(len(cluster.processes("doomed")))
        cluster.kill("doomed")
        cluster.add("late")

    vanishing = threading.Thread(target=vanish, daemon=True)
    vanishing.start()
    trainer = lrl.Trainer(agent, n_runners=4, run_dir=tmp_path / "run")
    trainer.fit(lrl.PPO(config(cluster.address)), tasks)
    vanishing.join(WAIT_SECONDS)

    assert seen, "no agent was on the machine that was to vanish"
    store = SqlStore(f"sqlite:///{tmp_path / 'run/store.db'}")
    rollouts, _ = store.page(limit=100)
    traces = store.traces([rollout.rollout_id for rollout in rollouts])
    store.close()
    assert len(rollouts) == STEPS * TASKS * GROUP
    ended: Counter[tuple[str, str | None]] = Counter()
    for trace in traces.values():
        attempts = [each.attempt for each in trace.attempts]
        ended.update((attempt.status, attempt.error and attempt.error.type) for attempt in attempts)
        assert trace.rollout.status == "succeeded"
        assert trace.rollout.counting_attempt_id == attempts[-1].attempt_id
        assert len(calls_of(trace.attempts[-1].spans)) == 2
    assert ended == {("succeeded", None): len(rollouts), ("lost", "RunnerDied"): 2}
    assert sum("is gone; its rollouts are retried" in record.getMessage() for record in caplog.records) == 1
    assert list(tmp_path.glob("late-*"))
    rows = jsonl.read(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    last = rows[-1]
    assert last["tokens/trained"] > 0
    assert last["tokens/excluded/superseded"] > 0, "what was sampled on the machine that vanished is told of"
    assert last["tokens/pending"] == 0


def one_call(task: str, llm: lrl.LLM) -> float:
    answer = llm.openai().chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
    return float(len(answer.choices[0].message.content or "") % 2)


@pytest.mark.long
def test_runners_on_the_cluster_take_the_rollouts_of_several_servers(
    cluster: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY, "an-admin-key-of-more-than-16-characters")
    monkeypatch.setenv(RUNNER_KEY, "a-runner-key-of-more-than-16-characters")
    keys = {"admin_key": os.environ[ADMIN_KEY], "runner_key": os.environ[RUNNER_KEY]}
    model = Endpoint(model="policy", tokenizer=str(CHECKPOINT), renderer="qwen3", engines=[])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with launch(tmp_path / "one", model, **keys) as one, launch(tmp_path / "two", model, **keys) as two:
        trainer = lrl.Trainer(one_call, server=[one.url, two.url], n_runners=4, run_dir=tmp_path / "run")
        trainer.fit(lrl.PPO(config(cluster.address)), [f"number {number}" for number in range(STEPS * TASKS)])
        ended = [list(HttpStore(each.url, keys["admin_key"]).rollouts()) for each in (one, two)]
    assert all(ended), "both have some"
    assert [rollout.status for rollouts in ended for rollout in rollouts] == ["succeeded"] * STEPS * TASKS * GROUP
