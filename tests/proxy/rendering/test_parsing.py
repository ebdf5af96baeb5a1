"""Deltas add up to the answer, however tokens come and whatever they say; stops, single calls and logprobs hold too."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer, Renderer
from lightning_rl_proxy.rendering.chat_templates import TemplateRenderer
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.parsing import AnswerEnd, AnswerParser
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.proxy.conftest import TOKENIZER
from tests.proxy.rendering.test_chat_templates import CHATML, HEADERS, HERMES, OPENS, STRIPS_THINKING
from tests.random_examples import examples

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "hermes": HERMES, "opens": OPENS}
# `letters` is hermes over a tokenizer that has no marks; `minimax-m2` stands for the formats that are not followed.
RENDERERS = [
    *("qwen3", "qwen3.5", "prime-qwen3", "glm-4.5", "deepseek-v3", "deepseek-r1", "llama-3", "minimax-m2"),
    *TEMPLATES,
    "letters",
]
PLAIN = "Hello, 🌲 Bäume!\n\n  And <b>more</b>."
DEEPSEEK_CALLS = (
    "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>count\n```json\n{}\n```<\uff5ctool▁call▁end\uff5c>"
    "<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>look\n```json\n{}\n```<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>"
)
CALLS = {
    "json": '<tool_call>\n{"name": "count", "arguments": {"of": "Bäume 🌲"}}\n</tool_call>',
    "xml": "<tool_call>\n<function=count>\n<parameter=of>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>count\n<arg_key>of</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "deepseek": DEEPSEEK_CALLS,
    "minimax": '<minimax:tool_call>\n<invoke name="count">\n</invoke>\n</minimax:tool_call>',
    "llama": '{"name": "count", "parameters": {"of": 3}}',
}
FORM = {"qwen3.5": "xml", "prime-qwen3": "xml", "glm-4.5": "glm", "deepseek-v3": "deepseek", "deepseek-r1": "deepseek"}
KINDS = ("call", "calls", "output", "outputs")
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<|im_start|>", "<|eot_id|>"]
MARKS += [
    "<|start_header_id|>",
    "<\uff5ctool▁calls▁begin\uff5c>",
    "<\uff5ctool▁call▁begin\uff5c>",
    "<\uff5ctool▁call▁end\uff5c>",
    "<arg_key>",
]
ENDS = ["<|im_end|>", "<|endoftext|>", "<\uff5cend▁of▁sentence\uff5c>", "<|user|>"]
WORDS = ["a", "b", " ab", " c", "\n", "\n\n", "  ", "\t", "🌲", "é", "{", "}", '{"name": "x"', "<", "</", "think>"]
WORDS += ["<th", "<tool", "_call>", "ink>", "tool_call>", "{}", '"', "assistant\n", "<tool_call", "ab ab"]
PIECES = [*WORDS, *WORDS, *MARKS, *ENDS, *CALLS.values(), "<think>\nhm\n</think>\n\n"]
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]


def saved(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<|im_end|>"} | config))
    return folder


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    """Each of `RENDERERS`, over the tutorial's tokenizer with the tokens of its format."""
    base, root = str(TOKENIZER / "tokenizer.json"), tmp_path_factory.mktemp("formats")
    tokens = {
        "qwen": "<s> <|eot_id|> <|start_header_id|> <|end_header_id|> "
        "<|image_pad|> <|video_pad|> <|vision_start|> <|vision_end|>",
        "glm-4.5": "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> "
        "<arg_key> </arg_key> <arg_value> </arg_value> /nothink",
        "deepseek": " ".join(
            [
                f"<\uff5c{name}\uff5c>"
                for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep")
            ]
            + [f"<\uff5ctool▁{what}▁{end}\uff5c>" for what in KINDS for end in ("begin", "end")]
        ),
        "llama-3": "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|end_of_text|>",
        "minimax-m2": "]~!b[ ]~b] [e~[ <minimax:tool_call> </minimax:tool_call>",
    }

    def tokenizer_of(name: str) -> Tokenizer:
        kind = "deepseek" if name.startswith("deepseek") else name if name in tokens else "qwen"
        if name in ("letters", "deepseek-v3"):
            raw = json.loads(Path(base).read_text())
            raw["added_tokens"] = [token for token in raw["added_tokens"] if token["special"]]
            tokenizer = Tokenizer.from_str(json.dumps(raw))
        else:
            tokenizer = Tokenizer.from_file(base)
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[kind].split()])
        return tokenizer

    made: dict[str, Renderer] = {}
    for name in RENDERERS:
        texts = {"default": TEMPLATES.get(name, STRIPS_THINKING)}
        folder = saved(tokenizer_of(name), root / name)
        if name in TEMPLATES or name == "letters":
            made[name] = TemplateRenderer(folder, FastTokenizer(folder), texts, model="mine")
        else:
            made[name] = load_renderer(folder, name, "mine")
    return made


