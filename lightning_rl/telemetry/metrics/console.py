"""What a person sees while a run goes on: step, reward, validation, speed, the account of tokens, time left."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LONG_SECONDS = 20.0  # of a step, whose parts are told
_NO_PARTS = ("step", "sampling_idle")


class ConsoleTracker:
    """A progress line on a terminal; one line per step where the output is a file."""

    def __init__(self, total_steps: int, console: Console | None = None, began_at: int = 0) -> None:
        self._console = console or Console()
        self._total = total_steps
        self._validation = ""
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=total_steps, completed=began_at, note="starting")
        self._progress.start()
        if 0 < began_at < total_steps:
            self._progress.console.print(f"goes on behind step {began_at}: {total_steps - began_at} steps are left")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of `step`; validations stay on the screen."""
        if "val/reward" in metrics:
            self._validation = f"held-out {metrics['val/reward']:.3f}"
            self._progress.console.print(f"[bold]step {step:>4}[/]  held-out reward {metrics['val/reward']:.3f}")
        if "tune/reward" in metrics:
            best = f"best at step {metrics['tune/best_step']:.0f}"
            self._progress.console.print(f"[bold]step {step:>4}[/]  tuning reward {metrics['tune/reward']:.3f}, {best}")
        if "sft/held_out_loss" in metrics:
            self._validation = f"held-out loss {metrics['sft/held_out_loss']:.4f}"
            self._progress.console.print(f"[bold]step {step:>4}[/]  {self._validation}")
        if "sft/loss" in metrics:
            self._step(step, f"loss {metrics['sft/loss']:.4f}  {self._validation}", metrics)
        if (calls := metrics.get("perf/calls_per_s")) is None:
            return
        reward = f"{metrics['critic/score/mean']:.3f}" if "critic/score/mean" in metrics else "-"
        failed = int(metrics.get("rollouts/agent_failed", 0))
        wrong = f"  {failed} failed" if failed else ""
        self._step(
            step,
            f"reward {reward}{wrong}  {self._validation}  {_rate(calls)} calls/s{_parts(metrics)}",
            metrics,
        )

    def _step(self, step: int, note: str, metrics: Mapping[str, float]) -> None:
        """A step is done."""
        self._progress.update(self._task, completed=step, note=note + account(metrics))
        if not self._console.is_terminal:
            seconds = (self._total - step) * metrics["timing_s/step"]
            line = f"step {step}/{self._total}  {note}{account(metrics)}  about {seconds:.0f} s left"
            self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._progress.stop()


def _rate(calls: float) -> str:
    return f"{calls:.{0 if calls >= 9.5 else 1}f}" if calls >= 0.95 else f"{calls:.2g}"


def _parts(metrics: Mapping[str, float]) -> str:
    """Of a step that takes long its seconds, and the three parts that take most of them; "" of any other."""
    seconds = metrics.get("timing_s/step", 0.0)
    if seconds < _LONG_SECONDS:
        return ""
    parts = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    most = sorted(((value, name) for name, value in parts.items() if name not in _NO_PARTS), reverse=True)[:3]
    told = ", ".join(f"{name} {value:.0f}" for value, name in most if value >= 0.05 * seconds)
    return f"  {seconds:.0f} s ({told})" if told else f"  {seconds:.0f} s"


def account(metrics: Mapping[str, float]) -> str:
    """What became of all tokens so far: trained, or not, by reason; "" where nothing is counted."""
    if "tokens/received" not in metrics:
        return ""
    prefix = "tokens/excluded/"
    parts = {"trained": metrics["tokens/trained"]}
    parts |= {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    parts |= {"pending": metrics["tokens/pending"]} if metrics["tokens/pending"] else {}
    return f"  {metrics['tokens/received']:,.0f} tokens: " + ", ".join(
        f"{n:,.0f} {outcome}" for outcome, n in parts.items()
    )
