"""Runner processes against a real server: what an agent does becomes how its rollout ends."""

import os
import subprocess
import sys
import textwrap
import time
from collections import Counter

import cloudpickle
import pytest

from lightning_rl.agents.agent import as_agent
from lightning_rl.processes.child import ChildDied
from lightning_rl.runner.launch import launch, shares
from lightning_rl.store.contract import RolloutConfig, RolloutRequest
from tests.lightning_rl.runner.runs import asked

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # children cannot import a test


def ended(server, ids):
    """The rollouts once all have ended, by id."""
    waiting, found = set(ids), {}
    while waiting:
        for rollout in server.store.wait(sorted(waiting), 30):
            found[rollout.rollout_id] = rollout
            waiting.discard(rollout.rollout_id)
    return found


def run(server, tmp_path, agent, tasks, n_runners=2, **config):
    requests = [RolloutRequest(task=task, config=RolloutConfig(**config)) for task in tasks]
    ids = [r.rollout_id for r in server.store.enqueue(requests)]
    with launch(n_runners, as_agent(agent), server.url, server.runner_key, log_dir=tmp_path):
        found = ended(server, ids)
    return [found[rollout_id] for rollout_id in ids]


def test_a_returned_reward_an_exception_and_bad_rewards(server, tmp_path) -> None:
    def agent(task, llm):
        if task == "raise":
            raise LookupError("no such table")
        return {"one": 1.0, "none": None, "named": {"reward": 0.5, "format": 1.0}, "nan": float("nan")}[task]

    one, none, named, nan, failed = run(server, tmp_path, agent, ["one", "none", "named", "nan", "raise"])
    assert (one.status, one.reward) == ("succeeded", 1.0)
    assert (none.status, none.reward) == ("succeeded", None)
    assert named.rewards == {"reward": 0.5, "format": 1.0}
    assert nan.status == "failed"
    assert nan.rollout_id in nan.error.message
    assert (failed.status, failed.attempt_count) == ("failed", 1)
    assert (failed.error.type, failed.error.message) == ("LookupError", "no such table")
    assert "in agent" in failed.error.traceback
    assert not failed.error.infrastructure


def test_emitted_rewards_without_a_final_one_are_kept(server, tmp_path) -> None:
    def agent(task, llm):
        from lightning_rl.agents.emit import emit_reward

        emit_reward(0.25, name="format")

    (rollout,) = run(server, tmp_path, agent, [0])
    assert (rollout.reward, rollout.rewards) == (None, {"format": 0.25})


def test_async_agents_run_at_the_same_time(server, tmp_path, monkeypatch) -> None:
    async def agent(task, llm):
        import asyncio

        shared = asyncio.__dict__.setdefault("_arrived_in_this_test", [])
        shared.append(task)
        while len(shared) < 3:  # each needs the others
            await asyncio.sleep(0.005)
        return float(task)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one process
    rollouts = run(server, tmp_path, agent, range(3), n_runners=3)
    assert [r.reward for r in rollouts] == [0.0, 1.0, 2.0]


def test_more_rollouts_than_runners_end_each_once(server, tmp_path) -> None:
    def agent(task, llm):
        return task

    rollouts = run(server, tmp_path, agent, range(50), n_runners=4)
    assert [r.reward for r in rollouts] == list(range(50))
    assert Counter(r.attempt_count for r in rollouts) == {1: 50}


def test_an_agent_whose_engine_is_gone_is_retried(server, tmp_path) -> None:
    def agent(task, llm):
        import openai

        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0)
        client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hello"}])

    (rollout,) = run(server, tmp_path, agent, [0], n_runners=1, max_attempts=2)
    assert (rollout.status, rollout.attempt_count) == ("failed", 2)
    assert (rollout.error.type, rollout.error.infrastructure) == ("InternalServerError", True)
    assert rollout.counting_attempt_id is None


def test_a_lease_is_kept_while_the_agent_works(server, tmp_path) -> None:
    def agent(task, llm):
        import time

        time.sleep(1.0)
        return 1.0

    (rollout,) = run(server, tmp_path, agent, [0], unresponsive_seconds=0.3)
    assert (rollout.status, rollout.attempt_count) == ("succeeded", 1)


def test_a_cancelled_rollouts_result_is_dropped_and_the_runner_goes_on(server, tmp_path) -> None:
    def agent(task, llm):
        import time

        while not os.path.exists(task["go"]):
            open(task["started"], "w").close()
            time.sleep(0.01)
        return 1.0

    task = {"go": str(tmp_path / "go"), "started": str(tmp_path / "started")}
    first, second = (r.rollout_id for r in server.store.enqueue([RolloutRequest(task=task)] * 2))
    with launch(1, as_agent(agent), server.url, server.runner_key, log_dir=tmp_path):
        while not os.path.exists(task["started"]):
            pass
        server.store.cancel(first)
        open(task["go"], "w").close()
        found = ended(server, [first, second])
    assert found[first].status == "cancelled"
    assert found[second].reward == 1.0


