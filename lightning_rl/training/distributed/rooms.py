"""Room on a Ray cluster: GPUs of its machines, reserved for the processes that train and for engines, beside them or on
the same ones.

Invariant: whoever has a room has it alone, so two share a GPU only where one room is given to both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_rl.errors import Explained

_PLACING_SECONDS = 60.0


class NoPlace(Explained, RuntimeError):
    """The cluster has no room."""


class Seat(NamedTuple):
    """Where a server is started: in a bundle of a room. `gpus`: those of the processes that train there, which it
    shares; None: it is given its own."""

    room: Any
    bundle: int
    gpus: tuple[str, ...] | None


def reserve(bundles: Sequence[Mapping[str, float]], strategy: str, subject: str, advice: str) -> Any:
    """A placement group; whoever makes one gives it back. Raises NoPlace, which says who finds none, and `advice`."""
    from ray.util.placement_group import placement_group, remove_placement_group

    room = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    if not room.wait(_PLACING_SECONDS):
        remove_placement_group(room)
        raise NoPlace(f"{subject} no room, {len(bundles)} x {dict(bundles[0])}: look at `ray status`; {advice}")
    return room


def of_workers(name: str, nodes: int, per_node: int, gpus: int, servers: int = 0) -> Any:
    """The room of `per_node` processes on each of so many machines, and of the `servers` that share a machine's GPUs.

    Args:
        name: what the processes train.
        gpus: of each process, 1 or 0.
    """
    bundle = {"CPU": per_node + servers} | ({"GPU": per_node} if gpus else {})
    subject = f"the workers of {name} find on trainer.nnodes={nodes} machines"
    advice = (
        "lower trainer.n_gpus_per_node or trainer.nnodes, or let runners hold fewer CPUs, where they are actors of the "
        "same Ray (actor_rollout_ref.rollout.agent.ray.num_actors)"
    )
    return reserve([bundle] * nodes, "STRICT_SPREAD", subject, advice)


def apart(servers: int, size: int) -> list[Seat]:
    """Seats for servers of `size` GPUs, on as many machines as there are."""
    advice = "lower actor_rollout_ref.rollout.data_parallel_size or tensor_model_parallel_size"
    room = reserve([{"CPU": 1, "GPU": size}] * servers, "SPREAD", "vLLM's servers find", advice)
    return [Seat(room, bundle, None) for bundle in range(servers)]


def beside(room: Any, nodes: int, per_node: int, servers: int, size: int) -> list[Seat]:
    """Seats on the GPUs of the processes that train in `room`, machine by machine in turn."""
    of_node = [_gpus_of(room, bundle, per_node) for bundle in range(nodes)]
    seats = []
    for number in range(servers):
        first = number // nodes * size
        seats.append(Seat(room, number % nodes, of_node[number % nodes][first : first + size]))
    return seats


def here() -> tuple[Any, str]:
    """The room of a GPU of the machine that this process is on, for the process itself; and the GPU."""
    import ray

    node = f"node:{ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
    subject = "the trainer's process, which sends weights from a GPU of its own machine, finds"
    room = reserve([{"GPU": 1, node: 0.001}], "PACK", subject, "take actor_rollout_ref.rollout.weight_transfer=file")
    [gpu] = _gpus_of(room, 0, 1)
    return room, gpu


def give_back(room: Any) -> None:
    """End a room with all that is in it."""
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(room)


def scheduled(room: Any, bundle: int) -> Any:
    """The strategy by which an actor is placed in a bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=bundle)


def _gpus_of(room: Any, bundle: int, count: int) -> tuple[str, ...]:
    """The GPUs of a bundle, asked by an actor that has all of them for a moment."""
    import ray

    actor_class: Any = ray.remote(_DeviceReport)
    made = actor_class.options(num_cpus=0, num_gpus=count, scheduling_strategy=scheduled(room, bundle)).remote()
    try:
        gpus: list[Any] = ray.get(made.gpus.remote())
    finally:
        ray.kill(made)
    return tuple(map(str, gpus))


class _DeviceReport:
    def gpus(self) -> list[Any]:
        import ray

        return list(ray.get_gpu_ids())
