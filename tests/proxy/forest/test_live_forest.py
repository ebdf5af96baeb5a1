"""The shapes of an agent's work through the gateway: the rows that a person would draw, and how often a prompt was
encoded anew. A row is drawn as its answers; those that another row trains stand in brackets.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import openai
import pytest
import renderers
from renderers.configs import config_from_name

from lightning_rl_adapters import credit, forest, rows, semconv
from lightning_rl_adapters.semconv import ForkCause
from lightning_rl_adapters.span import Span
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import MODEL, SECRET, MemoryLedger, ScriptedEngine, Served, calls_in, listening

pytestmark = pytest.mark.usefixtures("either_length")

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Story:
    """What an agent asks and is answered, and what was recorded of it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)

    def ask(self, messages: list[Message], answer: str, **more: Any) -> list[Message]:
        """The conversation after the model has said `answer`."""
        self.served.engine.script.append(answer)
        return [*messages, self.choices(messages, **more)[0]]

    def choices(self, messages: list[Message], **more: Any) -> list[Message]:
        asked: Any = messages
        got = self._sdk.chat.completions.create(model=MODEL, messages=asked, **more).choices
        return [choice.message.model_dump(exclude_unset=True) for choice in got]

    def spans(self) -> list[Span]:
        self.served.seal()
        return sorted(calls_in(self.served.ledger.spans), key=lambda span: span.number)

    def forks(self) -> list[tuple[str, dict[str, Any] | None]]:
        """The cause of every fork and where it is, in order of arrival."""
        found = [span.attributes for span in self.spans() if semconv.FORK_CAUSE in span.attributes]
        counters = self.served.gateway.state()["counters"]
        for cause, of_cause in groupby(sorted(a[semconv.FORK_CAUSE] for a in found)):
            assert counters[f"fork_{cause}"] == len(list(of_cause))
        return [(attributes[semconv.FORK_CAUSE], attributes.get(semconv.FORK_AT)) for attributes in found]

    def encoded_anew(self) -> int:
        """How many prompts with answers in them were rendered whole."""
        roots = [span.attributes for span in self.spans() if span.attributes[semconv.PARENT] is None]
        return sum(any(m["role"] == "assistant" for m in root[semconv.INPUT_MESSAGES]) for root in roots)

    def drawn(self) -> list[str]:
        """The rows, after a look at their tokens: what the engine saw and said, each sampled token trained once."""
        texts = {span.span_id: self._text(span) for span in self.spans()}
        calls = self.served.ledger.calls()
        built = forest.build(calls)
        cut = rows.cut(built, credit.final_values(built, 1.0))
        seen = {tuple(prompt) for prompt in self.served.engine.prompts}
        drawn = []
        for row, leaf in zip(cut, built.leaves(), strict=True):
            assert tuple(row.token_ids[: len(row.token_ids) - len(leaf.call.response_ids)]) in seen
            path = [node.call.call_id for node in leaf.path()]
            drawn.append(" ".join(texts[i] if i in row.call_ids else f"({texts[i]})" for i in path))
        assert sum(sum(row.loss_mask) for row in cut) == sum(len(call.response_ids) for call in calls)
        return drawn

    def tree(self) -> str:
        """The forest, for a reader of a failure."""
        spans = {span.span_id: span for span in self.spans()}
        lines: list[str] = []

        def draw(node: forest.Node, indent: str) -> None:
            span = spans[node.call.call_id]
            cause = span.attributes.get(semconv.FORK_CAUSE, "")
            lines.append(
                f"{indent}{span.number}: {self._text(span)} {cause} {span.attributes.get(semconv.FORK_AT, '')}"
            )
            for child in node.children:
                draw(child, indent + "  ")

        for root in forest.build(self.served.ledger.calls()).roots:
            draw(root, "")
        return "\n" + "\n".join(lines)

    def _text(self, span: Span) -> str:
        [message] = span.attributes[semconv.OUTPUT_MESSAGES]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
        return message["content"] or " ".join(calls)


@pytest.fixture
def story(served: Served) -> Story:
    return Story(served)


def test_a_line_is_one_row(story: Story) -> None:
    one = story.ask([user("q")], "a")
    two = story.ask([*one, user("and?")], "b")
    story.ask([*two, user("and?")], "c")
    assert story.drawn() == ["a b c"], story.tree()
    assert (story.encoded_anew(), story.forks()) == (0, [])


def test_branches_of_one_answer_and_then_the_first_goes_on(story: Story) -> None:
    p = story.ask([user("q")], "p")
    a = story.ask([*p, user("try A")], "a")
    story.ask([*p, user("try B")], "b")
    story.ask([*p, user("try C")], "c")
    story.ask([*a, user("go on")], "aa")
    assert story.drawn() == ["p a aa", "(p) b", "(p) c"], story.tree()
    assert (story.encoded_anew(), story.forks()) == (0, [])


