"""The gateway as an agent sees it, through the official SDK: exact tokens, continuation, keys, sealing, errors."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import urllib3

from lightning_rl.compat.messages import TraceToMessages
from lightning_rl_adapters import credit, forest, rows, semconv
from lightning_rl_adapters.tool_schemas import tools_of
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import EITHER_SERVER, MODEL, SECRET, MemoryLedger, ScriptedEngine, Served, listening

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def client(served: Served, **where: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url(**where), api_key=served.key(**where), max_retries=0)


def say(sdk: openai.OpenAI, messages: list[Any], model: str = "policy", **more: Any) -> str:
    answer = sdk.chat.completions.create(model=model, messages=messages, **more)
    return answer.choices[0].message.content or ""


def post(served: Served, path: str, body: bytes, key: str | None = None, **headers: str) -> urllib3.BaseHTTPResponse:
    authorization = {"authorization": f"Bearer {key}"} if key else {}
    return urllib3.request("POST", served.url + path, body=body, headers=authorization | headers, retries=False)


def test_a_recorded_call_holds_the_very_tokens_of_the_engine(
    served: Served, tokenizer: FastTokenizer, renderer: LibraryRenderer
) -> None:
    served.engine.script.append("SELECT 1")
    assert say(client(served), [user("how many?")]) == "SELECT 1"
    served.seal()
    [call] = served.ledger.calls()
    assert call.prompt_ids == served.engine.prompts[0] == renderer.render([user("how many?")], None)
    assert call.response_ids == [*tokenizer.encode("SELECT 1"), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert [call.logprobs] == served.engine.logprobs
    assert len(call.logprobs or []) == len(call.response_ids)
    assert call.policy_versions() == [7] * len(call.response_ids)
    assert (call.finish_reason, call.number, call.parent_id) == ("stop", 0, None)


def test_turns_continue_at_token_level_and_make_one_row(served: Served) -> None:
    sdk, messages = client(served), [user("one")]
    for answer in ("  odd   spacing ", "SELECT  2", "done"):
        served.engine.script.append(answer)
        messages += [{"role": "assistant", "content": say(sdk, messages)}, user("next")]
    served.seal()
    calls = served.ledger.calls()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    built = forest.build(calls)
    [row] = rows.cut(built, credit.final_values(built, 1.0))
    for call, prompt in zip(calls, served.engine.prompts, strict=True):
        start = len(prompt)
        assert row.token_ids[:start] == prompt
        assert row.token_ids[start : start + len(call.response_ids)] == call.response_ids
    assert sum(row.loss_mask) == sum(len(call.response_ids) for call in calls)


def test_spans_do_not_grow_with_the_turn(served: Served) -> None:
    sdk, messages = client(served), [user("a question of some length, asked again and again")]
    for _ in range(6):
        messages += [{"role": "assistant", "content": say(sdk, messages)}, user("again")]
    served.seal()
    spans = sorted(served.ledger.spans, key=lambda s: s.number)
    added = [len(call.prompt_ids) for call in served.ledger.calls()]
    assert max(added[1:]) == min(added[1:]) < added[0]
    assert [len(s.attributes[semconv.INPUT_MESSAGES]) for s in spans] == [1, 1, 1, 1, 1, 1]


def test_a_cut_answer_is_continued_and_its_closer_is_not_trained(served: Served, tokenizer: FastTokenizer) -> None:
    served.engine.script.extend(["an answer that is too long ...", "done"])
    sdk, first = client(served), [user("one")]
    text = say(sdk, first)
    say(sdk, [*first, {"role": "assistant", "content": text}, user("go on")])
    served.seal()
    one, two = served.ledger.calls()
    assert one.finish_reason == "length"
    assert two.parent_id == one.call_id
    assert two.prompt_ids[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_equal_requests_are_two_samples_and_the_last_answered_is_continued(served: Served) -> None:
    sdk, first = client(served), [user("one")]
    assert [say(sdk, first), say(sdk, first)] == ["ok", "ok"]
    say(sdk, [*first, {"role": "assistant", "content": "ok"}, user("two")])
    served.seal()
    one, two, three = served.ledger.calls()
    assert one.parent_id is two.parent_id is None
    assert three.parent_id == two.call_id


def test_n_choices_are_n_calls_and_any_of_them_can_be_continued(served: Served) -> None:
    served.engine.script.extend(["first", "second", "third"])
    sdk, start = client(served), [user("one")]
    choices = sdk.chat.completions.create(model="policy", messages=start, n=3).choices  # type: ignore[arg-type]
    texts = [choice.message.content for choice in choices]
    assert sorted(map(str, texts)) == ["first", "second", "third"]
    say(sdk, [*start, {"role": "assistant", "content": "second"}, user("go on")])
    served.seal()
    calls = served.ledger.calls()
    assert [call.number for call in calls] == [0, 1, 2, 3]
    assert len({sampling.seed for sampling in served.engine.samplings[:3]}) == 3
    assert calls[3].parent_id == calls[texts.index("second")].call_id


def test_edited_history_is_a_fork_with_a_cause(served: Served) -> None:
    sdk, first = client(served), [user("one")]
    say(sdk, first)
    say(sdk, [user("another one"), {"role": "assistant", "content": "ok"}, user("two")])
    served.seal()
    _, second = sorted(served.ledger.spans, key=lambda s: s.number)
    assert second.attributes[semconv.FORK_CAUSE] == "edited_text"
    assert served.gateway.state()["counters"]["fork_edited_text"] == 1


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": "  ok "},
        {"role": "assistant", "content": [{"type": "text", "text": "ok"}]},
        {"role": "assistant", "content": "ok", "tool_calls": None, "refusal": None, "reasoning_content": " "},
    ],
    ids=["white space", "parts", "extras"],
)
def test_what_clients_change_in_an_echo_still_finds_its_call(served: Served, echo: Message) -> None:
    sdk, first = client(served), [user("one")]
    say(sdk, first)
    say(sdk, [*first, echo, user("two")])
    served.seal()
    one, two = served.ledger.calls()
    assert two.parent_id == one.call_id


def test_tools_are_recorded_once_of_an_attempt_and_give_conversations_theirs(served: Served) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("run", "look")
    ]
    sdk = client(served)
    answer = say(sdk, [user("one")], tools=tools)
    history = [user("one"), {"role": "assistant", "content": answer}, user("two")]
    say(sdk, history, tools=tools)
    say(sdk, [user("other")], tools=tools[:1])
    say(sdk, [user("none")])
    served.seal()
    held = [span for span in served.ledger.spans if span.name == semconv.TOOLS_SPAN]
    assert sorted(map(len, tools_of(held).values())) == [1, 2]
    shown = [row["tools"] for row in TraceToMessages().adapt(served.ledger.spans)]
    assert shown == [tools, tools, tools[:1], None]


def test_tool_calls_are_parsed_and_their_results_continue_the_call(served: Served) -> None:
    tools: Any = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    served.engine.script.append('<tool_call>\n{"name": "run", "arguments": {"sql": "SELECT 1"}}\n</tool_call>')
    sdk, messages = client(served), [user("one")]
    answer = sdk.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0]  # type: ignore[arg-type]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls is not None
    [call] = answer.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("run", '{"sql": "SELECT 1"}')
    history = [*messages, answer.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "1"}]
    say(sdk, history, tools=tools)
    served.seal()
    one, two = served.ledger.calls()
    assert two.parent_id == one.call_id


def test_concurrent_attempts_do_not_mix(served: Served) -> None:
    def converse(i: int) -> None:
        sdk, messages = client(served, rollout_id=f"r{i}"), [user(f"question {i}")]
        for turn in range(3):
            messages += [{"role": "assistant", "content": say(sdk, messages)}, user(f"turn {turn}")]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(converse, range(8)))
    for i in range(8):
        served.seal(rollout_id=f"r{i}")
        built = forest.build(served.ledger.calls(f"r{i}"))
        assert [len(leaf.path()) for leaf in built.leaves()] == [3]
    assert served.gateway.state()["models"]["policy"]["tokens_received"] == sum(
        len(call.response_ids) for i in range(8) for call in served.ledger.calls(f"r{i}")
    )


def test_the_algorithm_decides_how_is_sampled_and_seeds_differ(served: Served) -> None:
    served.ledger.sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 10}
    for rollout in ("r1", "r2"):
        say(client(served, rollout_id=rollout), [user("one")], temperature=0.1, seed=3, max_tokens=20)
    first, second = served.engine.samplings
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.7, 0.9, 5, 10)
    assert first.seed != second.seed


def test_without_an_algorithm_the_agent_decides(served: Served) -> None:
    served.ledger.sampling = {}
    say(client(served), [user("one")], temperature=0.1, max_completion_tokens=20)
    say(client(served), [user("one")])
    first, second = served.engine.samplings
    assert (first.temperature, first.max_tokens) == (0.1, 20)
    assert (second.temperature, second.max_tokens) == (1.0, None)


def test_a_group_whose_agent_hard_codes_a_greedy_seed_is_diverse(served: Served) -> None:
    for i in range(8):
        say(client(served, rollout_id=f"r{i}"), [user("one")], temperature=0, seed=42)
    assert {sampling.temperature for sampling in served.engine.samplings} == {1.0}
    assert len({sampling.seed for sampling in served.engine.samplings}) == 8


def test_validation_seeds_can_be_repeated(served: Served) -> None:
    """Two rollouts with one seed key, as those of a task in two validations have, are sampled alike."""
    for attempt in ("a1", "a2"):
        say(client(served, attempt_id=attempt), [user("one")], seed=42)
        say(client(served, attempt_id=attempt), [user("two")], seed=42)
    one, two, again, once_more = (sampling.seed for sampling in served.engine.samplings)
    assert (one, two) == (again, once_more)
    assert one != two


def test_prompt_and_answer_together_have_the_room_that_a_request_gives(served: Served) -> None:
    served.ledger.sampling = {"temperature": 1.0, "max_tokens": 64}
    say(client(served), [user("one")], extra_body={"max_context_tokens": 50})
    [prompt], [sampling] = served.engine.prompts, served.engine.samplings
    assert sampling.max_tokens == 50 - len(prompt)
    with pytest.raises(openai.BadRequestError, match=f"max_context_tokens is {len(prompt)}, and the messages are") as e:
        say(client(served), [user("one")], extra_body={"max_context_tokens": len(prompt)})
    assert (e.value.code, e.value.param) == ("context_length_exceeded", "max_context_tokens")
    say(client(served), [user("one")], extra_body={"max_context_tokens": len(prompt) + 1})
    assert served.engine.samplings[-1].max_tokens == 1


def test_requested_and_effective_sampling_are_both_recorded(served: Served) -> None:
    served.ledger.sampling = {"temperature": 1.0, "max_tokens": 64, "presence_penalty": 0.0}
    say(client(served), [user("one")], temperature=0.1, max_tokens=500, presence_penalty=1.0, stop="x")
    served.seal()
    [span] = served.ledger.spans
    assert span.attributes[semconv.SAMPLING_REQUESTED] == {
        "temperature": 0.1, "max_tokens": 500, "presence_penalty": 1.0, "stop": ["x"],
    }  # fmt: skip
    effective = span.attributes[semconv.SAMPLING_EFFECTIVE]
    assert (effective["temperature"], effective["max_tokens"], effective["stop"]) == (1.0, 64, ["x"])


def test_what_the_engine_lacks_is_refused_by_the_clients_own_name(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format is not supported by the engine") as refused:
        say(client(served), [user("one")], response_format={"type": "json_object"})
    assert refused.value.param == "response_format"
    assert served.engine.prompts == []
    served.engine.abilities = frozenset({"json_schema"})
    served.engine.script.append("{}")
    say(client(served), [user("one")], response_format={"type": "json_object"})
    assert served.engine.samplings[0].json_schema == {}


def test_any_model_name_means_the_policy_and_is_recorded(served: Served) -> None:
    say(client(served), [user("one")], model="gpt-4o")
    served.seal()
    [span] = served.ledger.spans
    assert (span.attributes[semconv.REQUEST_MODEL], span.attributes[semconv.RESPONSE_MODEL]) == ("gpt-4o", "policy")


def test_any_model_name_means_the_policy_of_its_own_attempt(served: Served) -> None:
    """Of a run that has a server with others: its `main_llm` is another model than the server's."""
    served.ledger.policy = "run-2"
    with pytest.raises(openai.APIStatusError, match="no engine serves model 'run-2'"):
        say(client(served).with_options(max_retries=0), [user("one")], model="gpt-4o")
    assert say(client(served), [user("one")], model="policy") == "ok"
    assert served.gateway.load().starting.keys() == {"policy"}, "only what was opened by a claim is about to call"