def test_a_stopped_runner_gives_its_rollout_back_and_leaves_no_process(server, tmp_path) -> None:
    def agent(task, llm):
        import subprocess
        import time

        child = subprocess.Popen(["sleep", "1000"])
        with open(task, "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)

    path = tmp_path / "pid"
    (rollout,) = server.store.enqueue([RolloutRequest(task=str(path), config=RolloutConfig(max_attempts=1))])
    with launch(1, as_agent(agent), server.url, server.runner_key, log_dir=tmp_path) as working:
        while not (path.exists() and path.read_text()):
            working.check()
        runner = working.pids[0]
    given_back = server.store.rollout(rollout.rollout_id)
    assert (given_back.status, given_back.attempts[0].error.type) == ("queued", "RunnerStopped")
    server.store.cancel(rollout.rollout_id)
    for pid in (runner, int(path.read_text())):
        assert gone(pid)


def test_agents_of_a_stopped_runner_clean_up(server, tmp_path) -> None:
    async def agent(task, llm):
        import asyncio
        import pathlib

        pathlib.Path(task).write_text("begun")
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.2)  # as long as it takes to close a sandbox
            pathlib.Path(task).write_text("closed")

    paths = [tmp_path / name for name in "ab"]
    rollouts = server.store.enqueue([RolloutRequest(task=str(path)) for path in paths])
    with launch(2, as_agent(agent), server.url, server.runner_key, log_dir=tmp_path) as working:
        while not all(path.exists() for path in paths):
            working.check()
    assert [path.read_text() for path in paths] == ["closed", "closed"]
    assert "CancelledError" not in "".join(log.read_text() for log in tmp_path.rglob("runner*.log"))
    for rollout in rollouts:
        assert server.store.rollout(rollout.rollout_id).status == "queued"
        server.store.cancel(rollout.rollout_id)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_what_an_agent_registers_with_atexit_runs_once_and_where_it_was_registered(server, tmp_path, isolation) -> None:
    def agent(task, llm):
        import atexit
        import os
        import pathlib

        @atexit.register
        def flush():
            pathlib.Path(f"{task}-{os.getpid()}").touch()

        return float(os.getpid())

    with asked(server, tmp_path, agent, [str(tmp_path / name) for name in "ab"], 1, isolation) as rollouts:
        pids = [int(rollout.reward) for rollout in rollouts.ended()]
    assert sorted(file.name for file in tmp_path.glob("[ab]-*")) == [f"a-{pids[0]}", f"b-{pids[1]}"]


def gone(pid: int) -> bool:
    """Whether the process has ended (one that nobody has waited for yet has)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or before it is read
        return True


def test_a_refused_key_is_told_once_and_starts_no_other_runner(server, tmp_path, caplog) -> None:
    agent = as_agent(lambda task: 0.0)
    with (
        launch(1, agent, server.url, "wrong", log_dir=tmp_path) as working,
        pytest.raises(ChildDied, match=r"takes the key of runner 0 no longer: .*401"),
    ):
        check_for_long(working)
    assert not [record for record in caplog.records if "started anew" in record.getMessage()]
    assert "Traceback" not in (tmp_path / "runner-0.log").read_text()


def check_for_long(working) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        working.check()
        time.sleep(0.01)


def test_no_key_is_in_a_childs_environment(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LIGHTNING_RL_ADMIN_KEY", "secret-admin")
    monkeypatch.setenv("LIGHTNING_RL_RUNNER_KEY", "secret-runner")

    def agent(task, llm):
        return float(any("secret-" in value for value in os.environ.values()))

    (rollout,) = run(server, tmp_path, agent, [0])
    assert rollout.reward == 0.0


def test_an_agent_in_a_script_works_and_the_script_runs_once(server, tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            from pathlib import Path
            from lightning_rl.agents.agent import rollout
            from lightning_rl.runner.launch import launch
            from lightning_rl.store.client import HttpStore
            from lightning_rl.store.contract import RolloutRequest

            with open({str(tmp_path / "runs")!r}, "a") as file:
                file.write("x")
            FACTOR = 2

            @rollout
            def agent(task, llm):
                return task * FACTOR

            store = HttpStore({server.url!r}, "admin")
            (made,) = store.enqueue([RolloutRequest(task=3)])
            with launch(2, agent, {server.url!r}, "runner", log_dir=Path({str(tmp_path)!r})):
                while not (found := store.wait([made.rollout_id], 30)):
                    pass
            print(found[0].reward)
            """
        )
    )
    answer = subprocess.run([sys.executable, script], capture_output=True, timeout=60)
    assert answer.stdout.strip() == b"6.0", answer.stderr
    assert (tmp_path / "runs").read_text() == "x"


def test_runners_are_spread_evenly_over_the_cores() -> None:
    assert shares(8, 3) == [3, 3, 2]
    assert shares(2, 16) == [1, 1]
