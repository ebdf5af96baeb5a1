"""Sessions against a real server whose engine says the same three tokens: isolated, finalized once, counted."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any, NamedTuple

import openai
import pytest

import lightning_rl as lrl
from lightning_rl.agents.task_fields import LoopTaskError
from lightning_rl.compat import sessions
from lightning_rl.compat.session_sampling import SessionSamplingError
from lightning_rl.control_plane.launch import launch
from lightning_rl.loops import AgentFramework, SingleTurnAgent
from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import Unreachable
from lightning_rl_adapters import semconv
from tests.lightning_rl.control_plane.test_full_disk import Engine
from tests.lightning_rl.control_plane.test_process import policy_of

TOKENS = 3  # of every answer


class Server(NamedTuple):
    url: str
    store: HttpStore

    def framework(self, runners: Any, **how: Any) -> AgentFramework:
        return AgentFramework(self.url, "admin", runners, **how)

    def received(self, rollout_ids: list[str]) -> int:
        return sum(sum(each.received.values()) for each in self.store.tokens_of(rollout_ids).values())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as engine:
        threading.Thread(target=engine.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{engine.server_port}"
        policy = policy_of(engines=[{"model": "policy", "kind": "embedded", "url": url}])
        with launch(tmp_path_factory.mktemp("sessions"), policy, admin_key="admin", runner_key="runner") as serving:
            store = HttpStore(serving.url, "admin")
            store.publish({"main_llm": {"type": "proxy_llm", "model": "policy"}})
            yield Server(serving.url, store)
        engine.shutdown()


async def says(task: Any, llm: lrl.LLM, **request: Any) -> None:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        chat: Any = [{"role": "user", "content": f"number {task}"}]
        await client.chat.completions.create(model=llm.model, messages=chat, **request)


async def scores(task: Any, llm: lrl.LLM) -> float:
    await says(task, llm)
    return float(task)


async def odd_ones_fail(task: int, llm: lrl.LLM) -> float:
    await says(task, llm)
    if task % 2:
        raise LookupError("no such table\nat all")
    return 1.0


def test_every_prompt_has_its_sessions_and_each_of_them_its_rows(server: Server) -> None:
    async def run() -> Any:
        async with server.framework(scores) as framework:
            return await framework.generate_sequences([1, 2, 3], 2)

    batch = asyncio.run(run())
    assert [ended.task for ended in batch.sessions] == [1, 1, 2, 2, 3, 3]
    assert [trajectory.reward for trajectory in batch.trajectories] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert len({ended.group_id for ended in batch.sessions}) == 3
    assert len(batch.rows) == 6
    assert batch.tokens == {"trained": 6 * TOKENS}
    stats = batch.stats
    assert (stats.sessions, stats.succeeded, stats.failed, stats.groups, stats.reasons) == (6, 6, 0, 3, {})


def test_a_session_that_fails_loses_nothing_else_and_says_shortly_why(server: Server) -> None:
    async def run(least: int) -> Any:
        async with server.framework(odd_ones_fail, min_successful_sessions=least) as framework:
            return await framework.generate_sequences([1, 2, 3, 4], 2)

    batch = asyncio.run(run(0))
    stats = batch.stats
    assert (stats.succeeded, stats.failed) == (4, 4)
    assert stats.reasons == {"LookupError: no such table at all": 4}
    assert [trajectory.reward for trajectory in batch.trajectories] == [0.0, 0.0, 1.0, 1.0] * 2
    assert batch.tokens == {"trained": 8 * TOKENS}
    strict = asyncio.run(run(1))
    assert (strict.stats.groups, strict.stats.groups_left_out, len(strict.rows)) == (4, 2, 4)
    assert strict.tokens == {"trained": 4 * TOKENS, "few_successes": 4 * TOKENS}
    assert server.received([ended.session_id for ended in strict.sessions]) == sum(strict.tokens.values())
    statuses = {server.store.rollout(ended.session_id).status for ended in strict.sessions}
    assert statuses == {"succeeded", "failed"}


def test_a_session_that_cannot_be_finished_holds_its_lease_no_longer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def held_after_failing() -> int:
        async with server.framework(scores) as framework:
            monkeypatch.setattr(framework._store, "finish", unreachable)
            await framework.generate_sequences([1], 1)
            return len(framework._leases._held)

    def unreachable(*place: Any) -> None:
        raise Unreachable("the server is away")

    assert asyncio.run(held_after_failing()) == 0
    for left in server.store.rollouts(status="running"):
        server.store.cancel(left.rollout_id)


def test_as_many_are_open_as_may_be(server: Server) -> None:
    async def run(bound: int, sessions: int) -> int:
        now = most = 0
        full = asyncio.Event()

        async def counts(task: Any, llm: lrl.LLM) -> float:
            nonlocal now, most
            now += 1
            most = max(most, now)
            if now == (bound or sessions):
                full.set()
            await full.wait()
            now -= 1
            return 1.0

        async with server.framework(counts, max_concurrent_sessions=bound) as framework:
            halves = [framework.generate_sequences([1], sessions // 2) for _ in range(2)]
            await asyncio.gather(*halves)
        return most

    assert asyncio.run(run(2, 6)) == 2
    assert asyncio.run(run(0, 6)) == 6


def test_forty_are_created_at_once(server: Server) -> None:
    async def run() -> None:
        async with server.framework(scores) as framework:
            sessions = await asyncio.gather(*(framework.create_session(number) for number in range(40)))
            assert len({session.session_id for session in sessions}) == 40
            assert len({session.base_url for session in sessions}) == len({s.api_key for s in sessions}) == 40
            assert server.store.state()["open_attempts"] >= 40
            async with openai.AsyncOpenAI(base_url=sessions[0].base_url, api_key=sessions[0].api_key) as client:
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
            done = await framework.finalize_session(sessions[0], 0.5)
            assert (done.reward, done.sampled_tokens) == (0.5, TOKENS)
            await asyncio.gather(*(framework.abort_session(session) for session in sessions[1:]))
            statuses = [server.store.rollout(session.session_id).status for session in sessions]
            assert statuses == ["succeeded"] + ["cancelled"] * 39

    asyncio.run(run())


def test_a_cancelled_call_leaves_no_session_open(server: Server) -> None:
    began: list[str] = []

    async def never_ends(task: Any, llm: lrl.LLM, rollout: Any) -> None:
        await says(task, llm)
        began.append(rollout.rollout_id)
        await asyncio.Event().wait()

    async def run() -> None:
        async with server.framework(never_ends, max_concurrent_sessions=3) as framework:
            generating = asyncio.create_task(framework.generate_sequences([1, 2], 4))
            while len(began) < 3:
                await asyncio.sleep(0.01)
            generating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await generating
            assert [server.store.rollout(session).status for session in began] == ["cancelled"] * 3

    asyncio.run(run())
    assert not list(server.store.rollouts(status="running"))


def test_a_session_that_takes_too_long_or_is_cancelled_from_outside_fails_alone(server: Server) -> None:
    async def slow(task: str, llm: lrl.LLM) -> float:
        if task == "slow":
            await asyncio.Event().wait()
        if task == "cancels itself":
            raise asyncio.CancelledError
        return 1.0

    async def run() -> Any:
        async with server.framework(slow, timeout_seconds=2) as framework:
            return await framework.generate_sequences(["slow", "cancels itself", "fast"])

    stats = asyncio.run(run()).stats
    assert stats.reasons == {
        "TimeoutError: the session took longer than 2 s": 1,
        "RuntimeError: the session was cancelled from outside": 1,
    }
    assert stats.succeeded == 1


def test_the_time_of_a_session_begins_when_there_is_a_thread_for_its_runner(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_SYNC_RUNNERS", 2)
    forever = threading.Event()

    def sync(task: Any, llm: lrl.LLM) -> float:
        if task == "hangs":
            forever.wait()
        if task == "exits":
            sys.exit(3)
        time.sleep(0.3)
        return 1.0

    async def run() -> Any:
        async with server.framework(sync, timeout_seconds=1) as framework:
            return await framework.generate_sequences(["hangs", "hangs", "exits", *range(8)])

    stats = asyncio.run(run()).stats
    assert (stats.succeeded, stats.failed) == (8, 3)
    assert stats.reasons == {
        "TimeoutError: the session took longer than 1 s": 2,
        "RuntimeError: the function raised SystemExit: 3": 1,
    }


def test_a_framework_that_cannot_be_opened_leaves_no_thread(server: Server) -> None:
    async def run() -> None:
        async with server.framework(SingleTurnAgent, sampling_defaults={"warmth": 1.0}):
            pass

    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(SessionSamplingError):
            asyncio.run(run())
    assert threading.active_count() <= before


def test_a_task_names_its_runner(server: Server) -> None:
    def sync(task: Any, llm: lrl.LLM) -> float:
        lrl.emit_reward(0.25, name="style")
        return 2.0

    async def run() -> Any:
        runners = {"single": SingleTurnAgent, "sync": sync}
        async with server.framework(runners, default="single") as framework:
            with pytest.raises(LoopTaskError, match=r"task 1 has agent_name 'other'.*there are \['single', 'sync'\]"):
                await framework.generate_sequences(["hi", {"prompt": "hi", "agent_name": "other"}])
            return await framework.generate_sequences(["hi", {"prompt": "hi", "agent_name": "sync"}])

    single, sync_one = asyncio.run(run()).sessions
    assert (single.runner, single.trajectory.calls, single.trajectory.ended_by) == ("single", 1, "answer")
    assert (sync_one.runner, sync_one.trajectory.calls) == ("sync", 0)
    assert sync_one.trajectory.rewards.named == {"style": 0.25, "reward": 2.0}


def test_requests_override_the_defaults_that_they_may_and_no_other(server: Server) -> None:
    async def asks(task: dict[str, Any], llm: lrl.LLM) -> None:
        await says("one", llm, **task)

    defaults = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}
    tasks = [{}, {"temperature": 0.75, "max_tokens": 9, "presence_penalty": 1.0}]

    async def run() -> Any:
        async with server.framework(asks, sampling_defaults=defaults) as framework:
            return await framework.generate_sequences(tasks)

    batch = asyncio.run(run())
    assert batch.stats.failed == 0  # this engine has no penalties, and would refuse them
    traces = server.store.traces([ended.session_id for ended in batch.sessions]).values()
    spans = [span for trace in traces for span in trace.attempts[0].spans if span.name == semconv.CALL_SPAN]
    kept, own = [span.attributes[semconv.SAMPLING_EFFECTIVE] for span in spans]
    names = ("temperature", "top_p", "max_tokens", "presence_penalty")
    assert [kept.get(name) for name in names] == [0.5, 0.9, 7, None]
    assert [own.get(name) for name in names] == [0.75, 0.9, 9, None]


def test_sampling_defaults_that_there_are_not_are_refused(server: Server) -> None:
    async def run() -> None:
        async with server.framework(scores, sampling_defaults={"temprature": 1.0}):
            pass

    with pytest.raises(SessionSamplingError, match=r"sampling_defaults has \['temprature'\]; there are"):
        asyncio.run(run())
    with pytest.raises(ValueError, match="max_concurrent_sessions is -1"):
        server.framework(scores, max_concurrent_sessions=-1)
