"""A run in a notebook: rollouts, curves and a report as cells. Each cell is a document of its own in a frame without
rights: it runs the viewer's script and nothing else, and reaches neither notebook nor network.
"""

from html import escape
from pathlib import Path
from typing import Any

from lightning_rl.inspect.recorded import newest_run
from lightning_rl.viewer import report
from lightning_rl.viewer import run as viewed


class Cell:
    """A document that a notebook shows."""

    def __init__(self, html: str, height: int, text: str) -> None:
        self.html = html
        self._height = height
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts" width="100%" height="{self._height}" '
            f'style="border:1px solid #8886" title="{escape(self._text)}"></iframe>'
        )


class Run:
    """A run folder to look at from Python: `lrl.Run("runs/20261231-120000").rollout("train-0-3-1-0")`.

    Args:
        run_dir: the run's folder; by default the newest below runs/.
    """

    def __init__(self, run_dir: str | Path | None = None) -> None:
        self.run_dir = newest_run() if run_dir is None else Path(run_dir)
        self._run: viewed.ViewedRun | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.run_dir)!r})"

    def close(self) -> None:
        """Read the run no more."""
        if self._run is not None:
            self._run.close()
            self._run = None

    @property
    def _read(self) -> viewed.ViewedRun:
        if self._run is None:
            self._run = viewed.ViewedRun(self.run_dir)
            self._run.start(behind=False)
        return self._run

    def rollout(self, rollout_id: str, *, height: int = 640) -> Cell:
        """One rollout as the dashboard shows it: conversation, tokens in colour, forest, credit, time. Its id may be
        told by how it alone begins or ends. Raises NotRecorded."""
        run = self._read
        whole = run.indexer.read(rollout_id).rollout.rollout_id
        return Cell(report.rollout_document(run, whole), height, f"rollout {whole} of {self.run_dir}")

    def rollouts(self, **query: str | float) -> list[dict[str, Any]]:
        """The run's rollouts, the newest first, as many as `limit` (100); filters and `sort` as in the dashboard's
        addresses: `rollouts(mode="train", step=3, sort="-reward", text="GROUP BY")`. Raises WrongQuery."""
        self._read.indexer.look()
        rows: list[dict[str, Any]] = self._read.answer("rollouts", {k: str(v) for k, v in query.items()})["rollouts"]
        return rows

    def report(self, output: str | Path | None = None) -> Path:
        """Write the run's report, by default `report.html` in its folder; its path. Raises NotRecorded."""
        return report.write(self.run_dir, self.run_dir / "report.html" if output is None else Path(output))
