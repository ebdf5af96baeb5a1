"""What the token wire says: an agent that sets no limit may answer up to the end of the context."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, TypeVar

import pytest

from lightning_rl_proxy.engines.base import (
    EngineFinish,
    EngineRefused,
    EngineTokens,
    EngineUnavailable,
    Load,
    TokenRequest,
)
from lightning_rl_proxy.engines.vllm import TokenEngine
from lightning_rl_proxy.errors import PromptTooLong
from lightning_rl_proxy.rendering.images import Image, Shown
from lightning_rl_proxy.sampling import Sampling

T = TypeVar("T")


class Wire(HTTPServer):
    """Keeps what it was asked, and answers `answer` with `status`."""

    asked: dict[str, Any]
    paths: list[str]
    told: dict[str, bytes]
    status = 200
    answer: Any = b'{"choices": [{"token_ids": [1, 2], "finish_reason": "stop"}]}'


class Handler(BaseHTTPRequestHandler):
    server: Wire

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        self.server.paths.append(self.path)
        body = self.server.answer if isinstance(self.server.answer, bytes) else json.dumps(self.server.answer).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        body = self.server.told.get(self.path)
        self.server.paths.append(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("content-length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def wire() -> Iterator[Wire]:
    with Wire(("127.0.0.1", 0), Handler) as server:
        server.paths, server.told = [], {}
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def with_client(
    wire: Wire, use: Callable[[TokenEngine], Coroutine[Any, Any, T]], logprobs: Any = "raw", **more: Any
) -> T:
    async def work() -> T:
        url = f"http://127.0.0.1:{wire.server_port}"
        engine = TokenEngine(
            model="m", kind="vllm", url=url, stop_token_ids=[9], policy_version=3, logprobs=logprobs, **more
        )
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(work())


async def generate(engine: TokenEngine, **sampling: Any) -> list[EngineTokens | EngineFinish]:
    return [part async for part in engine.generate(TokenRequest([5], Sampling(**sampling), "r"))]


def sample(wire: Wire, logprobs: Any = "raw", **sampling: Any) -> list[EngineTokens | EngineFinish]:
    return with_client(wire, lambda engine: generate(engine, **sampling), logprobs)


def test_no_limit_is_said_as_null_since_an_absent_one_may_mean_16_tokens(wire: Wire) -> None:
    sample(wire)
    assert wire.asked["sampling_params"]["max_tokens"] is None
    sample(wire, max_tokens=7)
    assert wire.asked["sampling_params"]["max_tokens"] == 7


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"choice": ["a"]}, {"structured_outputs": {"choice": ["a"]}}),
        ({"grammar": "g"}, {"structured_outputs": {"grammar": "g"}}),
        ({"json_schema": {}}, {"structured_outputs": {"json_object": True}}),
        ({"stop_token_ids": [3]}, {"stop_token_ids": [9, 3]}),
        ({"ignore_eos": True, "stop_token_ids": [3]}, {"ignore_eos": True, "stop_token_ids": [3]}),
        ({"min_tokens": 2, "bad_words": ["a"], "allowed_token_ids": [1]},
         {"min_tokens": 2, "bad_words": ["a"], "allowed_token_ids": [1]}),
    ],
)  # fmt: skip
def test_what_holds_an_answer_is_said_by_vllms_names(
    wire: Wire, sampling: dict[str, Any], said: dict[str, Any]
) -> None:
    sample(wire, **sampling)
    asked = wire.asked["sampling_params"]
    assert {name: asked[name] for name in said} == said
    assert not {"regex", "choice", "grammar", "json_schema"} & asked.keys()


def test_a_priority_is_the_requests(wire: Wire) -> None:
    sample(wire, priority=2)
    assert wire.asked["priority"] == 2
    assert "priority" not in wire.asked["sampling_params"]


def test_tokens_go_in_and_come_out(wire: Wire) -> None:
    tokens, finish = sample(wire)
    assert wire.asked["token_ids"] == [5]
    assert wire.asked["sampling_params"]["stop_token_ids"] == [9]
    assert tokens == EngineTokens([1, 2], None)
    assert isinstance(finish, EngineFinish)
    assert [(r.version, r.start, r.end) for r in finish.version_spans] == [(3, 0, 2)]


@pytest.mark.parametrize("answer", [{"error": {"message": "too long"}}, b"too long"])
def test_a_refusal_says_what_the_engine_said(wire: Wire, answer: Any) -> None:
    wire.status, wire.answer = 400, answer
    with pytest.raises(EngineRefused, match="the engine answered 400: too long"):
        sample(wire)


@pytest.mark.parametrize(("status", "told"), [(400, 400), (422, 400), (403, 502), (404, 502)])
def test_what_the_server_lacks_is_not_the_agents_fault(wire: Wire, status: int, told: int) -> None:
    wire.status, wire.answer = status, b"no"
    with pytest.raises(EngineRefused) as refused:
        sample(wire)
    assert refused.value.status == told


def test_an_error_within_a_stream_is_what_its_code_says(wire: Wire) -> None:
    async def stream(engine: TokenEngine) -> list[EngineTokens | EngineFinish]:
        return [part async for part in engine.generate(TokenRequest([5], Sampling(), "r", stream=True))]

    for code, expected in ((400, EngineRefused), (500, EngineUnavailable), ("x", EngineUnavailable)):
        error = {"error": {"message": "bad token", "code": code}}
        wire.answer = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(error).encode()
        with pytest.raises(expected, match="bad token"):
            with_client(wire, stream)
    said = "The decoder prompt (length 600) is longer than the maximum model length of 512."
    wire.answer = b'data: {"error": {"message": "%s", "code": 400}}\n\n' % said.encode()
    with pytest.raises(PromptTooLong, match="600"):
        with_client(wire, stream)


BROKEN: list[Any] = [
    b"<html>",
    b"",
    b'{"choices": [{"token_',
    {"choices": [{"token_ids": None, "finish_reason": "stop"}]},
    {"choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": None}]}}]},
    {"choices": [{"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1.0}]}}]},
    {"choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": -1.0}] * 2}}]},
]


@pytest.mark.parametrize("answer", [*BROKEN, {"choices": []}])
def test_what_is_no_answer_of_vllms_is_the_engines_failure(wire: Wire, answer: Any) -> None:
    wire.answer = answer
    with pytest.raises(EngineUnavailable, match=r"does not answer as vLLM does|answers to one|log probabilities for"):
        sample(wire)


@pytest.mark.parametrize("answer", [one for one in BROKEN if one != b""])
def test_so_is_an_event_of_a_stream(wire: Wire, answer: Any) -> None:
    async def stream(engine: TokenEngine) -> list[EngineTokens | EngineFinish]:
        return [part async for part in engine.generate(TokenRequest([5], Sampling(), "r", stream=True))]

    wire.answer = b"data: %b\n\n" % (answer if isinstance(answer, bytes) else json.dumps(answer).encode())
    with pytest.raises(EngineUnavailable):
        with_client(wire, stream)


def test_a_stream_that_has_ended_leaves_its_connection_to_the_next(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "protocol_version", "HTTP/1.1")
    event = json.dumps({"choices": [{"token_ids": [1], "finish_reason": "stop"}]}).encode()
    wire.answer = b"data: %b\n\ndata: [DONE]\n\n" % event
    places: list[Any] = []

    async def two(engine: TokenEngine) -> None:
        for _ in range(2):
            async for _ in engine.generate(TokenRequest([5], Sampling(), "r", stream=True)):
                pass
            places.append(len(engine._server._client._open))

    with_client(wire, two)
    assert places == [1, 1]


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_server_that_cannot_now_may_later(wire: Wire, status: int) -> None:
    wire.status, wire.answer = status, b"slow down"
    with pytest.raises(EngineUnavailable, match=f"answered {status}"):
        sample(wire)


def test_a_piece_that_tells_its_version_tells_that_of_those_behind_it_too(wire: Wire) -> None:
    """So tokens that were sampled before an update, and are read after it, have the version that sampled them."""
    told = [{"weight_versions": [{"version": "1", "start": 0, "end": 1}]}, {}, {}]
    told[2] = {"weight_versions": [{"version": "2", "start": 0, "end": 1}]}
    pieces = [{"choices": [{"token_ids": [n], **more}]} for n, more in enumerate(told)]
    wire.answer = b"".join(b"data: %b\n\n" % json.dumps(piece).encode() for piece in pieces)

    async def stream(engine: TokenEngine) -> list[EngineTokens | EngineFinish]:
        return [part async for part in engine.generate(TokenRequest([5], Sampling(), "r", stream=True))]

    assert with_client(wire, stream) == [EngineTokens([n], None, version) for n, version in enumerate([1, 1, 2])]
    ends = {"finish_reason": "stop", "weight_versions": [{"version": "1", "start": 0, "end": 2}]}
    ends["weight_versions"].append({"version": "2", "start": 2, "end": 3})
    wire.answer = b"data: %b\n\n" % json.dumps({"choices": [{"token_ids": [7], **ends}]}).encode()
    last, finish = with_client(wire, stream)  # whoever cuts at the last token does not hear of the end
    assert (last, [span.version for span in finish.version_spans]) == (EngineTokens([7], None, 2), [1, 2])


def test_the_end_of_text_that_vllm_does_not_name_is_the_last_token(wire: Wire) -> None:
    *_, finish = sample(wire)
    assert isinstance(finish, EngineFinish)
    assert finish.stop_match == 2
    wire.answer = {"choices": [{"token_ids": [1, 2], "finish_reason": "length"}]}
    *_, finish = sample(wire)
    assert isinstance(finish, EngineFinish)
    assert finish.stop_match is None


def test_the_mark_of_a_missing_logprob_is_no_logprob(wire: Wire) -> None:
    entries = [{"logprob": -0.5}, {"logprob": -9999.0}]
    choice = {"token_ids": [1, 2], "finish_reason": "stop", "logprobs": {"content": entries}}
    wire.answer = {"choices": [choice]}
    assert sample(wire)[0] == EngineTokens([1, 2], None)
    entries[1]["logprob"] = -1.5
    assert sample(wire)[0] == EngineTokens([1, 2], [-0.5, -1.5])


@pytest.mark.parametrize(
    ("logprobs", "sampling", "asked"),
    [
        ("raw", {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1}, 0),
        ("processed", {"temperature": 0.7, "min_p": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}, 0),
        ("raw", {"temperature": 1.0, "json_schema": {}}, None),
        ("raw", {"temperature": 1.0, "regex": "a"}, None),
        ("raw", {"temperature": 1.0, "bad_words": ["a"], "min_tokens": 2}, 0),
        ("processed", {"temperature": 1.0, "allowed_token_ids": [1]}, None),
        ("processed", {"temperature": 0.7, "top_p": 1.0, "top_k": -1}, 0),
        ("processed", {"temperature": 0.0, "top_p": 0.9, "top_k": 5}, 0),
        ("processed", {"temperature": 1.0, "top_p": 0.9}, None),
        ("processed", {"temperature": 1.0, "top_k": 5}, None),
        ("processed", {"temperature": 1.0, "min_p": 0.1}, None),
        ("processed", {"temperature": 0.0, "presence_penalty": 1.0}, None),
        ("processed", {"temperature": 1.0, "json_schema": {}}, None),
    ],
)
def test_logprobs_of_no_known_kind_are_not_asked_for(
    wire: Wire, logprobs: str, sampling: dict[str, Any], asked: int | None
) -> None:
    sample(wire, logprobs, **sampling)
    assert wire.asked["sampling_params"]["logprobs"] == asked


@pytest.mark.parametrize(
    ("logprobs", "kinds"), [("raw", ["greedy", "raw", "sampled"]), ("processed", ["greedy", "sampled", "sampled"])]
)
def test_the_kind_depends_on_the_server_and_the_temperature(wire: Wire, logprobs: str, kinds: list[str]) -> None:
    async def ask(engine: TokenEngine) -> list[str]:
        return [engine.logprob_kind(Sampling(temperature=temperature)) for temperature in (0.0, 0.7, 1.0)]

    assert with_client(wire, ask, logprobs) == kinds


def test_a_new_version_is_told_once_before_anything_is_sampled_under_it(wire: Wire) -> None:
    async def use(engine: TokenEngine) -> None:
        await generate(engine)
        engine.policy_version = 4
        await generate(engine)
        await generate(engine)
        engine.policy_version = 5
        await engine.resume()

    with_client(wire, use)
    sampled, told = "/inference/v1/generate", "/update_weight_version"
    assert wire.paths == [sampled, told, sampled, sampled, told, "/resume"]


def test_a_version_that_was_not_taken_is_told_again(wire: Wire) -> None:
    async def use(engine: TokenEngine) -> None:
        engine.policy_version = 4
        wire.status = 500
        with pytest.raises(EngineUnavailable):
            await generate(engine)
        wire.status = 200
        await generate(engine)

    with_client(wire, use)
    assert wire.paths == ["/update_weight_version", "/update_weight_version", "/inference/v1/generate"]


def test_tokens_without_a_label_are_of_the_version_at_registration(wire: Wire) -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    wire.answer = {"choices": [{"token_ids": [1, 2], "finish_reason": "stop", "weight_versions": spans}]}

    async def use(engine: TokenEngine) -> EngineTokens | EngineFinish:
        engine.policy_version = 4
        return (await generate(engine))[-1]

    finish = with_client(wire, use)
    assert isinstance(finish, EngineFinish)
    assert [(v.version, v.start, v.end) for v in finish.version_spans] == [(3, 0, 1), (4, 1, 2)]


def test_a_version_of_an_adapter_has_a_name_of_its_own_and_nobody_is_frozen(wire: Wire) -> None:
    spans = [{"version": "default", "start": 0, "end": 2}]
    wire.answer = {"choices": [{"token_ids": [1, 2], "finish_reason": "stop", "weight_versions": spans}]}

    async def use(engine: TokenEngine) -> list[EngineTokens | EngineFinish]:
        await engine.pause()
        engine.policy_version = 4
        await engine.resume()
        parts = []
        async for part in engine.generate(TokenRequest([5], Sampling(), "r")):
            engine.policy_version = 5  # the weights are new while it answers
            parts.append(part)
        return parts

    tokens, finish = with_client(wire, use, adapter=True)
    assert wire.paths == ["/inference/v1/generate"]
    assert wire.asked["model"] == "m@4"
    assert isinstance(tokens, EngineTokens)
    assert tokens.version == 4
    assert isinstance(finish, EngineFinish)
    assert [(v.version, v.start, v.end) for v in finish.version_spans] == [(4, 0, 2)]


@pytest.mark.parametrize(
    ("names", "version"),
    [(["base", "m@4", "m@11", "other@12", "m@x"], 11), (["base", "m"], -1)],
)
def test_the_newest_adapter_of_a_server_is_its_version(wire: Wire, names: list[str], version: int) -> None:
    listed = {"data": [{"id": name} for name in names]}
    wire.told = {"/health": b"", "/v1/models": json.dumps(listed).encode()}
    assert with_client(wire, lambda engine: engine.check(), adapter=True) == version


METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 8.0
vllm:num_requests_running{engine="1",model_name="m"} 7.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0
"""
SERVER_INFO = {"scheduler_config": {"max_num_seqs": 8, "more": 1}, "parallel_config": {"data_parallel_size": 2}}


