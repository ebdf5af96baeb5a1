"""`lightning-rl quickstart`: train the SQL agent of the tutorial here and now, and show what it learned.

It is the tutorial's own `train.py` that runs; this file only finds it, and tells the story of the run afterwards.
"""

import contextlib
import importlib
import itertools
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rl import tutorial as tutorial_place

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_rl.ppo_algorithm import PPO


def run(
    seed: Annotated[int, typer.Option(help="Seed of sampling and of the order of questions.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Training steps; by default what the tutorial takes.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is kept; by default runs/DATE.")] = None,
) -> None:
    """Train a small SQL agent on this machine, without GPU, key or network, and show what it learned."""
    from rich.console import Console

    console = Console()
    started = time.monotonic()
    run_dir = (run_dir or Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")).resolve()
    folder = tutorial_place.folder()
    console.print(
        "[bold]An ordinary SQL agent learns to answer questions.[/] "
        "It asks a 0.9M-parameter model for SQL, sees what the database says, and may try again (three turns).\n"
        f"The agent: {folder / 'agent.py'}\nThe run:   {run_dir}\n",
        soft_wrap=True,
    )
    tutorial = _tutorial(folder)  # with torch and transformers, which takes seconds
    algorithm = tutorial.train(run_dir=run_dir, seed=seed, steps=steps)
    tell(algorithm, run_dir, tutorial, console)
    console.print(f"\nAll of it took {time.monotonic() - started:.0f} s.")


def tell(algorithm: "PPO", run_dir: Path, tutorial: Any, console: "Console") -> None:
    """The summary: questions before and after, curve, account of tokens, folder, report, what is next."""
    from lightning_rl.cli import curve
    from lightning_rl.viewer import report

    history = algorithm.history
    steps, accuracy = curve.points(history, "val/reward")
    console.rule("the same questions, before and after")
    for index, before, after in _improved(run_dir, algorithm, int(steps[-1])):
        console.print(f"\n[bold]held-out question {index}[/]")
        console.print(before, after, sep="\n", markup=False, highlight=False, soft_wrap=True)
    console.rule("the curve")
    typer.echo(curve.terminal(history))
    png = curve.draw_png(history, run_dir / "curve.png", "A SQL agent learns on a CPU")
    console.rule("the account of tokens")
    last = history[-1]
    excluded = {name.rsplit("/", 1)[-1]: int(n) for name, n in last.items() if name.startswith("tokens/excluded/")}
    console.print(
        f"{int(last['tokens/received'])} tokens came from the engine = {int(last['tokens/trained'])} trained"
        + "".join(f" + {n} {reason}" for reason, n in sorted(excluded.items()))
        + f" + {int(last['tokens/pending'])} pending",
        soft_wrap=True,
    )
    console.rule("the run")
    console.print(
        f"held-out accuracy, sampled: {accuracy[0]:.3f} -> {accuracy[-1]:.3f} in {int(steps[-1])} steps\n"
        f"curve       {png}\nmetrics     {run_dir / 'metrics.jsonl'}\nstore       {run_dir / 'store.db'}\n"
        f"model       {run_dir / 'model'}  (transformers loads it)\n"
        f"report      {report.write(run_dir, run_dir / 'report.html')}  (opens in a browser)\n"
        f"look at it  lightning-rl dashboard {shlex.quote(str(run_dir))}\n\n"
        f"Next: read {Path(tutorial.__file__).parent / 'agent.py'} (nothing in it knows of training) and train.py "
        "beside it, change the reward or a hyperparameter, and run it again.",
        soft_wrap=True,
    )


def _tutorial(folder: Path) -> Any:
    """The tutorial's `train` module."""
    # Runners import the agent by the same name, from the search path that they inherit.
    sys.path.insert(0, str(folder.parent))
    return importlib.import_module(f"{folder.name}.train")


def _improved(run_dir: Path, algorithm: "PPO", last: int, most: int = 3) -> list[tuple[int, str, str]]:
    """Held-out questions that were wrong at first and right at last, as (index, transcript before, and after)."""
    from lightning_rl.store.sql import SqlStore

    seed, run = algorithm.config.data.seed, algorithm.state.run_id
    improved: list[tuple[int, str, str]] = []
    with contextlib.closing(SqlStore(f"sqlite:///{run_dir / 'store.db'}")) as store:
        for index in itertools.count():
            names = [f"val-{seed}-{step}-{index}-0.{run}" for step in (0, last)]
            traces = store.traces(names)
            if len(traces) < 2 or len(improved) == most:
                break
            before, after = (traces[name] for name in names)
            if before.rollout.reward == 0 and after.rollout.reward == 1:
                improved.append((index, _transcript("before", before), _transcript("after", after)))
    return improved


def _transcript(when: str, trace: Any) -> str:
    from lightning_rl_adapters import semconv

    lines = [f"{when}: reward {trace.rollout.reward:g}"]
    for span in (span for span in trace.attempts[-1].spans if span.name == semconv.CALL_SPAN):
        for message in span.attributes[semconv.INPUT_MESSAGES] + (span.attributes.get(semconv.OUTPUT_MESSAGES) or []):
            text = message["content"].replace("\n", "\n              ")
            lines.append(f"  {message['role']:>10}  {text}")
    return "\n".join(lines)
