"""Rows that show images, in training: the trainer's logprobs are the engine's recorded ones and transformers' own, and
the update reaches the tower that sees."""

import copy
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rl import vision
from lightning_rl.inference.embedded import EmbeddedPolicy
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.sequence import GenerationRequest, GenerationSampling
from lightning_rl.ppo.local_workers import checkpoint_activations
from lightning_rl.training import lora
from lightning_rl.training.actor import Actor
from lightning_rl.training.batch import TrainingSequence, sequence_of
from lightning_rl.training.critic import ValueModel, values_of
from lightning_rl.training.forward import Forward
from lightning_rl.training.layers import output_layer
from lightning_rl.vision import PlacedImage
from lightning_rl_adapters import forest, rows
from lightning_rl_adapters.call import Call, VersionRange
from lightning_rl_adapters.forest import ForestError
from lightning_rl_adapters.media import Placed
from lightning_rl_adapters.rows import Row
from tests import seeing
from tests.lightning_rl.training.test_actor import config, tiny_model
from tests.seeing import PAD

CAT, DOG, FOX = seeing.picture(1, 16, 24), seeing.picture(2, 40, 16), seeing.picture(3, 16, 24)
FEATURES = {CAT: 6, DOG: 10, FOX: 6}
MEDIA = {sha256(data).hexdigest(): data for data in FEATURES}


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()


@pytest.fixture(scope="module", params=seeing.FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.make_folder(tmp_path_factory.mktemp("seeing") / "model", family=request.param)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[EmbeddedPolicy]:
    policy = EmbeddedPolicy(ModelSource(folder), trained=True, max_num_seqs=8, max_model_len=256)
    policy.start()
    yield policy
    policy.close()


def call(policy: EmbeddedPolicy, number: int, parent: Call | None, *parts: str | bytes, temperature: float) -> Call:
    """A call that the engine answers; it goes on behind `parent`, whose images it is shown too."""
    before = [] if parent is None else parent.prompt_ids + parent.response_ids
    shown = [] if parent is None else list(parent.media)
    ids: list[int] = []
    media: list[Placed] = []
    for part in parts:
        if isinstance(part, bytes):
            media.append(Placed(len(ids), FEATURES[part], digest(part)))
            ids += [PAD] * FEATURES[part]
        else:
            ids += map(ord, part)
    placed = [*shown, *(one.moved(len(before)) for one in media)]
    images = tuple(PlacedImage(one.start, one.length, one.sha256, MEDIA[one.sha256]) for one in placed)
    sampling = GenerationSampling(max_tokens=9, seed=number, temperature=temperature, ignore_eos=True)
    name = f"call{number}"
    asked = GenerationRequest(request_id=name, token_ids=before + ids, sampling=sampling, images=images)
    output = policy.engine.submit(asked).result()
    return Call(
        call_id=name,
        rollout_id="r",
        attempt_id="a",
        number=number,
        parent_id=None if parent is None else parent.call_id,
        model="m",
        prompt_ids=ids,
        response_ids=output.token_ids,
        logprobs=output.logprobs,
        versions=[VersionRange(0, 0, len(output.token_ids))],
        temperature=temperature,
        finish_reason="length",
        media=media,
    )


@pytest.fixture(scope="module")
def cut(policy: EmbeddedPolicy) -> list[Row]:
    """A forest: an image, two ways on with equal tokens and other images, and a tree of text alone."""
    first = call(policy, 0, None, "see ", CAT, " this", temperature=0.7)
    calls = [
        first,
        call(policy, 1, first, " and ", CAT, "?", temperature=1.0),
        call(policy, 2, first, " and ", FOX, "?", temperature=1.3),
        call(policy, 3, None, "text alone", temperature=1.0),
        call(policy, 4, None, DOG, " ", CAT, "see", temperature=1.0),
    ]
    return rows.cut(forest.build(calls), {})


def sequences_of(cut: list[Row], media: Mapping[str, bytes] = MEDIA) -> list[TrainingSequence]:
    made = []
    for number, row in enumerate(cut):
        advantages = {name: (-1.0) ** number for name in row.call_ids if name is not None}
        made.append(sequence_of(row, number, advantages, media))
        made[-1].old_log_probs = made[-1].rollout_log_probs
    return made


def actor_of(policy: EmbeddedPolicy, *, packed: bool = False, **changes: Any) -> Actor:
    model = copy.deepcopy(policy.model)
    forward = Forward(model, 256, packed=packed, vision=policy.vision)
    return Actor(model, config(**changes), 256, forward)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("micro_batch_rows", "logits_at_once"), [(None, None), (1, None), (None, 1), (1, 1)])
