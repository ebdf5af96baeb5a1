"""The models of a run are what the config says: formats, adapter, critic, reference; a saved state brings them back."""

import copy
import gc
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, Qwen2ForCausalLM

import lightning_rl as lrl
from lightning_rl.config import ConfigError, compose
from lightning_rl.inference.load import AttentionUnknown, load_model
from lightning_rl.inference.weights.check import Tolerance
from lightning_rl.inference.weights.four_bit import quantized_layers
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.local_workers import LocalWorkers
from lightning_rl.ppo.models import Models, SharedEngine
from lightning_rl.training import lora
from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.chat_template import text_of
from lightning_rl.training.reference import Reference
from tests.lightning_rl.ppo.test_ppo import CHECKPOINT

LORA = {"model": {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}}


def models(
    *, with_critic: bool = False, resumed: Path | None = None, critic: dict[str, Any] | None = None, **keys: Any
) -> Models:
    model = {"path": str(CHECKPOINT)} | keys.pop("model", {})
    keys["actor"] = {"optim": {"lr": 1e-3}} | keys.get("actor", {})
    made = Models(
        compose({"actor_rollout_ref": {**keys, "model": model}, "critic": critic or {}, "trainer": {"device": "cpu"}}),
        Path(),
        with_critic=with_critic,
        resumed=resumed,
    )
    made.train(10)
    return made


def test_models_that_nobody_holds_are_gone_before_others_are_loaded() -> None:
    """In a notebook one run follows another, and a GPU has no room for both."""
    earlier: Any = models()
    earlier.run = earlier  # as it is in a run
    model = weakref.ref(earlier.model)
    gc.disable()
    try:
        del earlier
        assert model() is not None
        models()
        assert model() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("schedule", "batches"), [("sync", 4), ("one_step_off", 2), ("async", 2)])
def test_the_engine_has_all_cores_or_half_of_them_beside_the_trainer(
    schedule: str, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    path = {"model": {"path": str(CHECKPOINT)}}
    made = Models(
        compose({"actor_rollout_ref": path, "trainer": {"device": "cpu", "schedule": schedule}}),
        Path(),
        with_critic=False,
    )
    engine: Any = made.policy.engine
    assert len(engine._threads.batches) == batches


def sequences(n: int = 3) -> list[TrainingSequence]:
    tokens = np.random.default_rng(0).integers(10, 900, size=(n, 9))
    zeros = np.zeros(4, np.float32)
    return [
        TrainingSequence(
            rollout=i,
            token_ids=tokens[i],
            trained=np.arange(5, 9),
            rollout_log_probs=zeros,
            advantages=zeros + (-1) ** i,
            temperature=zeros + 1,
            old_log_probs=zeros - 3,
            values=zeros,
            returns=zeros + 1,
        )
        for i in range(n)
    ]


def engine_weights(made: Models) -> dict[str, torch.Tensor]:
    found: Any = made.policy.engine._policy.model
    return dict(found.state_dict())


def step(made: Models) -> None:
    rows = sequences()
    made.actor.update(made.actor.plan(rows, len(rows)))


def valued(made: Models) -> list[float]:
    """The values of one row."""
    assert made.has_values
    [row] = sequences(1)
    [row.values] = made.values([row])
    assert row.values is not None
    found: list[float] = row.values.tolist()
    return found


def of(parameters: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in parameters}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_computed_as_the_keys_say(attention: str) -> None:
    made = models(
        with_critic=True, model={"attn_implementation": attention}, critic={"model": {"path": str(CHECKPOINT)}}
    )
    of_engine: Any = made.policy.engine._policy.model
    assert made.critic is not None
    trunk: Any = made.critic.model.trunk
    parts: list[Any] = [made.model, of_engine, trunk]
    assert [part.config._attn_implementation for part in parts] == [attention] * 3


def test_where_scores_are_capped_attention_is_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, attn_logit_softcapping=0.1, final_logit_softcapping=None,
    )  # fmt: skip
    made = Gemma2ForCausalLM(config).eval()
    made.save_pretrained(tmp_path)
    read: Any = load_model(tmp_path)
    assert read.config._attn_implementation == "eager"
    ids = torch.arange(12)[None]
    made.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(read(input_ids=ids).logits, made(input_ids=ids).logits)
    with pytest.raises(AttentionUnknown, match=r"model\.attn_implementation=sdpa .*; leave it null"):
        load_model(tmp_path, attention="sdpa")


