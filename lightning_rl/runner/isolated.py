"""Every rollout in a process of its own, forked from one that has the agent loaded (`isolation=process`).

Before it has any thread, a runner process forks a *fork server*: one thread, the agent, and a socket to the runner. It
forks a child for each rollout, kills it with all that it started when told to, and says how it ended.

Invariants: nothing of a rollout outlives it but what has left its process group on purpose; a child that ends, however
that comes, costs no other anything; when the runner ends, so do all. A child has no descriptor of another.
"""

import asyncio
import atexit
import contextlib
import faulthandler
import gc
import io
import itertools
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO

import msgspec

from lightning_rl.agents.agent import Agent, run_agent
from lightning_rl.agents.emitted import Emitted
from lightning_rl.processes.child import how_it_ended
from lightning_rl.processes.event_loop import AsyncAgents
from lightning_rl.processes.exit_handlers import flush_spans, forget_exit_handlers, leave
from lightning_rl.runner import outcome
from lightning_rl.runner.executors import AgentRun, Done, Spawn
from lightning_rl.runner.outcome import Outcome
from lightning_rl.runner.output_capture import LOG, CapturedOutput, Printed
from lightning_rl.runner.payload import LENGTH
from lightning_rl.store.contract import Claim, ErrorInfo, Finish

_MESSAGE = struct.Struct(">cQq")  # what, which rollout, the status where one ended
_START, _KILL, _ENDED = b"s", b"k", b"e"
_NOT_FORKED = 1000  # in the place of a status, which ends at 255
_READ = 2**16
_EXIT_HANDLERS_SECONDS = 1.0  # of each process
_LEAVING_SECONDS = 0.1  # as a process without exit handlers needs less of
_LAST_BYTES_SECONDS = 1.0  # for an answer that the runner has not read yet when its process ends
Ended = Callable[[int, Outcome | None], None]  # with the status of a process, and what it answered
_log = logging.getLogger(__name__)


