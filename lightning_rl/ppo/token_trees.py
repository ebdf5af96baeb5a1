"""A rollout as estimators of tokens see it: a forest of sampled tokens, with its rewards standing on them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_rl.rl.baselines import Floats
from lightning_rl.rl.token_advantages import TokenTree
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import Rewards
from lightning_rl_adapters.forest import Forest


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
    on_steps = [_at_steps(of_tokens.get(node.call.call_id), kept) for node, kept in zip(nodes, steps, strict=True)]
    for number in reversed(range(len(nodes))):
        if not nodes[number].children:
            ends[number] += rewards.final or 0.0
        parent = parents[number]
        if len(on_steps[number]):
            on_steps[number][-1] += ends[number]
        elif parent is not None:  # no step of its own to stand on
            ends[parent] += ends[number] / len(nodes[parent].children)
    return TokenTree(
        parents=parents,
        context=[len(node.call.prompt_ids) for node in nodes],
        rewards=on_steps,
        log_probs=[_log_probs(node.call)[kept] for node, kept in zip(nodes, steps, strict=True)],
        values=values,
    )


def _at_steps(given: Floats | None, steps: NDArray[np.int64]) -> Floats:
    return np.zeros(len(steps)) if given is None else given[steps]  # a copy: `steps` are indices


def _log_probs(call: Call) -> Floats:
    if call.logprobs is None or call.logprob_kind != "sampled":
        return np.full(len(call.response_ids), np.nan)
    return np.asarray(call.logprobs, dtype=np.float64)
