"""`lightning-rl export`: what a run recorded, as files for other programs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from lightning_rl.store.contract import Mode

MIB = 2**20
_FORMS: dict[str, Literal["parquet", "jsonl"]] = {".parquet": "parquet", ".jsonl": "jsonl"}


def run(
    run_dir: Annotated[Path, typer.Argument(help="The run's folder.")],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="<path>",
            help="The file; in a folder (FOLDER/ is made), WHAT.parquet or WHAT.jsonl.",
        ),
    ],
    form: Annotated[
        Literal["parquet", "jsonl", "otlp"] | None,
        typer.Option("--format", help="By default by the file's name. otlp: OTLP/JSON, a request a line."),
    ] = None,
    what: Annotated[
        Literal["rollouts", "calls", "rows", "spans", "pairs"] | None,
        typer.Option(help="By default rollouts; in OTLP spans, where calls are the calls' spans alone."),
    ] = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Preference pairs for DPO: --what pairs.")] = False,
    mode: Annotated[Mode | None, typer.Option(help="Of rollouts of this mode alone.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Of at most so many rollouts, the oldest ones.")] = None,
) -> None:
    """Write a run's rollouts, calls, training rows, spans or preference pairs to a file. The run may be going on.

    ```
    lightning-rl export runs/20261231-120000 --what calls -o calls.parquet
    lightning-rl export runs/20261231-120000 --format otlp -o spans.jsonl
    lightning-rl export runs/20261231-120000 --pairs --mode train -o pairs.jsonl
    ```

    Parquet needs the extra `data`. The columns are listed in docs/tools.md.
    """
    from lightning_rl.files import is_standard_output
    from lightning_rl.inspect.export import NotExported, export

    if pairs and what not in (None, "pairs"):
        raise NotExported(f"--pairs and --what {what} ask for two things: leave one out")
    chosen = ("pairs" if pairs else what) or ("spans" if form == "otlp" else "rollouts")
    to = Path(output)
    if output.endswith("/"):
        to.mkdir(parents=True, exist_ok=True)
    if form is None and not to.is_dir() and to.suffix not in _FORMS:
        raise NotExported(f"--output {output} ends with neither {' nor '.join(_FORMS)}: name the --format")
    written_as = form or _FORMS.get(to.suffix, "jsonl")
    file, count = export(run_dir, chosen, written_as, to, mode=mode, limit=limit)
    size = f" ({file.stat().st_size / MIB:.1f} MiB)" if file.is_file() else ""
    typer.echo(f"{count} {chosen} in {file}{size}", err=is_standard_output(file))