def prompt_of(renderer: Renderer) -> list[int]:
    return renderer.render([{"role": "user", "content": "one"}], None)


def spelled(renderer: Renderer, pieces: Sequence[str | int]) -> list[int]:
    """The ids of the pieces, one after the other, so that a mark may be spelled in letters too."""
    tokenizer, size = renderer.tokenizer, 900
    nested = [[piece % size] if isinstance(piece, int) else tokenizer.encode(piece) for piece in pieces]
    return [token for ids in nested for token in ids]


def groups(ids: list[int], cuts: list[int]) -> Iterator[list[int]]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return (ids[start:end] for start, end in pairwise(places))


def streamed(parser: AnswerParser, parts: Sequence[list[int]]) -> tuple[ParsedAnswer, list[Delta]]:
    """All that a parser makes of an answer; each token's logprob is its place."""
    deltas: list[Delta] = []
    place = 0
    for part in parts:
        deltas += parser.push(part, [float(place + i) for i in range(len(part))])
        place += len(part)
    answer, last = parser.finish("length")
    return answer, deltas + last


def joined(deltas: list[Delta], kind: str) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind)


def assert_adds_up(answer: ParsedAnswer, deltas: list[Delta]) -> None:
    assert joined(deltas, "content") == answer.content
    assert joined(deltas, "reasoning") == (answer.reasoning or "")
    calls = [delta for delta in deltas if delta.kind == "tool_call"]
    assert [delta.tool_call for delta in calls] == answer.tool_calls
    assert [delta.tool_index for delta in calls] == list(range(len(calls)))
    assert [call["id"] for call in answer.tool_calls] == [f"call_7_{index}" for index in range(len(calls))]


SAID = st.lists(st.sampled_from(PIECES) | st.integers(0, 900), max_size=14)
CUTS = st.lists(st.integers(0, 1000), max_size=8)
TURN_ENDS = st.sampled_from(["", "\n", " \n\n"])


LIBRARY = [name for name in RENDERERS if name not in TEMPLATES and name != "letters"]


@pytest.mark.parametrize("name", LIBRARY)
@given(
    pieces=st.lists(st.one_of(st.sampled_from([PLAIN, *PIECES]), st.integers(0, 10**6)), max_size=4),
    before=st.lists(st.sampled_from(["<think>", "</think>", "\n", "hm", *ENDS, "word " * 40]), max_size=3),
    end=st.booleans(),
)
def test_plain_text_is_read_as_the_library_reads_it(
    name: str, pieces: list[str | int], before: list[str], *, end: bool, renderers: dict[str, Renderer]
) -> None:
    renderer = renderers[name]
    assert isinstance(renderer, LibraryRenderer)
    prompt = prompt_of(renderer) + spelled(renderer, before)
    ids = spelled(renderer, pieces) + renderer.stop_token_ids[:1] * end
    quick = renderer.parse("7", prompt, ids, None, "stop", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renderer, "_plain_text", lambda *_: None)
        whole = renderer.parse("7", prompt, ids, None, "stop", None)
    assert quick == whole


