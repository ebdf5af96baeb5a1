"""What the traced step takes is what torch's allocator gives out in the real one."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Qwen2Config, Qwen3MoeConfig

from lightning_rl import tutorial
from lightning_rl.config import ConfigError, compose
from lightning_rl.config.schema import Config
from lightning_rl.inference.weights import four_bit
from lightning_rl.memory.budget import budget
from lightning_rl.memory.gpus import stated
from lightning_rl.memory.live_bytes import LiveBytes
from lightning_rl.memory.traced_step import low_bit_state, rows_of, trace
from lightning_rl.ppo.local_workers import FORMATS, LocalWorkers, roles_of
from lightning_rl.training.actor import Actor
from lightning_rl.training.batch import MiniBatch
from lightning_rl.training.critic import Critic
from lightning_rl.training.optimizer import OptimizerConfig
from tests.lightning_rl.memory.models import ONE_LAYER, QWEN_15B, SMALL, qwen

ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
LENGTHS = 64, 64
WAYS: dict[str, list[str]] = {
    "float32": [],
    "checkpointed": [f"{MODEL}enable_gradient_checkpointing=true"],
    "bf16": [f"{ACTOR}fsdp_config.model_dtype=bf16"],
    "autocast": [f"{ACTOR}fsdp_config.dtype=bfloat16"],
    "adapter": [f"{MODEL}lora_rank=8", f"{ACTOR}fsdp_config.model_dtype=bf16"],
    "4 bits": [f"{MODEL}lora_rank=8", f"{MODEL}load_in_4bit=true"],
    "whole rows": [f"{MODEL}use_remove_padding=false", f"{ACTOR}ppo_micro_batch_size_per_gpu=3"],
    "critic": ["algorithm.adv_estimator=gae"],
}


def configured(*words: str) -> Config:
    return compose(command_line=[f"{ACTOR}ppo_max_token_len_per_gpu=512", "actor_rollout_ref.rollout.n=4", *words])


def largest_allocation(work: Callable[[], object]) -> int:
    """How many bytes more than before are allocated at the peak of `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    now = peak = 0
    assert found.profiler is not None
    events: list[Any] = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def allocated(config: Config, model: Any, kind: str) -> tuple[int, int, int]:
    """Of the real models: what forward and backward passes take beside weights and optimizer, an optimizer step
    beside these and the gradients, and forward passes alone beside weights and optimizer."""
    torch.manual_seed(0)
    held = FORMATS[config.actor_rollout_ref.actor.fsdp_config.model_dtype]
    policy = AutoModelForCausalLM.from_config(model, dtype=held).eval()
    if config.actor_rollout_ref.model.load_in_4bit:
        pytest.importorskip("bitsandbytes")
        four_bit.quantize(policy, torch.device("cpu"))
    workers = LocalWorkers(config, policy, roles_of(config, with_critic=kind == "critic"))
    workers.train(Path(), 1)
    learner: Actor | Critic | None = workers.critic if kind == "critic" else workers.actor
    assert learner is not None
    passes = step = scoring = 0
    for shared in (True, False):
        rows = rows_of(config, LENGTHS, shared=shared, vocabulary=model.get_text_config().vocab_size)
        learner.model.train()
        micro = learner._micro_batches(rows)[:2]
        mini = MiniBatch([s for part in micro for s in part], {s.rollout: 1.0 for part in micro for s in part})
        if not learner.optimizer.steps:
            learner.accumulate(mini)
            learner.optimizer.step()
        passes = max(passes, largest_allocation(lambda mini=mini: learner.accumulate(mini)))  # type: ignore[misc]
        step = max(step, largest_allocation(learner.optimizer.step))
        score = partial(learner.forward.log_probs if isinstance(learner, Actor) else learner.forward.hidden, micro[0])
        with learner.forward.without_gradient():
            scoring = max(scoring, largest_allocation(score))
    return passes, step, scoring


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_the_peak_is_that_of_the_allocator(way: str) -> None:
    config, model = configured(*WAYS[way]), AutoConfig.from_pretrained(tutorial.checkpoint())
    traced = trace(config, model, LENGTHS)
    held = traced.critic if way == "critic" else traced.actor
    assert held is not None
    passes, step, scoring = allocated(config, model, way)
    between = held.weights + held.optimizer
    assert held.backward == pytest.approx(between + passes, rel=0.05)
    assert held.backward - between == pytest.approx(passes, rel=0.05)
    assert held.step == pytest.approx(between + held.gradients + step, rel=0.05)
    small = 0.25 if way == "adapter" else 0.05  # its float32 products beside bfloat16 take more for a moment, on a CPU
    assert held.scoring - between == pytest.approx(scoring, rel=small)


@pytest.mark.parametrize(
    "weights", ["initial", *(pytest.param(one, marks=pytest.mark.long) for one in ("averaged", "present"))]
)
def test_teachers_are_counted_and_what_they_say_is_there(weights: str) -> None:
    """Beside a model that is trained: a frozen copy, or none where it is the model itself."""
    teacher = f"distillation.teacher_models={{itself:{{weights:{weights}}}}}"
    loss = ["distillation.distillation_loss.loss_mode=jsd_tail"]
    loss += ["distillation.distillation_loss.use_policy_gradient=false"]
    traced = trace(configured("distillation.enabled=true", teacher, *loss), ONE_LAYER, LENGTHS)
    plain = trace(configured(), ONE_LAYER, LENGTHS)
    assert traced.actor.weights == plain.actor.weights
    assert traced.actor.backward == pytest.approx(plain.actor.backward, rel=0.3)
    assert (traced.reference is not None) == (weights != "present")
    if traced.reference is not None:
        assert traced.reference.weights == plain.actor.weights


def test_a_teacher_of_another_size_is_counted_by_its_own_config(tmp_path: Path) -> None:
    SMALL.save_pretrained(tmp_path)
    teacher = f"distillation.teacher_models={{big:{{model_path:{tmp_path}}}}}"
    traced = trace(configured("distillation.enabled=true", teacher), ONE_LAYER, LENGTHS)
    assert traced.reference is not None
    assert traced.reference.weights == pytest.approx(
        4 * AutoModelForCausalLM.from_config(SMALL).num_parameters(), rel=0.01
    )
    gone = configured("distillation.enabled=true", "distillation.teacher_models={big:{model_path:./none}}")
    with pytest.raises(ConfigError, match=r"a teacher's model_path='none' is neither a folder nor a model id"):
        trace(gone, ONE_LAYER, LENGTHS)


@pytest.mark.long
@pytest.mark.parametrize("words", [pytest.param([], id="kept"), pytest.param(WAYS["checkpointed"], id="checkpointed")])
def test_layers_that_are_left_out_are_counted(words: list[str]) -> None:
    model = copy.deepcopy(SMALL)
    model.num_hidden_layers, model.layer_types = 40, ["full_attention"] * 40
    few, whole = (trace(configured(*words), model, LENGTHS, whole=whole).actor for whole in (False, True))
    assert few.weights == whole.weights
    assert few.optimizer == pytest.approx(whole.optimizer, rel=1e-3)
    assert few.update == pytest.approx(whole.update, rel=0.01)


@pytest.mark.long
def test_a_peak_that_moves_as_layers_are_added_is_found() -> None:
    """A wide output layer: of few layers the peak is at its end, of more at its gradient beside those of all layers."""
    model = Qwen2Config(
        vocab_size=50_000, hidden_size=256, intermediate_size=1024, num_hidden_layers=36, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    few, whole = (trace(configured(), model, LENGTHS, whole=whole).actor for whole in (False, True))
    assert few.update == pytest.approx(whole.update, rel=0.01)


@pytest.mark.long
def test_layers_of_two_kinds_are_left_out_in_pairs() -> None:
    model = Gemma2Config(
        vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=66, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16, final_logit_softcapping=30.0,
    )  # fmt: skip
    few, whole = (trace(configured(), model, LENGTHS, whole=whole).actor for whole in (False, True))
    assert few.update == pytest.approx(whole.update, rel=0.01)


@pytest.mark.long
def test_nothing_is_allocated_for_a_model_of_billions() -> None:
    """Qwen2.5-1.5B: 2.88 GiB of bfloat16, each of gradient and weights, twice that of Adam's averages."""
    config = compose(command_line=[*WAYS["bf16"], *WAYS["checkpointed"]])
    before = largest_allocation(lambda: None)
    found: list[Any] = []
    assert largest_allocation(lambda: found.append(trace(config, QWEN_15B, (2048, 2048), on_gpu=True))) < before + 2**29
    [traced] = found
    held, gib = traced.actor, 2**30
    assert traced.parameters == 1_543_714_304
    assert held.gradients == 2 * traced.parameters
    assert held.weights == pytest.approx(held.gradients, abs=1e4)  # beside buffers
    assert held.optimizer == pytest.approx(2 * held.weights, rel=1e-5)
    assert held.backward < 14.5 * gib
    assert held.logits < 0.5 * gib  # whole, they would be 4.6 GiB of float32, twice


def test_states_of_eight_bits_are_counted_as_torchao_keeps_them() -> None:
    optim = OptimizerConfig(
        lr=1e-3, lr_warmup_steps=0, lr_scheduler_type="constant", min_lr_ratio=0, betas=(0.9, 0.99), weight_decay=0,
        grad_clip=1, training_steps=1, optimizer="AdamW8bit", optimizer_impl="torchao.optim",
    )  # fmt: skip
    large, small = torch.nn.Parameter(torch.zeros(256, 256)), torch.nn.Parameter(torch.zeros(10))
    assert low_bit_state([large, small], optim) == 2 * (65_536 + 256 * 4) + 2 * 10 * 4


def test_tracing_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(configured(), ONE_LAYER, LENGTHS)


EXPERTS = Qwen3MoeConfig(
    hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=500, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip


@pytest.mark.parametrize("way", ["float32", "bf16", "autocast"])
def test_a_mixture_of_experts_is_traced_in_every_format(way: str) -> None:
    traced = trace(configured(*WAYS[way]), EXPERTS, LENGTHS)
    assert traced.parameters == AutoModelForCausalLM.from_config(EXPERTS).num_parameters()
    assert traced.actor.backward > traced.actor.weights + traced.actor.optimizer


LONG = [
    f"{ACTOR}fsdp_config.dtype=bfloat16",
    f"{MODEL}enable_gradient_checkpointing=true",
    f"{ACTOR}ppo_max_token_len_per_gpu={3 * 2**14}",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.dtype=bfloat16",
    f"data.max_prompt_length={2**14}",
    f"data.max_response_length={2**14}",
]


@pytest.mark.long
def test_rows_of_32k_tokens_make_nothing_of_their_square_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers of 16k tokens to one prompt of 16k: a line of 48k."""
    sizes, count = [], LiveBytes.count

    def noting(self: LiveBytes, tensor: torch.Tensor) -> None:
        sizes.append(tensor.numel())
        count(self, tensor)

    monkeypatch.setattr(LiveBytes, "count", noting)
    trace(compose(command_line=LONG), qwen(256, 512, 2, heads=4, keys=2, vocabulary=500, tied=True), (2**14, 2**14),
          on_gpu=True)  # fmt: skip
    line = 3 * 2**14
    assert max(sizes) >= line * 512, "the line was traced whole"
    assert max(sizes) < line**2 / 8


@pytest.mark.long
def test_rows_of_32k_tokens_of_1_5_billion_parameters_fit_on_80_gib_beside_vllm() -> None:
    config = compose(command_line=LONG)
    traced = trace(config, QWEN_15B, (2**14, 2**14), on_gpu=True)
    assert traced.actor.update < 45 * 2**30  # 23 GiB of it weights, gradients and AdamW's averages in float32
    assert budget(config, QWEN_15B, traced, stated("80")).fits
