"""Who is on which GPU: the processes that train, and the servers that a run starts.

Invariant: the two share a GPU only where a key says so, or where there are too few for each to have its own; what
cannot be is refused before anything is loaded.

GPUs are indices among those that the trainer's process sees, in the order of CUDA_VISIBLE_DEVICES. On a Ray cluster
Ray picks them; there only their number and whether they are shared is decided here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import Config
from lightning_rl.training.distributed import cluster

_TRAINER, _ENGINES = "trainer.devices", "actor_rollout_ref.rollout.devices"


@dataclass(frozen=True)
class Placement:
    """`trainer`: a GPU for each process that trains; `engines`: those of each server that the run starts; `by_ray`:
    only how many they are holds, Ray picks them."""

    trainer: tuple[int, ...] = ()
    engines: tuple[tuple[int, ...], ...] = ()
    by_ray: bool = False

    @property
    def of_engines(self) -> tuple[int, ...]:
        """Those of all servers."""
        return tuple(gpu for server in self.engines for gpu in server)

    @property
    def shared(self) -> bool:
        """Whether trainer and servers share one."""
        return bool(set(self.trainer) & set(self.of_engines))

    def line(self, names: Sequence[str]) -> str:
        """Who is where, for a person; `names` are those of CUDA_VISIBLE_DEVICES."""
        if self.by_ray:
            where = "the same" if self.shared else "others"
            engines = f", {len(self.engines)} vLLM servers on {where}, {_each(self.engines)}" if self.engines else ""
            return f"Ray places {len(self.trainer)} training processes, a GPU each{engines}"
        named = [str(each) for each in range(len(names))] != list(names)
        shown = f" of CUDA_VISIBLE_DEVICES={','.join(names)}" if named else ""
        text = f"training on {_gpus(self.trainer)}"
        if self.engines:
            servers = "; ".join(_gpus(each) for each in self.engines)
            text += f", vLLM on {servers}" + (" (shared)" if self.shared else "")
        return text + shown


def place(config: Config, gpus: int, groups: int = 1) -> Placement:
    """The placement of a run that trains on GPUs.

    Args:
        gpus: how many there are, of a cluster in all.
        groups: sets of models that have processes of their own (`trainer.colocate=false`).

    Raises ConfigError, with the keys that would do.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    starts = rollout.name == "vllm" and not rollout.server_urls
    wanted, size = trainer.workers * groups, rollout.tensor_model_parallel_size
    needed = size * rollout.data_parallel_size if starts else 0
    devices = rollout.devices
    check_keys(config, groups)
    sender = sends_from_a_gpu_of_its_own(config)
    if sender:
        gpus -= 1
    there = _are(gpus) + " beside the one that weights are sent from" * sender
    if wanted > gpus:
        raise ConfigError(
            f"{wanted} processes train, a GPU each (trainer.nnodes={trainer.nnodes} x "
            f"trainer.n_gpus_per_node={trainer.per_node}{f' x {groups} groups of models' * (groups > 1)}), and there "
            f"{there}: lower these, or show the run more GPUs (CUDA_VISIBLE_DEVICES)"
        )
    everything, listed = range(gpus), devices if isinstance(devices, list) else []
    for key, indices in ((_TRAINER, trainer.devices or []), (_ENGINES, listed)):
        if beyond := [gpu for gpu in indices if gpu >= gpus]:
            raise ConfigError(f"{key}={indices}: there is no GPU {beyond[0]}, there {there}, counted from 0")
    rest = [gpu for gpu in everything if gpu not in listed]
    if trainer.devices is None and len(rest) < wanted:
        raise ConfigError(
            f"{_ENGINES}={listed} leaves {len(rest)} of {gpus} GPUs to {wanted} processes that train: take fewer, or "
            f"{_ENGINES}=colocated to share them"
        )
    own = trainer.devices or rest[:wanted]
    others = [gpu for gpu in everything if gpu not in own]
    if not needed:
        return Placement(tuple(own), (), by_ray(config))
    takes_turns = rollout.weight_transfer == "ipc" or rollout.free_cache_engine is True
    if listed:
        chosen = listed
    elif devices == "colocated" or (devices is None and (takes_turns or len(others) < needed)):
        chosen = [*own, *others][:needed]
    else:
        chosen = others[:needed]
    if len(chosen) < needed:
        free = f"{len(others)} of {gpus} GPUs are not the trainer's" if devices == "apart" else f"there {there}"
        raise ConfigError(
            f"{rollout.data_parallel_size} vLLM servers with {size} GPUs each (actor_rollout_ref.rollout."
            f"data_parallel_size x tensor_model_parallel_size) need {needed}, and {free}: lower these"
            + (f", or set {_ENGINES}=colocated" if devices == "apart" else "")
        )
    servers = tuple(tuple(chosen[first : first + size]) for first in range(0, needed, size))
    if by_ray(config) and set(chosen) & set(own):
        _check_machines(config)
    placement = Placement(tuple(own), servers, by_ray(config))
    _check_transfer(config, placement)
    return placement


