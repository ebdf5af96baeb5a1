"""Attempt keys open their own attempt until their last second, and nothing can be changed in them."""

import base64
import hmac
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_proxy import address
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.http.keys import KeyRefused, sent_key, sign_attempt_key, verify_attempt_key

ids = st.from_regex(address.ID_PATTERN, fullmatch=True)


@given(ids, ids)
def test_a_key_names_its_attempt(rollout_id: str, attempt_id: str) -> None:
    key = sign_attempt_key(b"secret", rollout_id, attempt_id, 100)
    assert verify_attempt_key(b"secret", key, now=100) == Address(rollout_id, attempt_id)
    with pytest.raises(KeyRefused, match="expired"):
        verify_attempt_key(b"secret", key, now=101)
    with pytest.raises(KeyRefused):
        verify_attempt_key(b"another", key, now=0)


def test_a_clock_that_is_set_ends_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = sign_attempt_key(b"secret", "r", "a", int(time.time()) + 60)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert verify_attempt_key(b"secret", key) == Address("r", "a")


@given(ids, ids, st.data())
def test_a_changed_key_opens_nothing(rollout_id: str, attempt_id: str, data: st.DataObject) -> None:
    key = sign_attempt_key(b"secret", rollout_id, attempt_id, 100)
    i = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.characters(codec="ascii").filter(lambda c: c != key[i]))
    with pytest.raises(KeyRefused):
        verify_attempt_key(b"secret", key[:i] + letter + key[i + 1 :], now=0)


@given(ids, ids, st.none() | ids)
def test_a_base_url_is_parsed_back(rollout_id: str, attempt_id: str, agent: str | None) -> None:
    where = Address(rollout_id, attempt_id, agent)
    path = address.base_url("", where) + "/chat/completions"
    door = address.parse(path)
    assert door is not None
    assert (door.address, door.path) == (where, "/v1/chat/completions")


@given(ids, ids, st.none() | ids)
def test_a_key_in_a_url_is_parsed_back_and_not_shown(rollout_id: str, attempt_id: str, agent: str | None) -> None:
    key = sign_attempt_key(b"secret", rollout_id, attempt_id, 100)
    path = f"/key/{key}" + (f"/agent/{agent}" if agent else "")
    for behind in ("", "/", "/v1", "/v1/", "/v1/chat/completions"):
        door = address.parse(path + behind)
        assert door == address.Door(None, "/v1/chat/completions" if len(behind) > 4 else "/", key, agent)
    for tail in ("/v1/models", "", "/nothing"):
        assert key not in address.without_key(path + tail)


@pytest.mark.parametrize(
    "path",
    [
        "/x",
        "/v2/x",
        "/agent/a/v1/x",
        "/key//v1/x",
        "/key/k/rollout/r/v1/x",
        "/rollout/r/v1/x",
        "/rollout/r/attempt/a b/v1/x",
        "/rollout//attempt/a/v1/x",
    ],
)
def test_other_paths_are_no_doors(path: str) -> None:
    assert address.parse(path) is None


def test_a_signature_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    whole = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or whole(a, b))
    key = sign_attempt_key(b"secret", "r", "a", 100)
    verify_attempt_key(b"secret", key, now=0)
    with pytest.raises(KeyRefused):
        verify_attempt_key(b"secret", "sk-another", now=0)
    assert [len(ours) for _, ours in compared] == [32, 32]


@given(st.text(max_size=200))
def test_any_text_that_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(KeyRefused):
        verify_attempt_key(b"secret", key, now=0)


def test_a_refusal_does_not_show_the_key() -> None:
    key = sign_attempt_key(b"secret", "r", "a", 100)
    for given_key, now in ((key, 101), (key[:-1], 0)):
        with pytest.raises(KeyRefused) as refused:
            verify_attempt_key(b"secret", given_key, now=now)
        assert key.rpartition(":")[2][:8] not in str(refused.value)


def basic(text: str) -> bytes:
    return b"Basic " + base64.b64encode(text.encode())


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({b"authorization": b"Bearer a:key"}, "a:key"),
        ({b"authorization": b"bearer  a:key "}, "a:key"),
        ({b"authorization": b"a:key"}, "a:key"),
        ({b"authorization": basic("attempt:a:key")}, "a:key"),
        ({b"authorization": basic("attempt")}, ""),
        ({b"authorization": b"Basic =notbase64"}, ""),
        ({b"authorization": b"Bearer", b"x-api-key": b"a:key"}, "a:key"),
        ({b"x-api-key": b"a:key"}, "a:key"),
        ({}, ""),
    ],
)
def test_a_key_is_sent_in_three_ways(headers: dict[bytes, bytes], key: str) -> None:
    assert sent_key(headers) == key


@given(st.text())
def test_any_name_makes_a_tag_that_a_door_can_hold(name: str) -> None:
    tag = address.as_tag(name)
    if name:
        assert address.parse(address.base_url("", Address("r", "a", tag)) + "/models") is not None
