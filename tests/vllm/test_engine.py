"""The token wire as a real vLLM server speaks it: what is asked for is what happens, and what is told is true."""

import asyncio
import contextlib
import json
from contextlib import aclosing

import pytest
from tokenizers import Tokenizer

from lightning_rl_proxy.engines.base import EngineRefused, EngineTokens, TokenRequest
from lightning_rl_proxy.engines.probe import probe
from lightning_rl_proxy.engines.vllm import TokenEngine
from lightning_rl_proxy.errors import PromptTooLong
from lightning_rl_proxy.sampling import Sampling
from tests.vllm import reference
from tests.vllm.asking import ENDLESS, LONG, PROMPT, REGISTERED, Sampled, client, sample, whole, with_client
from tests.vllm.server import CHECKPOINT, CONTEXT, END, Server, eventually


@pytest.mark.smoke
@pytest.mark.parametrize("prompt", [PROMPT, [0], list(range(300))])
@pytest.mark.parametrize("stream", [False, True])
def test_sampled_tokens_have_the_logprobs_that_the_model_gives_them(
    raw: Server, prompt: list[int], stream: bool
) -> None:
    sampled = sample(raw, prompt, stream=stream, max_tokens=40, **ENDLESS)
    assert len(sampled.token_ids) == 40
    assert sampled.logprobs == pytest.approx(reference.logprobs(prompt, sampled.token_ids), abs=reference.TOLERANCE)
    assert sampled.versions == [(REGISTERED, 0, 40)]


def test_logprobs_are_raw_by_default_and_said_to_be(raw: Server) -> None:
    assert asyncio.run(probe(raw.url)) == "raw"
    sampled = sample(raw, temperature=0.7, max_tokens=40, **ENDLESS)
    assert sampled.logprobs == pytest.approx(reference.logprobs(PROMPT, sampled.token_ids), abs=reference.TOLERANCE)
    of_the_temperature = reference.logprobs(PROMPT, sampled.token_ids, 0.7)
    assert sampled.logprobs != pytest.approx(of_the_temperature, abs=0.01)
    kinds = {t: with_client(raw, kind_at(t)) for t in (0.0, 0.7, 1.0)}
    assert kinds == {0.0: "greedy", 0.7: "raw", 1.0: "sampled"}


def kind_at(temperature: float):
    async def ask(engine: TokenEngine) -> str:
        return engine.logprob_kind(Sampling(temperature=temperature))

    return ask


def test_greedy_tokens_are_the_likeliest_and_have_the_logprobs_of_temperature_one(raw: Server) -> None:
    sampled = sample(raw, temperature=0.0, max_tokens=30, **ENDLESS)
    logits = reference.logits(PROMPT, sampled.token_ids)
    logits[:, END] = -1e9
    assert sampled.token_ids == logits.argmax(-1).tolist()
    assert sampled.logprobs == pytest.approx(reference.logprobs(PROMPT, sampled.token_ids), abs=reference.TOLERANCE)


def test_a_stream_brings_the_same_tokens_one_by_one(raw: Server) -> None:
    at_once = sample(raw, max_tokens=30, **ENDLESS)
    streamed = sample(raw, max_tokens=30, stream=True, **ENDLESS)
    assert (streamed.token_ids, streamed.finish) == (at_once.token_ids, at_once.finish)
    assert streamed.logprobs == pytest.approx(at_once.logprobs, abs=1e-5)
    assert at_once.parts == [30]
    assert len(streamed.parts) > 5


def test_a_seed_repeats_its_answer_and_another_gives_another(raw: Server) -> None:
    first, again, other = (sample(raw, max_tokens=30, seed=seed, **ENDLESS).token_ids for seed in (7, 7, 2**63 - 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize("stream", [False, True])
def test_finish_reasons_say_what_ended_the_answer(raw: Server, stream: bool) -> None:
    cut = sample(raw, stream=stream, max_tokens=3, **ENDLESS)
    assert (cut.reason, len(cut.token_ids), cut.finish.stop_match) == ("length", 3, None)
    ended = sample(raw, stream=stream, logit_bias={str(END): 100.0})
    assert (ended.reason, ended.token_ids, ended.finish.stop_match) == ("stop", [END], END)
    another = sample(raw, stream=stream, stop=(END, 6), logit_bias={"6": 100.0})
    assert (another.reason, another.token_ids, another.finish.stop_match) == ("stop", [6], 6)
    full = sample(raw, [5] * (CONTEXT - 4), stream=stream, **ENDLESS)
    assert (full.reason, len(full.token_ids)) == ("length", 4)
    beyond = sample(raw, [5] * (CONTEXT - 4), stream=stream, max_tokens=100, **ENDLESS)
    assert (beyond.reason, len(beyond.token_ids)) == ("length", 4)


def test_an_answer_without_a_limit_goes_on_to_the_end_of_the_context(raw: Server) -> None:
    sampled = sample(raw, [5] * (CONTEXT - 60), **ENDLESS)
    assert (sampled.reason, len(sampled.token_ids)) == ("length", 60)


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 100])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_told_with_both_lengths(raw: Server, length: int, stream: bool) -> None:
    with pytest.raises(PromptTooLong) as told:
        sample(raw, [5] * length, stream=stream)
    assert str(length) in str(told.value)
    assert str(CONTEXT) in str(told.value)


