"""A program of this machine, run to its end: what the local sandbox and the command line of Docker stand on."""

import asyncio
import codecs
import contextlib
import errno
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple
from uuid import uuid4

from lightning_rl.sandboxes import NOT_FOUND, Output

_READ = 64 * 1024  # bytes
_MARK = "LIGHTNING_RL_PROGRAM"  # a variable that a program's own programs inherit, whatever session they are in
# A shell that kills what `run_whole` does when its standard input ends, which is a pipe that this process holds: so
# programs end with it, however it ends. `$$` is the session, and the sixth field of a `stat` is that of a process.
_WATCHED = f"""exec 3<&0
{{
    read _ <&3
    read me _ </proc/self/stat
    for process in /proc/[0-9]*; do
        read stat <"$process/stat" || continue
        set -- ${{stat##*) }}
        [ "$4" = $$ ] || grep -qF "{_MARK}=${_MARK}" "$process/environ" || continue
        [ "${{process#/proc/}}" = "$me" ] || kill -KILL "${{process#/proc/}}"
    done
    kill -KILL 0
}} 2>/dev/null &
"$@" </dev/null 3<&-
exit $?"""
_DRAIN_SECONDS = 1.0  # for what is left in a pipe; what was not found may hold it open for ever


class Done(NamedTuple):
    """The exit status, or None where its time was over; and what it printed, of both streams, where it was kept."""

    status: int | None
    printed: bytes


async def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str | None = None,
    timeout_seconds: float | None = None,
    standard_input: bytes | None = None,
    ends_with_us: bool = False,
    output: Output | None = None,
) -> Done:
    """Run a program in a process group of its own, which is killed when it has ended, or its time is over.

    What it prints goes to `output` as it comes, or is kept where there is none. Without `standard_input` that is empty.
    A program that is not there has the status 127, as in a shell. With `ends_with_us` its standard input ends
    with this process.
    """
    if ends_with_us:
        with _open_as_long_as_we_are() as stdin:
            return await _run(command, environment, folder, timeout_seconds, stdin, output)
    with tempfile.TemporaryFile() as stdin:
        stdin.write(standard_input or b"")
        stdin.seek(0)
        return await _run(command, environment, folder, timeout_seconds, stdin, output)


async def run_whole(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str | None = None,
    timeout_seconds: float | None = None,
    output: Output | None = None,
) -> Done:
    """Run a program as `run` does, with nothing on its standard input; all that it started ends when it does (on Linux
    in whatever process group), and it ends with this process, however that ends."""
    mark = uuid4().hex
    watched, environment = ["sh", "-c", _WATCHED, "sh", *command], {**environment, _MARK: mark}
    with _open_as_long_as_we_are() as stdin:
        return await _run(watched, environment, folder, timeout_seconds, stdin, output, mark)


@contextlib.contextmanager
def _open_as_long_as_we_are() -> Iterator[IO[bytes]]:
    typed, life = os.pipe()
    try:
        with os.fdopen(typed, "rb", buffering=0) as stdin:
            yield stdin
    finally:
        os.close(life)


async def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str | None,
    timeout_seconds: float | None,
    stdin: IO[bytes],
    output: Output | None,
    mark: str | None = None,
) -> Done:
    # The pipe is ours: with one of asyncio's, `wait` waits for all that hold it, a server that was left running too.
    reads, writes = os.pipe()
    printed = bytearray()
    with os.fdopen(reads, "rb", buffering=0) as pipe:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=writes,
                stderr=writes,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )
        except (FileNotFoundError, PermissionError) as error:
            if output is not None:
                missing = folder if folder is not None and error.filename == folder else command[0]
                output(f"{missing}: {error.strerror}\n")
            return Done(NOT_FOUND[isinstance(error, FileNotFoundError)], b"")
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            longest = max(map(len, [*command, *environment.values()]))
            message = (
                f"its arguments and variables are longer than the system allows (the longest has {longest:,} "
                "characters): let the program read a long text from a file, which the task's `files` bring"
            )
            raise OSError(errno.E2BIG, message) from error
        finally:
            os.close(writes)
        reading = asyncio.create_task(_passed_on(pipe, printed, output))
        status: int | None = None
        try:
            async with asyncio.timeout(timeout_seconds):
                status = await process.wait()
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if mark is not None:
                await asyncio.to_thread(_kill_started_by, process.pid, mark)  # it reads of every process there is
            await asyncio.wait([reading], timeout=_DRAIN_SECONDS)
            reading.cancel()
    return Done(status, bytes(printed))


def _kill_started_by(program: int, mark: str) -> None:
    """Kill what a program has started in other process groups: what is in the session that it led (`timeout` and a
    shell's jobs have groups of their own), and what has inherited its mark (`setsid`, servers)."""
    killed: set[int] = set()
    while processes := set(_started_by(program, mark)) - killed:  # again: one may have started another meanwhile
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        killed |= processes


def _started_by(session: int, mark: str) -> Iterator[int]:
    """The processes of a session, and those with a mark in their environment, as far as the system tells."""
    marked = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            of_session = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[3])
            if of_session == session or marked in (folder / "environ").read_bytes():
                yield int(folder.name)


async def _passed_on(pipe: IO[bytes], printed: bytearray, output: Output | None) -> None:
    reader, decoder = asyncio.StreamReader(), codecs.getincrementaldecoder("utf-8")("replace")
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while data := await reader.read(_READ):
            if output is None:
                printed += data
            elif text := decoder.decode(data):
                output(text)
        if output is not None and (text := decoder.decode(b"", final=True)):  # a character that was cut
            output(text)
    finally:
        transport.close()
