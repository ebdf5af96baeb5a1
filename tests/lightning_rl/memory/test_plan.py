"""The sizes that people use, on the cards that they have: what fits, with which keys, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from transformers import AutoModelForSequenceClassification, DeepseekV3Config, Qwen3MoeConfig, Qwen3NextConfig

from lightning_rl.config import ConfigError, compose
from lightning_rl.config.schema import Config
from lightning_rl.inference.weights.stream import BUCKET_BYTES
from lightning_rl.memory import plan
from lightning_rl.memory.budget import PARTS, Budget, budget, shared_at_rest
from lightning_rl.memory.choices import MemoryPlanner
from lightning_rl.memory.engine import cache_bytes
from lightning_rl.memory.gpus import CONTEXT, FRAGMENTATION, GIB, Gpu, Hardware, card, stated
from lightning_rl.memory.plan import DoesNotFit, Plan, bar, budgets, refuse_what_cannot_fit
from lightning_rl.memory.speed import Speed, _passed, speed
from lightning_rl.memory.traced_step import Held, TracedStep
from lightning_rl.sft_algorithm import as_trained
from tests.lightning_rl.memory.models import ONE_LAYER, QWEN_7B, QWEN_15B

ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor.", "actor_rollout_ref.model."
LONG = ["data.max_prompt_length=2048", "data.max_response_length=2048", f"{ROLLOUT}name=vllm", f"{ROLLOUT}n=8"]


def configured(*words: str) -> Config:
    return compose(command_line=[*LONG, *words])


def planned(model: Any, gpus: str, *words: str) -> Plan:
    return Plan(configured(*words), model, stated(gpus))


@pytest.mark.long
def test_a_model_of_1_5_billion_is_trained_whole_on_24_gib_beside_vllm() -> None:
    """bfloat16 weights, stochastically rounded, with states of 8 bits; vLLM sleeps while they are updated."""
    plan = planned(QWEN_15B, "24")
    assert not plan.as_given.fits  # float32: 16 bytes a parameter, and vLLM awake
    assert plan.fits
    assert plan.changes is not None
    assert plan.changes[f"{ACTOR}optim.optimizer"] == "AdamW8bit"
    assert plan.changes[f"{ACTOR}optim.override_optimizer_config"] == {"bf16_stochastic_round": True}
    assert plan.budget.engine is not None
    assert plan.budget.engine.asleep is not None  # they share the GPU, so vLLM sleeps by itself
    assert plan.budget.fullest.total < 0.9 * 24 * GIB
    assert plan.budget.at_once >= 8  # a group at once


@pytest.mark.long
def test_an_adapter_of_7_billion_is_trained_on_24_gib_beside_vllm() -> None:
    """Two copies of the weights are 28 GiB, so the trainer's wait in main memory while vLLM has its own."""
    plan = planned(QWEN_7B, "24", f"{MODEL}lora_rank=16")
    assert plan.fits
    assert plan.changes is not None
    assert plan.changes[f"{ACTOR}fsdp_config.param_offload"] is True
    assert plan.budget.at_once >= 8
    sending = next(phase for phase in plan.budget.phases if phase.name == "new weights for vLLM")
    assert sending.parts["weights"] == 0
    assert sending.parts["engine"] > 14 * GIB


@pytest.mark.long
def test_a_model_of_7_billion_is_trained_whole_on_eight_of_80_gib() -> None:
    plan = planned(QWEN_7B, "8x80", "trainer.n_gpus_per_node=8", f"{ROLLOUT}data_parallel_size=8")
    assert plan.fits
    update = next(phase for phase in plan.budget.phases if phase.name == "update of the policy")
    assert update.parts["optimizer"] == pytest.approx(8 * plan.traced.parameters / 8, rel=0.01)


@pytest.mark.long
def test_what_no_keys_make_fit_says_what_is_left() -> None:
    plan = planned(QWEN_7B, "24")
    assert not plan.fits
    assert "lora_rank=16" in "\n".join(plan.lines())
    assert plan.as_json()["fits"] is False


