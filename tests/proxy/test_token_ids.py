"""Token ids for those who ask, in vLLM's shape: what a client is told is what is recorded, whole and streamed."""

from typing import Any

import openai
import pytest

from tests.proxy.conftest import MODEL, Served

CALL = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]
MESSAGES: Any = [{"role": "user", "content": "q"}]
ASKED: Any = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def sdk_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)


def recorded(served: Served, prompt: int) -> list[tuple[list[int], list[int], list[float] | None]]:
    """Prompt ids, sampled ids and logprobs of each call; the engine was asked for prompt number `prompt`."""
    served.seal()
    return [(served.engine.prompts[prompt], call.response_ids, call.logprobs) for call in served.ledger.calls()]


@pytest.mark.parametrize("answer", ["a plain answer", f"words, then\n{CALL}", f"{CALL}\n{CALL}"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [[], ["never"]])
def test_chat_tells_the_recorded_ids(served: Served, answer: str, stop: list[str], *, stream: bool) -> None:
    served.engine.script.append(answer)
    ask = sdk_of(served).chat.completions.create
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "stop": stop, "extra_body": ASKED}
    if stream:
        chunks = [chunk.model_dump() for chunk in ask(**asked, logprobs=True, stream=True)]
        prompts = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
        choices = [chunk["choices"][0] for chunk in chunks]
    else:
        told = ask(**asked, logprobs=True).model_dump()
        prompts, choices = [told["prompt_token_ids"]], told["choices"]
    ids = [token for choice in choices for token in choice["token_ids"]]
    named = [token for choice in choices for token in (choice["logprobs"] or {}).get("content") or []]
    [(prompt_ids, response_ids, logprobs)] = recorded(served, 0)
    assert (prompts, ids) == ([prompt_ids], response_ids)
    assert [token["token"] for token in named] == [f"token_id:{token}" for token in ids]
    assert [token["logprob"] for token in named] == pytest.approx(logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_tell_the_recorded_ids(served: Served, *, stream: bool) -> None:
    served.engine.script.append("some more")
    ask = sdk_of(served).completions.create
    asked: Any = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 20, "logprobs": 1, "extra_body": ASKED}
    if stream:
        choices = [chunk.model_dump()["choices"][0] for chunk in ask(**asked, stream=True)]
    else:
        choices = ask(**asked).model_dump()["choices"]
    ids = [token for choice in choices for token in choice.get("token_ids") or []]
    named = [token for choice in choices for token in (choice["logprobs"] or {}).get("tokens") or []]
    [(_, response_ids, _)] = recorded(served, 0)
    assert [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice] == [[5, 6, 7]]
    assert (ids, named) == (response_ids, [f"token_id:{token}" for token in ids])


def test_each_choice_has_its_own_ids(served: Served) -> None:
    served.engine.script.extend(["one", "another one"])
    asked: Any = {"model": MODEL, "messages": MESSAGES, "n": 2, "extra_body": {"return_token_ids": True}}
    told = sdk_of(served).chat.completions.create(**asked).model_dump()
    assert [choice["token_ids"] for choice in told["choices"]] == [ids for _, ids, _ in recorded(served, 0)]


def test_ids_go_on_as_a_prompt_of_ids(served: Served) -> None:
    """An agent that speaks in token ids stays one row: it sends back what it was told, and ids of its own behind it."""
    served.engine.script.extend(["first", "second"])
    ask = sdk_of(served).completions.create
    told = ask(model=MODEL, prompt=[5, 6], max_tokens=20, extra_body=ASKED).model_dump()["choices"][0]
    ask(model=MODEL, prompt=[*told["prompt_token_ids"], *told["token_ids"], 8, 9], max_tokens=20)
    served.seal()
    first, second = served.ledger.calls()
    assert (second.parent_id, second.prompt_ids) == (first.call_id, [8, 9])


def test_who_does_not_ask_is_told_none(served: Served) -> None:
    ask: Any = sdk_of(served).chat.completions.create
    whole = ask(model=MODEL, messages=MESSAGES).model_dump()
    assert "prompt_token_ids" not in whole
    assert "token_ids" not in whole["choices"][0]
    for chunk in ask(model=MODEL, messages=MESSAGES, stream=True):
        told = chunk.model_dump()
        assert "prompt_token_ids" not in told
        assert "token_ids" not in told["choices"][0]
