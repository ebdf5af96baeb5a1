"""`lightning-rl runner`: run an agent for a server on another machine.

Invariant: it ends by itself only for what its user can put right: a key that is refused, an agent that cannot be loaded
or whose processes die again and again; and when the rollouts that it was asked for have ended. A server that is away is
waited for.
"""

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from lightning_rl.errors import Explained
from lightning_rl.processes.service_keys import RUNNER_KEY, taken_from_environment

if TYPE_CHECKING:
    from lightning_rl.store.client import HttpStore

_CHECK_SECONDS = 0.5
_AWAY_SECONDS = 2.0  # between two looks at a server that is away


class CannotJoin(Explained, ValueError):
    """What keeps this runner from the server."""


def run(
    store: Annotated[str, typer.Option(metavar="URL", help="The server: of `lightning-rl serve`, or of a Trainer.")],
    agent: Annotated[str, typer.Option(help="module:function, or path/to/file.py:function.")],
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="At most so many rollouts at once; by default 64.")
    ] = None,
    isolation: Annotated[
        Literal["thread", "process"],
        typer.Option(help="Whether rollouts share processes, or each has its own, killed when its time is over."),
    ] = "thread",
    max_rollouts: Annotated[
        int | None, typer.Option(min=1, help="End when so many rollouts have ended here; by default it goes on.")
    ] = None,
    log_dir: Annotated[Path, typer.Option(help="Where the logs go, runner-NUMBER.log.")] = Path("runner-logs"),
) -> None:
    """Take rollouts from a server, run the agent on them, and report how they end. Ctrl-C gives back what runs.

    ```
    LIGHTNING_RL_RUNNER_KEY=... lightning-rl runner --store http://trainer.example:8080 --agent my_agent:solve
    ```

    `LIGHTNING_RL_RUNNER_KEY` is the key that the server was started with. A server that is away is waited for.
    """
    from lightning_rl.agents.agent import load_agent
    from lightning_rl.runner import launch as runners
    from lightning_rl.store.client import HttpStore

    key = taken_from_environment(RUNNER_KEY)
    if not key:
        raise CannotJoin(f"set {RUNNER_KEY}, in the environment, to the key that the server was started with")
    if not store.startswith(("http://", "https://")):
        raise CannotJoin(f"--store {store} is no URL; give http://... or https://...")
    loaded = load_agent(agent)
    log_dir.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _end)
    server = HttpStore(store, key, connections=1, patience_seconds=0)
    _wait_for(server, store)
    at_once = n or runners.MOST
    typer.echo(f"Runs {agent} for {store}, at most {at_once} rollouts at once (isolation: {isolation}).")
    typer.echo(f"Logs: {log_dir.resolve()}. Ctrl-C gives back what runs, and ends.")
    try:
        with runners.launch(
            at_once, loaded, store, key, log_dir=log_dir, isolation=isolation, most=max_rollouts
        ) as working:
            while not working.done:
                working.check()
                time.sleep(_CHECK_SECONDS)
    except KeyboardInterrupt:
        typer.echo("Stopped; what ran was given back.")
        raise
    typer.echo(f"Done: rollouts that ended here: {max_rollouts}.")


def _wait_for(server: "HttpStore", url: str) -> None:
    """Wait until the server answers. Raises CannotJoin for a refused key, and for what is no server of ours."""
    from lightning_rl.store.errors import NotAllowed, StoreError, Unreachable

    told = False
    while True:
        try:
            server.workers_died([])  # a request that changes nothing
        except Unreachable:
            if not told:
                typer.echo(f"Waiting for {url}: nothing answers there.")
            told = True
            time.sleep(_AWAY_SECONDS)
        except NotAllowed as error:
            raise CannotJoin(f"{url} refuses the key in {RUNNER_KEY}: give the one it was started with") from error
        except StoreError as error:
            raise CannotJoin(f"{url} is no lightning_rl server: {error}") from error
        else:
            return


def _end(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
