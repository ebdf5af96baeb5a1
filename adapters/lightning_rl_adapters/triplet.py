"""The classic adapter: a forest as (prompt, response, reward) triplets, one per call, each with its whole prompt."""

from collections.abc import Iterator, Mapping

import msgspec

from lightning_rl_adapters.forest import Forest, Node
from lightning_rl_adapters.media import Placed


class Triplet(msgspec.Struct, kw_only=True):
    """One call: P prompt ids, R response ids, R logprobs (nats) or None, the final reward that reached it, and by name
    the `rewards` that were given to this call alone.

    Where it is not `exact`, the token ids of the call, or of one before it, are not known: the lists hold what is.
    `media` says which images stand where in the prompt.
    """

    call_id: str
    agent: str | None
    model: str
    prompt_token_ids: list[int]
    response_token_ids: list[int]
    response_logprobs: list[float] | None
    reward: float | None
    rewards: dict[str, float] = {}
    exact: bool = True
    media: list[Placed] = []


def triplets(
    forest: Forest, rewards: Mapping[str, float], of_calls: Mapping[str, dict[str, float]] | None = None
) -> list[Triplet]:
    """The triplets of an attempt in order of arrival; `reward` is None for a call that `rewards` does not name.

    `of_calls` are the rewards of single calls: call id -> name -> value.
    """
    return list(iter_triplets(forest, rewards, of_calls))


def iter_triplets(
    forest: Forest, rewards: Mapping[str, float], of_calls: Mapping[str, dict[str, float]] | None = None
) -> Iterator[Triplet]:
    """`triplets`, one after the other: those of a long conversation have its tokens once for each turn."""
    for call_id, node in forest.nodes.items():
        yield Triplet(
            call_id=call_id,
            agent=node.call.agent,
            model=node.call.model,
            prompt_token_ids=prompt_ids(node),
            response_token_ids=node.call.response_ids,
            response_logprobs=node.call.logprobs,
            reward=rewards.get(call_id),
            rewards=(of_calls or {}).get(call_id, {}),
            media=media(node),
            exact=all(step.call.exact for step in node.path()),
        )


def prompt_ids(node: Node) -> list[int]:
    """The whole prompt of a call: everything on its path before its own response."""
    ids: list[int] = []
    for ancestor in node.path()[:-1]:
        ids += ancestor.call.prompt_ids
        ids += ancestor.call.response_ids
    return ids + node.call.prompt_ids


def media(node: Node) -> list[Placed]:
    """The images of that whole prompt, where they stand in it."""
    images: list[Placed] = []
    length = 0
    for step in node.path():
        images += [image.moved(length) for image in step.call.media]
        length += len(step.call.prompt_ids) + len(step.call.response_ids)
    return images