def check_keys(config: Config, groups: int | None = None) -> None:
    """Raises ConfigError for devices that do not go together, whatever the machine has; `groups`: as of `place`, where
    they are known."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    starts = rollout.name == "vllm" and not rollout.server_urls
    if groups is None and trainer.colocate:
        groups = 1
    wanted = trainer.workers * (groups or 1)
    listed = rollout.devices if isinstance(rollout.devices, list) else None
    needed = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    for key, indices, count, why in (
        (_TRAINER, trainer.devices, wanted, f"{wanted} processes train, a GPU each"),
        (_ENGINES, listed, needed, "data_parallel_size x tensor_model_parallel_size"),
    ):
        if indices is None:
            continue
        if by_ray(config):
            raise ConfigError(
                f"{key}={indices} names GPUs of one machine, and on a Ray cluster Ray picks them: leave it out"
                + (", or say colocated or apart" if key == _ENGINES else "")
            )
        if len(set(indices)) < len(indices):
            raise ConfigError(f"{key}={indices} names a GPU twice")
        if len(indices) != count and (groups is not None if key == _TRAINER else starts):
            raise ConfigError(f"{key}={indices} names {len(indices)} GPUs, and {count} are needed: {why}")
    if rollout.devices is not None and not starts:
        raise ConfigError(
            f"{_ENGINES}={rollout.devices} is for vLLM's servers that a run starts: the embedded engine is on the "
            "trainer's GPU, and servers that run already are where they are; leave it out"
        )
    if both := sorted(set(trainer.devices or []) & set(listed or [])):
        raise ConfigError(
            f"{_TRAINER}={trainer.devices} and {_ENGINES}={listed} both name GPU {both[0]}: name others, or say that "
            f"they share with {_ENGINES}=colocated"
        )


def by_ray(config: Config) -> bool:
    """Whether Ray picks GPUs: of a cluster that runs already, and not one that is started for this run."""
    return config.trainer.nnodes > 1 or (config.trainer.workers > 1 and cluster.runs_already())


def sends_from_a_gpu_of_its_own(config: Config) -> bool:
    """Whether the trainer's process has a GPU of a Ray cluster for the weights that it sends by NCCL, which
    refuses a GPU that receives too."""
    rollout = config.actor_rollout_ref.rollout
    return by_ray(config) and rollout.name == "vllm" and rollout.weight_transfer == "nccl"


def sleeps(config: Config, placement: Placement) -> bool:
    """Whether the servers leave their GPUs to the trainer while it computes: null means, where they share some and
    nothing is sampled meanwhile."""
    frees_cache = config.actor_rollout_ref.rollout.free_cache_engine
    if frees_cache is None:
        return placement.shared and config.trainer.schedule == "sync"
    return frees_cache and (placement.shared or bool(config.actor_rollout_ref.rollout.server_urls))


def _check_machines(config: Config) -> None:
    """Servers on the GPUs of a cluster's workers: those of one machine have room on it."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    size, of_one = rollout.tensor_model_parallel_size, -(-rollout.data_parallel_size // trainer.nnodes)
    if size * of_one > trainer.per_node:
        raise ConfigError(
            f"{of_one} vLLM servers of {size} GPUs share a machine's trainer.n_gpus_per_node={trainer.per_node} GPUs: "
            "lower actor_rollout_ref.rollout.data_parallel_size or tensor_model_parallel_size"
        )


def _check_transfer(config: Config, placement: Placement) -> None:
    key = "actor_rollout_ref.rollout.weight_transfer"
    way = config.actor_rollout_ref.rollout.weight_transfer
    if way == "ipc" and placement.by_ray:
        raise ConfigError(
            f"{key}=ipc is for one machine, and on a Ray cluster servers are on others: take file or nccl"
        )
    if way == "ipc" and set(placement.of_engines) != {placement.trainer[0]}:
        raise ConfigError(
            f"{key}=ipc hands over memory of one GPU, the trainer's ({placement.trainer[0]}), and vLLM is on "
            f"{_gpus(placement.of_engines)}: set {_ENGINES}=colocated with one server of one GPU, or {key}=nccl or file"
        )
    if way == "nccl" and not placement.by_ray and placement.trainer[0] in placement.of_engines:
        raise ConfigError(
            f"{key}=nccl goes between GPUs, and {placement.trainer[0]} is the trainer's and vLLM's: set "
            f"{_ENGINES}=apart with GPUs enough, or {key}=ipc or file"
        )


def _gpus(gpus: Sequence[int]) -> str:
    return f"GPU{'s' * (len(gpus) > 1)} {', '.join(map(str, gpus))}"


def _each(engines: Sequence[Sequence[int]]) -> str:
    size = len(engines[0])
    return f"{size} GPU{'s' * (size > 1)} each"


def _are(gpus: int) -> str:
    return {0: "is none", 1: "is 1"}.get(gpus, f"are {gpus}")
