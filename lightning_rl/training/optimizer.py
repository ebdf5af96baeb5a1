"""An optimizer found by name, with its schedule: one `step` per mini-batch, one `schedule_step` per training step.

The learning rate is a pure function of the count of training steps (`lr_factor`). A step whose gradient is no number
changes nothing. Parameters held in bfloat16 keep 8 bits: a change below 1/256 of a weight is lost in its rounding, and
with small learning rates that is nearly every change. Keep parameters in float32 and multiply in bfloat16 (autocast)
where memory allows it.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rl.errors import Explained
from lightning_rl.training import shards
from lightning_rl.training import state as states

_CANNOT_STEP = {
    "LBFGS": "it asks for the loss again and again within a step",
    "SparseAdam": "it takes sparse gradients alone, and a language model has none",
}

# Of torch.optim: one kernel, without temporary copies of all weights. Those of shards are fewer.
_FUSED, _FUSED_OVER_SHARDS = ("Adam", "AdamW", "SGD", "Adagrad"), ("Adam", "AdamW")
_HOW = ("fused", "foreach")  # of a group: how a step is computed here, which another machine may do otherwise


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """verl's `optim`, resolved.

    `lr_warmup_steps` and `training_steps` count training steps (not mini-batches); `arguments` are more arguments of
    the optimizer by name, and win over those named here; `section` is where all this is configured, for messages.
    """

    lr: float
    lr_warmup_steps: int
    lr_scheduler_type: str
    min_lr_ratio: float
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    training_steps: int
    num_cycles: float = 0.5
    optimizer: str = "AdamW"
    optimizer_impl: str = "torch.optim"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    section: str = "actor_rollout_ref.actor.optim"


class Optimizer:
    """Updates those of `parameters` that require a gradient; `steps` counts how often.

    Raises ValueError as `check` does, and where the optimizer refuses these parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        self.steps = 0
        self._config = config
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self._parameters:
            raise ValueError("no parameter requires a gradient: there is nothing to train")
        lr_factor(0, config)
        self._optimizer = _built(self._parameters, config)
        self._configured = ("initial_lr", *_arguments(type(self._optimizer), config))  # of each group
        self._training_steps = config.training_steps
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: lr_factor(step, config))

    def step(self) -> dict[str, float]:
        """Clip the gradients, follow them, and zero them; `grad_norm` (before clipping) and `lr`.

        Raises FloatingPointError, and leaves the parameters, where the norm is no number.
        """
        norm_of_all = shards.full(nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None]))
        nn.utils.clip_grads_with_norm_(self._parameters, self._config.grad_clip, norm_of_all)
        norm = float(norm_of_all)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm} after {self.steps} optimizer steps; lower {self._config.section}.lr"
            )
        metrics = {"grad_norm": norm, "lr": float(self._schedule.get_last_lr()[0])}
        self._optimizer.step()
        self.zero_grad()
        self.steps += 1
        return metrics

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def progress(self) -> float:
        """0 in the run's first training step, 1 in its last."""
        return min(1.0, self._schedule.last_epoch / max(self._training_steps - 1, 1))

    def schedule_step(self) -> None:
        """Go on to the learning rate of the next training step."""
        self._schedule.step()

    def offload(self) -> None:
        """Let the optimizer's state wait in main memory; on a CPU it is there anyway."""
        for state in self._optimizer.state.values():
            state.update({name: value.cpu() for name, value in state.items() if _is_large(value)})

    def onload(self) -> None:
        """Bring the state back to where the parameters are, which `step` needs."""
        for group in self._optimizer.param_groups:
            scalars_too = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if _is_large(value) or (scalars_too and isinstance(value, Tensor)):
                        state[name] = value.to(parameter.device)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights: optimizer, schedule, count of optimizer steps. Of what is shared
        it has this process's part."""
        own = self._optimizer.state_dict()
        groups = [{name: each for name, each in group.items() if name not in _HOW} for group in own["param_groups"]]
        of_parameters = _each(own["state"], lambda value, _: states.to_parts(value))
        return {
            "optimizer": {"state": of_parameters, "param_groups": groups},
            "schedule": self._schedule.state_dict(),
            "optimizer_steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; the weights must be those of the same moment. Learning rate, betas and whatever
        else the configuration gives are those of now."""
        saved, here = state["optimizer"], self._optimizer.param_groups
        groups = [
            group | {name: own[name] for name in (*_HOW, *self._configured) if name in own}
            for group, own in zip(states.whole(saved["param_groups"]), here, strict=True)
        ]
        of_parameters = _each(saved["state"], lambda value, number: _cut(value, self._parameters[number]))
        self._optimizer.load_state_dict({"state": of_parameters, "param_groups": groups})
        schedule, base = states.whole(state["schedule"]), self._schedule.base_lrs
        lrs = [lr * lr_factor(schedule["last_epoch"], self._config) for lr in base]
        self._schedule.load_state_dict(schedule | {"base_lrs": base, "_last_lr": lrs})
        for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        self.steps = state["optimizer_steps"]


def _each(
    of_parameters: Mapping[int, Mapping[str, Any]], change: Callable[[Any, int], Any]
) -> dict[int, dict[str, Any]]:
    """What an optimizer keeps of its parameters, each value changed; `change` is given the parameter's number, too."""
    return {
        number: {name: change(value, number) for name, value in values.items()}
        for number, values in of_parameters.items()
    }


class OptimizerRefused(Explained, ValueError):
    """The optimizer does not take the model's parameters, or its own arguments."""


def check(config: OptimizerConfig) -> None:
    """Raises ValueError for an optimizer, an argument or a schedule that there is not, before a model is there."""
    lr_factor(0, config)
    _built([nn.Parameter(torch.zeros(2, 2))], config)


def lr_factor(step: int, config: OptimizerConfig) -> float:
    """The learning rate of training step `step` (from 0) as a share of `lr`.

    A linear warm-up, whose first step is not 0; then constant, or from 1 to `min_lr_ratio` in a line, or in
    `num_cycles` waves of a cosine.
    """
    if step < config.lr_warmup_steps:
        return (step + 1) / (config.lr_warmup_steps + 1)
    done = min(1.0, (step - config.lr_warmup_steps) / max(config.training_steps - config.lr_warmup_steps, 1))
    height = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(2 * math.pi * config.num_cycles * done)),
    }
    if config.lr_scheduler_type not in height:
        raise ValueError(
            f"{config.section}.lr_scheduler_type {config.lr_scheduler_type!r} is unknown; there are {', '.join(height)}"
        )
    return 1 - (1 - config.min_lr_ratio) * (1 - height[config.lr_scheduler_type])


