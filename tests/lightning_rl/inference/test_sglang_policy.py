"""A policy on SGLang servers, and a run that trains with one: a stand-in speaks SGLang's wire, and computes with the
real model, which it reads from the folder that it is told."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

import lightning_rl as lrl
from examples.sql_agent.agent import sql_agent
from examples.sql_agent.data import make
from examples.sql_agent.train import CONFIG
from lightning_rl.config import compose
from lightning_rl.inference import sglang as module
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.servers import replicas
from lightning_rl.inference.servers.errors import Unreached
from lightning_rl.inference.sglang import SGLangPolicy, _Control
from lightning_rl.inference.weights.check import EngineMismatch
from tests.proxy.engines.sglang_stand_in import StandIn
from tests.proxy.engines.vllm_stand_in import serving

CHECKPOINT = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"


_loading = threading.Lock()  # transformers loads one model of a process at a time


def load(folder: Path | str) -> Any:
    with _loading:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class Server(StandIn):
    """It samples from a model in a folder."""

    off = 0.0  # by which its numbers are wrong
    down = False

    def __init__(self) -> None:
        super().__init__(context=320)
        self.model: Any = load(CHECKPOINT)
        self.logits = self.of_the_model

    @property
    def app(self) -> web.Application:
        made = super().app
        made.middlewares.append(self.unless_down)
        return made

    @web.middleware
    async def unless_down(self, request: web.Request, handler: Any) -> web.StreamResponse:
        answer: web.StreamResponse = web.Response(status=502) if self.down else await handler(request)
        return answer

    def start_anew(self) -> None:
        self.model = load(CHECKPOINT)
        self.weight_version, self.down = "default", False

    @torch.no_grad()
    def of_the_model(self, context: list[int], vocabulary: tuple[int, ...]) -> dict[int, float]:
        found: list[float] = self.model(torch.tensor([context])).logits[0, -1].tolist()
        return {token: value + self.off * token for token, value in enumerate(found)}

    def update(self, body: dict[str, Any]) -> web.Response:
        self.model = load(body["model_path"])
        return super().update(body)


@contextmanager
def policy(tmp_path: Path, *servers: Server) -> Iterator[SGLangPolicy]:
    with serving(servers[0].app) as one, serving(servers[-1].app) as other:
        made = SGLangPolicy(ModelSource(CHECKPOINT, device="cpu"), tmp_path, urls=[one, other][: len(servers)])
        made.start()
        yield made
        made.close()


def test_every_server_has_the_weights_when_an_update_returns(tmp_path: Path) -> None:
    servers = Server(), Server()
    with policy(tmp_path, *servers) as made:
        with torch.no_grad():
            made.model.model.norm.weight.add_(0.1)
        made.update_weights(made.model, 4)
        for server in servers:
            assert server.weight_version == "4"
            assert torch.equal(server.model.model.norm.weight, made.model.model.norm.weight)
    assert not list(tmp_path.iterdir())


def test_a_server_that_computes_something_else_is_found_out(tmp_path: Path) -> None:
    server = Server()
    server.off = 0.01
    with policy(tmp_path, server) as made, pytest.raises(EngineMismatch, match=r"SGLang at .* of version 1 "):
        made.update_weights(made.model, 1)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "WATCH_SECONDS", 0.01)


def test_an_update_leaves_out_a_server_that_is_away_which_is_given_the_weights_when_it_was_started_anew(
    tmp_path: Path, impatient: None
) -> None:
    there, away = Server(), Server()
    with policy(tmp_path, there, away) as made:
        made.update_weights(made.model, 0)
        away.down = True
        with torch.no_grad():
            made.model.model.norm.weight.add_(0.1)
        made.update_weights(made.model, 1)
        assert made.replicas.urls_away() == [made.registrations()[1]["url"]]
        assert there.weight_version == "1"
        away.start_anew()
        until(lambda: not made.replicas.urls_away())
        assert away.weight_version == "1"
        assert torch.equal(away.model.model.norm.weight, made.model.model.norm.weight)
        assert away.orders[-1][1]["abort_all_requests"]  # nobody has paused it


def test_calls_and_an_update_wait_while_no_server_answers(tmp_path: Path, impatient: None) -> None:
    server, outages = Server(), list[bool]()
    with policy(tmp_path, server) as made, ThreadPoolExecutor(1) as pool:
        made.on_outage = outages.append
        made.update_weights(made.model, 0)
        server.down = True
        until(lambda: True in outages)
        update = pool.submit(made.update_weights, made.model, 1)
        time.sleep(0.2)
        assert not update.done()
        server.start_anew()
        update.result(60)
        assert (server.weight_version, outages[-1]) == ("1", False)


def test_all_servers_take_the_first_weights(tmp_path: Path) -> None:
    server = Server()
    server.down = True
    with policy(tmp_path, Server(), server) as made, pytest.raises(Unreached, match="when a run begins, all must"):
        made.update_weights(made.model, 0)


def test_a_server_is_paused_where_it_says_so_and_not_where_it_does_not_know() -> None:
    server = StandIn()
    with serving(server.app) as url:
        assert not _Control(url).paused()
        server.running.clear()
        assert _Control(url).paused()
    with serving(web.Application()) as url:  # which answers 404
        assert not _Control(url).paused()


def test_of_weights_on_their_way_the_newest_alone_are_kept(tmp_path: Path) -> None:
    with policy(tmp_path, Server()) as made:
        for version in (0, 1, 1, 2):
            made.update_weights(made.model, version)
            assert [each.name for each in (tmp_path / "weights").iterdir()] == [f"version-{version}"]


def test_what_each_server_samples_is_compared_once_and_of_one_that_is_away_or_paused_not(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(module, "prove", lambda *_, engine, **__: compared.append(engine))
    one, other = Server(), Server()
    with policy(tmp_path, one, other) as made:
        made.update_weights(made.model, 0)
        assert len(compared) == 2
        made.prove()
        assert len(compared) == 2
        other.down = True
        until(lambda: bool(made.replicas.urls_away()))
        made.update_weights(made.model, 1)
        assert len(compared) == 3
        one.running.clear()
        made.update_weights(made.model, 2)
        assert len(compared) == 3
        one.running.set()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it never came so"
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.e2e
def test_a_run_trains_with_it(tmp_path: Path) -> None:
    server = Server()
    with serving(server.app) as url:
        changes = {
            "data": {"train_batch_size": 2},
            "actor_rollout_ref": {"rollout": {"name": "sglang", "server_urls": [url], "n": 4}},
            "trainer": {"total_training_steps": 2, "logger": ["jsonl"], "val_before_train": False, "test_freq": 0},
        }
        ppo = lrl.PPO(compose(OmegaConf.merge(CONFIG, changes)))
        lrl.Trainer(sql_agent, n_runners=8, run_dir=tmp_path / "run").fit(ppo, make(tmp_path / "data")["train"])
    steps = [row for row in ppo.history if row["step"] >= 1]
    assert len(steps) == 2
    assert all(row["training/mismatch_kl"] < 1e-6 for row in steps if "training/mismatch_kl" in row)
    assert server.weight_version == str(ppo.policy_version)
    assert torch.equal(server.model.model.norm.weight, ppo.models.model.model.norm.weight)
