"""Whether a run fits on its GPUs, for people, for programs, and for the run itself, before anything is loaded.

Invariant: the model's config.json is all that is read of it.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from lightning_rl import tutorial
from lightning_rl.config import ConfigError
from lightning_rl.config.policies import policies_of
from lightning_rl.config.schema import Config
from lightning_rl.inference.load import device_of, located
from lightning_rl.memory import gpus
from lightning_rl.memory.budget import PARTS, Budget, at_rest, budget, shared_at_rest
from lightning_rl.memory.choices import Keys, MemoryPlanner, advice
from lightning_rl.memory.gpus import GIB, Hardware
from lightning_rl.memory.speed import Speed, speed
from lightning_rl.memory.traced_step import TracedStep, model_config, trace
from lightning_rl.ppo.local_workers import register_model_code

C = TypeVar("C", bound=Config)
_WIDTH: Final = 48
_WOULD_FIT: Final = "`lightning-rl plan` with the same keys says what would"
_LESS: Final = (
    "set actor_rollout_ref.model.enable_gradient_checkpointing=true or actor_rollout_ref.model.lora_rank, or lower "
    "data.max_response_length"
)
_SIGNS: Final = dict(zip(PARTS, "WGOALKE.", strict=True))


class DoesNotFit(ConfigError):
    """A run needs more memory than its GPUs have."""


class Plan:
    """A run's budget on some hardware, with what would make it fit where it does not.

    Args:
        beside: bytes that other policies of the run hold on the trainer's GPU.

    Attributes:
        changes: keys that make it fit; {}: it fits as it is; None: none are known.
        budget, speed: with these changes, or as it is where there are none.
        as_given: its budget without them.

    Raises ConfigError where trainer and engines cannot be placed on it.
    """

    def __init__(self, config: Config, model: Any, hardware: Hardware, beside: int = 0) -> None:
        planner = MemoryPlanner(config, model, hardware, beside)
        self.hardware = hardware
        self.as_given: Budget = planner.budget(planner.config({}))
        if self.as_given.misplaced is not None:
            raise ConfigError(self.as_given.misplaced)
        self.changes: Keys | None = {} if self.as_given.fits else planner.fitting()
        self.config: Config = planner.config(self.changes or {})
        self.traced: TracedStep = planner.traced(self.config)
        self.budget: Budget = planner.budget(self.config)
        self.speed: Speed = speed(self.config, model, self.traced, self.budget)

    @property
    def fits(self) -> bool:
        """Whether there is a way."""
        return self.changes is not None

    def summary(self) -> str:
        """In a sentence, whether it fits as it is."""
        fullest = self.as_given.fullest
        if self.as_given.fits:
            return f"{fullest.total / GIB:.1f} GiB at most ({fullest.name}), on {self.hardware}"
        words = " ".join(f"{key}={_written(value)}" for key, value in (self.changes or {}).items())
        way = f"it would with {words}" if words else advice(self.config)
        return f"IT DOES NOT FIT on {self.hardware} ({'; '.join(self.as_given.problems)}): {way}"

    def lines(self) -> list[str]:
        """What a person reads."""
        millions = self.traced.parameters / 1e6
        size = f"{millions / 1e3:.2f} billion" if millions >= 1000 else f"{millions:.1f} million"
        text = [f"{size} parameters on {self.hardware}"]
        if self.as_given.fits:
            text.append("it fits as it is")
        else:
            text += [f"as given it does not fit: {problem}" for problem in self.as_given.problems]
            text += ["" if self.changes else f"and no keys make it fit: {advice(self.config)}"]
            text += [f"  {key}={_written(value)}" for key, value in (self.changes or {}).items()]
            text += ["", "with these keys it fits:"] if self.changes else []
        if self.fits:
            text.append(self.budget.placement.line([str(gpu) for gpu in range(self.hardware.count)]))
        return [*text, *self._bars(), *(self._expectations() if self.fits else [])]

    def as_json(self) -> dict[str, Any]:
        """The same for a program; bytes, tokens a second, seconds."""
        return {
            "parameters": self.traced.parameters,
            "fits": self.fits,
            "as_given": {"fits": self.as_given.fits, "problems": self.as_given.problems},
            "changes": self.changes,
            "gpus": {
                "trainer": self.budget.placement.trainer,
                "vllm": self.budget.placement.engines,
                "shared": self.budget.placement.shared,
            },
            "phases": [{"name": one.name, "bytes": dict(one.parts), "total": one.total} for one in self.budget.phases],
            "memory": self.hardware.gpu.memory,
            "rows_at_once": self.budget.at_once or None,
            "sampled_tokens_per_second": self.speed.sampled,
            "trained_tokens_per_second": self.speed.trained,
            "step_seconds": self.speed.step,
        }

    def _bars(self) -> list[str]:
        legend = ", ".join(f"{sign} {part}" for part, sign in _SIGNS.items())
        bars = [bar(phase.parts, self.hardware.gpu.memory) for phase in self.budget.phases]
        names = max(len(phase.name) for phase in self.budget.phases)
        return [
            f"the fullest GPU, GiB of {self.hardware.gpu.memory / GIB:.0f} ({legend}):",
            *(
                f"  {phase.name:<{names}} {phase.total / GIB:6.1f} |{drawn}|"
                for phase, drawn in zip(self.budget.phases, bars, strict=True)
            ),
        ]

    def _expectations(self) -> list[str]:
        cache = f"; room for {self.budget.at_once} rows of full length at once" if self.budget.at_once else ""
        return [
            f"expected by arithmetic: {_range(self.speed.sampled)} tokens/s sampled, "
            f"{_range(self.speed.trained)} tokens/s trained, {_range(self.speed.step)} s a step{cache}"
        ]


def bar(parts: Mapping[str, int], memory: int) -> str:
    """`memory` as so many characters, each part by its sign; what is beyond it is drawn too, up to as much again."""
    drawn, before = "", 0
    for part, size in parts.items():
        before += size
        drawn += _SIGNS[part] * (min(round(before / memory * _WIDTH), 2 * _WIDTH) - len(drawn))
    return f"{drawn:<{_WIDTH}}"


def hardware_of(config: C, stated: str | None) -> tuple[Hardware, C]:
    """The GPUs that are stated, or those here, and the configuration with as many workers as are stated, where it names
    no number itself, places nobody, and has one policy. Raises ConfigError where there are none."""
    if stated is None:
        if (local := gpus.here()) is None:
            raise ConfigError("there is no GPU here: say which ones are meant, --gpus 24 or --gpus 8x80")
        return local, config
    hardware, trainer = gpus.stated(stated), config.trainer
    placed = trainer.devices is not None or config.actor_rollout_ref.rollout.devices not in (None, "colocated")
    if trainer.workers == 1 and not placed and not config.policies:
        trainer = msgspec.structs.replace(trainer, n_gpus_per_node=hardware.per_node, nnodes=hardware.nodes)
    return hardware, msgspec.structs.replace(config, trainer=trainer)


def plans(config: Config, hardware: Hardware) -> dict[str, Plan]:
    """The plan of each policy of a run, by name ("" where it is the only one), beside what the others hold."""
    models = _models(config)
    held = dict.fromkeys(models, 0)
    if len(models) > 1:  # a plan traces by itself
        held = _beside(models, {name: _traced(*each, on_gpu=True) for name, each in models.items()}, hardware)
    return {name: Plan(own, model, hardware, held[name]) for name, (own, model) in models.items()}


def budgets(
    config: Config, hardware: Hardware, *, on_gpu: bool, fetch: bool = False, sampled: bool = True
) -> dict[str, Budget]:
    """What each policy of a run takes as the config is, by name, beside what the others hold. `fetch`: models that are
    not here are taken from the hub; `sampled`: an engine samples from the policy."""
    models = _models(config, fetch=fetch)
    traced = {name: _traced(*each, on_gpu=on_gpu) for name, each in models.items()}
    held = _beside(models, traced, hardware)
    return {
        name: budget(own, model, traced[name], hardware, held[name], sampled=sampled)
        for name, (own, model) in models.items()
    }


def refuse_what_cannot_fit(config: Config, hardware: Hardware | None = None, *, sampled: bool = True) -> None:
    """Raises DoesNotFit for a run that needs more than its GPUs have (None: those here, where it trains on them), and
    ConfigError for one that cannot be placed on them, with what to do. `sampled`: an engine samples from the policy."""
    if hardware is None and device_of(config.trainer.device).type == "cuda":
        hardware = gpus.here(config.trainer.nnodes)
    if hardware is None or not config.trainer.memory_check:
        return
    for name, needed in budgets(config, hardware, on_gpu=True, fetch=True, sampled=sampled).items():
        if needed.misplaced is not None:
            raise ConfigError(needed.misplaced)
        if not needed.fits:
            run = f"policy {name}, beside what the others hold," if name else "the run"
            raise DoesNotFit(
                f"{run} does not fit on {hardware}: {'; '.join(needed.problems)}. {_WOULD_FIT if sampled else _LESS}; "
                "trainer.memory_check=false begins nevertheless"
            )


def _models(config: Config, *, fetch: bool = False) -> dict[str, tuple[Config, Any]]:
    """The config and the model's config of each policy of a run."""
    models: dict[str, tuple[Config, Any]] = {}
    for policy in policies_of(config):
        path = policy.config.actor_rollout_ref.model.path
        folder = located(path)[0] if fetch else path or tutorial.checkpoint()
        register_model_code(policy.config)  # of a folder that is here by now
        models[policy.name] = policy.config, model_config(folder, "actor_rollout_ref.model.path")
    return models


