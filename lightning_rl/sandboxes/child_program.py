"""A program of this machine, run to its end: what the local sandbox and the command line of Docker stand on."""

import asyncio
import codecs
import contextlib
import errno
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from lightning_rl.sandboxes import NOT_FOUND, Output

_READ = 64 * 1024  # bytes
# A shell that ends its process group when its standard input does, which is a pipe that this process holds: so programs
# end with it, however it ends.
_WATCHED = 'exec 3<&0; { read _ <&3; kill -KILL 0; } & "$@" </dev/null 3<&-; exit $?'
_DRAIN_SECONDS = 5.0  # for what is left in a pipe; what has left the process group may hold it open for ever


class Done(NamedTuple):
    """The exit status, or None where its time was over; and what it printed, of both streams, where it was kept."""

    status: int | None
    printed: bytes


def watched(command: Sequence[str]) -> list[str]:
    """The command for a program that ends, with all that it started, when its standard input does."""
    return ["sh", "-c", _WATCHED, "sh", *command]


async def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str | None = None,
    timeout_seconds: float | None = None,
    given: bytes | None = None,
    ends_with_us: bool = False,
    output: Output | None = None,
) -> Done:
    """Run a program in a process group of its own, which is killed when it has ended, or its time is over.

    What it prints goes to `output` as it comes, or is kept where there is none. Its standard input is `given`, or
    empty. A program that is not there has the status 127, as in a shell. With `ends_with_us` its standard input ends
    with this process (see `watched`).
    """
    if ends_with_us:
        typed, life = os.pipe()
        try:
            with os.fdopen(typed, "rb", buffering=0) as stdin:
                return await _run(command, environment, folder, timeout_seconds, stdin, output)
        finally:
            os.close(life)
    with tempfile.TemporaryFile() as stdin:
        stdin.write(given or b"")
        stdin.seek(0)
        return await _run(command, environment, folder, timeout_seconds, stdin, output)


async def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str | None,
    timeout_seconds: float | None,
    stdin: IO[bytes],
    output: Output | None,
) -> Done:
    # The pipe is ours: with one of asyncio's, `wait` waits for all that hold it, a server that was left running too.
    reads, writes = os.pipe()
    kept = bytearray()
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
                output(f"{command[0]}: {error.strerror}\n")
            return Done(NOT_FOUND[isinstance(error, FileNotFoundError)], b"")
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            longest = max(map(len, command))
            told = (
                f"its arguments are longer than the system allows (the longest has {longest:,} characters): let the "
                "program read a long text from a file, which the task's `files` bring"
            )
            raise OSError(errno.E2BIG, told) from error
        finally:
            os.close(writes)
        reading = asyncio.create_task(_passed_on(pipe, kept, output))
        status: int | None = None
        try:
            async with asyncio.timeout(timeout_seconds):
                status = await process.wait()
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait([reading], timeout=_DRAIN_SECONDS)
            reading.cancel()
    return Done(status, bytes(kept))


async def _passed_on(pipe: IO[bytes], kept: bytearray, output: Output | None) -> None:
    reader, decoder = asyncio.StreamReader(), codecs.getincrementaldecoder("utf-8")("replace")
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while data := await reader.read(_READ):
            if output is None:
                kept += data
            elif text := decoder.decode(data):
                output(text)
    finally:
        transport.close()
