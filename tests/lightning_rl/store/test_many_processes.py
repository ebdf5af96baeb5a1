"""Several processes, each with a store of its own on one database, do everything at random: every rollout ends once,
and no attempt is handed out twice."""

import subprocess
import sys
from collections import Counter
from contextlib import closing

import msgspec
import pytest

from lightning_rl.store.contract import RolloutDetail
from lightning_rl.store.life_cycle import ENDED
from lightning_rl.store.sql import SqlStore

PROCESSES, STEPS, ROLLOUTS = 3, 150, 24

_WORKER = """
import json, random, sys, time
from lightning_rl.store.contract import *
from lightning_rl.store.errors import Conflict, NotFound
from lightning_rl.store.sql import SqlStore

url, name, steps, rollouts = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chance = random.Random(name)
ahead = 0.0  # this process's clock, which runs ahead at times, so that leases end
store = SqlStore(url, lambda: time.time() + ahead)
held, told = [], {"claimed": [], "finished": [], "rewarded": []}
config = RolloutConfig(max_attempts=1000, unresponsive_seconds=20, timeout_seconds=None)
store.publish(ResourcesRequest(resources={"x": {"v": 1}}, resources_id="one"))
FAILED = ErrorInfo(type="Gone", message="engine", infrastructure=True)

def enqueue():
    some = chance.sample(range(rollouts), 4)  # the same ones in every process, in any order
    store.enqueue([RolloutRequest(task=n, rollout_id=f"r{n}", config=config, resources_id="one") for n in some])

def claim():
    global ahead
    ahead = 100.0  # past every pause before a retry
    take()
    ahead = 0.0

def take():
    claim_id = chance.choice([None, f"{name}-{chance.random()}"])
    limit = chance.choice([1, 3])
    claims = store.claim(name, limit=limit, claim_id=claim_id)
    if claim_id is not None and claims:
        again = store.claim(name, limit=limit, claim_id=claim_id)
        assert {c.attempt.attempt_id for c in again} == {c.attempt.attempt_id for c in claims}
    for each in claims:
        held.append((each.rollout.rollout_id, each.attempt.attempt_id))
        told["claimed"].append(each.attempt.attempt_id)

def of_mine(work):
    if not held:
        return
    place = chance.choice(held)
    try:
        work(*place)
    except Conflict:
        if place in held:
            held.remove(place)

def reward(rollout_id, attempt_id):
    reward_id = f"w{chance.random()}"
    store.add_rewards(rollout_id, attempt_id, [Reward(value=1.0, name=reward_id, reward_id=reward_id)])
    told["rewarded"].append([attempt_id, reward_id])

def finish(rollout_id, attempt_id):
    how = chance.choice([Finish(status="succeeded", reward=1.0), Finish(status="failed", error=FAILED)])
    store.finish(rollout_id, attempt_id, how)
    held.remove((rollout_id, attempt_id))
    told["finished"].append(attempt_id)

def cancel():
    if chance.random() < 0.1:
        try:
            store.cancel(f"r{chance.randrange(rollouts)}")
        except NotFound:
            pass  # nobody has enqueued it yet

def sweep():
    global ahead
    ahead = chance.choice([0.0, 0.0, 130.0])
    store.sweep()
    ahead = 0.0

print("ready", flush=True)
sys.stdin.readline()
MINE = [lambda: of_mine(store.heartbeat), lambda: of_mine(reward), lambda: of_mine(finish)]
WORK = [enqueue, claim, claim, *MINE, cancel, sweep]
for _ in range(5):  # some end as they should, before leases begin to end
    enqueue()
    take()
    of_mine(finish)
for _ in range(steps):
    chance.choice(WORK)()
store.close()
print(json.dumps(told))
"""


def worked(url: str) -> list[dict[str, list]]:
    """What each process tells of what it did."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, url, f"w{n}", str(STEPS), str(ROLLOUTS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for n in range(PROCESSES)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:  # all at once
        process.stdin.write("go\n")
        process.stdin.flush()
    told = []
    for process in processes:
        said, errors = process.communicate()
        assert process.returncode == 0, errors
        told.append(msgspec.json.decode(said))
    return told


def finish_the_rest(store: SqlStore) -> list[RolloutDetail]:
    """All rollouts, after those that are left were cancelled."""
    rollouts, _ = store.page(limit=1000)
    for rollout in rollouts:
        store.cancel(rollout.rollout_id)
    return [store.rollout(rollout.rollout_id) for rollout in rollouts]


@pytest.mark.timeout(600)
def test_every_rollout_ends_once_and_no_attempt_is_handed_out_twice(url: str) -> None:
    told = worked(url)
    claimed = Counter(attempt for each in told for attempt in each["claimed"])
    finished = Counter(attempt for each in told for attempt in each["finished"])
    assert max(claimed.values()) == 1
    assert len(claimed) > PROCESSES
    assert len(finished) > PROCESSES
    assert max(finished.values()) == 1
    with closing(SqlStore(url)) as store:
        details = finish_the_rest(store)
        traces = store.traces([rollout.rollout_id for rollout in details])
        assert store.resources("latest").version == 1
    assert len({rollout.rollout_id for rollout in details}) == len(details) <= ROLLOUTS
    attempts = {attempt.attempt_id: attempt for rollout in details for attempt in rollout.attempts}
    assert set(claimed) == set(attempts)
    for rollout in details:
        assert rollout.status in ENDED
        statuses = [attempt.status for attempt in rollout.attempts]
        assert [attempt.sequence for attempt in rollout.attempts] == list(range(1, len(statuses) + 1))
        assert rollout.attempt_count == len(statuses)
        assert "running" not in statuses
        assert statuses.count("succeeded") == (rollout.status == "succeeded")
        assert "succeeded" not in statuses[:-1], "nothing comes after the end"
    assert all(attempts[attempt].status in ("succeeded", "failed") for attempt in finished)
    assert {a for a, attempt in attempts.items() if attempt.status in ("succeeded", "failed")} == set(finished)
    kept = {
        (trace.attempt.attempt_id, reward.reward_id)
        for each in traces.values() for trace in each.attempts for reward in trace.rewards
    }  # fmt: skip
    rewarded = {(attempt, reward) for each in told for attempt, reward in each["rewarded"]}
    assert kept == rewarded
    outcomes = {(a, name) for a in finished for name in attempts[a].rewards if name != "reward"}
    assert outcomes == {(attempt, reward) for attempt, reward in rewarded if attempt in finished}
