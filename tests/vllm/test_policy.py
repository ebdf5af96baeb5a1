"""A policy on two vLLM servers that it starts itself: the weights that arrive, those that are refused, and servers that
end."""

import asyncio
import copy
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.servers.errors import WeightsRefused
from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.vllm.control import Control
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.inference.weights.check import EngineMismatch
from lightning_rl.inference.weights.stream import as_saved
from lightning_rl.training import lora
from lightning_rl_proxy.engines.vllm import TokenEngine
from tests.vllm.asking import ENDLESS, LONG, Sampled, whole
from tests.vllm.server import CHECKPOINT, PYTHON, processes

pytestmark = pytest.mark.long  # two servers of its own

CONTEXT = 2048  # of the checkpoint's own 512 tokens a generation ends before it can be frozen
PROMPT = [5 + i % 200 for i in range(64)]  # four blocks of a prefix cache


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(CHECKPOINT, tmp_path_factory.mktemp("model") / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(scope="module")
def policy(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPolicy]:
    options = Options(
        python=str(PYTHON), dtype="float32", device="cpu", context=CONTEXT, processed_logprobs=False, servers=2
    )
    made = VllmPolicy(ModelSource(checkpoint, device="cpu"), options, tmp_path_factory.mktemp("run"))
    try:
        made.start()
        made.update_weights(made.model, 0)
        yield made
    finally:
        made.close()


@pytest.fixture
def first(policy: VllmPolicy) -> Iterator[Control]:
    control = Control(policy.registrations()[0]["url"])
    yield control
    control.close()


def test_both_servers_sample_what_was_sent(policy: VllmPolicy) -> None:
    before = copy.deepcopy(policy.model.state_dict())
    _disturb(policy.model)
    policy.update_weights(policy.model, 1)
    for registration in policy.registrations():
        control = Control(registration["url"])
        assert _gap(policy.model, control) < 1e-3
        assert _version(control) == "1"
    policy.model.load_state_dict(before)
    policy.update_weights(policy.model, 2)


def test_nothing_that_older_weights_computed_is_used_again(policy: VllmPolicy, first: Control) -> None:
    first.sample(PROMPT, 1, seed=0)  # its blocks are in the prefix cache now
    _disturb(policy.model)
    policy.update_weights(policy.model, 3)
    assert _gap(policy.model, first) < 1e-3


def test_a_generation_that_was_frozen_goes_on_with_the_new_weights_alone(policy: VllmPolicy, first: Control) -> None:
    url, old = policy.registrations()[0]["url"], int(_version(first))
    sampled = asyncio.run(_update_in_the_middle(url, policy, old))
    assert len(sampled.token_ids) == LONG
    assert [version for version, _, _ in sampled.versions] == [old, old + 1]
    # What follows the update is sampled from what the new weights make of all that stands before it.
    own, cut = _logprobs(policy.model, PROMPT, sampled.token_ids), sampled.versions[1][1]
    assert sampled.logprobs is not None
    assert max(abs(a - b) for a, b in zip(own[cut:], sampled.logprobs[cut:], strict=True)) < 1e-3


def test_a_file_of_another_model_is_refused_and_the_weights_stay(policy: VllmPolicy, first: Control) -> None:
    lacking = {k: v for k, v in policy.model.state_dict().items() if k != "model.norm.weight"}
    with pytest.raises(WeightsRefused, match=r"model\.norm\.weight has shape None, expected \[128\]"):
        policy.update_weights(lacking, 5)
    assert _gap(policy.model, first) < 1e-3
    policy.update_weights(policy.model, 6)


def test_other_weights_than_the_model_s_are_found_out(policy: VllmPolicy) -> None:
    other = copy.deepcopy(policy.model)
    _disturb(other)
    with pytest.raises(EngineMismatch, match="of the weights of version 7 are up to"):
        policy.update_weights(other, 7)
    policy.update_weights(policy.model, 8)


def test_a_server_that_is_killed_comes_back_with_the_present_weights(policy: VllmPolicy, first: Control) -> None:
    outages: list[bool] = []
    policy.on_outage = outages.append
    os.kill(processes(first.url)[0], signal.SIGKILL)
    _disturb(policy.model)
    time.sleep(1.5)  # it is noticed
    policy.update_weights(policy.model, 9)  # the other takes them meanwhile
    _until(lambda: _answers(first) and _version(first) == "9", policy)
    assert _gap(policy.model, first) < 1e-3
    assert outages == []


@pytest.mark.long
@pytest.mark.parametrize("in_4_bits", [False, True], ids=["whole", "4 bits"])
def test_servers_that_run_already_are_attached(
    policy: VllmPolicy, checkpoint: Path, tmp_path: Path, in_4_bits: bool
) -> None:
    urls = [registration["url"] for registration in policy.registrations()]
    options = Options(python="", dtype="float32", device="cpu", context=CONTEXT, processed_logprobs=False)
    second = VllmPolicy(ModelSource(checkpoint, device="cpu", load_in_4bit=in_4_bits), options, tmp_path, urls=urls)
    try:
        second.start()
        if not in_4_bits:  # there the model with an adapter alone has whole weights
            second.update_weights(second.model, 0)
        assert [registration["url"] for registration in second.registrations()] == urls
        adapted = lora.adapted(second.model, rank=4, alpha=8, targets="all-linear")
        _disturb(adapted, only="lora_")
        second.update_weights(as_saved(adapted.get_base_model(), lora.merged(adapted)), 10)
        last = Control(urls[1])
        assert _gap(second.model, last) < 1e-3
        os.kill(processes(urls[1])[0], signal.SIGKILL)  # it is started anew by its owner
        _until(lambda: not _answers(last), second)
        second.update_weights(as_saved(adapted.get_base_model(), lora.merged(adapted)), 11)  # the other takes them
        assert _version(Control(urls[0])) == "11"
        _until(lambda: _answers(last) and _version(last) == "11", second)
        assert _gap(second.model, last) < 1e-3
    finally:
        second.close()
    assert _answers(Control(urls[0]))  # they are not ours to stop


async def _update_in_the_middle(url: str, policy: VllmPolicy, version: int) -> Sampled:
    engine = TokenEngine(
        model="policy", kind="vllm", url=url, stop_token_ids=[], policy_version=version, logprobs="raw"
    )
    # No stream: an engine outruns the server that sends it.
    generation = asyncio.create_task(whole(engine, PROMPT, max_tokens=LONG, **ENDLESS))
    await asyncio.sleep(0.3)
    await engine.pause()
    try:
        assert not generation.done()
        _disturb(policy.model)
        await asyncio.to_thread(policy.update_weights, policy.model, version + 1)
        engine.policy_version = version + 1
    finally:
        await engine.resume()
    sampled = await generation
    await engine.close()
    return sampled


@torch.no_grad()
def _disturb(model: nn.Module, only: str = "") -> None:
    for name, parameter in model.named_parameters():
        if only in name:
            parameter.add_(torch.randn_like(parameter) * 0.01)


def _gap(model: Any, control: Control) -> float:
    said = control.sample(PROMPT, 12, seed=4)
    own = _logprobs(model, PROMPT, said.token_ids)
    return max(abs(a - b) for a, b in zip(own, said.logprobs, strict=True))


@torch.no_grad()
def _logprobs(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    at = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    found: list[float] = at.gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
    return found


def _version(control: Control) -> str:
    return str(control._ask("GET", "/weight_info")["weight_version"])


def _answers(control: Control) -> bool:
    try:
        return not control.paused()
    except RuntimeError:
        return False


def _until(holds: Callable[[], bool], policy: VllmPolicy) -> None:
    end = time.monotonic() + 200
    while not holds():
        policy.check()
        assert time.monotonic() < end, "it did not come back"
        time.sleep(0.5)