def test_unknown_model_names_can_be_refused(served: Served) -> None:
    served.gateway.router._refuses_unknown = True
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4o'"):
        say(client(served), [user("one")], model="gpt-4o")
    assert say(client(served), [user("one")]) == "ok"


def test_the_agent_tag_of_the_url_is_recorded_and_the_key_alone_is_a_door(served: Served) -> None:
    say(openai.OpenAI(
        base_url=served.base_url(agent="writer"), api_key=served.key()), [user("one")])  # fmt: skip
    say(openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key()), [user("two")])
    served.seal()
    assert [call.agent for call in served.ledger.calls()] == ["writer", None]


@pytest.mark.parametrize(
    ("key", "status"),
    [
        (lambda s: None, 401),
        (lambda s: "nonsense", 401),
        (lambda s: s.key()[:-1] + "!", 401),
        (lambda s: s.key(expires_in=-5), 401),
        (lambda s: s.key(rollout_id="r2"), 403),
        (lambda s: s.key(attempt_id="a2"), 403),
        (lambda s: s.key(), 200),
    ],
    ids=["none", "nonsense", "damaged", "expired", "other rollout", "other attempt", "right"],
)
def test_only_the_attempts_own_key_opens_its_door(
    served: Served, key: Callable[[Served], str | None], status: int
) -> None:
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "x"}]}'
    answer = post(served, "/rollout/r1/attempt/a1/v1/chat/completions", body, key(served))
    assert answer.status == status
    if status != 200:
        assert answer.headers["x-should-retry"] == "false"
        assert served.engine.prompts == []