@pytest.mark.parametrize("name", RENDERERS)
@given(said=SAID, forced=SAID, cuts=CUTS, offered=st.booleans())
@settings(max_examples=examples(400), deadline=None)
def test_deltas_add_up_to_the_answer_however_tokens_come(
    name: str,
    renderers: dict[str, Renderer],
    said: list[str | int],
    forced: list[str | int],
    cuts: list[int],
    *,
    offered: bool,
) -> None:
    renderer, tools = renderers[name], TOOLS if offered else None
    prompt, ids, prefix = prompt_of(renderer), spelled(renderer, said), spelled(renderer, forced[:3])
    whole = renderer.parse("7", prompt, prefix + ids, None, "length", tools)
    assert offered or not whole.tool_calls
    answers = []
    for parts in (list(groups(ids, cuts)), [[token] for token in ids], [ids]):
        parser = AnswerParser(renderer, "7", prompt, tools, prefix_ids=prefix, tokens=True)
        answer, deltas = streamed(parser, parts)
        assert_adds_up(answer, deltas)
        assert (answer.content, answer.reasoning, answer.tool_calls) == (
            whole.content,
            whole.reasoning,
            whole.tool_calls,
        )
        assert (answer.token_ids, answer.output_tokens, answer.finish_reason) == (ids, len(ids), "length")
        assert [token for delta in deltas for token in delta.tokens or []] == answer.tokens()
        assert (parser.ended, parser.overshoot) == (False, 0)
        answers.append(answer)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("name", RENDERERS)
@given(
    said=SAID, cuts=CUTS, stop=st.lists(st.sampled_from(["ab", "b ab", "abab", "🌲a", "äu", "um", "🌲"]), max_size=3)
)
@settings(max_examples=examples(300), deadline=None)
def test_no_stop_string_is_told_and_tokens_end_with_the_match(
    name: str, renderers: dict[str, Renderer], said: list[str | int], cuts: list[int], stop: list[str]
) -> None:
    renderer = renderers[name]
    prompt, ids = prompt_of(renderer), spelled(renderer, said)
    unseen = renderer.tokenizer.special_ids.union(renderer.stop_token_ids)

    def matches(tokens: list[int]) -> list[str]:
        text = renderer.tokenizer.decode([token for token in tokens if token not in unseen])
        return [found for found in stop if found in text]

    answers = []
    for parts in (list(groups(ids, cuts)), [[token] for token in ids]):
        parser = AnswerParser(renderer, "7", prompt, TOOLS, AnswerEnd(stop), tokens=True)
        answer, deltas = streamed(parser, parts)
        assert_adds_up(answer, deltas)
        assert not any(found in delta.text for found in stop for delta in deltas)
        assert parser.overshoot == len(ids) - len(answer.token_ids)
        assert answer.token_ids == ids[: len(answer.token_ids)]
        assert [token for delta in deltas for token in delta.tokens or []] == answer.tokens()
        if answer.stop_match is None:
            assert not matches(ids)
            assert (parser.ended, answer.finish_reason) == (False, "length")
        else:
            assert parser.ended
            assert answer.finish_reason == "stop"
            assert answer.stop_match in matches(answer.token_ids)
            assert not matches(answer.token_ids[:-1])
        answers.append(answer)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", RENDERERS)
