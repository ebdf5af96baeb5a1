"""A process that keeps one vLLM server: `python -m lightning_rl.inference.vllm.supervisor`.

It reads one JSON line, an `Order`, from stdin, starts the server, and prints one JSON line when the server answers
(`ready`), could not be started (`error`) or has ended (`ended`, its status). Invariant: the server lives no longer than
this process, and this process no longer than its stdin, which ends when the trainer dies, however that comes. What vLLM
prints goes to stderr.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import urllib3

from lightning_rl.processes.child import tell

_POLL_SECONDS = 0.2
# Together they stay below what a child of ours is given to stop: killed itself, it would leave its server behind.
_HEALTH_SECONDS = 2.0
_STOP_SECONDS = 8.0


class Order(msgspec.Struct, frozen=True):
    """What to start; it answers at `url`. `environment` is added to this process's."""

    command: list[str]
    environment: dict[str, str]
    url: str
    start_seconds: float


def main() -> None:
    """Keep a server until it ends or stdin does."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    over = threading.Event()
    threading.Thread(target=_until_stdin_ends, args=(over,), daemon=True).start()
    try:
        process = subprocess.Popen(
            order.command,
            env={**os.environ, **order.environment},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
        )
    except OSError as error:
        tell({"error": f"{order.command[0]}: {error.strerror}"})
        sys.exit(1)
    try:
        sys.exit(_keep(process, order, over))
    finally:
        _end(process)


def _keep(process: "subprocess.Popen[bytes]", order: Order, over: threading.Event) -> int:
    """Our own exit status, once there is nothing to keep any more."""
    last = time.monotonic() + order.start_seconds
    ready = False
    with urllib3.PoolManager(retries=False) as pool:
        while not over.wait(_POLL_SECONDS):
            if (status := process.poll()) is not None:
                tell({"ended": status})
                return 1
            if not ready and _answers(pool, order.url):
                ready = True
                tell({"ready": True})
            if not ready and time.monotonic() > last:
                tell({"error": f"it did not answer within {order.start_seconds:g} s"})
                return 1
    return 0


def _answers(pool: urllib3.PoolManager, url: str) -> bool:
    try:
        return pool.request("GET", f"{url}/health", timeout=_HEALTH_SECONDS).status == 200
    except urllib3.exceptions.HTTPError:
        return False


def _until_stdin_ends(over: threading.Event) -> None:
    while os.read(0, 4096):  # not sys.stdin: a thread that holds its lock would crash the interpreter's end
        pass
    over.set()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End it with all that it has started."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
