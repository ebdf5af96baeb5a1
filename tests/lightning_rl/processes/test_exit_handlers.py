"""The end of a process that waits for no thread: what is registered with `atexit` runs, and cannot hold it for ever."""

import subprocess
import sys

PROGRAM = """
import atexit, multiprocessing, signal, threading, time
from lightning_rl.processes.exit_handlers import leave

atexit.register(print, "registered first")
atexit.register(lambda: 1 / 0)
atexit.register(lambda: print(threading.current_thread() is threading.main_thread(), flush=True))
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which a process that is forked has, too
multiprocessing.get_context("fork").Process(target=time.sleep, args=(1e6,)).start()
threading.Thread(target=time.sleep, args=(1e6,)).start()
"""


def ended(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + line], capture_output=True, text=True, timeout=60, check=False
    )


def test_handlers_run_in_the_main_thread_and_neither_threads_nor_processes_are_waited_for() -> None:
    done = ended("leave(3, seconds=50, last=lambda: print('last', flush=True))")
    assert (done.returncode, done.stdout) == (3, "True\nregistered first\nlast\n")
    assert "ZeroDivisionError" in done.stderr


def test_handlers_that_hang_are_left_with_a_word() -> None:
    done = ended(
        "atexit.register(time.sleep, 1e6); leave(3, seconds=0.1, last=lambda: [print('last', flush=True), 1 / 0])"
    )
    assert (done.returncode, done.stdout) == (3, "last\n")
    assert "takes more than 0.1 s, and is left" in done.stderr