@pytest.mark.parametrize("stream", [False, True])
def test_what_vllm_refuses_is_told_in_its_words(raw: Server, stream: bool) -> None:
    with pytest.raises(EngineRefused, match="Token id 5000 is out of vocabulary") as told:
        sample(raw, [5000], stream=stream)
    assert told.value.status == 400
    with pytest.raises(EngineRefused, match="temperature must be non-negative"):
        sample(raw, temperature=-1.0, stream=stream)


@pytest.mark.parametrize(
    "narrowed", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"top_k": 1, "min_p": 0.5, "top_p": 0.5}]
)
def test_what_narrows_the_choice_to_one_token_gives_the_greedy_answer(raw: Server, narrowed: dict[str, float]) -> None:
    greedy = sample(raw, temperature=0.0, max_tokens=20, **ENDLESS)
    assert sample(raw, max_tokens=20, **narrowed, **ENDLESS).token_ids == greedy.token_ids


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_penalties_make_repetition_rarer(raw: Server, name: str) -> None:
    loop = sample(raw, temperature=0.0, max_tokens=60, **ENDLESS)
    penalised = sample(raw, temperature=0.0, max_tokens=60, **{name: 2.0}, **ENDLESS)
    assert len(set(penalised.token_ids)) > len(set(loop.token_ids))


def test_a_repetition_penalty_is_of_the_prompt_too(raw: Server) -> None:
    penalised = sample(raw, temperature=0.0, max_tokens=30, repetition_penalty=100.0, **ENDLESS)
    assert len({*PROMPT, *penalised.token_ids}) == len(PROMPT) + 30


def test_an_answer_fits_its_schema_and_is_given_no_logprobs_since_they_are_masked(raw: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema["additionalProperties"] = False
    sampled = sample(raw, json_schema=schema, max_tokens=200)
    assert sampled.logprobs is None
    text = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).decode(sampled.token_ids)
    assert sampled.reason == "length" or set(json.loads(text)) == {"n"}
    assert text.lstrip().startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_generation_along(raw: Server, stream: bool) -> None:
    completed = raw.completed

    async def leave(engine: TokenEngine) -> None:
        task = asyncio.create_task(whole(engine, stream=stream, **ENDLESS))
        await asyncio.to_thread(eventually, lambda: raw.metric("num_requests_running") == 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(eventually, lambda: raw.metric("num_requests_running") == 0)

    with raw.slowed():
        with_client(raw, leave)
    assert raw.completed == completed


@pytest.mark.smoke
def test_a_generation_that_is_left_after_its_first_tokens_is_aborted(raw: Server) -> None:
    completed = raw.completed

    async def leave(engine: TokenEngine) -> int:
        asked = Sampling(temperature=1.0, **ENDLESS)
        async with aclosing(engine.generate(TokenRequest(PROMPT, asked, "r", stream=True))) as parts:
            async for part in parts:
                assert isinstance(part, EngineTokens)
                return len(part.token_ids)
        return 0

    with raw.slowed():
        assert with_client(raw, leave) >= 1
        eventually(lambda: raw.metric("num_requests_running") == 0)
    assert raw.completed == completed


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_the_server_aborts_is_told_as_aborted(raw: Server, stream: bool) -> None:
    eventually(lambda: raw.metric("num_requests_running") == 0)  # what ran before is told of for a while

    async def abort(engine: TokenEngine) -> Sampled:
        task = asyncio.create_task(whole(engine, stream=stream, **ENDLESS))
        await asyncio.to_thread(eventually, lambda: raw.metric("num_requests_running") == 1)
        await asyncio.to_thread(raw.abort_all)
        return await task

    with raw.slowed():
        sampled = with_client(raw, abort)
    assert sampled.reason == "abort"
    assert len(sampled.token_ids) < CONTEXT - len(PROMPT)


@pytest.mark.smoke
def test_a_paused_generation_stands_still_and_goes_on_under_the_version_that_is_told(raw: Server) -> None:
    undisturbed = sample(raw, max_tokens=LONG, **ENDLESS)

    async def pause(engine: TokenEngine) -> list[int]:
        asked = Sampling(temperature=1.0, seed=1, max_tokens=LONG, **ENDLESS)
        counts = []
        async with (
            client(raw) as other,
            aclosing(engine.generate(TokenRequest(PROMPT, asked, "r", stream=True))) as parts,
        ):
            with raw.slowed():
                sampled.add(await anext(parts))
                await engine.pause()
            reading = asyncio.create_task(read(parts))
            for _ in range(2):
                await asyncio.sleep(0.5)
                counts.append(len(sampled.token_ids))
            waiting = asyncio.create_task(whole(other, max_tokens=2))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            engine.policy_version = 12
            await engine.resume()
            await reading
            assert (await waiting).versions[-1][0] == 12
        return counts

    async def read(parts) -> None:
        async for part in parts:
            sampled.add(part)

    sampled = Sampled()
    try:
        before, after = with_client(raw, pause)
        assert 0 < before == after < LONG
        assert sampled.token_ids == undisturbed.token_ids
        (first, start, cut), (second, cut_again, end) = sampled.versions
        assert (first, start, second, end) == (REGISTERED, 0, 12, LONG)
        assert cut == cut_again >= before
    finally:
        raw.forget_version()


def test_a_paused_server_is_not_registered(raw: Server) -> None:
    with_client(raw, lambda engine: engine.pause())
    try:
        with pytest.raises(Exception, match="is paused"):
            asyncio.run(probe(raw.url))
    finally:
        with_client(raw, lambda engine: engine.resume())