@pytest.mark.long
def test_keys_that_a_person_chose_stay() -> None:
    plan = planned(QWEN_15B, "24", f"{ACTOR}optim.optimizer=SGD", f"{ACTOR}fsdp_config.model_dtype=bf16")
    assert not any(".optim." in key for key in plan.changes or {}), "torchao has no SGD"


@pytest.mark.parametrize(
    ("words", "takes"),
    [
        ([], True),
        ([f"{ACTOR}fsdp_config.model_dtype=bf16", f"{ACTOR}optim.optimizer=AdamW8bit"], True),
        ([f"{ACTOR}optim.optimizer=SGD"], False),
        ([f"{ACTOR}optim.override_optimizer_config={{fused: true}}"], False),
    ],
)
def test_torchaos_optimizer_is_advised_with_all_its_keys_or_not_at_all(words: list[str], takes: bool) -> None:
    assert MemoryPlanner(configured(*words), QWEN_15B, stated("24"))._takes_low_bit() is takes


def test_a_run_that_cannot_fit_is_refused_with_the_phase_and_a_way(tmp_path: Path) -> None:
    ONE_LAYER.save_pretrained(tmp_path)  # config.json alone
    config = configured(f"{MODEL}path={tmp_path}")
    refuse_what_cannot_fit(config, stated("24"))
    with pytest.raises(DoesNotFit, match=r"not fit on 1 GiB: .*update of the policy: .* of 1\.0 GiB.*-rl plan"):
        refuse_what_cannot_fit(config, stated("1"))
    refuse_what_cannot_fit(configured(f"{MODEL}path={tmp_path}", "trainer.memory_check=false"), stated("1"))
    refuse_what_cannot_fit(config)  # on a CPU nothing is refused


HELD = Held(
    weights=10 * GIB, gradients=10 * GIB, optimizer=20 * GIB, backward=45 * GIB, step=41 * GIB, scoring=32 * GIB
)


def phases(
    *words: str, held: Held = HELD, critic: Held | None = None, reference: Held | None = None, gpus: str = "80"
) -> dict[str, dict[str, float]]:
    """Parts of the phases in GiB, of a model of 5 billion on 80 GiB."""
    traced = TracedStep(5 * 2**30, held, critic=critic, reference=reference)
    found = budget(configured(*words, f"{ROLLOUT}dtype=bfloat16"), QWEN_15B, traced, stated(gpus))
    return {phase.name: {part: size / GIB for part, size in phase.parts.items() if size} for phase in found.phases}


def test_who_is_there_in_each_phase() -> None:
    awake = phases(f"{ROLLOUT}free_cache_engine=false")
    assert awake["rollouts"]["weights"] == 10
    assert awake["rollouts"]["optimizer"] == 20
    assert "gradients" not in awake["rollouts"]
    assert awake["log probabilities"]["activations"] == 2
    assert awake["rollouts"]["others"] == pytest.approx(CONTEXT / GIB + FRAGMENTATION * 30)
    assert awake["update of the policy"]["activations"] == 5
    assert awake["update of the policy"]["engine"] == 40  # half of the card, all the time
    asleep = phases(f"{ROLLOUT}free_cache_engine=true", f"{ACTOR}fsdp_config.optimizer_offload=true")
    assert asleep["update of the policy"]["engine"] == 1
    assert asleep["update of the policy"]["optimizer"] == 20
    assert "optimizer" not in asleep["rollouts"]
    assert "optimizer" not in asleep["log probabilities"]
    assert asleep["new weights for vLLM"]["weights"] == 10
    assert asleep["new weights for vLLM"]["engine"] == 11  # 10 of bfloat16, and what stays while it sleeps
    away = phases(f"{ROLLOUT}free_cache_engine=true", f"{ACTOR}fsdp_config.param_offload=true")
    assert "weights" not in away["rollouts"]
    assert "weights" not in away["new weights for vLLM"]  # they go by a file, written before
    assert away["log probabilities"]["weights"] == 10
    frozen = phases(reference=Held(weights=10 * GIB, scoring=12 * GIB))
    assert frozen["reference"]["weights"] == 20
    assert frozen["reference"]["activations"] == 2


