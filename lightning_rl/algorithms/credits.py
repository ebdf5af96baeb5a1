"""Which credit strategy a config means: a named one, or a function of the user's."""

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import AlgorithmSection
from lightning_rl.loading import load
from lightning_rl_adapters.credit import Strategy, by_name


def strategy_of(algorithm: AlgorithmSection) -> Strategy:
    """`algorithm.credit.function` where it is given, else `algorithm.credit.strategy`.

    Raises NotLoadable for a function that is not there, ConfigError for what is none.
    """
    spec = algorithm.credit.function
    if spec is None:
        return by_name(algorithm.credit.strategy, gamma=algorithm.gamma)
    function = load(spec, "algorithm.credit.function")
    if not callable(function):
        raise ConfigError(f"algorithm.credit.function {spec!r} is {function!r}; it must be a function")
    strategy: Strategy = function
    return strategy