def test_a_parent_and_its_sub_agent_take_turns(story: Story) -> None:
    a = story.ask([system("You plan."), user("q")], "a1")
    b = story.ask([system("You search."), user("find")], "b1")
    story.ask([*a, user("found it?")], "a2")
    story.ask([*b, user("more")], "b2")
    assert story.drawn() == ["a1 a2", "b1 b2"], story.tree()
    assert story.encoded_anew() == 0
    assert story.forks() == [("new_conversation", {"message": 0, "role": "system"})]


def test_the_best_of_three_choices_goes_on(story: Story) -> None:
    story.served.engine.script.extend(["x", "y", "z"])
    choices = story.choices([user("q")], n=3)
    best = next(choice for choice in choices if choice["content"] == "y")
    story.ask([user("q"), best, user("go on")], "on")
    assert sorted(story.drawn()) == ["x", "y on", "z"], story.tree()
    assert (story.encoded_anew(), story.forks()) == (0, [])


def test_the_best_of_three_equal_requests_goes_on(story: Story) -> None:
    for _ in range(3):
        conversation = story.ask([user("q")], "same")
    story.ask([*conversation, user("go on")], "on")
    assert story.drawn() == ["same", "same", "same on"], story.tree()
    assert (story.encoded_anew(), story.forks()) == (0, [])


def test_of_equal_answers_the_one_answered_last_goes_on(story: Story) -> None:
    engine = story.served.engine
    engine.script.extend(["same", "same"])
    with ThreadPoolExecutor(2) as pool:
        engine.hold = first_hold = asyncio.Event()
        first = pool.submit(story.choices, [user("q")])
        story.served.eventually(lambda: len(engine.prompts) == 1)
        engine.hold = None
        story.choices([user("q")])
        story.served.run(lambda: _set(first_hold))
        first.result(20)
    story.ask([user("q"), said("same"), user("go on")], "on")
    assert story.drawn() == ["same on", "same"], story.tree()  # the first to arrive was answered last


async def _set(event: asyncio.Event) -> None:
    event.set()


@pytest.mark.parametrize("back_to", [1, 2, 3])
def test_backtracking_to_any_answer_continues_it(story: Story, back_to: int) -> None:
    conversation: list[Message] = []
    for name in ("a", "b", "c"):
        conversation = story.ask([*conversation, user("next")], name)
    story.ask([*conversation[: 2 * back_to], user("no, rather")], "x")
    branch = {1: ["a b c", "(a) x"], 2: ["a b c", "(a) (b) x"], 3: ["a b c x"]}[back_to]
    assert story.drawn() == branch, story.tree()
    assert (story.encoded_anew(), story.forks()) == (0, [])


def test_backtracking_to_the_question_is_another_sample_of_it(story: Story) -> None:
    a = story.ask([user("q")], "a")
    story.ask([*a, user("next")], "b")
    story.ask([user("q")], "a2")
    assert story.drawn() == ["a b", "a2"], story.tree()
    assert (story.encoded_anew(), story.forks()) == (0, [])


def test_a_title_call_in_the_middle_breaks_nothing(story: Story) -> None:
    a = story.ask([system("You work."), user("q")], "a")
    story.ask([system("Give it a title."), user("q")], "title")
    story.ask([*a, user("next")], "b")
    assert story.drawn() == ["a b", "title"], story.tree()
    assert story.encoded_anew() == 0
    assert [cause for cause, _ in story.forks()] == ["new_conversation"]


def test_fifty_parallel_calls_are_fifty_rows_and_all_go_on(story: Story) -> None:
    script = {f"question {i}": i for i in range(50)}
    with ThreadPoolExecutor(50) as pool:
        first = list(pool.map(lambda q: story.choices([user(q)])[0], script))
        list(pool.map(lambda q, answer: story.choices([user(q), answer, user("and?")]), script, first))
    assert story.drawn() == ["ok ok"] * 50, story.tree()
    assert story.encoded_anew() == 0
    assert {cause for cause, _ in story.forks()} <= {"new_conversation"}


def talk(story: Story, *answers: str) -> list[Message]:
    """A conversation of questions q0, q1, ... and these answers."""
    conversation = [system("You work.")]
    for i, answer in enumerate(answers):
        conversation = story.ask([*conversation, user(f"q{i}")], answer)
    return conversation


NEXT = user("next")


