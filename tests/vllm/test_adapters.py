"""Adapters of two policies on one vLLM server: each samples its own, in the version that it was asked for."""

import asyncio
import copy
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_rl as lrl
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.servers.errors import WeightsRefused
from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.inference.vllm.transfer import AdapterTransfer
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.training import lora
from lightning_rl_proxy.engines.vllm import TokenEngine
from tests.lightning_rl.ppo.agents import plan_and_execute, two_calls
from tests.lightning_rl.ppo.test_ppo import config
from tests.vllm.asking import ENDLESS, Sampled, whole
from tests.vllm.server import CHECKPOINT, PYTHON, Server, processes
from tests.vllm.test_policy import _disturb, _logprobs, _until

PROMPT = [5 + i % 200 for i in range(64)]  # four blocks of a prefix cache
LONG = 300  # tokens
RANKS = {"planner": 2, "executor": 4}
OPTIONS = Options(
    python=str(PYTHON), dtype="float32", device="cpu", processed_logprobs=False, adapters=2, adapter_rank=4
)


class Adapted:
    """A policy with an adapter that is all random, and what it gave its servers."""

    def __init__(self, name: str, run_dir: Path, beside: list[VllmPolicy], urls: tuple[str, ...] = ()) -> None:
        (run_dir / name).mkdir()
        self.policy = VllmPolicy(
            ModelSource(CHECKPOINT, device="cpu"), OPTIONS, run_dir / name, beside=beside, urls=urls
        )
        self.policy.name = name
        self.model: Any = lora.adapted(self.policy.model, rank=RANKS[name], alpha=8, targets="all-linear")
        self.version = -1
        self.change()

    def change(self) -> None:
        for _ in range(10):
            _disturb(self.model, only="lora_")

    def send(self) -> None:
        self.version += 1
        self.policy.update_weights(lora.low_rank(self.model), self.version)

    def gap(self) -> float:
        """How far its server's log probabilities are from the model's."""
        transfer = self.policy._transfer
        assert isinstance(transfer, AdapterTransfer)
        control = self.policy.replicas.members[0].control
        said = control.sample(PROMPT, 12, seed=4, model=transfer.served_name)
        own = _logprobs(self.model, PROMPT, said.token_ids)
        return max(abs(a - b) for a, b in zip(own, said.logprobs, strict=True))

    async def ask(self, n: int) -> Sampled:
        url = self.policy.registrations()[0]["url"]
        engine = TokenEngine(
            model=self.policy.name, kind="vllm", url=url, stop_token_ids=[], policy_version=self.version, adapter=True
        )
        try:
            assert await engine.check() == self.version
            return await whole(engine, PROMPT, max_tokens=n, **ENDLESS)
        finally:
            await engine.close()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Adapted, Adapted]]:
    folder = tmp_path_factory.mktemp("run")
    planner = Adapted("planner", folder, [])
    executor = Adapted("executor", folder, [planner.policy])
    try:
        for each in (planner, executor):
            each.policy.start()
            each.send()
        yield planner, executor
    finally:
        executor.policy.close()
        planner.policy.close()


def test_one_server_samples_each_with_its_own(both: tuple[Adapted, Adapted]) -> None:
    [[one], [other]] = (each.policy.registrations() for each in both)
    assert one == {"model": "planner", "kind": "vllm", "url": other["url"], "policy_version": 0, "adapter": True}
    assert [each.gap() < 1e-3 for each in both] == [True, True]
    assert (both[0].policy.replicas.members[0].server.options.adapter_rank) == 4  # type: ignore[union-attr]


def test_nothing_that_another_version_computed_is_used_again(both: tuple[Adapted, Adapted]) -> None:
    planner, _ = both
    first = copy.deepcopy(planner.model.state_dict())
    assert planner.gap() < 1e-3  # its blocks are in the prefix cache now
    planner.change()
    for _ in range(5):  # more versions than a server knows at once
        planner.send()
        assert planner.gap() < 1e-3
    planner.model.load_state_dict(first)
    planner.send()
    assert planner.gap() < 1e-3
    listed = planner.policy.replicas.members[0].control.adapters()
    assert {name for name in listed if name.startswith("planner@")} == {
        f"planner@{planner.version - i}" for i in range(4)
    }


