"""What a reward function sees of a rollout, read from its trace. Pure.

Invariant: the answer is what the policy said, never what a tool printed or a helper wrote.
"""

from collections.abc import Collection, Sequence
from typing import Any

from lightning_rl.rewards import FinishedRollout
from lightning_rl.store.contract import Rollout
from lightning_rl.trajectories.conversation import text_of
from lightning_rl_adapters import conventions, forest, semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.span import Span


def finished_rollout(
    rollout: Rollout, spans: Sequence[Span], model: str | Collection[str] | None = None
) -> FinishedRollout:
    """The rollout as reward functions see it; `spans` are those of its counting attempt.

    Its answer is the text of the call of `model`, or of several (None: of any), that arrived last, among those that the
    agent received in full: what was cut off, it never saw. Of an agent that made no call at the gateway, its own spans
    are read.

    Raises:
        ForestError: the calls do not fit together; it names the call.
    """
    models = {model} if isinstance(model, str) else model
    calls = [call for call in calls_of(spans) if models is None or call.model in models]
    tree = forest.build(calls)
    received = [node for node in tree.nodes.values() if node.call.delivered]
    path = received[-1].path() if received else []
    attributes = {span.span_id: span.attributes for span in spans}
    messages: list[dict[str, Any]] = []
    for node in path:
        call_attributes = attributes[node.call.call_id]
        messages += [
            *(call_attributes.get(semconv.INPUT_MESSAGES) or ()),
            *(call_attributes.get(semconv.OUTPUT_MESSAGES) or ()),
        ]
    if not calls and (conversations := conventions.conversations(spans, model if isinstance(model, str) else None)):
        messages = [*conversations[-1].prompt, *conversations[-1].answers[:1]]
    return FinishedRollout(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id or rollout.rollout_id,
        task=rollout.task,
        answer=text_of(messages[-1]) if messages else "",
        messages=messages,
        rewards=dict(rollout.rewards),
        answer_ids=received[-1].call.response_ids if received else [],
    )
