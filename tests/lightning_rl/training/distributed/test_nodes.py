"""Workers of a Ray cluster of two nodes, which is joined by RAY_ADDRESS and left running."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[4]
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # on the loopback

# A process of its own, since a process is in one Ray at a time.
PROGRAM = """
import os

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

node = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
nodes = Cluster(initialize_head=True, head_node_args=node)
nodes.add_node(num_cpus=2, object_store_memory=100 * 2**20)
nodes.wait_for_nodes(timeout=240)
os.environ["RAY_ADDRESS"] = nodes.address

from tests.lightning_rl.training.distributed.test_crew import models, step

with models() as alone:
    expected = step(alone, 0)
with models("trainer.nnodes=2") as made:
    found = step(made, 0)
    [group] = made._crew._all
    places = placement_group_table(group._room)["bundles_to_node_id"]
    assert len(set(places.values())) == 2, places
for name, value in expected.items():
    assert name.startswith("perf/") or abs(found[name] - value) < 1e-3 * abs(value) + 2e-5, name
assert not ray.is_initialized()
ray.init(address=nodes.address, log_to_driver=False)  # it runs still
ray.shutdown()
nodes.shutdown()
print("the same on two nodes")
"""


@pytest.mark.long
def test_two_nodes_train_as_one_process() -> None:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        capture_output=True,
        text=True,
    )
    assert "the same on two nodes" in done.stdout, done.stdout + done.stderr


OWN = """
import os

import ray

from lightning_rl.training.distributed import cluster, rooms

assert cluster.join(2, 2**26, ["5", "GPU-7e"])
room = rooms.of_workers("the policy", 1, 2, 1)


class Worker:
    def told(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]


workers = [ray.remote(Worker).options(num_cpus=1, num_gpus=1, scheduling_strategy=rooms.scheduled(room, 0)).remote()
           for _ in range(2)]
print("told", sorted(ray.get([worker.told.remote() for worker in workers])))
assert "CUDA_VISIBLE_DEVICES" not in os.environ
cluster.leave()
"""


def test_a_ray_of_our_own_hands_out_the_gpus_of_the_trainer_and_no_others() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= QUIET | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run([sys.executable, "-c", OWN], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "told ['5', 'GPU-7e']" in done.stdout, done.stdout + done.stderr
