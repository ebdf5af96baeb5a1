"""`lightning-rl rollouts`: what was asked for and what became of it, in a run's folder or at a running server.

Invariant: `list`, `show` and `tail` change nothing; `cancel` and `retry` go through the server that runs the rollouts,
never around it.
"""

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rl.errors import Explained
from lightning_rl.processes.service_keys import ADMIN_KEY
from lightning_rl.store import contract
from lightning_rl.store.contract import AttemptTrace, Rollout, RolloutRequest, RolloutTrace
from lightning_rl.store.life_cycle import ENDED, RolloutStatus

if TYPE_CHECKING:
    from lightning_rl.inspect.explain import AttemptView
    from lightning_rl.inspect.rollout_source import PagedStore, RolloutSource

KEY_FILE, URL_FILE = "admin.key", "server.url"  # in the folder of a run
REPEATS = "repeats"  # in a retry's metadata: the rollout that it repeats
_WORDS = 60  # characters of a message or a task
_PIPED_WIDTH = 160

app = typer.Typer(help="The rollouts of a run: `list`, `show`, `tail`, `cancel`, `retry`.", no_args_is_help=True)

RunDir = Annotated[Path | None, typer.Option(help="The run's folder; by default the newest below runs/.")]
Url = Annotated[str | None, typer.Option(help=f"A running server instead; its admin key is {ADMIN_KEY}'s.")]
Status = Annotated[RolloutStatus | None, typer.Option(help="Of rollouts in this state alone.")]
Mode = Annotated[contract.Mode | None, typer.Option(help="Of rollouts of this mode alone.")]
Group = Annotated[str | None, typer.Option(help="The rollouts of this group alone.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Whole ids, as `list` shows them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, a line for each.")]


class NoServer(Explained, RuntimeError):
    """What was asked for needs a running server, and there is none to be found."""


class NotRetried(Explained, ValueError):
    """A rollout that cannot be asked for again."""


