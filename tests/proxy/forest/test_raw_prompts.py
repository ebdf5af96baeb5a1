"""Prompts that clients write themselves: continued token by token where they repeat what was sampled to the letter."""

from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lightning_rl_adapters import semconv
from lightning_rl_proxy.forest.live_forest import LiveForest
from lightning_rl_proxy.forest.nodes import Answered
from lightning_rl_proxy.forest.raw_prompts import RawPromptReader
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.adapters.forests import make_call
from tests.proxy.conftest import MODEL, TOKENIZER, Served
from tests.random_examples import examples

pytestmark = pytest.mark.usefixtures("either_length")

TURN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url(), api_key=served.key(), max_retries=0)


def complete(served: Served, prompt: Any, **more: Any) -> Any:
    return client(served).completions.create(model="policy", prompt=prompt, **more)


def parents(served: Served) -> list[int | None]:
    served.seal()
    calls = served.ledger.calls()
    numbers = {call.call_id: call.number for call in calls}
    return [None if call.parent_id is None else numbers[call.parent_id] for call in calls]


def test_a_prompt_is_tokenised_as_it_is_special_tokens_too(served: Served, tokenizer: FastTokenizer) -> None:
    assert complete(served, TURN).choices[0].text == "ok"
    assert served.engine.prompts == [tokenizer.encode(TURN)]
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == served.engine.prompts[0][0]


def test_a_prompt_of_ids_goes_on_as_it_is(served: Served) -> None:
    assert complete(served, [5, 6, 7]).usage.prompt_tokens == 3
    assert served.engine.prompts == [[5, 6, 7]]


def test_a_prompt_that_repeats_what_was_sampled_continues_the_call(served: Served, tokenizer: FastTokenizer) -> None:
    served.engine.script.extend(["SELECT  1 ", "done"])
    first = complete(served, TURN).choices[0].text
    complete(served, f"{TURN}{first}<|im_end|>\n<|im_start|>user\nmore")
    assert parents(served) == [None, 0]
    one, two = served.ledger.calls()
    assert served.engine.prompts[1] == one.prompt_ids + one.response_ids + two.prompt_ids
    assert two.prompt_ids == tokenizer.encode("\n<|im_start|>user\nmore")
    spans = sorted(served.ledger.spans, key=lambda span: span.number)
    assert spans[1].attributes[semconv.INPUT_MESSAGES][0]["content"] == "\n<|im_start|>user\nmore"


def test_ids_that_repeat_what_was_sampled_continue_the_call(served: Served) -> None:
    complete(served, [5, 6, 7])
    served.run(served.gateway._recorder.stored)
    [one] = served.ledger.calls()
    complete(served, [5, 6, 7, *one.response_ids, 8])
    assert parents(served) == [None, 0]
    assert served.ledger.calls()[1].prompt_ids == [8]


def test_a_stop_string_that_is_written_again_continues_the_call(served: Served) -> None:
    """As agents do that write `Observation:` themselves."""
    served.engine.script.append("think Observation: invented")
    said = complete(served, "Question", stop=["Observation:"]).choices[0].text
    assert said == "think "
    served.run(served.gateway._recorder.stored)
    complete(served, f"Question{said}Observation: real")
    assert parents(served) == [None, 0]


def test_going_on_behind_the_visible_text_alone_is_a_fork(served: Served) -> None:
    """The end token was sampled, and the client leaves it out: the model would see another text."""
    first = complete(served, TURN).choices[0].text
    complete(served, f"{TURN}{first} and more")
    assert parents(served) == [None, None]
    assert served.gateway.state()["counters"]["fork_not_append_only"] == 1


def test_equal_prompts_are_two_samples_and_a_chat_is_no_text(served: Served) -> None:
    complete(served, "hi")
    complete(served, "hi")
    client(served).chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    assert parents(served) == [None, None, None]
    assert not [name for name in served.gateway.state()["counters"] if name.startswith("fork_")]


def test_only_answers_that_arrived_are_continued_and_other_models_are_others(served: Served) -> None:
    served.engine.fail = 1
    with pytest.raises(openai.InternalServerError):
        complete(served, "hi")
    complete(served, "hi<|im_end|>")
    assert parents(served) == [None]


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4), st.text(min_size=1, max_size=8))
def test_any_text_is_continued_without_a_token_encoded_anew(served: Served, said: list[str], prompt: str) -> None:
    served.ledger.spans.clear()
    text, ids = prompt, None
    for i, answer in enumerate(said):
        served.engine.script.append(answer)
        complete(served, text)
        served.run(served.gateway._recorder.stored)
        call = sorted(served.ledger.calls(), key=lambda call: call.number)[-1]
        asked = served.engine.prompts[-1]
        assert ids is None or asked[: len(ids)] == ids
        ids = asked + call.response_ids
        text = text + served.gateway._renderer.tokenizer.decode(call.response_ids) + str(i)  # type: ignore[union-attr]


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 8), st.lists(st.integers(300, 303), max_size=2)), max_size=9),
    st.booleans(),
)
def test_a_prompt_goes_on_with_the_longest_that_it_repeats_of_equal_ones_the_last(
    asked: list[tuple[int, list[int]]], as_ids: bool
) -> None:
    """As if every earlier prompt with its answer were written out and compared."""
    renderer = load_renderer(TOKENIZER, "qwen3", MODEL)
    reader, forest, whole = RawPromptReader(renderer), LiveForest(), list[Any]()
    for number, (behind, added) in enumerate(asked):
        before = whole[behind][1] if 0 <= behind < len(whole) else []
        ids = before + added or [300]
        prompt = ids if as_ids else renderer.tokenizer.decode(ids)
        place = forest.find_raw_prompt(MODEL, prompt, reader)
        written = [(live, known if as_ids else renderer.tokenizer.decode(known)) for live, known in whole]
        fitting = [(len(known), at, live) for at, (live, known) in enumerate(written) if prompt[: len(known)] == known]
        assert place.parent is (max(fitting, key=lambda one: one[:2])[2] if fitting else None)
        call = replace(make_call(number, None, response=1), response_ids=[301 + number % 2])
        said = {"role": "assistant", "content": ""}
        [live] = forest.remember([Answered(place, call, said, reasoned=False, text=(MODEL, prompt))])
        whole.append((live, ids + call.response_ids))
