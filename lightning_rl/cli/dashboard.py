"""`lightning-rl dashboard`: a page of runs and their rollouts, down to each token."""

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rl.errors import Explained
from lightning_rl.processes.service_keys import ADMIN_KEY, SHORTEST, is_loopback

if TYPE_CHECKING:
    from lightning_rl.inspect.rollout_source import PagedStore
    from lightning_rl.viewer.run import ViewedRun

PORT = 8199
_KEY_FILE = "admin.key"  # in the folder of a run


class NoKey(Explained, ValueError):
    """A key is needed, and there is none."""


def run(
    folder: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders with runs below them; by default runs/.")
    ] = None,
    url: Annotated[str | None, typer.Option(help=f"A running server instead; its admin key is {ADMIN_KEY}'s.")] = None,
    host: Annotated[str, typer.Option(help=f"Where to listen; beyond the loopback {ADMIN_KEY} is asked for.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where this one is taken, a free one.")] = PORT,
) -> None:
    """Open a page of runs: curves, what happens now, every rollout down to its tokens. Ctrl-C ends it.

    It reads run folders (of runs that are over, crashed, or going on) or a running server, changes nothing, and needs
    no network.

    ```
    lightning-rl dashboard runs/20261231-120000
    lightning-rl dashboard --url http://127.0.0.1:8080
    ```
    """
    from lightning_rl.viewer.access import Access
    from lightning_rl.viewer.app import create_app, serve

    runs = _runs(folder or [], url)
    key = None if is_loopback(host) else _key(folder or [])
    if key is not None and len(key) < SHORTEST:
        raise NoKey(f"on {host}, which others can reach, set {ADMIN_KEY} to at least {SHORTEST} characters")
    since = functools.partial(_begun_since, folder or [], {run.run_dir for run in runs}) if url is None else tuple
    app = create_app(runs, Access(host, key), since)
    note = "" if key is None else "  (it asks for the admin key)"
    names = ", ".join(one.name for one in runs[:3]) + ", ..." * (len(runs) > 3)
    serve(app, host, port, lambda place: typer.echo(f"{names} at {place}{note}   Ctrl-C ends it"))


def _runs(folders: list[Path], url: str | None) -> "list[ViewedRun]":
    from lightning_rl.inspect.rollout_source import PagedStore
    from lightning_rl.viewer.run import ViewedRun
    from lightning_rl.viewer.run_folder import runs_below

    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"--url {url} is no URL; give http://... or https://...")
        if len(folders) > 1:
            raise typer.BadParameter("--url goes with one folder at most: that of the run whose rollouts are there")
        return [ViewedRun(folders[0] if folders else None, [PagedStore(url, _key(folders))], None if folders else url)]
    return [ViewedRun(run_dir, _attached(run_dir)) for run_dir in runs_below(folders or [Path("runs")])]


def _begun_since(folders: list[Path], known_dirs: "set[Path | None]") -> "list[ViewedRun]":
    """The runs in the folders that are not among the `known_dirs`, which they are then."""
    from lightning_rl.inspect.recorded import NotRecorded
    from lightning_rl.viewer.run import ViewedRun
    from lightning_rl.viewer.run_folder import runs_below

    try:
        fresh = [run_dir for run_dir in runs_below(folders or [Path("runs")]) if run_dir not in known_dirs]
    except NotRecorded:  # the folder is gone, and what was read of its runs is still there
        return []
    known_dirs.update(fresh)
    return [ViewedRun(run_dir, _attached(run_dir)) for run_dir in fresh]


def _attached(run_dir: Path) -> "list[PagedStore]":
    """The servers that have the rollouts of a run which attached to them, by the key in the environment; none where the
    folder has them, or there is no such key."""
    from lightning_rl.inspect import recorded
    from lightning_rl.inspect.rollout_source import PagedStore

    key = os.environ.get(ADMIN_KEY)
    if not recorded.is_attached(run_dir) or not key:
        return []
    return [PagedStore(url, key) for url in recorded.server_urls(run_dir)]


def _key(folders: list[Path]) -> str:
    """The admin key: the environment's, else the one in a run's folder. Raises NoKey."""
    if key := os.environ.get(ADMIN_KEY):
        return key
    for file in (folder / _KEY_FILE for folder in folders):
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
    raise NoKey(f"set {ADMIN_KEY} to the admin key, or name the folder of a run that has one: it is asked for there")
