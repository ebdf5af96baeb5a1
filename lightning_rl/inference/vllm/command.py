"""How a vLLM server is started: its command line and its environment, from what a run asks for."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

LOOPBACK = "127.0.0.1"
PLUGIN = Path(__file__).parent / "plugin"
_BACKENDS = {"file": "lightning_rl_file"}  # as the plugin registers it; others are vLLM's own
_CPU_CACHE_GIB = "1"
_LEAST_BATCHED_TOKENS = 2048
MOST_VERSIONS: Final = 8  # of an adapter, that a server of ours has room for at once
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # which vLLM's kernels know
_AS_THE_TRAINER_SEES = {"use_fast": False}  # PIL resizes (`lightning_rl.vision`); torchvision has other pixels


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a run asks of its vLLM servers.

    Attributes:
        python: the interpreter of vLLM's environment.
        model: a folder, or a hub's id.
        context: tokens of a sequence, at most; None: what the model was made for.
        trust_remote_code: the Python files of the model's folder are run.
        sees: it is shown images, which are resized as the trainer does it.
        dtype: in what it computes, `float32` or `bfloat16`.
        device: `cpu` or `cuda`.
        processed_logprobs: logprobs are of what is sampled from, and not of temperature 1.
        servers: how many of them, each with `tensor_parallel` GPUs.
        devices: the GPUs of each, by their names in CUDA_VISIBLE_DEVICES; none on a CPU, or where Ray gives them.
        host: the address where they listen; beyond the loopback whoever reaches it can change their weights.
        weight_transfer: how weights reach them (`transfer`).
        sleeps: they leave their GPU to the trainer while it trains.
        adapters: of how many policies they sample adapters, each under a name per version; 0: of none.
        adapter_rank: the largest rank of these.
        adapter_versions: so many versions of each adapter may be under way at once; a server has room for
            `MOST_VERSIONS` of them.
        adapter_modules: the last parts of the names of all modules that may be adapted.
        threads: cores of each on a CPU.
        flags: further ones, by name (`max_num_batched_tokens: 4096`); they win over ours.
    """

    python: str
    model: str = ""
    context: int | None = None
    trust_remote_code: bool = False
    sees: bool = False
    dtype: str
    device: str
    processed_logprobs: bool
    servers: int = 1
    tensor_parallel: int = 1
    devices: tuple[tuple[str, ...], ...] = ()
    host: str = LOOPBACK
    gpu_memory_utilization: float = 0.5
    max_num_seqs: int = 256
    enforce_eager: bool = False
    weight_transfer: Literal["file", "ipc", "nccl"] = "file"
    sleeps: bool = False
    adapters: int = 0
    adapter_rank: int = 0
    adapter_versions: int = 2
    adapter_modules: tuple[str, ...] = ()
    threads: int = 1
    flags: Mapping[str, Any] = msgspec.field(default_factory=dict)


def command(options: Options, port: int) -> list[str]:
    """The command line of a server at `port`."""
    flags: dict[str, Any] = {
        "model": options.model,
        "host": options.host,
        "port": port,
        "dtype": options.dtype,
        "max_model_len": options.context,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel,
        "enable_scale_out": True,
        "logprobs_mode": "processed_logprobs" if options.processed_logprobs else "raw_logprobs",
        "worker_extension_cls": "lightning_rl_vllm.WorkerExtension",
        "weight_transfer_config": {"backend": _BACKENDS.get(options.weight_transfer, options.weight_transfer)},
        "enforce_eager": options.enforce_eager,
    }
    if options.trust_remote_code:
        flags["trust_remote_code"] = True
    if options.sees:
        flags["mm_processor_kwargs"] = _AS_THE_TRAINER_SEES
    if options.device == "cuda":
        flags |= {"gpu_memory_utilization": options.gpu_memory_utilization, "enable_sleep_mode": options.sleeps}
    else:
        # vLLM 0.32 dies on a CPU where a request with a seed, as ours all are, is read in pieces (docs/engines.md).
        whole = max(options.context or 0, _LEAST_BATCHED_TOKENS)
        flags |= {"enable_chunked_prefill": False, "max_num_batched_tokens": whole, "enforce_eager": True}
    if options.adapters:
        # Answers that began before an update end with the adapter before it, and vLLM lets others wait for room.
        rank = next((each for each in _RANKS if each >= options.adapter_rank), options.adapter_rank)
        versions = min(options.adapter_versions, MOST_VERSIONS)
        flags |= {"enable_lora": True, "max_loras": versions * options.adapters, "max_lora_rank": rank}
        # Of itself vLLM has room for an adapter of the output layer too, and for that refuses large vocabularies.
        flags |= {"lora_target_modules": options.adapter_modules}
    words = [options.python, "-m", "vllm.entrypoints.openai.api_server"]
    return words + [word for name, value in {**flags, **options.flags}.items() for word in _words(name, value)]


def environment(
    options: Options, devices: tuple[str, ...] = (), inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What the environment of a server on those GPUs has beside, or instead of, the inherited one."""
    added = {
        "VLLM_SERVER_DEV_MODE": "1",
        **({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if options.weight_transfer == "ipc" else {}),
        **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if options.adapters else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PLUGIN), inherited.get("PYTHONPATH", "")])),
    }
    if options.device == "cpu":
        added |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(options.threads)}
        added["VLLM_CPU_KVCACHE_SPACE"] = inherited.get("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
    elif devices:
        added["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return added


def _words(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, tuple):
        return [flag, *value] if value else []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
