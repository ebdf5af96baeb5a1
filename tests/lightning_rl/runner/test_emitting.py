"""What an agent emits in a runner reaches the server, its rewards, those of calls, and spans; or is given up."""

import json
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import cloudpickle
import pytest
import urllib3

from lightning_rl.agents.agent import as_agent
from lightning_rl.agents.emitted import Emitted
from lightning_rl.runner.delivery import SpanDelivery
from lightning_rl.runner.executors import InProcess
from lightning_rl.runner.launch import launch
from lightning_rl.runner.leases import ActiveClaims
from lightning_rl.runner.outcome import SpanBatch
from lightning_rl.runner.results import Results
from lightning_rl.runner.slots import Slots
from lightning_rl.runner.worker import Worker
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import AttemptTrace, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Unreachable

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # children cannot import a test

IDS = ["chatcmpl-c1", "cmpl-c2", "resp_c3", "msg_c4", "call_c5_0", "toolu_of_a_service"]

SAYS = ["lightning_rl.message.text", "lightning_rl.object.json", "lightning_rl.reward.name"]


def run(server, tmp_path, agent, tasks: Sequence[Any], n_runners: int = 2) -> list[AttemptTrace]:
    """The only attempt of each task, in their order."""
    requests = [RolloutRequest(task=task, config=RolloutConfig(max_attempts=1)) for task in tasks]
    ids = [rollout.rollout_id for rollout in server.store.enqueue(requests)]
    with launch(n_runners, as_agent(agent), server.url, server.runner_key, log_dir=tmp_path):
        waiting = set(ids)
        while waiting:
            waiting -= {rollout.rollout_id for rollout in server.store.wait(sorted(waiting), 30)}
    traces = server.store.traces(ids)
    return [traces[rollout_id].attempts[0] for rollout_id in ids]


def spawn(work) -> None:
    threading.Thread(target=work, daemon=True).start()


def work(server, agent, deliver) -> AttemptTrace:
    """The attempt of one rollout, run by a worker in this process."""
    (rollout,) = server.store.enqueue([RolloutRequest(task=1)])
    store = HttpStore(server.url, server.runner_key)
    (claim,) = store.claim("here", wait_seconds=10)
    finished = threading.Event()
    slots = Slots(1, freed=lambda _: None, empty=lambda: None)
    active, stop = ActiveClaims(), threading.Event()
    results = Results(store, active, stop, deliver)
    spawn(results.send)
    worker = Worker(
        store=store, worker_id="here", slots=slots, active=active, results=results,
        runs=InProcess(as_agent(agent), spawn), stop=stop, finished=finished.set, hangs=lambda: None,
    )  # fmt: skip
    worker.begin(claim)
    assert finished.wait(60)
    return server.store.traces([rollout.rollout_id])[rollout.rollout_id].attempts[0]


def test_rewards_of_calls_of_every_dialect_are_kept_as_they_were_given(server, tmp_path) -> None:
    def agent(task, llm):
        from lightning_rl.agents.emit import emit_reward

        for number, call_id in enumerate(IDS):
            emit_reward(number, name="tool", call_id=call_id)
        emit_reward(0.5, call_id=IDS[0])
        emit_reward(0.25, name="format")
        if task == "fails":
            raise LookupError
        return None if task == "none" else {"reward": 1.0, "style": 2.0}

    given, none, failed = run(server, tmp_path, agent, ["gives", "none", "fails"])
    for trace in (given, none, failed):
        of_calls = [(r.call_id, r.name, r.value) for r in trace.rewards if r.call_id is not None]
        assert of_calls == [(i, "tool", float(n)) for n, i in enumerate(IDS)] + [(IDS[0], "reward", 0.5)]
    assert (given.attempt.reward, given.attempt.rewards["format"]) == (1.0, 0.25)
    assert (none.attempt.reward, none.attempt.rewards) == (None, {"format": 0.25})
    assert (failed.attempt.status, failed.attempt.reward) == ("failed", None)


def test_what_threads_executors_and_tasks_emit_reaches_the_server_with_its_rollout(
    server, tmp_path, monkeypatch
) -> None:
    async def agent(task, llm):
        import asyncio
        import functools
        import threading
        from concurrent.futures import ThreadPoolExecutor

        from lightning_rl.agents.emit import emit_message, emit_object, emit_reward, operation

        shared = asyncio.__dict__.setdefault("_pool_in_this_test", ThreadPoolExecutor(4))  # threads of all rollouts
        arrived = asyncio.__dict__.setdefault("_arrived_in_this_test", [])
        arrived.append(task)
        while len(arrived) < 20:
            await asyncio.sleep(0.005)

        @operation
        async def step(name):
            await asyncio.to_thread(emit_message, f"{task}: {name}")
            await asyncio.get_running_loop().run_in_executor(shared, functools.partial(emit_object, [task, name]))
            own = threading.Thread(target=emit_reward, args=(task, f"{task}: {name}"))
            own.start()
            await asyncio.to_thread(own.join)

        with operation("outer", inputs={"task": task}):
            await asyncio.gather(step("a"), step("b"))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one process
    for number, trace in enumerate(run(server, tmp_path, agent, range(20), n_runners=20)):
        assert trace.attempt.rewards == {f"{number}: a": number, f"{number}: b": number}
        spans = {span.span_id: span for span in trace.spans}
        [outer] = [span for span in trace.spans if span.attributes.get("lightning_rl.operation.name") == "outer"]
        steps = [span for span in trace.spans if span.attributes.get("lightning_rl.parent_span") == outer.span_id]
        assert len(steps) == 2
        said = [span for span in trace.spans if span is not outer and span not in steps]
        assert sorted(span.name.removeprefix("lightning_rl.") for span in said) == (
            ["message"] * 2 + ["object"] * 2 + ["reward"] * 2
        )
        for span in said:
            parent = spans[span.attributes["lightning_rl.parent_span"]]
            assert parent in steps
            name = json.loads(parent.attributes["lightning_rl.operation.inputs"])["name"]
            text = next(span.attributes[says] for says in SAYS if says in span.attributes)
            assert re.findall(r"\w+", text) == [str(number), name]
        assert {span.attempt_id for span in trace.spans} == {trace.attempt.attempt_id}