def test_a_critic_and_a_reference_compute_beside_the_policy_where_each_of_them_waits() -> None:
    """Of the policy the weights wait in main memory, of the critic the optimizer, of the reference nothing."""
    found = phases(
        f"{ACTOR}fsdp_config.param_offload=true",
        "critic.fsdp_config.optimizer_offload=true",
        critic=HELD,
        reference=Held(weights=10 * GIB, scoring=12 * GIB),
    )
    told = {name: (parts["weights"], parts["optimizer"]) for name, parts in found.items()}
    assert told == {
        "rollouts": (20, 20),
        "log probabilities": (30, 20),
        "reference": (30, 20),
        "update of the critic": (30, 40),
        "update of the policy": (30, 20),
        "new weights for vLLM": (20, 20),  # by a file
    }


def test_an_update_holds_logits_and_whatever_else_is_most_at_once() -> None:
    passes, step = (
        phases(held=replace(HELD, logits=2 * GIB, step=most * GIB))["update of the policy"] for most in (41, 49)
    )
    assert (passes["logits"], passes["activations"]) == (2, 3)
    assert (step["logits"], step["activations"]) == (2, 7)


def test_weights_that_are_sent_from_the_gpu_are_there_with_a_buffer() -> None:
    offloaded = [f"{ACTOR}fsdp_config.param_offload=true"]
    sent, written = (
        phases(*offloaded, f"{ROLLOUT}weight_transfer={how}")["new weights for vLLM"] for how in ("nccl", "file")
    )
    assert (sent["weights"], written.get("weights", 0)) == (10, 0)
    for model in (ONE_LAYER, QWEN_15B):  # whose largest tensor is less, and more
        found = budget(
            configured(f"{ROLLOUT}weight_transfer=nccl", f"{ROLLOUT}dtype=bfloat16"),
            model,
            TracedStep(5 * 2**30, HELD),
            stated("80"),
        )
        rollouts, sending = found.phases[0], found.phases[-1]
        buffer = max(BUCKET_BYTES, model.vocab_size * model.hidden_size * 2)
        assert sending.parts["others"] - rollouts.parts["others"] == pytest.approx((1 + FRAGMENTATION) * buffer)


def test_weights_that_are_gathered_for_a_file_are_so_one_at_a_time() -> None:
    def beside(*words: str) -> float:
        found = phases("trainer.n_gpus_per_node=4", f"{ROLLOUT}weight_transfer=file", *words, gpus="4x80")
        return found["new weights for vLLM"]["others"] - found["rollouts"]["others"]

    largest = QWEN_15B.vocab_size * QWEN_15B.hidden_size * 2 / GIB
    assert beside() == pytest.approx((1 + FRAGMENTATION) * largest)
    assert beside(f"{ACTOR}fsdp_config.param_offload=true") == pytest.approx(0), "in main memory"


def test_the_embedded_engine_has_a_cache_for_the_rows_of_a_step() -> None:
    def cache(*words: str) -> float:
        return phases(f"{ROLLOUT}name=embedded", f"{ROLLOUT}max_num_seqs=64", *words)["rollouts"]["kv cache"]

    full = cache("data.train_batch_size=8")
    assert cache("data.train_batch_size=1000") == full
    assert cache("data.train_batch_size=1") < full
    assert cache("data.train_batch_size=8", f"{ROLLOUT}n=1") < full
    of_token = cache_bytes(configured(f"{ROLLOUT}dtype=bfloat16"), QWEN_15B) / GIB
    short = cache("data.train_batch_size=8", f"{ROLLOUT}max_model_len=1024")
    assert short == pytest.approx(2 * 64 * 1024 * of_token, rel=0.01), "what it writes, and keeps for the next turn"


