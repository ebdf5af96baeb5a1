"""The step of a run, its own code, on tensors without numbers: what it holds at most, in bytes, by phase.

Invariant: nothing of the step is written again here. The models are made of their config, an actor and a critic are
those of `LocalWorkers`, and what is told is what their tensors take. What a forward pass tries on a few tokens
(`Forward`) cannot be tried without numbers; the usual outcome is assumed, or what the model's config rules out.

Of a model of very many layers most are left out, and counted by what one more of them takes. A peak is the largest of
several sums, each linear in the count of layers, and which of them is the largest may change with the count: so layers
are doubled until one more takes what it took before.
"""

import copy
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import Config, Fsdp, Optim
from lightning_rl.inference.load import attention_of
from lightning_rl.memory.live_bytes import LiveBytes
from lightning_rl.memory.traced_4bit import hold_in_4bit
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.estimators import needs_critic
from lightning_rl.ppo.local_workers import FORMATS, LocalWorkers, checkpoint_activations, roles_of
from lightning_rl.rl.logits import repeats_skipped
from lightning_rl.rl.output_layer import IDENTITY, Behind
from lightning_rl.training.actor import Actor
from lightning_rl.training.batch import MiniBatch, TrainingSequence
from lightning_rl.training.critic import Critic, ValueModel
from lightning_rl.training.forward import Forward
from lightning_rl.training.layers import flex
from lightning_rl.training.layers.output_layer import OutputLayer
from lightning_rl.training.model_traits import refusal_of
from lightning_rl.training.optimizer import OptimizerConfig
from lightning_rl.vision import ModelVision

AnyOptim = TypeVar("AnyOptim", bound=Optim)
_LINEAR = 0.005  # of a peak, by which three traces may be off a line
_OWN_FOLDER = Path()  # of the policy's model, whose config is given
_WHOLE = 32  # layers up to which all are traced: three traces of a few would take as long


@dataclass(frozen=True)
class Held:
    """Bytes of a model that is trained, between its uses and at the peak of its phases.

    `weights`, `gradients` and `optimizer` are what they take; `backward` is the peak of everything in forward and
    backward passes, `logits` what of it is as wide as the vocabulary, `step` the peak of the optimizer's step;
    `scoring` that of forward passes alone.
    """

    weights: int
    gradients: int = 0
    optimizer: int = 0
    backward: int = 0
    logits: int = 0
    step: int = 0
    scoring: int = 0

    @property
    def update(self) -> int:
        """The peak of an update."""
        return max(self.backward, self.step)

    @property
    def activations(self) -> int:
        """What at the peak of the passes is none of the rest."""
        return max(0, self.backward - self.weights - self.gradients - self.optimizer - self.logits)


@dataclass(frozen=True)
class TracedStep:
    """What a run's models hold on one GPU that has all of them; None: there is no such model. `parameters` counts the
    policy's."""

    parameters: int
    actor: Held
    critic: Held | None = None
    reference: Held | None = None


