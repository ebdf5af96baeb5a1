"""The journal: what was recorded survives a cut at any byte, a killed process, and a ledger that fails for a while."""

import asyncio
import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rl_adapters.call import Call, from_span, to_span
from lightning_rl_adapters.span import Packed, Span, pack, unpack
from lightning_rl_proxy.recording import recorder as recorder_module
from lightning_rl_proxy.recording.recorder import Recorder, replay
from tests.proxy.conftest import MemoryLedger, Served
from tests.random_examples import examples


def span(i: int) -> Span:
    return Span(
        span_id=f"s{i}", rollout_id="r", attempt_id="a", name="x", number=i, start_ns=0, end_ns=0,
        attributes={"ids": bytes(range(i % 7)), "text": "é" * i},
    )  # fmt: skip


async def write(journal: Path, ledger: MemoryLedger, n: int) -> None:
    recorder = Recorder(journal, ledger)
    await recorder.start()
    for i in range(n):
        recorder.record(span(i))
    await recorder.stop()


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_journal_cut_anywhere_keeps_every_whole_record(tmp_path: Path, data: st.DataObject) -> None:
    journal = tmp_path / "journal"
    asyncio.run(write(journal, MemoryLedger(), 5))
    whole = journal.read_bytes()
    sizes = [0]
    for i in range(1, 6):
        asyncio.run(write(journal, MemoryLedger(), i))
        sizes.append(journal.stat().st_size)
    cut = data.draw(st.integers(0, len(whole)))
    journal.write_bytes(whole[:cut])
    assert [s.span_id for s in replay(journal).records] == [f"s{i}" for i in range(5) if sizes[i + 1] <= cut]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=st.integers(1, 50), cut=st.integers(0, 2000), data=st.data())
def test_a_journal_written_in_pieces_and_cut_anywhere_goes_on_with_the_next_gateway(
    tmp_path: Path, step: int, cut: int, data: st.DataObject
) -> None:
    """The kill came between two writes of a record, or within one."""
    journal, whole_write, ends = tmp_path / "journal", os.write, [0]
    journal.unlink(missing_ok=True)

    async def until_the_kill() -> None:
        recorder = Recorder(journal, Stuck())
        await recorder.start()
        with pytest.MonkeyPatch.context() as short:
            short.setattr(os, "write", lambda file, piece: whole_write(file, piece[:step]))
            for i in range(5):
                recorder.record(span(i))
                ends.append(journal.stat().st_size)

    async def afterwards(ledger: MemoryLedger) -> None:
        recorder = Recorder(journal, ledger)
        await recorder.start()
        assert names(ledger.spans) == kept
        recorder.record(span(9))
        assert names(replay(journal).records) == ["s9"]
        await recorder.stop()

    asyncio.run(until_the_kill())
    cut = min(cut, ends[-1])
    with journal.open("rb+") as file:
        file.truncate(cut)
        if data.draw(st.booleans(), "zeros in place of what is missing"):
            file.truncate(cut + 100)
    kept = [f"s{i}" for i in range(5) if ends[i + 1] <= cut]
    ledger = MemoryLedger()
    asyncio.run(afterwards(ledger))
    assert names(ledger.spans) == [*kept, "s9"]


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_byte_costs_the_record_that_holds_it_alone_and_is_told(tmp_path: Path, data: st.DataObject) -> None:
    journal, n = tmp_path / "journal", 6
    ends = []
    for i in range(1, n + 1):
        asyncio.run(write(journal, MemoryLedger(), i))
        ends.append(journal.stat().st_size)
    whole = bytearray(journal.read_bytes())
    assert replay(journal) == ([pack(span(i)) for i in range(n)], False)
    flipped = data.draw(st.integers(0, len(whole) - 1))
    whole[flipped] ^= data.draw(st.integers(1, 255))
    journal.write_bytes(whole)
    hit = next(i for i in range(n) if flipped < ends[i])
    assert replay(journal) == ([pack(span(i)) for i in range(n) if i != hit], True)


def test_the_end_of_a_journal_is_cut_or_damaged(tmp_path: Path) -> None:
    journal, records = tmp_path / "journal", [pack(span(i)) for i in range(2)]
    asyncio.run(write(journal, MemoryLedger(), 2))
    whole = journal.read_bytes()
    journal.write_bytes(whole + bytes(100))  # as a file system may leave what was not written
    assert replay(journal) == (records, False)
    last = bytearray(whole)
    last[-len(records[1].record) - 7] ^= 1  # of its length, which now goes beyond the end
    journal.write_bytes(last)
    assert replay(journal) == (records[:1], True)


