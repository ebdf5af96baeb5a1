"""Two and four workers come to the numbers of one: metrics, weights, optimizer states. Over gloo, on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rl.rl.losses import LOSSES
from lightning_rl.training import state as states
from tests import seeing
from tests.lightning_rl.training.distributed.conftest import Tell
from tests.lightning_rl.training.distributed.stories import CHECKPOINT, Story, Told, rows_with_images

pytestmark = pytest.mark.cluster

A = "actor_rollout_ref.actor."
NOT_ADDED = {"perf/padding_share", "perf/shared_share"}  # say how the work was cut, which is another with more workers

TEACHER = {
    "distillation.enabled": True,
    "distillation.teacher_models": f"{{begun:{{model_path:'{CHECKPOINT}',agents:a}},"
    "average:{weights:averaged,rate:0.5,agents:b},present:{weights:present,agents:c}}",
    "distillation.distillation_loss.control_variate": True,
    "distillation.distillation_loss.topk": 4,
    A
    + "optim.optimizer": "SGD",  # at first policy and teacher agree, and Adam would make steps of what rounding leaves
    A + "optim.lr": 0.01,
}


def assert_same(one: Told, other: Told, *, rtol: float, atol: float) -> None:
    for ours, theirs in zip(one.metrics, other.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - NOT_ADDED:
            assert theirs[name] == pytest.approx(ours[name], rel=rtol, abs=atol), name
    for ours, theirs in zip(one.numbers, other.numbers, strict=True):
        for name in ours:
            for row, its in zip(ours[name], theirs[name], strict=True):
                np.testing.assert_allclose(its, row, rtol=rtol, atol=atol, err_msg=name)
    assert_near(one.end, other.end, rtol, atol)


def assert_near(a: Any, b: Any, rtol: float, atol: float, at: str = "end") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), at
        for key in a:
            assert_near(a[key], b[key], rtol, atol, f"{at}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at
        for n, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_near(one, other, rtol, atol, f"{at}[{n}]")
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(b, a, rtol=rtol, atol=atol, msg=lambda text: f"{at}: {text}")
    else:
        assert a == b, at


@pytest.mark.smoke
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_actor_critic_and_reference(tell: Tell, workers: int) -> None:
    story = Story({A + "use_kl_loss": True, A + "entropy_coeff": 0.01, A + "ppo_epochs": 2}, with_critic=True)
    one, several = tell(1, story), tell(workers, story)
    assert one.metrics[0]["actor/grad_norm"] > 1  # so that clipping is seen
    assert_same(one, several, rtol=1e-3, atol=2e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_to_rounding_of_float64(tell: Tell, workers: int) -> None:
    """But for log probabilities, which are kept as float32."""
    story = Story({A + "optim.optimizer": "SGD", A + "optim.lr": 0.01}, dtype=torch.float64)
    assert_same(tell(1, story), tell(workers, story), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("mode", "together"),
    [pytest.param(mode, 1, marks=pytest.mark.long) for mode in sorted(LOSSES)] + [("kl_cov", 2)],
)
def test_every_loss(tell: Tell, mode: str, together: int) -> None:
    """Some know the whole mini-batch, which no worker has; and all bear a worker that has no row left."""
    keys = {A + "policy_loss.loss_mode": mode, A + "policy_loss.dro_beta": 1.0, A + "policy_loss.clip_cov_ratio": 0.1}
    keys |= {A + "policy_loss.clip_cov_lb": 0.0, A + "policy_loss.kl_cov_ratio": 0.1, A + "ppo_mini_batch_size": 1}
    keys[A + "fsdp_config.ulysses_sequence_parallel_size"] = together
    story = Story(keys | {A + "optim.optimizer": "SGD", A + "optim.lr": 0.01}, seeds=[3], dtype=torch.float64)
    assert_same(tell(1, story), tell(4, story), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {"critic.shared_trunk": "true"},
        {"actor_rollout_ref.model.lora_rank": 2, A + "use_kl_loss": True},
        {"actor_rollout_ref.model.enable_gradient_checkpointing": True},
        {"actor_rollout_ref.model.use_remove_padding": False},
        {A + "fsdp_config.param_offload": True, A + "fsdp_config.optimizer_offload": True, A + "shuffle": True},
        {"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1, A + "ppo_micro_batch_size_per_gpu": 1},
        {A + "ppo_mini_batch_size": 100, A + "ppo_epochs": 2},
        TEACHER,
    ],
    ids=[
        "shared trunk",
        "adapter",
        "checkpointing",
        "whole rows",
        "offload and shuffle",
        "micro-batches of a row",
        "one mini-batch, whose old log probabilities the update finds",
        "a teacher",
    ],
)
def test_what_a_run_may_ask_for(tell: Tell, changes: dict[str, Any]) -> None:
    story = Story(changes, with_critic="critic.shared_trunk" in changes)
    assert_same(tell(1, story), tell(2, story), rtol=1e-3, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("fsdp_size", [2, 1])
def test_groups_of_workers_that_hold_a_whole_model_each(tell: Tell, fsdp_size: int) -> None:
    """Hybrid sharding."""
    keys = {f"{name}fsdp_config.fsdp_size": fsdp_size for name in (A, "actor_rollout_ref.ref.", "critic.")}
    story = Story({A + "use_kl_loss": True, A + "ppo_epochs": 2, **keys}, with_critic=True)
    assert_same(tell(1, story), tell(4, story), rtol=1e-3, atol=2e-5)


def test_layers_that_keep_their_weights_until_the_backward_pass(tell: Tell) -> None:
    keys = {f"{name}fsdp_config.reshard_after_forward": False for name in (A, "actor_rollout_ref.ref.", "critic.")}
    story = Story({A + "use_kl_loss": True, A + "ppo_epochs": 2, **keys}, with_critic=True)
    assert_same(tell(1, story), tell(2, story), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("workers", "together", "changes"),
    [
        (2, 2, {A + "entropy_coeff": 0.01}),
        (2, 2, {A + "ppo_mini_batch_size": 100}),
        pytest.param(4, 2, {"actor_rollout_ref.model.use_remove_padding": False}, marks=pytest.mark.long),
        (2, 2, {"critic.shared_trunk": "true", "actor_rollout_ref.model.enable_gradient_checkpointing": True}),
        pytest.param(2, 2, {"actor_rollout_ref.model.lora_rank": 2}, marks=pytest.mark.long),
        pytest.param(2, 2, TEACHER, marks=pytest.mark.long),
    ],
    ids=["packed", "one mini-batch", "whole rows, two groups", "shared trunk, checkpointing", "adapter", "a teacher"],
)
def test_workers_that_compute_a_row_together(tell: Tell, workers: int, together: int, changes: dict[str, Any]) -> None:
    """Sequence parallelism."""
    names = (A, "critic.") if "critic.shared_trunk" not in changes else (A,)
    keys = {f"{name}fsdp_config.ulysses_sequence_parallel_size": together for name in names}
    story = Story(
        {A + "use_kl_loss": True, A + "ppo_epochs": 2, **keys, **changes}, with_critic=True, dtype=torch.float64
    )
    assert_same(tell(1, story), tell(workers, story), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "logits_at_once"), [("qwen2_vl", 1), pytest.param("qwen3_vl", 2**25, marks=pytest.mark.long)]
)
def test_rows_that_show_images(tell: Tell, tmp_path: Path, family: str, logits_at_once: int) -> None:
    """Some workers' rows show none while others' do, and of one mini-batch none of all: the tower then stays as it is.

    Adam, so a gradient of zero would move the tower where none leaves it alone.
    """
    folder = seeing.make_folder(tmp_path, family=family)
    keys = {A + "use_kl_loss": True}
    story = Story(keys, with_critic=True, seeing=folder, dtype=torch.float64, logits_at_once=logits_at_once)
    shown = [[bool(row.images) for row in rows_with_images(seed)] for seed in story.seeds]
    assert any(any(step) and not all(step) for step in shown)
    one, two = tell(1, story), tell(2, story)
    assert any("visual" in name for name in one.weights)
    assert_same(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"critic.shared_trunk": "true"},
        pytest.param({"actor_rollout_ref.model.lora_rank": 2}, marks=pytest.mark.long),
        pytest.param(TEACHER, marks=pytest.mark.long),
    ],
    ids=["all weights", "shared trunk", "adapter", "a teacher"],
)
def test_logits_by_chunks(tell: Tell, changes: dict[str, Any]) -> None:
    """The layer that runs by chunks is one of the shards that FSDP gathers, forward and backward."""
    keys = {A + "entropy_coeff": 0.01, A + "ppo_max_token_len_per_gpu": 96} | changes
    whole, chunks = (Story(keys, seeds=[0, 1], logits_at_once=size) for size in (2**25, 8192))
    assert_same(tell(1, whole), tell(1, chunks), rtol=1e-3, atol=2e-5)
    assert_same(tell(1, whole), tell(2, chunks), rtol=1e-3, atol=2e-5)


@pytest.mark.long
def test_fewer_rows_than_workers(tell: Tell) -> None:
    story = Story(rollouts=1, with_critic=True)
    assert_same(tell(1, story), tell(4, story), rtol=1e-3, atol=2e-5)


@pytest.mark.smoke
def test_bfloat16_is_as_near_as_bfloat16_is(tell: Tell) -> None:
    exact = tell(1, Story(seeds=[0]))
    story = Story({A + "fsdp_config.dtype": "bfloat16"}, seeds=[0])
    one, two = tell(1, story), tell(2, story)
    far = max(float(np.abs(a - b).max()) for a, b in zip(*(t.numbers[0]["log probs"] for t in (one, two)), strict=True))
    rounded = max(
        float(np.abs(a - b).max()) for a, b in zip(*(t.numbers[0]["log probs"] for t in (exact, two)), strict=True)
    )
    assert 0 < rounded < 0.3
    assert far < 0.3
    assert {tensor.dtype for tensor in two.weights.values()} == {torch.float32}  # only what travels is rounded


def test_a_checkpoint_of_two_goes_on_with_one_and_with_four(tell: Tell) -> None:
    changes = {A + "use_kl_loss": True, A + "optim.lr_warmup_steps": 3}
    whole = tell(1, Story(changes, seeds=[0, 1, 2], with_critic=True))
    of_two = tell(2, Story(changes, seeds=[0, 1], with_critic=True))
    for workers in (1, 4):
        rest = tell(workers, Story(changes, seeds=[2], with_critic=True, begin=of_two.end))
        assert_same(Told(whole.metrics[2:], whole.weights, whole.end, whole.numbers[2:]), rest, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    "writers", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)
def test_what_any_number_has_written_any_number_reads_bit_by_bit(tell: Tell, writers: int, tmp_path: Path) -> None:
    end = tell(writers, Story(seeds=[0], with_critic=True, leave_at=tmp_path / "state")).end
    files = list((tmp_path / "state").glob("*.distcp"))
    assert len(files) == writers
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 1.5 * sum(sizes) / writers  # each has written its own
    assert_near(end, states.read(tmp_path / "state"), rtol=0, atol=0)
    for readers in (1, 2, 4):
        again = Story(seeds=[], with_critic=True, begin_at=tmp_path / "state")
        assert_near(end, tell(readers, again).end, rtol=0, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"actor_rollout_ref.model.lora_rank": 2}, marks=pytest.mark.long),
        pytest.param({A + "fsdp_config.fsdp_size": 1}, marks=pytest.mark.long),
        pytest.param(TEACHER, marks=pytest.mark.long),
    ],
)
def test_as_many_go_on_to_the_same_numbers_bit_by_bit(tell: Tell, changes: dict[str, Any], tmp_path: Path) -> None:
    whole = tell(2, Story(changes, seeds=[0, 1]))
    tell(2, Story(changes, seeds=[0], leave_at=tmp_path / "state"))
    rest = tell(2, Story(changes, seeds=[1], begin_at=tmp_path / "state"))
    assert rest.metrics == whole.metrics[1:]
    assert_near(whole.end, rest.end, rtol=0, atol=0)


def test_whole_tensors_are_loaded_as_well(tell: Tell) -> None:
    end = tell(2, Story(seeds=[0], with_critic=True)).end
    assert_near(end, tell(2, Story(seeds=[], with_critic=True, begin=end)).end, rtol=0, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"critic.model.path": str(CHECKPOINT)}, marks=pytest.mark.long),
        {A + "fsdp_config.model_dtype": "bf16"},
        pytest.param(TEACHER, marks=pytest.mark.long),
    ],
    ids=["a critic of its own", "bf16", "teacher"],
)
def test_models_that_are_read_part_by_part_are_those_that_are_read_whole(tell: Tell, changes: dict[str, Any]) -> None:
    keys = {A + "use_kl_loss": True} | changes
    dtype = torch.bfloat16 if "bf16" in changes.values() else torch.float32
    whole, parts = (
        tell(2, Story(keys, seeds=[0], with_critic=True, dtype=dtype, sliced=sliced)) for sliced in (False, True)
    )
    assert_same(whole, parts, rtol=0, atol=0)
