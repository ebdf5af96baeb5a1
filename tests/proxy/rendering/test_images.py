"""Images through the doors: every dialect's become placeholders and bytes, per branch, recorded once per content."""

import base64
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lightning_rl_adapters import credit, forest, rows, semconv
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.media import Placed, media_of
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering import images
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.rendering.chat_templates import TemplateRenderer
from lightning_rl_proxy.rendering.images import Image, Vision
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests import seeing
from tests.proxy.conftest import MODEL, SECRET, MemoryLedger, ScriptedEngine, Served, listening
from tests.random_examples import examples

CAT, DOG = seeing.picture(1, 16, 24), seeing.picture(2, 16, 24)  # 6 features each
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.make_folder(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def sees(folder: Path) -> Renderer:
    return load_renderer(folder, "auto", MODEL)


@pytest.fixture
def seen(folder: Path, sees: Renderer, tmp_path: Path) -> Iterator[Served]:
    ledger, engine, router = MemoryLedger(), ScriptedEngine(FastTokenizer(folder)), Router(MODEL)
    router.register(engine)
    gateway = Gateway(ledger=ledger, secret=SECRET, journal=tmp_path / "journal", renderer=sees, router=router)
    with listening(gateway) as (url, loop):
        yield Served(url, gateway, ledger, engine, loop)


def ask(served: Served, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return post(served, "chat/completions", {"model": MODEL, "messages": messages} | more)


def post(served: Served, door: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    response = httpx.post(
        f"{served.base_url()}/{door}", json=body, headers={"authorization": f"Bearer {served.key()}"}, timeout=30
    )
    assert response.status_code == status, response.text
    said: dict[str, Any] = response.json()
    return said


def recorded(served: Served) -> list[Call]:
    served.seal()
    return served.ledger.calls()


def placed(served: Served, number: int = -1) -> list[Placed]:
    """The images of a prompt as the engine was given them."""
    return [one.placed for one in served.engine.media[number]]


def pads(served: Served, number: int = -1) -> list[int]:
    """Where the placeholders of a prompt stand."""
    return [i for i, token in enumerate(served.engine.prompts[number]) if token == seeing.PAD]


def test_an_image_is_as_many_placeholders_as_features_and_is_recorded_once(seen: Served) -> None:
    ask(seen, [seeing.asked("what is it?", CAT)])
    ask(seen, [seeing.asked("and now?", CAT)])
    (one,) = placed(seen, 0)
    assert (one.length, one.sha256) == (6, sha(CAT))
    assert pads(seen, 0) == list(range(one.start, one.start + 6))
    assert [call.media for call in recorded(seen)] == [placed(seen, 0), placed(seen, 1)]
    assert media_of(seen.ledger.spans) == {sha(CAT): CAT}
    held = [span for span in seen.ledger.spans if span.name == semconv.MEDIA_SPAN]
    assert len(held) == 1
    messages = next(span for span in seen.ledger.spans if span.name == semconv.CALL_SPAN).attributes
    assert messages[semconv.INPUT_MESSAGES][0]["content"][0]["image_url"]["url"] == f"sha256:{sha(CAT)}"


def test_a_conversation_goes_on_at_token_level_with_the_images_of_user_and_tool(seen: Served) -> None:
    seen.engine.script.extend([CALL, "a dog", "bye"])
    messages = [seeing.asked("look", CAT)]
    for result in ([seeing.part(DOG)], None, None):
        said = ask(seen, messages, tools=TOOLS)["choices"][0]["message"]
        messages.append({name: said[name] for name in ("role", "content", "tool_calls") if said.get(name)})
        if result is not None:
            messages.append({"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": result})
        else:
            messages.append({"role": "user", "content": "go on"})
    first, second, third = recorded(seen)
    assert [first.parent_id, second.parent_id, third.parent_id] == [None, first.call_id, second.call_id]
    assert [one.sha256 for one in placed(seen, 2)] == [sha(CAT), sha(DOG)]
    assert [one.sha256 for call in (first, second, third) for one in call.media] == [sha(CAT), sha(DOG)]
    # The prompts are what was recorded, bit by bit, images in their places.
    assert seen.engine.prompts[1] == first.prompt_ids + first.response_ids + second.prompt_ids
    assert pads(seen, 2) == [i for one in placed(seen, 2) for i in range(one.start, one.start + one.length)]
    [row] = rows.cut(forest.build([first, second, third]), {})
    assert row.media == placed(seen, 2)
    assert sum(row.loss_mask) == sum(len(call.response_ids) for call in (first, second, third))


@pytest.mark.parametrize("door", ["chat/completions", "responses"])
def test_what_an_attempt_keeps_has_each_images_bytes_once(seen: Served, door: str) -> None:
    large = seeing.picture(7, 100, 80)  # more than 16 kB, from which on histories are read from where they grow
    messages: list[dict[str, Any]] = [seeing.asked("see", large)]
    previous: dict[str, str] = {}
    for _ in range(3):
        if door == "responses":
            shown = {"type": "input_image", "image_url": seeing.data_url(large)}
            asked = [{"role": "user", "content": [shown, {"type": "input_text", "text": "and?"}]}]
            previous = {"previous_response_id": post(seen, door, {"model": MODEL, "input": asked} | previous)["id"]}
        else:
            said = ask(seen, messages)["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, seeing.asked("and?", large)]
    [attempt] = seen.gateway.attempts._attempts.values()
    kept = [one for known in attempt.history._beginnings for one in known.messages]
    kept += [one for conversation in attempt.responses.values() for one in conversation]
    urls = [url for _, url in images.urls(kept)]
    assert len(urls) > 3
    assert set(urls) == {f"sha256:{sha(large)}"}
    assert len({id(one.image.data) for prompt in seen.engine.media for one in prompt}) == 1


def test_an_image_may_be_named_by_its_digest_once_it_was_shown(seen: Served) -> None:
    def named(data: bytes) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"sha256:{sha(data)}"}}]}

    ask(seen, [seeing.asked("look", CAT)])
    ask(seen, [named(CAT)])
    assert [one.sha256 for one in placed(seen)] == [sha(CAT)]
    refused = post(seen, "chat/completions", {"model": MODEL, "messages": [named(DOG)]}, 400)
    assert "messages[0].content[0] is 'sha256:" in refused["error"]["message"]