def test_a_sealed_attempt_answers_409_and_trains_nothing(served: Served) -> None:
    sdk = client(served)
    say(sdk, [user("one")])
    served.seal()
    with pytest.raises(openai.ConflictError) as refused:
        say(sdk, [user("late")])
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert len(served.ledger.calls()) == 1


def test_an_attempt_that_the_store_closed_answers_409(served: Served) -> None:
    served.ledger.closed.add("a1")
    with pytest.raises(openai.ConflictError):
        say(client(served), [user("late")])


def test_sealing_aborts_what_is_in_flight(served: Served) -> None:
    served.engine.hold = asyncio.Event()
    outcome: list[Exception] = []

    def call() -> None:
        try:
            say(client(served), [user("one")])
        except openai.APIError as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    served.eventually(lambda: len(served.engine.prompts) == 1)
    served.seal()
    thread.join(20)
    assert isinstance(outcome[0], openai.ConflictError)
    assert served.engine.aborted == 1
    assert served.ledger.calls() == []


@EITHER_SERVER
def test_what_a_client_did_not_wait_for_is_undelivered(served: Served) -> None:
    served.gateway.patience.ping_seconds = 3600  # what does not write hears of it all the same
    served.engine.hold = asyncio.Event()
    with pytest.raises(openai.APITimeoutError):
        say(client(served), [user("one")], timeout=0.3)
    served.eventually(lambda: served.engine.aborted == 1)  # after the grace time
    served.seal()
    assert served.ledger.calls() == []