@pytest.mark.parametrize(
    ("edit", "cause", "message"),
    [
        (lambda h: [*h[:3], user("q1, rather"), *h[4:], NEXT], ForkCause.EDITED_TEXT, (3, "user")),
        (lambda h: [*h[:4], said("B"), *h[5:], NEXT], ForkCause.EDITED_TEXT, (4, "assistant")),
        (lambda h: [*h[:2], said("A"), *h[3:], NEXT], ForkCause.EDITED_TEXT, (2, "assistant")),
        (lambda h: [h[0], user("q0, rather"), *h[2:], NEXT], ForkCause.EDITED_TEXT, (1, "user")),
        (lambda h: [h[0], user("a hint"), *h[1:], NEXT], ForkCause.EDITED_TEXT, (1, "user")),
        (lambda h: [system("It is noon."), *h[1:], NEXT], ForkCause.SYSTEM_CHANGED, (0, "system")),
        (lambda h: [*h[1:], NEXT], ForkCause.SYSTEM_CHANGED, (0, "user")),
        (lambda h: [h[0], *h[3:], NEXT], ForkCause.TRUNCATED_BY_CLIENT, (1, "user")),
        (lambda h: [h[0], user("In short: much."), *h[4:], NEXT], ForkCause.TRUNCATED_BY_CLIENT, (1, "user")),
        (lambda h: [*h[:2], user("In short: much.")], ForkCause.TRUNCATED_BY_CLIENT, (2, "user")),
        (lambda h: [h[0], user("something else")], ForkCause.NEW_CONVERSATION, (1, "user")),
        (lambda h: [h[0], user("like this"), said("example"), NEXT], ForkCause.NEW_CONVERSATION, (1, "user")),
    ],
    ids=[
        "a later question", "the last answer", "the first answer", "the first question", "a message put in",
        "a clock in the system message", "no system message", "the first turn dropped", "the beginning in short",
        "all in short", "something else", "with examples",
    ],
)  # fmt: skip
def test_a_request_that_continues_nothing_says_why_and_where(
    story: Story, edit: Any, cause: ForkCause, message: tuple[int, str]
) -> None:
    edited = edit(talk(story, "a", "b", "c"))
    story.ask(edited, "x")
    assert story.drawn() == ["a b c", "x"], story.tree()
    [(found, at)] = story.forks()
    assert at is not None
    assert (found, at["message"], at["role"]) == (cause, *message), story.tree()
    assert story.encoded_anew() == any(m["role"] == "assistant" for m in edited)
    if cause != ForkCause.NEW_CONVERSATION:
        known, mine = story.served.engine.prompts[-2:]
        known = known + story.served.ledger.calls()[2].response_ids
        assert known[: at["token"]] == mine[: at["token"]]
        assert known[at["token"]] != mine[at["token"]]


def test_after_a_compaction_the_new_conversation_goes_on(story: Story) -> None:
    talk(story, "a", "b")
    short = story.ask([system("You work."), user("q0"), user("In short: much.")], "c")
    story.ask([*short, NEXT], "d")
    assert story.drawn() == ["a b", "c d"], story.tree()
    assert [cause for cause, _ in story.forks()] == ["truncated_by_client"]


def test_an_edit_is_compared_with_the_nearest_conversation_not_the_last(story: Story) -> None:
    history = talk(story, "a", "b")
    story.ask([system("Give it a title."), user("q0")], "title")
    story.ask([*history[:4], said("B"), NEXT], "x")
    assert story.forks()[1][0] == "edited_text"
    assert story.forks()[1][1] is not None
    assert (story.forks()[1][1] or {})["message"] == 4


def test_what_lost_its_beginning_is_compared_with_the_conversation_whose_answers_it_holds(story: Story) -> None:
    history = talk(story, "a", "b")
    story.ask([system("Give it a title."), user("a title for this")], "title")
    story.ask([history[0], *history[3:], NEXT], "x")
    assert [cause for cause, _ in story.forks()] == ["new_conversation", "truncated_by_client"], story.tree()


def test_equal_requests_around_another_agents_are_samples_of_one_prompt(story: Story) -> None:
    for role in ("You plan.", "You search.", "You plan."):
        story.ask([system(role), user("q")], "ok")
    assert story.drawn() == ["ok", "ok", "ok"]
    assert [cause for cause, _ in story.forks()] == ["new_conversation"], story.tree()


def test_a_system_message_in_the_middle_that_changed(story: Story) -> None:
    a = story.ask([user("q"), system("It is noon."), user("and?")], "a")
    story.ask([a[0], system("It is one."), *a[2:], NEXT], "b")
    assert story.forks()[0][0] == "system_changed", story.tree()


