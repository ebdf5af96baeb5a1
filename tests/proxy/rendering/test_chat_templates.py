"""A model's own chat template: rendered as transformers does, continued where that is proven, parsed, refused early."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering import chat_templates
from lightning_rl_proxy.rendering.chat_templates import TemplateRenderer, read_template
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import SECRET, TOKENIZER, MemoryLedger, ScriptedEngine, Served, listening

Message = dict[str, Any]

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

HEADERS = """{{- bos_token }}{% for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

HERMES = """{%- if tools %}
{{- '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' and not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# Reasoning is shown in the turns behind the last question only, and always opened for the last one.
STRIPS_THINKING = HERMES.replace(
    "{%- for message in messages %}",
    "{%- set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}{% set ns.last = m %}{% endfor %}"
    "{%- set asked = namespace(index=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set asked.index = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for message in messages %}",
    1,
).replace(
    "{{- '<|im_start|>assistant\\n' + message.content }}",
    "{%- set said = message.content if loop.index0 > asked.index else message.content.split('</think>')[-1] %}"
    "{{- '<|im_start|>assistant\\n' }}{% if loop.last and '</think>' not in said %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{- said.lstrip('\\n') if loop.index0 <= asked.index else said }}",
)

# A prompt that opens the reasoning.
OPENS = HERMES.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")

NO_SYSTEM = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<|start_header_id|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- message.content | trim + '<|eot_id|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>model\\n' }}{% endif %}"""

NORMALISES = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.strip().split() | join(' ') }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The tools, and the system text, stand before the last question: every turn rewrites the one before it.
LAST_QUESTION = """{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}
{{- '[INST] ' }}{% if loop.last and messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
{%- if loop.last and tools %}{{- tools | tojson }}{% endif %}{{- m.content + ' [/INST]' }}
{%- else %}{{- ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""

TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "hermes": HERMES,
    "strips_thinking": STRIPS_THINKING,
    "no_system": NO_SYSTEM,
    "normalises": NORMALISES,
    "last_question": LAST_QUESTION,
}
CALLS = {"tool", "after_tool", "parallel_tools", "thinking_tool"}
ALL = {"user", "system", "tools", "thinking", "empty", "unicode"} | CALLS
TOOLS = [{"type": "function", "function": {"name": "count", "description": "<b> & 'é'", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "count", "arguments": {"of": "Bäume"}}\n</tool_call>'

Load = Callable[..., TemplateRenderer]


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tutorial's tokenizer with the special tokens of the other formats."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def folder(tmp_path: Path, tokenizer_json: Path) -> Callable[[Any], Path]:
    def write(template: Any, **config: Any) -> Path:
        (tmp_path / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
        eos = "</s>" if template == LAST_QUESTION else "<|im_end|>"
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos} | config
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        return tmp_path

    return write


@pytest.fixture
def load(folder: Callable[..., Path]) -> Load:
    def loaded(template: Any, history: Any = "keep", **config: Any) -> TemplateRenderer:
        path = folder(template, **config)
        tokenizer = FastTokenizer(path)
        texts = read_template(path, tokenizer.config)
        assert texts is not None
        return TemplateRenderer(path, tokenizer, texts, model="mine", history=history)

    return loaded


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def text(renderer: TemplateRenderer, ids: list[int]) -> str:
    return renderer.tokenizer.decode(ids)


def ids(renderer: TemplateRenderer, answer: str) -> list[int]:
    return renderer.tokenizer.encode(answer)


def with_objects(messages: list[Message]) -> list[Message]:
    """As people pass calls to transformers: with their arguments as objects."""
    copied = json.loads(json.dumps(messages))
    for call in [call for message in copied for call in message.get("tool_calls", [])]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return copied


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_renders_what_transformers_renders(name: str, load: Load, folder: Callable[..., Path]) -> None:
    renderer = load(TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(folder(TEMPLATES[name]))
    compared = 0
    for probe in (probe for probes in chat_templates._probes().values() for probe in probes):
        for messages in (probe.history, [*probe.history, probe.answer, *probe.then]):
            tools = None if probe.tools is None else list(probe.tools)
            asked = {"conversation": with_objects(messages), "tools": tools, "add_generation_prompt": True}
            try:
                expected = theirs.apply_chat_template(**asked, tokenize=False)
            except chat_templates.TEMPLATE_FAILURES:
                with pytest.raises(GatewayError):
                    renderer.render(messages, tools)
                continue
            assert renderer._template.text(messages, tools) == expected
            assert renderer.render(messages, tools) == theirs.apply_chat_template(**asked, return_dict=False)
            compared += 1
    assert compared >= 8


def test_the_environment_is_that_of_transformers(load: Load, folder: Callable[..., Path]) -> None:
    template = (
        "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{{ m | tojson(indent=1, sort_keys=true) }}{{ m.thinking }}{{ m.reasoning_content }}"
        "{{ m.name is defined }}{% endfor %}\n  {% if true %}\n x {% endif %}\n{{ ns.n }}{{ strftime_now('%Y') }}"
        "{{ documents is none }}{{ tools is none }}{{ dict(a=1) | tojson }}{{ pad_token }}{{ cls_token is defined }}"
    )
    renderer = load(template, pad_token={"content": "<|endoftext|>"})
    theirs = transformers.AutoTokenizer.from_pretrained(folder(template, pad_token="<|endoftext|>"))
    messages = [said("user", "<é>", name=None), said("assistant", "a", reasoning="r"), said("user", "b")]
    assert renderer._template.text(messages, None) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    "reach", ["{% set ns = namespace(_x=1) %}", "{% set ns = namespace() %}{% set ns._x = 1 %}", "{{ ''.__class__ }}"]
)
def test_a_template_cannot_leave_the_sandbox(reach: str, load: Load) -> None:
    with pytest.raises(ValueError, match="cannot be used: SecurityError"):
        load(reach + "{{ messages[0].content.__class__.__mro__ }}")


def test_a_template_with_tools_of_its_own_is_used_where_there_are_tools(load: Load) -> None:
    renderer = load([{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HERMES}])
    assert "count" in text(renderer, renderer.render([said("user", "a")], TOOLS))
    assert "count" not in text(renderer, renderer.render([said("user", "a")], None))


def test_the_template_file_comes_before_the_configuration(load: Load, folder: Callable[..., Path]) -> None:
    (folder(CHATML) / "chat_template.jinja").write_text(HEADERS)
    assert text(load(CHATML), load(CHATML).render([said("user", "a")], None)).startswith("<s><|start_header_id|>user")


@pytest.mark.parametrize(
    ("template", "history", "unproven"),
    [
        ("chatml", "keep", set()),
        ("chatml", "template", set()),
        ("headers", "keep", set()),
        ("hermes", "template", set()),
        ("strips_thinking", "keep", set()),
        ("strips_thinking", "template", {"thinking"}),
        ("no_system", "keep", {"system"} | CALLS),
        ("normalises", "keep", set()),
        ("last_question", "keep", {"system", "tools"} | CALLS),
    ],
)
def test_the_probe_says_where_it_is_append_only(template: str, history: str, unproven: set[str], load: Load) -> None:
    renderer = load(TEMPLATES[template], history)
    assert set(renderer.append_only) == ALL
    assert {name for name, proven in renderer.append_only.items() if not proven} == unproven


TURNS: list[tuple[str, list[Message], Message, list[Message], Any]] = [
    ("plain", [said("user", "one")], said("assistant", "1"), [said("user", "two")], None),
    ("system", [said("system", "s"), said("user", "one")], said("assistant", "1"), [said("user", "two")], None),
    ("unicode", [said("user", "Bäume?")], said("assistant", "Zwölf 🌲"), [said("user", "木 →")], None),
    ("empty", [said("user", "one")], said("assistant", ""), [said("user", "two")], None),
    ("spaces", [said("user", "one")], said("assistant", "1"), [said("user", " two \n")], None),
    ("several", [said("user", "one")], said("assistant", "1"), [said("user", "a"), said("user", "b")], None),
    ("tools", [said("user", "one")], said("assistant", "1"), [said("user", "two")], TOOLS),
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("turn", TURNS, ids=[turn[0] for turn in TURNS])
@pytest.mark.parametrize("cut", [False, True], ids=["closed", "cut"])
def test_a_continuation_is_the_text_of_the_template_or_none(template: str, turn: Any, cut: bool, load: Load) -> None:
    renderer = load(TEMPLATES[template])
    _, history, answer, then, tools = turn
    try:
        prompt, longer = renderer.render(history, tools), renderer.render([*history, answer, *then], tools)
    except GatewayError:
        return  # what it refuses to render, nobody continues
    response = ids(renderer, answer["content"]) + ([] if cut else renderer.stop_token_ids[-1:])
    if template == "last_question":
        response = ids(renderer, " " + answer["content"]) + ([] if cut else renderer.stop_token_ids[-1:])
    added = renderer.extend(prompt, response, then, tools)
    moved = template == "last_question"  # it moves the system text, and no ids tell whether there is one
    assert (added is None) == moved
    if added is not None:
        assert text(renderer, prompt + response + added) == text(renderer, longer)


@pytest.mark.parametrize("results", [["3"], ["3", "4"]])
@pytest.mark.parametrize("template", ["hermes", "strips_thinking"])
def test_results_of_tools_are_added_behind_the_sampled_call(template: str, results: list[str], load: Load) -> None:
    renderer = load(TEMPLATES[template])
    history = [said("user", "how many?")]
    prompt = renderer.render(history, TOOLS)
    response = ids(renderer, "\n".join([CALL] * len(results)) + "<|im_end|>")
    answer = renderer.parse("c", prompt, response, None, "stop", TOOLS).message()
    then = [
        said("tool", result, tool_call_id=call["id"])
        for result, call in zip(results, answer["tool_calls"], strict=True)
    ]
    added = renderer.extend(prompt, response, then, TOOLS)
    assert added is not None
    longer = renderer.render([*history, answer, *then], TOOLS)
    assert text(renderer, prompt + response + added) == text(renderer, longer)


def test_a_closer_that_was_cut_off_comes_first_and_is_never_doubled(load: Load) -> None:
    renderer = load(CHATML)
    prompt, then = renderer.render([said("user", "one")], None), [said("user", "two")]
    [end], [other] = ids(renderer, "<|im_end|>"), ids(renderer, "<|endoftext|>")
    cut = renderer.extend(prompt, ids(renderer, "an ans"), then, None)
    closed = renderer.extend(prompt, [*ids(renderer, "an answer"), end], then, None)
    assert cut is not None
    assert cut == [end, *(closed or [])]
    assert renderer.extend(prompt, [], then, None) == cut
    with_newline = renderer.extend(prompt, [*ids(renderer, "an answer"), end, *ids(renderer, "\n")], then, None)
    assert with_newline == (closed or [])[1:]
    renderer.stop_token_ids.append(other)
    assert renderer.extend(prompt, [*ids(renderer, "an answer"), other], then, None) == closed


def test_a_closer_written_only_between_turns_is_not_doubled(load: Load) -> None:
    between = CHATML.replace("<|im_end|>", "{% if not loop.last or message.role == 'user' %}<|im_end|>{% endif %}")
    renderer = load(between)
    prompt, then = renderer.render([said("user", "one")], None), [said("user", "two")]
    for answer in ("1", "1<|im_end|>"):
        added = renderer.extend(prompt, ids(renderer, answer), then, None) or []
        assert text(renderer, prompt + ids(renderer, answer) + added).count("<|im_end|>") == 3


def test_what_only_ends_a_conversation_is_no_closer(load: Load) -> None:
    renderer = load(CHATML + "{% if not add_generation_prompt %}the end{% endif %}")
    assert all(renderer.append_only.values())


def test_reasoning_before_a_call_follows_the_template_too(load: Load) -> None:
    strips = HERMES.replace("assistant\\n' + message.content", "assistant\\n' + message.content.split('</think>')[-1]")
    response = "<think>\nI count.\n</think>\n\n" + CALL + "<|im_end|>"
    for history in ("keep", "template"):
        renderer = load(strips, history)
        assert renderer.append_only["tool"]
        prompt, result = renderer.render([said("user", "one")], TOOLS), [said("tool", "3", tool_call_id="x")]
        assert (renderer.extend(prompt, ids(renderer, response), result, TOOLS) is None) == (history == "template")


def test_results_that_vanish_from_the_history_are_rendered_anew(load: Load) -> None:
    vanish = CHATML.replace("in messages", "in messages if message.role != 'tool' or messages[-1].role == 'tool'")
    renderer = load(vanish)
    assert [name for name, proven in renderer.append_only.items() if not proven] == ["after_tool"]
    prompt, response = renderer.render([said("user", "one")], TOOLS), ids(renderer, "1<|im_end|>")
    assert renderer.extend(prompt, response, [said("user", "two")], TOOLS) is None
    assert renderer.extend(prompt, response, [said("user", "two")], None) is not None


def test_a_template_that_rewrites_letters_is_found_out(load: Load) -> None:
    renderer = load(CHATML.replace("message.content", "message.content.replace('ö', 'oe')"))
    assert [name for name, proven in renderer.append_only.items() if not proven] == ["unicode"]
    prompt, response = renderer.render([said("user", "one")], None), ids(renderer, "1<|im_end|>")
    assert renderer.extend(prompt, response, [said("user", "schön")], None) is None
    assert renderer.extend(prompt, ids(renderer, "zwölf<|im_end|>"), [said("user", "two")], None) is None
    assert renderer.extend(prompt, response, [said("user", "two")], None) is not None


def test_a_closer_of_plain_text_is_not_doubled_either(load: Load) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n###\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    renderer = load(template.replace("+ ': '", "+ ':'"))
    prompt, then = renderer.render([said("user", "one")], None), [said("user", "two")]
    for answer in ("1", "1\n###\n"):
        added = renderer.extend(prompt, ids(renderer, answer), then, None)
        assert added is not None
        assert text(renderer, prompt + ids(renderer, answer) + added) == (
            "user:one\n###\nassistant:1\n###\nuser:two\n###\nassistant:"
        )


THOUGHT = "<think>\nI count.\n</think>\n\n12<|im_end|>"


def test_kept_reasoning_stays_in_the_context_though_the_template_strips_it(load: Load) -> None:
    renderer = load(STRIPS_THINKING, "keep")
    prompt = renderer.render([said("user", "one")], None)
    added = renderer.extend(prompt, ids(renderer, THOUGHT), [said("user", "two")], None)
    assert added is not None
    assert text(renderer, added) == "\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"


def test_a_history_like_the_templates_renders_anew_what_holds_reasoning_and_nothing_else(load: Load) -> None:
    renderer = load(STRIPS_THINKING, "template")
    prompt, plain = renderer.render([said("user", "one")], None), ids(renderer, "12<|im_end|>")
    question, result = [said("user", "two")], [said("tool", "12", tool_call_id="x")]
    assert renderer.extend(prompt, plain, question, None) is not None
    assert renderer.extend(prompt, ids(renderer, THOUGHT), question, None) is None
    earlier = prompt + ids(renderer, THOUGHT) + ids(renderer, "\n<|im_start|>assistant\n")
    assert renderer.extend(earlier, plain, question, None) is None
    assert renderer.extend(prompt, ids(renderer, "<think>\nI cou"), question, None) is None
    assert renderer.extend(prompt, ids(renderer, THOUGHT), result, TOOLS) is not None


def test_reasoning_that_the_prompt_opened_is_kept_or_rendered_anew(load: Load) -> None:
    opens = CHATML[: -len("{% endif %}")] + "<think>\n{% endif %}"
    response = None
    for history in ("keep", "template"):
        renderer = load(opens, history)
        prompt = renderer.render([said("user", "one")], None)
        response = ids(renderer, "I count.\n</think>\n\n12<|im_end|>")
        added = renderer.extend(prompt, response, [said("user", "two")], None)
        assert renderer.append_only["user"] == (history == "keep")
        assert (added is not None) == (history == "keep")
        answer = renderer.parse("c", prompt, response, None, "stop", None)
        assert (answer.reasoning, answer.content) == ("I count.", "12")
        cut = renderer.parse("c", prompt, ids(renderer, "I count"), None, "length", None)
        assert (cut.reasoning, cut.content) == ("I count", "")


def test_messages_that_change_what_stands_before_are_no_continuation(load: Load) -> None:
    hoists = CHATML.replace(
        "{% for message in messages %}",
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for message in messages if message.role != 'system' %}",
    )
    renderer = load(hoists)
    prompt, response = renderer.render([said("user", "one")], None), ids(renderer, "1<|im_end|>")
    assert renderer.append_only["system"]
    assert renderer.extend(prompt, response, [said("system", "s"), said("user", "two")], None) is None
    assert renderer.extend(prompt, response, [said("assistant", "not sampled"), said("user", "two")], None) is None
    assert renderer.extend(prompt, response, [said("user", "two")], None) is not None


def test_a_result_written_with_the_name_of_its_call_is_rendered_anew(load: Load) -> None:
    names = HERMES.replace(
        "'\\n<tool_response>\\n' +", "'\\n<tool_response>' + messages[loop.index0 - 1].tool_calls[0].function.name +"
    )
    renderer = load(names)
    assert not renderer.append_only["tool"]
    prompt = renderer.render([said("user", "one")], TOOLS)
    result = [said("tool", "3", tool_call_id="x", name="count")]
    assert renderer.extend(prompt, ids(renderer, CALL + "<|im_end|>"), result, TOOLS) is None


def test_a_second_result_written_with_the_name_of_its_call_is_rendered_anew(load: Load) -> None:
    second = (
        "(messages[loop.index0 - 2].tool_calls[1].function.name if messages[loop.index0 - 1].role == 'tool' else '')"
    )
    renderer = load(HERMES.replace("'\\n<tool_response>\\n' +", f"'\\n<tool_response>' + {second} +"))
    assert [name for name, proven in renderer.append_only.items() if not proven] == ["parallel_tools"]
    prompt, results = renderer.render([said("user", "one")], TOOLS), [said("tool", "3", tool_call_id=id) for id in "xy"]
    assert renderer.extend(prompt, ids(renderer, CALL + "<|im_end|>"), results[:1], TOOLS) is not None
    assert renderer.extend(prompt, ids(renderer, CALL + CALL + "<|im_end|>"), results, TOOLS) is None


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_templates_read(name: str, load: Load) -> None:
    renderer = load("{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}{% endfor %}")
    assert renderer._template.text([said("assistant", "a", **{name: "so"})], None) == "so|so"


def test_a_template_that_numbers_its_turns_or_drops_empty_ones_is_found_out(load: Load) -> None:
    number = "{{ message.role }}{{ loop.index if message.role == 'user' }}"
    numbered = load(CHATML.replace("{{ message.role }}", number))
    assert not numbered.append_only["user"]
    dropping = load(CHATML.replace("in messages", "in messages if message.content"))
    assert {name for name, proven in dropping.append_only.items() if not proven} >= {"empty", "tool"}
    prompt, then = dropping.render([said("user", "one")], None), [said("user", "two")]
    for blank in ("", " \n"):
        assert dropping.extend(prompt, ids(dropping, f"{blank}<|im_end|>"), then, None) is None
    assert dropping.extend(prompt, ids(dropping, "1<|im_end|>"), then, None) is not None


def test_one_warning_names_model_situations_and_consequence(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    load(CHATML)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        load(STRIPS_THINKING, "template")
        load(NO_SYSTEM)
    assert [record.message for record in caplog.records] == [
        "the chat template of model mine is not append-only for thinking: there each turn is rendered anew, as a fork",
        caplog.records[1].message,
    ]
    assert "model mine refuses system" in caplog.records[1].message
    assert "answered 400" in caplog.records[1].message


def test_tools_that_a_template_does_not_write_are_told_of_once(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    silent, writing = load(CHATML), load(HERMES)
    with caplog.at_level(logging.WARNING):
        for renderer in (writing, silent, silent):
            renderer.render([said("user", "one")], TOOLS)
    [record] = caplog.records
    assert "model mine does not write tools: it never sees those that agents send" in record.message


def test_calls_that_are_written_in_a_form_that_is_not_read_are_told_of(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    unread = load(HERMES.replace("<tool_call>", "[CALL]").replace("</tool_call>", "[/CALL]"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            unread.render([said("user", "one")], TOOLS)
    [record] = caplog.records
    assert "model mine writes tool calls in a form that is not read here" in record.message


def test_a_template_that_writes_tools_and_no_calls_is_none_that_writes_them_in_another_form(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    load("{{ tools | tojson if tools }}" + CHATML).render([said("user", "one")], TOOLS)
    assert caplog.records == []


def test_an_unclosed_call_is_read_once(load: Load) -> None:
    """Not again and again from each of its white spaces on, which took 40 s for 4,000 of them."""
    renderer = load(HERMES)
    text = "so: <tool_call>" + "\n " * 20_000
    answer = renderer.parse("c", [], ids(renderer, text), None, "length", TOOLS)
    assert (answer.content, answer.tool_calls) == (text, [])


def test_arguments_are_the_text_they_came_as_where_a_template_puts_texts_together(load: Load) -> None:
    renderer = load(HERMES.replace("call.function.arguments | tojson +", "call.function.arguments +"))
    call = {"id": "x", "type": "function", "function": {"name": "count", "arguments": '{"of":  1}'}}
    messages = [said("user", "one"), said("assistant", "", tool_calls=[call]), said("tool", "3", tool_call_id="x")]
    assert '"arguments": {"of":  1}}' in text(renderer, renderer.render(messages, TOOLS))
    assert renderer.append_only["tool"]


def test_a_template_that_opens_only_the_first_of_all_results_is_found_out(load: Load) -> None:
    first = "{%- if messages | selectattr('role', 'equalto', 'tool') | list | length == 1 %}{{- 'RESULTS' }}{% endif %}"
    renderer = load(HERMES.replace("{{- '\\n<tool_response>", first + "{{- '\\n<tool_response>"))
    assert not renderer.append_only["tool"]
    assert renderer.append_only["user"]


def test_what_a_template_refuses_is_answered_400(load: Load) -> None:
    with pytest.raises(GatewayError, match="System role not supported") as refused:
        load(NO_SYSTEM).render([said("system", "s"), said("user", "one")], None)
    assert refused.value.status == 400


def test_calls_and_reasoning_are_taken_out_of_the_text(load: Load) -> None:
    renderer = load(HERMES)
    second = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
    response = ids(renderer, f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{second}<|im_end|>")
    answer = renderer.parse("7", [], response, [0.0] * len(response), "stop", TOOLS)
    assert (answer.reasoning, answer.content) == ("hm", "I look.")
    assert [call["id"] for call in answer.tool_calls] == ["call_7_0", "call_7_1"]
    assert [call["function"]["name"] for call in answer.tool_calls] == ["count", "look_up"]
    assert json.loads(answer.tool_calls[0]["function"]["arguments"]) == {"of": "Bäume"}
    assert (answer.token_ids, answer.output_tokens) == (response, len(response))


@pytest.mark.parametrize("name", ["look_up", None])
def test_a_call_is_forced_where_that_is_proven(name: str | None, load: Load) -> None:
    tools = [chat_templates._tool("look_up", "Looks."), chat_templates._tool("count", "Counts.")]
    named = {"look_up": 'look_up", "arguments": ', None: ""}[name]
    for template, thought in ((HERMES, ""), (STRIPS_THINKING, "<think>\n\n</think>\n\n"), (OPENS, "\n</think>\n\n")):
        renderer = load(template)
        prompt = renderer.render([said("user", "one")], tools)
        assert text(renderer, renderer.forced(prompt, tools, name) or []) == f'{thought}<tool_call>\n{{"name": "{named}'


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        NO_SYSTEM,
        HERMES.replace("<tool_call>", "[CALL]"),
        HERMES.replace("{%- for call in message.tool_calls or [] %}", "{%- for call in message.tool_calls.nothing %}"),
    ],
    ids=["no_calls", "no_assistant_calls", "calls_that_are_not_understood", "refuses"],
)
def test_a_call_that_could_not_be_read_back_is_not_forced(template: str, load: Load) -> None:
    renderer = load(template)
    prompt = renderer.render([said("user", "one")], TOOLS)
    assert renderer.forced(prompt, TOOLS, None) is None
    assert renderer.forced(prompt, TOOLS, "count") is None


def test_reasoning_that_was_never_opened_is_text(load: Load) -> None:
    renderer = load(HERMES)
    answer = renderer.parse("c", [], ids(renderer, " a</think>b "), None, "stop", None)
    assert (answer.reasoning, answer.content) == (None, " a</think>b ")


def test_white_space_before_the_text_stays_whether_or_not_calls_follow(load: Load) -> None:
    renderer = load(HERMES)
    contents = [
        renderer.parse("c", [], ids(renderer, f"\n  I look. {call}"), None, "stop", TOOLS).content
        for call in ("", CALL)
    ]
    assert contents == ["\n  I look. ", "\n  I look."]


@pytest.mark.parametrize(
    "malformed",
    [
        "<tool_call>{nonsense}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>["count"]</tool_call>',
        '<tool_call>{"name": "count", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "count"',
        f'<tool_call>{{"name": "count", "arguments": {{"x": {"[" * 3000 + "]" * 3000}}}}}</tool_call>',
        f'<tool_call>{{"name": "count", "arguments": {{"x": {"9" * 5000}}}}}</tool_call>',
    ],
    ids=lambda text: text[:40],
)
def test_a_malformed_call_stays_visible(malformed: str, load: Load) -> None:
    renderer = load(HERMES)
    answer = renderer.parse("c", [], ids(renderer, malformed + "<|im_end|>"), None, "stop", TOOLS)
    assert (answer.content, answer.tool_calls) == (malformed, [])


def test_content_is_the_text_without_special_tokens(load: Load) -> None:
    renderer = load(HEADERS)
    answer = renderer.parse("c", [], ids(renderer, "  two  <s>words <|eot_id|>"), None, "stop", None)
    assert (answer.content, answer.reasoning) == ("  two  words ", None)


def test_stop_tokens_come_from_all_that_name_them(load: Load, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [994, 996]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 995}')
    renderer = load(HEADERS)
    assert renderer.stop_token_ids == [996, 994, 995, ids(renderer, "<|eot_id|>")[0]]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}", "TemplateSyntaxError, line 1: Unexpected end of template"),
        ("{{ raise_exception('no\nusers') }}", "TemplateError: no users"),
        ("{{ messages[0].content.nothing.here }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ([{"name": "rag", "template": CHATML}], "none is named 'default'"),
        (7, "neither a text nor a list"),
    ],
)
def test_a_broken_template_is_refused_at_start_naming_folder_and_reason(
    template: Any, reason: str, load: Load, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="cannot be used") as broken:
        load(template)
    assert str(broken.value).startswith(f"the chat template of {tmp_path} cannot be used: ")
    assert reason in str(broken.value)
    assert "\n" not in str(broken.value)


def test_what_stands_in_an_answers_turn_is_the_answer_alone(load: Load) -> None:
    adds = CHATML.replace("{{ message.content }}", "{{ 'Said: ' if message.role == 'assistant' }}{{ message.content }}")
    assert not load(adds).append_only["user"]
    thinks = CHATML.replace(
        "{{ message.content }}", "{{ '<think></think>' if message.role == 'assistant' }}{{ message.content }}"
    )
    assert load(thinks).append_only["user"]
    assert not load(thinks, "template").append_only["user"]


def test_special_tokens_come_from_their_own_file_too(load: Load, tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"sep_token": {"content": "SEP"}, "bos_token": "other"}')
    assert load("{{ bos_token + sep_token }}")._template.text([], None) == "<s>SEP"


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A folder with a tokenizer of single letters that writes a space before a text, and knows no markup."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789:#<>.?[]/AINSTQERPLCHODUFB", "\n", "<unk>", "</s>"]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return tmp_path


def test_a_tokenizer_that_writes_a_space_first_writes_none_inside(words: Path) -> None:
    template = "{% for m in messages %}{{ m.content + '#' }}{% endfor %}"
    renderer = TemplateRenderer(words, FastTokenizer(words), {"default": template}, model="mine")
    prompt, longer = (renderer.render(m, None) for m in ([said("user", "a")], [said("user", t) for t in "abc"]))
    response = renderer.encode_behind("b")
    assert prompt + response + (renderer.extend(prompt, response, [said("user", "c")], None) or []) == longer


def test_a_model_that_knows_no_reasoning_says_what_it_says(words: Path) -> None:
    template = "{% for m in messages %}{{ m.content + '#' }}{% endfor %}"
    renderer = TemplateRenderer(words, FastTokenizer(words), {"default": template}, model="mine")
    answer = renderer.parse("c", [], ids(renderer, "a</think>b"), None, "stop", None)
    assert (answer.reasoning, answer.content) == (None, "a</think>b")


def test_reasoning_is_found_where_its_marks_are_no_tokens(words: Path) -> None:
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1].strip() + '#' }}{% endfor %}"
    tokenizer = FastTokenizer(words)
    renderer = TemplateRenderer(words, tokenizer, {"default": template}, model="mine", history="template")
    prompt, then = renderer.render([said("user", "a")], None), [said("user", "c")]
    assert renderer.extend(prompt, ids(renderer, "b"), then, None) is not None
    assert renderer.extend(prompt, ids(renderer, "<think>a</think>b"), then, None) is None


@pytest.fixture
def served_by_template(load: Load, tmp_path: Path) -> Iterator[tuple[Served, TemplateRenderer]]:
    renderer = load(STRIPS_THINKING)
    ledger, engine, router = MemoryLedger(), ScriptedEngine(renderer.tokenizer), Router("policy")
    router.register(engine)
    gateway = Gateway(ledger=ledger, secret=SECRET, journal=tmp_path / "journal", renderer=renderer, router=router)
    with listening(gateway) as (url, loop):
        yield Served(url, gateway, ledger, engine, loop), renderer


def test_three_turns_through_the_gateway_are_one_row_of_the_templates_text(
    served_by_template: tuple[Served, TemplateRenderer],
) -> None:
    served, renderer = served_by_template
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)
    script = ["I look.\n" + CALL, "  12  trees", "bye"]
    served.engine.script.extend(script)
    messages: list[Any] = [said("user", "how many?")]
    seen: list[list[Message]] = []
    for then in (lambda call: said("tool", "12", tool_call_id=call), lambda _: said("user", "thanks"), None):
        seen.append(list(messages))
        answer = sdk.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if then is not None:
            calls = answer.tool_calls or []
            messages += [answer.model_dump(exclude_none=True), then(calls[0].id if calls else None)]
    served.seal()
    one, two, three = served.ledger.calls()
    assert (one.parent_id, two.parent_id, three.parent_id) == (None, one.call_id, two.call_id)
    context: list[int] = []
    for call, conversation, prompt in zip((one, two, three), seen, served.engine.prompts, strict=True):
        assert context + call.prompt_ids == prompt
        assert text(renderer, prompt) == renderer._template.text(conversation, TOOLS)
        context = prompt + call.response_ids
    assert [text(renderer, call.response_ids) for call in (one, two, three)] == [f"{a}<|im_end|>" for a in script]
