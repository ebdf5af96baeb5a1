"""Preference pairs of a run's groups, in the form that TRL's `DPOTrainer` takes, with the token ids that were sampled.

A pair is of one group: its best rollout and its worst, where their rewards differ. It stands where the two first part:
the last prompt that both were asked, token for token, and what each said to it. What came later is the outcome alone.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from lightning_rl.inspect.rollout_source import Which, pages
from lightning_rl.store import queries
from lightning_rl.store.contract import Rollout, RolloutTrace
from lightning_rl_adapters import forest, semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.credit import prompts
from lightning_rl_adapters.forest import Node
from lightning_rl_adapters.tool_schemas import tools_of

Record = dict[str, Any]


class _PairCall(NamedTuple):
    """One call: the digest of its whole prompt, images included (`credit.prompts`), its ids, and what they say."""

    node: Node
    digest: str
    prompt_ids: list[int]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    answer: dict[str, Any]


def pairs(connection: sa.Connection, which: Which, limit: int | None, vocabulary: str | None) -> Iterator[Record]:
    """At most `limit` pairs, group by group in the order they were asked for. Raises ForestError for damaged calls."""
    remaining = limit
    for best, worst in _parted(connection, which):
        if remaining == 0:
            return
        ids = [best.rollout_id, worst.rollout_id]
        packed = msgspec.msgpack.encode(queries.traces(connection, ids))
        traces = msgspec.msgpack.decode(packed, type=dict[str, RolloutTrace])
        if (pair := _pair(traces[best.rollout_id], traces[worst.rollout_id])) is not None:
            remaining = None if remaining is None else remaining - 1
            yield pair | {"vocabulary": vocabulary}


def _parted(connection: sa.Connection, which: Which) -> list[tuple[Rollout, Rollout]]:
    """The best and the worst rollout of each group whose rewards differ; of equal ones the first."""
    groups: dict[str, list[Rollout]] = {}
    for page in pages(connection, which):
        for rollout in page:
            if rollout.reward is not None and rollout.group_id is not None:
                groups.setdefault(rollout.group_id, []).append(rollout)
    extremes = [(max(group, key=_reward), min(group, key=_reward)) for group in groups.values()]
    return [(best, worst) for best, worst in extremes if _reward(best) > _reward(worst)]


def _reward(rollout: Rollout) -> float:
    assert rollout.reward is not None
    return rollout.reward


def _pair(best: RolloutTrace, worst: RolloutTrace) -> Record | None:
    for chosen, rejected in zip(_calls(best), _calls(worst), strict=False):
        if chosen.digest != rejected.digest:
            return None  # the world answered otherwise before the model did
        if chosen.node.call.response_ids != rejected.node.call.response_ids:
            return {
                "group_id": best.rollout.group_id,
                "task": best.rollout.task,
                "prompt": chosen.messages,
                "chosen": [chosen.answer],
                "rejected": [rejected.answer],
                "tools": chosen.tools,
                "chosen_reward": best.rollout.reward,
                "rejected_reward": worst.rollout.reward,
                "chosen_call_id": chosen.node.call.call_id,
                "rejected_call_id": rejected.node.call.call_id,
                "prompt_ids": chosen.prompt_ids,
                "chosen_ids": chosen.node.call.response_ids,
                "rejected_ids": rejected.node.call.response_ids,
            }
    return None


def _calls(trace: RolloutTrace) -> list[_PairCall]:
    """The policy's calls of the counting attempt, in the order in which they were asked; those with all their ids."""
    counting = trace.rollout.counting_attempt_id
    attempt = next((each for each in trace.attempts if each.attempt.attempt_id == counting), None)
    if attempt is None:
        return []
    grown, schemas = forest.build(calls_of(attempt.spans)), tools_of(attempt.spans)
    attributes_by_id = {span.span_id: span.attributes for span in attempt.spans}
    nodes = sorted(grown.nodes.values(), key=lambda node: node.call.number)
    digests = prompts(grown)  # of those whose ids are all there
    return [
        _pair_call(node, digests[node.call.call_id], attributes_by_id, schemas)
        for node in nodes
        if node.call.trainable and node.call.delivered and node.call.call_id in digests
    ]


def _pair_call(
    node: Node, digest: str, attributes_by_id: Mapping[str, Mapping[str, Any]], schemas: Mapping[str, Any]
) -> _PairCall:
    ids: list[int] = []
    messages: list[dict[str, Any]] = []
    for one in node.path():
        attributes = attributes_by_id[one.call.call_id]
        ids += one.call.prompt_ids
        messages += attributes.get(semconv.INPUT_MESSAGES) or []
        if one is not node:
            ids += one.call.response_ids
            messages += attributes.get(semconv.OUTPUT_MESSAGES) or []
    first = attributes_by_id[node.path()[0].call.call_id]
    [answer] = attributes_by_id[node.call.call_id].get(semconv.OUTPUT_MESSAGES) or [{}]
    tools = schemas.get(first.get(semconv.TOOLS) or "")
    return _PairCall(node, digest, ids, [_for_templates(one) for one in messages], tools, _for_templates(answer))


def _for_templates(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: the arguments of its calls are objects, where they are the JSON of some."""
    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [_call_for_templates(call) for call in message["tool_calls"]]}


def _call_for_templates(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = msgspec.json.decode(function["arguments"], type=dict[str, Any])
    except (msgspec.DecodeError, TypeError):
        return call
    return call | {"function": function | {"arguments": arguments}}