def test_a_damaged_journal_is_kept_beside_the_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal, ledger = tmp_path / "journal", MemoryLedger()
    asyncio.run(write(journal, MemoryLedger(), 3))
    damaged = journal.read_bytes()[:-1] + b"?"
    journal.write_bytes(damaged)
    asyncio.run(write(journal, ledger, 0))
    assert names(ledger.spans) == ["s0", "s1"]
    assert (tmp_path / "journal.damaged").read_bytes() == damaged
    assert "attempts that were open are retried" in caplog.text
    assert replay(journal) == ([], False)


def test_a_journal_of_an_earlier_release_is_replayed(tmp_path: Path) -> None:
    """Its records were whole spans, not what the store keeps of them."""
    journal, ledger = tmp_path / "journal", MemoryLedger()
    records = [msgspec.msgpack.encode(span(i)) for i in range(2)]
    journal.write_bytes(b"".join(struct.pack("<II", len(one), zlib.crc32(one)) + one for one in records))
    asyncio.run(write(journal, ledger, 0))
    assert ledger.spans == [span(0), span(1)]


def test_a_ledger_that_fails_for_a_while_gets_every_record_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = MemoryLedger()
    ledger.failures = 2
    asyncio.run(write(tmp_path / "journal", ledger, 10))
    assert [s.span_id for s in ledger.spans] == [f"s{i}" for i in range(10)]
    refused = [log for log in caplog.records if "the ledger refused" in log.getMessage()]
    assert ["the disk is busy" in log.getMessage() for log in refused] == [True, True]
    assert [bool(log.exc_info) for log in refused] == [True, False]  # where it came from is told once


def test_trouble_with_the_ledger_is_over_when_it_takes_records_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        ledger = MemoryLedger()
        ledger.failures = 1
        recorder = Recorder(tmp_path / "journal", ledger)
        await recorder.start()
        recorder.record(span(0))
        while recorder.trouble() is None:
            await asyncio.sleep(0.005)
        assert recorder.trouble() == "the store takes no records: the disk is busy"
        await recorder.stored()
        assert recorder.trouble() is None
        await recorder.stop()

    asyncio.run(scenario())