def test_a_fork_with_another_image_is_another_branch(seen: Served) -> None:
    """Equal text and equal token ids: what differs is the image alone."""
    first = ask(seen, [seeing.asked("hello", CAT)])["choices"][0]["message"]["content"]
    history = [seeing.asked("hello", CAT), {"role": "assistant", "content": first}]
    ask(seen, [*history, seeing.asked("this?", CAT)])
    ask(seen, [*history, seeing.asked("this?", DOG)])
    ask(seen, [seeing.asked("hello", DOG), history[1], seeing.asked("this?", CAT)])
    calls = recorded(seen)
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[0].call_id, None]
    assert calls[1].prompt_ids == calls[2].prompt_ids
    assert [one.sha256 for one in calls[1].media + calls[2].media] == [sha(CAT), sha(DOG)]
    assert [one.sha256 for one in calls[3].media] == [sha(DOG), sha(CAT)]
    grown = forest.build(calls)
    cut = rows.cut(grown, credit.final_values(grown, 1.0))
    assert [[one.sha256 for one in row.media] for row in cut] == [
        [sha(CAT), sha(CAT)],
        [sha(CAT), sha(DOG)],
        [sha(DOG), sha(CAT)],
    ]
    assert sum(sum(row.loss_mask) for row in cut) == sum(call.sampled_tokens for call in calls)


_B64 = base64.b64encode(CAT).decode()
BODIES = {
    "chat/completions": {"messages": [seeing.asked("see", CAT)], "max_tokens": 20},
    "responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": seeing.data_url(CAT)},
                    {"type": "input_text", "text": "see"},
                ],
            }
        ]
    },
    "messages": {
        "max_tokens": 20,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _B64}},
                    {"type": "text", "text": "see"},
                ],
            }
        ],
    },
}


@pytest.mark.parametrize("door", BODIES)
def test_every_dialect_shows_the_same(seen: Served, folder: Path, door: str) -> None:
    post(seen, door, {"model": MODEL} | BODIES[door])
    tokens = FastTokenizer(folder)
    pad = tokens.token_id("<|image_pad|>")
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>see<|im_end|>\n<|im_start|>assistant\n"
    expected = [token for one in tokens.encode(text) for token in ([one] * 6 if one == pad else [one])]
    assert seen.engine.prompts == [expected]
    assert [one.sha256 for one in placed(seen)] == [sha(CAT)]


