"""What a run asks of Ray; that it gets it is in `tests/cluster/test_ray.py`."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.agents.agent import as_agent
from lightning_rl.config.schema import RayActors
from lightning_rl.runner.on_ray import OutOfReach, check_reach, launch, resources_of, room, seats

CORES = st.lists(st.integers(0, 64), min_size=1, max_size=8)


@given(
    st.integers(0, 500), CORES, st.sampled_from([0.5, 1.0, 2.0, 3.5]), st.none() | st.integers(3, 20), st.integers(1, 3)
)
def test_all_slots_are_divided_over_actors_that_there_is_room_for(
    n_runners: int, cores: list[int], num_cpus: float, num_actors: int | None, servers: int
) -> None:
    given = RayActors(num_cpus=num_cpus, num_actors=num_actors)
    nodes = [{"CPU": float(number)} for number in cores]
    actors = seats(given, n_runners, nodes, servers=servers)
    processes = [slots for actor in actors for slots in actor]
    assert sum(processes) == n_runners
    assert all(slots > 0 for slots in processes), "none is started for nothing"
    assert len(actors) <= (num_actors or max(servers, room(nodes, resources_of(given))))
    assert len(actors) >= min(n_runners, servers), "each server has one"
    assert all(len(actor) <= max(1, num_cpus) for actor in actors)
    per_actor = [sum(actor) for actor in actors]
    assert max(per_actor, default=0) - min(per_actor, default=0) <= 1


def test_an_actor_serves_one_server_so_there_are_as_many() -> None:
    with pytest.raises(ValueError, match=r"num_actors=1 leaves one of 2 servers without an actor: set it to 2 or more"):
        seats(RayActors(num_actors=1), 8, [{"CPU": 8.0}], servers=2)


def test_an_actor_needs_all_that_it_asks_for_on_one_machine() -> None:
    need = resources_of(RayActors(num_cpus=2.0, num_gpus=0.5, resources={"browser": 1.0}))
    assert need == {"CPU": 2.0, "GPU": 0.5, "browser": 1.0}
    whole = {"CPU": 8.0, "GPU": 1.0, "browser": 5.0, "memory": 1.0}
    assert room([whole], need) == 2  # by its GPU
    assert room([{"CPU": 8.0, "GPU": 8.0}, {"browser": 8.0}], need) == 0
    assert room([whole, {"CPU": 3.0, "GPU": 4.0, "browser": 2.0}], need) == 3


def test_a_loopback_url_is_refused_where_the_cluster_has_other_machines() -> None:
    check_reach("http://127.0.0.1:8080", ["10.0.0.1", "10.0.0.1"], here="10.0.0.1")
    check_reach("http://127.0.0.1:8080", ["127.0.0.1"], here="10.0.0.1")
    check_reach("http://trainer.example:8080", ["10.0.0.1", "10.0.0.2"], here="10.0.0.1")
    for url in ("http://127.0.0.1:8080", "http://localhost:8080", "http://[::1]:8080"):
        with pytest.raises(OutOfReach, match=r"10\.0\.0\.2.*Trainer\(host="):
            check_reach(url, ["10.0.0.1", "10.0.0.2"], here="10.0.0.1")


def test_a_ray_of_our_own_listens_on_the_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def asked_of_ray(address: str) -> tuple[dict[str, Any], str | None]:
        told: dict[str, Any] = {}

        def init(**options: Any) -> None:
            told.update(options)
            raise Stop

        loaded = SimpleNamespace(is_initialized=lambda: False, init=init)
        monkeypatch.setitem(sys.modules, "ray", loaded)
        monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
        with (
            pytest.raises(Stop),
            launch(1, as_agent(lambda task: 1.0), ["http://x"], "key", actors=RayActors(address=address)),
        ):
            pass
        return told, os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")

    assert asked_of_ray("local") == ({"address": "local", "include_dashboard": False}, "0")
    assert asked_of_ray("ray://head:10001") == ({"address": "ray://head:10001"}, None)


def test_ray_is_loaded_for_a_run_that_asks_for_it_alone() -> None:
    code = "import sys, lightning_rl.trainer, lightning_rl.runner.on_ray; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