@pytest.mark.parametrize("token", ["!", "<|endoftext|>", "</tool_call>"])
@given(said=SAID, cuts=CUTS)
@settings(max_examples=examples(60), deadline=None)
def test_the_text_lacks_the_stop_token_that_its_tokens_end_with(
    name: str, token: str, renderers: dict[str, Renderer], said: list[str | int], cuts: list[int]
) -> None:
    renderer = renderers[name]
    stop = renderer.tokenizer.encode_own(token)[0]
    prompt, ids = prompt_of(renderer), [one for one in spelled(renderer, said) if one != stop]
    is_format = stop in renderer.tokenizer.added_ids  # which may close a call
    expected = renderer.parse("7", prompt, ids + [stop] * is_format, None, "length", TOOLS)
    for end in (AnswerEnd(stop_token_ids=[stop]), AnswerEnd(["never"], [stop])):
        parser = AnswerParser(renderer, "7", prompt, TOOLS, end)
        answer, deltas = streamed(parser, list(groups([*ids, stop], cuts)))
        assert_adds_up(answer, deltas)
        assert answer.token_ids == [*ids, stop]
        assert answer.message() == expected.message()
        assert answer.reasoning == expected.reasoning


@pytest.mark.parametrize("name", RENDERERS)
@given(
    said=SAID, behind=st.none() | TURN_ENDS, cuts=CUTS, stop=st.lists(st.sampled_from(["ab", "\n</", "c"]), max_size=1)
)
@settings(max_examples=examples(150), deadline=None)
def test_one_call_at_a_time_ends_with_the_token_that_completes_it_or_with_the_turn(
    name: str,
    renderers: dict[str, Renderer],
    said: list[str | int],
    behind: str | None,
    cuts: list[int],
    stop: list[str],
) -> None:
    renderer = renderers[name]
    prompt, ids = prompt_of(renderer), spelled(renderer, said)
    if behind is not None:
        ids += [*spelled(renderer, [behind]), renderer.stop_token_ids[0]]
    answers = []
    for parts in (list(groups(ids, cuts)), [[token] for token in ids]):
        parser = AnswerParser(renderer, "7", prompt, TOOLS, AnswerEnd(stop, one_tool_call=True), tokens=True)
        answer, deltas = streamed(parser, parts)
        assert_adds_up(answer, deltas)
        assert parser.overshoot == len(ids) - len(answer.token_ids)
        assert len(answer.logprobs or []) == len(answer.token_ids)
        assert [token for delta in deltas for token in delta.tokens or []] == answer.tokens()
        if parser.ended and answer.stop_match is None:
            kept = answer.token_ids
            if kept[-1] in renderer.stop_token_ids:
                kept = kept[:-1]
                while not renderer.tokenizer.decode(kept[-1:]).strip():
                    kept = kept[:-1]
            assert len(renderer.parse("7", prompt, kept, None, "stop", TOOLS).tool_calls) == 1
            assert not renderer.parse("7", prompt, kept[:-1], None, "stop", TOOLS).tool_calls
        answers.append(answer)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", RENDERERS)
def test_plain_text_leaves_with_the_tokens_that_complete_it(name: str, renderers: dict[str, Renderer]) -> None:
    renderer = renderers[name]
    prompt = prompt_of(renderer)
    parser = AnswerParser(renderer, "7", prompt, None)
    channel = "reasoning" if renderer.parse("7", prompt, spelled(renderer, ["x"]), None, "stop", None).reasoning else ""
    seen, tokens = "", spelled(renderer, [PLAIN])
    for count, token in enumerate(tokens, start=1):
        seen += "".join(delta.text for delta in parser.push([token], None))
        due = renderer.tokenizer.decode(tokens[:count]).rstrip("\ufffd").rstrip()
        if renderer.markup is not None and not due.endswith(("<", "</")):
            assert seen == due
    assert seen == ("" if name == "minimax-m2" else PLAIN)
    answer, last = parser.finish("length")
    assert (answer.reasoning if channel else answer.content) == PLAIN
    assert [delta.text for delta in last] == ([PLAIN] if name == "minimax-m2" else [])


