"""Rewards, and how attempts and rollouts end: finished, cancelled, expired."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from lightning_rl.store import gateways, queries, schema
from lightning_rl.store.contract import (
    NOT_COUNTED,
    SESSION_ENDED,
    Attempt,
    Ending,
    ErrorInfo,
    Finish,
    Overdue,
    Reward,
    Rollout,
    body_of,
    same_body,
)
from lightning_rl.store.errors import Conflict
from lightning_rl.store.life_cycle import (
    AttemptStatus,
    RolloutStatus,
    next_attempt_status,
)
from lightning_rl.store.records import attempt_of, ending_of, outcome_of
from lightning_rl.store.rewards import check_finite, returned_rewards, rewards_by_name, with_late
from lightning_rl.store.sql.claims import ClaimOperations
from lightning_rl.store.sql.transactions import reads, writes
from lightning_rl_adapters.credit import FINAL
from lightning_rl_adapters.ids import new_id

_END_ATTEMPT = (
    sa.update(schema.attempts)
    .where(schema.attempts.c.attempt_id == sa.bindparam("ended_attempt"))
    .values({name: sa.bindparam(name) for name in ("status", "ended_at", "reward", "rewards", "error", "finish_body")})
)
_CHANGE_REWARDS = (
    sa.update(schema.attempts)
    .where(schema.attempts.c.attempt_id == sa.bindparam("rewarded"))
    .values({name: sa.bindparam(name) for name in ("reward", "rewards")})
)
_FIRST_PAUSE_SECONDS = 1.0  # before a retry
_LONGEST_PAUSE_SECONDS = 60.0


class EndingOperations(ClaimOperations):
    """Ending attempts, with their rewards."""

    @writes
    def cancel(self, connection: sa.Connection, rollout_id: str) -> Rollout:
        """End the rollout as cancelled, with its running attempt; one that has ended stays so.

        Raises:
            NotFound: there is no such rollout.
        """
        self._database.hold(connection, [rollout_id])
        rollout = queries.rollout(connection, rollout_id)
        if rollout.status == "running":
            attempt = queries.attempt_row(connection, rollout_id, str(rollout.attempt_id))
            self._end(connection, rollout, attempt, "cancelled")
        elif rollout.status == "queued":
            self._move(connection, rollout, "cancelled")
        return queries.rollout(connection, rollout_id)

    @writes
    def add_rewards(
        self,
        connection: sa.Connection,
        rollout_id: str,
        attempt_id: str,
        rewards: Sequence[Reward],
        *,
        late: bool = False,
    ) -> list[Reward]:
        """Keep rewards of a running attempt; the answer has their ids.

        With `late` the attempt may also have ended, if it is the one that counts: these rewards then come after all
        that it was given before, returned ones too.

        Raises:
            NotFound: there is no such attempt.
            Conflict: it has ended (with `late`: and does not count), or a reward id is there with another body.
            Invalid: a reward is no finite number.
        """
        self._database.hold(connection, [rollout_id])
        existing_rewards = queries.attempt_rewards(connection, attempt_id)
        named, new = _new_rewards(rollout_id, existing_rewards, rewards)
        if new:
            if late:
                self._take_late(connection, rollout_id, attempt_id, new)
            else:
                queries.running_row(connection, rollout_id, attempt_id)
            connection.execute(sa.insert(schema.rewards), _reward_rows(rollout_id, attempt_id, new))
        return named

    @writes
    def finish(
        self,
        connection: sa.Connection,
        rollout_id: str,
        attempt_id: str,
        finish: Finish,
        lack: ErrorInfo | None = None,
    ) -> tuple[Rollout, Attempt]:
        """End the attempt as its worker says, or as failed where `lack` says why that cannot be; the rollout ends, or
        is queued for a retry.

        Raises:
            NotFound: there is no such attempt.
            Conflict: it has ended otherwise.
            Invalid: naming the rollout, for a bad reward.
        """
        self._database.hold(connection, [rollout_id])
        row = queries.attempt_row(connection, rollout_id, attempt_id)
        rollout = queries.rollout(connection, rollout_id)
        emitted = queries.attempt_rewards(connection, attempt_id) if row.status == "running" else []
        return self._finish(connection, rollout, row, emitted, finish, lack)

    @writes
    def finish_many(
        self,
        connection: sa.Connection,
        endings: Sequence[Ending],
        lacks: Sequence[ErrorInfo | None] | None = None,
    ) -> list[tuple[Rollout, Attempt]]:
        """`add_rewards` and `finish` of many attempts, all of them or none; `lacks` has the `lack` of each.

        Raises:
            NotFound, Conflict, Invalid: as these, for the first that is refused; the error names its rollout.
        """
        ids = [ending.rollout_id for ending in endings]
        self._database.hold(connection, ids)
        rows = queries.attempt_rows(connection, [(ending.rollout_id, ending.attempt_id) for ending in endings])
        rollouts = {rollout.rollout_id: rollout for rollout in queries.rollouts(connection, ids)}
        emitted = queries.rewards(connection, ids)
        outcomes, reward_rows = [], []
        for ending, row, lack in zip(endings, rows, lacks or [None] * len(rows), strict=True):
            _, new = _new_rewards(ending.rollout_id, emitted[row.attempt_id], ending.rewards)
            if new:
                queries.check_running(row)
                emitted[row.attempt_id] += new
                reward_rows += _reward_rows(ending.rollout_id, row.attempt_id, new)
            rollout, rewards = rollouts[ending.rollout_id], emitted[row.attempt_id]
            outcomes.append(self._finish(connection, rollout, row, rewards, ending.finish, lack))
        if reward_rows:
            connection.execute(sa.insert(schema.rewards), reward_rows)
        return outcomes

    def _finish(
        self,
        connection: sa.Connection,
        rollout: Rollout,
        row: sa.Row[Any],
        emitted: Iterable[Reward],
        finish: Finish,
        lack: ErrorInfo | None,
    ) -> tuple[Rollout, Attempt]:
        returned = returned_rewards(rollout.rollout_id, finish)
        body = body_of(finish)
        if row.status == "running":
            if lack is not None:
                return self._end(connection, rollout, row, "failed", lack, rewards_by_name(emitted, {}), body)
            named = rewards_by_name(emitted, returned)
            error = finish.error if finish.status == "failed" else None
            return self._end(connection, rollout, row, finish.status, error, named, body)
        if row.finish_body is None or not same_body(row.finish_body, body):
            raise Conflict(
                f"attempt {row.attempt_id} of rollout {rollout.rollout_id} has already ended, "
                f"{ending_of(attempt_of(row))}: drop this result"
            )
        return rollout, attempt_of(row)

    @reads
    def overdue(self, connection: sa.Connection, *, since_seconds: float = 0) -> list[Overdue]:
        """The running attempts whose lease or deadline is over, for `since_seconds` or longer."""
        now = self._clock() - since_seconds
        attempts = schema.attempts.c
        late = (attempts.lease_expires_at < now) | (attempts.deadline_at < now)
        rows = connection.execute(sa.select(schema.attempts).where(queries.RUNNING, late)).all()
        return [
            Overdue(
                rollout_id=row.rollout_id,
                attempt_id=row.attempt_id,
                why="lease" if row.lease_expires_at < now else "deadline",
                lease_seconds=row.unresponsive_seconds,
            )
            for row in rows
        ]

    @writes
    def expire(self, connection: sa.Connection, overdue: Sequence[Overdue]) -> list[Rollout]:
        """End those of the overdue attempts that still run: a lost one is retried, one past its
        deadline has failed by its agent, but for a failure of the gateway. The rollouts that this moved."""
        self._database.hold(connection, [late.rollout_id for late in overdue])
        moved = []
        for late in overdue:
            row = queries.attempt_row(connection, late.rollout_id, late.attempt_id)
            if row.status != "running":
                continue
            rollout = queries.rollout(connection, late.rollout_id)
            is_lost = late.why != "deadline" or late.failure is not None
            status: AttemptStatus = "lost" if is_lost else "failed"
            named = rewards_by_name(queries.attempt_rewards(connection, late.attempt_id), {})
            self._end(connection, rollout, row, status, _why(late, rollout, row), named)
            moved.append(late.rollout_id)
        return queries.rollouts(connection, moved)

    def sweep(self) -> list[Rollout]:
        """`expire` what is `overdue`; the rollouts that this moved."""
        return self.expire(self.overdue())

    @writes
    def postpone(
        self, connection: sa.Connection, seconds: float, *, lease_seconds: float = 0, gateway_id: str | None = None
    ) -> None:
        """Move the deadlines of the running attempts (with `gateway_id`: of that gateway's): time in which they were
        parked; and their leases by `lease_seconds`, in which no heartbeat was taken."""
        _postpone(connection, seconds, lease_seconds, gateway_id)

    @writes
    def make_up(self, connection: sa.Connection, seconds: float, *, gateway_id: str | None = None) -> None:
        """The store could not be written for `seconds`: leases begin anew, deadlines move by as much. With
        `gateway_id`: of that gateway's attempts.

        Raises:
            StoreUnwritable: it still cannot; this always writes something.
        """
        connection.execute(self._database.replace(schema.meta, "written_at", str(self._clock())))
        _postpone(connection, seconds, gateway_id=gateway_id)
        self._renew_leases(connection, gateway_id)

    def _end(
        self,
        connection: sa.Connection,
        rollout: Rollout,
        attempt: sa.Row[Any],
        status: AttemptStatus,
        error: ErrorInfo | None = None,
        named: dict[str, float] | None = None,
        finish_body: bytes | None = None,
    ) -> tuple[Rollout, Attempt]:
        named = named or {}
        ended = msgspec.structs.replace(
            attempt_of(attempt),
            status=next_attempt_status(attempt.status, status),
            ended_at=self._clock(),
            reward=named.get(FINAL),
            rewards=named,
            error=error,
        )
        connection.execute(
            _END_ATTEMPT,
            {
                "ended_attempt": ended.attempt_id,
                "status": ended.status,
                "ended_at": ended.ended_at,
                "reward": ended.reward,
                "rewards": body_of(named) if named else None,
                "error": body_of(error) if error is not None else None,
                "finish_body": finish_body,
            },
        )
        if self.shared:
            gateways.leave(connection, ended.attempt_id)
        following = _following(connection, rollout, status, error)
        pause = _pause(connection, rollout, error) if following == "queued" else 0.0
        moved = self._move(connection, rollout, following, pause)
        return outcome_of(moved, ended), ended

    def _take_late(self, connection: sa.Connection, rollout_id: str, attempt_id: str, new: Iterable[Reward]) -> None:
        """Change the outcome of an attempt that counts by late rewards; one that still runs takes them as any other.

        Raises:
            NotFound: there is no such attempt.
            Conflict: it has ended and does not count.
        """
        attempt = attempt_of(queries.attempt_row(connection, rollout_id, attempt_id))
        if attempt.status == "running":
            return
        rollout = queries.rollout(connection, rollout_id)
        if rollout.counting_attempt_id != attempt_id:
            raise Conflict(
                f"attempt {attempt_id} of rollout {rollout_id} is {attempt.status} and does not count: the rollout is "
                f"{rollout.status}, {_who_counts(rollout)}"
            )
        named = with_late(attempt.rewards, new)
        if named != attempt.rewards:
            change = {"rewarded": attempt_id, "reward": named.get(FINAL), "rewards": body_of(named)}
            connection.execute(_CHANGE_REWARDS, change)


def _new_rewards(
    rollout_id: str, existing_rewards: Iterable[Reward], rewards: Sequence[Reward]
) -> tuple[list[Reward], list[Reward]]:
    """The rewards with ids, and those of them that are not known.

    Raises Conflict where an id is known with another body, Invalid for a reward that is no finite number.
    """
    for reward in rewards:
        check_finite(rollout_id, reward.name, reward.value)
    there = {reward.reward_id: reward for reward in existing_rewards}
    named = [msgspec.structs.replace(reward, reward_id=reward.reward_id or new_id("w")) for reward in rewards]
    new: dict[str | None, Reward] = {}
    for reward in named:
        first = there.get(reward.reward_id) or new.setdefault(reward.reward_id, reward)
        if first != reward:
            raise Conflict(f"rollout {rollout_id}: reward {reward.reward_id} is there already as {first}")
    return named, list(new.values())


def _reward_rows(rollout_id: str, attempt_id: str, rewards: Iterable[Reward]) -> list[dict[str, Any]]:
    place = {"rollout_id": rollout_id, "attempt_id": attempt_id}
    return [place | msgspec.structs.asdict(reward) for reward in rewards]


def _postpone(
    connection: sa.Connection, seconds: float, lease_seconds: float = 0, gateway_id: str | None = None
) -> None:
    attempts, at_gateway = schema.attempts.c, queries.attempts_at(gateway_id)
    moved = {
        "deadline_at": attempts.deadline_at + seconds,
        "lease_expires_at": attempts.lease_expires_at + lease_seconds,
    }
    connection.execute(sa.update(schema.attempts).where(queries.RUNNING, at_gateway).values(moved))


def _following(
    connection: sa.Connection, rollout: Rollout, ended: AttemptStatus, error: ErrorInfo | None
) -> RolloutStatus:
    """Where a rollout goes when its running attempt has ended so: infrastructure is retried."""
    if ended in ("succeeded", "cancelled"):
        return ended
    infrastructure = ended == "lost" or (error is not None and error.infrastructure)
    if infrastructure and queries.counted_attempts(connection, rollout.rollout_id) < rollout.config.max_attempts:
        return "queued"
    return "failed"


def _pause(connection: sa.Connection, rollout: Rollout, error: ErrorInfo | None) -> float:
    """Seconds until a rollout whose attempt has ended so may be claimed again: twice as long after each failure of
    infrastructure; none where the attempt was stopped with its runner or its session."""
    if error is not None and error.type in NOT_COUNTED:
        return 0.0
    failures = queries.counted_attempts(connection, rollout.rollout_id)
    return min(_FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 60), _LONGEST_PAUSE_SECONDS)


def _who_counts(rollout: Rollout) -> str:
    if rollout.counting_attempt_id is None:
        return "and none of its attempts takes late rewards"
    return f"so reward attempt {rollout.counting_attempt_id}"


def _why(late: Overdue, rollout: Rollout, attempt: sa.Row[Any]) -> ErrorInfo:
    if late.why == "lease":
        return ErrorInfo(
            type="LeaseExpired",
            message=f"neither a heartbeat of worker {attempt.worker_id} nor a call came within "
            f"{attempt.unresponsive_seconds:g} s; the rollout's config.unresponsive_seconds says how long to wait",
            infrastructure=True,
        )
    if late.why == "worker":
        return ErrorInfo(
            type="RunnerDied", message=f"the process of worker {attempt.worker_id} died", infrastructure=True
        )
    if late.why == "server":
        return ErrorInfo(
            type="ServerGone",
            message="the server that has the attempt's records is gone: it did not end it in time",
            infrastructure=True,
        )
    if late.why == "journal":
        return ErrorInfo(
            type="RecordingLost",
            message="the gateway's journal was damaged: the store may lack calls of the attempt",
            infrastructure=True,
        )
    if late.why == "session":
        return ErrorInfo(
            type=SESSION_ENDED,
            message=f"the session of worker {attempt.worker_id} ended in the middle of the attempt",
            infrastructure=True,
        )
    message = f"the attempt ran longer than {rollout.config.timeout_seconds:g} s"
    if late.failure is not None:
        message += f" (the gateway had failed with a call of it: {late.failure})"
    return ErrorInfo(type="DeadlineExceeded", message=message, infrastructure=late.failure is not None)
