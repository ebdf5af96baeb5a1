"""Which calls of the policy are trained: by the agent that made them, or by a function. The others are context.

A call's agent is the tag of its URL (`llm.for_agent(name)`, `.../agent/{name}/v1`); calls of an untagged URL have none.
"""

import re
from collections.abc import Callable

from lightning_rl.config import ConfigError
from lightning_rl_adapters.call import Call


def selection(agents: str | None, function: Callable[[Call], bool] | None) -> Callable[[Call], bool] | None:
    """What a call must fulfil: its agent's whole name matches the regex `agents`, and `function` says yes.

    None where all calls are trained. Raises ConfigError for an invalid regular expression.
    """
    if agents is None:
        return function
    try:
        names = re.compile(agents)
    except re.error as error:
        raise ConfigError(f"algorithm.train_agents {agents!r} is no regular expression: {error}") from error
    return lambda call: names.fullmatch(call.agent or "") is not None and (function is None or function(call))