def test_what_adapters_share_is_none_of_the_gpu_where_it_waits_in_main_memory() -> None:
    words = [f"{MODEL}lora_rank=8", f"{ROLLOUT}name=embedded", f"{ROLLOUT}dtype=bfloat16"]
    for offload, owners in (("false", {"trainer", "engine"}), ("true", {"engine"})):
        config = configured(*words, f"{ACTOR}fsdp_config.param_offload={offload}")
        shared = shared_at_rest(config, QWEN_15B, TracedStep(5 * 2**30, HELD), stated("80"))
        assert {owner for owner, *_ in shared} == owners


def test_what_fsdp_gathers_is_more_in_float32_and_where_layers_are_kept_whole() -> None:
    def gathered(*words: str) -> float:
        fsdp = [f"{ACTOR}fsdp_config.{word}" for word in words]
        found = phases("trainer.n_gpus_per_node=4", *fsdp, gpus="4x80")["update of the policy"]
        return found["activations"] - HELD.activations / GIB

    assert phases()["update of the policy"]["activations"] == HELD.activations / GIB, "one process gathers nothing"
    assert gathered() == pytest.approx(gathered("dtype=bfloat16") * 3 / 2)  # 8 bytes and 4 of two units, with 4 of one
    assert gathered("reshard_after_forward=false") > 5 * 4  # all of its parameters


def test_a_reward_model_is_there_while_it_scores(tmp_path: Path) -> None:
    ONE_LAYER.save_pretrained(tmp_path)
    scorer = ["reward.reward_model.enable=true", f"reward.reward_model.model_path={tmp_path}"]
    beside = phases(*scorer)["reward model"]["weights"] - phases()["rollouts"]["weights"]
    weights = AutoModelForSequenceClassification.from_config(ONE_LAYER).num_parameters() * 2  # bfloat16
    assert beside == pytest.approx(weights / GIB, rel=0.01)
    wide = phases(*scorer, "reward.reward_model.dtype=float32")["reward model"]["weights"]
    assert wide - phases()["rollouts"]["weights"] == pytest.approx(2 * weights / GIB, rel=0.01)
    assert "reward model" not in phases(*scorer, "reward.reward_model.device=cpu")


def test_supervised_training_holds_no_engine_and_no_critic(tmp_path: Path) -> None:
    ONE_LAYER.save_pretrained(tmp_path)
    words = ("algorithm.adv_estimator=gae", f"actor_rollout_ref.model.path={tmp_path}", "data.train_batch_size=4096")
    config, gpu = as_trained(configured(*words, f"{ROLLOUT}name=vllm")), stated("80")
    refuse_what_cannot_fit(config, gpu, sampled=False)
    for phase in budgets(config, gpu, on_gpu=True, sampled=False)[""].phases:
        assert phase.name == "update of the policy"
        assert not phase.parts["engine"] + phase.parts["kv cache"]
    with pytest.raises(DoesNotFit, match=r"set actor_rollout_ref\.model\.enable_gradient"):
        refuse_what_cannot_fit(config, Hardware(card(0.001)), sampled=False)


def test_a_cache_holds_what_the_kinds_of_layers_keep() -> None:
    config = configured(f"{ROLLOUT}name=vllm", f"{ROLLOUT}dtype=bfloat16")
    latent = DeepseekV3Config(num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64)
    assert cache_bytes(config, latent) == 61 * (512 + 64) * 2
    mixed = Qwen3NextConfig(num_hidden_layers=48, num_key_value_heads=2, head_dim=256)  # every fourth is full
    assert cache_bytes(config, mixed) == 2 * 12 * 2 * 256 * 2


