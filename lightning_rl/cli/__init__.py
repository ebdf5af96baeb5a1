"""The command line: `lightning-rl <command>`. Each command is a file; heavy imports happen inside it."""

from typing import Annotated

import typer

import lightning_rl
from lightning_rl.cli import (
    dashboard,
    doctor,
    explain,
    export,
    plan,
    quickstart,
    replay,
    report,
    rollouts,
    runner,
    serve,
    sft,
    train,
)

app = typer.Typer(
    name="lightning-rl",
    help="Train the agent you already have. Begin with `lightning-rl quickstart`, then `lightning-rl train --help`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("quickstart")(quickstart.run)
app.command("train")(train.run)
app.command("sft")(sft.run)
app.command("plan")(plan.run)
app.command("serve")(serve.run)
app.command("runner")(runner.run)
app.command("dashboard")(dashboard.run)
app.command("report")(report.run)
app.command("explain")(explain.run)
app.command("doctor")(doctor.run)
app.add_typer(rollouts.app, name="rollouts")
app.command("export")(export.run)
app.command("replay")(replay.run)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(lightning_rl.__version__)
        raise typer.Exit
