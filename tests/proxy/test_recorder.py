"""The journal: what was recorded survives a cut at any byte, a killed process, and a ledger that fails for a while."""

import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rl_adapters.span import Span
from lightning_rl_proxy.recorder import Recorder, replay
from tests.proxy.conftest import MemoryLedger


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


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    assert [s.span_id for s in replay(journal)] == [f"s{i}" for i in range(5) if sizes[i + 1] <= cut]


def test_a_damaged_record_ends_the_replay(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    asyncio.run(write(journal, MemoryLedger(), 3))
    data = bytearray(journal.read_bytes())
    data[-1] ^= 1
    journal.write_bytes(data)
    assert [s.span_id for s in replay(journal)] == ["s0", "s1"]


def test_a_ledger_that_fails_for_a_while_gets_every_record_once(tmp_path: Path) -> None:
    ledger = MemoryLedger()
    ledger.failures = 2
    asyncio.run(write(tmp_path / "journal", ledger, 10))
    assert [s.span_id for s in ledger.spans] == [f"s{i}" for i in range(10)]


def test_records_of_a_killed_process_reach_the_ledger_at_the_next_start(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    program = """
import asyncio, sys
from pathlib import Path
from lightning_rl_proxy.recorder import Recorder
from tests.proxy.conftest import MemoryLedger
from tests.proxy.test_recorder import span

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

    async def add_spans(self, spans: Sequence[Span]) -> None:
        await self.go.wait()
        await super().add_spans(spans)


def names(spans: Iterable[Span]) -> list[str]:
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
        assert names(replay(journal)) == ["s5", "s6", "s7", "s8"]
        ledger.go.set()
        await recorder.stored()
        assert names(ledger.spans) == ["s5", "s6", "s7", "s8"]
        await recorder.stop()

    asyncio.run(scenario())
    told = [record.getMessage() for record in caplog.records if record.name == "lightning_rl_proxy.alarm"]
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
        assert names(replay(journal)) == ["s5", "s6", "s7"]

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
        assert names(replay(journal)) == ["s7"]
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
    monkeypatch.setattr("lightning_rl_proxy.recorder._LAST_SECONDS", 0.05)
    journal = tmp_path / "journal"

    async def scenario() -> None:
        recorder = Recorder(journal, Stuck())
        await recorder.start()
        with full_disk(journal):
            recorder.record(span(1))
        await recorder.stop()

    asyncio.run(scenario())
    assert names(replay(journal)) == ["s1"]


def test_numbers_that_no_record_can_hold_are_kept_as_text(tmp_path: Path) -> None:
    async def work(ledger: MemoryLedger) -> None:
        recorder = Recorder(tmp_path / "journal", ledger)
        await recorder.start()
        huge = span(1)
        huge.attributes["message"] = [{"n": 10**30, "small": 5, "deep": [{"m": -(10**30)}]}]
        recorder.record(huge)
        await recorder.stop()

    ledger = MemoryLedger()
    asyncio.run(work(ledger))
    [kept] = ledger.spans
    assert kept.attributes["message"] == [{"n": str(10**30), "small": 5, "deep": [{"m": str(-(10**30))}]}]
