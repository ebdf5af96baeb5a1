"""What is asked of an SGLang server when it is registered, and how one that cannot be used is refused."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable
from lightning_rl_proxy.engines.sglang_probe import Abilities, probe_sglang
from tests.proxy.engines.sglang_stand_in import StandIn
from tests.proxy.engines.vllm_stand_in import StandIn as VllmStandIn
from tests.proxy.engines.vllm_stand_in import serving


def found(server: StandIn) -> Abilities:
    with serving(server.app) as url:
        return asyncio.run(probe_sglang(url + "/"))


def refusal(app: web.Application, expected: type[Exception]) -> str:
    with serving(app) as url, pytest.raises(expected) as refused:
        asyncio.run(probe_sglang(url))
    assert url in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("flags", "abilities", "words"),
    [
        ({"incremental": True}, Abilities(room=64), []),
        ({"incremental": True, "raw": True}, Abilities(room=64, tempered=False), ["SGLANG_RETURN_ORIGINAL_LOGPROB"]),
        ({"incremental": True, "tokenizer": False}, Abilities(room=64, schemas=False), ["--skip-tokenizer-init"]),
        (
            {"seeded": False, "version": "0.6rc1"},
            Abilities(room=64, seeded=False, incremental=False),
            ["--enable-deterministic-inference", "--incremental-streaming-output"],
        ),
    ],
)
def test_what_flags_decide_is_found_and_what_they_cost_is_named(
    flags: dict[str, Any], abilities: Abilities, words: list[str]
) -> None:
    server = StandIn(**flags)
    able = found(server)
    assert able == abilities
    assert len(able.lacks) == len(words)
    assert all(word in said for word, said in zip(words, able.lacks, strict=True))
    assert len(server.requests) == 2


def test_what_drafts_are_kept_room_for_is_no_room() -> None:
    class Drafting(StandIn):
        async def server_info(self, request: web.Request) -> web.Response:
            told = {"version": "0.5.24", "speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 3}
            return web.json_response(told | {"speculative_eagle_topk": 2, "speculative_num_steps": 4})

    assert found(Drafting()).room == 64 - 8


def test_a_server_that_refuses_to_tell_other_tokens_is_taken_as_raw() -> None:
    class Silent(StandIn):
        async def generate(self, request: web.Request) -> web.StreamResponse:
            return web.json_response({"error": {"message": "no logprobs"}}, status=400)

    assert not found(Silent()).tempered


@pytest.mark.parametrize("version", ["0.5.22", "0.5.9.post1", "0.0.0.dev0", "unknown"])
def test_an_older_server_is_refused_by_its_version(version: str) -> None:
    assert f"is SGLang {version}; SGLang 0.5.23" in refusal(StandIn(version=version).app, EngineRefused)


@pytest.mark.parametrize("app", [web.Application(), VllmStandIn().app])
def test_something_else_than_sglang_is_refused(app: web.Application) -> None:
    assert "this is no SGLang server" in refusal(app, EngineRefused)


def test_a_paused_server_is_asked_for_nothing_that_it_would_not_answer() -> None:
    server = StandIn()
    server.running.clear()
    assert "/continue_generation" in refusal(server.app, EngineUnavailable)
    assert server.requests == []


@pytest.mark.parametrize(
    ("status", "expected", "words"), [(500, EngineUnavailable, "500"), (401, EngineRefused, "API key")]
)
def test_a_server_that_fails_or_wants_a_key_is_told_so(status: int, expected: type[Exception], words: str) -> None:
    server = StandIn()
    server.status = status
    assert words in refusal(server.app, expected)
