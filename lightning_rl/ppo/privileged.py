"""What a teacher is told that the policy was not: rows that begin with another prompt, and go on with the same tokens.

The first prompt of a call's conversation is rendered anew, with the text at the end of its first user message. All
that stands behind it in the row, what the policy sampled and what it was told later, are the recorded tokens. Nothing
of it is sent to the policy's engine or written into a record.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_rl.config import ConfigError
from lightning_rl.ppo.batch import RolloutPart, StepBatch
from lightning_rl.training.batch import TrainingSequence
from lightning_rl.trajectories.conversation import SpokenCall, transcript
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import Renderer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PastRollout:
    """A finished rollout of the step.

    `reward` is what it counts with (None: it takes no part), `rewards` are the named ones, `calls` those of the policy
    in order of arrival.
    """

    rollout_id: str
    reward: float | None
    rewards: Mapping[str, float]
    failed: bool
    calls: Sequence[SpokenCall]

    def transcript(self) -> str:
        """What was said, as text, without reasoning."""
        return transcript(self.calls)


@dataclass(frozen=True)
class TaughtCall:
    """A call that is about to be taught: its `task`, the `call` itself, its `rollout`, and the other rollouts of its
    `group`, in their order."""

    task: Any
    call: SpokenCall
    rollout: PastRollout
    group: Sequence[PastRollout]


Privileged = Callable[[TaughtCall], str | None]


@dataclass(frozen=True)
class TeacherRow:
    """What the teacher is asked for some trained tokens of a row: `where` among the K of `student`, in the order of the
    trained tokens of `row`."""

    student: TrainingSequence
    where: NDArray[np.int64]
    row: TrainingSequence


class PrivilegedRows:
    """Makes the rows that a teacher is asked about.

    Args:
        function: from a call, what the teacher is told before it; None: the call is not taught.
        renderer: writes prompts as the gateway does.
        longest: tokens that a row may have; None: no bound.
    """

    def __init__(self, function: Privileged, renderer: Renderer, longest: int | None = None) -> None:
        self._function, self._renderer, self._longest = function, renderer, longest

    def of(self, batch: StepBatch) -> tuple[list[TeacherRow], Counter[str]]:
        """The rows, and how many calls are not taught, by reason.

        Raises ConfigError where the function returns something else than a text or None.
        """
        past = [_past(part) for part in batch.parts]
        groups: dict[str, list[int]] = {}
        for index, part in enumerate(batch.parts):
            groups.setdefault(part.trajectory.group_id, []).append(index)
        rows: list[TeacherRow] = []
        untaught: Counter[str] = Counter()
        for index, part in enumerate(batch.parts):
            others = [past[other] for other in groups[part.trajectory.group_id] if other != index]
            for sequence in part.sequences:
                texts = self._texts(part, sequence, past[index], others, untaught)
                for text, calls in texts.items():
                    made = self._row(part.trajectory, sequence, text, calls)
                    if isinstance(made, str):
                        untaught[made] += len(calls)
                    else:
                        rows.append(made)
        return rows, untaught

    def _texts(
        self,
        part: RolloutPart,
        sequence: TrainingSequence,
        past: PastRollout,
        others: Sequence[PastRollout],
        untaught: Counter[str],
    ) -> dict[str, dict[str, NDArray[np.int64]]]:
        """The calls of a row, and where their trained tokens stand among its K, by what their teacher is told."""
        texts: dict[str, dict[str, NDArray[np.int64]]] = {}
        for call_id, where, _ in sequence.trained_by_call():
            spoken = part.trajectory.spoken.get(call_id)
            if spoken is None:
                untaught["no_messages"] += 1
                continue
            text = self._text(TaughtCall(part.trajectory.task, spoken, past, others))
            if text is None:
                untaught["nothing_to_tell"] += 1
            else:
                texts.setdefault(text, {})[call_id] = where
        return texts

    def _text(self, call: TaughtCall) -> str | None:
        try:
            text = self._function(call)
        except Exception as error:
            error.add_note(f"while the privileged function was asked about rollout {call.rollout.rollout_id}")
            raise
        if text is not None and not isinstance(text, str):
            raise ConfigError(
                f"the privileged function returned {text!r} for rollout {call.rollout.rollout_id}: return a text, or "
                "None where the teacher has nothing to be told"
            )
        return text

    def _row(
        self, trajectory: Trajectory, sequence: TrainingSequence, text: str, calls: Mapping[str, NDArray[np.int64]]
    ) -> TeacherRow | str:
        """The row behind another prompt, up to the last of these calls; or why there is none."""
        root = trajectory.forest.nodes[next(iter(calls))].path()[0].call
        if sequence.cut_context:
            return "truncated"
        if any(image.start < len(root.prompt_ids) for image in sequence.images):
            return "images"
        prompt = self._prompt(trajectory.spoken.get(root.call_id), root.prompt_ids, text)
        if prompt is None:
            return "prompt_not_rendered"
        where = np.concatenate(list(calls.values()))
        added, end = len(prompt) - len(root.prompt_ids), int(sequence.trained[where[-1]]) + 1
        if self._longest is not None and end + added > self._longest:
            return "too_long"
        ids = np.concatenate([np.asarray(prompt, np.int64), sequence.token_ids[len(root.prompt_ids) : end]])
        row = TrainingSequence(
            rollout=sequence.rollout,
            token_ids=ids,
            trained=sequence.trained[where] + added,
            rollout_log_probs=sequence.rollout_log_probs[where],
            advantages=sequence.advantages[where],
            temperature=sequence.temperature[where],
            calls={call_id: sequence.calls[call_id] + added for call_id in calls},
            images=tuple(image._replace(start=image.start + added) for image in sequence.images if image.end <= end),
        )
        return TeacherRow(sequence, where, row)

    def _prompt(self, root: SpokenCall | None, recorded: Sequence[int], text: str) -> list[int] | None:
        """A conversation's first prompt with the text in it; None where it was not rendered from its messages here."""
        if root is None:
            return None
        try:
            plain = self._renderer.render(root.messages, root.tools)
            if list(recorded[: len(plain)]) != plain:
                return None
            with_text = self._renderer.render(messages_with_text(root.messages, text), root.tools)
        except GatewayError:
            return None
        return with_text + list(recorded[len(plain) :])  # what the answer must begin with