def test_an_adapter_alone_is_merged_nowhere_and_vllm_has_room_for_two_versions_of_it() -> None:
    held = Held(weights=10 * GIB, gradients=GIB, optimizer=3 * GIB, backward=45 * GIB, step=15 * GIB, scoring=12 * GIB)
    merged, alone = (
        phases(f"{MODEL}lora_rank=8", f"{MODEL}lora.merge={merge}", held=held)["new weights for vLLM"]
        for merge in ("true", "false")
    )
    assert (merged["engine"], alone["engine"]) == (11, 12)  # 2**28 numbers, which have gradients of float32
    largest = QWEN_15B.vocab_size * QWEN_15B.hidden_size * 2 / GIB
    assert merged["others"] - alone["others"] == pytest.approx((1 + FRAGMENTATION) * largest)


def test_policies_on_one_gpu_are_beside_what_the_others_hold_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds 30 GiB of weights and optimizer between its uses, and an engine of 10; one computes with 15 more."""
    ONE_LAYER.save_pretrained(tmp_path)
    monkeypatch.setattr(plan, "trace", lambda *_, **__: TracedStep(5 * 2**30, HELD))
    words = [f"{MODEL}path={tmp_path}", f"{ROLLOUT}name=embedded", f"{ROLLOUT}dtype=bfloat16"]
    alone = configured(*words)
    two = configured(*words, "policies.a.train_every=1", "policies.b.train_every=2")
    needed, beside = (plan.budgets(config, stated("80"), on_gpu=True) for config in (alone, two))
    [cache] = {each.phases[0].parts["kv cache"] for each in (*needed.values(), *beside.values())}
    for name in ("a", "b"):
        assert beside[name].fullest.total - needed[""].fullest.total == 40 * GIB + cache
    refuse_what_cannot_fit(alone, stated("80"))
    with pytest.raises(DoesNotFit, match="policy a, beside what the others hold, does not fit"):
        refuse_what_cannot_fit(two, stated("80"))


def test_what_adapters_share_is_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each 13 GiB in the trainer 9 are under the adapter, and the 10 of the engine are one model."""
    ONE_LAYER.save_pretrained(tmp_path)
    held = Held(weights=10 * GIB, gradients=GIB, optimizer=3 * GIB, backward=45 * GIB, step=15 * GIB, scoring=12 * GIB)
    monkeypatch.setattr(plan, "trace", lambda *_, **__: TracedStep(5 * 2**30, held))
    words = [f"{MODEL}path={tmp_path}", f"{MODEL}lora_rank=8", f"{ROLLOUT}name=embedded", f"{ROLLOUT}dtype=bfloat16"]
    three = [*words, "policies.a.train_every=1", "policies.b.train_every=1", "policies.c.train_every=1"]
    alone, beside = (
        plan.budgets(configured(*given), stated("80"), on_gpu=True)
        for given in (words, [*three, "policies.c.actor_rollout_ref.rollout.max_num_seqs=8"])
    )
    caches = {name: each.phases[0].parts["kv cache"] for name, each in beside.items()}
    rest = 4 * GIB

    def more(name: str) -> float:
        return beside[name].fullest.total - alone[""].fullest.total

    # The engine of c is another one, and a and b share theirs.
    assert more("a") == pytest.approx((rest + caches["b"]) + (rest + 10 * GIB + caches["c"]))
    own = caches["c"] - alone[""].phases[0].parts["kv cache"]
    served = [*words[:2], f"{ROLLOUT}name=vllm", f"{ROLLOUT}devices=[1]"]
    one, two = (
        plan.budgets(configured(*given), stated("2x80"), on_gpu=True)
        for given in (served, [*served, "policies.a.train_every=1", "policies.b.train_every=1"])
    )
    updates = [next(p.total for p in each.phases if p.name == "update of the policy") for each in (two["a"], one[""])]
    assert updates[0] - updates[1] == pytest.approx(rest)  # the engine is on another GPU
    assert more("c") == pytest.approx(own + (rest + 10 * GIB + caches["a"]) + (rest + caches["b"]))


