"""Dev: a few rollouts, laid open. What an agent's author looks at before training: calls, triplets, rows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lightning_rl.algorithms.base import Dataset
from lightning_rl.algorithms.baseline import Baseline
from lightning_rl.inspect import draw
from lightning_rl.inspect.explain import numbers_of, row_views, words_of
from lightning_rl.store.contract import RolloutTrace
from lightning_rl.trajectories.run_warnings import Problems
from lightning_rl.trajectories.trajectory import Trajectory, trajectory_of
from lightning_rl_adapters import credit, forest, semconv, triplet
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.forest import Forest
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer

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
    lines = [
        Text(),
        Text(f"rollout {trace.rollout.rollout_id}", style="bold"),
        Text(f"  task    {_short(json.dumps(trace.rollout.task, ensure_ascii=False))}"),
        Text(f"  reward  {'none' if trajectory.reward is None else f'{trajectory.reward:g}'}"),
    ]
    if trace.rollout.error is not None:
        lines.append(Text(f"  error   {trace.rollout.error.type}: {_short(trace.rollout.error.message)}", style="red"))
    lines.append(Text(f"  calls   {len(tree.nodes)}"))
    lines += _calls(tree, {span.span_id: span.attributes for span in spans})
    lines += _triplets(tree, trajectory.reward or 0.0)
    lines.append(Text(f"  rows    {len(trajectory.rows)}"))
    for view, row in zip(row_views(tree, trajectory.rows), trajectory.rows, strict=True):
        lines.append(Text(f"    {draw.row(view)}"))
        if len(trajectory.rows) > 1:
            lines.append(Text(f"      calls {draw.row_calls(view)}"))
        if tokenizer is not None and row.token_ids:
            pieces = draw.row_words(row, tokenizer.decode)
            styled = [(piece, "bold green" if trained else "dim") for piece, trained in pieces]
            lines.append(Text.assemble("      ", *styled))
    return lines


def _calls(tree: Forest, attributes: dict[str, dict[str, Any]]) -> Iterator[Text]:
    numbers = numbers_of(tree)
    for call_id, node in tree.nodes.items():
        call, of_call = node.call, attributes[call_id]
        after = f", continues call {numbers[call.parent_id]}" if call.parent_id else ""
        by = f", agent {call.agent}" if call.agent else ""
        yield Text(f"    call {numbers[call_id]}{after}{by}: finish reason {call.finish_reason}")
        answered = of_call.get(semconv.OUTPUT_MESSAGES) or ()
        for message in [*of_call[semconv.INPUT_MESSAGES], *answered]:
            yield Text(f"      {message.get('role', '?'):>9}  {_short(words_of(message))}")
        if not answered:
            yield Text("      no whole answer: the agent left before its end")


def _triplets(tree: Forest, reward: float) -> Iterator[Text]:
    numbers = numbers_of(tree)
    yield Text(f"  triplets  {len(numbers)}")
    for one in triplet.iter_triplets(tree, credit.final_values(tree, reward)):
        yield Text(
            f"    call {numbers[one.call_id]}: prompt {len(one.prompt_token_ids)} tokens, "
            f"response {len(one.response_token_ids)} tokens, reward {one.reward or 0:g}, exact: {json.dumps(one.exact)}"
        )


def _short(text: str) -> str:
    return draw.first_words(text, _SHOWN)