def _beside(
    policies: Mapping[str, tuple[Config, Any]], traced: Mapping[str, TracedStep], hardware: Hardware
) -> dict[str, int]:
    """By policy, the bytes that the others hold where it computes: nothing where each has GPUs of its own."""
    if len(policies) == 1 or any(config.trainer.workers > 1 for config, _ in policies.values()):
        return dict.fromkeys(policies, 0)
    held = {name: at_rest(config, model, traced[name], hardware) for name, (config, model) in policies.items()}
    shared = {name: shared_at_rest(config, model, traced[name], hardware) for name, (config, model) in policies.items()}
    beside: dict[str, int] = {}
    for name in policies:
        there = set(shared[name])  # counted with its own
        beside[name] = 0
        for other in (each for each in policies if each != name):
            beside[name] += held[other] - sum(size for key, size in shared[other].items() if key in there)
            there |= shared[other].keys()
    return beside


def _traced(config: Config, model: Any, *, on_gpu: bool) -> TracedStep:
    return trace(config, model, (config.data.max_prompt_length, config.data.max_response_length), on_gpu=on_gpu)


def _range(ends: tuple[float, float]) -> str:
    return " to ".join(f"{end:,.0f}" if end >= 10 else f"{end:.1f}" for end in ends)


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(each)}" for key, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
