"""Records that cross the control plane are decoded in many threads from the first moment on."""

import subprocess
import sys

CLAIM = """
import sys, threading
import msgspec
from lightning_rl.store.contract import Claim

sys.setswitchinterval(1e-6)
begin = threading.Barrier(16)
data = bytes.fromhex("83a7726f6c6c6f757480a7617474656d707480a97265736f757263657380")

def decode():
    begin.wait()
    try:
        msgspec.msgpack.decode(data, type=Claim)
    except msgspec.ValidationError:
        pass

threads = [threading.Thread(target=decode) for _ in range(16)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


def test_threads_that_decode_a_record_for_the_first_time_at_once_do_not_crash_the_process() -> None:
    for _ in range(8):  # without `read_hints`, about one in three crashes
        assert subprocess.run([sys.executable, "-c", CLAIM], timeout=60).returncode == 0