def test_the_image_of_a_messages_tool_result_goes_into_the_next_prompt(seen: Served) -> None:
    seen.engine.script.extend([CALL, "fine"])
    tools = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
    body = {"model": MODEL, "max_tokens": 60, "tools": tools}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "look"}]
    said = post(seen, "messages", body | {"messages": messages})
    source = {"type": "base64", "media_type": "image/png", "data": _B64}
    result = {
        "type": "tool_result",
        "tool_use_id": next(block["id"] for block in said["content"] if block["type"] == "tool_use"),
        "content": [{"type": "image", "source": source}],
    }
    messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": [result]}]
    post(seen, "messages", body | {"messages": messages})
    first, second = recorded(seen)
    assert second.parent_id == first.call_id
    assert [(one.length, one.sha256) for one in second.media] == [(6, sha(CAT))]


def test_the_image_of_a_responses_tool_output_goes_into_the_next_prompt(seen: Served) -> None:
    seen.engine.script.extend([CALL, "fine"])
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    body = {"model": MODEL, "tools": tools}
    said = post(seen, "responses", body | {"input": "look"})
    called = next(item for item in said["output"] if item["type"] == "function_call")
    output = {
        "type": "function_call_output",
        "call_id": called["call_id"],
        "output": [{"type": "input_image", "image_url": seeing.data_url(CAT)}],
    }
    post(seen, "responses", body | {"previous_response_id": said["id"], "input": [output]})
    first, second = recorded(seen)
    assert second.parent_id == first.call_id
    assert [(one.length, one.sha256) for one in second.media] == [(6, sha(CAT))]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.com/cat.png", "allowed_media_domains"),
        ("file:///etc/passwd", "http(s) URLs"),
        ("sha256:" + "0" * 64, "was not shown in this attempt"),
        ("data:image/png;base64,@@", "base64"),
        ("data:image/png;base64," + base64.b64encode(b"no picture at all").decode(), "is no PNG"),
        ("data:text/plain;base64,AAAA", "http(s) URLs"),
    ],
)
def test_what_is_no_image_is_refused_by_its_place(seen: Served, url: str, why: str) -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    refused = post(seen, "chat/completions", {"model": MODEL, "messages": [message]}, 400)["error"]["message"]
    assert why in refused
    assert "messages[0].content[0]" in refused
    assert seen.engine.prompts == []


