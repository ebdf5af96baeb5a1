"""vLLM's own transfers (`ipc`, `nccl`) understand our ends of them, as far as that shows without a GPU."""

import os
import subprocess
from pathlib import Path

from tests.vllm.server import PYTHON, ROOT


def test_vllms_sender_and_receiver_understand_our_source_and_client() -> None:
    script = Path(__file__).with_name("transfers.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([PYTHON, script], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "both were understood" in done.stdout
