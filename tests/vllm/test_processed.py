"""A server whose logprobs are of what was sampled from, and that serves by priority; and the end of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from lightning_rl_proxy.engines.base import EngineFinish, EngineTokens, EngineUnavailable, TokenRequest
from lightning_rl_proxy.engines.probe import probe
from lightning_rl_proxy.engines.vllm import TokenEngine
from lightning_rl_proxy.sampling import Sampling
from tests.vllm import reference
from tests.vllm.asking import ENDLESS, PROMPT, sample, whole, with_client
from tests.vllm.gateway import QUESTION, Attempt, attempt
from tests.vllm.server import MODEL, Server, eventually

pytestmark = pytest.mark.long  # a server of their own


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_of_the_effective_temperature_are_told_as_sampled(processed: Server, temperature: float) -> None:
    assert asyncio.run(probe(processed.url)) == "processed"
    sampled = sample(processed, logprobs="processed", temperature=temperature, max_tokens=12)
    expected = reference.logprobs(PROMPT, sampled.token_ids, temperature)
    assert sampled.logprobs == pytest.approx(expected, abs=reference.TOLERANCE)

    async def kind(engine: TokenEngine) -> str:
        return engine.logprob_kind(Sampling(temperature=temperature))

    assert with_client(processed, kind, logprobs="processed") == "sampled"


def test_greedy_ones_are_of_temperature_one(processed: Server) -> None:
    sampled = sample(processed, logprobs="processed", temperature=0.0, top_k=3, top_p=0.5, max_tokens=12)
    expected = reference.logprobs(PROMPT, sampled.token_ids)
    assert sampled.logprobs == pytest.approx(expected, abs=reference.TOLERANCE)


@pytest.mark.parametrize(
    "reshaped",
    [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 1.0}, {"logit_bias": {"7": 1.0}}],
)
def test_those_of_a_reshaped_distribution_are_not_handed_on(processed: Server, reshaped: dict[str, float]) -> None:
    assert sample(processed, logprobs="processed", max_tokens=5, **reshaped).logprobs is None


def test_the_more_urgent_request_is_served_first(processed: Server) -> None:
    ended: list[str] = []

    async def ask(engine: TokenEngine, name: str, priority: int) -> None:
        await whole(engine, priority=priority, max_tokens=50, **ENDLESS)
        ended.append(name)

    async def count(state: str, n: int) -> None:
        await asyncio.to_thread(eventually, lambda: processed.metric(f"num_requests_{state}") == n)

    async def queue(engine: TokenEngine) -> None:
        with processed.slowed():
            running = asyncio.create_task(whole(engine, **ENDLESS))
            await count("running", 1)
            later = asyncio.create_task(ask(engine, "later", 5))
            await count("waiting", 1)
            urgent = asyncio.create_task(ask(engine, "urgent", 1))
            await count("waiting", 2)
            running.cancel()
            await asyncio.gather(later, urgent)

    with_client(processed, queue)
    assert ended == ["urgent", "later"]


def test_a_gateway_trains_on_the_logprobs_of_another_temperature(processed: Server, tmp_path: Path) -> None:
    with attempt(tmp_path, processed) as at:
        for more in ({"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}):
            at.client.chat.completions.create(model=MODEL, messages=[QUESTION], max_tokens=20, **more)
        tempered, cut = at.finish()
        expected = reference.logprobs(tempered.prompt_ids, tempered.response_ids, 0.7)
        assert tempered.logprobs == pytest.approx(expected, abs=reference.TOLERANCE)
        assert (tempered.logprob_kind, cut.logprobs) == ("sampled", None)


# It needs a stream whose first token comes while the rest is sampled: an engine that outruns its server gives none.
@pytest.mark.long
def test_a_server_that_dies_fails_its_requests_as_ones_to_try_again(processed: Server, tmp_path: Path) -> None:
    """The last test of this server: what asks it afterwards starts it anew."""

    async def die(engine: TokenEngine, at: Attempt) -> list[str]:
        with processed.slowed():
            parts = engine.generate(TokenRequest(PROMPT, Sampling(temperature=1.0, **ENDLESS), "r", stream=True))
            assert isinstance(await anext(parts), EngineTokens)
            waiting = asyncio.create_task(whole(engine, **ENDLESS))
            agent = asyncio.create_task(asyncio.to_thread(refused_by, at))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            assert not agent.done()
            processed.kill()
        told = []
        for work in (drained(parts), waiting, whole(engine), engine.check(), engine.pause(), probe(processed.url)):
            with pytest.raises(EngineUnavailable) as error:
                await work
            told.append(str(error.value))
        refused = await agent
        assert refused.status_code in (502, 503)
        assert refused.response.headers["x-should-retry"] == "true"
        assert 1 <= int(refused.response.headers["retry-after"]) <= 60
        return told

    with attempt(tmp_path, processed) as at:
        told = with_client(processed, lambda engine: die(engine, at))
        assert refused_by(at).response.headers["x-should-retry"] == "true"
    assert all(processed.url in message for message in told)


async def drained(parts: AsyncIterator[EngineTokens | EngineFinish]) -> None:
    async for _ in parts:
        pass


def refused_by(at: Attempt) -> openai.APIStatusError:
    """What the agent is told in place of an answer."""
    with pytest.raises(openai.APIStatusError) as refused:
        at.client.chat.completions.create(model=MODEL, messages=[QUESTION], **ENDLESS)
    return refused.value
