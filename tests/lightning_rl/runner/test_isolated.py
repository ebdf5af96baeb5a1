"""A rollout in a process of its own: what it comes to is whole, what happens to it costs no other anything."""

import asyncio
import os
import socket
import sys

import cloudpickle
import msgspec
import pytest

from lightning_rl.runner.isolated import ForkServer
from lightning_rl.runner.outcome import Outcome
from lightning_rl.runner.output_capture import Printed
from lightning_rl.runner.payload import LENGTH
from lightning_rl.store.contract import Finish
from tests.lightning_rl.runner.runs import asked
from tests.lightning_rl.runner.test_runner import gone

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # children cannot import a test


def test_rewards_spans_results_and_tracebacks_come_back_whole(server, tmp_path) -> None:
    def agent(task, llm):
        from lightning_rl.agents.emit import emit_message, emit_reward

        emit_message(f"message of {task}")
        emit_reward(0.5, name="tool", call_id="resp_c")
        if task == "raise":
            raise LookupError("no such table")
        if task == "panic":
            raise type("PanicException", (BaseException,), {})("as a library in Rust")
        return {"reward": 1.0, "style": 2.0, "pid": float(__import__("os").getpid())}

    async def awaited(task, llm):
        import asyncio

        await asyncio.sleep(0)
        return agent(task, llm)

    for each in (agent, awaited):
        with asked(server, tmp_path, each, ["a", "raise", "panic", "b"], isolation="process") as rollouts:
            one, failed, panicked, two = rollouts.ended()
            workers = rollouts.working.pids
        assert (panicked.status, panicked.error.type, panicked.attempt_count) == ("failed", "PanicException", 1)
        assert (one.reward, one.rewards["style"]) == (1.0, 2.0)
        assert len({one.rewards["pid"], two.rewards["pid"], *workers}) == 2 + len(workers)
        assert (failed.status, failed.error.type, failed.attempt_count) == ("failed", "LookupError", 1)
        assert "in agent" in failed.error.traceback
        assert not failed.error.infrastructure
        for rollout, task in ((one, "a"), (failed, "raise"), (two, "b")):
            [trace] = server.store.traces([rollout.rollout_id])[rollout.rollout_id].attempts
            assert [r.call_id for r in trace.rewards if r.call_id] == ["resp_c"]
            [said] = [span for span in trace.spans if span.name == "lightning_rl.message"]
            assert said.attributes["lightning_rl.message.text"] == f"message of {task}"


