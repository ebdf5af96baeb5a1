"""One vLLM server of a run, kept by a child process: started, waited for, stopped; and why it could not start."""

import re
import socket
from pathlib import Path

import msgspec

from lightning_rl.errors import Explained
from lightning_rl.inference.vllm.command import Options, command, environment
from lightning_rl.processes.child import Child, ChildDied, how_it_ended

_START_SECONDS = 1800.0  # a large model is read, compiled for and captured
_TAIL_LINES = 25

# What vLLM 0.32 says when it cannot start, and what to do about it.
_KNOWN = (
    (
        r"No module named '?vllm",
        "there is no vLLM in that environment: install it there (`pip install vllm`), or set "
        "actor_rollout_ref.rollout.python to the interpreter of one that has it",
    ),
    (r"unrecognized arguments: (?P<what>.*)", "this vLLM knows no {what}: take vLLM 0.32, or mend engine_kwargs.vllm"),
    (
        r"Free memory on device|CUDA out of memory|OutOfMemoryError",
        "the GPU has too little free memory: lower actor_rollout_ref.rollout.gpu_memory_utilization, or end what else "
        "uses it",
    ),
    (
        r"No available memory for the cache blocks|larger than the (available KV cache|maximum number of tokens)",
        "the KV cache holds not one sequence: lower actor_rollout_ref.rollout.max_model_len, or raise "
        "gpu_memory_utilization (on a CPU VLLM_CPU_KVCACHE_SPACE, in GiB)",
    ),
    (
        r"max_model_len \((?P<what>\d+)\) is greater than the derived max_model_len",
        "the model was not made for {what} tokens: lower actor_rollout_ref.rollout.max_model_len",
    ),
    (
        r"does not support LoRA|is not supported for LoRA|No supported LoRA modules",
        "vLLM samples no adapter of this model: set actor_rollout_ref.model.lora.merge=true",
    ),
    (r"Address already in use", "another program has taken the port meanwhile: start the run again"),
    (
        r"tensor.parallel.*(must be divisible|not divisible)|World size .* is larger than the number of available GPUs",
        "actor_rollout_ref.rollout.tensor_model_parallel_size does not fit the model, or there are fewer GPUs",
    ),
    (r"No module named 'lightning_rl_vllm'", "PYTHONPATH does not reach vLLM's workers: is it set by that python?"),
)


class VllmNotStarted(Explained, RuntimeError):
    """A vLLM server could not be started; the message says why."""


class VllmServer:
    """The server number `index` of a run, at `url`, on the GPUs `devices`; what it prints is in `log`, in the run's
    folder."""

    def __init__(self, options: Options, run_dir: Path, index: int, devices: tuple[str, ...] = ()) -> None:
        self.options, self._devices = options, devices
        self.log = run_dir / f"vllm-{index}.log"
        with socket.create_server((options.host, 0)) as free:
            self._port = free.getsockname()[1]  # the same after a restart: the gateway knows it by its URL
        self.url = f"http://{options.host}:{self._port}"
        self._child: Child | None = None

    def start(self) -> None:
        """Begin to start; `wait` returns when it answers."""
        order = {
            "command": command(self.options, self._port),
            "environment": environment(self.options, self._devices),
            "url": self.url,
            "start_seconds": _START_SECONDS,
        }
        self._began_at = self.log.stat().st_size if self.log.exists() else 0
        self._child = Child(
            "lightning_rl.inference.vllm.supervisor",
            name=f"vLLM at {self.url}",
            log=self.log,
            first=msgspec.json.encode(order) + b"\n",
        )
        self._child.start()

    def wait(self) -> None:
        """Until it answers. Raises VllmNotStarted, with what to do about it where that is known."""
        child = self._started
        try:
            while "ready" not in child.reported:
                child.hear(child.next_line())
                if "error" in child.reported or "ended" in child.reported:
                    child.process.wait()
                    raise VllmNotStarted(self.why())
        except ChildDied as error:
            raise VllmNotStarted(self.why()) from error
        child.listen()

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._child is not None and self._child.process.poll() is None

    def why(self) -> str:
        """Why it has ended, as far as its log tells; it is ended if it has not."""
        child = self._started
        child.stop()  # what it told last is heard then
        printed = self._printed()
        status: int = child.process.returncode
        status = child.reported.get("ended", status)
        reason = child.reported.get("error") or f"it {how_it_ended(status)}"
        for pattern, advice in _KNOWN:
            if match := re.search(pattern, printed):
                reason += f": {advice.format(**match.groupdict())}"
                break
        tail = "\n".join(printed.splitlines()[-_TAIL_LINES:])
        return f"vLLM at {self.url} ({self.options.python}): {reason}. The end of {self.log}:\n{tail}"

    def ask_to_stop(self) -> None:
        """Begin to end it; `stop` waits."""
        if self._child is not None:
            self._child.ask_to_stop()

    def stop(self) -> None:
        """End it, gently at first."""
        if self._child is not None:
            self._child.stop()

    @property
    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError(f"vLLM at {self.url} was not started")
        return self._child

    def _printed(self) -> str:
        """What it has printed since its last start."""
        with self.log.open("rb") as file:
            file.seek(self._began_at)
            return file.read().decode(errors="replace")
