"""The client of SGLang's native wire against a stand-in server: exact tokens, whatever the server's flags are."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl_proxy.engines.base import (
    EngineFinish,
    EngineRefused,
    EngineTokens,
    EngineUnavailable,
    Load,
    TokenRequest,
)
from lightning_rl_proxy.engines.http import EngineConnection
from lightning_rl_proxy.engines.sglang import SGLangEngine
from lightning_rl_proxy.engines.sglang_probe import Abilities
from lightning_rl_proxy.errors import PromptTooLong
from lightning_rl_proxy.sampling import Sampling
from tests.proxy.engines.sglang_stand_in import STOP, StandIn, log_softmax, logits
from tests.proxy.engines.vllm_stand_in import serving
from tests.random_examples import examples

T = TypeVar("T")
PROMPT = [3, 1, 4]
ABLE = Abilities(room=64)


def with_client(server: StandIn, use: Callable[[SGLangEngine], Coroutine[Any, Any, T]], able: Abilities = ABLE) -> T:
    async def work(url: str) -> T:
        engine = SGLangEngine(model="m", url=url + "/", stop_token_ids=[STOP], policy_version=3, able=able)
        try:
            return await use(engine)
        finally:
            await engine.close()

    with serving(server.app) as url:
        return asyncio.run(work(url))


async def generate(
    engine: SGLangEngine, *, prompt: list[int] = PROMPT, stream: bool = False, **sampling: Any
) -> tuple[list[EngineTokens], EngineFinish]:
    given = Sampling(**({"temperature": 1.0, "seed": 7} | sampling))
    parts = engine.generate(TokenRequest(prompt, given, "r", stream=stream))
    *tokens, finish = [part async for part in parts]
    assert isinstance(finish, EngineFinish)
    return [part for part in tokens if isinstance(part, EngineTokens)], finish


def sample(
    server: StandIn, able: Abilities = ABLE, **asked: Any
) -> tuple[list[int], list[float] | None, EngineFinish, list[EngineTokens]]:
    """The tokens and logprobs of one answer, its end, and the parts it came in."""
    parts, finish = with_client(server, lambda engine: generate(engine, **asked), able)
    ids = [token for part in parts for token in part.token_ids]
    logprobs = [logprob for part in parts for logprob in part.logprobs or []]
    return ids, logprobs if all(part.logprobs is not None for part in parts) else None, finish, parts


def told(ids: list[int], temperature: float) -> list[float]:
    """The model's logprobs of an answer."""
    contexts = ([*PROMPT, *ids[:i]] for i in range(len(ids)))
    heated = ({token: value / temperature for token, value in logits(context).items()} for context in contexts)
    return [log_softmax(values)[token] for values, token in zip(heated, ids, strict=True)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_tokens_and_logprobs_are_the_models_own(temperature: float) -> None:
    ids, logprobs, finish, _ = sample(StandIn(), temperature=temperature)
    assert ids[-1] == STOP
    assert logprobs == pytest.approx(told(ids, temperature), abs=1e-12)
    assert finish == EngineFinish("stop", STOP, finish.version_spans)


@settings(max_examples=examples(30), deadline=None)
@given(
    incremental=st.booleans(),
    interval=st.integers(1, 5),
    pieces=st.none() | st.integers(1, 40),
    tokenizer=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    limit=st.none() | st.integers(1, 30),
)
def test_a_stream_brings_the_tokens_of_the_whole_answer(
    incremental: bool, interval: int, pieces: int | None, tokenizer: bool, seed: int, limit: int | None
) -> None:
    flags: dict[str, Any] = {"interval": interval, "pieces": pieces, "tokenizer": tokenizer}
    whole = sample(StandIn(**flags), seed=seed, max_tokens=limit, top_k=4)
    streamed = sample(StandIn(incremental=incremental, **flags), seed=seed, max_tokens=limit, top_k=4, stream=True)
    assert streamed[:3] == whole[:3]
    assert len(streamed[3]) == -(-len(whole[0]) // interval)
    assert len(whole[3]) == 1


def test_what_is_asked_for_is_said_by_the_servers_names() -> None:
    server = StandIn()

    async def ask(engine: SGLangEngine) -> None:
        await generate(engine, top_k=None, max_tokens=5, priority=2)
        schema = {"type": "array"}
        await generate(engine, temperature=0.0, top_p=0.9, min_p=0.1, repetition_penalty=1.2, json_schema=schema)
        await generate(engine, logit_bias={"4": 1.5}, json_schema={}, top_k=0)

    with_client(server, ask)
    first, second, third = [request.body for request in server.requests]
    assert first["input_ids"] == PROMPT
    assert (first["priority"], "priority" in second) == (-2, False)  # the larger number goes first there
    neutral = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }  # fmt: skip
    assert first["sampling_params"] == neutral | {"max_new_tokens": 5, "stop_token_ids": [STOP], "sampling_seed": 7}
    assert second["sampling_params"] == neutral | {
        "temperature": 0.0, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "json_schema": '{"type":"array"}',
        "max_new_tokens": None, "stop_token_ids": [STOP], "sampling_seed": 7,
    }  # fmt: skip
    assert third["sampling_params"]["logit_bias"] == {"4": 1.5}
    assert third["sampling_params"]["json_schema"] == '{"type":"object"}'
    assert third["sampling_params"]["top_k"] == -1


def test_what_holds_an_answer_is_said_by_the_servers_names_too() -> None:
    server = StandIn()

    async def ask(engine: SGLangEngine) -> None:
        await generate(engine, regex="a+", min_tokens=2, stop_token_ids=[3])
        await generate(engine, choice=["a.", "b"], max_tokens=4, ignore_eos=True)
        await generate(engine, grammar="root ::= x")

    with_client(server, ask)
    first, second, third = [request.body["sampling_params"] for request in server.requests]
    assert (first["regex"], first["min_new_tokens"], first["stop_token_ids"]) == ("a+", 2, [STOP, 3])
    assert (second["regex"], second["ignore_eos"], second["stop_token_ids"]) == (r"(a\.|b)", True, [])
    assert third["ebnf"] == "root ::= x"


def test_seeds_repeat_and_differ() -> None:
    one, again, other = [sample(StandIn(), seed=seed, max_tokens=20)[0] for seed in (1, 1, 2)]
    assert one == again != other


@pytest.mark.parametrize("stream", [True, False])
def test_a_generation_that_is_cut_says_so(stream: bool) -> None:
    server = StandIn(endless=True)
    ids, _, finish, _ = sample(server, max_tokens=4, stream=stream)
    assert (len(ids), finish.reason, finish.stop_match) == (4, "length", None)
    ids, _, finish, _ = sample(server, stream=stream)
    assert (len(ids), finish.reason) == (64 - len(PROMPT) - 1, "length")


@pytest.mark.parametrize("stream", [True, False])
def test_more_tokens_than_fit_are_asked_for_as_many_as_do(stream: bool) -> None:
    ids, _, finish, _ = sample(StandIn(endless=True), max_tokens=32000, stream=stream)
    assert (len(ids), finish.reason) == (60, "length")
    with pytest.raises(EngineRefused, match="maximum context length of 64"):
        sample(StandIn(), Abilities(room=None), max_tokens=32000, stream=stream)


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_that_does_not_fit_is_told_with_both_lengths(stream: bool) -> None:
    with pytest.raises(PromptTooLong) as refused:
        sample(StandIn(), prompt=[1] * 70, max_tokens=5, stream=stream)
    assert (refused.value.prompt_tokens, refused.value.limit) == (70, 64)


def test_a_prompt_that_its_scheduler_refuses_is_told_alike() -> None:
    server = StandIn()
    server.status = 400
    server.fails = {
        "error": {"message": "Input length (70 tokens) exceeds the maximum allowed length (58 tokens). Use a shorter"}
    }
    with pytest.raises(PromptTooLong, match="58"):
        sample(server)


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_wrong_with_a_request_is_told_in_the_servers_words(stream: bool) -> None:
    with pytest.raises(EngineRefused, match=r"answered 400: .*top_p must be in \(0, 1\], got 0") as refused:
        sample(StandIn(), top_p=0.0, stream=stream)
    assert refused.value.status == 400


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "body", "expected", "words"),
    [
        (500, {"error": {"message": "boom"}}, EngineUnavailable, "boom"),
        (503, {"object": "error", "message": "The request queue is full.", "code": 503}, EngineUnavailable, "is full"),
        (400, {"error": "sampling_params: unknown field `x`"}, EngineRefused, "unknown field `x`"),
        (400, {"object": "error", "message": "not a list", "code": 400}, EngineRefused, "400: not a list$"),
        (401, {"error": "Unauthorized"}, EngineRefused, "401: Unauthorized"),
    ],
)
def test_errors_of_the_server_are_the_gateways(
    status: int, body: dict[str, Any], expected: type[Exception], words: str, stream: bool
) -> None:
    server = StandIn()
    server.status, server.fails = status, body
    with pytest.raises(expected, match=words):
        sample(server, stream=stream)


