"""The journal: what was recorded survives a cut at any byte, a killed process, and a ledger that fails for a while."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

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
