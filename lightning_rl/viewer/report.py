"""A run as one file: what was trained and how, its curves, its account, the most telling rollouts, how to repeat it.

Made of the page's own views over the page's own answers. Invariant: the file is at most `LARGEST` bytes; what is left
out for that is counted, never dropped in silence.
"""

import contextlib
import logging
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from lightning_rl.config import compose, to_yaml
from lightning_rl.errors import Explained
from lightning_rl.files import is_a_runs_own, write_whole
from lightning_rl.inspect.recorded import STORE, NotRecorded, is_attached, servers
from lightning_rl.inspect.rollout_source import PagedStore
from lightning_rl.viewer import run_folder
from lightning_rl.viewer.bundle import document
from lightning_rl.viewer.run import ViewedRun
from lightning_rl_adapters.media import urls_of

REPORT = "report.html"  # in the run's folder
LARGEST = 5_000_000  # bytes: larger pages open slowly, or not at all
KEY = "run"  # what stands for the run in the file's addresses
_PAIRS = 8  # tasks that are shown early and late
_CALLS = 24  # of one rollout, whose tokens are in the file
_log = logging.getLogger(__name__)


class TooLarge(Explained, RuntimeError):
    """A report would not open everywhere."""


class ReportRefused(Explained, RuntimeError):
    """A report would take the place of a file of its run."""


def write(run_dir: Path, output: Path) -> Path:
    """Write the report of a run to `output`, in a folder to REPORT in it; its path.

    Raises NotRecorded; TooLarge where nothing can be left out that would make it small enough; ReportRefused.
    """
    if not run_folder.is_run(run_dir):
        raise NotRecorded(f"{run_dir.resolve()} holds no run: there is neither a {STORE} nor a metrics.jsonl in it")
    output = output / REPORT if output.is_dir() else output
    if is_a_runs_own(output, run_dir, REPORT):
        raise ReportRefused(f"{output} is a file of the run: name another for its report")
    with _read(run_dir) as run:
        wanted = _PAIRS
        while True:
            text = _document(run, wanted).encode()
            if len(text) <= LARGEST:
                output.parent.mkdir(parents=True, exist_ok=True)
                write_whole(output, text)
                return output
            if not wanted:
                raise TooLarge(
                    f"the report of {run_dir.resolve()} would have {len(text):,} bytes without a single rollout, and "
                    f"opens well up to {LARGEST:,}: its metrics.jsonl is too long; use lightning-rl dashboard"
                )
            wanted //= 2


@contextlib.contextmanager
def _read(run_dir: Path) -> Iterator[ViewedRun]:
    """The run, read once."""
    with _stores_of(run_dir) as stores, contextlib.closing(ViewedRun(run_dir, stores)) as run:
        if run.has_rollouts:
            run.start(behind=False, searched=False)
        yield run


@contextlib.contextmanager
def _stores_of(run_dir: Path) -> Iterator[list[PagedStore]]:
    """The servers that have the rollouts of an attached run; none, which is told, where they cannot be asked."""
    kept, stores = contextlib.ExitStack(), list[PagedStore]()
    try:
        with contextlib.ExitStack() as close:
            stores = close.enter_context(servers(run_dir, PagedStore)) if is_attached(run_dir) else []
            for store in stores:
                store.page(None, 1)
            kept = close.pop_all()
    except NotRecorded as error:
        _log.warning("the report is without rollouts: %s", error)
        stores = []
    with kept:
        yield stores


def _document(run: ViewedRun, wanted: int) -> str:
    assert run.run_dir is not None
    tasks = run.answer("tasks", {}) if run.has_rollouts else {"mode": None, "tasks": []}
    improved = sorted(tasks["tasks"], key=_how_telling)
    pairs = list(_pairs(run, tasks["mode"], improved[:wanted]))
    answers: dict[str, Any] = {}
    for path in ("summary", "metrics", "config"):
        answers[_path(path)] = run.answer(path, {})
    answers |= _of_rollouts(run, {row["rollout_id"] for pair in pairs for row in pair["rows"]})
    report = {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "pairs": pairs,
        "left_out": len(tasks["tasks"]) - len(pairs),
        "rollouts": run.answer("choices", {}) if run.has_rollouts else None,
        "doctor": run.diagnosis() if run.has_rollouts else {"findings": []},
        "changed": changed_keys(run.settings()),
        "repeat": repeat(run.run_dir, run.settings()),
    }
    answers["report"] = report
    return document(f"{run.name}: report of a training run", answers, _plain(answers[_path("summary")], report))


def rollout_document(run: ViewedRun, rollout_id: str) -> str:
    """One rollout as a file. Raises NotRecorded."""
    answers = _of_rollouts(run, [rollout_id])
    answer = answers[_path(f"rollouts/{rollout_id}")]
    words = "\n".join(
        f"{message.get('role')}: {message.get('content')}"
        for attempt in answer["attempts"]
        for call in attempt["calls"]
        for message in [*call["messages"], *call["answer"]]
    )
    plain = f"<h2>{escape(rollout_id)}</h2><pre>{escape(words)}</pre>"
    return document(rollout_id, answers | {"report": {"only": rollout_id}}, plain)


