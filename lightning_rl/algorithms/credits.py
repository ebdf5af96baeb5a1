"""Which credit strategy and which estimator of advantages a config means, and whether the two go together."""

from typing import Final

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import AlgorithmSection, Config
from lightning_rl.loading import load
from lightning_rl.rl.advantages import ESTIMATORS, Estimator, OfTokens
from lightning_rl.rl.baselines import OutcomeEstimator
from lightning_rl.rl.shaping import OverlongBuffer
from lightning_rl_adapters.credit import Strategy, by_name

_NOT_YET: Final = {
    "gae": "a critic's value of every token, and no critic is trained yet",
    "remax": "a greedy rollout of every task, and none is asked for yet",
}


def strategy_of(algorithm: AlgorithmSection) -> Strategy:
    """`algorithm.credit.function` where it is given, else `algorithm.credit.strategy`.

    Raises NotLoadable for a function that is not there, ConfigError for what is none.
    """
    spec = algorithm.credit.function
    if spec is None:
        return by_name(algorithm.credit.strategy, gamma=algorithm.gamma, step_weight=algorithm.credit.step_weight)
    function = load(spec, "algorithm.credit.function")
    if not callable(function):
        raise ConfigError(f"algorithm.credit.function {spec!r} is {function!r}; it must be a function")
    strategy: Strategy = function
    return strategy


def estimator_of(
    config: Config, strategy: Strategy | None, own: Estimator | OutcomeEstimator | None
) -> Estimator | OutcomeEstimator:
    """`own` where it is given, else `algorithm.adv_estimator`; `strategy` is the one given beside the config.

    Raises ConfigError for one that lacks what it needs, and for a credit strategy that it would have no use for.
    """
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    if own is None and name in _NOT_YET:
        possible = ", ".join(other for other in ESTIMATORS if other not in _NOT_YET)
        raise ConfigError(f"algorithm.adv_estimator={name} needs {_NOT_YET[name]}; there are {possible}")
    estimator = ESTIMATORS[name] if own is None else own
    plain = strategy is None and algorithm.credit.function is None and algorithm.credit.strategy == "final"
    if not plain and (isinstance(estimator, OfTokens) or estimator is ESTIMATORS["gdpo"]):
        what = "rewards over tokens" if isinstance(estimator, OfTokens) else "named rewards over rollouts"
        raise ConfigError(
            f"algorithm.adv_estimator={name} spreads {what} itself, so a credit strategy has no effect on it: leave "
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
    if config.reward.overlong_buffer.enable and "overlong_penalty" not in names:
        raise ConfigError(
            "algorithm.adv_estimator=gdpo compares named rewards, and reward.overlong_buffer's is not among them: put "
            "overlong_penalty into algorithm.gdpo_reward_keys"
        )
    return dict(zip(names, weights, strict=True))


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