def test_a_chat_template_is_given_to_a_model_that_has_none(tmp_path: Path) -> None:
    """By a file, or by another model; checkpoints have it, and the model's own folder stays as it is."""
    bare, template = tmp_path / "bare", "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    shutil.copytree(CHECKPOINT, bare)
    (bare / "tokenizer_config.json").write_text("{}")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    before = sorted(path.name for path in bare.iterdir())
    (tmp_path / "mine.jinja").write_text(template)
    for given in (str(tmp_path / "mine.jinja"), str(tmp_path / "made")):
        config = compose(
            {"actor_rollout_ref": {"model": {"path": str(bare), "chat_template": given}}, "trainer": {"device": "cpu"}}
        )
        made = Models(config, tmp_path / "run", with_critic=False)
        assert (made.tokenizer / "chat_template.jinja").read_text() == template
        assert resolved_config.renderer(config) == "template"
        made.export(tmp_path / "made")
        assert (tmp_path / "made" / "chat_template.jinja").read_text() == template
    assert sorted(path.name for path in bare.iterdir()) == before
    for wrong, why in ((str(bare), "has no chat template"), ("nowhere", "is no file with a template, and no model")):
        with pytest.raises(ConfigError, match=why):
            text_of(wrong)
    both = {"model": {"chat_template": "x"}, "rollout": {"renderer": "qwen3"}}
    with pytest.raises(ConfigError, match=r"chat_template has no effect where .*renderer=qwen3"):
        lrl.PPO({"actor_rollout_ref": both})


def test_an_adapter_alone_is_trained() -> None:
    made = models(**LORA)
    trained = {name for name, parameter in made.model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-4] for name in trained} == {"q_proj", "v_proj"}
    layer: Any = made.model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert (layer.r["default"], layer.scaling["default"]) == (2, 2.0)
    before = of(made.model.named_parameters())
    sampled = of(engine_weights(made).items())
    step(made)
    made.send_weights(1)
    moved = {name for name, value in made.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert moved <= trained
    sent = {name for name, value in engine_weights(made).items() if not torch.equal(value, sampled[name])}
    assert sent
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in sent)
    assert made.policy.engine.version() == 1


def test_a_model_that_takes_more_memory_or_time_than_others_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Shifted(Qwen2ForCausalLM):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            outputs = super().forward(*arguments, **named)
            outputs.logits = outputs.logits + torch.arange(outputs.logits.shape[-1])
            return outputs

    config = compose({"trainer": {"device": "cpu"}})
    policy = load_model(CHECKPOINT)
    policy.__class__ = Shifted
    policy.config.attention_chunk_size = 4
    workers = LocalWorkers(config, policy, {"actor", "critic"})
    workers.train(CHECKPOINT, 1)
    rows, logits = [record.getMessage() for record in caplog.records if record.name.endswith("local_workers")]
    assert rows.startswith("actor_rollout_ref.model.use_remove_padding has no effect")
    assert rows.endswith("its attention reaches back 4 tokens only")
    assert logits.endswith("does something with its logits that is not known here")


def test_what_is_excluded_gets_no_adapter() -> None:
    made = models(model=LORA["model"] | {"exclude_modules": r".*v_proj"})
    trained = {name.split(".")[-4] for name, parameter in made.model.named_parameters() if parameter.requires_grad}
    assert trained == {"q_proj"}


def test_an_adapter_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model: .*no_such_module"):
        models(model={"lora_rank": 2, "target_modules": ["no_such_module"]})


