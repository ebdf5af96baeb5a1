"""A real SGLang server: what the gateway's client understands of it, its weights, and a run that trains with it.

Tests that change the server's weights put them back.
"""

import asyncio
import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.sglang import SGLangPolicy, update_from_disk
from lightning_rl.inference.weights.check import FLOAT32, EngineMismatch, Tolerance
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl_proxy.engines.base import EngineFinish, EngineTokens, TokenRequest
from lightning_rl_proxy.engines.sglang import SGLangEngine
from lightning_rl_proxy.engines.sglang_probe import Abilities, probe_sglang
from lightning_rl_proxy.errors import PromptTooLong
from lightning_rl_proxy.sampling import Sampling
from tests.sglang.conftest import CHECKPOINT, DEVICE, DTYPE, ON_GPU, ROOT

T = TypeVar("T")
END = 996  # of the tutorial's turns


def client(url: str, use: Callable[[SGLangEngine], Awaitable[T]], version: int = 0) -> T:
    async def work() -> T:
        able = await probe_sglang(url)
        engine = SGLangEngine(model="m", url=url, stop_token_ids=[END], policy_version=version, able=able)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(work())


async def generate(
    engine: SGLangEngine, prompt: list[int], *, stream: bool = False, **sampling: Any
) -> tuple[list[int], list[float] | None, EngineFinish]:
    given = Sampling(**({"temperature": 1.0, "seed": 7, "max_tokens": 40} | sampling))
    *parts, finish = [part async for part in engine.generate(TokenRequest(prompt, given, "r", stream=stream))]
    assert isinstance(finish, EngineFinish)
    tokens = [part for part in parts if isinstance(part, EngineTokens)]
    logprobs = [one for part in tokens for one in part.logprobs or []]
    ids = [token for part in tokens for token in part.token_ids]
    return ids, logprobs if len(logprobs) == len(ids) else None, finish


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> Tensor:
    """What the model says of an answer, float32 [len(ids)]."""
    logits = model(torch.tensor([[*prompt, *ids]], device=DEVICE)).logits[0, len(prompt) - 1 : -1].float().cpu()
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def test_the_probe_sees_what_its_flags_decide(url: str) -> None:
    able = asyncio.run(probe_sglang(url))
    assert able == Abilities(tempered=True, room=able.room, schemas=True, seeded=ON_GPU, incremental=True)
    assert able.room is not None
    assert 500 < able.room <= 512


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_the_model_at_the_temperature(
    url: str, model: Any, prompt: list[int], temperature: float
) -> None:
    sampled = {"temperature": temperature, "ignore_eos": True, "max_tokens": 200}
    ids, logprobs, finish = client(url, lambda engine: generate(engine, prompt, **sampled))
    assert (len(ids), finish.reason) == (200, "length")
    assert logprobs is not None
    apart = (log_probs(model, prompt, ids, temperature) - torch.tensor(logprobs)).abs()
    assert float(apart.mean() if ON_GPU else apart.max()) < (0.05 if ON_GPU else 1e-3)


def test_a_stream_is_the_whole_answer(url: str, prompt: list[int]) -> None:
    async def ask(engine: SGLangEngine) -> list[tuple[list[int], list[float] | None, EngineFinish]]:
        sampled = {"temperature": 0.0, "ignore_eos": True}
        return [await generate(engine, prompt, stream=stream, **sampled) for stream in (False, True)]

    whole, streamed = client(url, ask)
    assert whole[0] == streamed[0]
    assert whole[1] == pytest.approx(streamed[1], abs=1e-3 if DEVICE == "cpu" else 0.05)


@pytest.mark.skipif(not ON_GPU, reason="SGLang's deterministic sampling needs a kernel of a GPU")
def test_a_seed_repeats_an_answer(url: str, prompt: list[int]) -> None:
    async def ask(engine: SGLangEngine) -> list[list[int]]:
        return [(await generate(engine, prompt, seed=seed, ignore_eos=True))[0] for seed in (7, 7, 8)]

    first, again, other = client(url, ask)
    assert first == again != other


def test_a_stop_token_is_in_the_answer_and_named(url: str, prompt: list[int]) -> None:
    async def ask(engine: SGLangEngine) -> tuple[list[int], EngineFinish]:
        first, _, _ = await generate(engine, prompt, temperature=0.0, max_tokens=12, ignore_eos=True)
        ids, _, finish = await generate(engine, prompt, temperature=0.0, max_tokens=12, stop_token_ids=[first[5]])
        at = next(at for at, token in enumerate(first) if token in (first[5], END))
        assert (ids, finish.stop_match) == (first[: at + 1], first[at])
        return ids, finish

    assert client(url, ask)[1].reason == "stop"


