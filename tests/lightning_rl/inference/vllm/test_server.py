"""A server that a child process keeps: it starts, ends with us, and says why it cannot. A small program stands in for
vLLM; the real one is in `tests/vllm`."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.vllm.server import VllmNotStarted, VllmServer
from lightning_rl.processes.child import Child

# It is called as `program -m vllm... --port N ...`.
ANSWERS = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
FAILS = "import sys; print({said!r}); sys.exit(3)"


def server(tmp_path: Path, program: str) -> VllmServer:
    script = tmp_path / "program.py"
    script.write_text(program)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return VllmServer(options(str(python)), tmp_path, 0)


def options(python: str) -> Options:
    return Options(python=python, model="m", context=512, dtype="float32", device="cpu", processed_logprobs=False)


def test_it_runs_from_wait_to_stop_and_prints_to_its_log(tmp_path: Path) -> None:
    made = server(tmp_path, ANSWERS)
    made.start()
    made.wait()
    assert made.runs
    assert "serving" in made.log.read_text()
    made.stop()
    assert not made.runs


def test_it_can_be_started_again_at_the_same_address(tmp_path: Path) -> None:
    made = server(tmp_path, ANSWERS)
    url = made.url
    for _ in range(2):
        made.start()
        made.wait()
        made.stop()
    assert made.url == url


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("No module named vllm", "there is no vLLM in that environment"),
        ("error: unrecognized arguments: --odd 3", "this vLLM knows no --odd 3"),
        ("torch.OutOfMemoryError: CUDA out of memory", "lower actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("No available memory for the cache blocks", "lower actor_rollout_ref.rollout.max_model_len"),
        ("max_model_len (9000) is greater than the derived max_model_len", "was not made for 9000 tokens"),
        ("ValueError: Mamba does not support LoRA yet.", "set actor_rollout_ref.model.lora.merge=true"),
        ("something new", "ended with status 3"),
    ],
)
def test_why_it_ended_is_said_with_what_to_do_and_the_end_of_its_log(tmp_path: Path, said: str, advice: str) -> None:
    made = server(tmp_path, FAILS.format(said=said))
    made.start()
    with pytest.raises(VllmNotStarted) as raised:
        made.wait()
    assert advice in str(raised.value)
    assert said in str(raised.value)
    assert str(made.log) in str(raised.value)
    assert "Fatal Python error" not in str(raised.value)  # of the process that kept it
    assert not made.runs


def test_a_server_that_was_killed_says_so_however_late_it_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = server(tmp_path, ANSWERS)
    made.start()
    made.wait()
    hear = Child.hear

    def late(child: Child, line: bytes) -> None:
        time.sleep(0.3)
        hear(child, line)

    monkeypatch.setattr(Child, "hear", late)
    assert made._child is not None
    [program] = psutil.Process(made._child.process.pid).children()
    program.kill()
    _until(lambda: not made.runs)
    assert "it was killed by SIGKILL" in made.why()


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    made = VllmServer(options("/nowhere/bin/python"), tmp_path, 0)
    made.start()
    with pytest.raises(VllmNotStarted, match="/nowhere/bin/python: No such file or directory"):
        made.wait()


def test_an_environment_without_vllm_is_told_apart(tmp_path: Path) -> None:
    made = VllmServer(options(sys.executable), tmp_path, 0)
    made.start()
    with pytest.raises(VllmNotStarted, match=r"there is no vLLM in that environment.*rollout\.python"):
        made.wait()


def test_it_ends_with_the_process_that_started_it_even_when_that_is_killed(tmp_path: Path) -> None:
    made = server(tmp_path, ANSWERS)
    program = (
        "import sys, time; from pathlib import Path; from lightning_rl.inference.vllm.server import VllmServer; "
        "from tests.lightning_rl.inference.vllm.test_server import options; "
        f"made = VllmServer(options({made.options.python!r}), Path({str(tmp_path)!r}), 1); made.start(); made.wait(); "
        "print(made.url, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    url = parent.stdout.readline().decode().strip()
    port = url.rsplit(":", 1)[1]
    assert _listens(port)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    _until(lambda: not _listens(port))


def _listens(port: str) -> bool:
    hexadecimal = f"0100007F:{int(port):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[1] == hexadecimal and line.split()[3] == "0A" for line in lines)


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.05)
