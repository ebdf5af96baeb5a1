"""What a chat format is told besides the messages: in first prompts, continuations, probes and counts alike."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import transformers

from lightning_rl_adapters import credit, forest, rows
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering.base import Variants
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import MODEL, SECRET, TOKENIZER, MemoryLedger, ScriptedEngine, Served, listening
from tests.proxy.rendering.test_chat_templates import CHATML
from tests.proxy.rendering.test_renderers import folder

Message = dict[str, Any]
OFF = {"enable_thinking": False}
UNTHOUGHT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
# Opens an empty thought when it is told to, and a system text of a style that is asked for.
TEMPLATE = (
    "{%- if style is defined %}{{- '<|im_start|>system\\n' + style + '<|im_end|>\\n' }}{% endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>\\n\\n')[-1] }}"
    "{{- '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{%- endif %}"
)
ASKED = [{"role": "user", "content": "one"}]
Serve = Callable[..., Served]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@pytest.fixture(params=["qwen3", "template"])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    """A gateway whose format is told not to think: a renderer of the library, and the model's own template."""
    where = TOKENIZER if request.param == "qwen3" else folder(tmp_path, chat_template=TEMPLATE, eos_token="<|im_end|>")
    renderer = load_renderer(where, request.param, "mine", chat_template_kwargs=OFF)
    ledger, engine, router = MemoryLedger(), ScriptedEngine(renderer.tokenizer), Router(MODEL)
    router.register(engine)
    gateway = Gateway(ledger=ledger, secret=SECRET, journal=tmp_path / "journal", renderer=renderer, router=router)
    with listening(gateway) as (url, loop):
        yield Served(url, gateway, ledger, engine, loop)


def by_chat(served: Served, messages: list[Message]) -> str:
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)
    given: Any = messages
    return sdk.chat.completions.create(model=MODEL, messages=given).choices[0].message.content or ""


def by_chat_streamed(served: Served, messages: list[Message]) -> str:
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)
    given: Any = messages
    parts = sdk.chat.completions.create(model=MODEL, messages=given, stream=True)
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def by_responses(served: Served, messages: list[Message]) -> str:
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)
    given: Any = messages
    return sdk.responses.create(model=MODEL, input=given).output_text


def by_messages(served: Served, messages: list[Message]) -> str:
    root = served.base_url().removesuffix("/v1")
    sdk = anthropic.Anthropic(base_url=root, api_key=served.key(), max_retries=0)
    given: Any = messages
    [block] = sdk.messages.create(model=MODEL, messages=given, max_tokens=64).content
    assert block.type == "text"
    return block.text


@pytest.mark.parametrize("ask", [by_chat, by_chat_streamed, by_responses, by_messages])
def test_three_turns_are_one_row_of_what_the_engine_saw(serve: Served, ask: Any) -> None:
    tokenizer, messages = FastTokenizer(TOKENIZER), [user("one")]
    for answer in ("SELECT  1", "two words", "bye"):
        serve.engine.script.append(answer)
        said = ask(serve, messages)
        assert said == answer, "what was sampled, and no thought"
        messages += [{"role": "assistant", "content": said}, user("next")]
    serve.seal()
    calls = serve.ledger.calls()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    built = forest.build(calls)
    [row] = rows.cut(built, credit.final_values(built, 1.0))
    for number, (call, prompt) in enumerate(zip(calls, serve.engine.prompts, strict=True), start=1):
        text = tokenizer.decode(prompt)
        assert text.endswith(UNTHOUGHT)
        assert text.count("<think>") == number, "each turn keeps the thought that it was sampled behind"
        assert row.token_ids[: len(prompt)] == prompt
        assert row.token_ids[len(prompt) : len(prompt) + len(call.response_ids)] == call.response_ids
    assert sum(row.loss_mask) == sum(len(call.response_ids) for call in calls)


def test_a_turn_that_is_rendered_anew_begins_as_it_was_sampled(serve: Served) -> None:
    history = [*ASKED, {"role": "assistant", "content": "not ours"}, user("two")]
    by_chat(serve, history)
    assert FastTokenizer(TOKENIZER).decode(serve.engine.prompts[0]).endswith(UNTHOUGHT)


