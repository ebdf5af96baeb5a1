"""The server's log: one line a happening, with the ids that tell one rollout from another, and no secret."""

import io
import logging
from pathlib import Path

import pytest

from lightning_rl.processes import logs
from tests.proxy.conftest import Served
from tests.proxy.test_gateway import client, post, say, user

OURS = logging.getLogger("lightning_rl_proxy.gateway")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is logged at every level, as a server writes it."""
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "debug")
    stream, handler = io.StringIO(), None
    root, levels = logging.getLogger(), {}
    for name in (None, *logs._OURS):
        levels[name] = logging.getLogger(name).level
    handler = logging.StreamHandler(stream)
    logs.begin(handler)
    yield stream  # type: ignore[misc]
    root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def facts(line: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in line.split() if "=" in part and not part.startswith("{"))


def test_a_call_is_one_line_with_its_ids(served: Served, written: io.StringIO) -> None:
    say(client(served), [user("the secret of life")])
    served.eventually(lambda: "answered" in written.getvalue())
    served.seal()
    [line] = [line for line in written.getvalue().splitlines() if " answered " in line]
    [call] = served.ledger.calls()
    told = facts(line)
    assert (told["rollout_id"], told["attempt_id"], told["call_id"]) == ("r1", "a1", call.call_id)
    assert told["sampled_tokens"] == str(len(call.response_ids))
    assert "DEBUG lightning_rl_proxy.gateway: answered " in line
    assert line[10] == "T"
    assert line.split()[0].endswith("Z")


def test_what_is_refused_says_why_and_whose(served: Served, written: io.StringIO) -> None:
    post(served, "/rollout/r1/attempt/a1/v1/chat/completions", b"{}", served.key())
    line = next(line for line in written.getvalue().splitlines() if "refused" in line)
    assert facts(line)["status"] == "400"
    assert facts(line)["rollout_id"] == "r1"
    assert "missing required field" in line


def test_neither_keys_nor_what_is_said_is_logged(served: Served, written: io.StringIO) -> None:
    say(client(served), [user("the secret of life")])
    post(served, "/v1/chat/completions", b"{}", served.key()[:-1] + "!")
    served.eventually(lambda: "refused" in written.getvalue())
    assert "secret of life" not in written.getvalue()
    assert served.key().rpartition(":")[2] not in written.getvalue()


def test_facts_are_quoted_where_a_blank_would_part_them() -> None:
    record = logging.LogRecord("name", logging.INFO, "file", 1, "it was %s", ("so",), None)
    record.facts = {"plain": "a/b", "blank": 'a "b"', "none": None, "number": 3}
    assert logs.Formatter().format(record).endswith(r'it was so plain=a/b blank="a \"b\"" number=3')


def test_an_unknown_level_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "loud")
    before = list(logging.getLogger().handlers)
    with pytest.raises(ValueError, match="LIGHTNING_RL_LOG_LEVEL is 'LOUD'"):
        logs.begin(logging.FileHandler(tmp_path / "log"))
    logging.getLogger().handlers[:] = before