def _built(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    kind = _class(config)
    arguments = _arguments(kind, config)
    if _may_be_fused(parameters[0], config):
        arguments["fused"] = True
    try:
        return kind(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise OptimizerRefused(
            f"{config.section}: {_name(config)} refuses its arguments or parameters ({error}); take another optimizer"
        ) from error


def _class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    try:
        module = importlib.import_module(config.optimizer_impl)
    except ImportError as error:
        extra = "pip install 'lightning-rl[torchao]'" if config.optimizer_impl.startswith("torchao") else "install it"
        raise ValueError(
            f"{config.section}.optimizer_impl={config.optimizer_impl!r} cannot be imported ({error}); "
            f"{extra}, or take torch.optim"
        ) from error
    kind: Any = getattr(module, config.optimizer, None)
    if not _is_optimizer(kind):
        there = sorted(name for name, one in vars(module).items() if _is_optimizer(one) and name not in _CANNOT_STEP)
        raise ValueError(
            f"{config.section}.optimizer={config.optimizer!r} is no optimizer of {config.optimizer_impl}, which has "
            + (", ".join(there) or "none")
        )
    if config.optimizer in _CANNOT_STEP:
        raise ValueError(
            f"{config.section}.optimizer={config.optimizer!r} cannot train here: {_CANNOT_STEP[config.optimizer]}"
        )
    optimizer_class: type[torch.optim.Optimizer] = kind
    return optimizer_class


def _arguments(kind: type[torch.optim.Optimizer], config: OptimizerConfig) -> dict[str, Any]:
    """What `kind` is called with: `betas` and `weight_decay` only where it has them."""
    parameters = inspect.signature(kind).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    names = [name for name in parameters if name != "params"]
    if (unknown := sorted(set(config.arguments) - set(names))) and not (takes_any and "params" not in unknown):
        raise ValueError(
            f"{config.section}.override_optimizer_config: {_name(config)} has no {', '.join(unknown)}; "
            f"it takes {', '.join(names)}"
        )
    common = {"betas": config.betas, "weight_decay": config.weight_decay}
    own = {name: value for name, value in common.items() if name in names}
    return {"lr": config.lr, **own, **config.arguments}


def _may_be_fused(parameter: nn.Parameter, config: OptimizerConfig) -> bool:
    if parameter.device.type not in ("cpu", "cuda") or config.optimizer_impl != "torch.optim":
        return False
    chosen = {"fused", "foreach", "differentiable"} & set(config.arguments)
    return not chosen and config.optimizer in (_FUSED_OVER_SHARDS if isinstance(parameter, DTensor) else _FUSED)


def _is_optimizer(kind: object) -> bool:
    return inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer


def _name(config: OptimizerConfig) -> str:
    return f"{config.optimizer_impl}.{config.optimizer}"


def _cut(value: Any, parameter: nn.Parameter) -> Any:
    value = states.from_parts(value)
    return shards.cut(value, parameter) if isinstance(value, Tensor | states.Stored) else value


def _is_large(value: object) -> bool:
    """A tensor as large as a parameter; counts of steps stay where the optimizer put them."""
    return isinstance(value, Tensor) and value.dim() > 0
