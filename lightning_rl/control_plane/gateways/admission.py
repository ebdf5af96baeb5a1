"""Whether one more rollout may begin: as many as keep the engines busy, and no more than they bear.

An engine without enough calls idles while agents use their tools; one with too many lets them queue, pushes caches out
and answers each late. So the number of rollouts at once is no setting: another one begins while the calls that are
asked for, and those that are expected of attempts which have not called yet, are fewer than the engines bear. An agent
that is busy with its tools counts for nothing; when it calls again it comes before all that have not begun.

Invariants: what the engines bear is never exceeded by rollouts that begin; and one always may where none runs, so no
run stalls. The same holds while a model is paused or none of its engines answers: calls wait or fail, and those that
end make room.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from lightning_rl.control_plane.gateways.notifications import Notifications
from lightning_rl_proxy.gateway import GatewayLoad


class LoadDoor(Protocol):
    """What admission needs of a gateway."""

    def load(self) -> GatewayLoad:
        """How busy the engines are, and what is about to call them."""
        ...

    def when_capacity_freed(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever `load` may have become less, and now and then."""
        ...


def room(load: GatewayLoad, handing_out: int = 0) -> float:
    """How many rollouts may begin, beside `handing_out` that are about to; infinite where no engine says what it bears.

    A rollout is expected to call its policy, which of them is not known before it is handed out; whatever else it may
    call must not have a queue either. As many as a policy has engines may run in any case.
    """
    free = math.inf
    for name, model in load.models.items():
        if model.capacity is not None:
            expected = load.starting[name] + handing_out if name in load.starting else 0
            free = min(free, model.capacity - model.calls - expected)
    least = max([1, *(load.models[name].engines for name in load.starting if name in load.models)])
    return max(free, least - load.open_attempts - handing_out, 0)


class Admission:
    """Lets the claims of one server through, and wakes those that wait when there is room."""

    def __init__(self, door: LoadDoor, signals: Notifications) -> None:
        self._door = door
        self._signals = signals
        self._handing_out = 0
        door.when_capacity_freed(self.capacity_freed)

    def room(self) -> float:
        """How many rollouts may begin now; infinite where no engine says what it bears."""
        return room(self._door.load(), self._handing_out)

    @contextmanager
    def handing_out(self, rollouts: int) -> Iterator[None]:
        """So many may be handed out inside the block; what then was is the gateway's to count."""
        self._handing_out += rollouts
        try:
            yield
        finally:
            self._handing_out -= rollouts
            self.capacity_freed()

    def capacity_freed(self) -> None:
        """There may be room: claims of as many rollouts as there is room for take their turn."""
        if self._signals.held_back:
            self._signals.room(self.room())