@pytest.mark.parametrize("answer", [{"output_ids": "text"}, {"output_ids": [1]}])
def test_what_is_no_answer_of_sglang_is_told_so(answer: dict[str, Any]) -> None:
    server = StandIn()
    server.fails = answer
    with pytest.raises(EngineUnavailable, match=r"does not answer as SGLang|without meta_info"):
        sample(server)


def finished(reason: dict[str, Any], **meta: Any) -> StandIn:
    """A server whose answers all end like this, after two tokens."""
    server = StandIn()
    server.fails = {"output_ids": [1, 2], "meta_info": {"completion_tokens": 2, "finish_reason": reason} | meta}
    return server


def test_the_end_that_has_no_name_is_the_last_token() -> None:
    assert sample(finished({"type": "stop", "matched": None}))[2].stop_match == 2
    assert sample(finished({"type": "stop", "matched": 5}))[2].stop_match == 5


def test_an_abort_with_a_status_is_what_the_status_says() -> None:
    with pytest.raises(EngineUnavailable, match="memory"):
        sample(finished({"type": "abort", "status_code": 503, "message": "out of memory", "err_type": None}))
    with pytest.raises(EngineRefused, match="no grammar"):
        sample(finished({"type": "abort", "status_code": 400, "message": "no grammar", "err_type": None}))
    assert sample(finished({"type": "abort", "status_code": None, "message": "Aborted"}))[2].reason == "abort"


