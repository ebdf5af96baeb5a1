"""The learning curve of a run, as a picture and in the terminal."""

from collections.abc import Sequence
from pathlib import Path

Points = tuple[list[float], list[float]]


def points(history: Sequence[dict[str, float]], name: str) -> Points:
    """The steps and values of one metric."""
    rows = [row for row in history if name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]


def draw_png(history: Sequence[dict[str, float]], path: Path, title: str) -> Path:
    """Draw training reward and validation reward over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    axes.plot(*points(history, "critic/score/mean"), color="tab:gray", alpha=0.6, label="training (sampled)")
    axes.plot(*points(history, "val/reward"), color="tab:blue", marker="o", label="held-out (sampled)")
    axes.set(xlabel="step", ylabel="share of questions answered right", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def terminal(history: Sequence[dict[str, float]], width: int = 72, height: int = 14) -> str:
    """The same curve in characters."""
    import plotext

    plotext.clear_figure()
    plotext.plot_size(width, height)
    plotext.theme("clear")
    plotext.ylim(0, 1)
    plotext.plot(*points(history, "critic/score/mean"), label="training")
    plotext.scatter(*points(history, "val/reward"), label="held-out", marker="o")
    plotext.xlabel("step")
    return str(plotext.uncolorize(plotext.build()))