@pytest.mark.parametrize("name", [name for name in RENDERERS if name not in ("minimax-m2", "llama-3")])
def test_reasoning_text_and_calls_leave_in_order_and_before_the_end(name: str, renderers: dict[str, Renderer]) -> None:
    renderer = renderers[name]
    call = CALLS[FORM.get(name, "json")]
    calls = call if name.startswith("deepseek") else f"{call}\n{call}"
    opening = "" if name == "opens" else "<think>\n"
    ids = spelled(renderer, [f"{opening}So it is.\n</think>\n\nI look.\n\n{calls}"])
    parser = AnswerParser(renderer, "7", prompt_of(renderer), TOOLS)
    deltas = [delta for token in ids for delta in parser.push([token], None)]
    answer, last = parser.finish("stop")
    if name not in ("glm-4.5", "deepseek-v3", "deepseek-r1"):
        assert len(answer.tool_calls) == 2
    assert (joined(deltas, "reasoning"), joined(deltas, "content")) == ("So it is.", "I look.")
    assert [delta.tool_call for delta in deltas if delta.kind == "tool_call"] == answer.tool_calls
    assert len(answer.tool_calls) >= 1
    kinds = [delta.kind for delta in deltas]
    assert kinds == sorted(kinds, key=["reasoning", "content", "tool_call"].index)
    assert not last


@pytest.mark.parametrize("name", RENDERERS)
def test_without_tools_the_markup_of_a_call_is_content_where_it_stands(
    name: str, renderers: dict[str, Renderer]
) -> None:
    renderer = renderers[name]
    call = CALLS[{"llama-3": "llama", "minimax-m2": "minimax"}.get(name, FORM.get(name, "json"))]
    said = call if name == "llama-3" else f"I look.\n\n{call} So."
    end = [renderer.stop_token_ids[0]]
    for thought in ("", "<think>\nhm\n</think>\n\n") if name not in ("llama-3", "minimax-m2") else ("",):
        reasons = renderer.parse("7", prompt_of(renderer), spelled(renderer, ["x"]), None, "stop", None).reasoning
        opened = "</think>" if reasons and not thought else ""
        ids = spelled(renderer, [f"{opened}{thought}{said}"]) + end
        answer = renderer.parse("7", prompt_of(renderer), ids, None, "stop", None)
        assert (answer.content, answer.tool_calls) == (said, [])
        assert (answer.reasoning or "") == ("hm" if thought else "")
        parser = AnswerParser(renderer, "7", prompt_of(renderer), [])
        told = [delta for token in ids for delta in parser.push([token], None)]
        assert all(delta.kind != "tool_call" for delta in told)
        assert parser.finish("stop")[0].content == said