def test_an_agents_exception_is_in_the_operations_that_it_left(server, tmp_path) -> None:
    def agent(task, llm):
        from lightning_rl.agents.emit import operation

        with operation("outer"), operation("inner"):
            raise LookupError("no such table")

    (trace,) = run(server, tmp_path, agent, [1])
    assert trace.attempt.status == "failed"
    assert sorted(span.attributes["lightning_rl.operation.name"] for span in trace.spans) == ["inner", "outer"]
    for span in trace.spans:
        [event] = span.attributes["lightning_rl.events"]
        assert event["attributes"]["exception.type"] == "LookupError"
        assert span.attributes["otel.status_code"] == "ERROR"


def emitting(task, llm):
    from lightning_rl.agents.emit import emit_message, emit_reward

    emit_message("hello")
    emit_reward(0.5, call_id="resp_c")
    return 1.0


def test_an_export_that_fails_changes_nothing_of_the_rollout(server, caplog) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, answers nothing
        hangs = SpanDelivery(f"http://127.0.0.1:{silent.getsockname()[1]}", "runner")
        for deliver in (SpanDelivery("http://127.0.0.1:9", "runner"), hangs, SpanDelivery(server.url, "a wrong key")):
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                trace = work(server, emitting, deliver)
            assert (trace.attempt.status, trace.attempt.reward, trace.attempt.sequence) == ("succeeded", 1.0, 1)
            assert ([reward.call_id for reward in trace.rewards], trace.spans) == (["resp_c"], [])
            rollout_id = trace.attempt.rollout_id
            assert f"2 of the 2 spans that rollout {rollout_id} emitted did not reach the server" in caplog.text


def test_a_server_that_does_not_answer_is_asked_once_for_all_that_waits(caplog) -> None:
    deliver, asked = SpanDelivery("http://127.0.0.1:9", "runner"), []

    def request(*args: Any, **kwargs: Any) -> None:
        asked.append(args)
        raise urllib3.exceptions.HTTPError("silent")

    deliver._pool.request = request
    deliver([("a", SpanBatch(512, b"")), ("a", SpanBatch(8, b"")), ("b", SpanBatch(512, b""))])
    assert len(asked) == 1
    told = "%d of the %d spans that rollout %s emitted did not reach the server"
    assert caplog.messages == [told % (520, 520, "a"), told % (512, 512, "b")]


def test_nothing_is_sent_where_nothing_was_emitted(server) -> None:
    sent: list[tuple[str, SpanBatch]] = []
    assert work(server, lambda task, llm: 1.0, sent.extend).attempt.reward == 1.0
    assert sent == []
    trace = work(server, emitting, sent.extend)
    [(rollout_id, batch)] = sent
    assert (rollout_id, batch.number) == (trace.attempt.rollout_id, 2)
    assert b"lightning_rl.message" in batch.otlp


def test_rewards_that_are_posted_again_count_once(server, monkeypatch) -> None:
    finish, lost = HttpStore.finish_many, []

    def first_answer_lost(self, *args):
        answer = finish(self, *args)
        if not lost:
            lost.append(args)
            raise Unreachable("gone")
        return answer

    monkeypatch.setattr(HttpStore, "finish_many", first_answer_lost)
    trace = work(server, emitting, lambda *_: None)
    assert (len(lost), trace.attempt.reward) == (1, 1.0)
    assert [(reward.call_id, reward.value) for reward in trace.rewards] == [("resp_c", 0.5)]


@pytest.mark.parametrize("variable", ["http_proxy", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_an_agents_own_environment_leads_spans_nowhere_else(server, monkeypatch, variable) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer theirs")
    assert [span.name for span in work(server, emitting, SpanDelivery(server.url, "runner")).spans] == [
        "lightning_rl.message", "lightning_rl.reward",
    ]  # fmt: skip


def test_an_attempt_emits_into_one_trace() -> None:
    assert Emitted("r", "a").trace_id == Emitted("r", "a").trace_id != Emitted("r", "b").trace_id