def test_an_adapter_goes_on_from_a_folder(tmp_path: Path) -> None:
    first = models(model=LORA["model"] | {"lora_export": "adapter"})
    step(first)
    first.export(tmp_path)
    second = models(model=LORA["model"] | {"lora_adapter_path": str(tmp_path)})
    rows = sequences()
    for ours, theirs in zip(first.actor.log_probs(rows), second.actor.log_probs(rows), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    first.send_weights(1)
    second.send_weights(0)  # as at the start: what it samples with before anything was trained
    for name, value in engine_weights(second).items():
        torch.testing.assert_close(value, engine_weights(first)[name], rtol=0, atol=1e-7)


def test_an_adapter_is_exported_merged_or_alone(tmp_path: Path) -> None:
    rows = sequences()
    for form in ("merged", "adapter"):
        made = models(model=LORA["model"] | {"lora_export": form})
        step(made)
        made.export(tmp_path / form)
        folder = tmp_path / form if form == "merged" else CHECKPOINT
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if form == "adapter":
            assert not (tmp_path / form / "model.safetensors").exists()
            loaded = PeftModel.from_pretrained(loaded, str(tmp_path / form))
        assert (tmp_path / form / "tokenizer.json").exists()
        own = made.actor.log_probs(rows)
        for row, expected in zip(rows, own, strict=True):
            logits = loaded(torch.from_numpy(row.token_ids)[None]).logits[0].log_softmax(-1)
            found = logits[row.trained - 1, row.token_ids[row.trained]].detach().numpy()
            np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.long
def test_number_formats_are_what_the_keys_say() -> None:
    def formats(made: Models) -> tuple[Any, Any, Any]:
        engine: Any = made.policy.engine._policy.model
        return next(made.model.parameters()).dtype, next(engine.parameters()).dtype, made.actor.forward._autocast

    float32, bfloat16 = torch.float32, torch.bfloat16
    assert formats(models()) == (float32, float32, None)
    assert formats(models(actor={"fsdp_config": {"model_dtype": "bf16"}})) == (bfloat16, bfloat16, None)
    assert formats(models(actor={"fsdp_config": {"dtype": "bfloat16"}})) == (float32, float32, bfloat16)
    assert formats(models(rollout={"dtype": "bfloat16"})) == (float32, bfloat16, None)
    made = models(with_critic=True, critic={"fsdp_config": {"model_dtype": "bf16", "dtype": "bfloat16"}})
    assert made.critic is not None
    assert next(made.critic.model.trunk.parameters()).dtype == bfloat16
    assert made.critic.forward._autocast == bfloat16
    tolerances = [
        resolved_config.sampler_tolerance(each.config) for each in (made, models(rollout={"dtype": "bfloat16"}))
    ]
    assert tolerances == [Tolerance(largest=1e-4), Tolerance(mean=0.1)]
    cold = resolved_config.sampler_tolerance(models(rollout={"temperature": 0.1}).config)
    assert cold.largest == pytest.approx(1e-3)  # logits that differ by rounding are divided by it
    for each in (made, models(actor={"fsdp_config": {"dtype": "bfloat16"}})):
        step(each)
        assert all(np.isfinite(values).all() for values in each.actor.log_probs(sequences()))


def test_the_critic_begins_where_the_keys_say(tmp_path: Path) -> None:
    like = models(with_critic=True, **LORA)
    assert like.critic is not None
    theirs: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).base_model
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, like.critic.model.trunk.state_dict()[name])
    assert all(parameter.requires_grad for parameter in like.critic.model.parameters())
    torch.manual_seed(0)
    other: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    other.model.norm.weight.data.fill_(3.0)
    other.save_pretrained(tmp_path)
    named = models(
        with_critic=True, critic={"model": {"path": str(tmp_path), "enable_gradient_checkpointing": True}}
    ).critic
    assert named is not None
    trunk: Any = named.model.trunk
    assert trunk.norm.weight[0] == 3.0
    assert trunk.is_gradient_checkpointing
    assert [values.tolist() for values in named.values(sequences(1))] == [[0.0] * 4]


