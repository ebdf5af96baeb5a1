"""The loop of tools through the real gateway: what it asks, what it records, and what ends it."""

from typing import Any

import pytest

from lightning_rl.agents.task_fields import LoopTaskError, messages_of
from lightning_rl.loops import AgentLoop, Limits, Setting, SingleTurnAgent, ToolAgent
from lightning_rl.loops.user import FunctionUser
from lightning_rl.tools.trajectory import ToolCall, ToolResult
from lightning_rl_proxy.engines.base import TokenRequest
from lightning_rl_proxy.errors import PromptTooLong
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.lightning_rl.langgraph.test_graph_agent import check_masks, trained
from tests.lightning_rl.loops.conftest import Recorded, Run, Tools, calls_tool
from tests.proxy.conftest import Served


def loop(tools: Tools | None = None, user: Any = None, kind: type[AgentLoop] = ToolAgent, **limits: int) -> AgentLoop:
    made = kind()
    made.setting = Setting(
        limits=Limits(**limits),
        open_tools=None if tools is None else tools.open,
        user=None if user is None else FunctionUser(user),
    )
    return made


def test_tools_run_until_the_model_calls_none(
    served: Served, run: Run, recorded: Recorded, tokenizer: FastTokenizer
) -> None:
    served.engine.script.extend([calls_tool("look_up", "cat", "dog"), calls_tool("look_up", "cow"), "Three words."])
    tools = Tools(lambda call: f"{call.arguments} is a word")
    ran = run(loop(tools), {"prompt": [{"role": "user", "content": "how many?"}]})
    calls, rows = recorded()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    assert [call.name for call in tools.calls] == ["look_up"] * 3
    assert tools.closed == 1
    check_masks(calls, rows)
    [row] = rows
    assert row.token_ids == served.engine.prompts[2] + calls[2].response_ids
    asked = tokenizer.decode(served.engine.prompts[1])
    assert asked.index('{"what": "cat"} is a word') < asked.index('{"what": "dog"} is a word')
    assert ran.returned is None
    assert ran.end == {
        "agent_loop": "tool_agent",
        "ended_by": "answer",
        "assistant_turns": 3,
        "user_turns": 0,
        "sampled_tokens": sum(call.sampled_tokens for call in calls),
        "tool_calls": 3,
        "tool_errors": {},
    }


def test_rewards_and_metrics_of_tools_are_those_of_the_call_that_asked_for_them(
    served: Served, run: Run, recorded: Recorded
) -> None:
    served.engine.script.extend([calls_tool("look_up", "cat", "dog"), "<tool_call>\nbroken", "Done."])

    def reply(call: ToolCall) -> ToolResult:
        failed = "dog" in call.arguments
        error = "timeout" if failed else None
        return ToolResult(call.id, call.name, "said", 0.0 if failed else 0.5, {"rows": 3}, error)

    ran = run(loop(Tools(reply)), "how many?")
    [first, *_] = recorded()[0]
    told = [(given.value, given.name, given.call_id) for given in ran.emitted.call_rewards]
    assert told == [(0.5, "look_up", f"chatcmpl-{first.call_id}"), (0.0, "look_up", f"chatcmpl-{first.call_id}")]
    of_tools = [told for told in ran.objects() if "tool" in told]
    assert [(of["tool"], of["reward"], of["error"], of["metrics"]) for of in of_tools] == [
        ("look_up", 0.5, None, {"rows": 3}),
        ("look_up", 0.0, "timeout", {"rows": 3}),
    ]
    assert ran.end["tool_errors"] == {"timeout": 1}
    assert ran.emitted.rewards == {}


def test_what_a_task_says_of_its_tools_opens_them(served: Served, run: Run) -> None:
    tools = Tools()
    kwargs = {"look_up": {"create_kwargs": {"ground_truth": "4"}}}
    run(loop(tools), {"prompt": "hi", "extra_info": {"tool_selection": ["look_up"], "tools_kwargs": kwargs}})
    run(loop(tools), {"prompt": "hi", "extra_info": {"index": 3}})
    assert tools.opened == [(["look_up"], {"look_up": {"ground_truth": "4"}}), (None, {})]


def test_the_last_turn_is_sampled_whole_and_its_tools_are_not_run(
    served: Served, run: Run, recorded: Recorded, tokenizer: FastTokenizer
) -> None:
    served.engine.script.extend([calls_tool("look_up", "cat"), calls_tool("look_up", "dog"), "never"])
    tools = Tools()
    ran = run(loop(tools, assistant_turns=2), "how many?")
    assert (ran.end["ended_by"], ran.end["assistant_turns"]) == ("max_assistant_turns", 2)
    assert [call.arguments for call in tools.calls] == ['{"what": "cat"}']
    calls, rows = recorded()
    check_masks(calls, rows)
    assert [calls_tool("look_up", "dog") in said for said in trained(rows, tokenizer)] == [True]


def test_user_turns_end_at_their_limit_or_when_the_user_is_done(served: Served, run: Run, recorded: Recorded) -> None:
    served.engine.script.extend(["one", "two", "three", "four"])
    asked = []

    async def user(task: Any, messages: Any) -> str | None:
        asked.append([message["content"] for message in messages])
        return "and then?"

    ran = run(loop(user=user, user_turns=2), "count")
    assert (ran.end["ended_by"], ran.end["user_turns"], ran.end["assistant_turns"]) == ("max_user_turns", 2, 3)
    assert asked == [["count", "one"], ["count", "one", "and then?", "two"]]
    assert run(loop(user=lambda task, messages: None), "another").end["ended_by"] == "user_done"
    assert run(loop(user=user, assistant_turns=1), "a third").end["ended_by"] == "max_assistant_turns"
    calls, rows = recorded()
    assert len(rows) == 3
    check_masks(calls, rows)


