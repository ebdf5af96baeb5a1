"""A forest as training rows: one path from root to leaf each, and each sampled token with loss mask 1 exactly once.

The trunk (what a fork's branches share) is trained in the row whose first call after the fork arrived first; in the
others it is context: mask 0, no logprob, no version, no call id, reward 0.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from lightning_rl_adapters.call import Call
from lightning_rl_adapters.forest import Forest, Node
from lightning_rl_adapters.media import Placed


class Row(msgspec.Struct, kw_only=True):
    """One training sequence of T tokens; every list but `media` has length T.

    `logprobs`, `policy_versions` and `call_ids` are None where the mask is 0. `rewards` is 0 but on the last sampled
    token of a call. `excluded` is the reason why the whole row is left out (its mask stays), `excluded_calls` the
    reasons of single calls that are left out (their mask is 0). A row with a call whose token ids nobody told is not
    `exact`: its lists hold what is known, and it is excluded as `inexact`; one of a frozen model as `frozen`. `media`
    says which images stand where among the tokens, in their order; the mask is 0 there.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float | None]
    rewards: list[float]
    policy_versions: list[int | None]
    call_ids: list[str | None]
    temperature: list[float | None]
    model: str
    exact: bool = True
    media: list[Placed] = []
    excluded: str | None = None
    excluded_calls: dict[str, str] = {}


def cut(
    forest: Forest,
    rewards: Mapping[str, float],
    *,
    max_tokens: int | None = None,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """The rows of a forest, one per leaf; `rewards` gives each call's reward, 0 where it has none.

    Calls in `left_out` (call id -> reason), and those that were not delivered, are context wherever they stand.
    A row of more than `max_tokens` tokens is excluded as `overlong`. Trunks are given out after that, so an excluded
    row never takes along a trunk whose other branches train.
    """
    leaves = list(forest.leaves())
    excluded = {leaf: reason for leaf in leaves if (reason := _why_excluded(leaf, max_tokens)) is not None}
    heirs = _heirs(forest, excluded)
    return [_row(leaf, rewards, heirs, excluded.get(leaf), left_out) for leaf in leaves]


def _why_excluded(leaf: Node, max_tokens: int | None) -> str | None:
    if not _exact(leaf):
        return "inexact"
    if not leaf.call.trainable:
        return "frozen"
    return "overlong" if max_tokens is not None and _length(leaf) > max_tokens else None


def _exact(leaf: Node) -> bool:
    return all(node.call.exact for node in leaf.path())


def _length(leaf: Node) -> int:
    return sum(len(node.call.prompt_ids) + len(node.call.response_ids) for node in leaf.path())


def _heirs(forest: Forest, excluded: Collection[Node]) -> dict[Node, Node]:
    """Of each forked or continued node the child whose branch trains it: the first to arrive of those that are kept."""
    kept: dict[Node, bool] = {}
    heirs: dict[Node, Node] = {}
    for node in reversed(forest.nodes.values()):  # children arrive after their parents
        alive = [child for child in node.children if kept[child]]
        kept[node] = bool(alive) if node.children else node not in excluded
        if node.children:
            heirs[node] = (alive or node.children)[0]
    return heirs


def _row(
    leaf: Node,
    rewards: Mapping[str, float],
    heirs: Mapping[Node, Node],
    excluded: str | None,
    left_out: Mapping[str, str],
) -> Row:
    path = leaf.path()
    row = Row(
        token_ids=[],
        loss_mask=[],
        logprobs=[],
        rewards=[],
        policy_versions=[],
        call_ids=[],
        temperature=[],
        model=leaf.call.model,
        exact=_exact(leaf),
        excluded=excluded,
    )
    owned = _owned_from(path, heirs)
    for depth, node in enumerate(path):
        call = node.call
        row.media += [image.moved(len(row.token_ids)) for image in call.media]
        _append_context(row, call.prompt_ids)
        if depth < owned:
            _append_context(row, call.response_ids)
        elif reason := why_left_out(call, left_out):
            _append_context(row, call.response_ids)
            row.excluded_calls[call.call_id] = reason
        else:
            _append_sampled(row, node, rewards.get(call.call_id, 0.0))
    if excluded is None and row.excluded_calls and not any(row.loss_mask):
        row.excluded = next(iter(row.excluded_calls.values()))
    return row


def why_left_out(call: Call, left_out: Mapping[str, str]) -> str | None:
    """Why a call is context in every row, or None."""
    return "undelivered" if not call.delivered else left_out.get(call.call_id)


def _owned_from(path: list[Node], heirs: Mapping[Node, Node]) -> int:
    """The depth from which on the path's tokens are this row's own: below the last fork that it did not inherit."""
    for depth in range(len(path) - 1, 0, -1):
        if heirs[path[depth - 1]] is not path[depth]:
            return depth
    return 0


def _append_context(row: Row, ids: list[int]) -> None:
    n = len(ids)
    row.token_ids += ids
    row.loss_mask += [0] * n
    row.logprobs += [None] * n
    row.rewards += [0.0] * n
    row.policy_versions += [None] * n
    row.call_ids += [None] * n
    row.temperature += [None] * n


def _append_sampled(row: Row, node: Node, reward: float) -> None:
    call = node.call
    n = len(call.response_ids)
    row.token_ids += call.response_ids
    row.loss_mask += [1] * n
    row.logprobs += call.logprobs if call.logprobs is not None else [None] * n
    row.rewards += [0.0] * (n - 1) + [reward] if n else []
    row.policy_versions += call.policy_versions()
    row.call_ids += [call.call_id] * n
    row.temperature += [call.temperature] * n