def test_the_trainers_logprobs_are_the_engines(
    policy: EmbeddedPolicy,
    cut: list[Row],
    monkeypatch: pytest.MonkeyPatch,
    packed: bool,
    micro_batch_rows: int | None,
    logits_at_once: int | None,
) -> None:
    if logits_at_once is not None:  # as of real vocabularies: the output layer runs by chunks
        monkeypatch.setattr(output_layer, "ROWS_CHUNK", logits_at_once)
    actor = actor_of(policy, packed=packed, micro_batch_rows=micro_batch_rows)
    sequences = sequences_of(cut)
    assert actor.forward.packed == packed
    for micro in actor.forward.micro_batches(sequences, rows=micro_batch_rows, tokens=None):
        if any(sequence.images for sequence in micro):  # equal tokens of theirs are not computed once
            assert actor.forward.sizes(micro).distinct == sum(map(len, micro))
    for sequence, found in zip(sequences, actor.log_probs(sequences), strict=True):
        assert len(found)
        np.testing.assert_allclose(found, sequence.rollout_log_probs, atol=2e-5)


def test_the_trainers_logprobs_are_those_of_transformers(folder: Path, policy: EmbeddedPolicy, cut: list[Row]) -> None:
    actor = actor_of(policy)
    for row in cut:
        [found] = actor.log_probs(sequences_of([row]))
        pictures = [MEDIA[one.sha256] for one in row.media]
        assert row.token_ids.count(PAD) == sum(map(FEATURES.__getitem__, pictures)), "another seed: it sampled one"
        for place, value in zip(np.flatnonzero(row.loss_mask), found, strict=True):
            temperature = row.temperature[place]
            assert temperature is not None
            want = seeing.plain_log_probs(folder, policy.model, row.token_ids, pictures, temperature)
            assert abs(want[place - 1].item() - value) < 2e-5


def test_a_pass_reads_each_image_once_however_few_are_kept(
    policy: EmbeddedPolicy, cut: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision, "_KEPT_BYTES", 1)
    seen = vision.vision_of(policy.folder, policy.model)
    assert seen is not None
    read: list[str] = []
    monkeypatch.setattr(seen, "_read", lambda image, own=seen._read: read.append(image.sha256) or own(image))
    Forward(policy.model, 256, vision=seen).log_probs(sequences_of(cut))
    assert sorted(read) == sorted(MEDIA)


def test_another_image_gives_other_logprobs(policy: EmbeddedPolicy, cut: list[Row]) -> None:
    [right] = actor_of(policy).log_probs(sequences_of(cut[:1]))
    swapped = sequences_of(cut[:1])
    swapped[0].images = tuple(one._replace(sha256=digest(FOX), data=FOX) for one in swapped[0].images)
    [wrong] = actor_of(policy).log_probs(swapped)
    assert np.abs(right - wrong).max() > 1e-2


