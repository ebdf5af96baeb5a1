"""An agent with the official SDK, the gateway, and a real vLLM server: what is recorded is what the model computed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from lightning_rl_adapters.call import Call
from tests.vllm import reference
from tests.vllm.asking import ENDLESS, LONG
from tests.vllm.gateway import QUESTION, Attempt, attempt, full_prompt
from tests.vllm.server import CONTEXT, END, MODEL, Server, eventually

TOOL = {
    "type": "function",
    "function": {
        "name": "run_sql",
        "description": "Run SQL.",
        "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]},
    },
}


def ask(at: Attempt, messages: list[Any], *, stream: bool = False, **more: Any) -> dict[str, Any]:
    """The assistant's message, as an agent would put it into its next request."""
    fields = {"model": MODEL, "messages": messages, "max_tokens": 24, **more}
    if not stream:
        return at.client.chat.completions.create(**fields).choices[0].message.model_dump(exclude_none=True)
    with at.client.chat.completions.stream(**fields) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})


def follow_up(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What an agent says to it: the results of its tool calls, or that it shall go on."""
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in answer.get("tool_calls", ())]
    return results or [{"role": "user", "content": "And now?"}]


def check_recorded(calls: list[Call]) -> None:
    """Tokens and logprobs are those of the model."""
    for call in calls:
        expected = reference.logprobs(full_prompt(calls, call), call.response_ids)
        assert call.logprobs == pytest.approx(expected, abs=reference.TOLERANCE)
        assert call.logprob_kind == ("sampled" if call.temperature == 1 else "raw")
        assert [(v.version, v.start, v.end) for v in call.versions] == [(3, 0, len(call.response_ids))]


@pytest.mark.smoke
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool_choice", ["auto", {"type": "function", "function": {"name": "run_sql"}}])
def test_a_conversation_with_tools_is_continued_token_by_token(
    raw: Server, tmp_path: Path, stream: bool, tool_choice: Any
) -> None:
    with attempt(tmp_path, raw) as at:
        messages: list[Any] = [QUESTION]
        for _ in range(3):
            answer = ask(at, messages, stream=stream, tools=[TOOL], tool_choice=tool_choice)
            messages += [answer, *follow_up(answer)]
        calls = at.finish()
        assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]
        assert all(call.response_ids for call in calls)
        assert max(len(call.prompt_ids) for call in calls[1:]) < len(calls[0].prompt_ids)
        check_recorded(calls)
        assert at.store.state()["models"][MODEL]["tokens_received"] == sum(call.sampled_tokens for call in calls)


def test_another_temperature_is_recorded_with_raw_logprobs(raw: Server, tmp_path: Path) -> None:
    with attempt(tmp_path, raw) as at:
        ask(at, [QUESTION], temperature=0.7)
        ask(at, [QUESTION], temperature=1.0)
        calls = at.finish()
        assert [call.temperature for call in calls] == [0.7, 1.0]
        check_recorded(calls)


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_are_several_samples(raw: Server, tmp_path: Path, stream: bool) -> None:
    with attempt(tmp_path, raw) as at:
        fields = {"model": MODEL, "messages": [QUESTION], "max_tokens": 20, "n": 4, "seed": 5, **ENDLESS}
        if stream:
            seen = {
                c.index for chunk in at.client.chat.completions.create(**fields, stream=True) for c in chunk.choices
            }
        else:
            seen = {choice.index for choice in at.client.chat.completions.create(**fields).choices}
        assert seen == {0, 1, 2, 3}
        calls = at.finish()
        assert len({tuple(call.response_ids) for call in calls}) == 4
        check_recorded(calls)


@pytest.mark.smoke
def test_a_stop_string_ends_the_answer_and_its_generation(raw: Server, tmp_path: Path) -> None:
    with attempt(tmp_path, raw) as at:
        free = ask(at, [QUESTION], temperature=0, max_tokens=60, **ENDLESS)["content"]
        stop = free[10:12]
        with raw.slowed():
            answer = at.client.chat.completions.create(
                model=MODEL, messages=[QUESTION], temperature=0, stop=[stop], **ENDLESS
            ).choices[0]
            assert answer.message.content == free[: free.index(stop)]
            assert answer.finish_reason == "stop"
            eventually(lambda: raw.metric("num_requests_running") == 0)
        assert [call.finish_reason for call in at.finish()] == ["length", "stop"]


def test_finish_reasons_reach_the_agent(raw: Server, tmp_path: Path) -> None:
    with attempt(tmp_path, raw) as at:
        create = at.client.chat.completions.create
        cut = create(model=MODEL, messages=[QUESTION], max_tokens=3, **ENDLESS)
        ended = create(model=MODEL, messages=[QUESTION], logit_bias={str(END): 100})
        assert (cut.choices[0].finish_reason, ended.choices[0].finish_reason) == ("length", "stop")
        assert [call.finish_reason for call in at.finish()] == ["length", "stop"]


def test_a_conversation_that_outgrows_the_context_is_a_clear_400(raw: Server, tmp_path: Path) -> None:
    with attempt(tmp_path, raw) as at:
        with pytest.raises(openai.BadRequestError, match=str(CONTEXT)) as told:
            ask(at, [{"role": "user", "content": "user " * 9000}])
        assert told.value.code == "context_length_exceeded"
        assert told.value.response.headers["x-should-retry"] == "false"


@pytest.mark.smoke
def test_an_answer_goes_on_after_a_pause_under_the_new_version(raw: Server, tmp_path: Path) -> None:
    with attempt(tmp_path, raw) as at, ThreadPoolExecutor(1) as agents:
        with raw.slowed():
            answer = agents.submit(ask, at, [QUESTION], max_tokens=LONG, **ENDLESS)
            eventually(lambda: raw.metric("num_requests_running") == 1)
            at.store.pause(MODEL, mode="keep")
            eventually(lambda: at.store.state()["models"][MODEL]["paused"])
        at.store.resume(MODEL, policy_version=9)
        answer.result(120)
        ask(at, [QUESTION])
        call, after = at.finish()
        (old, start, cut), (new, cut_again, end) = [(v.version, v.start, v.end) for v in call.versions]
        assert (old, start, new, end) == (3, 0, 9, LONG)
        assert 0 < cut == cut_again < LONG
        expected = reference.logprobs(full_prompt([call], call), call.response_ids)
        assert call.logprobs == pytest.approx(expected, abs=reference.TOLERANCE)
        assert after.versions[0].version == 9
    raw.forget_version()


def test_the_end_of_an_attempt_ends_its_generations(raw: Server, tmp_path: Path) -> None:
    with attempt(tmp_path, raw) as at:
        completed = raw.completed
        errors: list[openai.APIError] = []

        def call() -> None:
            try:
                ask(at, [QUESTION], max_tokens=None, **ENDLESS)
            except openai.APIError as error:
                errors.append(error)

        agent = threading.Thread(target=call)
        with raw.slowed():
            agent.start()
            eventually(lambda: raw.metric("num_requests_running") == 1)
            at.finish()
            eventually(lambda: raw.metric("num_requests_running") == 0)
        agent.join(20)
        assert raw.completed == completed
        assert len(errors) == 1
