"""`lightning-rl runner`: run an agent for a server on another machine.

Invariant: it ends by itself only for what its user can put right: a key that is refused, an agent that cannot be loaded
or whose processes die again and again; and when the rollouts that it was asked for have ended. A server that is away is
waited for.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lightning_rl.cli.sigterm import ended_by_sigterm
from lightning_rl.errors import Explained
from lightning_rl.processes.service_keys import RUNNER_KEY, pop_from_environment

if TYPE_CHECKING:
    from lightning_rl.store.client import HttpStore

_CHECK_SECONDS = 0.5
_AWAY_SECONDS = 2.0  # between two looks at a server that is away


class CannotJoin(Explained, ValueError):
    """What keeps this runner from the server."""


def run(
    store: Annotated[
        list[str],
        typer.Option(
            metavar="URL",
            help="The server: of `lightning-rl serve`, or of a Trainer. Several share the rollouts of --n.",
        ),
    ],
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
    log_dir: Annotated[
        Path, typer.Option(help="Where the logs go, runner-NUMBER.log; of several servers each into a folder there.")
    ] = Path("runner-logs"),
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

    key = pop_from_environment(RUNNER_KEY)
    if not key:
        raise CannotJoin(f"set {RUNNER_KEY}, in the environment, to the key that the server was started with")
    for url in store:
        if not url.startswith(("http://", "https://")):
            raise CannotJoin(f"--store {url} is no URL; give http://... or https://...")
    at_once = n or runners.MOST
    if len(store) > at_once or (len(store) > 1 and max_rollouts is not None):
        raise CannotJoin(
            f"--n {at_once} is shared by {len(store)} servers, one for each at least; --max-rollouts goes with one"
        )
    with ended_by_sigterm():
        loaded = load_agent(agent)
        _make_log_dir(log_dir)
        _wait_for([HttpStore(url, key, connections=1, patience_seconds=0) for url in store])
        typer.echo(f"Runs {agent} for {', '.join(store)}, at most {at_once} rollouts at once (isolation: {isolation}).")
        typer.echo(f"Logs: {log_dir.resolve()}. Ctrl-C gives back what runs, and ends.")
        try:
            with ExitStack() as parts:
                working = [
                    parts.enter_context(
                        runners.launch(share, loaded, url, key, log_dir=folder, isolation=isolation, most=max_rollouts)
                    )
                    for url, share, folder in zip(
                        store, runners.shares(at_once, len(store)), runners.log_dirs(log_dir, len(store)), strict=True
                    )
                ]
                while not all(each.done for each in working):
                    for each in working:
                        each.check()
                    time.sleep(_CHECK_SECONDS)
        except KeyboardInterrupt:
            typer.echo("Stopped; what ran was given back.")
            raise
    typer.echo(f"Done: rollouts that ended here: {max_rollouts}.")


def _make_log_dir(folder: Path) -> None:
    """Make the folder of the logs. Raises CannotJoin where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotJoin(f"--log-dir {folder} cannot be made: {error.strerror}; name another folder") from error


def _wait_for(servers: "Sequence[HttpStore]") -> None:
    """Wait until one of the servers answers; the others are waited for as they go away. Raises as `_answers`."""
    seen_urls: set[str] = set()
    while True:
        away = [server.url for server in servers if not _answers(server)]
        for url in away:
            if url not in seen_urls:
                typer.echo(f"Waiting for {url}: no server answers there.")
        seen_urls.update(away)
        if len(away) < len(servers):
            return
        time.sleep(_AWAY_SECONDS)


def _answers(server: "HttpStore") -> bool:
    """Whether it is there. Raises CannotJoin for a refused key, and for what is no server of ours."""
    from lightning_rl.store.errors import ForeignAnswer, NotAllowed, StoreError, Unreachable

    try:
        server.workers_died([])  # a request that changes nothing
    except ForeignAnswer as error:
        raise CannotJoin(str(error)) from error
    except Unreachable:
        return False
    except NotAllowed as error:
        raise CannotJoin(f"{server.url} refuses the key in {RUNNER_KEY}: give the one it was started with") from error
    except StoreError as error:
        raise CannotJoin(f"{server.url} is no lightning_rl server: {error}") from error
    return True
