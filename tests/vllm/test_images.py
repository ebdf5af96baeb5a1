"""Images, an agent with the official SDK, the gateway and a real vLLM: what is recorded is what the model computed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from lightning_rl.inference.vllm.control import Control
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.vision import PlacedImage
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.media import Placed, media_of
from tests import seeing
from tests.vllm.gateway import Attempt, attempt, full_prompt
from tests.vllm.seeing import make_folder, policy_of, trainers_log_probs
from tests.vllm.server import MODEL

pytestmark = pytest.mark.long  # two servers of its own

TOLERANCE = 1e-4  # nats; 3e-6 was seen
CAT, DOG, WIDE = seeing.picture(1, 16, 24), seeing.picture(2, 24, 16), seeing.picture(3, 50, 21)  # WIDE is resized
END = seeing.PAD - seeing.SPECIAL.index("<|image_pad|>") + seeing.SPECIAL.index("<|im_end|>")
LIKE_TEXT = {"logit_bias": {str(END): -100, str(seeing.PAD): -100}}


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("seeing") / "model", request.param)


@pytest.fixture(scope="module")
def policy(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPolicy]:
    with policy_of(folder, tmp_path_factory.mktemp("run")) as policy:
        yield policy


@pytest.fixture
def sees(policy: VllmPolicy) -> Control:
    return Control(policy.registrations()[0]["url"])


def ask(at: Attempt, messages: list[Any], *, stream: bool = False, **more: Any) -> str:
    """The assistant's words."""
    asked = {"model": MODEL, "messages": messages, "max_tokens": 12, **LIKE_TEXT, **more}
    if not stream:
        return at.client.chat.completions.create(**asked).choices[0].message.content or ""
    chunks = at.client.chat.completions.create(**asked, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def shown(calls: list[Call], call: Call) -> list[str]:
    """The digests of the images in a call's whole prompt, in order."""
    parents = {each.call_id: each for each in calls}
    before = [] if call.parent_id is None else shown(calls, parents[call.parent_id])
    return before + [one.sha256 for one in call.media]


def check_recorded(policy: VllmPolicy, calls: list[Call], held: dict[str, bytes]) -> None:
    """Tokens and logprobs are those of the model that saw these images, by transformers' own way."""
    for call in calls:
        prompt = full_prompt(calls, call)
        pictures = [held[digest] for digest in shown(calls, call)]
        log_probs = seeing.plain_log_probs(policy.folder, policy.model, [*prompt, *call.response_ids], pictures)
        assert len(call.response_ids) == 12
        assert call.logprobs == pytest.approx(log_probs[len(prompt) - 1 :].tolist(), abs=TOLERANCE)
        assert call.logprob_kind == "sampled"


def trainers(policy: VllmPolicy, calls: list[Call], call: Call, held: dict[str, bytes]) -> list[float]:
    """What the trainer computes for a call's tokens, whose images are all in its first prompt."""
    prompt = full_prompt(calls, call)
    images = [PlacedImage(one.start, one.length, one.sha256, held[one.sha256]) for one in calls[0].media]
    own = trainers_log_probs(policy, [*prompt, *call.response_ids], images)
    found: list[float] = own[len(prompt) - 1 :].tolist()
    return found


def pads(prompt: list[int]) -> list[int]:
    """Where placeholders stand."""
    return [index for index, token in enumerate(prompt) if token == seeing.PAD]


def spread(media: list[Placed]) -> list[int]:
    """Where they should."""
    return [index for one in media for index in range(one.start, one.start + one.length)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_images_is_continued_token_by_token(
    sees: Control, policy: VllmPolicy, tmp_path: Path, stream: bool
) -> None:
    with attempt(tmp_path, sees, tokenizer=policy.folder) as at:
        messages: list[Any] = [seeing.asked("look", CAT, WIDE)]
        messages.append({"role": "assistant", "content": ask(at, messages, stream=stream)})
        messages.append({"role": "tool", "tool_call_id": "look", "content": [seeing.part(DOG)]})
        messages.append({"role": "assistant", "content": ask(at, messages, stream=stream)})
        messages.append({"role": "user", "content": "and now?"})
        ask(at, messages, stream=stream)
        calls, spans = at.finish_with_spans()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    assert [[one.length for one in call.media] for call in calls] == [[6, 12], [6], []]
    assert all(pads(call.prompt_ids) == spread(call.media) for call in calls)
    held = media_of(spans)
    assert [held[digest] for digest in shown(calls, calls[2])] == [CAT, WIDE, DOG]
    check_recorded(policy, calls, held)


def test_another_image_in_the_same_tokens_is_another_prompt(sees: Control, policy: VllmPolicy, tmp_path: Path) -> None:
    """vLLM keeps prefixes by the images' digests too."""
    other = seeing.picture(4, 16, 24)
    with attempt(tmp_path, sees, tokenizer=policy.folder) as at:
        for picture in (CAT, other, CAT):
            ask(at, [seeing.asked("a question that fills several blocks of vLLM's cache " * 2, picture)])
        calls, spans = at.finish_with_spans()
    assert calls[0].prompt_ids == calls[1].prompt_ids == calls[2].prompt_ids
    assert [media_of(spans)[shown(calls, call)[0]] for call in calls] == [CAT, other, CAT]
    check_recorded(policy, calls, media_of(spans))


def test_an_image_is_turned_and_laid_on_white_as_the_trainer_does_it(
    sees: Control, policy: VllmPolicy, tmp_path: Path
) -> None:
    pictures = [seeing.turned(CAT), *(seeing.see_through(5, 22, 30, mode) for mode in ("RGBA", "LA", "P"))]
    with attempt(tmp_path, sees, tokenizer=policy.folder) as at:
        for picture in pictures:
            ask(at, [seeing.asked("look", picture)])
        calls = at.finish()
    for call, picture in zip(calls, pictures, strict=True):
        own = trainers(policy, [call], call, {call.media[0].sha256: picture})
        assert call.logprobs == pytest.approx(own, abs=TOLERANCE)
        plain = seeing.plain_log_probs(policy.folder, policy.model, call.prompt_ids + call.response_ids, [picture])
        assert call.logprobs != pytest.approx(plain[-len(own) :].tolist(), abs=100 * TOLERANCE)


def test_a_placeholder_that_the_policy_samples_is_a_token_until_another_image_is_shown(
    sees: Control, policy: VllmPolicy, tmp_path: Path
) -> None:
    with attempt(tmp_path, sees, tokenizer=policy.folder) as at:
        messages: list[Any] = [seeing.asked("look", CAT)]
        said = ask(at, messages, max_tokens=2, logit_bias={str(seeing.PAD): 100})
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and now?"}]
        ask(at, messages)
        with pytest.raises(openai.BadRequestError, match="sampled an image placeholder"):
            ask(at, [*messages[:-1], seeing.asked("and this?", DOG)])
        calls, spans = at.finish_with_spans()
    assert calls[0].response_ids == [seeing.PAD] * 2
    assert calls[1].parent_id == calls[0].call_id
    for call in calls[:2]:
        assert call.logprobs == pytest.approx(trainers(policy, calls, call, media_of(spans)), abs=TOLERANCE)


def test_new_weights_are_seen_with_too(sees: Control, policy: VllmPolicy, tmp_path: Path) -> None:
    """The last test: both the tower and the language model are others afterwards."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    policy.update_weights(policy.model, 1)
    with attempt(tmp_path, sees, tokenizer=policy.folder) as at:
        ask(at, [seeing.asked("look", CAT)])
        calls, spans = at.finish_with_spans()
    check_recorded(policy, calls, media_of(spans))


def test_bytes_that_are_no_image_behind_their_head_are_a_400(sees: Control, policy: VllmPolicy, tmp_path: Path) -> None:
    with attempt(tmp_path, sees, tokenizer=policy.folder) as at, pytest.raises(openai.BadRequestError, match="image"):
        ask(at, [seeing.asked("look", CAT[:60])])