def test_what_holds_an_answer_holds_it(url: str, prompt: list[int]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)

    async def ask(engine: SGLangEngine) -> list[tuple[list[int], list[float] | None, EngineFinish]]:
        schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
        schema["additionalProperties"] = False
        return [
            await generate(engine, prompt, json_schema=schema, max_tokens=100),
            await generate(engine, prompt, regex="[ab]{5}", max_tokens=100),
            await generate(engine, prompt, choice=["yes", "no"], max_tokens=100),
            await generate(engine, prompt, logit_bias={"300": 100.0}, max_tokens=5, ignore_eos=True),
        ]

    found = client(url, ask)
    words = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _, _ in found]
    assert isinstance(json.loads(words[0])["n"], bool)
    assert re.fullmatch("[ab]{5}", words[1])
    assert words[2] in ("yes", "no")
    assert found[3][0] == [300] * 5
    assert [logprobs for _, logprobs, _ in found] == [None] * 4  # of changed logits there are none


def test_a_prompt_without_room_is_told_so(url: str) -> None:
    with pytest.raises(PromptTooLong):
        client(url, lambda engine: generate(engine, [300] * 600))


def test_leaving_a_stream_ends_the_request(url: str, prompt: list[int]) -> None:
    async def ask(engine: SGLangEngine) -> int:
        given = Sampling(temperature=1.0, ignore_eos=True, max_tokens=400)
        parts = engine.generate(TokenRequest(prompt, given, "left", stream=True))
        await anext(parts)
        await parts.aclose()
        load = await engine.load()
        assert load is not None
        assert load.capacity is not None
        assert load.capacity > 0
        return load.waiting

    assert client(url, ask) == 0


def test_new_weights_in_the_middle_of_an_answer(url: str, model: Any, prompt: list[int], tmp_path: Path) -> None:
    """Tokens before them have the old weights' log probabilities, later ones the new weights' behind the whole text."""

    async def ask(engine: SGLangEngine) -> list[Any]:
        given = Sampling(temperature=1.0, seed=5, ignore_eos=True, max_tokens=400)
        parts = engine.generate(TokenRequest(prompt, given, "r", stream=True))
        found: list[Any] = [await anext(parts)]
        await engine.pause()
        await asyncio.to_thread(update_from_disk, url, tmp_path / "new", 1)
        engine.policy_version = 1
        assert await engine.check() == 1
        await engine.resume()
        return [*found, *[part async for part in parts]]

    new = copy.deepcopy(model)
    change(new)
    new.save_pretrained(tmp_path / "new")
    try:
        *tokens, finish = client(url, ask)
    finally:
        update_from_disk(url, CHECKPOINT, 0)
    ids = [token for part in tokens for token in part.token_ids]
    told = torch.tensor([one for part in tokens for one in part.logprobs])
    assert (len(ids), finish.reason) == (400, "length")
    (old, begin, at), (then, _, end) = [(v.version, v.start, v.end) for v in finish.version_spans]
    assert (old, begin, then, end) == (0, 0, 1, 400)
    assert len(tokens[0].token_ids) <= at < 400
    before, after = (told - log_probs(weights, prompt, ids) for weights in (model, new))
    apart = torch.cat([before[:at], after[at:]]).abs()
    assert float(apart.mean() if ON_GPU else apart.max()) < (0.05 if ON_GPU else 1e-3)


def test_a_policy_gives_it_weights_and_finds_out_old_ones(url: str, tmp_path: Path) -> None:
    policy = SGLangPolicy(
        ModelSource(CHECKPOINT, device=DEVICE, dtype=DTYPE),
        tmp_path,
        urls=[url],
        tolerance=Tolerance(mean=0.1) if ON_GPU else FLOAT32,
    )
    try:
        for version in (1, 2):
            change(policy.model)
            policy.update_weights(policy.model, version)  # it compares log probabilities, and raises EngineMismatch
        for _ in range(4):
            change(policy.model)
        with pytest.raises(EngineMismatch):
            policy._compare()
    finally:
        policy.close()
        update_from_disk(url, CHECKPOINT, 0)


def change(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


@pytest.mark.long
def test_the_tutorials_agent_trains_with_it(url: str, tmp_path: Path) -> None:
    told = f"from tests.sglang.test_engine import train; train({url!r}, {str(tmp_path)!r})"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    try:
        done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, env=environment, capture_output=True, text=True)
    finally:
        update_from_disk(url, CHECKPOINT, 0)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    steps = [row for row in jsonl.read(tmp_path / "run" / "metrics.jsonl") if row["step"] >= 1]
    assert len(steps) == 2
    assert all(row["training/mismatch_kl"] < (0.02 if ON_GPU else 1e-5) for row in steps)


def train(url: str, folder: str) -> None:
    """Two steps of the tutorial, sampled by the server at `url`."""
    from omegaconf import OmegaConf

    import lightning_rl as lrl
    from examples.sql_agent.agent import sql_agent
    from examples.sql_agent.data import make
    from examples.sql_agent.train import CONFIG
    from lightning_rl.config import compose

    changes = {
        "actor_rollout_ref": {
            "rollout": {"name": "sglang", "server_urls": [url]},
            "actor": {"fsdp_config": {"dtype": "bfloat16" if ON_GPU else "float32"}},
        },
        "trainer": {"total_training_steps": 2, "device": DEVICE, "val_before_train": False, "test_freq": 0},
    }
    ppo = lrl.PPO(compose(OmegaConf.merge(CONFIG, changes)))
    lrl.Trainer(sql_agent, n_runners=16, run_dir=Path(folder) / "run").fit(ppo, make(Path(folder) / "data")["train"])