def test_an_update_teaches_the_tower_and_the_language_model(policy: EmbeddedPolicy, cut: list[Row]) -> None:
    actor = actor_of(policy)
    before = copy.deepcopy(actor.model.state_dict())
    metrics = actor.update(actor.plan(sequences_of(cut), rollouts=len(cut)))
    assert np.isfinite(metrics["actor/grad_norm"])
    changed = {name for name, weight in actor.model.state_dict().items() if not torch.equal(weight, before[name])}
    for part in ("visual.patch_embed", "visual.blocks", "visual.merger", "language_model.layers"):
        assert any(part in name for name in changed), part


def test_gradients_do_not_depend_on_micro_batches_and_checkpoints(
    policy: EmbeddedPolicy, cut: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rows_each, checkpointing, logits_at_once in (
        (None, False, None),
        (1, False, None),
        (2, False, 1),
        (2, True, 1),
    ):
        if logits_at_once is not None:
            monkeypatch.setattr(output_layer, "ROWS_CHUNK", logits_at_once)
        actor = actor_of(policy, micro_batch_rows=rows_each)
        if checkpointing:
            checkpoint_activations(actor.model)
            actor.model.train()
        [mini] = actor.plan(sequences_of(cut), rollouts=len(cut))
        actor.accumulate(mini)
        found.append(torch.cat([p.grad.flatten() for p in actor.model.parameters() if p.grad is not None]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)


def test_a_critic_and_a_shared_trunk_see_what_the_policy_sees(policy: EmbeddedPolicy, cut: list[Row]) -> None:
    values = ValueModel.like(policy.model)
    torch.nn.init.normal_(values.head.weight, generator=torch.Generator().manual_seed(0))
    sequences = sequences_of(cut)
    found = values_of(Forward(values.trunk, 256, vision=policy.vision).hidden(sequences), values.head)
    shared = values_of(Forward(policy.model, 256, vision=policy.vision).hidden(sequences), values.head)
    torch.testing.assert_close(found, shared)
    swapped = sequences_of(cut[:1])
    swapped[0].images = tuple(one._replace(sha256=digest(FOX), data=FOX) for one in swapped[0].images)
    other = values_of(Forward(values.trunk, 256, vision=policy.vision).hidden(swapped), values.head)
    assert (other - found[: len(other)]).abs().max() > 1e-3


def test_an_adapter_is_trained_on_rows_with_images(policy: EmbeddedPolicy, cut: list[Row]) -> None:
    model: Any = lora.adapted(copy.deepcopy(policy.model), rank=2, alpha=4, targets=["q_proj", "v_proj"])
    sequences = sequences_of(cut)
    forward = Forward(model, 256, vision=policy.vision)
    found, _ = forward.log_probs(sequences)
    recorded = np.concatenate([sequence.rollout_log_probs for sequence in sequences])
    np.testing.assert_allclose(found.detach().numpy(), recorded, atol=2e-5)  # a fresh one changes nothing
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("most", range(4, 40, 3))
def test_a_cut_leaves_whole_images_alone(cut: list[Row], most: int) -> None:
    row = cut[0]
    for side in ("truncate_left", "truncate_response"):
        [sequence] = sequences_of([row])
        trained = len(sequence.trained)
        lost = getattr(sequence, side)(most)
        assert len(sequence) <= most
        assert lost == trained - len(sequence.trained)
        for one in sequence.images:
            assert (sequence.token_ids[one.start : one.end] == PAD).all()
            assert one.length == FEATURES[one.data]
        assert (sequence.token_ids == PAD).sum() == sum(one.length for one in sequence.images)


def test_rows_whose_images_are_missing_or_marked_as_sampled_are_refused(cut: list[Row]) -> None:
    with pytest.raises(ForestError, match=digest(CAT)):
        sequences_of(cut[:1], {})
    wrong = copy.deepcopy(cut[0])
    wrong.loss_mask[wrong.media[0].start] = 1
    with pytest.raises(ValueError, match="tokens of an image"):
        sequences_of([wrong])
    with pytest.raises(ValueError, match="nothing is known of how this model sees"):
        Forward(tiny_model(), 0).log_probs(sequences_of(cut[:1]))