@pytest.mark.parametrize("limit", [3, 20, 35, 47, 52, 59])
def test_a_trajectory_has_exactly_the_room_it_is_given(
    served: Served, run: Run, recorded: Recorded, limit: int
) -> None:
    limited(served)
    served.engine.script.extend([calls_tool("look_up", "cat"), calls_tool("look_up", "dog"), "Three words and more."])
    ran = run(loop(Tools(lambda call: "a long result " * 2), response_length=limit), "how many?")
    calls, rows = recorded()
    first_prompt = len(calls[0].prompt_ids)
    [row] = rows
    assert len(row.token_ids) - first_prompt <= limit
    check_masks(calls, rows)  # nothing that was sampled is lost
    assert ran.end["ended_by"] == "response_length"
    assert ran.end["sampled_tokens"] == sum(call.sampled_tokens for call in calls)


def test_a_row_is_no_longer_than_what_is_trained(served: Served, run: Run, recorded: Recorded) -> None:
    limited(served)
    served.engine.script.extend(["a b c d e f g h i j k l m n o p"])
    none = run(loop(row_length=2), "hi")
    assert (none.end["ended_by"], none.end["assistant_turns"]) == ("row_length", 0)
    ran = run(loop(row_length=20), "hi")
    [call] = recorded()[0]
    assert (len(call.prompt_ids) + len(call.response_ids), ran.end["ended_by"]) == (20, "row_length")


def test_an_answer_that_its_own_limit_cut_says_so(served: Served, run: Run) -> None:
    limited(served)
    served.engine.script.extend(["a b c d e f g h", "a b c d e f g h"])
    assert run(loop(answer_length=4, response_length=100), "hi").end["ended_by"] == "answer_length"
    ran = run(loop(answer_length=4, kind=SingleTurnAgent), "hi")
    assert (ran.end["agent_loop"], ran.end["ended_by"], ran.end["sampled_tokens"]) == (
        "single_turn_agent",
        "answer_length",
        4,
    )


def test_a_context_that_is_full_ends_it(served: Served, run: Run, recorded: Recorded) -> None:
    limited(served, context=500)
    served.engine.script.extend([calls_tool("look_up", "cat")])
    ran = run(loop(Tools(lambda call: "word " * 500)), "hi")
    assert (ran.end["ended_by"], ran.end["assistant_turns"]) == ("context", 1)
    calls, rows = recorded()
    check_masks(calls, rows)


def test_one_s_own_loop_has_a_conversation_and_gives_its_reward(served: Served, run: Run, recorded: Recorded) -> None:
    class Guess(AgentLoop):
        async def run(self, task: Any, llm: Any) -> float:
            async with self.conversation(task, llm) as talk:
                answer = await talk.ask()
                talk.add_user("higher")
                second = await talk.ask(temperature=0.5)
            assert answer is not None
            assert second is not None
            return float(second.text) / float(answer.text)

    served.engine.script.extend(["2", "4"])
    ran = run(Guess(), "guess")
    assert (ran.returned, ran.end["agent_loop"], ran.end["user_turns"]) == (2.0, "Guess", 1)
    assert len(recorded()[1]) == 1


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_request_asks_for_less_than_the_limits_and_never_for_more(served: Served, run: Run, name: str) -> None:
    class Asks(AgentLoop):
        async def run(self, task: Any, llm: Any) -> None:
            async with self.conversation(task, llm) as talk:
                await talk.ask(**{name: task["tokens"]})
                with pytest.raises(ValueError, match="one answer at a time"):
                    await talk.ask(n=2)

    for tokens in (3, 50):
        run(loop(kind=Asks, response_length=20), {"prompt": "hi", "tokens": tokens})
    assert [sampling.max_tokens for sampling in served.engine.samplings] == [3, 20]


def test_a_loop_that_raises_says_so_and_its_tools_are_released(served: Served, run: Run) -> None:
    def breaks(call: ToolCall) -> str:
        raise RuntimeError("the double breaks")

    ended = []

    class Told(ToolAgent):
        async def run(self, task: Any, llm: Any) -> None:
            try:
                await super().run(task, llm)
            finally:
                ended.append(True)

    served.engine.script.extend([calls_tool("look_up", "cat")])
    tools = Tools(breaks)
    with pytest.raises(RuntimeError, match="the double breaks"):
        run(loop(tools, kind=Told), "hi")
    assert (tools.closed, ended) == (1, [True])


@pytest.mark.parametrize("task", [3, {}, {"prompt": ""}, {"question": "what?"}, {"prompt": ["hi"]}, []])
def test_a_task_that_is_no_conversation_is_refused(task: Any) -> None:
    with pytest.raises(LoopTaskError, match=r"a loop begins with a text, or with a task's `prompt`"):
        messages_of(task)


def limited(served: Served, context: int = 10_000) -> None:
    """Let the engine cut what it says at `max_tokens`, and refuse prompts beyond its context."""
    engine = served.engine
    generate, next_script = engine.generate, engine._next
    room: list[int] = []

    def cut() -> Any:
        script = next_script()
        return script._replace(ids=script.ids[: room[-1]], cut=True) if len(script.ids) > room[-1] else script

    async def limited_generate(request: TokenRequest) -> Any:
        tokens = len(request.prompt)
        if tokens >= context:
            raise PromptTooLong(tokens, context)
        room.append(min(request.sampling.max_tokens or context, context - tokens))
        async for part in generate(request):
            yield part

    engine._next = cut  # type: ignore[method-assign]
    engine.generate = limited_generate  # type: ignore[method-assign]