def test_a_count_of_tokens_is_of_the_same_prompt(serve: Served) -> None:
    sdk = anthropic.Anthropic(base_url=serve.base_url().removesuffix("/v1"), api_key=serve.key(), max_retries=0)
    counted = sdk.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "one"}]).input_tokens
    by_chat(serve, [user("one")])
    assert counted == len(serve.engine.prompts[0])


@pytest.mark.parametrize("asked", [{"enable_thinking": False}, {}, None])
def test_a_request_may_ask_for_what_is_so_anyway(serve: Served, asked: Any) -> None:
    sdk = openai.OpenAI(base_url=serve.base_url(), api_key=serve.key(), max_retries=0)
    body = {"chat_template_kwargs": asked}
    sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "one"}], extra_body=body)
    serve.seal()
    assert "lightning_rl.ignored_fields" not in serve.ledger.spans[0].attributes


THINKING = [{"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}]


@pytest.mark.parametrize("fields", THINKING)
@pytest.mark.parametrize("door", ["chat/completions", "responses", "messages"])
def test_a_request_may_ask_for_a_prompt_of_its_own_and_its_conversation_goes_on(
    serve: Served, fields: dict[str, Any], door: str
) -> None:
    renderer = serve.gateway._renderer
    assert renderer is not None
    messages = [user("one")]
    thinks = renderer.with_kwargs({"enable_thinking": True})
    for _ in range(2):
        asked = {"input": messages} if door == "responses" else {"messages": messages, "max_tokens": 64}
        asked.pop("max_tokens", None) if door == "chat/completions" else None
        body = {"model": MODEL} | asked | fields
        got = httpx.post(f"{serve.base_url()}/{door}", json=body, headers={"x-api-key": serve.key()})
        assert got.status_code == 200, got.text
        messages = [*messages, {"role": "assistant", "content": "ok"}, user("two")]
    assert serve.engine.prompts[0] == thinks.render([user("one")], None) != renderer.render([user("one")], None)
    by_chat(serve, messages)
    serve.seal()
    one, two, three = serve.ledger.calls()
    assert (two.parent_id, three.parent_id) == (one.call_id, None)  # the last one is not told so
    assert all("lightning_rl.ignored_fields" not in span.attributes for span in serve.ledger.spans)


def test_a_format_that_never_thinks_need_not_be_told_so(served: Served, tmp_path: Path) -> None:
    plain = load_renderer(folder(tmp_path, chat_template=CHATML), "template", MODEL)
    served.gateway._renderer = served.gateway._tokenizing.renderer = plain
    for thinks, status in ((False, 200), (True, 400)):
        body = {"model": MODEL, "messages": [user("one")], "enable_thinking": thinks}
        key = {"x-api-key": served.key()}
        assert httpx.post(f"{served.base_url()}/chat/completions", json=body, headers=key).status_code == status


@pytest.mark.parametrize("asked", [{"stile": "terse"}, "no"])
@pytest.mark.parametrize("path", ["chat", "responses"])
def test_a_request_that_asks_for_another_prompt_is_told_so(serve: Served, asked: Any, path: str) -> None:
    sdk = openai.OpenAI(base_url=serve.base_url(), api_key=serve.key(), max_retries=0)
    body = {"chat_template_kwargs": asked}
    chat = {"model": MODEL, "messages": ASKED, "extra_body": body}
    ask = {
        "chat": lambda: sdk.chat.completions.create(**chat),
        "responses": lambda: sdk.responses.create(model=MODEL, input="one", extra_body=body),
    }
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs") as refused:
        ask[path]()
    if isinstance(asked, dict):
        assert "multi_turn.chat_template_kwargs" in str(refused.value)
    assert serve.engine.prompts == []


def told(served: Served, kwargs: Mapping[str, Any], attempt_id: str = "a1") -> httpx.Response:
    body = {"model": MODEL, "messages": ASKED, "chat_template_kwargs": kwargs}
    url, key = served.base_url(attempt_id=attempt_id), served.key(attempt_id=attempt_id)
    return httpx.post(f"{url}/chat/completions", json=body, headers={"x-api-key": key}, timeout=30)


def test_nobody_waits_while_a_format_is_told_something_new(serve: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = serve.gateway._renderer.with_kwargs.__self__  # type: ignore[union-attr]
    begun, go_on, make = threading.Event(), threading.Event(), variants._make

    def slowly(kwargs: Mapping[str, Any]) -> Any:
        begun.set()
        assert go_on.wait(20)
        return make(kwargs)

    monkeypatch.setattr(variants, "_make", slowly)
    with ThreadPoolExecutor() as threads:
        new = threads.submit(told, serve, {"enable_thinking": True})
        assert begun.wait(20)
        try:
            assert told(serve, {}, "a2").status_code == 200
            assert not new.done()
        finally:
            go_on.set()
        assert new.result(20).status_code == 200
    monkeypatch.setattr(variants, "_make", None)
    assert told(serve, {"enable_thinking": True}, "a2").status_code == 200, "it is made once"


def test_one_attempt_has_a_format_told_a_handful_of_ways(serve: Served) -> None:
    for number in range(8):
        told(serve, {"style": str(number)})
    refused = told(serve, {"style": "8"})
    assert refused.status_code == 400
    assert "8 other ways" in refused.json()["error"]["message"]
    assert "other ways" not in told(serve, {"style": "0"}).text, "those may be asked for again"
    assert "other ways" not in told(serve, {"style": "8"}, "a2").text, "others may ask for as many"


@pytest.mark.parametrize("kwargs", [{}, OFF, {"enable_thinking": True, "style": "terse"}])
def test_a_template_renders_as_transformers_does_with_the_same_kwargs(
    kwargs: Mapping[str, Any], tmp_path: Path
) -> None:
    path = folder(tmp_path, chat_template=TEMPLATE, eos_token="<|im_end|>", tokenizer_class="PreTrainedTokenizerFast")
    renderer = load_renderer(path, "auto", "mine", chat_template_kwargs=kwargs)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    messages = [user("one"), {"role": "assistant", "content": "1"}, user("two")]
    for length in (1, 3):
        expected = theirs.apply_chat_template(
            messages[:length], add_generation_prompt=True, return_dict=False, **kwargs
        )
        assert renderer.render(messages[:length], None) == expected


def test_the_probe_is_told_the_same(tmp_path: Path) -> None:
    """A template that is append-only but for one of its modes is so, or is not, in the mode that is used."""
    moving = TEMPLATE.replace(
        "{%- for m in messages %}",
        "{%- if recap is defined %}{{- messages | length }}{% endif %}{%- for m in messages %}",
    )
    path = folder(tmp_path, chat_template=moving, eos_token="<|im_end|>")
    proven = [
        load_renderer(path, "auto", "mine", chat_template_kwargs=kwargs).append_only["user"]  # type: ignore[index]
        for kwargs in ({}, {"recap": True})
    ]
    assert proven == [True, False]


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("qwen3", {"enable_thinkin": False}, "renderer 'qwen3' takes enable_thinking; did you mean 'enable_thinking'"),
        ("qwen3", {"thinking_retention": "all"}, "renderer 'qwen3' takes enable_thinking"),
        ("qwen3", {"enable_thinking": "perhaps"}, "chat_template_kwargs={'enable_thinking': 'perhaps'}.*valid boolean"),
        ("template", {"enable_thinkin": False}, "it takes enable_thinking, style; did you mean 'enable_thinking'"),
        ("template", {"messages": []}, "it takes enable_thinking, style"),
    ],
)
def test_an_unknown_kwarg_is_an_error_that_names_those_there_are(
    name: str, kwargs: Any, message: str, tmp_path: Path
) -> None:
    path = folder(tmp_path, chat_template=TEMPLATE)
    with pytest.raises(ValueError, match=message):
        load_renderer(path, name, "mine", chat_template_kwargs=kwargs)


def test_a_format_without_kwargs_says_so(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(
        ValueError, match=r"the chat template of \S+ cannot be used: .*'enable_thinking', and it takes none"
    ):
        load_renderer(folder(tmp_path, chat_template=plain), "template", "mine", chat_template_kwargs=OFF)


def test_of_the_ways_a_format_is_told_those_asked_for_last_are_kept() -> None:
    made: list[Any] = []

    def make(kwargs: Mapping[str, Any]) -> Any:
        made.append(kwargs)
        return object()

    variants = Variants(make)
    first, *_ = [variants.with_kwargs({"style": str(number)}) for number in range(16)]
    assert variants.with_kwargs({"style": "0"}) is first
    variants.with_kwargs({"style": "another"})  # the oldest goes: that is not the first, which was asked for since
    assert (variants.with_kwargs({"style": "0"}), len(made)) == (first, 17)
    variants.with_kwargs({"style": "1"})
    assert len(made) == 18