def test_an_answer_ends_with_the_version_that_it_began_with(both: tuple[Adapted, Adapted]) -> None:
    """And nobody waits: neither it, nor those that ask for the other policy."""
    planner, executor = both
    before = copy.deepcopy(planner.model)
    began = planner.version

    async def play() -> tuple[Sampled, Sampled, Sampled]:
        old = asyncio.create_task(planner.ask(LONG))
        other = asyncio.create_task(executor.ask(LONG))
        await asyncio.sleep(0.5)
        assert not old.done()
        planner.change()
        await asyncio.to_thread(planner.send)
        new = await planner.ask(20)
        return await old, new, await other

    old, new, other = asyncio.run(play())
    for sampled, version, model in (
        (old, began, before),
        (new, began + 1, planner.model),
        (other, executor.version, executor.model),
    ):
        assert sampled.versions == [(version, 0, len(sampled.token_ids))]
        assert sampled.logprobs is not None
        own = _logprobs(model, PROMPT, sampled.token_ids)
        assert max(abs(a - b) for a, b in zip(own, sampled.logprobs, strict=True)) < 1e-3


@pytest.mark.long
def test_a_server_that_is_killed_comes_back_with_both(both: tuple[Adapted, Adapted]) -> None:
    planner, _ = both
    outages: list[tuple[str, bool]] = []
    for each in both:
        each.policy.on_outage = lambda away, name=each.policy.name: outages.append((name, away))  # type: ignore[misc]
    os.kill(processes(planner.policy.registrations()[0]["url"])[0], signal.SIGKILL)
    time.sleep(1.5)  # it is noticed
    _until(lambda: len(outages) == 4, planner.policy)
    assert outages == [("planner", True), ("executor", True), ("planner", False), ("executor", False)]
    assert [each.gap() < 1e-3 for each in both] == [True, True]


def test_a_server_without_adapters_says_how_to_start_it(raw: Server, tmp_path: Path) -> None:
    planner = Adapted("planner", tmp_path, [], (raw.url,))
    planner.policy.start()
    try:
        with pytest.raises(WeightsRefused, match="start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            planner.send()
    finally:
        planner.policy.close()


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_one_policy_learns_by_its_adapter_alone(tmp_path: Path, schedule: str) -> None:
    keys = config(total_training_steps=3, schedule=schedule)
    keys["actor_rollout_ref"]["model"] |= {"lora_rank": 4, "lora_alpha": 8, "lora": {"merge": False}}
    keys["actor_rollout_ref"]["actor"] = {"optim": {"lr": 1e-2}}
    keys["actor_rollout_ref"]["rollout"] |= {"name": "vllm", "python": str(PYTHON), "temperature": 1.0}
    sent: list[set[str]] = []

    class Watched(lrl.PPO):
        def on_step_end(self, metrics: dict[str, float]) -> None:
            sent.append({file.suffix for file in (self.run_dir / "weights").rglob("*.*") if file.is_file()})
            sent.append({file.name for file in (self.run_dir / "weights").rglob("*.safetensors")})

    ppo = Watched(keys)
    lrl.Trainer(two_calls, n_runners=4, run_dir=tmp_path).fit(ppo, [0, 1, 2, 3])
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["training/policy_version"] for row in rows] == [1, 2, 3]
    if schedule == "sync":  # else older versions have sampled, too
        assert max(row["training/mismatch_kl"] for row in rows) < 1e-6
    assert sent == [{".json", ".safetensors"}, {"adapter_model.safetensors"}] * 3
    account = {key: value for key, value in rows[-1].items() if key.startswith("tokens/")}
    received, pending = account.pop("tokens/received"), account.pop("tokens/pending")
    assert (received, pending) == (sum(account.values()), 0)


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_two_policies_learn_by_one_server(tmp_path: Path, schedule: str) -> None:
    keys = config(total_training_steps=3, schedule=schedule)
    keys["actor_rollout_ref"]["model"] |= {"lora_rank": 4, "lora_alpha": 8}
    keys["actor_rollout_ref"]["actor"] = {"optim": {"lr": 1e-2}}
    keys["actor_rollout_ref"]["rollout"] |= {"name": "vllm", "python": str(PYTHON), "temperature": 1.0}
    ppo = lrl.PPO(keys, policies={"planner": {}, "executor": {"train_every": 2}})
    lrl.Trainer(plan_and_execute, n_runners=4, run_dir=tmp_path).fit(ppo, [0, 1, 2, 3])
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["planner/training/policy_version"] for row in rows] == [1, 2, 3]
    assert [row["executor/training/policy_version"] for row in rows] == [1, 1, 2]
    if schedule == "sync":  # else older versions have sampled, too
        assert max(row["planner/training/mismatch_kl"] for row in rows) < 1e-6
    for name in ("planner", "executor"):
        account = {key: value for key, value in rows[-1].items() if key.startswith(f"{name}/tokens/")}
        received, pending = account.pop(f"{name}/tokens/received"), account.pop(f"{name}/tokens/pending")
        assert (received, pending) == (sum(account.values()), 0)
    assert len(list(tmp_path.rglob("vllm-*.log"))) == 1
    first, second = (dict(learner.models.model.named_parameters()) for learner in ppo.learners)
    assert any(not torch.equal(first[name], second[name]) for name in first if ".lora_B." in name)