def test_crashes_are_infrastructure_and_cost_no_sibling_anything(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})

    def agent(task, llm):
        import ctypes
        import os
        import resource
        import time

        print("begun", task)
        if task == "exit":
            os._exit(7)
        if task == "segv":
            ctypes.string_at(0)
        if task == "memory":
            resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
            bytearray(2**31)
        time.sleep(2)
        return 1.0

    with asked(
        server, tmp_path, agent, ["sibling", "exit", "segv", "memory"], 4, "process", max_attempts=2
    ) as rollouts:
        before = rollouts.working.pids
        sibling, left, segv, memory = rollouts.ended()
        assert rollouts.working.pids == before
        assert (sibling.reward, sibling.attempt_count) == (1.0, 1)
        for rollout, how in ((left, "ended with status 7"), (segv, "was killed by SIGSEGV")):
            assert (rollout.error.type, rollout.error.infrastructure) == ("RolloutProcessDied", True)
            assert how in rollout.error.message
            assert rollout.attempt_count == 2
        assert (memory.error.type, memory.error.infrastructure) == ("MemoryError", False)
        logs = rollouts.logs()
    assert [log.stdout for log in logs] == [f"begun {task}\n" for task in ("sibling", "exit", "segv", "memory")]
    assert "Segmentation fault" in logs[2].stderr
    assert "in agent" in logs[2].stderr


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_it_is_killed_with_all_that_it_started(server, tmp_path, how) -> None:
    def agent(task, llm):
        import os
        import signal
        import subprocess
        import time

        if task == "next":
            return 1.0
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        print("begun", flush=True)
        with open(task + ".new", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        os.rename(task + ".new", task)
        time.sleep(1e6)
        return None

    note = tmp_path / "note"
    limits = {"timeout_seconds": 3 if how == "deadline" else None, "unresponsive_seconds": 3}
    with asked(server, tmp_path, agent, [str(note), "next"], 1, "process", **limits) as rollouts:
        before = rollouts.working.pids
        rollouts.until(note.exists)
        pids = [int(pid) for pid in note.read_text().split()]
        if how == "cancel":
            server.store.cancel(rollouts.ids[0])
        rollouts.until(lambda: all(gone(pid) for pid in pids))
        first, second = rollouts.ended()
        rollouts.until(lambda: rollouts.logs()[0].stdout == "begun\n")
        assert rollouts.working.pids == before
    assert first.status == ("failed" if how == "deadline" else "cancelled")
    assert second.reward == 1.0


@pytest.mark.parametrize("answered", [True, False])
def test_a_rollout_has_ended_when_it_has_answered_however_long_its_exit_handlers_take(claim, answered) -> None:
    async def follow() -> None:
        server, heard = ForkServer(socket.socketpair()[0]), []
        parent_end, child_end = socket.socketpair()
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        following = asyncio.ensure_future(
            server._follow(1, claim, Printed(), parent_end, [out, err], lambda *told: heard.append(told))
        )
        outcome = Outcome([], Finish(status="succeeded", reward=1.0), [])
        if answered:
            body = msgspec.msgpack.encode(outcome)
            await asyncio.get_running_loop().run_in_executor(None, child_end.sendall, LENGTH.pack(len(body)) + body)
            while not heard:
                await asyncio.sleep(0.01)
        else:
            await asyncio.sleep(0.3)
        assert heard == ([(0, outcome)] if answered else [])
        server._ending(1).set_result(9)
        child_end.close()
        await following
        assert heard == [(0, outcome) if answered else (9, None)]
        for each in (to_out, to_err):
            os.close(each)

    asyncio.run(follow())


class TracesToFile:
    """An agent's tracer that is there when the agent is loaded, as a module's own is."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self):
        return _traced, (self.file,)


def _traced(file: str):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class ToFile(SpanExporter):
        def export(self, spans):
            with open(file, "a") as to:
                to.writelines(f"{span.name}\n" for span in spans)
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(ToFile()))
    trace.set_tracer_provider(provider)
    return TracesToFile(file)


def test_the_spans_of_an_agents_own_tracer_are_sent_at_its_end(server, tmp_path) -> None:
    traced = TracesToFile(str(tmp_path / "spans"))

    def agent(task, llm):
        from opentelemetry import trace

        with trace.get_tracer("agent").start_as_current_span(f"{task} {traced.file[-5:]}"):
            return 1.0

    with asked(server, tmp_path, agent, ["a", "b"], isolation="process") as rollouts:
        rollouts.ended()
    assert sorted((tmp_path / "spans").read_text().split("\n")) == ["", "a spans", "b spans"]


def test_nothing_of_it_outlives_its_runner(server, tmp_path) -> None:
    def agent(task, llm):
        import os
        import time

        with open(task + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(task + ".new", task)
        time.sleep(1e6)

    note = tmp_path / "note"
    with asked(server, tmp_path, agent, [str(note)], 1, "process") as rollouts:
        rollouts.until(note.exists)
        pid = int(note.read_text())
        os.kill(rollouts.working.pids[0], 9)
        rollouts.until(lambda: gone(pid))


def test_random_numbers_differ_between_the_rollouts_of_one_process(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})

    def agent(task, llm):
        import random

        return random.random()

    with asked(server, tmp_path, agent, range(6), isolation="process") as rollouts:
        assert len({rollout.reward for rollout in rollouts.ended()}) == 6


def test_a_client_loads_nothing_anew_in_each_process(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})

    def agent(task, llm):
        import asyncio
        import ssl
        import sys

        from openai.types.chat import ChatCompletion

        before, certificates = set(sys.modules), []
        ssl.SSLContext.load_verify_locations = lambda *_, **__: certificates.append(1)

        async def awaited():
            llm.async_openai().chat.completions  # noqa: B018 - that is what loads it

        if sys.version_info < (3, 14):
            asyncio.get_event_loop().close()  # agents may still run their own coroutines in the thread's loop
        made = float(ChatCompletion.__pydantic_complete__)  # as the SDK's first call makes it
        llm.openai().chat.completions  # noqa: B018
        asyncio.run(awaited())
        loaded = float(len(set(sys.modules) - before))
        return {"reward": 0.0, "made": made, "loaded": loaded, "certificates": float(len(certificates))}

    with asked(server, tmp_path, agent, range(2), isolation="process") as rollouts:
        for rollout in rollouts.ended():
            assert rollout.rewards == {"reward": 0.0, "made": 1.0, "loaded": 0.0, "certificates": 0.0}
