"""`lightning-rl report`: a run as one file that opens everywhere."""

from pathlib import Path
from typing import Annotated

import typer


def run(
    folder: Annotated[Path | None, typer.Argument(help="The run's folder; by default the newest below runs/.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The same: the run's folder.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file, or its folder; by default report.html in the run's folder."),
    ] = None,
) -> None:
    """Write a run's report to one HTML file: curves, token account, findings, rollouts before and after, the config.

    It needs no server and no network, has at most 5 MB, and shows the run as it stands now.

    ```
    lightning-rl report runs/20261231-120000 -o report.html
    ```
    """
    from lightning_rl.files import is_standard_output
    from lightning_rl.inspect.recorded import newest_run
    from lightning_rl.viewer.report import write

    if folder is not None and run_dir is not None:
        raise typer.BadParameter("the run's folder is given twice: leave --run-dir out")
    shown = folder or run_dir or newest_run()
    file = write(shown, output or shown)
    size = f" ({file.stat().st_size / 1e6:.1f} MB)" if file.is_file() else ""
    typer.echo(f"{file}{size}", err=is_standard_output(file))
