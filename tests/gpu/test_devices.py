"""The trainer on a GPU: its attention, its numbers against the CPU's, and its memory against the plan's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.config import compose
from lightning_rl.inference.weights import four_bit
from lightning_rl.memory.traced_step import rows_of, trace
from lightning_rl.ppo.cards import Cards
from lightning_rl.ppo.local_workers import LocalWorkers, roles_of
from lightning_rl.training.batch import MiniBatch
from lightning_rl.training.forward import Forward
from tests.gpu.checks import differences_of_attention, trained
from tests.lightning_rl.memory.models import qwen

LENGTHS = 1024, 512
IN_4_BITS = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.load_in_4bit=true"]
MODEL = qwen(512, 2048, 8, heads=8, keys=2, vocabulary=32_000, tied=True)  # 60 million parameters


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 5e-3), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize(("heads", "keys", "width"), [(4, 2, 64), (12, 2, 128), (4, 4, 32)])
def test_attention_over_a_tree_and_its_gradients(
    dtype: torch.dtype, most: float, heads: int, keys: int, width: int
) -> None:
    found = differences_of_attention("cuda", dtype, heads, keys, width)
    assert max(found.values()) < most, found


def test_packed_rows_go_through_that_attention() -> None:
    made: Any = AutoModelForCausalLM.from_config(MODEL, dtype=torch.float32).to("cuda").eval()
    forward = Forward(made, 0, packed=True, autocast=torch.bfloat16)
    assert (forward.unpacked_because, forward.by_flex) == (None, True)


@pytest.mark.parametrize("words", [[], IN_4_BITS], ids=["whole", "4 bits"])
def test_an_update_is_that_of_the_cpu(words: list[str]) -> None:
    if words:
        pytest.importorskip("bitsandbytes")
    (log_probs, weights), (expected, of_cpu) = trained("cuda", *words), trained("cpu", *words)
    for a, b in zip(log_probs, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
    moved = sum(float((of_cpu[name] - weight).norm()) ** 2 for name, weight in weights.items()) ** 0.5
    assert moved < 0.05 * sum(float(weight.norm()) ** 2 for weight in of_cpu.values()) ** 0.5


@pytest.mark.parametrize(
    "more",
    [[], ["actor_rollout_ref.model.enable_gradient_checkpointing=true"], IN_4_BITS],
    ids=["kept", "checkpointed", "4 bits"],
)
@pytest.mark.usefixtures("free_gpu")
def test_an_update_takes_the_memory_that_the_plan_says(more: list[str]) -> None:
    actor = "actor_rollout_ref.actor."
    words = [f"{actor}fsdp_config.dtype=bfloat16", f"{actor}ppo_max_token_len_per_gpu=8192"]
    config = compose(command_line=[*words, *more, "actor_rollout_ref.rollout.n=4"])
    policy: Any = AutoModelForCausalLM.from_config(MODEL, dtype=torch.float32).eval()
    if config.actor_rollout_ref.model.load_in_4bit:
        pytest.importorskip("bitsandbytes")
        four_bit.quantize(policy, torch.device("cuda"))
    policy.to("cuda")
    workers = LocalWorkers(config, policy, roles_of(config, with_critic=False))
    workers.train(Path(), 1)
    learner = workers.actor
    assert learner is not None
    peaks = []
    for shared in (True, False):
        learner.model.train()
        micro = learner._micro_batches(rows_of(config, LENGTHS, shared=shared, vocabulary=MODEL.vocab_size))[:2]
        mini = MiniBatch([s for part in micro for s in part], {s.rollout: 1.0 for part in micro for s in part})
        for _ in range(2):  # the first makes the optimizer's state, and compiles
            torch.cuda.reset_peak_memory_stats()
            learner.accumulate(mini)
            peak = torch.cuda.max_memory_allocated()
            learner.optimizer.step()
        peaks.append(peak)
    planned = trace(config, MODEL, LENGTHS, on_gpu=True, whole=True).actor.backward
    assert max(peaks) == pytest.approx(planned, rel=0.1), f"{max(peaks) / 2**20:.0f} MiB, planned {planned / 2**20:.0f}"


def test_the_trainer_says_where_it_is() -> None:
    cards = Cards(compose(command_line=["trainer.device=cuda"]), {"actor"})
    assert cards.device == "cuda:0"
    assert str(cards.line()).startswith("training on GPU 0")