def test_a_sub_agent_after_a_greeting_has_lost_nothing(story: Story) -> None:
    story.ask([system("You greet.")], "hello")
    story.ask([system("You search."), user("find")], "found")
    assert [cause for cause, _ in story.forks()] == ["new_conversation"], story.tree()


def test_samples_of_one_prompt_with_examples_are_no_forks_of_each_other(story: Story) -> None:
    examples = [user("like this"), said("example")]
    for question in ("one", "two"):
        story.ask([*examples, user(question)], "ok then")
    story.ask([*examples, user("two")], "ok again")
    assert [cause for cause, _ in story.forks()] == ["new_conversation"]


RUN: Any = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "run", "arguments": {"sql": "SELECT 1"}}\n</tool_call>'


def a_tool_turn(story: Story) -> list[Message]:
    conversation = story.ask([user("q")], CALL, tools=RUN)
    [call] = conversation[-1]["tool_calls"]
    return [*conversation, {"role": "tool", "tool_call_id": call["id"], "content": "1"}]


def with_call(conversation: list[Message], arguments: str, call_id: str | None = None) -> list[Message]:
    question, answer, result = conversation
    [call] = answer["tool_calls"]
    call_id = call_id or call["id"]
    changed = call | {"id": call_id, "function": call["function"] | {"arguments": arguments}}
    return [question, answer | {"tool_calls": [changed]}, result | {"tool_call_id": call_id}]


def test_other_tools_are_a_fork(story: Story) -> None:
    story.ask(a_tool_turn(story), "done", tools=[*RUN, {"type": "function", "function": {"name": "more"}}])
    assert [cause for cause, _ in story.forks()] == ["tools_changed"], story.tree()


def test_an_altered_tool_call_under_another_id_is_a_fork(story: Story) -> None:
    story.ask(with_call(a_tool_turn(story), '{"sql": "SELECT 2"}', "toolu_1"), "done", tools=RUN)
    [(cause, at)] = story.forks()
    assert cause == "tool_call_changed", story.tree()
    assert at is not None
    assert (at["message"], at["role"]) == (1, "assistant")


def test_an_altered_tool_call_under_our_id_is_a_fork_that_goes_on(story: Story) -> None:
    history = with_call(a_tool_turn(story), '{"sql": "[elided]"}')
    history = story.ask(history, "done", tools=RUN)
    story.ask([*history, NEXT], "and more", tools=RUN)
    assert story.drawn() == ['{"sql": "SELECT 1"}', "done and more"], story.tree()
    [(cause, at)] = story.forks()
    assert at is not None
    assert (cause, at["message"], at["role"]) == ("tool_call_changed", 1, "assistant")
    assert story.encoded_anew() == 1


def test_a_renamed_tool_call_is_the_same(story: Story) -> None:
    story.ask(with_call(a_tool_turn(story), '{"sql":"SELECT 1"}', "toolu_1"), "done", tools=RUN)
    assert story.drawn() == ['{"sql": "SELECT 1"} done'], story.tree()


def test_an_answer_put_in_by_the_client_cannot_be_appended(story: Story) -> None:
    history = talk(story, "a")
    story.ask([*history, user("q1"), said("of my own"), NEXT], "b")
    assert [cause for cause, _ in story.forks()] == ["not_append_only"], story.tree()
    assert story.drawn() == ["a", "b"]


@pytest.fixture
def forgetful(tokenizer: FastTokenizer, tmp_path: Path) -> Iterator[Story]:
    """A gateway whose chat format drops the reasoning of earlier turns."""
    renderer = LibraryRenderer(renderers.create_renderer(tokenizer, config_from_name("qwen3")), tokenizer)
    ledger, engine, router = MemoryLedger(), ScriptedEngine(tokenizer), Router(MODEL)
    router.register(engine)
    gateway = Gateway(ledger=ledger, secret=SECRET, journal=tmp_path / "j", renderer=renderer, router=router)
    with listening(gateway) as (url, loop):
        yield Story(Served(url, gateway, ledger, engine, loop))


def test_reasoning_that_the_format_drops_is_a_fork_with_that_cause(forgetful: Story) -> None:
    one = forgetful.ask([user("q")], "<think>\nhm\n</think>\n\na")
    two = forgetful.ask([*one, NEXT], "<think>\nhm\n</think>\n\nb")
    forgetful.ask([*two, NEXT], "c")
    assert forgetful.drawn() == ["a", "b", "c"], forgetful.tree()
    (cause, at), (again, _) = forgetful.forks()
    assert cause == again == "reasoning_stripped"
    first = forgetful.served.ledger.calls()[0]
    assert at == {"token": len(first.prompt_ids)}
