"""A server with the tutorial's small model behind it, for agents that run wherever they like.

Run it with `python -m examples.any_language.serve`; it prints its URL and its admin key, and serves until Ctrl-C.
"""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import lightning_rl as lrl
from lightning_rl.control_plane.launch import launch


@contextlib.contextmanager
def serving(run_dir: Path) -> Iterator[tuple[str, str]]:
    """The URL and the admin key of a server whose files are in `run_dir`, for as long as the block runs."""
    engine, admin_key = lrl.Baseline(), secrets.token_urlsafe(24)
    try:
        endpoint = engine.open(run_dir)
        runner_key = secrets.token_urlsafe(24)
        with launch(run_dir, endpoint, admin_key=admin_key, runner_key=runner_key) as server:
            yield server.url, admin_key
    finally:
        engine.close()


def main() -> None:
    """Serve until interrupted."""
    with TemporaryDirectory() as folder, serving(Path(folder)) as (url, key), contextlib.suppress(KeyboardInterrupt):
        print(f"export LIGHTNING_RL_URL={url} LIGHTNING_RL_ADMIN_KEY={key}", flush=True)
        Event().wait()


if __name__ == "__main__":
    main()
