"""Dev: a few rollouts, laid open. What an agent's author looks at before training: calls, triplets, rows."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lightning_rl.algorithms.base import Dataset
from lightning_rl.algorithms.baseline import Baseline
from lightning_rl.algorithms.problems import Problems
from lightning_rl.algorithms.trajectories import Trajectory, trajectory_of
from lightning_rl.store.contract import RolloutTrace
from lightning_rl_adapters import credit, forest, semconv, triplet
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.rows import Row
from lightning_rl_proxy.rendering import FastTokenizer

_SHOWN = 200  # characters of one message or row


class Dev(Baseline):
    """Runs the agent on the first `n_tasks` tasks, once each, and prints what was recorded. Trains nothing.

    After `Trainer.dev`, `trajectories` has the rewards and rows, `traces` the spans.
    """

    def __init__(self, model: str | Path | None = None, *, n_tasks: int = 3, **service: Any) -> None:
        super().__init__(model, **service)
        if n_tasks < 1:
            raise ValueError(f"n_tasks is {n_tasks}; it takes at least one task to see something")
        self.n_tasks = n_tasks
        self.traces: list[RolloutTrace] = []
        self.trajectories: list[Trajectory] = []

    def run(self, train_dataset: Dataset, val_dataset: Dataset) -> None:
        """Roll out, then print."""
        self.traces = self.roll_out("dev", [task for task, _ in zip(train_dataset, range(self.n_tasks), strict=False)])
        self.trajectories = [trajectory_of(trace, agent_failure=0.0) for trace in self.traces]
        tokenizer = None if self.policy is None else FastTokenizer(self.policy.folder)
        console = Console(highlight=False, soft_wrap=True)
        if self.policy is not None and self.model is None:
            console.print(f"model: the tutorial's, {self.policy.folder}; name your own with model= or base_url=")
        for trace, trajectory in zip(self.traces, self.trajectories, strict=True):
            for line in describe(trace, trajectory, tokenizer):
                console.print(line)
        Problems(self.run_dir).report("dev", self.trajectories)
        console.print(f"\nrecorded in {self.run_dir}")


def describe(trace: RolloutTrace, trajectory: Trajectory, tokenizer: FastTokenizer | None) -> list[Text]:
    """A rollout as lines: its task and reward, its calls with their messages, its triplets, its rows."""
    counting = trace.rollout.counting_attempt_id
    spans = [span for attempt in trace.attempts if attempt.attempt.attempt_id == counting for span in attempt.spans]
    tree = forest.build(calls_of(spans))
    numbers = {call_id: number for number, call_id in enumerate(tree.nodes, start=1)}
    lines = [
        Text(),
        Text(f"rollout {trace.rollout.rollout_id}", style="bold"),
        Text(f"  task    {_short(_json(trace.rollout.task))}"),
        Text(f"  reward  {'none' if trajectory.reward is None else f'{trajectory.reward:g}'}"),
    ]
    if trace.rollout.error is not None:
        lines.append(Text(f"  error   {trace.rollout.error.type}: {_short(trace.rollout.error.message)}", style="red"))
    lines.append(Text(f"  calls   {len(tree.nodes)}"))
    attributes = {span.span_id: span.attributes for span in spans}
    for call_id, node in tree.nodes.items():
        call, found = node.call, attributes[call_id]
        after = f", continues call {numbers[call.parent_id]}" if call.parent_id else ""
        by = f", agent {call.agent}" if call.agent else ""
        lines.append(Text(f"    call {numbers[call_id]}{after}{by}: finish reason {call.finish_reason}"))
        for message in [*found[semconv.INPUT_MESSAGES], *found[semconv.OUTPUT_MESSAGES]]:
            lines.append(Text(f"      {message.get('role', '?'):>9}  {_short(_content(message))}"))
    triplets = triplet.triplets(tree, credit.final(tree, trajectory.reward or 0.0))
    lines.append(Text(f"  triplets  {len(triplets)}"))
    for one in triplets:
        lines.append(
            Text(
                f"    call {numbers[one.call_id]}: prompt {len(one.prompt_token_ids)} tokens, "
                f"response {len(one.response_token_ids)} tokens, reward {one.reward or 0:g}, exact: {_json(one.exact)}"
            )
        )
    lines.append(Text(f"  rows    {len(trajectory.rows)}"))
    for number, row in enumerate(trajectory.rows, start=1):
        left_out = f", left out: {row.excluded}" if row.excluded else ""
        trained = 0 if row.excluded else sum(row.loss_mask)
        lines.append(
            Text(
                f"    row {number}: {len(row.token_ids)} tokens, {trained} to be trained, "
                f"exact: {_json(row.exact)}{left_out}"
            )
        )
        if tokenizer is not None and row.token_ids:
            lines.append(Text("      ") + _row_text(row, tokenizer))
    return lines


def _row_text(row: Row, tokenizer: FastTokenizer) -> Text:
    """The row as the trainer sees it: what is trained stands out."""
    text = Text()
    start = 0
    while start < len(row.token_ids):
        end = start
        while end < len(row.token_ids) and row.loss_mask[end] == row.loss_mask[start]:
            end += 1
        piece = tokenizer.decode(row.token_ids[start:end]).replace("\n", "\\n")
        if row.loss_mask[start]:
            text.append(f"[{piece}]", style="bold green")
        else:
            text.append(piece, style="dim")
        start = end
    return text


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    called = [f"{call.get('name')}({call.get('arguments')})" for call in calls]
    return " ".join([content if isinstance(content, str) else _json(content), *called])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
