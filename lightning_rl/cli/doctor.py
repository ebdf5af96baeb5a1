"""`lightning-rl doctor`: what in a run will keep it from learning, each finding with what to do."""

from pathlib import Path
from typing import Annotated

import typer


def run(
    folder: Annotated[Path | None, typer.Argument(help="The run's folder; by default the newest below runs/.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The same: the run's folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Look through a run for what will keep it from learning: dead rewards, drift, cut off answers, failing agents.

    The run may be going on. Each finding names a number and a rollout to look at.

    ```
    lightning-rl doctor runs/20261231-120000
    ```
    """
    import msgspec

    from lightning_rl.inspect import draw, recorded
    from lightning_rl.inspect.doctor import diagnose
    from lightning_rl.inspect.run_stats import gather

    if folder is not None and run_dir is not None:
        raise typer.BadParameter("the run's folder is given twice: leave --run-dir out")
    diagnosis = diagnose(gather(folder or run_dir or recorded.newest_run()))
    typer.echo(msgspec.json.encode(diagnosis).decode() if as_json else "\n".join(draw.diagnosis(diagnosis)))
