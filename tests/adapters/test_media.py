"""Images in records: where they stand, through spans, forests, rows and triplets; their bytes, once per content."""

import base64
import json

import pytest

from lightning_rl_adapters import forest, rows, semconv
from lightning_rl_adapters.call import Call, VersionRange, from_span, to_span
from lightning_rl_adapters.forest import ForestError
from lightning_rl_adapters.media import Placed, media_of, media_span, with_urls
from lightning_rl_adapters.otel_out import readable
from lightning_rl_adapters.span import pack, to_json, unpack
from lightning_rl_adapters.triplet import triplets

CAT, DOG = "c" * 64, "d" * 64
PAD = 9


def call(number: int, parent: int | None, prompt: list[int], media: list[Placed], response: list[int]) -> Call:
    return Call(
        call_id=f"call{number}",
        rollout_id="r",
        attempt_id="a",
        number=number,
        parent_id=None if parent is None else f"call{parent}",
        model="m",
        prompt_ids=prompt,
        response_ids=response,
        logprobs=[-0.5] * len(response),
        versions=[VersionRange(0, 0, len(response))],
        temperature=1.0,
        finish_reason="stop",
        media=media,
    )


# An image at the start, a tool's image in the next turn, and another way on with another image in the same tokens.
FIRST = call(0, None, [1, PAD, PAD, 2], [Placed(1, 2, CAT)], [50, 51])
TOOL = call(1, 0, [3, PAD, 4], [Placed(1, 1, CAT)], [52])
OTHER = call(2, 0, [3, PAD, 4], [Placed(1, 1, DOG)], [53, 54])


def test_a_row_says_where_each_image_of_its_path_stands():
    cat, dog = rows.cut(forest.build([FIRST, TOOL, OTHER]), {})
    assert cat.token_ids == [1, PAD, PAD, 2, 50, 51, 3, PAD, 4, 52]
    assert cat.media == [Placed(1, 2, CAT), Placed(7, 1, CAT)]
    assert dog.media == [Placed(1, 2, CAT), Placed(7, 1, DOG)]
    for row in (cat, dog):
        assert all(row.token_ids[i] == PAD for one in row.media for i in range(one.start, one.start + one.length))


def test_each_sampled_token_of_rows_with_images_is_trained_once_and_no_image_is():
    cut = rows.cut(forest.build([FIRST, TOOL, OTHER]), {})
    trained = [(row.call_ids[i], row.token_ids[i]) for row in cut for i, mask in enumerate(row.loss_mask) if mask]
    assert sorted(trained) == [("call0", 50), ("call0", 51), ("call1", 52), ("call2", 53), ("call2", 54)]


def test_a_triplet_has_the_images_of_its_whole_prompt():
    first, tool, other = triplets(forest.build([FIRST, TOOL, OTHER]), {})
    assert first.media == [Placed(1, 2, CAT)]
    assert tool.media == [Placed(1, 2, CAT), Placed(7, 1, CAT)]
    assert other.media == [Placed(1, 2, CAT), Placed(7, 1, DOG)]


def test_a_span_keeps_the_places_through_a_store():
    kept = unpack(pack(to_span(OTHER)).record)
    assert from_span(kept) == OTHER
    text = from_span(unpack(pack(to_span(call(0, None, [1], [], [2]))).record))
    assert text.media == []


@pytest.mark.parametrize("media", [[Placed(0, 2, CAT), Placed(1, 1, DOG)], [Placed(2, 2, CAT)], [Placed(0, 0, CAT)]])
def test_images_that_overlap_or_stand_outside_are_refused(media: list[Placed]):
    with pytest.raises(ValueError, match="image"):
        call(0, None, [1, PAD, PAD], media, [5])


def test_the_bytes_of_an_image_have_one_span_however_often_it_is_recorded():
    spans = [media_span("r", "a", CAT, data=b"\x89cat", media_type="image/png", at_ns=at) for at in (1, 2)]
    assert spans[0].span_id == spans[1].span_id
    assert media_span("r", "b", CAT, data=b"\x89cat", media_type="image/png", at_ns=1).span_id != spans[0].span_id
    kept = unpack(pack(spans[0]).record)
    assert media_of([to_span(FIRST), kept]) == {CAT: b"\x89cat"}
    said = json.loads(json.dumps(to_json(kept)))["attributes"]
    assert base64.b64decode(said[semconv.MEDIA_DATA]) == b"\x89cat"


def test_bytes_are_not_sent_to_an_opentelemetry_collector():
    sent = readable(media_span("r", "a", CAT, data=b"\x89cat", media_type="image/png", at_ns=1)).attributes
    assert sent is not None
    assert sent[semconv.MEDIA_SHA256] == CAT
    assert semconv.MEDIA_DATA not in sent


def test_an_image_that_no_span_holds_is_named():
    with pytest.raises(ForestError, match=DOG):
        forest.check_held(OTHER.media, {CAT: b""}, "call 3")


def test_recorded_messages_refer_to_the_bytes():
    url = "data:image/png;base64,AA"
    shown = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "tool", "content": [shown, {"type": "text", "text": "x"}]},
    ]
    told = with_urls(messages, lambda one: f"sha256:{CAT}" if one == url else one)
    assert told[0] is messages[0]
    assert told[1]["content"][0]["image_url"] == {"url": f"sha256:{CAT}", "detail": "low"}
    assert messages[1]["content"][0]["image_url"]["url"] == url  # type: ignore[index]
