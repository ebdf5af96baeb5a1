"""Threads of OpenMP, of which one thread of a process at a time has any."""

import subprocess
import sys

import pytest

COMPUTE = """
import os, torch
from lightning_rl.processes.openmp import end_threads, _pause
torch.set_num_threads(3)
count = lambda: len(os.listdir("/proc/self/task"))
x = torch.ones(512, 512)
first = x @ x
computing = count()
end_threads()
ended = count()
again = x @ x
print(_pause() is not None, computing - ended, count() - ended, torch.equal(first, again))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
def test_who_has_computed_ends_the_threads_that_computed_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", COMPUTE], check=True, capture_output=True, text=True)
    gnus, *threads = done.stdout.split()
    if gnus != "True":
        pytest.skip("this torch has another OpenMP than GNU's")
    assert threads == ["2", "2", "True"]