def test_what_engines_handed_over_before_a_stop_is_recorded(
    tmp_path: Path, tokenizer: FastTokenizer, renderer: LibraryRenderer
) -> None:
    ledger, engine, router = MemoryLedger(), ScriptedEngine(tokenizer), Router(MODEL)
    engine.script.append("one two three four five six seven")
    engine.steps = asyncio.Semaphore(5)
    router.register(engine)
    gateway = Gateway(ledger=ledger, secret=SECRET, journal=tmp_path / "journal", renderer=renderer, router=router)
    with listening(gateway) as (url, loop):
        served = Served(url, gateway, ledger, engine, loop)
        stream = client(served).chat.completions.create(model=MODEL, messages=[user("one")], stream=True)
        served.eventually(lambda: gateway.attempts.tokens_pending() == 5)
        stream.close()  # the call runs on for the grace time, in which the server is stopped
    [call] = ledger.calls()
    assert (call.delivered, len(call.response_ids)) == (False, 5)


@EITHER_SERVER
def test_an_answer_whose_client_left_is_recorded_as_undelivered(served: Served) -> None:
    served.engine.hold = asyncio.Event()
    with pytest.raises(openai.APITimeoutError):
        say(client(served), [user("one")], timeout=0.3)
    served.run(_set(served.engine.hold))
    served.eventually(lambda: served.gateway.state()["counters"].get("undelivered", 0) == 1)
    served.seal()
    [call] = served.ledger.calls()
    assert not call.delivered
    assert served.gateway.state()["models"]["policy"]["tokens_received"] == len(call.response_ids)