def trace(
    config: Config, model: Any, lengths: tuple[int, int], *, on_gpu: bool = False, whole: bool = False
) -> TracedStep:
    """What a step of a run takes.

    Args:
        config: the run's.
        model: the config of the policy, of transformers.
        lengths: tokens of the prompts and of the responses that rows are made of; where several workers compute a row
            together, a worker is counted with rows of its share.
        on_gpu: attention over packed rows is computed as on a GPU.
        whole: with all layers, which takes longer and comes to the same.
    """
    together = resolved_config.sequence_parallel(config, config.actor_rollout_ref.actor.fsdp_config)
    lengths = -(-lengths[0] // together), -(-lengths[1] // together)
    text, period = model.get_text_config(), _period(model.get_text_config())
    layers: int = text.num_hidden_layers
    steps: list[TracedStep] = []
    count = 4 * period
    while not whole and layers > _WHOLE * period and 2 * count <= layers:
        steps.append(_traced(config, _with_layers(model, count), lengths, on_gpu))
        if _goes_on_linearly(steps[-3:]):
            extrapolated: TracedStep = _extrapolated(steps[-2], steps[-1], (layers - count // 2) / (count // 2))
            return extrapolated
        count *= 2
    return _traced(config, model, lengths, on_gpu)


def rows_of(config: Config, lengths: tuple[int, int], *, shared: bool, vocabulary: int) -> list[TrainingSequence]:
    """Rows that fill two micro-batches of an update, groups with one prompt each, or (not `shared`) rows that have
    nothing in common."""
    prompt, response = lengths
    actor, group = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    tokens = max(actor.ppo_max_token_len_per_gpu, config.critic.ppo_max_token_len_per_gpu, prompt + response)
    at_once = max(actor.ppo_micro_batch_size_per_gpu or 1, tokens // response)
    rng = np.random.default_rng(0)
    taught = _taught(config, response)
    rows = []
    for number in range(-(-2 * at_once // group) * group):
        if number % group == 0 or not shared:
            begin = rng.integers(0, vocabulary, prompt)
        token_ids = np.concatenate([begin, rng.integers(0, vocabulary, response)])
        each = np.ones(response, np.float32)
        rows.append(
            TrainingSequence(
                rollout=number,
                token_ids=token_ids,
                trained=np.arange(prompt, prompt + response),
                rollout_log_probs=-each,
                advantages=each,
                temperature=each,
                old_log_probs=-each,
                reference_log_probs=-each,
                values=each,
                returns=each,
                **taught,
            )
        )
    return rows


def _taught(config: Config, tokens: int) -> dict[str, Any]:
    """What teachers say of so many trained tokens, where there are any."""
    options = resolved_config.distillation_options(config)
    if options is None:
        return {}
    taught: dict[str, Any] = {"teacher_log_probs": np.full(tokens, -1.0, np.float32)}
    if options.top:
        taught["teacher_top_ids"] = np.tile(np.arange(options.top, dtype=np.int64), (tokens, 1))
        taught["teacher_top_log_probs"] = np.full((tokens, options.top), -9.0, np.float32)
    return taught


def _traced(config: Config, model: Any, lengths: tuple[int, int], on_gpu: bool) -> TracedStep:
    vocabulary: int = model.get_text_config().vocab_size
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(repeats_skipped())
        # transformers makes a mask of positions that it cannot read, and these are those of whole rows.
        stack.enter_context(patch("transformers.masking_utils.is_tracing", lambda tensor=None: False))
        # Of the products of experts torch traces those in bfloat16 alone; the way around them holds as much.
        stack.enter_context(patch("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False))
        if on_gpu:  # what flex_attention keeps for the backward pass is what causal attention keeps
            stack.enter_context(patch.object(flex, "usable", lambda device, dtype: dtype in flex.FORMATS))
            stack.enter_context(patch.object(flex, "attend", _causal))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(patch.object(nn.Module, "_apply", _converted))
        live = stack.enter_context(LiveBytes(vocabulary))
        policy = _made(config, model, FORMATS[config.actor_rollout_ref.actor.fsdp_config.model_dtype])
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        if config.actor_rollout_ref.model.load_in_4bit:
            hold_in_4bit(policy)
        with_critic = needs_critic(config, resolved_config.rules(config, None, None).estimator)
        roles = roles_of(config, with_critic=with_critic)
        workers = _TracedWorkers(_with_traceable_optimizers(config), policy, roles, model)
        workers.train(_OWN_FOLDER, 1)
        del policy
        assert workers.actor is not None
        rows = [rows_of(config, lengths, shared=shared, vocabulary=vocabulary) for shared in (True, False)]
        optim = resolved_config.critic_config(config, 1).optim
        critic = None if workers.critic is None else _of_learner(live, workers.critic, rows, optim)
        reference = _of_reference(live, workers, rows)
        actor = _of_learner(live, workers.actor, rows, resolved_config.actor_config(config, 1).optim)
    return TracedStep(parameters, actor, critic, reference)


def _of_learner(
    live: LiveBytes, learner: Actor | Critic, rows: list[list[TrainingSequence]], optim: OptimizerConfig
) -> Held:
    """What a model that is updated by `optim` holds, without what others hold."""
    modules = [learner.model, *([learner.value_head] if isinstance(learner, Actor) and learner.value_head else [])]
    parameters = {id(p): p for module in modules for p in module.parameters()}.values()
    buffers = [buffer for module in modules for buffer in module.buffers()]
    weights = sum(map(_bytes, [*parameters, *buffers]))
    others, of_kinds = live.now - weights, []
    gradients = sum(_bytes(p) for p in parameters if p.requires_grad)
    learner.model.train()
    learner.accumulate(_mini_batch([_short(rows[0][0])]))
    learner.optimizer.step()  # so that the optimizer has its state from here on
    traced = live.now - others - weights
    quantized = low_bit_state(list(parameters), optim)
    optimizer = traced if quantized is None else quantized
    beside = others - optimizer + traced
    for of_kind in rows:
        micro = learner._micro_batches(of_kind)[:2]  # in the second the gradients of the first are there
        with live.peak() as backward:
            learner.accumulate(_mini_batch([sequence for part in micro for sequence in part]))
        with live.peak() as step:
            learner.optimizer.step()
        with live.peak() as scoring, torch.no_grad():
            _score(learner, micro[0])
        of_kinds.append(
            Held(
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                backward=backward[0].total - beside,
                logits=backward[0].logits,
                step=step[0].total - beside,
                scoring=scoring[0].total - beside,
            )
        )
    learner.model.eval()
    largest = max(of_kinds, key=lambda held: held.backward)
    return replace(largest, step=max(held.step for held in of_kinds), scoring=max(held.scoring for held in of_kinds))


def _score(learner: Actor | Critic, micro: list[TrainingSequence]) -> None:
    """As in inference mode, which cannot be traced: autocast keeps no copies of the weights there."""
    with torch.autocast("cpu", enabled=False, cache_enabled=False):
        if isinstance(learner, Actor):
            learner.forward.log_probs(micro)
        else:
            learner.forward.hidden(micro)


def _of_reference(live: LiveBytes, workers: "_TracedWorkers", rows: list[list[TrainingSequence]]) -> Held | None:
    """A reference that is a model of its own, and teachers that are: the weights of all, which score one by one."""
    if not workers.frozen:
        return None
    models = [forward.model for forward in workers.frozen]
    weights = sum(_bytes(one) for model in models for one in (*model.parameters(), *model.buffers()))
    others, peaks, one = live.now - weights, [], workers.frozen[-1]
    for of_kind in rows:
        with live.peak() as scoring, torch.no_grad():
            micro = next(iter(one.micro_batches(of_kind, **workers.bounds())))
            one.log_probs(micro)
        peaks.append(scoring[0].total - others)
    return Held(weights=weights, scoring=max(peaks))


class _TracedWorkers(LocalWorkers):
    """`LocalWorkers` whose frozen models are made of a config too."""

    def __init__(self, config: Config, policy: nn.Module, roles: Any, model: Any) -> None:
        self._of = model
        self.frozen: list[Forward] = []
        super().__init__(config, policy, roles)

    def bounds(self) -> dict[str, Any]:
        """What the reference computes at once."""
        return self._bounds()

    def _teachers_folder(self, path: str) -> Path:
        return Path(path)  # its config is read, and nothing else of it

    def _vocabulary(self, folder: Path) -> int | None:
        return None  # there is no tokenizer: a teacher's logits are as wide as the model says

    def _frozen_model(
        self, folder: Path, formats: Fsdp | None = None, held: torch.dtype | None = None
    ) -> tuple[nn.Module, Forward]:
        formats = self.config.actor_rollout_ref.ref.fsdp_config if formats is None else formats
        held = FORMATS[formats.model_dtype] if held is None else held
        of = self._of if folder == _OWN_FOLDER else model_config(folder)
        model = _made(self.config, of, held).requires_grad_(False)
        self.frozen.append(self._forward(model, formats, None))
        return model, self.frozen[-1]

    def _value_model(self, policy: nn.Module) -> ValueModel:
        critic = self.config.critic  # made anew: a deep copy of fake tensors breaks torch's memory
        of = self._of if critic.model.path is None else AutoConfig.from_pretrained(critic.model.path)
        trunk = _made(self.config, of, FORMATS[critic.fsdp_config.model_dtype]).base_model
        if critic.model.enable_gradient_checkpointing:
            checkpoint_activations(trunk)
        return ValueModel(trunk).eval()

    def _forward(self, model: nn.Module, formats: Fsdp, vision: ModelVision | None) -> Forward:
        packed = self.config.actor_rollout_ref.model.use_remove_padding
        autocast = torch.bfloat16 if formats.dtype == "bfloat16" else None
        return _TracedForward(model, self._pad_id, packed=packed, autocast=autocast)


class _TracedForward(Forward):
    """`Forward` that tries nothing."""

    def _try(self, *, packed: bool) -> None:
        self._narrow = self._head is not None
        if type(self._head) is nn.Linear:
            cap = getattr(self._config, "final_logit_softcapping", None)
            self._output_layer = OutputLayer(self._head, Behind(cap=cap) if cap else IDENTITY, self._autocast)
        self.unpacked_because = refusal_of(self._config) if packed else "it was not asked for"
        self.by_segments = self.unpacked_because is None and self._config._attn_implementation != "eager"

    def _tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.zeros(values.shape, dtype=torch.from_numpy(values[:0]).dtype)


def model_config(path: str | Path, key: str = "a teacher's model_path") -> Any:
    """The config of a model: of a folder, or of an id of the hub. Raises ConfigError."""
    resolved_config.check_model_path(str(path), key)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        elsewhere = "" if Path(path).is_dir() else " (there is no folder of that name here, so the hub was asked)"
        raise ConfigError(f"{key}={str(path)!r}: its config.json cannot be read{elsewhere}: {error}") from error


def _made(config: Config, model: Any, dtype: torch.dtype) -> Any:
    attention = attention_of(model, config.actor_rollout_ref.model.attn_implementation)
    made: Any = AutoModelForCausalLM.from_config(
        copy.deepcopy(model), dtype=dtype, **({} if attention is None else {"attn_implementation": attention})
    )
    made.tie_weights()
    return made.eval()


def _mini_batch(sequences: Sequence[TrainingSequence]) -> MiniBatch:
    return MiniBatch(list(sequences), {sequence.rollout: 1.0 for sequence in sequences})


def low_bit_state(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> int | None:
    """Bytes of the state of one of `torchao.optim`'s, which cannot be traced; None: it is another's.

    Of each parameter two averages of `bits` a number, and a float32 scale for each block of them; small ones are held
    as the parameter is (ao, `optim/adam.py`).
    """
    if not config.optimizer_impl.startswith("torchao."):
        return None
    bits = 4 if "4bit" in config.optimizer else 8 if "8bit" in config.optimizer or "Fp8" in config.optimizer else None
    block = int(config.arguments.get("block_size", 128 if bits == 4 else 256))
    total = 0
    for parameter in parameters:
        numbers = parameter.numel() if parameter.requires_grad else 0
        if bits is None or numbers < 4096 or numbers % block:
            total += 2 * numbers * parameter.element_size()
        else:
            total += 2 * (numbers * bits // 8 + numbers // block * 4)
    return total


def _with_traceable_optimizers(config: Config) -> Config:
    """The same, where optimizers that cannot be traced have no state."""
    policy = config.actor_rollout_ref
    actor = msgspec.structs.replace(policy.actor, optim=_traceable(policy.actor.optim))
    critic = msgspec.structs.replace(config.critic, optim=_traceable(config.critic.optim))
    return msgspec.structs.replace(
        config, actor_rollout_ref=msgspec.structs.replace(policy, actor=actor), critic=critic
    )


def _traceable(optim: AnyOptim) -> AnyOptim:
    if optim.optimizer_impl.startswith("torchao."):
        return msgspec.structs.replace(
            optim,
            optimizer="SGD",
            optimizer_impl="torch.optim",
            override_optimizer_config={"foreach": True, "weight_decay": 0.0},
        )
    return optim


def _causal(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None) -> Tensor:
    grouped = key.shape[1] != query.shape[1]
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def _short(sequence: TrainingSequence) -> TrainingSequence:
    """A few of its tokens."""
    short = copy.copy(sequence)
    short.keep(np.arange(len(sequence.trained)) < 2)
    short.truncate_left(len(sequence) - int(short.trained[0]) + 2)
    short.truncate_response(8)
    return short


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _period(text: Any) -> int:
    """After how many layers their kinds come again; 1: all are alike."""
    kinds = list(getattr(text, "layer_types", None) or ())
    return next((n for n in range(1, len(kinds)) if all(a == b for a, b in zip(kinds, kinds[n:], strict=False))), 1)


def _with_layers(model: Any, layers: int) -> Any:
    """The config with its first layers alone."""
    fewer = copy.deepcopy(model)
    text = fewer.get_text_config()
    kinds = getattr(text, "layer_types", None)
    text.num_hidden_layers = layers
    if kinds:
        text.layer_types = kinds[:layers]
    return fewer


def _goes_on_linearly(steps: Sequence[TracedStep]) -> bool:
    """Whether, of three traces with layers doubled each time, the last ones added to each peak what the first did."""
    if len(steps) < 3:
        return False
    peaks = [
        [getattr(held, name) for held in _held(step) for name in ("backward", "step", "scoring")] for step in steps
    ]
    return all(abs((most - more) - 2 * (more - few)) <= _LINEAR * most for few, more, most in zip(*peaks, strict=True))


def _held(step: TracedStep) -> list[Held]:
    return [held for held in (step.actor, step.critic, step.reference) if held is not None]


def _extrapolated(few: Any, more: Any, steps: float) -> Any:
    """`few` and `steps` times what `more` has beyond it, number by number."""
    if few is None:
        return None
    if isinstance(few, int):
        return round(few + steps * (more - few))
    return type(few)(**{f.name: _extrapolated(getattr(few, f.name), getattr(more, f.name), steps) for f in fields(few)})


def _converted(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """`Module._apply` with new parameters: torch's swaps fake ones, and cannot where anything else refers to them."""
    made: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for part in module.modules() if recurse else [module]:
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    with torch.no_grad():
                        made[id(parameter)] = nn.Parameter(fn(parameter), requires_grad=parameter.requires_grad)
                part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else fn(buffer)
    return module
