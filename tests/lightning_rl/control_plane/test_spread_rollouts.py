"""Which server has which rollout, whatever comes and goes: each has one, and nothing is forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.control_plane.spread_rollouts import SpreadRollouts
from lightning_rl.store.contract import Rollout, RolloutConfig, RolloutRequest, RolloutTrace

SERVERS = ("a", "b", "c")


def group(name: str, n: int) -> dict[str, RolloutRequest]:
    return {f"{name}-{i}": RolloutRequest(task=1, rollout_id=f"{name}-{i}", group_id=name) for i in range(n)}


def rollout(name: str, status: str = "succeeded") -> Rollout:
    given = {"task": 1, "mode": "train", "group_id": None, "agent": None, "resources_id": None, "metadata": {}}
    return Rollout(rollout_id=name, status=status, config=RolloutConfig(), attempt_count=1, created_at=1.0, **given)  # type: ignore[arg-type]


def trace(name: str, status: str = "succeeded") -> RolloutTrace:
    return RolloutTrace(rollout=rollout(name, status), attempts=[])


def answer(rollouts: SpreadRollouts[str], server: str) -> None:
    """The server is asked for what it is to be asked for."""
    requests = rollouts.to_ask(server)
    rollouts.enqueued(server, [rollout(str(request.rollout_id), "queued") for request in requests])


@given(st.data())
def test_every_rollout_that_is_not_read_is_at_one_server_that_is_there(data: st.DataObject) -> None:
    rollouts: SpreadRollouts[str] = SpreadRollouts()
    there, asked, read = list(SERVERS), list[str](), set[str]()
    for step in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["ask", "answer", "ended", "read", "gone", "back"])):
            case "ask":
                new = group(str(step), data.draw(st.integers(1, 3)))
                rollouts.ask(new, there)
                asked += new
                [server] = {rollouts.at(name) for name in new}
                assert server in there, "a group is at one server"
            case "answer":
                answer(rollouts, data.draw(st.sampled_from(there)))
            case "ended":
                server = data.draw(st.sampled_from(SERVERS))
                told = rollouts.ended(server, [rollout(name) for name in asked])
                assert {each.rollout_id for each in told} == {name for name in asked if rollouts.at(name) == server}
            case "read":
                server, name = data.draw(st.sampled_from(SERVERS)), data.draw(st.sampled_from([*asked, "unknown"]))
                found = rollouts.read(server, {name: trace(name), "other": trace("other", "running")})
                assert list(found) == ([name] if rollouts.at(name) == server else [])
                read.update(found)
            case "gone" if len(there) > 1:
                server = data.draw(st.sampled_from(there))
                there.remove(server)
                had = [name for name in asked if rollouts.at(name) == server and name not in read]
                assert rollouts.move(server, there) == len(had)
                assert all(rollouts.is_to_be_asked(name) for name in had)
            case "back" if len(there) < len(SERVERS):
                server = next(each for each in SERVERS if each not in there)
                there.append(server)
                assert rollouts.ask_again(server) == 0, "all that was not read has moved"
        unread = rollouts.unread(asked)
        assert unread == [name for name in asked if name not in read]
        assert {rollouts.at(name) for name in unread} <= set(there)
        assert dict(rollouts.by_server(unread)) == {
            server: sorted(name for name in unread if rollouts.at(name) == server)
            for server in there
            if any(rollouts.at(name) == server for name in unread)
        }
    for server in there:
        answer(rollouts, server)
    unread = rollouts.unread(asked)
    made = rollouts.made(unread)
    assert made is not None
    assert [each.rollout_id for each in made] == unread


def test_a_group_goes_where_the_fewest_run() -> None:
    rollouts: SpreadRollouts[str] = SpreadRollouts()
    for name, n in (("x", 4), ("y", 1), ("z", 1)):
        rollouts.ask(group(name, n), ["a", "b"])
    assert [rollouts.at(f"{name}-0") for name in "xyz"] == ["a", "b", "b"]
    rollouts.ended("a", [rollout(f"x-{i}") for i in range(4)])
    rollouts.ask(group("w", 1) | group("v", 1), ["a", "b"])
    assert [rollouts.at(f"{name}-0") for name in "wv"] == ["a", "a"], "what has ended is no load, though it is not read"
    assert rollouts.made(["w-0", "v-0"]) is None
    answer(rollouts, "a")
    again = rollouts.made(["v-0", "w-0", "v-0"])
    assert [each.rollout_id for each in again or ()] == ["v-0", "w-0", "v-0"]
    rollouts.ask(group("x", 4), ["b"])
    assert rollouts.at("x-0") == "b", "where it was is not there any more"