def test_a_marked_retry_joins_the_call_in_flight(served: Served) -> None:
    served.gateway.patience.grace_seconds = 30
    served.engine.hold = asyncio.Event()
    with pytest.raises(openai.APITimeoutError):
        say(client(served), [user("one")], timeout=0.3)
    with ThreadPoolExecutor(1) as pool:
        retried = pool.submit(say, client(served), [user("one")])
        served.eventually(lambda: served.gateway.state()["counters"].get("joined_retries", 0) == 1)
        served.run(_set(served.engine.hold))
        assert retried.result(20) == "ok"
    served.seal()
    [call] = served.ledger.calls()
    assert call.delivered
    assert len(served.engine.prompts) == 1


def test_a_marked_retry_joins_the_oldest_of_several_in_flight(served: Served) -> None:
    served.engine.hold = asyncio.Event()
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "x"}]}'
    send = (served, "/v1/chat/completions", body, served.key())
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(post, *send)
        served.eventually(lambda: len(served.engine.prompts) == 1)
        second = pool.submit(post, *send)
        served.eventually(lambda: len(served.engine.prompts) == 2)
        retried = pool.submit(post, *send, **{"x-stainless-retry-count": "1"})
        served.eventually(lambda: served.gateway.state()["counters"].get("joined_retries", 0) == 1)
        served.run(_set(served.engine.hold))
        ids = [answer.result(20).json()["id"] for answer in (first, second, retried)]
    assert ids[2] == ids[0] != ids[1]


def _set(event: Any) -> Any:
    async def work() -> None:
        event.set()

    return work


def test_an_engine_that_fails_is_a_retryable_error_and_then_forgotten(served: Served) -> None:
    served.engine.fail = 1
    with pytest.raises(openai.InternalServerError) as failed:
        say(client(served), [user("one")])
    assert failed.value.response.headers["x-should-retry"] == "true"
    assert 1 <= int(failed.value.response.headers["retry-after"]) <= 60
    assert say(client(served), [user("one")]) == "ok"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"model": "policy", "messages": []}', "messages"),
        ('{"model": "policy", "messages": [{"role": "king", "content": "x"}]}', "messages[0].role"),
        ('{"model": "policy", "messages": [{"role": "user", "content": "x"}], "audio": {}}', "audio"),
        ('{"model": "policy", "messages": [{"role": "user", "content": "x"}], "n": 0}', "n"),
        ('{"model": "policy", "messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 2}}', "logit_bias"),
        ('{"model": "policy", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
         "messages[0].content"),
        ('{"model": "policy", "messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}',
         "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(served: Served, body: str, param: str) -> None:
    answer = post(served, "/rollout/r1/attempt/a1/v1/chat/completions", body.encode(), served.key())
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (1, "messages[2]"),
        ({"role": "king", "content": "x"}, "messages[2].role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[2].content"),
    ],
)
def test_behind_messages_that_were_read_before_what_is_wrong_has_its_place_among_all(
    served: Served, wrong: Any, param: str
) -> None:
    said = [user("one"), {"role": "assistant", "content": "ok"}]
    path = "/rollout/r1/attempt/a1/v1/chat/completions"
    assert post(served, path, json.dumps({"model": "policy", "messages": said}).encode(), served.key()).status == 200
    answer = post(served, path, json.dumps({"model": "policy", "messages": [*said, wrong]}).encode(), served.key())
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