class ForkServer:
    """The runner's side. Made by `fork`; `begin` goes before the first run."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._loop = AsyncAgents()

    def begin(self, spawn: Spawn, died: Callable[[], None]) -> None:
        """`died` is called when the fork server is gone."""
        self.spawn = spawn
        self._loop.submit(self._listen(died))

    def run(self, claim: Claim, printed: Printed, done: Done) -> AgentRun:
        """See `Runs`."""
        return _Isolated(self, next(self._numbers), claim, printed, done)

    def begin_rollout(self, number: int, claim: Claim, printed: Printed, ended: Ended) -> None:
        """Fork a process for it; `ended` is called in the loop."""
        parent_end, child_end = socket.socketpair()
        pipes = [os.pipe(), os.pipe()]
        inherited = [child_end.fileno(), *(write for _, write in pipes)]
        with child_end, self._sending:
            self._loop.submit(self._follow(number, claim, printed, parent_end, [read for read, _ in pipes], ended))
            with contextlib.suppress(OSError):  # it is gone: `died` was told, or will be
                socket.send_fds(self._control, [_MESSAGE.pack(_START, number, 0)], inherited)
        for _, write in pipes:
            os.close(write)

    def kill(self, number: int) -> None:
        """End the process of this rollout, and what it has started."""
        with self._sending, contextlib.suppress(OSError):
            self._control.sendall(_MESSAGE.pack(_KILL, number, 0))

    async def _listen(self, died: Callable[[], None]) -> None:
        reader, writer = await asyncio.open_connection(sock=self._control.dup())  # a writer that is gone closes it
        try:
            while not writer.is_closing():
                _, number, status = _MESSAGE.unpack(await reader.readexactly(_MESSAGE.size))
                self._ending(number).set_result(status)
        except (asyncio.IncompleteReadError, ConnectionError):
            _log.error("the fork server is gone")
        died()

    def _ending(self, number: int) -> "asyncio.Future[int]":
        return self._ended.setdefault(number, asyncio.get_running_loop().create_future())

    async def _follow(
        self,
        number: int,
        claim: Claim,
        printed: Printed,
        parent_end: socket.socket,
        pipes: list[int],
        ended: Ended,
    ) -> None:
        with parent_end, _passing_on(pipes, printed):
            parent_end.setblocking(False)
            answer = asyncio.ensure_future(_answer(parent_end, claim))
            ending = self._ending(number)
            either: list[asyncio.Future[Any]] = [answer, ending]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([ending], timeout=_LEAVING_SECONDS)
            # Exit handlers take their time, which is none of the rollout's: its deadline may come meanwhile.
            told = not ending.done() and answer.exception() is None and answer.result() is not None
            if told:
                ended(0, answer.result())
            status = await ending
            del self._ended[number]
            await asyncio.wait([answer], timeout=_LAST_BYTES_SECONDS)
            answer.cancel()
        if told:
            return
        unread = answer.cancelled() or not answer.done()
        if not unread and (error := answer.exception()) is not None:  # as that of a process that died
            _log.error("what the process of rollout %s sent cannot be read: %s", claim.rollout.rollout_id, error)
            unread = True
        ended(status, None if unread else answer.result())


class _Isolated:
    where = ""  # a process that is killed at once does not say

    def __init__(self, server: ForkServer, number: int, claim: Claim, printed: Printed, done: Done) -> None:
        self._server = server
        self._number = number
        self._claim = claim
        self._printed = printed
        self._done = done

    def start(self) -> None:
        """See `AgentRun`."""
        self._server.begin_rollout(self._number, self._claim, self._printed, self._ended)

    def stop(self) -> bool:
        """See `AgentRun`."""
        self._server.kill(self._number)
        return True

    def _ended(self, status: int, answer: Outcome | None) -> None:
        came_to = _died(self._claim, status) if answer is None else answer
        self._server.spawn(lambda: self._done(came_to))


def _died(claim: Claim, status: int) -> Outcome:
    """What a rollout came to whose process ended without a word: nobody knows whose fault that is."""
    if status == _NOT_FORKED:
        how = "could not be started: there is no memory for it, or there are too many processes"
    else:
        how = f"{how_it_ended(status)}, before its agent was done"
    message = f"the process of rollout {claim.rollout.rollout_id} {how}"
    error = ErrorInfo(type="RolloutProcessDied", message=message, infrastructure=True)
    return Outcome([], Finish(status="failed", error=error), [])


async def _answer(conn: socket.socket, claim: Claim) -> Outcome | None:
    """What the child makes of the claim; None where it ends without an answer."""
    loop = asyncio.get_running_loop()
    frame = bytearray()
    try:
        await loop.sock_sendall(conn, _framed(msgspec.msgpack.encode(claim)))
        while more := await loop.sock_recv(conn, _READ):
            frame += more
            if len(frame) >= LENGTH.size and len(frame) == LENGTH.size + LENGTH.unpack_from(frame)[0]:
                return msgspec.msgpack.decode(memoryview(frame)[LENGTH.size :], type=Outcome)
    except ConnectionError:
        pass
    return None


@contextlib.contextmanager
def _passing_on(pipes: list[int], printed: Printed) -> Iterator[None]:
    """Inside the block, what comes through the pipes is kept and goes on to the log; what is in them at its end too."""
    loop, outputs = asyncio.get_running_loop(), [printed.stdout, printed.stderr]

    def read(pipe: int, into: CapturedOutput) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(pipe, _READ)
            into.add(data)
            LOG.write(data, printed.name)
            if not data:
                loop.remove_reader(pipe)

    for pipe, into in zip(pipes, outputs, strict=True):
        os.set_blocking(pipe, False)
        loop.add_reader(pipe, read, pipe, into)
    try:
        yield
    finally:
        for pipe, into in zip(pipes, outputs, strict=True):
            read(pipe, into)  # as much as a pipe holds; what has left the process group may write for ever
            loop.remove_reader(pipe)
            os.close(pipe)
        LOG.end(printed.name)


# The fork server, and its children


def warm_up() -> None:
    """Load what every child would load anew; before the agent is loaded."""
    from opentelemetry.exporter.otlp.proto.common import trace_encoder  # noqa: F401

    from lightning_rl.agents import clients, emitted

    emitted._tracer()
    clients.warm_up()


def fork(agent: Agent, *, close: int) -> ForkServer:
    """Fork the fork server; it closes the descriptor `close`, which is the runner's alone. This process must have no
    threads."""
    from lightning_rl.agents import clients

    parent_end, child_end = socket.socketpair()
    if os.fork() == 0:
        try:
            os.close(close)
            parent_end.close()
            clients.make_for_forked()
            _ForkServer(agent, child_end).serve()
        except BaseException:  # noqa: BLE001 - it is told, and ends the runner process, which is started anew
            _log.exception("the fork server failed")
        finally:
            os._exit(1)
    child_end.close()
    return ForkServer(parent_end)


class _ForkServer:
    """Forks and reaps. One thread; it runs no code of the agent."""

    def __init__(self, agent: Agent, control: socket.socket) -> None:
        self._agent = agent
        self._control = control
        self._numbers: dict[int, int] = {}  # of the rollouts, by process
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def serve(self) -> NoReturn:
        """Until the runner is gone; nothing is left then."""
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()  # children share the pages
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, _READ)
                self._reap()
            if self._control.fileno() in ready:
                self._obey()

    def _obey(self) -> None:
        message, fds, _, _ = socket.recv_fds(self._control, _MESSAGE.size, 3)
        while message and len(message) < _MESSAGE.size:
            message += self._control.recv(_MESSAGE.size - len(message))
        if not message:
            for pid in self._numbers:
                _kill_group(pid)
            os._exit(0)
        kind, number, _ = _MESSAGE.unpack(message)
        if kind == _START:
            self._fork(number, fds)
        else:
            for pid in [pid for pid, its in self._numbers.items() if its == number]:
                _kill_group(pid)

    def _fork(self, number: int, fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError:
            self._control.sendall(_MESSAGE.pack(_ENDED, number, _NOT_FORKED))
        else:
            if pid == 0:
                for fd in (self._control.fileno(), self._woken, self._wake):
                    if fd == self._wake:
                        signal.set_wakeup_fd(-1)
                    os.close(fd)
                _be_a_rollout(self._agent, *fds)
            with contextlib.suppress(OSError):  # it did so itself
                os.setpgid(pid, pid)
            self._numbers[pid] = number
        for fd in fds:
            os.close(fd)

    def _reap(self) -> None:
        while self._numbers:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                return
            if info.si_pid in self._numbers:
                _kill_group(info.si_pid)  # before it is reaped, when its number may become another's
            _, status = os.waitpid(info.si_pid, 0)
            number = self._numbers.pop(info.si_pid, None)
            if number is not None:
                self._control.sendall(_MESSAGE.pack(_ENDED, number, os.waitstatus_to_exitcode(status)))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _be_a_rollout(agent: Agent, conn: int, stdout: int, stderr: int) -> NoReturn:
    """The child's whole life."""
    try:
        os.setpgid(0, 0)
        for signum in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        sys.stdout, sys.stderr = _stream(stdout, 1), _stream(stderr, 2)
        faulthandler.enable()
        _seed_anew()
        forget_exit_handlers()
        with socket.socket(fileno=conn) as runner:
            claim = _received(runner)
            threading.Thread(target=_end_with, args=(runner,), daemon=True).start()
            runner.sendall(_framed(msgspec.msgpack.encode(_run(agent, claim))))
            atexit.register(flush_spans, _EXIT_HANDLERS_SECONDS)
            leave(0, seconds=_EXIT_HANDLERS_SECONDS)
    except BaseException:  # noqa: BLE001 - what is wrong with us is told, and costs this rollout alone
        _log.exception("the process of a rollout failed")
    finally:
        os._exit(1)


def _stream(pipe: int, fd: int) -> TextIO:
    """The pipe as descriptor `fd`, and a stream on it that keeps nothing back."""
    os.dup2(pipe, fd)
    os.close(pipe)
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _run(agent: Agent, claim: Claim) -> Outcome:
    emitted = Emitted(claim.rollout.rollout_id, claim.attempt.attempt_id)
    try:
        rewards = run_agent(agent, claim, emitted=emitted)
    except BaseException as error:  # noqa: BLE001 - as in `executors`
        return outcome.of_error(claim, emitted, error)
    return outcome.of_rewards(claim, emitted, rewards)


def _seed_anew() -> None:
    """Global generators that a fork copies; `random` does so itself."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def _end_with(runner: socket.socket) -> None:
    """End this process, and what it has started, when the runner is gone."""
    with contextlib.suppress(OSError):
        runner.recv(1)
    _kill_group(0)


def _received(runner: socket.socket) -> Claim:
    with runner.makefile("rb") as stream:
        (length,) = LENGTH.unpack(stream.read(LENGTH.size))
        return msgspec.msgpack.decode(stream.read(length), type=Claim)


def _framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body
