"""Rewards shaped by length, before any credit is given."""

from dataclasses import dataclass

from lightning_rl_adapters.forest import Forest


@dataclass(frozen=True, kw_only=True)
class OverlongBuffer:
    """`reward.overlong_buffer`: from `max_length - length` sampled tokens on the penalty grows, up to `factor`."""

    max_length: int
    length: int
    factor: float = 1.0

    def penalty(self, forest: Forest) -> float:
        """What a rollout's final reward is lowered by: 0 or less."""
        return overlong_penalty(sampled_on_a_branch(forest), self.max_length, self.length, factor=self.factor)


def overlong_penalty(length: int, max_length: int, buffer: int, *, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), times `factor`.

    0 up to max_length - buffer tokens, from there linearly down to -1 at max_length, and -1 beyond.
    """
    return 0.0 - factor * min(1.0, max(0, length - (max_length - buffer)) / buffer)  # 0, and no negative zero


def sampled_on_a_branch(forest: Forest) -> int:
    """The largest number of sampled tokens on one branch: what DAPO calls the length of a response, for agents.

    Branches do not add up, and what tools and users said does not count; nor does it matter which row trains a trunk.
    """
    sampled: dict[str, int] = {}
    for call_id, node in forest.nodes.items():
        before = 0 if node.parent is None else sampled[node.parent.call.call_id]
        sampled[call_id] = before + len(node.call.response_ids)
    return max(sampled.values(), default=0)