def test_the_queue_is_that_of_all_ranks_and_the_configuration_is_asked_once(wire: Wire) -> None:
    wire.told["/metrics"] = METRICS
    wire.told["/server_info?config_format=json"] = json.dumps({"vllm_config": SERVER_INFO}).encode()

    async def twice(engine: TokenEngine) -> list[Load | None]:
        return [await engine.load(), await engine.load()]

    assert with_client(wire, twice) == [Load(5, 16)] * 2
    assert wire.paths == ["/metrics", "/server_info?config_format=json", "/metrics"]


def test_a_server_whose_configuration_cannot_be_read_has_a_queue_without_a_capacity(wire: Wire) -> None:
    wire.told["/metrics"] = METRICS

    async def twice(engine: TokenEngine) -> list[Load | None]:
        return [await engine.load(), await engine.load()]

    assert with_client(wire, twice) == [Load(5, None)] * 2
    assert len(wire.paths) == 3  # it is not asked again at once


@pytest.mark.parametrize("metrics", [None, b"", b"python_info 1.0"])
def test_a_server_without_statistics_does_not_say_how_busy_it_is(wire: Wire, metrics: bytes | None) -> None:
    if metrics is not None:
        wire.told["/metrics"] = metrics
    assert with_client(wire, lambda engine: engine.load()) is None