def test_tokens_are_counted_with_their_images(seen: Served) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": _B64}
    shown = [{"type": "image", "source": source}, {"type": "text", "text": "see"}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": shown}]}
    counted = post(seen, "messages/count_tokens", body)["input_tokens"]
    post(seen, "messages", body | {"max_tokens": 60})
    assert counted == len(seen.engine.prompts[0])
    source |= {"type": "url", "url": "https://example.com/cat.png"}
    refused = post(seen, "messages/count_tokens", body, 400)["error"]["message"]
    assert "messages[0].content[0] is at 'example.com'" in refused


def test_a_prompt_of_completions_shows_no_image(seen: Served) -> None:
    ask(seen, [seeing.asked("what is it?", CAT)])
    for prompt in (seen.engine.prompts[0], "<|vision_start|><|image_pad|><|vision_end|>"):
        refused = post(seen, "completions", {"model": MODEL, "prompt": prompt}, 400)["error"]
        assert f"holds the token {seeing.PAD}, which stands for an image" in refused["message"]
        assert refused["param"] == "prompt"
    assert len(seen.engine.prompts) == 1
    post(seen, "completions", {"model": MODEL, "prompt": "a text"})


def test_an_image_that_is_no_object_is_told_so(seen: Served) -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": seeing.data_url(CAT)}]}
    refused = post(seen, "chat/completions", {"model": MODEL, "messages": [message]}, 400)["error"]["message"]
    assert refused == "messages[0].content[0].image_url is no object with a `url`"


def test_a_text_that_spells_the_placeholder_is_text_or_else_refused(seen: Served, folder: Path) -> None:
    both = [seeing.asked("<|image_pad|>", CAT), {"role": "user", "content": "what is <|image_pad|>?"}]
    for message in both:
        post(seen, "chat/completions", {"model": MODEL, "messages": [message]})
    assert [len(media) for media in seen.engine.media] == [1, 0]
    as_tokens = load_renderer(folder, "auto", MODEL, special_tokens_in_text="control")
    seen.gateway._renderer = seen.gateway._tokenizing.renderer = as_tokens
    for message in both:
        refused = post(seen, "chat/completions", {"model": MODEL, "messages": [message]}, 400)["error"]["message"]
        assert "spells the placeholder" in refused


def test_a_model_that_sees_has_its_own_template_whatever_its_name_has(folder: Path) -> None:
    assert isinstance(load_renderer(folder, "auto", "Qwen/Qwen3-8B"), TemplateRenderer)


def test_a_model_that_reads_text_refuses_images(served: Served) -> None:
    body = {"model": MODEL, "messages": [seeing.asked("see", CAT)]}
    assert "takes text" in post(served, "chat/completions", body, 400)["error"]["message"]


def test_an_engine_without_eyes_refuses_images(seen: Served) -> None:
    seen.engine.abilities = frozenset()  # type: ignore[misc]
    body = {"model": MODEL, "messages": [seeing.asked("see", CAT)]}
    assert "images" in post(seen, "chat/completions", body, 400)["error"]["message"]


def test_a_template_that_numbers_its_images_is_rendered_anew(tmp_path: Path) -> None:
    """What a second image is written as hangs on the first, so a continuation is not proven."""
    numbering = seeing.TEMPLATE.replace("{%- macro", "{%- set n = namespace(images=0) -%}{%- macro", 1).replace(
        "<|vision_start|>", "{%- set n.images = n.images + 1 -%}Picture {{ n.images }}: <|vision_start|>"
    )
    renderer = load_renderer(seeing.make_folder(tmp_path, template=numbering), "auto", MODEL)
    assert renderer.append_only is not None
    assert (renderer.append_only["user"], renderer.append_only["image"]) == (True, False)


def test_a_model_that_sees_in_an_unknown_way_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes().replace(b'"qwen2_vl"', b'"new_vl"'))
    with pytest.raises(ValueError, match=r"'new_vl'.*qwen2_vl"):
        load_renderer(tmp_path, "auto", MODEL)


sizes = st.integers(1, 90)


@given(sizes, sizes, st.sampled_from([("PNG", {}), ("JPEG", {}), ("GIF", {}), ("WEBP", {}), ("WEBP", {"lossless": 1})]))
@settings(max_examples=examples(60))
def test_the_header_says_what_the_image_is(width: int, height: int, form: tuple[str, dict[str, Any]]) -> None:
    file = io.BytesIO()
    Pillow.new("RGB", (width, height), (9, 80, 200)).save(file, form[0], **form[1])
    assert images.size_of(file.getvalue()) == (width, height)


@given(st.binary(max_size=40), st.sampled_from([b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"RIFF0000WEBPVP8L", b"GIF89a"]))
def test_a_broken_header_is_no_image_and_no_crash(rest: bytes, head: bytes) -> None:
    size = images.size_of(head + rest)
    if len(rest) < 4:
        assert size is None
    elif size is not None:
        assert min(size) >= 0


@pytest.mark.parametrize("frames", [None, 2])
@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from([(4, 64, 1024), (14, 3136, 100_352)]))
@example(16, 3000, (14, 3136, 100_352))
@example(27, 5400, (14, 3136, 100_352))
@settings(max_examples=examples(60))
def test_features_are_counted_as_the_models_processor_counts_them(
    frames: int | None, width: int, height: int, rule: tuple[int, int, int]
) -> None:
    """Qwen's, and GLM-4V's, which counts the frames of a patch."""
    patch, least, most = rule
    vision = Vision(token_id=0, patch_size=patch, merge_size=2, min_pixels=least, max_pixels=most, frames=frames)
    size = {"shortest_edge": least, "longest_edge": most}
    kind = Glm4vImageProcessorPil if frames else Qwen2VLImageProcessorPil
    processor = kind(patch_size=patch, merge_size=2, size=size)
    image = Image("", "image/png", b"", (width, height))
    try:
        counted = processor.get_number_of_image_patches(height, width) // 4
    except ValueError:  # its own bound
        with pytest.raises(GatewayError, match="too narrow"):
            vision.features(image)
        return
    assert vision.features(image) == counted