def test_tokens_that_do_not_add_up_are_not_passed_on() -> None:
    with pytest.raises(EngineUnavailable, match=r"sampled 3 tokens of request r-.*, and gave 2 where 3 were new"):
        sample(finished({"type": "length"}, completion_tokens=3))


@pytest.mark.parametrize(
    "told", [None, [], [[-0.5, 1, None]], [[-0.5, 1, None], [-0.5, 3, None]], [[-0.5, 1, None], [None, 2, None]]]
)
def test_logprobs_of_other_tokens_or_of_none_are_no_logprobs(told: list[Any] | None) -> None:
    assert sample(finished({"type": "length"}, output_token_logprobs=told))[3] == [EngineTokens([1, 2], None)]
    good = [[-0.5, 1, None], [-3.5, 2, None]]
    assert sample(finished({"type": "length"}, output_token_logprobs=good))[3] == [EngineTokens([1, 2], [-0.5, -3.5])]


@pytest.mark.parametrize("stream", [True, False])
def test_a_token_that_stands_for_logits_that_were_none_is_not_passed_on(stream: bool) -> None:
    server = StandIn(endless=True)
    server.nan_after = 3
    got: list[EngineTokens | EngineFinish] = []

    async def collect(engine: SGLangEngine) -> None:
        async for part in engine.generate(TokenRequest(PROMPT, Sampling(seed=1), "r", stream=stream)):
            got.append(part)

    with pytest.raises(EngineUnavailable, match="no token of the vocabulary: NaN happened"):
        with_client(server, collect)
    assert [token for part in got if isinstance(part, EngineTokens) for token in part.token_ids] == (
        server.requests[0].ids[:3] if stream else []
    )


@pytest.mark.parametrize(
    ("sampling", "has_logprobs"),
    [
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.1}, True),
        ({"temperature": 0.0, "top_p": 0.9}, True),
        ({"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}, True),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": {"3": 1.0}}, False),
        ({"json_schema": {}}, False),
        ({"regex": "a"}, False),
        ({"min_tokens": 2}, False),
    ],
)
def test_logprobs_of_changed_logits_are_not_asked_for(sampling: dict[str, Any], has_logprobs: bool) -> None:
    assert (sample(StandIn(), **sampling)[1] is not None) == has_logprobs


@pytest.mark.parametrize(
    ("tempered", "kinds"), [(False, ["greedy", "raw", "sampled"]), (True, ["greedy", "sampled", "sampled"])]
)
def test_the_kind_depends_on_the_server_and_the_temperature(tempered: bool, kinds: list[str]) -> None:
    engine = SGLangEngine(
        model="m", url="http://h:1", stop_token_ids=[], policy_version=0, able=Abilities(tempered=tempered)
    )
    assert [engine.logprob_kind(Sampling(temperature=temperature)) for temperature in (0.0, 0.7, 1.0)] == kinds