def test_broken_json_is_a_400(served: Served) -> None:
    assert post(served, "/v1/chat/completions", b"{nope", served.key()).status == 400


def test_hints_pass_and_unknown_fields_are_recorded(served: Served) -> None:
    say(client(served), [user("one")], user="me", extra_body={"novelty": 1})
    served.seal()
    [span] = served.ledger.spans
    assert span.attributes[semconv.IGNORED_FIELDS] == ["novelty"]


def test_unknown_paths_and_attempts_are_404(served: Served) -> None:
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "x"}]}'
    assert post(served, "/nowhere", body, served.key()).status == 404
    assert post(served, "/v1/nothing", body, served.key()).status == 404
    assert post(served, "/v1/chat/completions", body, served.key(rollout_id="unknown")).status == 404


def test_models_are_listed(served: Served) -> None:
    assert [model.id for model in client(served).models.list()] == ["policy"]


def test_a_paused_model_lets_calls_wait(served: Served) -> None:
    served.run(lambda: served.gateway.pause("policy"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(say, client(served), [user("one")])
        served.eventually(lambda: served.gateway.state()["open_attempts"] == 1)
        assert served.engine.prompts == []
        served.run(lambda: served.gateway.resume("policy", 8))
        assert waiting.result(20) == "ok"
    assert served.engine.policy_version == 8


def test_a_model_without_an_engine_is_an_error_not_a_wait(served: Served) -> None:
    served.gateway.router.policy = "nobody's"
    with pytest.raises(openai.InternalServerError, match="no engine serves model"):
        say(openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0), [user("x")], model="other")


CALLED = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
RUN: Any = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("offered", [{}, {"tools": RUN, "tool_choice": "none"}])
def test_markup_of_a_call_that_nobody_may_make_is_content(served: Served, offered: Any, *, stream: bool) -> None:
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)
    served.engine.script.append(f"So: {CALLED}")
    messages: Any = [{"role": "user", "content": "How does one call run?"}]
    if stream:
        chunks = [chunk.choices[0] for chunk in sdk.chat.completions.create(
            model=MODEL, messages=messages, stream=True, **offered
        )]  # fmt: skip
        assert not any(chunk.delta.tool_calls for chunk in chunks)
        said, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        [choice] = sdk.chat.completions.create(model=MODEL, messages=messages, **offered).choices
        assert choice.message.tool_calls is None
        said, reason = choice.message.content or "", choice.finish_reason
    assert (said, reason) == (f"So: {CALLED}", "stop")
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Thanks."}]
    sdk.chat.completions.create(model=MODEL, messages=messages, **offered)
    served.seal()
    one, two = served.ledger.calls()
    assert two.parent_id == one.call_id


def test_a_turn_without_a_choice_of_tools_goes_on_behind_one_with(served: Served) -> None:
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)
    messages: Any = [{"role": "user", "content": "q"}]
    served.engine.script.append(CALLED)
    [choice] = sdk.chat.completions.create(model=MODEL, messages=messages, tools=RUN).choices
    [call] = choice.message.tool_calls or []
    messages += [choice.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": ""}]
    sdk.chat.completions.create(model=MODEL, messages=messages, tools=RUN, tool_choice="none")
    served.seal()
    one, two = served.ledger.calls()
    assert two.parent_id == one.call_id
    assert served.engine.prompts[1][: len(served.engine.prompts[0])] == served.engine.prompts[0]
