"""What an agent emits goes to its own rollout, through whatever threads and tasks, and to nobody outside of one."""

import asyncio
import contextvars
import functools
import json
import math
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.instrumentation.threading import ThreadingInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from lightning_rl.agents.emit import emit_exception, emit_message, emit_object, emit_reward, operation
from lightning_rl.agents.emitted import Emitted

ROLLOUTS = 20
TEXT = st.text(st.characters())  # half surrogates too


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """What the span says, less whose it is."""
    whose = ("lightning_rl.rollout_id", "lightning_rl.attempt_id")
    return {name: value for name, value in (span.attributes or {}).items() if name not in whose}


def tree(spans: list[ReadableSpan]) -> dict[str, str | None]:
    """Each span's parent, by what they say."""
    said = {span.context.span_id: str(next(iter(attributes(span).values()), span.name)) for span in spans}
    return {said[span.context.span_id]: said[span.parent.span_id] if span.parent else None for span in spans}


@pytest.fixture
def threads_followed() -> Iterator[None]:
    """As a runner process has it."""
    ThreadingInstrumentor().instrument()
    yield
    ThreadingInstrumentor().uninstrument()


@operation
def look_up(key: str, *, number: int) -> int:
    emit_message(f"{key}: message {number}")
    return number * 2


def agent(number: int, barrier: threading.Barrier) -> None:
    """Says its number in every way, while the others do."""
    with operation(f"{number}: outer"):
        barrier.wait(30)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(functools.partial(look_up, number=number), [f"{number}: a", f"{number}: b"]))
        assert answers == [2 * number] * 2
        child = threading.Thread(target=emit_reward, args=(number, f"{number}: of a thread"))
        child.start()
        child.join(30)
    emit_reward(number, call_id=f"chatcmpl-{number}")
    emit_reward(number)


def check(emitted: Emitted, number: int) -> None:
    """All that it said is there, at its place, and nothing of the others."""
    assert emitted.rewards == {f"{number}: of a thread": number, "reward": number}
    assert [(r.value, r.call_id) for r in emitted.call_rewards] == [(number, f"chatcmpl-{number}")]
    operations = [span for span in emitted.spans if span.name == "lightning_rl.operation"]
    outer = next(span for span in operations if attributes(span)["lightning_rl.operation.name"] == f"{number}: outer")
    inner = {span.context.span_id: span for span in operations if span is not outer}
    assert [span.parent.span_id for span in inner.values() if span.parent] == [outer.context.span_id] * 2
    messages = [span for span in emitted.spans if span.name == "lightning_rl.message"]
    assert sorted(str(attributes(span)["lightning_rl.message.text"]) for span in messages) == [
        f"{number}: a: message {number}",
        f"{number}: b: message {number}",
    ]
    assert {span.parent.span_id for span in messages if span.parent} == set(inner)
    assert len({span.context.trace_id for span in emitted.spans}) == 1
    assert {(span.attributes or {})["lightning_rl.attempt_id"] for span in emitted.spans} == {f"a{number}"}
    assert len(emitted.spans) == 8


@pytest.mark.usefixtures("threads_followed")
def test_twenty_rollouts_at_once_in_threads_share_nothing() -> None:
    barrier = threading.Barrier(ROLLOUTS)
    rollouts = [Emitted(f"r{number}", f"a{number}") for number in range(ROLLOUTS)]

    def run(number: int) -> None:
        with rollouts[number].collecting():
            agent(number, barrier)

    with ThreadPoolExecutor(ROLLOUTS) as pool:
        list(pool.map(run, range(ROLLOUTS)))
    for number, emitted in enumerate(rollouts):
        check(emitted, number)
    assert len({span.context.trace_id for emitted in rollouts for span in emitted.spans}) == ROLLOUTS


@pytest.mark.usefixtures("threads_followed")
def test_twenty_rollouts_at_once_in_tasks_share_nothing() -> None:
    rollouts = [Emitted(f"r{number}", f"a{number}") for number in range(ROLLOUTS)]

    @operation("step")
    async def step(number: int, event: asyncio.Event) -> int:
        await event.wait()
        await asyncio.gather(asyncio.to_thread(emit_message, f"{number}: thread"), say(f"{number}: task"))
        return number

    async def say(text: str) -> None:
        await asyncio.sleep(0)
        emit_message(text)

    async def rollout(number: int, event: asyncio.Event) -> None:
        with rollouts[number].collecting():
            assert await asyncio.create_task(step(number, event)) == number
            await asyncio.get_running_loop().run_in_executor(None, emit_reward, float(number))

    async def run() -> None:
        event = asyncio.Event()
        tasks = [asyncio.create_task(rollout(number, event)) for number in range(ROLLOUTS)]
        await asyncio.sleep(0)
        event.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    for number, emitted in enumerate(rollouts):
        assert emitted.rewards == {"reward": number}
        parents = tree(emitted.spans)
        assert parents == {f"{number}: thread": "step", f"{number}: task": "step", "step": None, "reward": None}