def test_what_is_held_in_shards_is_a_share() -> None:
    config = compose(command_line=["trainer.n_gpus_per_node=4"])
    traced = TracedStep(5 * 2**30, HELD)
    [rollouts, *_] = budget(config, QWEN_15B, traced, stated("4x80")).phases
    assert rollouts.parts["weights"] == 10 * GIB / 4
    pairs = compose(command_line=["trainer.n_gpus_per_node=4", f"{ACTOR}fsdp_config.fsdp_size=2"])
    [rollouts, *_] = budget(pairs, QWEN_15B, traced, stated("4x80")).phases
    assert rollouts.parts["weights"] == 10 * GIB / 2  # two hold a model together
    eight = compose(command_line=["trainer.n_gpus_per_node=4", f"{ACTOR}fsdp_config.fsdp_size=8"])
    [rollouts, *_] = budget(eight, QWEN_15B, traced, stated("4x80")).phases
    assert rollouts.parts["weights"] == 10 * GIB / 4  # no more than there are
    problems = budget(config, QWEN_15B, traced, stated("2x80")).problems
    assert any("4 processes train, a GPU each" in problem and "there are 2" in problem for problem in problems)


def test_vllm_on_gpus_of_its_own_is_a_phase_of_its_own_and_leaves_the_trainers_alone() -> None:
    apart = phases(gpus="2x80")
    assert apart["rollouts"] == {"engine": pytest.approx(40 - apart["rollouts"]["kv cache"]), "kv cache": ANY}
    assert "engine" not in apart["update of the policy"]
    assert "new weights for vLLM" not in apart  # it does not sleep, so nobody waits for its room
    shared = phases(f"{ROLLOUT}devices=colocated", gpus="2x80")
    assert shared == phases()
    assert shared["update of the policy"]["engine"] == 1  # it sleeps by itself where it shares a GPU


def test_vllm_without_room_for_a_row_is_a_problem() -> None:
    config = configured(f"{ROLLOUT}gpu_memory_utilization=0.1", f"{ROLLOUT}dtype=bfloat16")
    found = budget(config, QWEN_15B, TracedStep(5 * 2**30, HELD), stated("80"))
    assert any("no room for its weights" in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "gib"),
    [("24", 1, 1, 24), ("8x80", 1, 8, 80), ("2x8x80", 2, 8, 80), ("1x23.5", 1, 1, 23.5)],
)
def test_gpus_as_they_are_written(text: str, nodes: int, per_node: int, gib: float) -> None:
    found = stated(text)
    assert (found.nodes, found.per_node, found.gpu.memory) == (nodes, per_node, gib * GIB)
    assert found.count == nodes * per_node


@pytest.mark.parametrize("text", ["", "A100", "8x", "x80", "1x2x3x4", "0x80", "0.0", "-24"])
def test_gpus_that_nobody_understands(text: str) -> None:
    with pytest.raises(ConfigError, match="cards x GiB, 8x80"):
        stated(text)


def test_a_bar_is_as_long_as_its_parts() -> None:
    parts = dict.fromkeys(PARTS, 0) | {"weights": 12, "optimizer": 6, "others": 6}
    assert bar(parts, 48).rstrip() == "W" * 12 + "O" * 6 + "." * 6
    assert len(bar(parts, 12)) == 96  # beyond the card


# 32 rollouts of 2048 + 2048 tokens at two servers, of a model of 1e9 parameters; a token of its cache has 28672 bytes.
BYTES = 2e9 + 10 * 2048 * 28672  # of the weights, and of the caches of ten rows, half full in the mean
FORWARD = 2e9 + 2 * 28 * 1536 * 4096  # operations of a token


