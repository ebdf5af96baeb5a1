"""Tool calls are read in the form in which a model's own chat template writes them, whole and as they come."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering.call_forms import FORMS, CallForm, form_by_tokens
from lightning_rl_proxy.rendering.chat_templates import TemplateRenderer, read_template
from lightning_rl_proxy.rendering.parsing import AnswerEnd, AnswerParser
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import SECRET, TOKENIZER, MemoryLedger, ScriptedEngine, Served, listening
from tests.random_examples import examples

FRAME = """{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|im_start|>user\\n' }}RESULT{{- message.content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if message.tool_calls %}CALLS{% endif %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
EACH = "{%- for call in message.tool_calls %}{{- 'BETWEEN' if not loop.first }}ONE{% endfor %}"
NAME_AND = """{{- '{"name": "' + call.function.name + '", "KEY": ' + call.function.arguments | tojson + '}' }}"""
FUNCTION = """{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + value | string + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}"""
NAMED = "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}"
NINE = "{% if ID | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
WITH_ID = NINE.replace("ID", "call.id") + """{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}"""


def calls(one: str, opening: str = "", between: str = "", closing: str = "", key: str = "arguments") -> str:
    """The part of a template that writes calls."""
    each = EACH.replace("ONE", one.replace("KEY", key)).replace("BETWEEN", between)
    return f"{{{{- '{opening}' }}}}{each}{{{{- '{closing}' }}}}"


A, B = '"name": "count", "arguments": {"of": "Bäume"}', '"name": "look_up", "arguments": {"n": 2}'
WRITTEN = {  # what writes calls in a template, and an answer of two calls
    "hermes": (
        calls("{{- '<tool_call>' }}" + NAME_AND + "{{- '</tool_call>' }}"),
        f"<tool_call>\n{{{A}}}\n</tool_call>\n<tool_call>{{{B}}}</tool_call>",
    ),
    "functions": (
        calls(FUNCTION),
        "\n<tool_call>\n<function=count>\n<parameter=of>\nBäume\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=look_up>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
    "phi": (
        calls(NAME_AND, "<|tool_call|>[", ", ", "]<|/tool_call|>"),
        f"<|tool_call|>[{{{A}}}, {{{B}}}]<|/tool_call|>",
    ),
    "nemotron": (calls(NAME_AND, "<TOOLCALL>[", ", ", "]</TOOLCALL>"), f"<TOOLCALL>[{{{A}}}, {{{B}}}]</TOOLCALL>"),
    "mistral": (
        calls(WITH_ID, "[TOOL_CALLS] [", ", ", "]"),
        f'[TOOL_CALLS] [{{{A}, "id": "aB3456789"}}, {{{B}, "id": "bB3456789"}}]',
    ),
    "mistral_named": (calls(NAMED), '[TOOL_CALLS]count[ARGS]{"of": "Bäume"}[TOOL_CALLS]look_up[ARGS]{"n": 2}'),
    "mistral_ids": (
        calls(NAMED.replace("[ARGS]", "[CALL_ID]' + call.id + '[ARGS]")),
        '[TOOL_CALLS]count[CALL_ID]aB3456789[ARGS]{"of": "Bäume"}[TOOL_CALLS]look_up[CALL_ID]bB3456789[ARGS]{"n": 2}',
    ),
    "granite": (calls(NAME_AND, "<|tool_call|>[", ", ", "]"), f"<|tool_call|>[{{{A}}}, {{{B}}}]"),
    "llama": (
        calls(NAME_AND, "", "; ", key="parameters"),
        '{"name": "count", "parameters": {"of": "Bäume"}}; {"name": "look_up", "parameters": {"n": 2}}',
    ),
}
ALONE = {  # its template refuses what the answer says
    "llama_alone": (
        "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}" + WRITTEN["llama"][0],
        WRITTEN["llama"][1],
    ),
    "no_results": WRITTEN["hermes"],
}
RESULTS = {
    "no_results": "{{ raise_exception('no results') }}",
    "mistral_ids": "{{- message.tool_call_id + ' ' }}",
    "mistral": NINE.replace("ID", "message.tool_call_id") + "{{- message.tool_call_id + ' ' }}",
}
MARKS = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>", "<|/tool_call|>", "<TOOLCALL>", "</TOOLCALL>"]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}


TOOLS = [tool("count", of={"type": "string"}), tool("look_up", n={"type": "integer"})]
EXPECTED = [("count", {"of": "Bäume"}), ("look_up", {"n": 2})]


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TemplateRenderer]:
    """Renderers over these forms, each made once; the marks are tokens of their own, or (`special` false) text."""
    made: dict[tuple[str, bool], TemplateRenderer] = {}

    def loaded(name: str, special: bool = True) -> TemplateRenderer:
        if (name, special) not in made:
            folder = tmp_path_factory.mktemp("model")
            tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
            tokenizer.add_special_tokens(MARKS if special else [])
            tokenizer.save(str(folder / "tokenizer.json"))
            template = FRAME.replace("CALLS", (WRITTEN | ALONE)[name][0]).replace("RESULT", RESULTS.get(name, ""))
            config = {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": template}
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            fast = FastTokenizer(folder)
            texts = read_template(folder, fast.config)
            assert texts is not None
            made[name, special] = TemplateRenderer(folder, fast, texts, model="mine")
        return made[name, special]

    return loaded


def called(answer: Any) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.tool_calls]


def parsed(renderer: TemplateRenderer, text: str, tools: Sequence[dict[str, Any]] | None = TOOLS) -> Any:
    return renderer.parse("7", [], renderer.tokenizer.encode(text + "<|im_end|>"), None, "stop", tools)


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_in_the_form_that_the_template_writes(
    name: str, special: bool, load: Callable[..., TemplateRenderer], caplog: pytest.LogCaptureFixture
) -> None:
    renderer = load(name, special)
    before = "" if name == "llama" else "I look.\n"
    answer = parsed(renderer, before + WRITTEN[name][1])
    assert (called(answer), answer.content) == (EXPECTED, before.strip())
    assert [call["id"] for call in answer.tool_calls] == ["call_7_0", "call_7_1"]
    without = parsed(renderer, before + WRITTEN[name][1], None)
    assert without.tool_calls == []
    renderer.render([{"role": "user", "content": "one"}], TOOLS)
    assert "in a form that is not read here" not in caplog.text


@pytest.mark.parametrize("name", WRITTEN)
@given(
    cuts=st.lists(st.integers(1, 60), max_size=6),
    before=st.sampled_from(["", "I look. ", " {x", "<think>\nhm\n</think>\n\n"]),
    behind=st.sampled_from(["", " so", "[ARGS]", "<TOOLCALL>", "<function=x></function></tool_call>", "[TOOL_CALLS]"]),
    special=st.booleans(),
)
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_told_while_an_answer_comes_is_what_it_says_as_a_whole(
    name: str, load: Callable[..., TemplateRenderer], cuts: list[int], before: str, behind: str, special: bool
) -> None:
    renderer = load(name, special)
    ids = renderer.tokenizer.encode(before + WRITTEN[name][1] + behind + "<|im_end|>")
    whole = renderer.parse("7", [], ids, None, "stop", TOOLS)
    parser = AnswerParser(renderer, "7", [], TOOLS)
    deltas, at = [], 0
    for end in [*sorted({min(cut, len(ids)) for cut in cuts}), len(ids)]:
        deltas += parser.push(ids[at:end], [0.0] * (end - at))
        at = end
    answer, rest = parser.finish("stop")
    deltas += rest
    assert (answer.content, answer.reasoning, called(answer)) == (whole.content, whole.reasoning, called(whole))
    told = {kind: "".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("content", "reasoning")}
    assert told == {"content": whole.content, "reasoning": whole.reasoning or ""}
    assert [delta.tool_call for delta in deltas if delta.kind == "tool_call"] == whole.tool_calls


@pytest.mark.parametrize("name", WRITTEN)
def test_results_are_added_behind_the_calls_as_they_were_sampled(
    name: str, load: Callable[..., TemplateRenderer]
) -> None:
    renderer = load(name)
    prompt = renderer.render([{"role": "user", "content": "how many?"}], TOOLS)
    response = renderer.tokenizer.encode(WRITTEN[name][1] + "<|im_end|>")
    results = [{"role": "tool", "tool_call_id": f"call_7_{i}", "content": str(i)} for i in range(2)]
    added = renderer.extend(prompt, response, results, TOOLS)
    assert added is not None
    ids = ["aB3456789 ", "bB3456789 "] if name in RESULTS else ["", ""]
    turns = "".join(f"<|im_start|>user\n{own}{i}<|im_end|>\n" for i, own in enumerate(ids))
    assert renderer.tokenizer.decode(added) == f"\n{turns}<|im_start|>assistant\n"


def test_a_template_of_short_ids_gets_such_for_ours(load: Callable[..., TemplateRenderer]) -> None:
    renderer = load("mistral")
    call = {"id": "call_0123_0", "type": "function", "function": {"name": "count", "arguments": '{"of": "a"}'}}
    result = {"role": "tool", "tool_call_id": "call_0123_0", "content": "3"}
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    text = renderer.tokenizer.decode(renderer.render(talk, TOOLS))
    own = text.partition('"id": "')[2][:9]
    assert own.isalnum()
    assert f"<|im_start|>user\n{own} 3<|im_end|>" in text
    kept = [talk[0], talk[1] | {"tool_calls": [call | {"id": "aB3456789"}]}, result | {"tool_call_id": "aB3456789"}]
    assert '"id": "aB3456789"' in renderer.tokenizer.decode(renderer.render(kept, TOOLS))


def test_a_value_without_quotes_is_what_its_parameter_may_be(load: Callable[..., TemplateRenderer]) -> None:
    properties: dict[str, Any] = {
        "text": {"type": "string"}, "many": {"type": "integer"}, "sure": {"type": "boolean"}, "nothing": {},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "list": {"type": "array"},
        "quoted": {"type": ["string", "null"]}, "one": {"enum": [1, 2]}, "all": {"allOf": [{"type": "integer"}]},
        "huge": {"type": "number"}, "nan": {"type": "number"},
        "share": {"type": ["number", "string"]}, "wrong": {"type": "integer"}, "object": {"$ref": "#/$defs/o"},
    }  # fmt: skip
    values = {
        "quoted": '"an exact phrase"', "one": "1", "all": "2", "huge": "1e400", "nan": "NaN",
        "text": "12", "many": "12", "sure": "True", "nothing": "12", "either": "12", "list": '[1, "a"]',
        "share": "0.5", "wrong": "a dozen", "object": '{"a": {}}', "unknown": "\n two\nlines ",
    }  # fmt: skip
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    [(_, arguments)] = called(parsed(load("functions"), text, [tool("f", **properties)]))
    assert arguments == {
        "quoted": '"an exact phrase"', "one": 1, "all": 2, "huge": "1e400", "nan": "NaN",
        "text": "12", "many": 12, "sure": True, "nothing": "12", "either": "12", "list": [1, "a"],
        "share": 0.5, "wrong": "a dozen", "object": {"a": {}}, "unknown": "\n two\nlines ",
    }  # fmt: skip
    for strange in (
        {"type": [{}]},
        {"anyOf": 3},
        {"type": 1, "enum": "a"},
        "text",
        {"oneOf": [[]]},
        {"allOf": {"a": 1}},
    ):
        [(_, found)] = called(parsed(load("functions"), text, [tool("f", text=strange)]))
        assert found["text"] == "12"
    [(_, none)] = called(parsed(load("functions"), "<tool_call><function=f></function></tool_call>", [tool("f")]))
    assert none == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("functions", "<tool_call>\n<function=f>\nso\n</function>\n</tool_call>"),
        ("functions", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("functions", '<tool_call>{"name": "count", "arguments": {}}</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{"name": "count", "arguments": {}}, {"name": 3}]'),
        ("mistral", '[TOOL_CALLS] [{"name": "count", "argum'),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral_named", "[TOOL_CALLS]count"),
        ("mistral_named", "[TOOL_CALLS]count[ARGS][1]"),
        ("mistral_named", '[TOOL_CALLS]count[ARGS]{"n": NaN}'),
        ("llama", '{"name": "Paris", "parameters": {}}'),
        ("llama", '; {"name": "count", "parameters": {}}'),
        ("llama", '{"name": "count", "parameters": ' + '{"a":' * 2000),
        ("nemotron", "<TOOLCALL>[1]</TOOLCALL>"),
        ("nemotron", '<TOOLCALL>[{"name": "count", "arguments": {}}] so</TOOLCALL>'),
    ],
)
def test_what_is_no_call_in_the_models_form_stays_text(
    name: str, text: str, load: Callable[..., TemplateRenderer]
) -> None:
    answer = parsed(load(name), text)
    assert (answer.content, answer.tool_calls) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("llama", '{"name": "count", "parameters": {}} so', " so"),
        ("llama", '{"name": "count", "parameters": {}}; {"name": "look_up", "par', '; {"name": "look_up", "par'),
        ("mistral", '[TOOL_CALLS] [{"name": "count", "arguments": {}}] so', " so"),
        ("mistral_named", "[TOOL_CALLS]count[ARGS]{} so", " so"),
        ("mistral_named", "[TOOL_CALLS]count[ARGS]{}[TOOL_CALLS]look_up[ARGS]{", "[TOOL_CALLS]look_up[ARGS]{"),
        ("functions", "<tool_call><function=count></function></tool_call> so", " so"),
    ],
)
def test_what_stands_behind_a_call_is_text(
    name: str, text: str, content: str, load: Callable[..., TemplateRenderer]
) -> None:
    answer = parsed(load(name), text)
    assert (called(answer), answer.content) == ([("count", {})], content)