def test_only_a_server_with_a_tokenizer_keeps_to_a_schema() -> None:
    def abilities(schemas: bool) -> frozenset[str]:
        able = Abilities(schemas=schemas)
        return SGLangEngine(model="m", url="http://h:1", stop_token_ids=[], policy_version=0, able=able).abilities

    assert abilities(True) - abilities(False) == {"json_schema", "regex", "choice", "grammar"}
    assert "logit_bias" in abilities(False)


def test_stop_tokens_that_it_would_pass_over_are_refused() -> None:
    with pytest.raises(EngineRefused, match="ignore_eos is true: leave out stop_token_ids"):
        sample(StandIn(), ignore_eos=True, stop_token_ids=[5], max_tokens=8)


def test_greedy_is_the_likeliest_token_and_has_the_logprobs_of_temperature_1() -> None:
    ids, logprobs, _, _ = sample(StandIn(), temperature=0.0, max_tokens=8)
    for i, token in enumerate(ids):
        values = logits([*PROMPT, *ids[:i]])
        assert token == max(values, key=lambda token: values[token])
    assert logprobs == pytest.approx(told(ids, 1.0), abs=1e-12)


async def leave(engine: SGLangEngine, request_id: str, parts: int) -> None:
    """Take some parts of a stream and go."""
    async with aclosing(engine.generate(TokenRequest(PROMPT, Sampling(seed=1), request_id, stream=True))) as stream:
        for _ in range(parts):
            await anext(stream)


def test_leaving_aborts_this_request_and_none_whose_name_begins_like_it() -> None:
    server = StandIn(endless=True, context=10**9)

    async def go(engine: SGLangEngine) -> None:
        async with aclosing(engine.generate(TokenRequest(PROMPT, Sampling(), "call-10", stream=True))) as other:
            await anext(other)
            await leave(engine, "call-1", 2)
            await anext(other)
            first, second = server.requests
            assert (first.aborted, second.aborted) == (False, True)
        assert first.aborted

    with_client(server, go)
    assert [path for path, _ in server.orders] == ["/abort_request"] * 2


def test_a_cancelled_whole_answer_is_aborted() -> None:
    server = StandIn(endless=True, context=10**9)

    async def go(engine: SGLangEngine) -> None:
        task = asyncio.create_task(generate(engine))
        while not (server.requests and server.requests[0].ids):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.requests[0].aborted

    with_client(server, go)


def test_what_ended_by_itself_is_not_aborted() -> None:
    server = StandIn()

    async def go(engine: SGLangEngine) -> None:
        async with aclosing(engine.generate(TokenRequest(PROMPT, Sampling(seed=1), "r", stream=True))) as parts:
            async for part in parts:
                if isinstance(part, EngineFinish):
                    break

    with_client(server, go)
    assert server.orders == []


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_by_the_server_is_told_and_repeats_no_token(incremental: bool, stream: bool) -> None:
    server = StandIn(endless=True, context=10**9, incremental=incremental)

    async def go(engine: SGLangEngine) -> tuple[list[EngineTokens], EngineFinish]:
        task = asyncio.create_task(generate(engine, stream=stream))
        while not (server.requests and len(server.requests[0].ids) > 5):
            await asyncio.sleep(0.001)
        server.requests[0].aborted = True
        return await task

    parts, finish = with_client(server, go)
    assert finish.reason == "abort"
    assert [token for part in parts for token in part.token_ids] == server.requests[0].ids
    assert all(part.logprobs is not None and len(part.logprobs) == len(part.token_ids) for part in parts)


def test_a_connection_that_breaks_is_an_error_to_be_tried_again() -> None:
    server = StandIn(endless=True)
    server.breaks_after = 3
    with pytest.raises(EngineUnavailable, match=r"engine http://127\.0\.0\.1"):
        sample(server, stream=True)


def test_a_server_that_is_not_there_is_told_with_its_address() -> None:
    async def go() -> None:
        engine = SGLangEngine(
            model="m", url="http://127.0.0.1:1", stop_token_ids=[], policy_version=0, able=Abilities()
        )
        try:
            for ask in (engine.check(), generate(engine), engine.pause()):
                with pytest.raises(EngineUnavailable, match=r"http://127\.0\.0\.1:1"):
                    await ask
        finally:
            await engine.close()

    asyncio.run(go())


