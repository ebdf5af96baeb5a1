"""What finished runs of `train_graph` recorded, as a person reads it: accuracy, and self-correction before and after.

    python -m examples.sql_agent.report runs/write-0 runs/all-0 --picture learning.png --transcript

Everything is read from the run folders (`config.yaml`, `metrics.jsonl`, `store.db`); nothing is asked of a model. Runs
that trained the same nodes are taken together, whatever their seeds.

Invariant: what is counted as before is the validation before the first step, and as after the last one.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_rl.inspect.explain import words_of
from lightning_rl.inspect.folder import config_of
from lightning_rl.store.contract import Rollout, RolloutTrace
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import calls_of

from . import spider
from .graph import look, query_in
from .train_graph import right

AT_ONCE = 500  # rollouts read in one go


@dataclass(frozen=True)
class Turn:
    """A query, whether it is right, and what the check said of it; None where nobody checked it."""

    node: str
    answer: str
    right: bool
    feedback: str | None = None


@dataclass
class Habits:
    """How often each node did what it is for, counted over rollouts."""

    questions: int = 0
    answered: int = 0  # right at the end
    first_right: int = 0
    wrong_checked: int = 0
    wrong_rejected: int = 0
    right_checked: int = 0
    right_accepted: int = 0
    wrong_rewritten: int = 0
    mended: int = 0
    right_rewritten: int = 0
    kept: int = 0

    def add(self, turns: Sequence[Turn]) -> None:
        """Count one rollout. A check rejected when a rewrite follows it."""
        self.questions += 1
        self.first_right += turns[0].right
        self.answered += turns[-1].right
        for place, turn in enumerate(turns):
            following = turns[place + 1] if place + 1 < len(turns) else None
            if turn.feedback is not None and turn.right:
                self.right_checked += 1
                self.right_accepted += following is None
            elif turn.feedback is not None:
                self.wrong_checked += 1
                self.wrong_rejected += following is not None
            if following is not None and turn.right:
                self.right_rewritten += 1
                self.kept += following.right
            elif following is not None:
                self.wrong_rewritten += 1
                self.mended += following.right

    def __add__(self, other: "Habits") -> "Habits":
        return Habits(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Habits)))

    def rows(self) -> list[tuple[str, int, int]]:
        """What is told of them: words, how often it was so, of how many."""
        return [
            ("`write`: the first query is right", self.first_right, self.questions),
            ("`check`: rejects a wrong query", self.wrong_rejected, self.wrong_checked),
            ("`check`: accepts a right query", self.right_accepted, self.right_checked),
            ("`rewrite`: makes a wrong query right", self.mended, self.wrong_rewritten),
            ("`rewrite`: leaves a right query right", self.kept, self.right_rewritten),
            ("the graph: the last query is right", self.answered, self.questions),
        ]


@dataclass(frozen=True)
class Run:
    """A finished run: which nodes it trained, its validations, and what was recorded in the first and the last."""

    agents: str
    seed: int
    curve: Mapping[int, float]
    before: Sequence[RolloutTrace]
    after: Sequence[RolloutTrace]


def read_run(folder: Path) -> Run:
    """The run in `folder`."""
    config = config_of(folder)
    if config is None:
        raise SystemExit(f"{folder} holds no training run: name folders that examples.sql_agent.train_graph wrote")
    curve = {int(row["step"]): row["val/reward"] for row in read(folder / "metrics.jsonl") if "val/reward" in row}
    store = SqlStore(f"sqlite:///{folder / 'store.db'}")
    of_step: defaultdict[int, list[str]] = defaultdict(list)
    for rollout in _validations(store):
        of_step[int(rollout.metadata["step"])].append(rollout.rollout_id)
    before, after = (list(store.traces(of_step[step]).values()) for step in (min(curve), max(curve)))
    agents = config.algorithm.train_agents or "all"
    return Run(agents, config.data.seed or 0, curve, before, after)


def _validations(store: SqlStore) -> Iterator[Rollout]:
    page, cursor = store.page(mode="val", limit=AT_ONCE)
    yield from page
    while cursor is not None:
        page, cursor = store.page(mode="val", cursor=cursor, limit=AT_ONCE)
        yield from page


def turns_of(trace: RolloutTrace) -> list[Turn]:
    """The queries of a rollout of the graph, in order; none where its agent failed before the first."""
    task: Any = trace.rollout.task
    turns: list[Turn] = []
    for node, answer in answers_of(trace):
        if node == "check":
            turns[-1] = Turn(turns[-1].node, turns[-1].answer, turns[-1].right, answer)
        else:
            turns.append(Turn(node, answer, right(task, query_in(answer))))
    return turns


def answers_of(trace: RolloutTrace) -> list[tuple[str, str]]:
    """Each call of a rollout: the node that made it, and what the model answered."""
    counting = trace.rollout.counting_attempt_id
    spans = [span for attempt in trace.attempts if attempt.attempt.attempt_id == counting for span in attempt.spans]
    said = {span.span_id: span.attributes for span in spans}
    calls = sorted(calls_of(spans), key=lambda call: call.number)
    return [(call.agent or "?", words_of(said[call.call_id][semconv.OUTPUT_MESSAGES][0])) for call in calls]


def habits_of(traces: Iterable[RolloutTrace]) -> Habits:
    """The habits of all nodes in these rollouts."""
    habits = Habits()
    for trace in traces:
        if turns := turns_of(trace):
            habits.add(turns)
    return habits


def by_agents(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs that trained the same nodes, together."""
    found: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.agents].append(run)
    return dict(found)