def test_a_value_may_hold_what_ends_one(load: Callable[..., TemplateRenderer]) -> None:
    value = "a</parameter>b\n</tool_call> </function>\n<parameter=x"
    text = (
        f"<tool_call>\n<function=count>\n<parameter=of>\n{value}\n</parameter>\n<parameter=n>2</parameter>\n"
        "</function>\n</tool_call>"
    )
    answer = parsed(load("functions"), text)
    assert (called(answer), answer.content) == ([("count", {"of": value, "n": "2"})], "")


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
def test_a_second_call_is_cut_off_where_one_is_wanted(special: bool, load: Callable[..., TemplateRenderer]) -> None:
    renderer = load("mistral_named", special)
    parser = AnswerParser(renderer, "7", [], TOOLS, AnswerEnd(one_tool_call=True))
    first, second = (
        renderer.tokenizer.encode("[TOOL_CALLS]" + part)
        for part in WRITTEN["mistral_named"][1].split("[TOOL_CALLS]")[1:]
    )
    deltas = parser.push(first + second, [0.0] * len(first + second))
    answer, rest = parser.finish("stop")
    assert (called(answer), answer.content, answer.token_ids) == (EXPECTED[:1], "", first)
    assert (parser.ended, parser.overshoot) == (True, len(second))
    assert [delta.kind for delta in [*deltas, *rest] if delta.tool_call] == ["tool_call"]