def test_records_of_a_killed_process_reach_the_ledger_at_the_next_start(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    program = """
import asyncio, sys
from pathlib import Path
from lightning_rl_proxy.recording.recorder import Recorder
from tests.proxy.conftest import MemoryLedger
from tests.proxy.recording.test_recorder import span

class Stuck(MemoryLedger):
    async def add_spans(self, spans):
        await asyncio.sleep(1000)

async def main():
    recorder = Recorder(Path(sys.argv[1]), Stuck())
    await recorder.start()
    for i in range(20):
        recorder.record(span(i))
    print("recorded", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""
    child = subprocess.Popen([sys.executable, "-c", program, str(journal)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "recorded"
    os.kill(child.pid, signal.SIGKILL)
    child.wait(20)
    child.stdout.close()
    ledger = MemoryLedger()
    asyncio.run(write(journal, ledger, 0))
    assert [s.span_id for s in ledger.spans] == [f"s{i}" for i in range(20)]


# A disk that is full


@contextmanager
def full_disk(journal: Path, free: int = 0) -> Iterator[None]:
    """Files of this process can grow no more: the journal by `free` bytes, others not at all."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Stuck(MemoryLedger):
    """Takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.largest = 0  # of what it was handed at once

    async def add_spans(self, spans: Sequence[Packed]) -> None:
        self.largest = max(self.largest, len(spans))
        await self.go.wait()
        await super().add_spans(spans)


def names(spans: Iterable[Span | Packed]) -> list[str]:
    return [span.span_id for span in spans]


@pytest.mark.parametrize("free", [0, 20])
def test_a_record_that_does_not_fit_is_cut_off_kept_in_memory_and_written_later(
    tmp_path: Path, free: int, caplog: pytest.LogCaptureFixture
) -> None:
    journal = tmp_path / "journal"

    async def scenario() -> None:
        ledger, counters = Stuck(), Counter[str]()
        recorder = Recorder(journal, ledger, counters=counters)
        await recorder.start()
        recorder.record(span(5))
        whole = journal.read_bytes()
        with full_disk(journal, free):
            recorder.record(span(6))
            recorder.record(span(7))
        assert journal.read_bytes() == whole
        assert counters["journal_errors"] == 2
        recorder.record(span(8))
        assert names(replay(journal).records) == ["s5", "s6", "s7", "s8"]
        ledger.go.set()
        await recorder.stored()
        assert names(ledger.spans) == ["s5", "s6", "s7", "s8"]
        await recorder.stop()

    asyncio.run(scenario())
    told = [record.getMessage() for record in caplog.records if record.name == "lightning_rl_proxy.recording.alerts"]
    assert "File too large" in told[0]
    assert told[1:] == [f"trouble with the journal {journal} is over"]


def test_a_journal_that_could_not_even_be_cut_is_cut_before_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"

    async def scenario() -> None:
        recorder = Recorder(journal, Stuck())
        await recorder.start()
        recorder.record(span(5))
        with full_disk(journal, free=20), monkeypatch.context() as broken:
            broken.setattr(os, "ftruncate", no_disk)
            recorder.record(span(6))
        recorder.record(span(7))
        assert replay(journal) == ([pack(span(i)) for i in (5, 6, 7)], False)

    asyncio.run(scenario())


def no_disk(*args: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_full_disk_gets_its_space_back_once_the_ledger_has_all(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def scenario() -> None:
        ledger = MemoryLedger()
        recorder = Recorder(journal, ledger)
        await recorder.start()
        recorder.record(span(5))
        with full_disk(journal):
            recorder.record(span(6))
            await recorder.stored()
        assert names(ledger.spans) == ["s5", "s6"]
        assert journal.stat().st_size == 0
        recorder.record(span(7))
        assert names(replay(journal).records) == ["s7"]
        await recorder.stop()

    asyncio.run(scenario())


def test_whoever_waits_hears_of_a_ledger_that_keeps_failing_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        ledger = MemoryLedger()
        recorder = Recorder(tmp_path / "journal", ledger)
        await recorder.start()
        ledger.failures = 1000
        recorder.record(span(1))
        with pytest.raises(OSError, match="the disk is busy"):
            await recorder.stored()
        ledger.failures = 0
        while recorder._failures:
            await asyncio.sleep(0.01)
        await recorder.stored()
        assert names(ledger.spans) == ["s1"]
        await recorder.stop()

    asyncio.run(scenario())


def test_what_a_failing_ledger_has_not_taken_at_the_stop_waits_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rl_proxy.recording.recorder._LAST_SECONDS", 0.05)
    journal = tmp_path / "journal"

    async def scenario() -> None:
        recorder = Recorder(journal, Stuck())
        await recorder.start()
        with full_disk(journal):
            recorder.record(span(1))
        await recorder.stop()

    asyncio.run(scenario())
    assert names(replay(journal).records) == ["s1"]


@pytest.mark.parametrize("asked", [False, True], ids=["nobody waits", "somebody waits"])
def test_where_records_come_thick_they_gather_unless_somebody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, asked: bool
) -> None:
    monkeypatch.setattr(recorder_module, "_BUSY_LINGER_SECONDS", 600.0)
    ledger = MemoryLedger()

    async def work() -> None:
        recorder = Recorder(tmp_path / "journal", ledger)
        await recorder.start()
        for i in range(recorder_module._BUSY - 1):
            recorder.record(span(i))
        while len(ledger.spans) < recorder_module._BUSY - 1:  # few are handed over soon, unasked
            await asyncio.sleep(0.005)
        for i in range(100, 100 + recorder_module._BUSY):
            recorder.record(span(i))
        if asked:
            await recorder.stored()
        else:
            await asyncio.sleep(10 * recorder_module._LINGER_SECONDS)
        assert len(ledger.spans) == recorder_module._BUSY - 1 + (recorder_module._BUSY if asked else 0)
        await recorder.stop()

    asyncio.run(asyncio.wait_for(work(), 60))
    assert len(ledger.spans) == 2 * recorder_module._BUSY - 1


@pytest.mark.parametrize("full", [False, True], ids=["", "full disk"])
def test_where_records_never_stop_coming_the_journal_holds_what_waits_and_little_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, full: bool
) -> None:
    monkeypatch.setattr(recorder_module, "_REWRITTEN_ABOVE", 4000)
    journal, sizes, missed, n = tmp_path / "journal", [], set[str](), 300

    class Overtaken(MemoryLedger):
        """Before it has taken some, there are others."""

        async def add_spans(self, spans: Sequence[Packed]) -> None:
            self.lacks_nothing()
            await super().add_spans(spans)
            for i in range(recorder._recorded, min(recorder._recorded + 3, n)):
                recorder.record(span(i))
            self.lacks_nothing()
            sizes.append(journal.stat().st_size)

        def lacks_nothing(self) -> None:
            there = {*names(self.spans), *names(replay(journal).records)}
            missed.update({f"s{i}" for i in range(recorder._recorded)} - there)

    ledger = Overtaken()
    recorder = Recorder(journal, ledger)

    async def work() -> None:
        await recorder.start()
        recorder.record(span(0))
        while recorder._recorded < n or recorder._waiting():
            if full and 100 < recorder._recorded < 200:
                monkeypatch.setattr(recorder_module.os, "replace", no_space)
            elif full:
                monkeypatch.setattr(recorder_module.os, "replace", replace)
            await asyncio.sleep(0.001)
        await recorder.stop()

    replace = os.replace
    asyncio.run(asyncio.wait_for(work(), 60))
    assert names(ledger.spans) == [f"s{i}" for i in range(n)]
    assert missed == set()
    assert max(sizes[-20:]) < 10_000 < sum(len(pack(span(i)).record) for i in range(n))
    assert {file.name for file in tmp_path.iterdir()} == {"journal"}


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_numbers_and_texts_that_no_record_can_hold_are_kept_as_text(tmp_path: Path) -> None:
    async def work(ledger: MemoryLedger) -> None:
        recorder = Recorder(tmp_path / "journal", ledger)
        await recorder.start()
        huge = span(1)
        huge.attributes["message"] = [{"n": 10**30, "small": 5, "deep": [{"m": -(10**30)}]}]
        recorder.record(huge)
        half = span(2)
        half.attributes["message"] = [{"half \ud83d": ["\ud83d"]}]
        recorder.record(half)
        await recorder.stop()

    ledger = MemoryLedger()
    asyncio.run(work(ledger))
    [kept, half] = ledger.spans
    assert half.attributes["message"] == [{"half \\ud83d": ["\\ud83d"]}]
    assert kept.attributes["message"] == [{"n": str(10**30), "small": 5, "deep": [{"m": str(-(10**30))}]}]


# Before the last byte of an answer leaves

BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


class Gate:
    """Holds a ledger up while it is `shut`."""

    def __init__(self, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shut = True
        self.taking = threading.Event()  # the ledger was handed something
        self._take = ledger.add_spans
        monkeypatch.setattr(ledger, "add_spans", self._add_spans)

    async def _add_spans(self, spans: Sequence[Packed]) -> None:
        self.taking.set()
        while self.shut:
            await asyncio.sleep(0.005)
        await self._take(spans)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_call_is_in_the_journal_before_the_last_byte_of_its_answer_leaves(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gate = Gate(served.ledger, monkeypatch)
    served.engine.script.append("one two three")
    key = {"authorization": f"Bearer {served.key()}"}
    journalled = []
    with httpx.stream(
        "POST", served.url + "/v1/chat/completions", json=BODY | {"stream": stream}, headers=key
    ) as answer:
        for line in answer.iter_lines():
            if not stream or line == "data: [DONE]":
                journalled += replay(tmp_path / "journal").records
    [record] = journalled
    assert from_span(unpack(record.record)).delivered
    assert served.ledger.spans == []
    gate.shut = False
    served.seal()
    assert names(served.ledger.spans) == names(journalled)


# A ledger that falls behind


def call_span(attempt: str, i: int, tokens: int = 3, *, trainable: bool = True) -> Span:
    call = Call(
        call_id=f"{attempt}{i}", rollout_id="r", attempt_id=attempt, number=i, model="policy", prompt_ids=[1],
        response_ids=[2] * tokens, logprobs=None, versions=[], temperature=1.0, finish_reason="stop", overshoot=1,
        trainable=trainable,
    )  # fmt: skip
    return to_span(call)


RECORD = 8 + len(pack(call_span("a", 0)).record)  # bytes in the journal


@pytest.mark.parametrize("bound", [{"max_waiting": 6}, {"max_waiting_bytes": 7 * RECORD - 1}], ids=["records", "bytes"])
def test_an_attempt_that_records_beyond_the_bound_is_given_up_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bound: dict[str, int]
) -> None:
    async def scenario() -> None:
        ledger, counters = Stuck(), Counter[str]()
        recorder = Recorder(tmp_path / "journal", ledger, max_batch=2, counters=counters, **bound)
        await recorder.start()
        recorder.record(call_span("a", 0))
        recorder.record(call_span("b", 0))
        while not recorder._handed:  # these two are the ledger's now
            await asyncio.sleep(0.005)
        for i in (1, 2):
            recorder.record(call_span("a", i))
            recorder.record(call_span("b", i))
        for i in range(3, 50):
            recorder.record(call_span("b", i))
        assert recorder.is_lost("r", "b")
        assert not recorder.is_lost("r", "a")
        assert counters["recording_lost"] == 49
        assert recorder.tokens_lost == {("r", "b"): {"policy": 49 * 4}}
        assert recorder.state()["records_waiting"] == 4
        recorder.record(call_span("a", 3))
        recorder.record(call_span("c", 0))
        ledger.go.set()
        await recorder.stored()
        assert names(ledger.spans) == ["a0", "b0", "a1", "a2", "a3", "c0"]
        assert ledger.largest == 2
        assert recorder._waiting_bytes == 0
        recorder.record(call_span("c", 1))
        recorder.record(call_span("b", 50))
        await recorder.stop()
        assert names(ledger.spans)[6:] == ["c1"]

    asyncio.run(scenario())
    told = [record.getMessage() for record in caplog.records if record.name == "lightning_rl_proxy.recording.alerts"]
    assert told[0].startswith("trouble with the recording of calls: 6 calls wait for the store")
    assert told[1:] == ["trouble with the recording of calls is over"]


def test_of_given_up_records_the_policys_tokens_alone_are_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        recorder = Recorder(tmp_path / "journal", Stuck(), max_batch=1, max_waiting=2)
        await recorder.start()
        recorder.record(call_span("a", 0))
        while not recorder._handed:
            await asyncio.sleep(0.005)
        for i in range(3):
            recorder.record(call_span("b", i, trainable=i != 1))
        assert recorder.tokens_lost == {("r", "b"): {"policy": 2 * 4}}

    asyncio.run(scenario())


def test_what_was_recorded_after_the_given_up_ones_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        ledger = Stuck()
        recorder = Recorder(tmp_path / "journal", ledger, max_waiting=3)
        await recorder.start()
        for attempt in ("a", "b", "c", "b"):
            recorder.record(call_span(attempt, 0))
        assert recorder.is_lost("r", "b")
        waiting = asyncio.create_task(recorder.stored())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        ledger.go.set()
        await waiting
        assert names(ledger.spans) == ["a0", "c0"]
        await recorder.stop()

    asyncio.run(scenario())


def test_memory_is_bounded_while_disk_and_ledger_are_both_stuck(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def scenario() -> None:
        recorder = Recorder(journal, Stuck(), max_waiting=10)
        await recorder.start()
        recorder.record(call_span("first", 0))
        with full_disk(journal):
            for i in range(500):
                recorder.record(call_span(f"attempt {i // 5}", i))
                assert len(recorder._pending) + len(recorder._handed) <= 10
                assert len(recorder._unwritten) <= 10

    asyncio.run(scenario())


def say(served: Served, attempt_id: str) -> str:
    with openai.OpenAI(
        base_url=served.base_url(attempt_id=attempt_id), api_key=served.key(attempt_id=attempt_id), max_retries=2
    ) as sdk:
        return str(sdk.chat.completions.create(**BODY).choices[0].message.content)


def test_recording_that_falls_behind_fails_the_attempt_and_never_the_service(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(served.ledger, monkeypatch)
    monkeypatch.setattr(served.gateway._recorder, "_max_waiting", 2)
    assert say(served, "a1") == "ok"
    assert gate.taking.wait(10)  # what the ledger is taking is not given up any more: the next one waits behind it
    assert [say(served, "a1") for _ in range(2)] == ["ok"] * 2  # the last finds no room, and is answered all the same
    with pytest.raises(openai.ConflictError, match="the store did not take its records in time") as refused:
        say(served, "a1")
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert served.gateway.is_lost("r1", "a1")
    assert say(served, "a2") == "ok"
    assert not served.gateway.is_lost("r1", "a2")
    received = served.gateway.state()["models"]["policy"]["tokens_received"]
    assert served.gateway.state()["tokens_pending"] == received  # all of it, as long as the attempts are open

    gate.shut = False
    served.seal(attempt_id="a1")
    served.seal(attempt_id="a2")
    assert say(served, "a3") == "ok"
    served.seal(attempt_id="a3")
    calls = served.ledger.calls()
    assert {call.attempt_id for call in calls} >= {"a2", "a3"}
    assert len(calls) == len({call.call_id for call in calls})
    state = served.gateway.state()
    lost = state["tokens_lost"]
    assert lost
    assert state["tokens_pending"] == lost
    counted = served.gateway.tokens_of(["r1", "r2"])
    assert sum(each.received["policy"] for each in counted.values()) == state["models"]["policy"]["tokens_received"]
    assert {name: each.lost for name, each in counted.items()} == {"a1": {"policy": lost}, "a2": {}, "a3": {}}
    assert served.gateway.tokens_of(["r2"]) == {}
    assert state["models"]["policy"]["tokens_received"] == sum(call.sampled_tokens for call in calls) + lost