CAT = Image("c" * 64, "image/png", b"cat", (16, 16))
DOG = Image("d" * 64, "image/jpeg", b"dog", (16, 16))
SHOWN = [Shown(1, 3, CAT), Shown(5, 2, DOG)]
PROMPT = [5, 8, 8, 8, 6, 8, 8, 7]  # 8 is the placeholder


def shown(wire: Wire, prompt: list[int], **more: Any) -> list[EngineTokens | EngineFinish]:
    async def use(engine: TokenEngine) -> list[EngineTokens | EngineFinish]:
        parts = engine.generate(TokenRequest(prompt, Sampling(), "r", media=SHOWN, **more))
        return [part async for part in parts]

    return with_client(wire, use)


def test_images_are_content_parts_each_for_one_placeholder(wire: Wire) -> None:
    """vLLM puts the others in by itself, so the prompt that it says it read is held against ours."""
    wire.answer = {"choices": [{"token_ids": [1, 2], "finish_reason": "stop"}], "prompt_token_ids": PROMPT}
    assert shown(wire, PROMPT)[0] == EngineTokens([1, 2], None)
    assert wire.asked["token_ids"] == [5, 8, 6, 8, 7]
    assert wire.asked["return_token_ids"] is True
    assert wire.asked["content_parts"] == [
        {"type": "image_url", "url": "data:image/png;base64,Y2F0", "uuid": "c" * 64},
        {"type": "image_url", "url": "data:image/jpeg;base64,ZG9n", "uuid": "d" * 64},
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("read", [None, [5, 8, 8, 6, 8, 8, 7]])
def test_a_server_that_made_another_prompt_of_the_images_is_refused(
    wire: Wire, read: list[int] | None, stream: bool
) -> None:
    answer = {"choices": [{"token_ids": [1], "finish_reason": "stop"}], "prompt_token_ids": read}
    wire.answer = b"data: " + json.dumps(answer).encode() + b"\n\n" if stream else answer
    with pytest.raises(EngineRefused, match=r"preprocessor_config\.json") as refused:
        shown(wire, PROMPT, stream=stream)
    assert refused.value.status == 502


def test_a_stream_tells_its_prompt_first(wire: Wire) -> None:
    events: list[dict[str, Any]] = [
        {"choices": [{"token_ids": [1]}], "prompt_token_ids": PROMPT},
        {"choices": [{"token_ids": [2], "finish_reason": "stop"}]},
    ]
    wire.answer = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    assert [part for part in shown(wire, PROMPT, stream=True) if isinstance(part, EngineTokens)] == [
        EngineTokens([1], None),
        EngineTokens([2], None),
    ]


def test_a_sampled_placeholder_is_not_sent_where_it_would_be_read_as_an_image(wire: Wire) -> None:
    with pytest.raises(EngineRefused, match="sampled an image placeholder"):
        shown(wire, [5, 8, 8, 8, 8, 8, 8, 7])  # the one at 4 is no image's
    assert wire.paths[-1:] != ["/inference/v1/generate"]


def test_a_placeholder_that_is_sampled_behind_all_images_is_sent_as_a_token(wire: Wire) -> None:
    prompt = [*PROMPT, 8, 3]
    wire.answer = {"choices": [{"token_ids": [1], "finish_reason": "stop"}], "prompt_token_ids": prompt}
    assert shown(wire, prompt)[0] == EngineTokens([1], None)
    assert wire.asked["token_ids"] == [5, 8, 6, 8, 7, 8, 3]
