"""A real PostgreSQL for tests: a server of their own in a folder of its own, reached by a socket there.

It ends with the process that started it, however that ends. Where the tests run as root, whom PostgreSQL refuses, it
runs as the user `postgres`.
"""

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg

# Nothing of a test outlives its machine, so nothing waits for the disk; what was answered does outlive the server.
_SETTINGS = ("fsync=off", "full_page_writes=off", "shared_buffers=32MB", "listen_addresses=")
# The shell reads until whoever started it has closed the pipe, or is gone.
_WHILE_WE_LIVE = '"$@" & read -r _; kill -INT $!; wait $!'
_PATIENCE_SECONDS = 120.0


def programs() -> Path | None:
    """The folder of PostgreSQL's programs, the newest where there are several; None where it is not installed."""
    found = [Path(name).resolve().parent for name in [shutil.which("postgres")] if name]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -int(path.parent.name))
    return next((folder for folder in found if (folder / "initdb").exists()), None)


class Cluster:
    """A PostgreSQL server, started; `database()` makes a new database in it."""

    def __init__(self, bin_dir: Path) -> None:
        self._bin = bin_dir
        self._user = "postgres" if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path must be short
        self._numbers = itertools.count()
        if self._user is not None:
            shutil.chown(self._folder, self._user, self._user)
        self._run("initdb", "--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C")
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        command = [self._bin / "postgres", "-D", self._folder / "data", "-k", self._folder, *settings]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _WHILE_WE_LIVE, "sh", *command], stdin=subprocess.PIPE, stdout=log, stderr=log,
                cwd=self._folder, user=self._user, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return self.connect("postgres").close()
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"PostgreSQL did not start: {(self._folder / 'log').read_text()}") from None
                time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server; whoever is connected is cut off."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_PATIENCE_SECONDS)

    def kill(self) -> None:
        """Kill the server as the machine's end would, in the middle of whatever it does."""
        postmaster = int((self._folder / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGQUIT)
        self.stop()

    def remove(self) -> None:
        """Stop the server, and remove what it has written."""
        self.stop()
        shutil.rmtree(self._folder)

    def connect(self, database: str) -> psycopg.Connection:
        """A connection of one's own, each statement its own transaction."""
        return psycopg.connect(host=str(self._folder), user="postgres", dbname=database, autocommit=True)

    def database(self) -> str:
        """The name of a new, empty database."""
        name = f"store{next(self._numbers)}"
        with self.connect("postgres") as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return name

    def url(self, database: str) -> str:
        """The URL of a database."""
        return f"postgresql+psycopg://postgres@/{database}?host={self._folder}"

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._bin / program, "-D", self._folder / "data", *arguments],
            check=True, capture_output=True, cwd=self._folder, user=self._user,
        )  # fmt: skip