def test_many_closed_regions_without_a_call_are_read_a_few_times(
    load: Callable[..., TemplateRenderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one call is wanted, each of them was looked at, and each look read the whole answer: minutes for 8,000."""
    renderer = load("functions")
    looks = 0
    whole = TemplateRenderer.parse

    def counted(self: TemplateRenderer, *given: Any) -> Any:
        nonlocal looks
        looks += 1
        return whole(self, *given)

    monkeypatch.setattr(TemplateRenderer, "parse", counted)
    parser = AnswerParser(renderer, "7", [], TOOLS, AnswerEnd(one_tool_call=True))
    ids = renderer.tokenizer.encode("<tool_call>x</tool_call>" * 500)
    parser.push(ids, [0.0] * len(ids))
    parser.finish("stop")
    assert looks < 50


def test_one_call_is_told_of_a_model_whose_template_refuses_two(load: Callable[..., TemplateRenderer]) -> None:
    answer = parsed(load("llama_alone"), ALONE["llama_alone"][1])
    assert called(answer) == EXPECTED[:1]
    # One that refuses all results says nothing of two calls.
    assert called(parsed(load("no_results"), ALONE["no_results"][1])) == EXPECTED


def test_of_calls_that_stand_in_a_list_one_is_told_where_one_is_wanted(load: Callable[..., TemplateRenderer]) -> None:
    renderer = load("mistral")
    parser = AnswerParser(renderer, "7", [], TOOLS, AnswerEnd(one_tool_call=True))
    ids = renderer.tokenizer.encode(WRITTEN["mistral"][1] + "<|im_end|>")
    deltas = parser.push(ids, [0.0] * len(ids))
    answer, rest = parser.finish("stop")
    assert [call["function"]["name"] for call in answer.tool_calls] == ["count"]
    assert [delta.kind for delta in [*deltas, *rest] if delta.tool_call] == ["tool_call"]
    assert answer.token_ids == ids


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_can_be_forced_in_each_form(name: str, load: Callable[..., TemplateRenderer]) -> None:
    renderer = load(name)
    prompt = renderer.render([{"role": "user", "content": "one"}], TOOLS)
    forced = renderer.forced(prompt, TOOLS, "look_up")
    assert forced is not None
    assert "look_up" in renderer.tokenizer.decode(forced)
    later = renderer.forced([*prompt, 1], TOOLS, "look_up")
    assert (later == forced) == (name != "mistral_ids")  # where an id stands before the arguments


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.opening}{form.read.__name__}")
@given(text=st.text(alphabet='<>[]{}/"=: \nabtool_cTOLCARGS|', max_size=60))
@settings(max_examples=examples(30))
def test_no_text_breaks_a_form(form: CallForm, text: str) -> None:
    for sampled in (text, form.opening + text + form.closing, form.opening + text):
        content, calls = form.split("c", sampled, TOOLS)
        assert len(form.ids(sampled, TOOLS)) == len(calls)
        assert calls or content == sampled


@pytest.mark.parametrize(
    ("tokens", "form"),
    [
        (["<|tool_call|>"], "granite"),
        (["<|tool_call|>", "<|/tool_call|>"], "phi"),
        (["[TOOL_CALLS]"], "mistral"),
        (["[TOOL_CALLS]", "[ARGS]"], "mistral_named"),
        (["<tool_call>", "</tool_call>"], "hermes"),
        (["<tool_call>", "</tool_call>", "<|tool_call|>"], "granite"),  # which its prompt tells of
        ([], "hermes"),
    ],
)
def test_a_template_that_writes_no_calls_has_the_form_whose_marks_are_tokens(tokens: list[str], form: str) -> None:
    text = WRITTEN[form][1]
    _, calls = form_by_tokens(tokens.__contains__, "Call them so: <|tool_call|>[]").split("7", text, TOOLS)
    assert [call["function"]["name"] for call in calls] == ["count", "look_up"]


def test_the_page_of_the_gateway_has_each_form() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text().replace("\\|", "|")
    rows = page.partition("| what the template writes |")[2].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == len(FORMS)
    for form, row in zip(FORMS, rows, strict=True):
        assert row.startswith(f"| `{form.opening}")
        assert all(mark in row for mark in (form.closing, *form.inner))


@pytest.mark.parametrize("name", WRITTEN)
def test_an_agents_turns_with_tools_are_one_row(
    name: str, load: Callable[..., TemplateRenderer], tmp_path: Path
) -> None:
    """Through the gateway, by OpenAI's SDK: two calls, their results, and an answer."""
    renderer = load(name)
    engine, ledger, router = ScriptedEngine(renderer.tokenizer), MemoryLedger(), Router("policy")
    router.register(engine)
    gateway = Gateway(ledger=ledger, secret=SECRET, journal=tmp_path / "journal", renderer=renderer, router=router)
    engine.script.extend([WRITTEN[name][1], "three"])
    with listening(gateway) as (url, loop):
        served = Served(url, gateway, ledger, engine, loop)
        sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "how many?"}]
        answer = sdk.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0]  # type: ignore[call-overload]
        told = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls]
        assert (answer.finish_reason, told) == ("tool_calls", EXPECTED)
        messages.append(answer.message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": f"result {number}"}
            for number, call in enumerate(answer.message.tool_calls)
        ]
        last = sdk.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0]
        assert last.message.content == "three"
        served.seal()
    one, two = ledger.calls()
    assert (one.parent_id, two.parent_id) == (None, one.call_id)
    assert one.prompt_ids + one.response_ids + two.prompt_ids == engine.prompts[1]
    added = renderer.tokenizer.decode(two.prompt_ids)
    own = ["aB3456789 ", "bB3456789 "] if name in RESULTS else ["", ""]
    assert [f"{own_id}result {number}" in added for number, own_id in enumerate(own)] == [True, True]


def test_refusals_of_a_template_are_still_its_own(load: Callable[..., TemplateRenderer]) -> None:
    with pytest.raises(GatewayError, match="cannot render"):
        load("mistral").render([{"role": "tool", "content": "3"}], TOOLS)