def test_a_step_records_its_name_inputs_and_output_or_its_exception() -> None:
    emitted = Emitted("r", "a")

    class Base:
        def __repr__(self) -> str:
            raise RuntimeError

    @operation("named")
    def fails(word: str, base: Any) -> None:
        raise LookupError(f"no {word}")

    with emitted.collecting():
        assert look_up("k", number=2) == 4
        with pytest.raises(LookupError, match="no \ud800"):
            fails("\ud800", Base())
        with operation("block", inputs={"query": 1}) as step:
            step.output = [1, {"two": 2}]
        with operation(name="silent"):
            pass
    _, call, failed, block, silent = emitted.spans
    assert attributes(call) == {
        "lightning_rl.operation.name": "look_up",
        "lightning_rl.operation.inputs": '{"key": "k", "number": 2}',
        "lightning_rl.operation.output": "4",
    }
    assert failed.status.status_code.name == "ERROR"
    assert attributes(failed)["lightning_rl.operation.name"] == "named"
    assert "<Base instance at" in json.loads(str(attributes(failed)["lightning_rl.operation.inputs"]))["base"]
    [event] = failed.events
    told = event.attributes or {}
    assert (event.name, told["exception.type"], told["exception.message"]) == (
        "exception", "LookupError", "no \\ud800",
    )  # fmt: skip
    assert "in fails" in str(told["exception.stacktrace"])
    assert attributes(block)["lightning_rl.operation.output"] == '[1, {"two": 2}]'
    assert set(attributes(silent)) == {"lightning_rl.operation.name"}


def test_messages_objects_and_exceptions_are_spans_of_their_own() -> None:
    emitted = Emitted("r", "a")
    with emitted.collecting():
        emit_message("hello", attributes={"turn": {"number": 2}})
        emit_object({"a": [1, None]}, attributes={"turn": 3})
        emit_exception(ValueError("seen"), attributes={"turn": 4})
        emit_reward(0.5, "style", call_id="msg_1")
    message, value, error, reward = emitted.spans
    assert (message.name, attributes(message)) == (
        "lightning_rl.message",
        {"lightning_rl.message.text": "hello", "turn.number": 2},
    )
    assert (value.name, attributes(value)) == (
        "lightning_rl.object",
        {"lightning_rl.object.json": '{"a": [1, null]}', "turn": 3},
    )
    assert (error.name, error.events[0].name) == ("lightning_rl.exception", "exception")
    assert attributes(error) == {"turn": 4}
    assert (error.events[0].attributes or {})["exception.message"] == "seen"
    assert reward.name == "lightning_rl.reward"
    assert attributes(reward) == {
        "lightning_rl.reward.name": "style", "lightning_rl.reward.value": 0.5, "lightning_rl.reward.call_id": "msg_1",
    }  # fmt: skip


def test_rewards_of_calls_are_all_kept_under_ids_of_their_own() -> None:
    emitted = Emitted("r", "a")
    with emitted.collecting():
        emit_reward(1, call_id="c")
        emit_reward(2, call_id="c")
        emit_reward(0.25)
        emit_reward(0.75)
    assert emitted.rewards == {"reward": 0.75}
    assert [(r.reward_id, r.value, r.name, r.call_id) for r in emitted.call_rewards] == [
        ("a-call-0", 1.0, "reward", "c"),
        ("a-call-1", 2.0, "reward", "c"),
    ]


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_what_is_wrong_is_said_inside_a_rollout_and_outside(inside: bool) -> None:
    def all_wrong() -> None:
        for bad in (math.nan, math.inf, "1", None):
            with pytest.raises(ValueError, match=r"emit_reward.*must be a finite number"):
                emit_reward(bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="call_id is empty"):
            emit_reward(1, call_id="")
        for wrong in (lambda: emit_reward(1, call_id=7), lambda: emit_reward(1, name=None), lambda: emit_message(3)):
            with pytest.raises(TypeError, match="is text"):
                wrong()
        for thing in ({1, 2}, math.nan, object()):
            with pytest.raises(TypeError, match="cannot be written as JSON"):
                emit_object(thing)
        with pytest.raises(TypeError, match="an exception is recorded"):
            emit_exception("boom")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="needs a name"), operation():
            pass

    emitted = Emitted("r", "a")
    if inside:
        with emitted.collecting():
            all_wrong()
    else:
        all_wrong()
    assert (emitted.spans, emitted.rewards, emitted.call_rewards) == ([], {}, [])


def test_what_cannot_be_recorded_as_a_step_is_refused_where_it_is_decorated() -> None:
    def generator() -> Iterator[int]:
        yield 1

    class Thing:
        pass

    for wrong in (generator, Thing):
        with pytest.raises(TypeError, match=r"is no function that returns; put `with operation"):
            operation(wrong)
    with pytest.raises(TypeError, match="inputs are for a block"):
        operation("x", inputs=1)(len)
    emitted = Emitted("r", "a")
    with emitted.collecting():
        block = operation("twice")
        with block:
            pass
        with pytest.raises(RuntimeError, match="'twice' was entered before"), block:
            pass