def _path(path: str) -> str:
    return f"runs/{KEY}/{path}"


def _how_telling(task: Mapping[str, Any]) -> tuple[float, float]:
    """The least first: what rose most, then what is solved now."""
    before, after = task["before"] or 0.0, task["after"] or 0.0
    return before - after, -after


def _pairs(run: ViewedRun, mode: str, tasks: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each task a rollout of its first step and one of its last: those nearest the means of their steps."""
    for task in tasks:
        rows = run.answer(f"tasks/{task['task_key']}", {"mode": mode})["rollouts"]
        sides = [
            sorted(
                (row for row in rows if row["step"] == step),
                key=lambda row: abs((row["reward"] or 0.0) - (mean or 0.0)),
            )
            for step, mean in ((task["first"], task["before"]), (task["last"], task["after"]))
        ]
        if all(sides):  # else one step alone fills a page of a task's rollouts
            nearest = [side[0] for side in sides]
            yield {"task": task["task"], "before": task["before"], "after": task["after"], "rows": nearest}


def _of_rollouts(run: ViewedRun, rollout_ids: Iterable[str]) -> dict[str, Any]:
    """What the page asks of these rollouts: each whole, the tokens of its calls, its images."""
    answers: dict[str, Any] = {}
    for rollout_id in sorted(rollout_ids):
        path = f"rollouts/{rollout_id}"
        answer = run.answer(path, {})
        answer["group"] = []
        answers[_path(path)] = answer
        for attempt in answer["attempts"]:
            for call in attempt["calls"][:_CALLS]:
                of_call = f"{path}/calls/{attempt['sequence']}/{call['number']}"
                answers[_path(of_call)] = run.answer(of_call, {})
            for sha256 in _images(attempt["calls"]):
                with contextlib.suppress(NotRecorded):
                    answers[_path(f"{path}/images/{sha256}")] = run.answer(f"{path}/images/{sha256}", {})
    return answers


def _images(calls: Iterable[Mapping[str, Any]]) -> set[str]:
    urls = (url for call in calls for url in urls_of(call["messages"]))
    return {url.removeprefix("sha256:") for url in urls if url.startswith("sha256:")}


def changed_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a run that are not as they are by default."""
    if not settings:
        return {}
    import yaml

    usual = dict(run_folder.flat(yaml.safe_load(to_yaml(compose(None)))))
    return {name: value for name, value in settings.items() if name not in usual or usual[name] != value}


def repeat(run_dir: Path, settings: Mapping[str, Any]) -> list[str]:
    """The commands that make such a run again."""
    if (run_dir / "curve.png").is_file() and (run_dir / "data").is_dir():  # what the quickstart leaves
        words = ["lightning-rl", "quickstart", "--seed", str(settings.get("data.seed", 0))]
        words += ["--steps", str(steps)] if (steps := settings.get("trainer.total_training_steps")) else []
        return [shlex.join(words)]
    if settings.get("agent"):
        return [shlex.join(["lightning-rl", "train", "--config", str(run_dir / run_folder.CONFIG)])]
    if settings:
        place = str(run_dir / run_folder.CONFIG)
        return [
            f'lrl.Trainer(agent).fit(lrl.PPO(OmegaConf.load("{place}")), tasks)  # with the agent and tasks of the run'
        ]
    return []


def _plain(summary: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """The report in words, for whoever opens it without scripts."""
    best, account = summary.get("best"), summary.get("account")
    lines = [f"<h2>{escape(str(summary['name']))}</h2>", f"<p>{escape(str(summary.get('folder')))}</p>"]
    measured = summary.get("evaluations") or ()
    lines += [f"<p>{escape(told)}</p>" for told in measured]
    if not measured:
        lines.append(f"<p>{escape(str(summary['state']))} after {summary.get('steps', 0)} steps</p>")
    if best:
        lines.append(
            f"<p>{escape(best['label'])}: best {best['value']:.3f} at step {best['step']}, last {best['last']:.3f}</p>"
        )
    if account:
        parts = ", ".join(f"{n:,.0f} {escape(reason)}" for reason, n in account["excluded"].items())
        lines.append(
            f"<p>{account['received']:,.0f} tokens: {account['trained']:,.0f} trained; {parts or 'none excluded'}</p>"
        )
    for finding in report["doctor"].get("findings", ()):
        policy = f"policy {finding['policy']}: " if finding["policy"] else ""
        lines.append(
            f"<p>{escape(finding['severity'])}: {escape(policy + finding['told'])} {escape(finding['advice'])}</p>"
        )
    for pair in report["pairs"]:
        lines.append(f"<p>{escape(pair['task'])}: {pair['before']} &rarr; {pair['after']}</p>")
    lines += [f"<pre>{escape(command)}</pre>" for command in report["repeat"]]
    return f'<main class="view">{"".join(lines)}</main>'
