"""Which renderer a model gets: by its name, by its folder's word, by its own template, or one clear error."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lightning_rl_proxy.rendering.chat_templates import TemplateRenderer
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.proxy.conftest import TOKENIZER

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within " }}
    {{- "<tool_call></tool_call> XML tags:\\n<tool_call>\\n" }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
STRIPPING = CHATML.replace("m.content", "m.content.split('</think>')[-1]")


def folder(path: Path, **config: Any) -> Path:
    shutil.copy(TOKENIZER / "tokenizer.json", path)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_auto_takes_the_models_own_then_the_folders_word_then_the_template(tmp_path: Path) -> None:
    word = folder(tmp_path, chat_template=CHATML, renderer="qwen3")
    assert isinstance(load_renderer(word, "auto", "mine"), LibraryRenderer)
    other = folder(tmp_path, chat_template=CHATML, renderer="llama-3")  # whose tokens are not there
    assert isinstance(load_renderer(other, "auto", "Qwen/Qwen3-8B"), LibraryRenderer)
    template = folder(tmp_path, chat_template=CHATML)
    assert isinstance(load_renderer(template, "auto", "mine"), TemplateRenderer)
    assert isinstance(load_renderer(template, "auto", "Qwen/Qwen3-8B"), LibraryRenderer)


def test_auto_takes_the_renderer_of_a_namesake_whose_chats_the_folders_template_writes(tmp_path: Path) -> None:
    path = folder(tmp_path, chat_template=QWEN3)
    chosen = [load_renderer(path, "auto", model) for model in ("Qwen3-8B", "somebody/Qwen3-8B", "Qwen3-8B-mine")]
    assert [type(each) for each in chosen] == [LibraryRenderer, LibraryRenderer, TemplateRenderer]
    assert isinstance(load_renderer(path, "auto", "Llama-3.2-1B-Instruct"), TemplateRenderer)  # lacks its tokens
    changed = folder(tmp_path, chat_template=QWEN3.replace("# Tools", "# My tools"))
    assert isinstance(load_renderer(changed, "auto", "Qwen3-8B"), TemplateRenderer)


def test_the_template_can_be_asked_for_by_name(tmp_path: Path) -> None:
    path = folder(tmp_path, chat_template=CHATML, renderer="qwen3")
    assert isinstance(load_renderer(path, "template", "Qwen/Qwen3-8B"), TemplateRenderer)


@pytest.mark.parametrize("name", ["auto", "template"])
def test_a_folder_without_a_template_says_so_and_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no renderer is known for model 'bare'; name one that fits its chat") as bare:
        load_renderer(folder(tmp_path), name, "bare")
    assert f"{tmp_path} has no chat template" in str(bare.value)


def test_an_unknown_renderer_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="renderer 'quen3' is unknown; did you mean 'qwen3'"):
        load_renderer(folder(tmp_path), "quen3", "mine")
    with pytest.raises(ValueError, match="renderer 'templte' is unknown; did you mean 'template'"):
        load_renderer(folder(tmp_path), "templte", "mine")


def test_history_is_kept_unless_the_template_is_to_be_followed(tmp_path: Path) -> None:
    path = folder(tmp_path, chat_template=STRIPPING)
    proven = [load_renderer(path, "auto", "mine").append_only["thinking"]]  # type: ignore[union-attr]
    proven.append(load_renderer(path, "auto", "mine", history="template").append_only["thinking"])  # type: ignore[union-attr]
    assert proven == [True, False]


def test_a_library_format_follows_its_template_when_asked_to() -> None:
    """Qwen3 drops the reasoning of earlier turns at a new question, so that question cannot be appended."""
    prompt_and_answer = []
    for history in ("keep", "template"):
        renderer = load_renderer(TOKENIZER, "qwen3", "mine", history=history)  # type: ignore[arg-type]
        prompt = renderer.render([{"role": "user", "content": "one"}], None)
        answer = FastTokenizer(TOKENIZER).encode("<think>\nso\n</think>\n\nthe answer<|im_end|>")
        prompt_and_answer.append(renderer.extend(prompt, answer, [{"role": "user", "content": "two"}], None))
    kept, followed = prompt_and_answer
    assert kept is not None
    assert followed is None


def test_the_models_tutorial_template_renders_as_its_renderer_does() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    rendered = [load_renderer(TOKENIZER, name, "policy").render(messages, None) for name in ("qwen3", "template")]
    assert rendered[0] == rendered[1]


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"of": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}


TWO = [tool("look_up"), tool("count")]
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
HEAD = '<tool_call>\n{"name": "'


@pytest.mark.parametrize(
    ("tools", "name", "forced", "sampled"),
    [
        (TWO, "count", HEAD + 'count", "arguments": ', '{"of": "cats"}}\n</tool_call>'),
        (TWO, None, HEAD, 'count", "arguments": {"of": "cats"}}\n</tool_call>'),
        (TWO[1:], None, HEAD + 'count", "arguments": ', '{"of": "cats"}}\n</tool_call>'),
    ],
)
def test_a_call_is_forced_by_what_the_format_writes_before_it(
    tools: list[dict[str, Any]], name: str | None, forced: str, sampled: str, renderer: LibraryRenderer
) -> None:
    prompt = renderer.render([{"role": "user", "content": "one"}], tools)
    ids = renderer.forced(prompt, tools, name)
    assert ids is not None
    assert renderer.tokenizer.decode(ids) == EMPTY_THOUGHT + forced
    answer = renderer.parse("7", prompt, ids + renderer.encode_behind(sampled), None, "stop", tools)
    assert (answer.content, [call["function"] for call in answer.tool_calls]) == (
        "",
        [{"name": "count", "arguments": '{"of": "cats"}'}],
    )


@pytest.mark.parametrize(
    ("written", "thought"),
    [(EMPTY_THOUGHT, ""), ("<think>\n", "\n</think>\n\n"), ("<think>", "\n\n</think>\n\n"), ("", EMPTY_THOUGHT)],
)
def test_before_a_forced_call_thinking_is_closed(written: str, thought: str, renderer: LibraryRenderer) -> None:
    prompt = renderer.render([{"role": "user", "content": "one"}], TWO) + renderer.encode_behind(written)
    assert renderer.tokenizer.decode(renderer.forced(prompt, TWO, None) or []) == thought + HEAD


def test_calls_are_numbered_by_those_that_are_well_formed(renderer: LibraryRenderer) -> None:
    calls = '<tool_call>{"name": "a", "arguments": {}}</tool_call>', "<tool_call>oh</tool_call>"
    response = renderer.encode_behind(calls[0] + calls[1] + calls[0])
    answer = renderer.parse("7", [], response, None, "stop", TWO)
    assert [call["id"] for call in answer.tool_calls] == ["call_7_0", "call_7_1"]
    assert answer.content == "<tool_call>oh</tool_call>"


def test_reasoning_that_was_cut_is_stripped_as_closed_reasoning_is(renderer: LibraryRenderer) -> None:
    answers = [
        renderer.parse("7", [], renderer.encode_behind(f"<think>\nso it is\n{close}"), None, "length", None).reasoning
        for close in ("", "</think>")
    ]
    assert answers == ["so it is", "so it is"]


KIMI = "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|> "
KIMI += "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"


def test_a_format_that_names_a_call_by_its_id_has_ids_with_names(tmp_path: Path) -> None:
    """Kimi K2 writes of a call its id and no name, so that under an id of ours nobody knew what was called."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    tokenizer.add_special_tokens(KIMI.split())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    renderer = load_renderer(tmp_path, "kimi-k2", "mine")
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("count", "look_up")]
    asked = [{"role": "user", "content": "one"}]
    prompt = renderer.render(asked, tools)
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for number, name in ((4, "count"), (5, "look_up"))
    )
    text = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|><|im_end|>"
    response = renderer.tokenizer.encode(text)
    answer = renderer.parse("7", prompt, response, None, "stop", tools)
    assert [call["id"] for call in answer.tool_calls] == ["call_7_0", "call_7_1"]
    results = [{"role": "tool", "tool_call_id": f"call_7_{i}", "content": str(i)} for i in (0, 1)]
    added = renderer.tokenizer.decode(renderer.extend(prompt, response, results, tools) or [])
    assert added.index("## Return of functions.count:4\n0") < added.index("## Return of functions.look_up:5\n1")
    anew = renderer.tokenizer.decode(renderer.render([*asked, answer.message(), *results, *asked], tools))
    for number, name in enumerate(("count", "look_up")):
        assert f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>" in anew
        assert f"## Return of functions.{name}:{number}\n{number}" in anew
    assert "call_7" not in anew
    # A client may name the calls of each turn alike.
    once = answer.message() | {"tool_calls": [answer.tool_calls[0] | {"id": "a"}]}
    again = answer.message() | {"tool_calls": [answer.tool_calls[1] | {"id": "a"}]}
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    talk = [*asked, once, result, again, result, *asked]
    alike = renderer.tokenizer.decode(renderer.render(talk, tools))
    assert re.findall(r"functions\.\w+:\d", alike) == ["functions.count:0"] * 2 + ["functions.look_up:1"] * 2
    deep = renderer.tokenizer.encode(text.replace("{}", '{"a":' * 3000))
    assert renderer.extend(prompt, deep, results, tools) is not None


@pytest.mark.parametrize("template", [None, QWEN3])
def test_a_call_without_arguments_is_one_with_none(tmp_path: Path, template: str | None) -> None:
    renderer = load_renderer(folder(tmp_path, chat_template=QWEN3), "template" if template else "qwen3", "mine")
    question = {"role": "user", "content": "one"}
    for arguments in ("", " ", "{}"):
        call = {"id": "a", "type": "function", "function": {"name": "count", "arguments": arguments}}
        messages = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
        assert '{"name": "count", "arguments": {}}' in renderer.tokenizer.decode(renderer.whole(messages, None))