def test_outside_a_rollout_a_decorated_function_is_that_function_and_nothing_is_loaded() -> None:
    program = """
import sys, asyncio, lightning_rl as lrl
@lrl.operation
def double(x: int) -> int:
    "Doubles."
    return 2 * x
@lrl.operation("slow")
async def slow(x):
    return x
lrl.emit_reward(1.0, call_id="c"); lrl.emit_message("m"); lrl.emit_object([1]); lrl.emit_exception(ValueError())
with lrl.operation("block") as step:
    step.output = 1
assert (double(2), double.__name__, double.__doc__, asyncio.run(slow(3))) == (4, "double", "Doubles.", 3)
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_sdk_is_loaded_by_the_first_thing_that_a_rollout_emits() -> None:
    program = """
import sys
from lightning_rl.agents.emit import emit_message
from lightning_rl.agents.emitted import Emitted
emitted = Emitted("r", "a")
with emitted.collecting():
    before = "opentelemetry.sdk" in sys.modules
    emit_message("m")
print(before, "opentelemetry.sdk" in sys.modules, "opentelemetry.exporter" in sys.modules, len(emitted.spans))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False True False 1"


@pytest.mark.parametrize("off", [False, True], ids=["theirs on", "theirs off"])
def test_the_agents_own_telemetry_neither_gets_our_spans_nor_turns_them_off(
    monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "1")
    seen = InMemorySpanExporter()
    theirs = TracerProvider(sampler=ALWAYS_OFF if off else ALWAYS_ON)
    theirs.add_span_processor(SimpleSpanProcessor(seen))
    emitted = Emitted("r", "a")
    with emitted.collecting(), theirs.get_tracer("theirs").start_as_current_span("their span"):
        emit_reward(1.0)
    [span] = emitted.spans
    assert len(attributes(span)) == 2
    assert [span.name for span in seen.get_finished_spans()] == ([] if off else ["their span"])


def test_what_comes_after_the_end_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    emitted = Emitted("r7", "a")
    with emitted.collecting():
        late = contextvars.copy_context()
    late.run(emit_reward, 1.0, "late")
    late.run(emit_message, "late")
    assert (emitted.rewards, emitted.spans) == ({}, [])
    assert "rollout r7: the reward 'late' came after its agent had ended" in caplog.text


def test_a_rollout_inside_another_has_its_own() -> None:
    outer, inner = Emitted("r1", "a1"), Emitted("r2", "a2")
    with outer.collecting():
        with operation("step"), inner.collecting():
            emit_reward(1.0)
        emit_reward(2.0)
    assert (outer.rewards, inner.rewards) == ({"reward": 2.0}, {"reward": 1.0})
    [span] = inner.spans
    assert (span.parent, span.context.trace_id) == (None, inner.trace_id)


def test_where_opentelemetry_is_disabled_rewards_are_kept_and_spans_are_not() -> None:
    program = """
from lightning_rl.agents.emit import emit_exception, emit_message, emit_reward, operation
from lightning_rl.agents.emitted import Emitted
emitted = Emitted("r", "a")
with emitted.collecting(), operation("step", inputs=1) as step:
    emit_message("m"); emit_exception(ValueError()); emit_reward(1.0); emit_reward(2.0, call_id="c")
    step.output = 2
print(emitted.rewards, len(emitted.call_rewards), emitted.spans)
"""
    environment = os.environ | {"OTEL_SDK_DISABLED": "true"}
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert answer.stdout.strip() == "{'reward': 1.0} 1 []"


def test_decorated_functions_travel_to_other_processes() -> None:
    factor = 3

    @operation
    def local(x: int) -> int:
        return factor * x

    travelled = pickle.loads(cloudpickle.dumps(local))
    emitted = Emitted("r", "a")
    with emitted.collecting():
        assert travelled(2) == 6
    assert len(emitted.spans) == 1


@given(message=TEXT, name=TEXT, call_id=TEXT.filter(bool), value=st.recursive(st.none() | TEXT, st.lists))
def test_whatever_text_is_emitted_can_be_sent(message: str, name: str, call_id: str, value: Any) -> None:
    emitted = Emitted("r", "a")
    with emitted.collecting(), operation(name or "block", inputs={message: value}) as step:
        emit_message(message)
        emit_object(value)
        emit_reward(1.0, name, call_id=call_id)
        emit_exception(ValueError(message))
        step.output = {message: value}
    encoded = encode_spans(emitted.spans).SerializeToString()
    assert len(encoded) > 0
    assert all(reward.name.encode() is not None for reward in emitted.call_rewards)
