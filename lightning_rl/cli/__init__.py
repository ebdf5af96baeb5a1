"""The command line: `lightning-rl <command>`. Each command is a file; heavy imports happen inside it."""

from typing import Annotated

import typer

import lightning_rl
from lightning_rl.cli import quickstart

app = typer.Typer(
    name="lightning-rl",
    help="Train the agent you already have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("quickstart")(quickstart.run)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(lightning_rl.__version__)
        raise typer.Exit


def main() -> None:
    """The entry point of the `lightning-rl` command."""
    app()
