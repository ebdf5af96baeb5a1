"""The embedded engine with a model that sees: its logprobs are those of transformers' own way, image by image."""

import base64
import io
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers import AutoImageProcessor
from transformers.image_processing_backends import PilBackend

from lightning_rl.inference import policy as policies
from lightning_rl.inference.embedded import EmbeddedPolicy
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.sequence import GenerationRequest, GenerationSampling, Output
from lightning_rl.vision import PlacedImage, vision_of
from tests import seeing
from tests.random_examples import examples
from tests.seeing import PAD

CAT, DOG = seeing.picture(1, 16, 24), seeing.picture(2, 40, 16)  # 6 and 10 features
OTHER = seeing.picture(3, 16, 24)
FEATURES = {CAT: 6, DOG: 10, OTHER: 6}


@pytest.fixture(scope="module", params=seeing.FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.make_folder(tmp_path_factory.mktemp("seeing") / "model", family=request.param)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[EmbeddedPolicy]:
    policy = EmbeddedPolicy(ModelSource(folder), max_num_seqs=8, max_model_len=256)
    policy.start()
    yield policy
    policy.close()


def prompt(*parts: str | bytes) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Token ids and images; a text has a token for each letter."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, bytes):
            images.append(PlacedImage(len(ids), FEATURES[part], sha256(part).hexdigest(), part))
            ids += [PAD] * FEATURES[part]
        else:
            ids += [ord(letter) for letter in part]
    return ids, tuple(images)


def request(name: str, ids: list[int], images: Sequence[PlacedImage], **sampling: Any) -> GenerationRequest:
    asked = GenerationSampling(**{"max_tokens": 12, "seed": 1, "ignore_eos": True} | sampling)
    return GenerationRequest(request_id=name, token_ids=ids, images=tuple(images), sampling=asked)


def sampled(policy: EmbeddedPolicy, requests: Sequence[GenerationRequest]) -> list[Output]:
    return [future.result() for future in [policy.engine.submit(one) for one in requests]]


def check(folder: Path, policy: EmbeddedPolicy, ids: list[int], pictures: Sequence[bytes], output: Output) -> None:
    """The recorded logprobs are what transformers says of the whole."""
    assert PAD not in output.token_ids, "its own way has no answer then: another seed"
    want = seeing.plain_log_probs(folder, policy.model, ids + output.token_ids, pictures)[-len(output.token_ids) :]
    np.testing.assert_allclose(output.logprobs, want.numpy(), atol=1e-5)


def test_logprobs_are_those_of_transformers_in_a_batch_of_unlike_prompts(folder: Path, policy: EmbeddedPolicy) -> None:
    cases = [("hello ", CAT, " and", DOG, " say"), ("who?", CAT, "?"), ("text alone",), (DOG, "x")]
    asked = [prompt(*case) for case in cases]
    outputs = sampled(policy, [request(f"a{i}", *one) for i, one in enumerate(asked)])
    for case, (ids, _), output in zip(cases, asked, outputs, strict=True):
        check(folder, policy, ids, [part for part in case if isinstance(part, bytes)], output)


def test_an_answer_goes_on_in_another_row_when_one_before_it_ends(folder: Path, policy: EmbeddedPolicy) -> None:
    cases = [("text alone",), ("who?", CAT, "?"), (DOG, "what is this")]
    asked = [prompt(*case) for case in cases]
    lengths = (12, 6, 2)  # the longest prompt has the first row
    requests = [
        request(f"m{i}", *one, max_tokens=most) for i, (one, most) in enumerate(zip(asked, lengths, strict=True))
    ]
    outputs = sampled(policy, requests)
    for case, (ids, _), output in zip(cases, asked, outputs, strict=True):
        check(folder, policy, ids, [part for part in case if isinstance(part, bytes)], output)


def test_the_next_turn_reads_on_behind_kept_images(folder: Path, policy: EmbeddedPolicy) -> None:
    ids, images = prompt("first ", CAT, " of all")
    [first] = sampled(policy, [request("b0", ids, images)])
    more, shown = prompt(" then ", DOG, " again")
    whole = ids + first.token_ids
    images += tuple(one._replace(start=one.start + len(whole)) for one in shown)
    [second] = sampled(policy, [request("b1", whole + more, images)])
    check(folder, policy, whole + more, [CAT, DOG], second)


def test_equal_tokens_with_another_image_share_nothing(folder: Path, policy: EmbeddedPolicy) -> None:
    """Neither in one batch, nor by what the engine keeps."""
    pair = [prompt("the very same words ", picture, " again and again") for picture in (CAT, OTHER)]
    assert pair[0][0] == pair[1][0]
    together = sampled(policy, [request(f"c{i}", *one) for i, one in enumerate(pair)])
    again = sampled(policy, [request("c2", *pair[1])])
    for picture, output in zip((CAT, OTHER, OTHER), (*together, *again), strict=True):
        check(folder, policy, pair[0][0], [picture], output)
    assert np.abs(np.array(together[0].logprobs) - together[1].logprobs).max() > 1e-3


def test_equal_prompts_with_equal_images_are_a_group(folder: Path, policy: EmbeddedPolicy) -> None:
    ids, images = prompt("a group ", CAT, " of four")
    outputs = sampled(policy, [request(f"d{i}", ids, images, seed=i) for i in range(4)])
    assert len({tuple(output.token_ids) for output in outputs}) == 4
    for output in outputs:
        check(folder, policy, ids, [CAT], output)


def test_a_prompt_is_read_in_pieces_through_an_image(
    folder: Path, policy: EmbeddedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "CHUNK_TOKENS", 7)
    ids, images = prompt("in pieces ", DOG, " and ", CAT, "!")
    [output] = sampled(policy, [request("e", ids, images)])
    check(folder, policy, ids, [DOG, CAT], output)


def test_a_placeholder_that_the_policy_samples_is_a_token(folder: Path, policy: EmbeddedPolicy) -> None:
    """It may sample any id; features stand where they were recorded, so they are not looked for in its answers."""
    ids, images = prompt("one ", CAT)
    answered = [*ids, *map(ord, " a"), PAD, *map(ord, "b ")]
    more, shown = prompt(DOG, "?")
    images += tuple(one._replace(start=one.start + len(answered)) for one in shown)
    [output] = sampled(policy, [request("f", answered + more, images)])
    # By hand: embeddings with features in their places, at the positions of the parts, and what is added to states.
    model, vision = policy.model, policy.vision
    assert vision is not None
    whole = torch.tensor([answered + more + output.token_ids])
    types = torch.zeros_like(whole, dtype=torch.int)
    deep: list[list[torch.Tensor]] = []
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(whole)
        for one in images:
            seen = vision.patches(one)
            own = model.get_image_features(seen.pixels(), torch.tensor([seen.grid]), return_dict=True)
            embeddings[0, one.start : one.end] = own.pooler_output[0]
            types[0, one.start : one.end] = 1
            deep.append([layer[0] for layer in getattr(own, "deepstack_features", [])])
        grids = torch.tensor([vision.patches(one).grid for one in images])
        places, _ = model.model.get_rope_index(whole, types, image_grid_thw=grids)
        layers = [torch.cat(layer) for layer in zip(*deep, strict=True)]
        added = {"visual_pos_masks": types.bool(), "deepstack_visual_embeds": layers} if layers else {}
        states = model.model.language_model(inputs_embeds=embeddings, position_ids=places, use_cache=False, **added)
        logits = model.lm_head(states.last_hidden_state)[0, :-1]
    want = logits.log_softmax(-1).gather(1, whole[0, 1:, None])[-12:, 0]
    np.testing.assert_allclose(output.logprobs, want.numpy(), atol=1e-5)


@given(st.lists(st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 5), st.integers(1, 5))), min_size=1, max_size=7))
@settings(max_examples=examples(40))
def test_positions_are_those_of_transformers(policy: EmbeddedPolicy, parts: list[int | tuple[int, int]]) -> None:
    """Runs of text, and images of so many rows and columns, with a text of one token between two."""
    model, vision = policy.model, policy.vision
    assert vision is not None
    ids: list[int] = []
    images: list[PlacedImage] = []
    for part in [1, *parts, 1]:
        if isinstance(part, int):
            ids += [5] * part
        else:
            rows, columns = part
            picture = seeing.picture(0, 8 * columns, 8 * rows)
            ids.append(5)
            if rows * columns <= 16:
                images.append(PlacedImage(len(ids), rows * columns, sha256(picture).hexdigest(), picture))
                ids += [PAD] * (rows * columns)
    found, offset = vision.positions(len(ids), images, vision.read(images))
    whole = torch.tensor([ids])
    if not images:
        assert (found == np.arange(len(ids))).all()
        assert offset == 0
        return
    grids = torch.tensor([vision.patches(one).grid for one in images])
    want, delta = model.model.get_rope_index(whole, (whole == PAD).int(), image_grid_thw=grids)
    np.testing.assert_array_equal(found, want[:, 0].numpy())
    assert offset == delta.item()


