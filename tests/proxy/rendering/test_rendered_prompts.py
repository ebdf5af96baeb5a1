"""Prompts that come again are rendered once, and their ids are those of rendering them anew."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl_proxy.errors import GatewayError, PromptTooLong
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.long_texts import LongTexts
from lightning_rl_proxy.rendering.rendered_prompts import RenderedPrompts
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.proxy.conftest import TOKENIZER
from tests.random_examples import examples

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None

ASKED: Messages = [{"role": "user", "content": "how many?"}]
VALUES = [1, 1.0, True, 0, False, "1", None, "", [], {}, [1], [True]]
TEXTS = st.sampled_from(["how many?", "how many? ", "1", "", "é", "<|im_end|>"])
TOLD = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": TEXTS})
CALLED = st.builds(
    lambda value: {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"what": value}}}],
    },
    st.sampled_from(VALUES),
)
TOOL = st.builds(
    lambda value: {"type": "function", "function": {"name": "look_up", "parameters": {"default": value}}},
    st.sampled_from(VALUES),
)


def written(messages: Any, tools: Any) -> list[int]:
    """A format that shows every difference between two values."""
    return list(repr((messages, tools)).encode())


def prompts(render: Any = written, **options: Any) -> RenderedPrompts:
    return RenderedPrompts(render, LongTexts(FastTokenizer(TOKENIZER)._tokenizer), **options)


KEPT = prompts()


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(TOLD | CALLED, max_size=3), st.none() | st.lists(TOOL, max_size=2))
def test_a_prompt_that_was_kept_is_the_one_that_was_asked_for(messages: Messages, tools: Tools) -> None:
    assert KEPT.ids(messages, tools) == written(messages, tools)
    assert KEPT.ids(messages, tools) == written(messages, tools)


def test_it_is_rendered_once_and_each_caller_has_a_list_of_its_own() -> None:
    rendered = []

    def render(messages: Any, tools: Any) -> list[int]:
        rendered.append(messages)
        return written(messages, tools)

    kept = prompts(render)
    first = kept.ids(ASKED, None)
    first.append(7)
    assert kept.ids([dict(message) for message in ASKED], None) == written(ASKED, None)
    assert len(rendered) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_ask_at_the_same_time_have_a_prompt_rendered_once(fails: bool) -> None:
    rendered, others_wait = [], Event()

    def render(messages: Any, tools: Any) -> list[int]:
        rendered.append(messages)
        others_wait.wait(10)
        if fails:
            raise GatewayError(400, "no such format")
        return written(messages, tools)

    kept = prompts(render)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(kept.ids, ASKED, None) for _ in range(4)]
        time.sleep(0.05)  # until all have asked
        others_wait.set()
    assert [one.exception() is not None for one in asked] == [fails] * 4
    assert len(rendered) == (4 if fails else 1)  # what is wrong with it each caller is told
    if not fails:
        lists = [one.result() for one in asked]
        lists[0].append(7)
        assert lists[1:] == [written(ASKED, None)] * 3
        assert kept.ids(ASKED, None) == lists[1]


def test_those_asked_for_last_are_kept_and_no_large_one() -> None:
    rendered = []

    def render(messages: Any, tools: Any) -> list[int]:
        rendered.append(messages[0]["content"])
        return [1] * (100_000 if rendered[-1] == "many tokens" else 1)

    def ask(text: str) -> None:
        kept.ids([{"role": "user", "content": text}], None)

    kept = prompts(render, size=270)  # each takes 83 to 85
    for text in ("one", "two", "one", "three", "four", "one"):
        ask(text)
    assert rendered == ["one", "two", "three", "four"]
    ask("two")
    assert rendered[4:] == ["two"]
    large = "x" * 2**21
    for text in (large, large, "many tokens", "many tokens", "one"):
        ask(text)
    assert rendered[5:] == [large, large, "many tokens", "many tokens"]


def test_a_prompt_that_was_kept_counts_against_the_context() -> None:
    renderer = load_renderer(TOKENIZER, "qwen3", "policy")
    asked = [{"role": "user", "content": "how many? " * 40}]
    known = renderer.render(asked, None)
    renderer.tokenizer.long_texts.context = len(known) // 2 - 1
    with renderer.tokenizer.long_texts.of_one_prompt(), pytest.raises(PromptTooLong):
        renderer.render(asked, None)


def test_what_is_no_json_is_refused_by_the_format() -> None:
    with pytest.raises(GatewayError, match="cannot render"):
        load_renderer(TOKENIZER, "qwen3", "policy").render([{"role": "user", "content": "\ud800"}], None)


@pytest.mark.parametrize(
    ("template", "varies"), [("{{ messages[0].content }} {{ strftime_now('%S') }}", True), ("{{ messages }}", False)]
)
def test_a_template_that_reads_the_clock_is_rendered_each_time(
    template: str, varies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    renderer = load_renderer(tmp_path, "template", "policy")
    known = renderer.render(ASKED, None)
    monkeypatch.setattr(renderer, "_text", lambda *_, **__: "another second")
    assert (renderer.render(ASKED, None) != known) is varies


def test_a_library_format_renders_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = load_renderer(TOKENIZER, "qwen3", "policy")
    known = renderer.render(ASKED, None)
    monkeypatch.setattr(renderer, "_renderer", None)
    assert renderer.render(ASKED, None) == known
