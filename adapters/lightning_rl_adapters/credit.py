"""Rewards to calls, over the forest, before any row is cut.

A strategy says what each call is reinforced by, its credit, and whom that is compared with. Calls count in their order
of arrival in the attempt. A call that a strategy does not name is pushed nowhere: its advantage is 0.
"""

import math
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from lightning_rl_adapters.forest import Forest, Node
from lightning_rl_adapters.media import Placed

GROUP: Final = "group"  # compared with the other rollouts of its group
FINAL: Final = "reward"  # the name that the final reward goes by
_STATE: Final = "state:"
_PROMPT: Final = "prompt:"


class Rewards(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt was given: the `final` reward, all that belong to no call by name (the final one among them), and
    those of single calls, call id -> name -> value. Without a final one `penalty` is added to the sum of those.
    """

    final: float | None = None
    named: dict[str, float] = {}
    of_calls: dict[str, dict[str, float]] = {}
    penalty: float = 0.0

    @property
    def ending(self) -> float:
        """What is given at the end of the attempt, beside what its calls were given on the way."""
        return self.penalty if self.final is None else self.final


def counting(rewards: Rewards) -> float | None:
    """What a rollout counts with: the final reward, else the sum of those of its calls; None where there are none."""
    if rewards.final is not None or not rewards.of_calls:
        return rewards.final
    given = [value for named in rewards.of_calls.values() for value in named.values()]
    return math.fsum([*given, rewards.penalty])


def with_penalty(rewards: Rewards, name: str, penalty: float) -> Rewards:
    """The rewards with a penalty on what the rollout counts with; it stands among the named ones, too."""
    named = rewards.named | {name: penalty}
    if rewards.final is None:
        return msgspec.structs.replace(rewards, named=named, penalty=rewards.penalty + penalty)
    return msgspec.structs.replace(rewards, named=named, final=rewards.final + penalty)


class Credit(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """What a call is reinforced by.

    `compared_with` names those whose mean is its baseline: `GROUP`, or a part of the group that only some calls belong
    to (`agent:write`, the `state:...` that they were sampled in, or the rollouts in which a call had this `prompt:...`,
    GROUP where no other had); None: the number is relative already, and is the advantage. Its advantage is multiplied
    by `weight`; that of `plus`, a second credit, is added to it.
    """

    reward: float
    compared_with: str | None = GROUP
    weight: float = 1.0
    plus: "Credit | None" = None

    def parts(self) -> "Iterator[Credit]":
        """This credit, and those that are added to it."""
        yield self
        if self.plus is not None:
            yield from self.plus.parts()


Strategy = Callable[[Forest, Rewards], Mapping[str, "Credit | float"]]


class CreditError(ValueError):
    """A strategy gave what no call can be trained on."""


def assign(strategy: Strategy, forest: Forest, rewards: Rewards) -> dict[str, Credit]:
    """The credit of each call that the strategy names, in order of arrival.

    Raises CreditError where it names a call that is not there, or gives no finite number.
    """
    raw_credits = strategy(forest, rewards)
    if unknown := sorted(raw_credits.keys() - forest.nodes.keys()):
        raise CreditError(f"credit was given to call {unknown[0]!r}; the attempt's calls are {list(forest.nodes)}")
    credits: dict[str, Credit] = {}
    for call_id in forest.nodes:
        if call_id in raw_credits:
            credit = raw_credits[call_id]
            credits[call_id] = credit if isinstance(credit, Credit) else Credit(float(credit))
            for part in credits[call_id].parts():
                if not math.isfinite(part.reward) or not math.isfinite(part.weight):
                    raise CreditError(
                        f"the credit of call {call_id} is {part.reward} (weight {part.weight}); it must be finite"
                    )
    return credits


def final(forest: Forest, rewards: Rewards) -> dict[str, Credit]:
    """What the rollout counts with to every call of the task, as Agent-lightning does it."""
    reward = counting(rewards)
    return {} if reward is None else dict.fromkeys(_of_task(forest), Credit(reward))


def last_call(forest: Forest, rewards: Rewards) -> dict[str, Credit]:
    """What the rollout counts with to the call of the task that arrived last, and to no other."""
    reward = counting(rewards)
    return {} if reward is None else {call_id: Credit(reward) for call_id in _of_task(forest)[-1:]}


def discounted(gamma: float) -> Strategy:
    """What the rollout counts with times gamma for every call of the task that arrived later."""

    def strategy(forest: Forest, rewards: Rewards) -> dict[str, Credit]:
        reward = counting(rewards)
        if reward is None:
            return {}
        calls = _of_task(forest)
        last = len(calls) - 1
        return {call_id: Credit(reward * gamma ** (last - i)) for i, call_id in enumerate(calls)}

    return strategy


def per_step(forest: Forest, rewards: Rewards) -> dict[str, Credit]:
    """To each call what it was given itself; to the last one of the task also the final reward."""
    return {call_id: Credit(reward) for call_id, reward in _steps(forest, rewards).items()}


def return_to_go(gamma: float) -> Strategy:
    """To each call of the task what it and all later ones of it were given (`per_step`), each times gamma per call of
    the task in between."""

    def strategy(forest: Forest, rewards: Rewards) -> dict[str, Credit]:
        steps = _steps(forest, rewards)
        if not steps:
            return {}
        returns: dict[str, Credit] = {}
        later = 0.0
        for call_id in reversed(_of_task(forest)):
            later = steps.get(call_id, 0.0) + gamma * later
            returns[call_id] = Credit(later)
        return returns

    return strategy


def per_agent(forest: Forest, rewards: Rewards) -> dict[str, Credit]:
    """To the calls of an agent the reward that is named as the agent, compared with the same agent's in other rollouts;
    to those of an agent without one the final reward."""
    credits = final(forest, rewards)
    for call_id, node in forest.nodes.items():
        agent = node.call.agent
        if agent in rewards.named and agent != FINAL:
            credits[call_id] = Credit(rewards.named[agent], f"agent:{agent}")
    return credits


def leave_one_out(forest: Forest, rewards: Rewards) -> dict[str, Credit]:
    """At a fork whose branches were given rewards of their own: to each of the calls that answered the same prompt, the
    value of its branch less the mean value of the others' (leave-one-out, arXiv 2402.14740, at a shared state).

    The value of a branch is what its first call was given plus the mean value of the branches after it. All other calls
    have the final reward, where there is one.
    """
    credits = {} if rewards.final is None else final(forest, rewards)
    own_rewards = {
        call_id: sum(named.values()) for call_id, named in rewards.of_calls.items() if call_id in forest.nodes
    }
    values: dict[Node, float] = {}
    rewarded: set[Node] = set()
    for call_id, node in reversed(forest.nodes.items()):  # children arrive after their parents
        after = [values[child] for child in node.children]
        values[node] = own_rewards.get(call_id, 0.0) + (sum(after) / len(after) if after else 0.0)
        if call_id in own_rewards or any(child in rewarded for child in node.children):
            rewarded.add(node)
    for siblings in _same_prompt(forest):
        if any(node in rewarded for node in siblings):
            total = sum(values[node] for node in siblings)
            for node in siblings:
                others = (total - values[node]) / (len(siblings) - 1)
                credits[node.call.call_id] = Credit(values[node] - others, None)
    return credits


def step_groups(gamma: float, weight: float = 1.0) -> Strategy:
    """Groups within the group (GiGPO, arXiv 2505.10978): the final reward, and added with `weight` the discounted
    return from the call on (`return_to_go`), compared with that of all calls of the group that answered the very same
    prompt, in other rollouts or in the same.

    A prompt that only one call answered adds nothing.
    """

    def strategy(forest: Forest, rewards: Rewards) -> dict[str, Credit]:
        returns = assign(return_to_go(gamma), forest, rewards)
        whole = counting(rewards) or 0.0
        states = prompts(forest)
        return {
            call_id: Credit(whole, plus=Credit(step.reward, _STATE + states[call_id], weight))
            if call_id in states
            else Credit(whole)
            for call_id, step in returns.items()
        }

    return strategy


def counterfactual(forest: Forest, rewards: Rewards) -> dict[str, Credit]:
    """The final reward to every call of the task, compared with the rollouts of the group in which a call of the same
    model answered the very same prompt (a counterfactual baseline, as of arXiv 1705.08926, from samples): with all that
    came before the call as it was, what the others have done then. Where no other rollout has, with the group.
    """
    states = prompts(forest)
    return {
        call_id: Credit(each.reward, _PROMPT + states[call_id]) if call_id in states else each
        for call_id, each in final(forest, rewards).items()
    }


def resolved(credits: Sequence[Mapping[str, Credit]], groups: Sequence[Hashable]) -> list[dict[str, Credit]]:
    """The credits of rollouts, by call, with GROUP in place of a prompt that no other rollout of the group had.

    Args:
        credits: per rollout, call id -> credit. Length N.
        groups: the group of each rollout, length N.
    """
    rollouts: dict[tuple[Hashable, str], set[int]] = {}
    for rollout, of_rollout in enumerate(credits):
        for each in of_rollout.values():
            if is_prompt(each.compared_with):
                rollouts.setdefault((groups[rollout], each.compared_with or ""), set()).add(rollout)
    return [
        {
            call_id: msgspec.structs.replace(each, compared_with=GROUP)
            if is_prompt(each.compared_with) and len(rollouts[group, each.compared_with or ""]) == 1
            else each
            for call_id, each in of_rollout.items()
        }
        for of_rollout, group in zip(credits, groups, strict=True)
    ]


def is_prompt(compared_with: str | None) -> bool:
    """Whether a name of `Credit.compared_with` is that of a prompt, where rollouts are compared that had it."""
    return compared_with is not None and compared_with.startswith(_PROMPT)


def is_state(compared_with: str) -> bool:
    """Whether a name of `Credit.compared_with` is that of a state, where each call is compared for itself."""
    return compared_with.startswith(_STATE)


def prompts(forest: Forest) -> dict[str, str]:
    """A digest of each call's model and whole prompt, images included, wherever the tokens of both are all known.

    Calls of any attempts have one digest exactly if they were sampled from one prompt, whatever calls it came about by.
    """
    digests: dict[str, str] = {}
    contexts: dict[str, blake2b] = {}  # what the children of a call see of it, and of all before it
    for call_id, node in forest.nodes.items():
        call, parent = node.call, node.parent
        if not call.exact or (parent is not None and parent.call.call_id not in contexts):
            continue
        if parent is None:
            whole = blake2b(call.model.encode() + b"\0", digest_size=16)
        else:
            whole = contexts[parent.call.call_id].copy()
        begin = 0
        for image in call.media:  # behind its tokens, which are those of any image
            end = image.start + image.length
            whole.update(array("q", call.prompt_ids[begin:end]).tobytes() + image.sha256.encode())
            begin = end
        whole.update(array("q", call.prompt_ids[begin:]).tobytes())
        digests[call_id] = whole.hexdigest()
        whole.update(array("q", call.response_ids).tobytes())
        contexts[call_id] = whole
    return digests


def weighed(rewards: Rewards, weights: Mapping[str, float]) -> Rewards:
    """The rewards with weighted sums as the final one, and as that of each call.

    A name that was not given counts as 0; where none was given there is no reward.
    """
    of_calls = {call_id: _sum(weights, named) for call_id, named in rewards.of_calls.items()}
    return Rewards(
        final=_sum(weights, rewards.named),
        named=rewards.named,
        of_calls={call_id: {FINAL: total} for call_id, total in of_calls.items() if total is not None},
    )


def _sum(weights: Mapping[str, float], named: Mapping[str, float]) -> float | None:
    products = [weight * named[name] for name, weight in weights.items() if name in named]
    return math.fsum(products) if products else None


def _of_task(forest: Forest) -> list[str]:
    """The calls but for a program's housekeeping, which earned nothing, in order of arrival."""
    return [call_id for call_id, node in forest.nodes.items() if not node.call.is_housekeeping]


def final_values(forest: Forest, reward: float | None) -> dict[str, float]:
    """The final reward of every call as numbers, where nothing is compared: in triplets and rows."""
    return {call_id: credit.reward for call_id, credit in final(forest, Rewards(final=reward)).items()}


def by_name(name: str, *, gamma: float = 1.0, step_weight: float = 1.0) -> Strategy:
    """The strategy that a config names."""
    strategies: dict[str, Strategy] = {
        "final": final,
        "last_call": last_call,
        "discounted": discounted(gamma),
        "per_step": per_step,
        "return_to_go": return_to_go(gamma),
        "per_agent": per_agent,
        "leave_one_out": leave_one_out,
        "counterfactual": counterfactual,
        "step_groups": step_groups(gamma, step_weight),
    }
    return strategies[name]


def _steps(forest: Forest, rewards: Rewards) -> dict[str, float]:
    """What single calls were given, the final reward with that of the task's last call; without one a penalty with that
    of the last call that was rewarded, since others are compared with nobody."""
    steps = {call_id: math.fsum(named.values()) for call_id, named in rewards.of_calls.items()}
    steps = {call_id: steps[call_id] for call_id in forest.nodes if call_id in steps}
    bearing = _of_task(forest) if rewards.final is not None else list(steps)
    for last in bearing[-1:]:
        steps[last] = steps.get(last, 0.0) + rewards.ending
    return steps


def _same_prompt(forest: Forest) -> list[Sequence[Node]]:
    """The calls that were sampled from one and the same prompt, where there are several."""
    samples: dict[tuple[Node | None, tuple[int, ...], tuple[Placed, ...]], list[Node]] = {}
    for node in forest.nodes.values():
        if node.call.exact:
            prompt = node.parent, tuple(node.call.prompt_ids), tuple(node.call.media)
            samples.setdefault(prompt, []).append(node)
    return [nodes for nodes in samples.values() if len(nodes) > 1]