def post(policy: EmbeddedPolicy, ids: list[int], media: list[dict[str, Any]]) -> httpx.Response:
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 3}, "media": media}
    return httpx.post(f"{policy.url}/inference/v1/generate", json=body, timeout=30)


def wire(image: PlacedImage, **other: Any) -> dict[str, Any]:
    data = base64.b64encode(image.data).decode()
    return {"start": image.start, "length": image.length, "sha256": image.sha256, "data": data} | other


def test_an_image_is_turned_as_its_exif_says(policy: EmbeddedPolicy) -> None:
    upright = Pillow.open(io.BytesIO(CAT)).transpose(Pillow.Transpose.ROTATE_270)  # clockwise by a quarter
    torch.testing.assert_close(patches(policy, seeing.turned(CAT)), patches(policy, png(upright)), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_lies_on_white(policy: EmbeddedPolicy, mode: str) -> None:
    data = seeing.see_through(3, 16, 24, mode)
    layer = Pillow.open(io.BytesIO(data)).convert("RGBA")
    white = Pillow.alpha_composite(Pillow.new("RGBA", layer.size, "white"), layer).convert("RGB")
    # The two ways round differently, by one step of 255 at most.
    torch.testing.assert_close(patches(policy, data), patches(policy, png(white)), rtol=0, atol=1.01 / 255 / 0.26)
    assert not torch.equal(patches(policy, data), patches(policy, png(layer.convert("RGB"))))


def patches(policy: EmbeddedPolicy, data: bytes) -> torch.Tensor:
    vision = vision_of(policy.folder, policy.model)
    assert vision is not None
    return vision.patches(PlacedImage(0, 6, sha256(data).hexdigest(), data)).pixels()


@pytest.mark.parametrize("size", [(8, 8), (16, 24), (40, 16), (300, 211)])
def test_pixels_are_those_of_the_processor_bit_by_bit(
    folder: Path, policy: EmbeddedPolicy, size: tuple[int, int]
) -> None:
    data = seeing.picture(5, *size)
    assert policy.vision is not None
    found = policy.vision._read(PlacedImage(0, 0, sha256(data).hexdigest(), data))
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    want = processor(images=[Pillow.open(io.BytesIO(data))], return_tensors="pt")
    assert torch.equal(found.pixels(), want["pixel_values"])
    assert found.grid == tuple(want["image_grid_thw"][0].tolist())


def test_a_processor_that_does_more_than_scale_is_refused(
    policy: EmbeddedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = PilBackend.normalize
    monkeypatch.setattr(PilBackend, "normalize", lambda self, *given: np.roll(own(self, *given), 1, axis=-1))
    with pytest.raises(ValueError, match="does more to an image than to cut and scale it"):
        vision_of(policy.folder, policy.model)


def png(image: Pillow.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_images_that_do_not_fit_are_refused_over_the_wire(policy: EmbeddedPolicy) -> None:
    ids, (image,) = prompt("one ", CAT, " x")
    assert post(policy, ids, [wire(image)]).status_code == 200
    cases = {
        "6 features, and 5 tokens": wire(image, length=5),
        "outside of the prompt": wire(image, start=99),
        "not those that the digest is of": wire(image, sha256="0" * 64),
        "cannot be read: it is damaged behind its header": wire(PlacedImage(4, 6, sha256(b"x").hexdigest(), b"x")),
    }
    for why, media in cases.items():
        refused = post(policy, ids, [media])
        assert refused.status_code == 400
        assert why in refused.text
    assert post(policy, ids, [wire(image), wire(image)]).status_code == 400


def test_a_model_of_text_refuses_images() -> None:
    policy = EmbeddedPolicy(ModelSource(), max_num_seqs=2)
    assert vision_of(policy.folder, policy.model) is None
    ids, images = prompt("x", CAT)
    with pytest.raises(ValueError, match="reads text alone"):
        policy.engine.submit(request("x", ids, images))