def test_a_stop_string_cuts_inside_a_token_and_takes_the_earliest(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["qwen3"]
    ids = spelled(renderer, ["One, two.\n\nObservation: three"])
    parser = AnswerParser(renderer, "7", prompt_of(renderer), None, AnswerEnd(["Observation:", "two.\n\nO", "never"]))
    answer, deltas = streamed(parser, [ids])
    assert (answer.content, answer.stop_match, answer.finish_reason) == ("One,", "two.\n\nO", "stop")
    assert "".join(delta.text for delta in deltas) == "One,"
    assert renderer.tokenizer.decode(answer.token_ids).startswith("One, two.\n\nO")
    assert parser.overshoot == len(ids) - len(answer.token_ids) > 0


def test_a_stop_string_in_a_call_leaves_it_visible_as_text(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["hermes"]
    parser = AnswerParser(renderer, "7", prompt_of(renderer), TOOLS, AnswerEnd(["arguments"]))
    answer, deltas = streamed(parser, [spelled(renderer, ["I look.\n", CALLS["json"]])])
    assert (answer.content, answer.tool_calls) == ('I look.\n<tool_call>\n{"name": "count", "', [])
    assert_adds_up(answer, deltas)


def test_a_stop_string_cuts_reasoning_too(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["qwen3"]
    parser = AnswerParser(renderer, "7", prompt_of(renderer), None, AnswerEnd(["halt"]))
    answer, deltas = streamed(parser, [spelled(renderer, ["<think>\nso I halt here"])])
    assert (answer.reasoning, answer.content) == ("so I", "")
    assert_adds_up(answer, deltas)


def test_with_one_call_at_a_time_the_second_is_overshoot(renderers: dict[str, Renderer]) -> None:
    for name in ("qwen3", "qwen3.5", "glm-4.5", "deepseek-v3", "hermes", "letters"):
        renderer = renderers[name]
        call = CALLS[FORM.get(name, "json")]
        ids = spelled(renderer, [call, "\n", call])
        parser = AnswerParser(renderer, "7", prompt_of(renderer), TOOLS, AnswerEnd(one_tool_call=True))
        answer, deltas = streamed(parser, [ids])
        assert (len(answer.tool_calls), answer.finish_reason, parser.ended) == (1, "stop", True), name
        assert parser.overshoot == len(ids) - len(answer.token_ids) > 0
        assert_adds_up(answer, deltas)


def test_a_character_around_a_stray_mark_is_told_as_it_is_recorded(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["qwen3"]
    tree = spelled(renderer, ["🌲"])
    ids = spelled(renderer, ["<think>\nso"]) + tree[:2] + spelled(renderer, ["<think>"]) + tree[2:]
    answer, deltas = streamed(AnswerParser(renderer, "7", prompt_of(renderer), None), [[token] for token in ids])
    assert answer.reasoning == "so🌲"
    assert_adds_up(answer, deltas)


def test_a_forced_call_is_told_though_only_its_rest_is_sampled(renderers: dict[str, Renderer]) -> None:
    for name in ("qwen3", "hermes", "opens", "letters"):
        renderer = renderers[name]
        prompt = prompt_of(renderer)
        prefix = renderer.forced(prompt, TOOLS, "count")
        assert prefix is not None
        ids = spelled(renderer, ['{"of": 3}}\n</tool_call>', "<|im_end|>"])
        parser = AnswerParser(renderer, "7", prompt, TOOLS, prefix_ids=prefix, tokens=True)
        answer, deltas = streamed(parser, [[token] for token in ids])
        assert [call["function"] for call in answer.tool_calls] == [{"name": "count", "arguments": '{"of": 3}'}], name
        assert (answer.content, answer.reasoning or "", answer.token_ids) == ("", "", ids)
        assert_adds_up(answer, deltas)


@pytest.mark.parametrize("behind", ["", "\n"])
@pytest.mark.parametrize("stop", [[], ["</tool_call>\nend"]])
def test_the_end_of_the_turn_behind_the_only_call_is_part_of_the_answer(
    renderers: dict[str, Renderer], behind: str, stop: list[str]
) -> None:
    renderer = renderers["qwen3"]
    ids = [*spelled(renderer, [CALLS["json"] + behind]), renderer.stop_token_ids[0]]
    parser = AnswerParser(renderer, "7", prompt_of(renderer), TOOLS, AnswerEnd(stop, one_tool_call=True), tokens=True)
    answer, deltas = streamed(parser, [[token] for token in ids])
    assert (answer.token_ids, len(answer.tool_calls), parser.overshoot) == (ids, 1, 0)
    assert_adds_up(answer, deltas)


def test_what_might_have_begun_a_stop_string_behind_the_only_call_is_overshoot(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["qwen3"]
    ids = spelled(renderer, [CALLS["json"], "\nab"])
    parser = AnswerParser(
        renderer, "7", prompt_of(renderer), TOOLS, AnswerEnd(["</tool_call>\nend"], one_tool_call=True), tokens=True
    )
    answer, deltas = streamed(parser, [[token] for token in ids])
    assert renderer.tokenizer.decode(answer.token_ids) == CALLS["json"]
    assert parser.overshoot == len(ids) - len(answer.token_ids) == 3
    assert len(answer.logprobs or []) == len(answer.token_ids)
    assert_adds_up(answer, deltas)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3", 'a<tool_call>\n{"name": "cou'),
        ("qwen3", '<tool_call>{"name": "count", "arguments": {"of": 1e400}}</tool_call>'),  # no number in JSON
        ("hermes", '<tool_call>{"name": "count", "arguments": {"of": NaN}}</tool_call>'),
        ("llama-3", '{"name": "count", "parameters": null}'),
        ("llama-3", '{"name": "Paris", "inhabitants": 2100000}'),  # no tool's name
    ],
)
def test_what_is_no_call_of_a_tool_is_text_as_it_was_sampled(
    renderers: dict[str, Renderer], name: str, said: str
) -> None:
    renderer = renderers[name]
    ids = [*spelled(renderer, [said]), renderer.stop_token_ids[0]]
    answer, deltas = streamed(AnswerParser(renderer, "7", prompt_of(renderer), TOOLS), [[token] for token in ids])
    assert (answer.content, answer.tool_calls) == (said, [])
    assert_adds_up(answer, deltas)


def test_a_number_that_json_has_not_leaves_the_rest_of_an_answer_as_it_is(renderers: dict[str, Renderer]) -> None:
    bad = '<tool_call>\n{"name": "count", "arguments": {"of": NaN}}\n</tool_call>'
    for name in ("qwen3", "hermes"):
        renderer = renderers[name]
        ids = spelled(renderer, ["<think>\nhm\n</think>\n\nText.\n" * (name == "qwen3"), CALLS["json"], bad])
        answer, deltas = streamed(AnswerParser(renderer, "7", prompt_of(renderer), TOOLS), [[token] for token in ids])
        assert len(answer.tool_calls) == 1, name
        assert answer.reasoning == ("hm" if name == "qwen3" else None)
        assert answer.content.endswith(bad)
        assert_adds_up(answer, deltas)


def test_many_calls_are_all_told_the_last_ones_at_the_end(renderers: dict[str, Renderer]) -> None:
    for name in ("qwen3", "hermes"):
        renderer = renderers[name]
        ids = spelled(renderer, [CALLS["json"]] * 100)
        parser = AnswerParser(renderer, "7", prompt_of(renderer), TOOLS)
        answer, deltas = streamed(parser, [[token] for token in ids])
        assert len(answer.tool_calls) == 100
        assert_adds_up(answer, deltas)


def test_reasoning_that_was_closed_is_not_opened_again(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["deepseek-r1"]
    ids = spelled(renderer, ["</think>", "<think>", "a"])
    answer, deltas = streamed(AnswerParser(renderer, "7", prompt_of(renderer), None), [ids])
    assert (answer.reasoning, answer.content) == (None, "<think>a")
    assert_adds_up(answer, deltas)


def test_without_logprobs_there_are_none(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["qwen3"]
    parser = AnswerParser(renderer, "7", prompt_of(renderer), None, tokens=True)
    deltas = parser.push(spelled(renderer, ["ab"]), None)
    answer, last = parser.finish("stop")
    assert answer.logprobs is None
    assert {token.logprob for delta in deltas + last for token in delta.tokens or []} == {None}


def test_work_grows_with_the_length_of_a_plain_answer_only(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["qwen3"]
    decoded = 0

    class Counting(type(renderer.tokenizer)):  # type: ignore[misc]
        def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
            nonlocal decoded
            decoded += 1 if isinstance(token_ids, int) else len(token_ids)
            return str(super().decode(token_ids, *args, **kwargs))

    tokenizer = renderer.tokenizer
    tokenizer.__class__ = Counting
    try:
        ids = spelled(renderer, [PLAIN]) * 200
        parser = AnswerParser(renderer, "7", prompt_of(renderer), None, AnswerEnd(["never"]))
        for token in ids:
            parser.push([token], None)
        parser.finish("stop")
    finally:
        tokenizer.__class__ = FastTokenizer
    assert decoded < 12 * len(ids)
