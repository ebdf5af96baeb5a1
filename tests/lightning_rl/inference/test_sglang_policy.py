"""A policy on SGLang servers, and a run that trains with one: a stand-in speaks SGLang's wire, and computes with the
real model, which it reads from the folder that it is told."""

from collections.abc import Iterator
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
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.sglang import SGLangPolicy
from lightning_rl.inference.weights.check import EngineMismatch
from tests.proxy.engines.sglang_stand_in import StandIn
from tests.proxy.engines.vllm_stand_in import serving

CHECKPOINT = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"


class Server(StandIn):
    """It samples from a model in a folder."""

    off = 0.0  # by which its numbers are wrong

    def __init__(self) -> None:
        super().__init__(context=320)
        self.model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
        self.logits = self.of_the_model

    @torch.no_grad()
    def of_the_model(self, context: list[int], vocabulary: tuple[int, ...]) -> dict[int, float]:
        found: list[float] = self.model(torch.tensor([context])).logits[0, -1].tolist()
        return {token: value + self.off * token for token, value in enumerate(found)}

    def update(self, body: dict[str, Any]) -> web.Response:
        self.model = AutoModelForCausalLM.from_pretrained(body["model_path"], dtype=torch.float32)
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