@pytest.mark.parametrize("incremental", [True, False])
def test_a_pause_in_the_middle_changes_no_token_and_tells_who_sampled_which(incremental: bool) -> None:
    server = StandIn(endless=True, incremental=incremental, context=400)
    server.waits_at = 200

    async def go(engine: SGLangEngine) -> tuple[list[int], int, EngineFinish]:
        parts = engine.generate(TokenRequest(PROMPT, Sampling(seed=5), "r", stream=True))
        first = await anext(parts)
        await engine.pause()
        at = len(server.requests[0].ids)
        await engine.check()
        await asyncio.sleep(0.02)
        assert len(server.requests[0].ids) == at
        engine.policy_version = 4
        await engine.resume()
        *rest, finish = [part async for part in parts]
        assert isinstance(first, EngineTokens)
        assert isinstance(finish, EngineFinish)
        return [t for part in [first, *rest] if isinstance(part, EngineTokens) for t in part.token_ids], at, finish

    ids, at, finish = with_client(server, go)
    assert ids == sample(StandIn(endless=True, context=400), seed=5)[0]
    assert 0 < at < len(ids)
    assert [(v.version, v.start, v.end) for v in finish.version_spans] == [(3, 0, at), (4, at, len(ids))]
    assert server.orders == [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weight_version", {"new_version": "4", "abort_all_requests": False}),
        ("/continue_generation", {}),
    ]


def test_a_new_version_is_told_once_before_anything_is_sampled_under_it() -> None:
    server = StandIn()

    async def go(engine: SGLangEngine) -> list[EngineFinish]:
        ends = [(await generate(engine))[1]]
        engine.policy_version = 4
        return [*ends, (await generate(engine))[1], (await generate(engine))[1]]

    ends = with_client(server, go)
    assert [[v.version for v in finish.version_spans] for finish in ends] == [[3], [4], [4]]
    assert [path for path, _ in server.orders] == ["/update_weight_version"]


def test_a_version_that_was_not_taken_is_told_again() -> None:
    server = StandIn()

    async def go(engine: SGLangEngine) -> EngineFinish:
        engine.policy_version = 4
        there, engine._server = engine._server, EngineConnection(f"{engine.url}/elsewhere")
        with pytest.raises(EngineRefused):
            await generate(engine)
        engine._server = there
        return (await generate(engine))[1]

    assert [v.version for v in with_client(server, go).version_spans] == [4]


def test_a_server_says_which_weights_it_has_and_when_it_is_not_ready() -> None:
    server = StandIn()

    async def go(engine: SGLangEngine) -> list[int]:
        found = [await engine.check()]
        server.weight_version = "12"
        found.append(await engine.check())
        server.running.clear()
        with pytest.raises(EngineUnavailable, match="/ready answered 503"):
            await engine.check()
        return found

    assert with_client(server, go) == [3, 12]


def test_a_server_that_was_started_anew_is_told_its_version_again() -> None:
    server = StandIn()

    async def go(engine: SGLangEngine) -> None:
        engine.policy_version = 4
        await generate(engine)
        server.weight_version = "default"
        assert await engine.check() == 3
        await engine.resume()
        assert await engine.check() == 4

    with_client(server, go)
    orders = ["/update_weight_version", "/update_weight_version", "/continue_generation"]
    assert [path for path, _ in server.orders] == orders


def test_an_order_that_a_server_does_not_know_names_the_version_that_does() -> None:
    async def go(engine: SGLangEngine) -> None:
        engine._server = EngineConnection(f"{engine.url}/elsewhere")
        with pytest.raises(EngineRefused, match=r"has no /pause_generation; SGLang 0\.5\.23 is the oldest") as refused:
            await engine.pause()
        assert refused.value.status == 502

    with_client(StandIn(), go)


def test_the_queue_is_that_of_all_ranks() -> None:
    server = StandIn()
    server.ranks = [
        {"dp_rank": rank, "num_running_reqs": 8, "num_waiting_reqs": waiting, "max_running_requests": 8}
        for rank, waiting in enumerate((0, 3))
    ]
    assert with_client(server, SGLangEngine.load) == Load(3, 16)


def test_a_server_that_has_not_published_its_queue_says_nothing_of_it() -> None:
    server = StandIn()
    server.ranks = [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "max_running_requests": 0}]
    assert with_client(server, SGLangEngine.load) is None
    server.status = 404
    assert with_client(server, SGLangEngine.load) is None