@pytest.mark.parametrize("keys", [{}, LORA], ids=["whole", "adapter"])
def test_a_shared_trunk_has_one_model_and_learns_values_in_the_policys_update(keys: dict[str, Any]) -> None:
    def trained(value_coef: float) -> tuple[Models, list[float]]:
        made = models(with_critic=True, critic={"shared_trunk": True, "value_coef": value_coef}, **keys)
        assert made.critic is None
        assert valued(made) == [0.0] * 4
        rows = sequences()
        losses = [made.actor.update(made.actor.plan(rows, 3))["critic/vf_loss"] for _ in range(5)]
        return made, losses

    made, losses = trained(0.5)
    other, _ = trained(0.0)
    assert losses == sorted(losses, reverse=True)
    theirs = dict(other.model.named_parameters())
    moved = [name for name, weight in made.model.named_parameters() if not torch.equal(weight, theirs[name])]
    assert moved  # the value loss reaches the trunk
    assert np.mean(valued(made)) > 0.01  # its returns are 1


@pytest.mark.parametrize(("steps", "warm_up", "updates"), [(6, 0, 6), (6, 2, 4), (2, 2, 1), (0, 2, 0)])
def test_schedules_of_the_policy_are_over_the_steps_that_update_it(steps: int, warm_up: int, updates: int) -> None:
    keys = [f"trainer.critic_warmup={warm_up}", "algorithm.adv_estimator=gae"]
    assert resolved_config.actor_config(compose(command_line=keys), steps).optim.training_steps == updates
    assert resolved_config.critic_config(compose(command_line=keys), steps).optim.training_steps == steps


def test_a_shared_trunk_stays_while_its_head_warms_up() -> None:
    made = models(with_critic=True, critic={"shared_trunk": True})
    before = of(made.model.named_parameters())
    rows = sequences()
    metrics = made.actor.update(made.actor.plan(rows, 3), values_alone=True)
    assert made.actor.optimizer.progress == 0, "its schedules wait for the policy, as with a critic of its own"
    assert metrics.keys() == {
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vpred_mean",
        "critic/grad_norm",
        "critic/lr",
    }
    assert all(torch.equal(weight, before[name]) for name, weight in made.model.named_parameters())
    assert np.mean(valued(made)) > 0


def test_the_reference_is_what_the_keys_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert models().reference is None
    rows = sequences()
    for keys in ({}, LORA):
        made = models(actor={"use_kl_loss": True}, **keys)
        assert made.reference is not None
        begun = made.actor.log_probs(rows)
        for row, values in zip(rows, made.reference.log_probs(rows), strict=True):
            row.reference_log_probs = values
        made.actor.update(made.actor.plan(rows, len(rows)))
        for reference, actor, before in zip(
            made.reference.log_probs(rows), made.actor.log_probs(rows), begun, strict=True
        ):
            np.testing.assert_allclose(reference, before, atol=1e-6)
            assert not np.allclose(actor, before, atol=1e-6)
    offloads: list[bool] = []
    monkeypatch.setattr(
        "lightning_rl.ppo.local_workers.Reference",
        lambda *a, offload, **k: offloads.append(offload) or Reference(*a, offload=offload, **k),
    )
    ref = {"model_dtype": "bf16", "dtype": "bfloat16", "param_offload": True}
    made = models(actor={"use_kl_loss": True}, ref={"fsdp_config": ref, "log_prob_micro_batch_size_per_gpu": 2})
    reference: Any = made.reference
    assert offloads == [True]
    assert (reference._rows, reference._tokens) == (2, None)
    assert reference._forward._autocast == torch.bfloat16
    assert next(reference._forward.model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("keys", [{}, LORA], ids=["whole", "adapter"])
def test_a_saved_state_and_an_exported_policy_bring_everything_back(keys: dict[str, Any], tmp_path: Path) -> None:
    first = models(with_critic=True, **keys)
    step(first)
    assert first.critic is not None
    rows = sequences()
    first.critic.update(first.critic.plan(rows, 3))
    first.export(tmp_path)
    second = models(with_critic=True, resumed=tmp_path, **keys)
    assert first.state_dict()["value head"] is None
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(2):
        for made in (first, second):
            step(made)
    assert second.critic is not None
    for one, other in ((first.model, second.model), (first.critic.model, second.critic.model)):
        theirs = dict(other.named_parameters())
        assert all(torch.equal(value, theirs[name]) for name, value in one.named_parameters())


def test_a_state_of_other_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="the checkpoint has no critic, the config says otherwise"):
        models(with_critic=True).load_state_dict(models().state_dict())
    with pytest.raises(ConfigError, match="the checkpoint has its adapter, the config"):
        models().load_state_dict(models(**LORA).state_dict())


