"""Which credit strategy and which estimator a config means, whether they go together, and what they need.

An estimator of tokens sees a rollout as a tree of sampled tokens with its rewards on them: `tree_of` makes it.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import AlgorithmSection, Config
from lightning_rl.loading import load
from lightning_rl.rl.advantages import ESTIMATORS, Estimator, OfOutcomes, OfTokens
from lightning_rl.rl.baselines import Floats, OutcomeEstimator
from lightning_rl.rl.kl import AdaptiveKL, FixedKL, check_kind
from lightning_rl.rl.shaping import OverlongBuffer
from lightning_rl.rl.token_advantages import TokenTree
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import Rewards, Strategy, by_name
from lightning_rl_adapters.forest import Forest


def strategy_of(algorithm: AlgorithmSection) -> Strategy:
    """`algorithm.credit.function` where it is given, else `algorithm.credit.strategy`.

    Raises NotLoadable for a function that is not there, ConfigError for what is none.
    """
    spec = algorithm.credit.function
    if spec is None:
        return by_name(algorithm.credit.strategy, gamma=algorithm.gamma, step_weight=algorithm.credit.step_weight)
    strategy: Strategy = load(spec, "algorithm.credit.function")
    check_function(strategy, f"algorithm.credit.function {spec!r}", "forest", "rewards")
    return strategy


def check_function(function: Any, name: str, *parameters: str) -> None:
    """Raises ConfigError for what cannot be called with so many arguments; `name` is what errors call it."""
    wanted = f"it must be a function of ({', '.join(parameters)})"
    if not callable(function):
        raise ConfigError(f"{name} is {function!r}; {wanted}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of what is written in C
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ConfigError(f"{name} takes {signature}; {wanted}") from error


def check_reward(reward: Any) -> None:
    """Raises ConfigError for what is no function of a group's rollouts: TRL's functions, a list, an async one."""
    trl = "lightning_rl.rewards.trl.TrlRewards"
    if isinstance(reward, list | tuple):
        raise ConfigError(f"PPO(reward=...) is a list, and takes one function; of TRL's reward functions, {trl}([...])")
    if inspect.iscoroutinefunction(reward):
        raise ConfigError(
            f"PPO(reward=...) is async; make it a plain function of a group's rollouts (reward functions in files, and "
            f"those in {trl}, may be async)"
        )
    if inspect.isfunction(reward) and len(names := inspect.signature(reward).parameters) > 1 and "completions" in names:
        raise ConfigError(
            f"PPO(reward=...) takes {inspect.signature(reward)}, as TRL's reward functions do: give it as "
            f"{trl}({reward.__name__})"
        )


def estimator_of(
    config: Config, strategy: Strategy | None, own: Estimator | OutcomeEstimator | None
) -> Estimator | OutcomeEstimator:
    """`own` where it is given, else `algorithm.adv_estimator`; `strategy` is the one given beside the config.

    Raises ConfigError for a credit strategy that it would have no use for.
    """
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    estimator = ESTIMATORS[name] if own is None else own
    if not isinstance(estimator, OfOutcomes | OfTokens):
        check_function(estimator, "PPO(estimator=...)", "outcomes", "settings")
    plain = strategy is None and algorithm.credit.function is None and algorithm.credit.strategy == "final"
    if not plain and (isinstance(estimator, OfTokens) or estimator is ESTIMATORS["gdpo"]):
        spread = "rewards over tokens" if isinstance(estimator, OfTokens) else "named rewards over rollouts"
        raise ConfigError(
            f"algorithm.adv_estimator={name} spreads {spread} itself, so a credit strategy has no effect on it: leave "
            "algorithm.credit.strategy=final, or take an estimator that compares credits, such as grpo"
        )
    return estimator


def gdpo_weights(config: Config) -> dict[str, float]:
    """The weights of the named rewards that gdpo compares; none under other estimators.

    Raises ConfigError where there are no names, not one weight for each, or a penalty that is not among them.
    """
    algorithm = config.algorithm
    if algorithm.adv_estimator != "gdpo":
        return {}
    names = algorithm.gdpo_reward_keys or []
    weights = [1.0] * len(names) if algorithm.gdpo_reward_weights is None else algorithm.gdpo_reward_weights
    if not names or len(weights) != len(names):
        raise ConfigError(
            "algorithm.adv_estimator=gdpo compares named rewards: set algorithm.gdpo_reward_keys, and as many "
            f"gdpo_reward_weights or none; there are {len(names)} names and {len(weights)} weights"
        )
    if algorithm.use_kl_in_reward and "kl_penalty" not in names:
        raise ConfigError(
            "algorithm.adv_estimator=gdpo compares named rewards, and the distance from the reference is none of them: "
            "put kl_penalty into algorithm.gdpo_reward_keys, or set algorithm.use_kl_in_reward=false"
        )
    if config.reward.overlong_buffer.enable and "overlong_penalty" not in names:
        raise ConfigError(
            "algorithm.adv_estimator=gdpo compares named rewards, and reward.overlong_buffer's is not among them: put "
            "overlong_penalty into algorithm.gdpo_reward_keys"
        )
    return dict(zip(names, weights, strict=True))


def needs_critic(config: Config, estimator: Estimator | OutcomeEstimator) -> bool:
    """Whether a critic is trained: `critic.enable`, and where that is null, if the estimator needs one.

    Raises ConfigError where the two disagree.
    """
    needs = isinstance(estimator, OfTokens) and estimator.needs_values
    if config.critic.enable is False and needs:
        raise ConfigError("algorithm.adv_estimator=gae needs a critic: leave critic.enable=null")
    if config.critic.enable and not needs:
        raise ConfigError(
            f"critic.enable=true has no effect under algorithm.adv_estimator={config.algorithm.adv_estimator}, which "
            "asks no critic: set it to null, or take gae"
        )
    return needs


def needs_greedy(estimator: Estimator | OutcomeEstimator) -> bool:
    """Whether a greedy rollout of every task is asked for, beside the group."""
    return isinstance(estimator, OfOutcomes) and estimator.needs_greedy


def needs_reference(config: Config) -> bool:
    """Whether log probabilities of the model that training began with are needed."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def kl_controller_of(config: Config) -> FixedKL | AdaptiveKL | None:
    """`algorithm.kl_ctrl`; None where rewards are not lowered. Raises ConfigError for a kind of distance that there is
    not, here or in the loss."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    if actor.use_kl_loss:
        _check_kind("actor_rollout_ref.actor.kl_loss_type", actor.kl_loss_type)
    if not algorithm.use_kl_in_reward:
        return None
    _check_kind("algorithm.kl_penalty", algorithm.kl_penalty)
    control = algorithm.kl_ctrl
    if control.type == "fixed":
        return FixedKL(control.kl_coef)
    return AdaptiveKL(control.kl_coef, target=control.target_kl, horizon=control.horizon)


def _check_kind(key: str, kind: str) -> None:
    try:
        check_kind(kind)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def overlong_buffer_of(config: Config) -> OverlongBuffer | None:
    """`reward.overlong_buffer`, None where it is off. Raises ConfigError for one longer than what it stands before."""
    buffer = config.reward.overlong_buffer
    longest = config.data.max_response_length if buffer.max_resp_len is None else buffer.max_resp_len
    if not buffer.enable:
        return None
    if buffer.len > longest:
        raise ConfigError(
            f"reward.overlong_buffer.len={buffer.len} is more than the {longest} tokens that it is a part of: "
            "lower it, or raise reward.overlong_buffer.max_resp_len (null: data.max_response_length)"
        )
    return OverlongBuffer(max_length=longest, length=buffer.len, factor=buffer.penalty_factor)


def tree_of(
    forest: Forest,
    rewards: Rewards,
    steps: Sequence[NDArray[np.int64]],
    *,
    of_tokens: Mapping[str, Floats],
    values: Sequence[Floats] | None = None,
) -> TokenTree:
    """The tree of a rollout with C calls, each token of `steps` a step of time.

    A call's rewards stand on its last step, and every branch ends with the final one: a fork takes the mean of its
    branches, so before it there is the final reward once. A call without steps hands its rewards to its parent.

    Args:
        steps: per call, the places in its answer that are steps of time. Length C.
        of_tokens: by call id, rewards of the single tokens that the call sampled.
        values: per call, a critic's values at its steps. Length C.
    """
    nodes = list(forest.nodes.values())
    place = {node.call.call_id: number for number, node in enumerate(nodes)}
    parents = [None if node.parent is None else place[node.parent.call.call_id] for node in nodes]
    ends = [math.fsum(rewards.of_calls.get(node.call.call_id, {}).values()) for node in nodes]
    on_steps = [_at_steps(of_tokens.get(node.call.call_id), places) for node, places in zip(nodes, steps, strict=True)]
    for number in reversed(range(len(nodes))):
        if not nodes[number].children:
            ends[number] += rewards.ending
        parent = parents[number]
        if len(on_steps[number]):
            on_steps[number][-1] += ends[number]
        elif parent is not None:  # no step of its own to stand on
            ends[parent] += ends[number] / len(nodes[parent].children)
    return TokenTree(
        parents=parents,
        context=[len(node.call.prompt_ids) for node in nodes],
        rewards=on_steps,
        log_probs=[_log_probs(node.call)[places] for node, places in zip(nodes, steps, strict=True)],
        values=values,
    )


def _at_steps(rewards: Floats | None, steps: NDArray[np.int64]) -> Floats:
    return np.zeros(len(steps)) if rewards is None else rewards[steps]  # a copy: `steps` are indices


def _log_probs(call: Call) -> Floats:
    if call.logprobs is None or call.logprob_kind != "sampled":
        return np.full(len(call.response_ids), np.nan)
    return np.asarray(call.logprobs, dtype=np.float64)