def speed_of(*words: str, flops: float = 1e14, at_once: int = 10, **more: Any) -> Speed:
    """On a card of 1 TB/s, or on one that is twice as fast in all."""
    config = configured(
        "data.train_batch_size=4", f"{ROLLOUT}data_parallel_size=2", f"{ROLLOUT}dtype=bfloat16",
        f"{MODEL}enable_gradient_checkpointing=false", *words,
    )  # fmt: skip
    hardware = Hardware(Gpu(80 * GIB, (flops, 2 * flops), (1e12, 2e12)))
    return speed(config, QWEN_15B, TracedStep(10**9, HELD, **more), Budget(hardware, [], at_once=at_once))


def test_sampling_reads_or_computes_whichever_takes_longer_and_waits_between_two_tokens() -> None:
    read = BYTES / 0.4e12 + 0.008, BYTES / 1.6e12 + 0.002
    assert speed_of().sampled == pytest.approx([20 / seconds for seconds in read])
    computed = 2e10 / 0.2e12 + 0.008, 2e10 / 0.9e12 + 0.002
    assert speed_of(flops=1e12).sampled == pytest.approx([20 / seconds for seconds in computed])


@pytest.mark.parametrize(
    ("words", "at_once", "rows"),
    [
        ([], 0, 16),  # a cache that nobody has counted holds all
        ([], 100, 16),
        ([f"{ROLLOUT}max_num_seqs=3"], 100, 3),
        (["data.train_batch_size=5", f"{ROLLOUT}n=1"], 100, 3),  # of five, at two servers
        ([f"{ROLLOUT}name=embedded", f"{ROLLOUT}data_parallel_size=1"], 100, 32),
    ],
)
def test_as_many_rows_are_sampled_at_once_as_are_asked_for_and_have_room(
    words: list[str], at_once: int, rows: int
) -> None:
    servers = 1 if any("embedded" in word for word in words) else 2
    seconds = (2e9 + rows * 2048 * 28672) / 0.4e12 + 0.008
    assert speed_of(*words, at_once=at_once).sampled[0] == pytest.approx(rows * servers / seconds)


@pytest.mark.parametrize(
    ("words", "more", "passes"),
    [
        ([], {}, 3 + 1),
        ([f"{MODEL}enable_gradient_checkpointing=true"], {}, 4 + 1),
        ([f"{MODEL}lora_rank=8"], {}, 2 + 1),
        ([f"{ACTOR}ppo_epochs=2"], {}, 6 + 1),
        ([], {"reference": HELD}, 3 + 2),
        ([f"{ACTOR}ppo_epochs=2", "critic.model.enable_gradient_checkpointing=false"], {"critic": HELD}, 6 + 6 + 2),
        (["critic.ppo_epochs=2", "critic.model.enable_gradient_checkpointing=true"], {"critic": HELD}, 3 + 8 + 2),
    ],
)
def test_training_passes_each_token_through_the_models_so_many_times(
    words: list[str], more: dict[str, Any], passes: int
) -> None:
    found = speed_of(*words, **more)
    assert found.trained == pytest.approx((0.2e14 / (passes * FORWARD), 0.9e14 / (passes * FORWARD)))


def test_a_step_samples_its_responses_and_trains_all_of_its_tokens() -> None:
    found, four = speed_of(), speed_of("trainer.n_gpus_per_node=4")
    fast, slow = (32 * 2048 / found.sampled[end] + 32 * 4096 / found.trained[end] for end in (1, 0))
    assert found.step == pytest.approx((fast, slow))
    assert four.trained[0] == pytest.approx(4 * found.trained[0])


def test_of_experts_those_count_as_work_that_a_token_goes_through() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, 3.3 of them for a token, as its makers say."""
    moe = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_experts=128, num_experts_per_tok=8
    )
    assert _passed(moe, 30_532_122_624) == pytest.approx(3.35e9, rel=0.02)
    every_second = Qwen3MoeConfig(num_hidden_layers=4, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=2)
    experts = 2 * 8 * 3 * every_second.hidden_size * every_second.moe_intermediate_size
    assert _passed(every_second, experts) == experts / 4
    assert _passed(QWEN_7B, 7) == 7
