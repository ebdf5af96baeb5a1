"""What a person sees in a notebook while a run goes on: how far it is, and its curve, in one cell that is drawn anew.

Plain HTML and SVG, without widgets: it stays in the notebook when the kernel is gone. Everything drawn is numbers.
"""

import sys
from collections.abc import Mapping, Sequence
from html import escape
from time import monotonic
from typing import Any

from lightning_rl.telemetry.metrics.console import account

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 170, 44, 20
_LINES = (("critic/score/mean", "reward", "#1a66c9"), ("val/reward", "held-out", "#c85a08"))
_POINTS = 600  # of a curve, at most
_AGAIN_SECONDS = 0.5  # between two drawings: a notebook keeps up with no more


def in_notebook() -> bool:
    """Whether this runs in a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookTracker:
    """Draws progress and curve in the cell that trains."""

    def __init__(self, total_steps: int, began_at: int = 0) -> None:
        from IPython.display import display

        self._total = total_steps
        self._step = began_at
        self._rows: list[tuple[int, dict[str, float]]] = []
        self._note = "starting"
        self._began = self._drawn = monotonic()
        self._cell: Any = display(self._shown(), raw=True, display_id=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of `step`."""
        self._step = step
        self._rows.append((step, {name: metrics[name] for name, _, _ in _LINES if name in metrics}))
        parts = [f"{label} {metrics[name]:.3f}" for name, label, _ in _LINES if name in metrics]
        if "timing_s/step" in metrics:
            parts.append(f"about {max(self._total - step, 0) * metrics['timing_s/step']:.0f} s left")
        self._note = "  ".join(parts) + account(metrics)
        if monotonic() - self._drawn >= _AGAIN_SECONDS or step >= self._total:
            self._draw()

    def close(self) -> None:
        """Leave the last state in the cell."""
        self._draw()

    def _draw(self) -> None:
        self._drawn = monotonic()
        self._cell.update(self._shown(), raw=True)

    def _shown(self) -> dict[str, str]:
        """What the cell shows, and for a notebook that draws no HTML the same in words."""
        return {"text/html": self._html(), "text/plain": f"step {self._step}/{self._total}  {self._note}"}

    def _html(self) -> str:
        share = 100 * self._step / max(self._total, 1)
        return (
            f'<div style="max-width:{_WIDTH}px;font:13px system-ui,sans-serif">'
            f"<div>step <b>{self._step}</b> of {self._total} &nbsp; {monotonic() - self._began:.0f} s</div>"
            '<div style="height:6px;border-radius:3px;background:#8883;margin:4px 0">'
            f'<div style="height:6px;border-radius:3px;background:#1a66c9;width:{share:.1f}%"></div></div>'
            f'{curve(self._rows)}<div style="opacity:.75">{escape(self._note)}</div></div>'
        )


def curve(rows: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    """The rewards over the steps as SVG; "" where there are none yet."""
    lines = [
        (label, colour, [(step, row[name]) for step, row in rows if name in row]) for name, label, colour in _LINES
    ]
    points = [point for _, _, line in lines for point in line]
    if not points:
        return ""
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)

    def place(step: int, value: float) -> str:
        across = _LEFT + (step - first) / max(last - first, 1) * (_WIDTH - _LEFT - 8)
        return f"{across:.1f},{8 + (high - value) / (high - low) * (_HEIGHT - _BOTTOM - 16):.1f}"

    drawn = "".join(
        f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="'
        f'{" ".join(place(*point) for point in line[:: len(line) // _POINTS + 1])}"/>'
        for _, colour, line in lines
        if line
    )
    words = 'fill="currentColor" font-size="11" opacity=".7"'
    names = "".join(
        f'<text x="{_LEFT + 90 * index}" y="{_HEIGHT - 4}" font-size="11" fill="{colour}">{label}</text>'
        for index, (label, colour, line) in enumerate(lines)
        if line
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" aria-label="rewards over steps">{drawn}{names}'
        f'<text {words} x="0" y="16">{high:.3g}</text><text {words} x="0" y="{_HEIGHT - _BOTTOM - 4}">{low:.3g}</text>'
        f'<text {words} x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end">step {last}</text></svg>'
    )
