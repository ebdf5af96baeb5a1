"""The policies of a run, as the config says: one, or several by name that one agent asks, each with keys of its own.

Invariant: what concerns whole rollouts (how many, of which tasks, how chats are written) is the run's, and the same for
all of its policies; each has its own models, optimizer, loss, credit, versions and checkpoint.
"""

import dataclasses
import re
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from lightning_rl.config import ConfigError, derived
from lightning_rl.config.schema import Config, PolicySection, RolloutSection

_SECTIONS = ("actor_rollout_ref", "critic", "algorithm")
# Of these sections, what is the run's.
_OF_THE_RUN = (
    "actor_rollout_ref.model.chat_template",
    "actor_rollout_ref.rollout.agent",
    "actor_rollout_ref.rollout.history",
    "actor_rollout_ref.rollout.multi_turn",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.renderer",
    "actor_rollout_ref.rollout.trace",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "algorithm.agent_failure",
    "algorithm.filter_groups",
    "algorithm.train_spans",
)
_OF_SAMPLING = ("temperature", "top_p", "top_k", "ignore_eos", "val_kwargs", "log_prob_micro_batch_size_per_gpu")
_TAKEN = ("llm", "main_llm", "resources", "rollout", "housekeeping", "reward", "training_state")


@dataclass(frozen=True, kw_only=True)
class RunPolicy:
    """One policy of a run.

    Args:
        name: by which agents and metrics know it; "" where it is the only one.
        config: the run's keys with its own over them.
        agents: a regular expression: calls of agents whose whole tag matches are for it.
        reward: the name of the reward that it counts with; where a rollout has none of that name, the final one.
        train_every, train_from: it learns in the step `train_from`, and in every `train_every`-th from there on (0:
            in none).
        checkpoints_of, pool: it does not learn, but in these steps takes the weights that another policy has in one of
            the run's `pool` newest checkpoints.
    """

    config: Config
    name: str = ""
    agents: str = ""
    reward: str | None = None
    train_every: int = 1
    train_from: int = 1
    checkpoints_of: str | None = None
    pool: int = 5

    def learns_in(self, step: int) -> bool:
        """Whether it is updated in that step, by training or by a checkpoint."""
        since = step - self.train_from
        return self.train_every > 0 and since >= 0 and since % self.train_every == 0

    def updates(self, steps: int) -> int:
        """In how many of the first `steps` steps it is updated."""
        return 0 if not self.train_every else max(0, -(-(steps - self.train_from + 1) // self.train_every))


def policies_of(config: Config) -> list[RunPolicy]:
    """The policies of a run, in the order of the config: the first answers whoever asks for none by name.

    Raises ConfigError for keys that do not go together, or that a policy cannot have for itself.
    """
    if not config.policies:
        return [RunPolicy(config=config)]
    _check_run(config)
    common = replace(config, policies={})
    policies = [_policy(name, section, common) for name, section in config.policies.items()]
    by_name = {policy.name: policy for policy in policies}
    for policy in policies:
        if policy.checkpoints_of is not None:
            _check_copied(policy, by_name.get(policy.checkpoints_of), policies)
    return _warmed_up(policies)


def _warmed_up(policies: list[RunPolicy]) -> list[RunPolicy]:
    """The policies, where some have a critic: those without one wait for none (`trainer.critic_warmup`)."""
    with_critic = [policy.config.algorithm.adv_estimator == "gae" for policy in policies]
    if not any(with_critic):
        return policies
    at_once = {"trainer": {"critic_warmup": 0}}
    return [
        policy if has_one else dataclasses.replace(policy, config=derived(policy.config, at_once))
        for policy, has_one in zip(policies, with_critic, strict=True)
    ]


def base_of_adapter(config: Config) -> tuple[Any, ...] | None:
    """What is equal for policies whose adapters are over the same weights; None: it has no adapter."""
    model = config.actor_rollout_ref.model
    return (model.path, repr(model.override_config), model.load_in_4bit) if model.lora_rank else None


def engine_of_adapters(config: Config) -> tuple[Any, ...] | None:
    """What is equal for policies whose adapters one engine can sample; None: it has no adapter, or its engine is given
    the weights with it.

    An engine cannot be shared by how calls are sampled alone: vLLM is started for temperature 1, or for others.
    """
    section = config.actor_rollout_ref
    rollout, base = section.rollout, base_of_adapter(config)
    if base is None or section.model.lora.merge or rollout.name == "sglang" or rollout.weight_transfer != "file":
        return None
    usual = RolloutSection()
    engine = replace(rollout, **{key: getattr(usual, key) for key in _OF_SAMPLING})
    tempered = rollout.name == "vllm" and rollout.temperature != 1
    return (*base, section.model.attn_implementation, section.actor.fsdp_config.model_dtype, tempered, repr(engine))


def samples_adapter(config: Config) -> bool:
    """Whether an engine that one policy has alone is to be given its adapter, and not the weights that this changes."""
    return config.actor_rollout_ref.model.lora.merge is False and engine_of_adapters(config) is not None


def named(name: str, metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of a policy among those of a run: behind its name, where it has one."""
    return {f"{name}/{metric}": value for metric, value in metrics.items()} if name else metrics


def _policy(name: str, section: PolicySection, common: Config) -> RunPolicy:
    if name in _TAKEN or name in common.gateway.frozen_models():
        raise ConfigError(f"policies.{name}: something else has this name; give the policy another one")
    # The own name stands last: flags such as (?i) must stand first.
    agents = re.escape(name) if section.agents is None else f"{section.agents}|{re.escape(name)}"
    try:
        re.compile(agents)
    except re.error as error:
        raise ConfigError(f"policies.{name}.agents {section.agents!r} is no regular expression: {error}") from error
    try:
        config = derived(common, {key: getattr(section, key) for key in _SECTIONS if getattr(section, key)})
    except ConfigError as error:
        raise ConfigError(f"policies.{name}: {error}") from error
    for key in _OF_THE_RUN:
        if attrgetter(key)(config) != attrgetter(key)(common):
            raise ConfigError(f"policies.{name}.{key} cannot be a policy's own: it is the run's, set {key}")
    return RunPolicy(
        name=name,
        config=config,
        agents=agents,
        reward=section.reward or name,
        train_every=section.train_every,
        train_from=section.train_from,
        checkpoints_of=section.checkpoints_of,
        pool=section.pool,
    )


def _check_run(config: Config) -> None:
    if config.algorithm.train_spans:
        raise ConfigError(
            "algorithm.train_spans=true trains calls of which no URL says which of several policies answered: leave it "
            "out, or have one policy"
        )
    if not any(section.train_every and not section.checkpoints_of for section in config.policies.values()):
        raise ConfigError("policies: none of them learns, since train_every is 0 for all; set one to 1")


def _check_copied(policy: RunPolicy, copied: RunPolicy | None, policies: list[RunPolicy]) -> None:
    """What plays with the checkpoints of another has its kind of weights, and there are checkpoints."""
    key, own, trainer = f"policies.{policy.name}", policy.config.actor_rollout_ref.model, policy.config.trainer
    if copied is None or copied.checkpoints_of is not None:
        learning = ", ".join(each.name for each in policies if each.checkpoints_of is None)
        raise ConfigError(
            f"{key}.checkpoints_of={policy.checkpoints_of} is no policy that learns; there are {learning}"
        )
    copied_model = copied.config.actor_rollout_ref.model
    if own.lora_rank:
        raise ConfigError(
            f"{key}.checkpoints_of: checkpoints hold whole models, and policy {policy.name} is an adapter: set "
            f"{key}.actor_rollout_ref.model.lora_rank=0"
        )
    if copied_model.lora_rank and copied_model.lora_export == "adapter":
        raise ConfigError(
            f"{key}.checkpoints_of: the checkpoints of policy {copied.name} hold its adapter alone: set "
            f"policies.{copied.name}.actor_rollout_ref.model.lora_export=merged"
        )
    if (own.path, own.override_config) != (copied_model.path, copied_model.override_config):
        raise ConfigError(
            f"{key}.actor_rollout_ref.model: it takes the weights of policy {copied.name}, so it must be the same "
            "model: leave out path and override_config"
        )
    if trainer.workers > 1:
        raise ConfigError(
            f"{key}.checkpoints_of: one process takes checkpoints, and {trainer.workers} train: have one worker"
        )
    if trainer.save_freq < 1:
        raise ConfigError(f"{key}.checkpoints_of: a run without checkpoints has none to take: set trainer.save_freq")
