"""Which calls of the policy are trained: by the agent that made them, or by a function. The others are context.

A call's agent is the tag of its URL (`llm.for_agent(name)`, `.../agent/{name}/v1`); calls of an untagged URL have none.
The gateway tags a program's housekeeping (titles, commit messages, summaries), which is not trained unless the agents
that are named say so.
"""

import re
from collections.abc import Callable, Iterable

from lightning_rl.config import ConfigError
from lightning_rl_adapters.call import HOUSEKEEPING, Call


def selection(agents: str | None, function: Callable[[Call], bool] | None) -> Callable[[Call], bool] | None:
    """What a call must fulfil: its agent's whole name matches the regex `agents`, and `function` says yes.

    None where all calls of the task are trained. Raises ConfigError for an invalid regular expression.
    """
    if agents is None:
        return None if function is None else lambda call: not call.is_housekeeping and function(call)
    try:
        names = re.compile(agents)
    except re.error as error:
        raise ConfigError(f"algorithm.train_agents {agents!r} is no regular expression: {error}") from error
    return lambda call: names.fullmatch(call.agent or "") is not None and (function is None or function(call))


def why_context(call: Call, select: Callable[[Call], bool] | None) -> str | None:
    """Why a call is context alone: `housekeeping`, or `not_selected`; None where it is trained."""
    if not call.is_housekeeping if select is None else select(call):
        return None
    return HOUSEKEEPING if call.is_housekeeping else "not_selected"


def context_of(
    calls: Iterable[Call], select: Callable[[Call], bool] | None, *, training: bool = False
) -> dict[str, str]:
    """The calls that are context alone, with the reason of each. `training` is that of a rollout for training: there a
    greedy answer is no sample of the policy, whatever its logprobs."""
    reasons = {}
    for call in calls:
        if training and call.logprob_kind == "greedy" and call.trainable:
            reasons[call.call_id] = "greedy_logprobs"
        elif (reason := why_context(call, select)) is not None:
            reasons[call.call_id] = reason
    return reasons