@app.command("list")
def list_rollouts(
    run_dir: RunDir = None,
    url: Url = None,
    status: Status = None,
    mode: Mode = None,
    group: Group = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest ones.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List the newest rollouts, the newest last.

    ```
    lightning-rl rollouts list --status failed --mode train --limit 20
    ```
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    from lightning_rl.inspect.rollout_source import Which

    with _place(run_dir, url) as place:
        rollouts = place.newest(Which(status=status, mode=mode, group_id=group), limit + 1)
    are_more, rollouts = len(rollouts) > limit, rollouts[-limit:]
    if as_json:
        for rollout in rollouts:
            _tell_json(rollout)
        return
    names, rows = _columns(), [_cells(rollout) for rollout in rollouts]
    widths = [max(map(cell_len, column)) for column in zip(names, *rows, strict=True)]
    console = Console(highlight=False, markup=False)
    console.width = console.width if console.is_terminal else max(console.width, _PIPED_WIDTH)
    # The task gives way, down to its column's name; in a narrower terminal lines go on below.
    beside = sum(widths[:-1]) + 2 * (len(names) - 1)
    widths[-1] = max(len(names[-1]), min(widths[-1], console.width - beside))
    console.width = max(console.width, beside + widths[-1])
    table = Table(box=None, pad_edge=False)
    for name, width in zip(names, widths, strict=True):
        side: Any = "right" if name in ("tries", "reward", "seconds") else "left"
        table.add_column(name, no_wrap=True, width=width, justify=side)
    for row in rows:
        table.add_row(*row)
    console.print(table if rollouts else "no such rollouts")
    if are_more:
        typer.echo(f"these are the newest {limit}; more with --limit {10 * limit}", err=True)


@app.command()
def show(
    rollout: Annotated[str, typer.Argument(help="A rollout's id; in a folder, how it alone begins or ends.")],
    run_dir: RunDir = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show a rollout: its attempts, rewards, error with traceback, and its calls in short.

    ```
    lightning-rl rollouts show train-0-3-1-0 --run-dir runs/20261231-120000
    ```
    """
    from lightning_rl.inspect.explain import explain
    from lightning_rl.inspect.recorded import NotRecorded
    from lightning_rl_adapters.forest import ForestError

    with _place(run_dir, url) as place:
        trace = place.trace(rollout)
    try:
        views = explain(trace).attempts
    except ForestError as error:
        raise NotRecorded(f"rollout {trace.rollout.rollout_id} is damaged: {error}") from error
    if as_json:
        attempts = [
            {"attempt": each.attempt, "rewards": each.rewards, "calls": view.calls}
            for each, view in zip(trace.attempts, views, strict=True)
        ]
        _tell_json({"rollout": trace.rollout, "attempts": attempts})
        return
    typer.echo("\n".join(_shown(trace, views, folder=run_dir if url is None else None, at_server=url is not None)))


@app.command()
def tail(
    run_dir: RunDir = None,
    url: Url = None,
    status: Status = None,
    mode: Mode = None,
    group: Group = None,
    limit: Annotated[int, typer.Option(min=0, help="So many that have ended before come first.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Print rollouts as they end, until Ctrl-C.

    ```
    lightning-rl rollouts tail --url http://127.0.0.1:8080 --mode train
    ```
    """
    from lightning_rl.files import LOCK, is_held
    from lightning_rl.inspect import rollout_source as places

    which = places.Which(status=status, mode=mode, group_id=group)
    with _place(run_dir, url) as place:
        if isinstance(place, places.RolloutFolder) and not is_held(place.run_dir / LOCK):
            typer.echo("nobody works on this run now; what goes on with it is waited for, until Ctrl-C", err=True)
        for rollout in places.tail(place, which, before=limit):
            if as_json:
                _tell_json(rollout)
            else:
                typer.echo("  ".join(_cells(rollout)))


@app.command()
def cancel(ids: Ids, run_dir: RunDir = None, url: Url = None) -> None:
    """Cancel rollouts of a running server; those that have ended stay as they are.

    ```
    lightning-rl rollouts cancel train-0-3-1-0 train-0-3-1-1 --url http://127.0.0.1:8080
    ```
    """
    with _server(run_dir, url) as store:
        for rollout_id in ids:
            before = store.rollout(rollout_id).status
            now = store.cancel(rollout_id).status
            typer.echo(f"{rollout_id}: {now}" if now != before else f"{rollout_id}: had ended before, {now}")


@app.command()
def retry(ids: Ids, run_dir: RunDir = None, url: Url = None) -> None:
    """Ask for rollouts that have ended once more, as new ones; what ended stays as it is. Prints the new ids.

    The new ones have the task, mode, agent, resources and config of the old ones, and are of no group; their metadata
    say which they repeat. Those of a training step are refused: no step would train the new ones.

    ```
    lightning-rl rollouts retry r0123456789 --url http://127.0.0.1:8080
    ```
    """
    with _server(run_dir, url) as store:
        for made, rollout_id in zip(store.enqueue([_again(store.rollout(one)) for one in ids]), ids, strict=True):
            typer.echo(f"{made.rollout_id}  repeats {rollout_id}")


def _again(rollout: Rollout) -> RolloutRequest:
    """The request that repeats a rollout. Raises NotRetried."""
    if rollout.status not in ENDED:
        raise NotRetried(f"rollout {rollout.rollout_id} is {rollout.status}: wait for its end, or cancel it first")
    if "step" in rollout.metadata:
        raise NotRetried(
            f"rollout {rollout.rollout_id} is of step {rollout.metadata['step']} of a training run, which accounts for "
            "every token that its engines sample: tokens that no step asked for would stop it. Look at what happened "
            f"with `lightning-rl replay` and `lightning-rl explain {rollout.rollout_id}`"
        )
    return RolloutRequest(
        task=rollout.task,
        mode=rollout.mode,
        agent=rollout.agent,
        resources_id=rollout.resources_id,
        config=rollout.config,
        metadata={**rollout.metadata, REPEATS: rollout.rollout_id},
    )


@contextlib.contextmanager
def _place(run_dir: Path | None, url: str | None) -> "Iterator[RolloutSource]":
    """Where to look. Raises NotRecorded and NoServer."""
    from lightning_rl.inspect import recorded
    from lightning_rl.inspect import rollout_source as places

    run_id, urls = None, [] if url is None else [url]
    if url is None:
        folder = recorded.newest_run() if run_dir is None else run_dir
        if not recorded.is_attached(folder) or not (folder / recorded.RUN_ID).is_file():
            yield places.RolloutFolder(folder)
            return
        urls, run_id = recorded.server_urls(folder), (folder / recorded.RUN_ID).read_text(encoding="utf-8").strip()
    with contextlib.ExitStack() as stores:
        servers = [places.RolloutServer(stores.enter_context(_server(run_dir, each)), run_id) for each in urls]
        yield servers[0] if len(servers) == 1 else places.RolloutServers(servers)


@contextlib.contextmanager
def _server(run_dir: Path | None, url: str | None) -> "Iterator[PagedStore]":
    """The server at `url`, else the one of the run in `run_dir`, which must be alive. Raises NoServer."""
    from lightning_rl.inspect import recorded
    from lightning_rl.inspect.rollout_source import PagedStore
    from lightning_rl.store.errors import NotAllowed

    if url is None:
        folder = recorded.newest_run() if run_dir is None else run_dir
        if not _alive(folder) or not (folder / URL_FILE).is_file():
            raise NoServer(
                f"this needs a running server, and no run goes on in {folder.resolve()}: name one with --url, its "
                f"admin key in {ADMIN_KEY}"
            )
        url, key = ((folder / name).read_text(encoding="utf-8").strip() for name in (URL_FILE, KEY_FILE))
    else:
        if not url.startswith(("http://", "https://")):
            raise NoServer(f"--url {url} is no URL; give http://... or https://...")
        key = _key(run_dir)
    store = PagedStore(url, key)
    try:
        yield store
    except NotAllowed as error:
        where = f"in {ADMIN_KEY}" if os.environ.get(ADMIN_KEY) else f"in the run's folder ({KEY_FILE})"
        raise NoServer(f"the admin key {where} is not that server's: {error}") from error
    finally:
        store.close()


def _alive(folder: Path) -> bool:
    """Whether the folder is that of a run that goes on at its own server."""
    from lightning_rl.files import LOCK, is_held

    return (folder / KEY_FILE).is_file() and is_held(folder / LOCK)


def _key(run_dir: Path | None) -> str:
    """The admin key: the environment's, else the one in the run's folder. Raises NoServer."""
    if key := os.environ.get(ADMIN_KEY):
        return key
    file = None if run_dir is None else run_dir / KEY_FILE
    if file is None or not file.is_file():
        raise NoServer(
            f"set {ADMIN_KEY} to the server's admin key, or name the folder of its run with --run-dir: a run keeps its "
            f"key there, in {KEY_FILE}"
        )
    return file.read_text(encoding="utf-8").strip()


def _columns() -> tuple[str, ...]:
    return ("rollout", "status", "mode", "group", "tries", "reward", "seconds", "error and task")


def _cells(rollout: Rollout) -> tuple[str, ...]:
    """A rollout as one line."""
    import msgspec

    from lightning_rl.inspect import draw

    seconds = "-" if rollout.ended_at is None else f"{rollout.ended_at - rollout.created_at:.1f}"
    error = rollout.error
    texts = [] if error is None else [f"{error.type}: {error.message}"]
    texts.append(msgspec.json.encode(rollout.task).decode())
    return (
        rollout.rollout_id,
        rollout.status,
        rollout.mode,
        rollout.group_id or "-",
        str(rollout.attempt_count),
        "-" if rollout.reward is None else f"{rollout.reward:g}",
        seconds,
        "  ".join(draw.first_words(text, _WORDS) for text in texts),
    )


def _shown(trace: RolloutTrace, views: "list[AttemptView]", *, folder: Path | None, at_server: bool) -> Iterator[str]:
    import msgspec

    from lightning_rl.inspect import recorded

    rollout = trace.rollout
    group = f", group {rollout.group_id}" if rollout.group_id else ""
    yield f"rollout {rollout.rollout_id}: {rollout.status}, mode {rollout.mode}{group}"
    yield f"task      {msgspec.json.encode(rollout.task).decode()}"
    if rollout.metadata:
        yield f"metadata  {msgspec.json.encode(rollout.metadata).decode()}"
    if rollout.rewards:
        yield f"rewards   {_named(rollout.rewards)}"
    for each, view in zip(trace.attempts, views, strict=True):
        yield ""
        yield from _attempt(each, view, counts=each.attempt.attempt_id == rollout.counting_attempt_id)
    if at_server:
        return
    quoted = shlex.quote(str(folder or recorded.newest_run()))
    where = "" if folder is None else f" --run-dir {quoted}"
    yield ""
    yield f"Next: lightning-rl explain {rollout.rollout_id}{where}"
    if rollout.counting_attempt_id is not None:
        yield f"      lightning-rl replay {quoted} {rollout.rollout_id}"


def _attempt(each: AttemptTrace, view: "AttemptView", *, counts: bool) -> Iterator[str]:
    from lightning_rl.inspect import draw

    attempt = each.attempt
    took = "" if attempt.ended_at is None else f" after {attempt.ended_at - attempt.started_at:.1f} s"
    yield f"attempt {attempt.sequence} ({attempt.attempt_id}): {attempt.status}{took}{', counts' if counts else ''}"
    if attempt.rewards:
        yield f"  rewards   {_named(attempt.rewards)}"
    for reward in each.rewards:
        if reward.call_id is not None:
            yield f"  reward    {reward.name} {reward.value:g} of call {reward.call_id}"
    for call in view.calls:
        marks = "".join(f", {mark}" for mark in call.marks)
        by = f" ({call.agent})" if call.agent else ""
        yield (
            f"  call {call.number}{by}: {call.model}, +{call.prompt_tokens} prompt, {call.sampled_tokens} sampled, "
            f"{call.finish_reason}{marks}"
        )
        yield f"    asked     {draw.first_words(call.asked, _WORDS)}"
        yield f"    answered  {draw.first_words(call.answered, _WORDS)}"
    if attempt.error is not None:
        yield f"  error     {attempt.error.type}: {attempt.error.message}"
        yield from (f"    {line}" for line in attempt.error.traceback.rstrip().splitlines())


def _named(rewards: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in rewards.items())


def _tell_json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(value).decode())
