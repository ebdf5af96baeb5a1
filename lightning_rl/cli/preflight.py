"""What a run would need, found without beginning it: the model's files, vLLM's interpreter, memory.

Nothing is taken from a network and nothing is written. What is missing is a ConfigError that names it.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from lightning_rl import tutorial
from lightning_rl.config import ConfigError
from lightning_rl.config.policies import RunPolicy, engine_of_adapters, policies_of
from lightning_rl.config.schema import Config
from lightning_rl.inference.load import device_of, folder_here, sees
from lightning_rl.memory.choices import with_keys
from lightning_rl.memory.gpus import GIB, Hardware, card
from lightning_rl.memory.plan import budgets, hardware_of, plans
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.local_workers import FORMATS, register_model_code

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_VERSION = "import importlib.metadata as m; print(m.version('vllm'))"
_ASK_SECONDS = 60


def model_folder_here(config: Config) -> Path | None:
    """The model's folder; None where it is the hub's, and not on this machine yet.

    Raises ConfigError for a folder that lacks what a run reads of it, or whose chats nobody can write.
    """
    path = config.actor_rollout_ref.model.path
    folder = tutorial.checkpoint() if path is None else folder_here(path)
    if folder is None:
        if path is not None:
            resolved_config.check_model_path(path, "actor_rollout_ref.model.path")
        return None
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    missing += [] if any(next(folder.glob(name), None) for name in _WEIGHTS) else ["*.safetensors"]
    if missing:
        lacks = ", no ".join(missing)
        raise ConfigError(f"the model in {folder} has no {lacks}: give actor_rollout_ref.model.path another")
    register_model_code(config)
    resolved_config.loaded_renderer(config, folder)
    return folder


def engine(config: Config) -> str:
    """The engine, with vLLM's version where a run starts one; of several policies, whose it is. Raises ConfigError
    where a run could not start it."""
    if not config.policies:
        return _engine(config)
    same: dict[Any, list[RunPolicy]] = {}
    for policy in policies_of(config):
        same.setdefault(engine_of_adapters(policy.config) or policy.name, []).append(policy)
    return "; ".join(f"{_engine(each[0].config)} for {' and '.join(p.name for p in each)}" for each in same.values())


def _engine(config: Config) -> str:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or rollout.server_urls:
        return rollout.name
    python = rollout.python or sys.executable
    try:
        result = subprocess.run([python, "-c", _VERSION], capture_output=True, text=True, timeout=_ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"actor_rollout_ref.rollout.python={python!r} is no Python that starts: {error}") from error
    if result.returncode:
        raise ConfigError(
            f"there is no vLLM in the environment of {python}: install it there (`pip install vllm`), or set "
            "actor_rollout_ref.rollout.python to the interpreter of one that has it"
        )
    return f"vllm {result.stdout.strip()} of {python}"


def parameters(folder: Path) -> int:
    """How many numbers the model has, by its config."""
    kind = AutoModelForImageTextToText if sees(folder) else AutoModelForCausalLM
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind.from_config(AutoConfig.from_pretrained(folder)).parameters())


def memory(config: Config, stated: str | None = None) -> str:
    """Whether the run fits on the GPUs that it trains on, or that are `stated`, and on a CPU in this machine's memory:
    its fullest phase (`memory`).
    """
    if stated is not None or device_of(config.trainer.device).type == "cuda":
        hardware, config = hardware_of(config, stated)
        summaries = {name: plan.summary() for name, plan in plans(config, hardware).items()}
        return "; ".join(f"{name}: {text}" if name else text for name, text in summaries.items())
    config = with_keys(config, {"actor_rollout_ref.rollout.free_cache_engine": False})  # a CPU has no memory to give
    available = _available()
    by_policy = budgets(config, Hardware(card(available / GIB)), on_gpu=False)
    fullest = max((each.fullest for each in by_policy.values()), key=lambda phase: phase.total)
    needed = (fullest.total + _teachers_bytes(config)) * config.trainer.workers
    text = f"{needed / GIB:.1f} GiB at most ({fullest.name}); {available / GIB:.1f} GiB are free"
    if needed <= available:
        return text
    return f"{text}: IT DOES NOT FIT; set actor_rollout_ref.model.lora_rank, or take a smaller model"


def _teachers_bytes(config: Config) -> int:
    """Of the teachers whose folders are here; what the hub has is not known."""
    held = FORMATS[config.actor_rollout_ref.ref.fsdp_config.model_dtype].itemsize
    paths = [teacher.model_path for teacher in config.distillation.teachers().values()]
    folders = [Path(path) for path in paths if path is not None and Path(path).is_dir()]
    return -(-held * sum(parameters(folder) for folder in folders) // config.trainer.workers)


def _available() -> int:
    """What Linux says can be had without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory there is")