def curves(runs: Mapping[str, Sequence[Run]]) -> str:
    """Accuracy by step, a line for each run."""
    steps = sorted({step for group in runs.values() for run in group for step in run.curve})
    lines = [["trained", "seed", *(f"{step} steps" if step == 0 else str(step) for step in steps)]]
    for agents, group in runs.items():
        for run in sorted(group, key=lambda run: run.seed):
            shown = [f"{run.curve[step]:.3f}" if step in run.curve else "" for step in steps]
            lines.append([_code(agents), str(run.seed), *shown])
    return _table(lines)


def self_correction(runs: Mapping[str, Sequence[Run]]) -> str:
    """What the nodes do before training and after each kind of it, each as a share and counts."""
    # All began with the same model, so before training they said the same.
    before = habits_of(next(iter(runs.values()))[0].before)
    after = {agents: sum((habits_of(run.after) for run in group), Habits()) for agents, group in runs.items()}
    columns = [before.rows(), *(habits.rows() for habits in after.values())]
    lines = [["", "before", *(f"{_code(agents)} trained" for agents in after)]]
    for told in zip(*columns, strict=True):
        lines.append([told[0][0], *(_share(part, whole) for _, part, whole in told)])
    return _table(lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2f} ({part} of {whole})" if whole else "never asked"


def _code(agents: str) -> str:
    return "all" if agents == "all" else "`" + agents.replace("|", "\\|") + "`"


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def draw(runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Accuracy over steps: the mean of the seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), dpi=110)
    for agents, group in runs.items():
        steps = sorted(set.intersection(*(set(run.curve) for run in group)))
        values = [[run.curve[step] for run in group] for step in steps]
        name = "all nodes" if agents == "all" else agents
        [line] = axes.plot(steps, [fmean(at) for at in values], marker="o", markersize=3, label=name)
        low, high = ([pick(at) for at in values] for pick in (min, max))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="step", ylabel="held-out accuracy (sampled)")
    axes.grid(alpha=0.3)
    axes.legend(title="trained", loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def transcript(trace: RolloutTrace) -> str:
    """A rollout of the graph, node by node."""
    task: Any = trace.rollout.task
    run = spider.look if "suite" in task else look
    lines = []
    for node, answer in answers_of(trace):
        lines.append(f"{node:>8}  {_indented(answer)}")
        if node != "check":
            lines.append(f"{'execute':>8}  {_indented(run(task['database'], query_in(answer)))}")
    return "\n".join([*lines, f"{'reward':>8}  {trace.rollout.reward}"])


def _indented(text: str) -> str:
    return text.replace("\n", "\n" + " " * 10)


def telling(run: Run) -> tuple[RolloutTrace, RolloutTrace] | None:
    """One question before and after: accepted though wrong at first, and in the end mended after a rejection."""
    earlier = {_question(trace): trace for trace in run.before}
    for trace in run.after:
        before, now = turns_of(earlier[_question(trace)]), turns_of(trace)
        if len(before) == 1 and not before[0].right and len(now) == 2 and not now[0].right and now[1].right:
            return earlier[_question(trace)], trace
    return None


def _question(trace: RolloutTrace) -> tuple[str, str]:
    task: Any = trace.rollout.task
    return task["database"], task["question"]


def main() -> None:
    """Print the tables; draw the picture and print the transcript where they are asked for."""
    parser = argparse.ArgumentParser(description="What finished runs of train_graph recorded.")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--picture", type=Path, help="where accuracy over steps is drawn")
    parser.add_argument("--transcript", action="store_true", help="one question before and after, of the last run")
    arguments = parser.parse_args()
    runs = [read_run(folder) for folder in arguments.runs]
    groups = by_agents(runs)
    print(curves(groups), self_correction(groups), sep="\n\n")
    if arguments.picture:
        draw(groups, arguments.picture)
    if arguments.transcript:
        pair = telling(runs[-1])
        for name, trace in zip(("before", "after"), pair or (), strict=False):
            task: Any = trace.rollout.task
            print(f"\n{name}: {task['schema']}\n{task['question']}\n{transcript(trace)}")


if __name__ == "__main__":
    main()
