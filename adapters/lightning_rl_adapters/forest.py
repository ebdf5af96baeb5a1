"""An attempt as trees of calls.

A node holds the tokens that its prompt adds to its parent and the tokens that it sampled; equal siblings stay two
nodes, because they are two samples. The forest depends only on the calls and their order of arrival, never on the
order in which their records come in.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from lightning_rl_adapters.call import Call
from lightning_rl_adapters.media import Placed


class ForestError(ValueError):
    """The calls of an attempt do not form a forest: the records are damaged and must not be trained on."""


def check_held(placed: Iterable[Placed], held: Mapping[str, bytes], where: str) -> None:
    """Raises ForestError naming the first image of `placed` that `held` lacks."""
    for image in placed:
        if image.sha256 not in held:
            raise ForestError(f"{where} shows image {image.sha256}, and no span of its attempt holds it")


@dataclass(eq=False)
class Node:
    """One call at its place. `children` are in order of arrival."""

    call: Call
    parent: "Node | None" = None
    children: "list[Node]" = field(default_factory=list)

    def path(self) -> "list[Node]":
        """The nodes from the root to this one."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]


@dataclass(frozen=True)
class Forest:
    """The trees of one attempt; `nodes` maps call id to node, in order of arrival."""

    nodes: dict[str, Node]

    @property
    def roots(self) -> list[Node]:
        """The calls that continue no other."""
        return [node for node in self.nodes.values() if node.parent is None]

    def leaves(self) -> Iterator[Node]:
        """The calls that no other continues, depth first, the earliest branch first."""
        stack = self.roots[::-1]
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(reversed(node.children))
            else:
                yield node


def build(calls: Iterable[Call]) -> Forest:
    """The forest of one attempt's calls. Raises ForestError naming the call that does not fit."""
    forest = Forest({})
    attempt: tuple[str, str] | None = None
    for call in sorted(calls, key=lambda call: call.number):
        if attempt is None:
            attempt = (call.rollout_id, call.attempt_id)
        elif attempt != (call.rollout_id, call.attempt_id):
            raise ForestError(f"call {call.call_id} belongs to another attempt than {attempt}")
        if call.call_id in forest.nodes:
            raise ForestError(f"call {call.call_id} is recorded twice")
        node = Node(call)
        if call.parent_id is not None:
            # Parents arrive first, so a parent not yet placed is missing or later: both are damage.
            node.parent = forest.nodes.get(call.parent_id)
            if node.parent is None:
                raise ForestError(f"call {call.call_id} continues {call.parent_id}, which did not arrive before it")
            if node.parent.call.model != call.model:
                raise ForestError(
                    f"call {call.call_id} of model {call.model!r} continues {call.parent_id} "
                    f"of model {node.parent.call.model!r}"
                )
            node.parent.children.append(node)
        forest.nodes[call.call_id] = node
    return forest