def messages_with_text(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with `text` at the end of the first user message; without one it is a message behind the others."""
    copies = [dict(message) for message in messages]
    first = next((message for message in copies if message["role"] == "user"), None)
    if first is None:
        return [*copies, {"role": "user", "content": text}]
    content = first.get("content") or ""
    if isinstance(content, str):
        first["content"] = f"{content}\n\n{text}" if content else text
    else:
        first["content"] = [*content, {"type": "text", "text": f"\n\n{text}"}]
    return copies


def warn_of_untaught(untaught: Mapping[str, int], warned: set[str]) -> None:
    """Say once for each reason why calls are not taught, but for those that the function chose."""
    for reason in untaught.keys() - warned - {"nothing_to_tell"}:
        warned.add(reason)
        _log.warning(
            "%d calls of the step are not taught by a teacher that knows more: %s", untaught[reason], _WHY[reason]
        )


_WHY = {
    "no_messages": "their spans have no messages",
    "truncated": "the beginning of their row was cut off (data.overlong=truncate_left)",
    "images": "their prompt shows images",
    "prompt_not_rendered": "their prompt is not the one that the chat format makes of their messages",
    "too_long": "with what the teacher is told, their row is longer than the model's context",
}


def _past(part: RolloutPart) -> PastRollout:
    trajectory = part.trajectory
    return PastRollout(
        rollout_id=trajectory.rollout_id,
        reward=part.reward,
        rewards=trajectory.rewards.named,
        failed=trajectory.agent_failed,
        calls=list(trajectory.spoken.values()),
    )
