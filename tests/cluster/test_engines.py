"""vLLM servers on machines of a Ray cluster: each is told the GPUs that Ray gave it, and the others reach it. Machines
are network namespaces with GPUs in name only; a small program stands in for vLLM and reports what it was given."""

import json
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.machines import Machines, machines

pytestmark = [pytest.mark.cluster, pytest.mark.long]
ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 180
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "of-this-test-alone",
}

VLLM = """
import http.server, json, os, sys
flag = lambda name: sys.argv[sys.argv.index(name) + 1]
class Report(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        told = json.dumps({"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "network": os.readlink("/proc/self/ns/net")})
        self.send_response(200); self.send_header("content-length", str(len(told))); self.end_headers()
        self.wfile.write(told.encode())
    def log_message(self, *_): pass
http.server.HTTPServer((flag("--host"), int(flag("--port"))), Report).serve_forever()
"""

# The trainer's process, on the first machine.
PROGRAM = """
import json, os, sys, urllib.request
from pathlib import Path

import ray

from lightning_rl.config import compose
from lightning_rl.inference.vllm.transfer import address_towards
from lightning_rl.ppo import cards, resolved_config
from lightning_rl.training.distributed import rooms
from lightning_rl.training.distributed.cluster import join

python, devices, servers, *more = sys.argv[1:]
rollout = "actor_rollout_ref.rollout."
words = ["trainer.device=cuda", "trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"{rollout}name=vllm",
         f"{rollout}python={python}", f"{rollout}data_parallel_size={servers}", f"{rollout}devices={devices}", *more]
config = compose(command_line=words)
made = cards.Cards(config, {"actor"})
options = resolved_config.vllm_options(config, made.placement, made.names)
make = made.server_maker()
found = {"line": made.line(), "device": made.device, "network": os.readlink("/proc/self/ns/net"),
         "servers": [], "workers": []}
try:
    all_of_them = [make(options, Path.cwd(), number) for number in range(len(made.placement.engines))]
    for server in all_of_them:
        server.start()
    for server in all_of_them:
        server.wait()
        told = json.load(urllib.request.urlopen(server.url, timeout=10))
        found["servers"].append(told | {"url": server.url, "from": address_towards(server.url)})
    room = made.room or rooms.of_workers("the policy", 2, 2, 1)

    class Worker:
        def told(self):
            import os
            return {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "network": os.readlink("/proc/self/ns/net")}

    kind = ray.remote(Worker)
    workers = [kind.options(num_cpus=1, num_gpus=1, scheduling_strategy=rooms.scheduled(room, rank // 2)).remote()
               for rank in range(4)]
    found["workers"] = ray.get([worker.told.remote() for worker in workers])
    for server in all_of_them:
        server.stop()
    found["run on"] = [server.runs for server in all_of_them]
finally:
    made.close()
Path("found.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machines, Path]]:
    """Two machines with four GPUs each."""
    folder = tmp_path_factory.mktemp("cluster")
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=8", "--num-gpus=4"]
    ray += ["--disable-usage-stats", f"--object-store-memory={100 * 2**20}"]
    (folder / "vllm.py").write_text(VLLM)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {folder / "vllm.py"} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (folder / "program.py").write_text(PROGRAM)
    with machines("one", "two") as made:
        head = f"--node-ip-address={made.address}"
        # Two of them on one machine: each has its own folder, and the sockets in it.
        made.start("one", [*ray, "--head", "--port=6379", head, "--include-dashboard=false"], folder, ENVIRONMENT)
        _until(lambda: made.on_first(lambda: _listens(made.address)))
        made.start(
            "two", [*ray, f"--address={made.address}:6379", "--node-ip-address=10.203.78.2"], folder, ENVIRONMENT
        )
        _until(lambda: "Ray runtime started" in (folder / "two.log").read_text(), (folder / "two.log").read_text)
        yield made, folder


def _listens(address: str) -> bool:
    import socket

    with socket.socket() as asked:
        asked.settimeout(1)
        return asked.connect_ex((address, 6379)) == 0


def told(cluster: tuple[Machines, Path], devices: str, servers: int, *more: str) -> dict[str, Any]:
    made, folder = cluster
    answer = folder / "found.json"
    answer.unlink(missing_ok=True)
    words = [sys.executable, str(folder / "program.py"), str(folder / "python"), devices, str(servers), *more]
    own = {"RAY_ADDRESS": f"{made.address}:6379", "CUDA_VISIBLE_DEVICES": "3,2,1,0"}
    made.start("one", words, folder, ENVIRONMENT | own)
    log = folder / "one.log"
    _until(lambda: answer.exists() or "Traceback" in log.read_text(), lambda: log.read_text()[-3000:])
    assert answer.exists(), log.read_text()[-3000:]
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _until(holds: Any, why: Any = lambda: "") -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end, why()
        time.sleep(0.2)


def test_servers_have_gpus_of_their_own_and_are_spread_over_machines(cluster: tuple[Machines, Path]) -> None:
    found = told(cluster, "apart", 4)
    assert found["line"] == "Ray places 4 training processes, a GPU each, 4 vLLM servers on others, 1 GPU each"
    everybody = [(each["network"], each["gpus"]) for each in found["servers"] + found["workers"]]
    assert len(set(everybody)) == len(everybody) == 8  # no GPU has two
    assert len({each["network"] for each in found["servers"]}) == 2
    assert {each["url"].rpartition(":")[0] for each in found["servers"]} == {
        "http://10.203.78.1", "http://10.203.78.2",
    }  # fmt: skip
    assert {each["from"] for each in found["servers"]} == {"10.203.78.1"}  # where NCCL would meet the trainer
    assert found["run on"] == [False] * 4


def test_servers_that_share_are_on_the_workers_gpus(cluster: tuple[Machines, Path]) -> None:
    found = told(cluster, "colocated", 2)
    workers = {(each["network"], each["gpus"]) for each in found["workers"]}
    servers = {(each["network"], each["gpus"]) for each in found["servers"]}
    assert len(workers) == 4
    assert len(servers) == 2
    assert servers < workers
    assert len({network for network, _ in servers}) == 2


def test_who_sends_by_nccl_has_a_gpu_of_its_own_machine_that_nobody_else_has(cluster: tuple[Machines, Path]) -> None:
    found = told(cluster, "apart", 3, "actor_rollout_ref.rollout.weight_transfer=nccl")
    everybody = {(each["network"], each["gpus"]) for each in found["servers"] + found["workers"]}
    assert len(everybody) == 7  # of eight
    of_sender = ["3", "2", "1", "0"][int(found["device"].removeprefix("cuda:"))]
    assert (found["network"], of_sender) not in everybody