def test_the_config_of_a_model_has_what_overrides_it(tmp_path: Path) -> None:
    changes = {"max_position_embeddings": 600, "rope_parameters": {"rope_theta": 5000.0}, "embd_pdrop": 0.0}
    config = compose(
        {
            "actor_rollout_ref": {
                "model": {"path": str(CHECKPOINT), "override_config": changes},
                "actor": {"use_kl_loss": True},
            },
            "trainer": {"device": "cpu"},
        }
    )
    made = Models(config, tmp_path, with_critic=False)
    made.train(10)
    made.export(tmp_path / "export")
    assert made.policy.name == CHECKPOINT.name
    assert made.policy.engine.max_model_len == 600
    assert made.reference is not None
    exported = load_model(tmp_path / "export").config
    for found in (
        made.model.config,
        made.policy.engine._policy.model.config,
        made.reference._forward.model.config,
        exported,
    ):
        assert (found.max_position_embeddings, found.rope_parameters["rope_theta"]) == (600, 5000.0)
        assert not hasattr(found, "embd_pdrop"), "a dropout of 0 that the model has not is no change"
    assert load_model(CHECKPOINT).config.max_position_embeddings != 600  # the folder itself stays as it is


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_postion": 6}, "has no max_postion"),
        ({"embd_pdrop": 0.1}, "has no embd_pdrop"),
        ({"hidden_size": "wide"}, "does not fit"),
    ],
)
def test_what_a_models_config_does_not_take_is_named(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    config = compose({"actor_rollout_ref": {"model": {"path": str(CHECKPOINT), "override_config": changes}}})
    with pytest.raises(ConfigError, match=rf"actor_rollout_ref.model.override_config: .*{why}"):
        Models(config, tmp_path, with_critic=False)


@pytest.mark.parametrize(
    ("workers", "together", "why"),
    [
        (4, 3, "are not so many groups of 3 workers; give a divisor of 4"),
        (6, 3, "the model's 4 heads of attention are not so many equal parts"),
    ],
)
def test_what_cannot_compute_a_row_together_is_named(workers: int, together: int, why: str) -> None:
    config = compose(
        {
            "actor_rollout_ref": {"actor": {"fsdp_config": {"ulysses_sequence_parallel_size": together}}},
            "trainer": {"n_gpus_per_node": workers},
        }
    )

    def check() -> None:
        resolved_config._check_workers(config)
        resolved_config.check_sequence_parallel(config, load_model(CHECKPOINT).config, sees=False)

    with pytest.raises(ConfigError, match=rf"ulysses_sequence_parallel_size={together}: .*{why}"):
        check()


def test_rows_with_images_are_not_split() -> None:
    keys = {"actor": {"fsdp_config": {"ulysses_sequence_parallel_size": 2}}}
    config = compose({"actor_rollout_ref": keys, "trainer": {"n_gpus_per_node": 2}})
    with pytest.raises(ConfigError, match="rows that show images are computed by one worker each"):
        resolved_config.check_sequence_parallel(config, load_model(CHECKPOINT).config, sees=True)


@pytest.mark.parametrize(
    "key", ["critic.model.path", "distillation.enabled=true distillation.teacher_models.big.model_path"]
)
def test_a_critic_or_a_teacher_that_is_not_there_is_named_before_anything_is_loaded(key: str, tmp_path: Path) -> None:
    config = compose(command_line=f"{key}=/nowhere/x".split())
    with pytest.raises(ConfigError, match=rf"{key.split()[-1]}='/nowhere/x' is neither a folder nor a model id"):
        Models(config, tmp_path, with_critic=True)


def test_spans_hold_no_images_for_a_model_that_sees() -> None:
    config = compose({"algorithm": {"train_spans": True}})
    resolved_config.check_spans(config, sees=False)
    with pytest.raises(ConfigError, match="agents' own spans hold no images, and this model sees them"):
        resolved_config.check_spans(config, sees=True)


def test_the_reference_is_split_as_the_policy_unless_it_says_otherwise() -> None:
    def asked(workers: int = 4, **of_reference: int) -> list[int]:
        sections = {
            "actor": {"fsdp_config": {"ulysses_sequence_parallel_size": 2}},
            "ref": {"fsdp_config": dict(of_reference)},
        }
        config = compose({"actor_rollout_ref": sections, "trainer": {"n_gpus_per_node": workers}})
        ours = config.actor_rollout_ref
        formats = (ours.actor.fsdp_config, ours.ref.fsdp_config, config.critic.fsdp_config)
        return [resolved_config.sequence_parallel(config, one) for one in formats]

    assert asked() == [2, 2, 1]
    assert asked(ulysses_sequence_parallel_size=4) == [2, 4, 1]
    assert asked(workers=1) == [1, 1, 1]  # verl's commands on one GPU: it has all of each row


@pytest.mark.parametrize("fsdp_size", [0, 3])
def test_groups_of_workers_are_a_part_of_all(fsdp_size: int) -> None:
    config = compose(
        {
            "actor_rollout_ref": {"actor": {"fsdp_config": {"fsdp_size": fsdp_size}}},
            "trainer": {"n_gpus_per_node": 4},
        }
    )
    with pytest.raises(ConfigError, match=rf"fsdp_size={fsdp_size}: .* give a divisor of 4"):
        resolved_config._check_workers(config)


def test_policies_whose_model_takes_one_adapter_at_a_time_share_no_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would send merged weights to the same servers."""
    rollout = {"name": "vllm", "server_urls": ["http://127.0.0.1:1"]}
    model = {"path": str(CHECKPOINT), "lora_rank": 2}
    config = compose({"actor_rollout_ref": {"model": model, "rollout": rollout}, "trainer": {"device": "cpu"}})
    Models(config, tmp_path, with_critic=False, shared=SharedEngine([2, 2], [])).close()
    monkeypatch.setattr("lightning_rl.inference.vllm.policy.shareable", lambda _: False)
    with pytest.raises(ConfigError, match=r"this model cannot be sampled so: .* server_urls, of its own"):
        Models(config, tmp_path, with_critic=False, shared=SharedEngine([2, 2], []))


@pytest.mark.parametrize("name", ["embedded", "vllm"])
def test_an_adapter_that_the_engine_cannot_sample_alone_is_refused(name: str, tmp_path: Path) -> None:
    untied = Qwen2ForCausalLM(AutoConfig.from_pretrained(CHECKPOINT, tie_word_embeddings=False))
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    untied.save_pretrained(tmp_path / "model")

    def takes_adapter(targets: str) -> bool:
        model = {"path": str(tmp_path / "model"), "lora_rank": 2, "target_modules": targets, "lora": {"merge": False}}
        keys = {"model": model, "rollout": {"name": name, "python": sys.executable}}
        config = compose({"actor_rollout_ref": keys, "trainer": {"device": "cpu"}})
        made = Models(config, tmp_path, with_critic=False, shared=SharedEngine([2], []))
        made.close()
        return made.policy.takes_adapter

    assert takes_adapter("all-linear")
    if name == "embedded":
        assert takes_adapter(r".*(q_proj|lm_head)")
    else:
        with pytest.raises(
            ConfigError, match=r"lora\.merge=false .* an adapter on its embedding or its output layer: le"
        ):
            takes_adapter(r".*(q_proj|lm_head)")


def test_several_workers_begin_with_an_adapter_that_changes_nothing_and_load_no_model_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"path": str(CHECKPOINT), "lora_rank": 2, "lora": {"merge": False}}
    rollout = {"name": "vllm", "server_urls": ["http://127.0.0.1:1"]}
    keys = {"actor_rollout_ref": {"model": model, "rollout": rollout}}
    config = compose(keys | {"trainer": {"device": "cpu", "n_gpus_per_node": 2}})
    made = Models(config, tmp_path, with_critic=False, shared=SharedEngine([2], []))
    sent: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(made.policy, "update_weights", lambda weights, version, partial: sent.update(weights))
    monkeypatch.setattr("lightning_rl.ppo.models.load_model", None)
    made._send_first(0)
    made.close()
    own = models(model=model).model
    assert {name: tuple(each.shape) for name, each in sent.items()} == {
        name: tuple(each.shape) for name, each in lora.low_rank(own)
    }
    assert not any(each.any() for each in sent.values())


@pytest.mark.parametrize(
    ("trainer", "versions"),
    [
        ({}, 2),
        ({"schedule": "one_step_off"}, 2),
        ({"schedule": "async"}, 5),
        ({"schedule": "async", "max_off_policy_threshold": 0}, 2),
        ({"schedule": "async", "max_off_policy_threshold": 9}, 10),
    ],
)
def test_a_server_has_room_for_the_versions_that_are_under_way_at_once(trainer: dict[str, Any], versions: int) -> None:
    assert resolved_config.versions_at_once(compose({"trainer": trainer})) == versions


def test_only_engines_that_read_files_are_given_an_adapter_beside_the_model() -> None:
    model = {"lora_rank": 2, "lora": {"merge": False}}
    rollout = {"name": "sglang", "server_urls": ["http://127.0.0.1:1"]}
    with pytest.raises(
        ConfigError, match=r"lora\.merge=false .* rollout\.name=sglang .* takes whole weights: leave it"
    ):
        lrl.PPO({"actor_rollout_ref": {"model": model, "rollout": rollout}})


def test_a_base_in_4_bits_is_sampled_scored_and_exported_with_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    made = models(with_critic=True, model={"lora_rank": 2, "load_in_4bit": True})
    plain = models(model={"lora_rank": 2})
    assert made.config.actor_rollout_ref.actor.optim.lr == plain.config.actor_rollout_ref.actor.optim.lr
    assert len(quantized_layers(made.model)) == 7 * made.policy.model.config.num_hidden_layers
    assert made.critic is not None
    assert not quantized_layers(made.critic.model)
    step(made)
    made.send_weights(1)
    made.export(tmp_path)
    rows, exported = sequences(), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not quantized_layers(exported)
    for name, value in exported.state_dict().items():
        torch.testing.assert_close(engine_weights(made)[name], value, rtol=0, atol=1e-6)
    found, of_plain = made.actor.log_probs(rows), plain.actor.log_probs(rows)
    for row, ours, other in zip(rows, found, of_plain, strict=True):
        logits = exported(torch.from_numpy(row.token_ids)[None]).logits[0].log_softmax(-1)
        theirs = logits[row.trained - 1, row.token_ids[row.trained]].detach().numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        assert np.abs(ours - other).max() > 0.01


def test_weights_in_4_bits_are_under_an_adapter_and_in_one_process() -> None:
    with pytest.raises(ConfigError, match="lora_rank=16"):
        lrl.PPO({"actor_rollout_ref": {"model": {"load_in_4bit": True}}})
    with pytest.raises(ConfigError, match="load_in_4bit=true is for one process"):
        lrl.PPO(
            {
                "actor_rollout_ref": {"model": {"load_in_4bit": True, "lora_rank": 2}},
                "trainer": {"n_gpus_per_node": 2},
            }
        )
