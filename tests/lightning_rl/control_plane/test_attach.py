"""A run attaches to a server: what both must agree on, what the server keeps of it, and what becomes of it when its
trainer is gone."""

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane import attach
from lightning_rl.control_plane.attach import CannotAttach, RunGivenUp, attached, check_servers, serve_command
from lightning_rl.control_plane.launch import launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RolloutRequest
from lightning_rl.store.errors import Conflict
from tests.lightning_rl.control_plane.test_process import TOKENIZER

AWAY = "http://127.0.0.1:9"  # where no engine is


def endpoint(**changed: Any) -> Endpoint:
    given: dict[str, Any] = {"model": "policy", "tokenizer": str(TOKENIZER), "renderer": "qwen3", "engines": []}
    return Endpoint(**given | changed)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStore]:
    with launch(tmp_path_factory.mktemp("server"), endpoint(), admin_key="admin", runner_key="runner") as serving:
        yield HttpStore(serving.url, "admin")


def test_a_server_that_was_started_for_the_same_model_is_taken(store: HttpStore) -> None:
    check_servers([store], endpoint(served_as="policy-1a2b3c"))
    check_servers([store], endpoint(tokenizer=None, renderer="auto"))  # of a service, which takes messages


def other_tokenizer(folder: Path) -> str:
    """The tokenizer with one token more."""
    shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    last = max(token["id"] for token in told["added_tokens"])
    told["added_tokens"].append({**told["added_tokens"][-1], "id": last + 1, "content": "<|another|>"})
    file.write_text(json.dumps(told))
    return str(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"history": "template"}, "its history is 'keep', not 'template'"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "its chat_template_kwargs is {}, not"),
        ({"special_tokens_in_text": "control"}, "its special_tokens_in_text is 'text', not 'control'"),
        ({"unknown_model": "refuse"}, "its unknown_model is 'policy', not 'refuse'"),
        ({"otlp_endpoint": "http://127.0.0.1:4318"}, "its otlp_endpoint is None, not"),
        ({"allowed_media_domains": ["h"]}, r"its allowed_media_domains is \[\], not \['h'\]"),
        ({"housekeeping": {"mine": ["Name this"]}}, r"its housekeeping is {}, not {'mine': \['Name this'\]}"),
        ({"renderer": "template"}, "its renderer writes chats otherwise"),
        ({"tokenizer": other_tokenizer}, "its tokenizer is another one"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_server_that_writes_other_tokens_is_refused_with_the_command_to_start_it(
    store: HttpStore, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    given = {name: value(tmp_path / "other") if callable(value) else value for name, value in changed.items()}
    run = endpoint(**given)
    with pytest.raises(CannotAttach, match=message) as refused:
        check_servers([store], run)
    assert f"Start it with `{serve_command(run)}`" in str(refused.value)
    option = next(iter(changed)).replace("_", "-").removesuffix("s" if "domains" in next(iter(changed)) else "")
    assert f"--{option} " in serve_command(run)


class NotOurs(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: Any) -> None: ...


def test_what_is_no_server_of_this_version_or_refuses_the_key_is_named(
    store: HttpStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        CannotAttach, match="refuses the key: set LIGHTNING_RL_ADMIN_KEY to the one that it was started with"
    ):
        check_servers([HttpStore(store.url, "wrong")], endpoint())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(
        CannotAttach, match=rf"no server answers at {url}: start it with `lightning-rl serve --model policy"
    ):
        check_servers([HttpStore(url, "admin")], endpoint())
    with ThreadingHTTPServer(("127.0.0.1", 0), NotOurs) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(CannotAttach, match="is no lightning_rl server, or one of another version"):
            check_servers([HttpStore(f"http://127.0.0.1:{other.server_port}", "admin")], endpoint())
        other.shutdown()
    with pytest.raises(CannotAttach) as away:
        check_servers([store, HttpStore(url, "admin")], endpoint())
    assert away.value.__notes__ == ["or leave it out: a run goes on at the servers that are named"]
    twice = HttpStore(store.url.replace("127.0.0.1", "localhost"), "admin")
    with pytest.raises(CannotAttach, match=f"{store.url} and {twice.url} are of one store: name one of them"):
        check_servers([store, twice], endpoint())
    with pytest.raises(CannotAttach, match=f"{store.url} and {store.url} are of one store"):
        check_servers([store, store], endpoint())
    monkeypatch.setattr(attach, "_wanted", lambda policy: _ended_elsewhere(store))
    with pytest.raises(CannotAttach, match=r"its model's files .* are others: answers would end at other tokens"):
        check_servers([store], endpoint())
    monkeypatch.setattr(attach, "_wanted", lambda policy: _older(policy))
    with pytest.raises(CannotAttach, match=r"is lightning-rl \S+, and this is 0\.0\.1: install the same"):
        check_servers([store], endpoint())


def _ended_elsewhere(store: HttpStore) -> Any:
    from lightning_rl.control_plane.gateways.server_info import ServerInfo

    return msgspec.convert(store.server() | {"settings": "another"}, ServerInfo)


def _older(policy: Endpoint) -> Any:
    from lightning_rl.control_plane.gateways.server_info import ServerInfo

    return ServerInfo(model=policy.model, version="0.0.1")


def engine(model: str) -> dict[str, Any]:
    return {"model": model, "kind": "embedded", "url": AWAY, "policy_version": 3}


def models(store: HttpStore) -> list[str]:
    return [each["model"] for each in store.engines()]


def test_a_run_has_its_engines_at_the_server_as_long_as_it_is_attached(store: HttpStore) -> None:
    own = endpoint(served_as="policy-one", engines=[engine("policy-one")])
    with attached(store, "one", own) as run:
        store.publish({"main_llm": {"type": "proxy_llm", "model": "policy-one"}})
        assert models(store) == ["policy-one"]
        assert store.state()["models"]["policy-one"]["policy_version"] == 3
        run.check()
    assert models(store) == []
    assert store.resources().resources["main_llm"]["model"] == "policy", "what names no resources goes on"
    with attached(
        store, "one", endpoint(served_as="policy-one", engines=[engine("policy-one") | {"policy_version": 1}])
    ):
        assert store.state()["models"]["policy-one"]["policy_version"] == 1, "it goes on from an older checkpoint"


def test_a_copy_of_a_run_that_has_gone_on_is_refused_and_the_run_stays_attached(store: HttpStore) -> None:
    own = endpoint(served_as="policy-copied", engines=[engine("policy-copied")])
    with attached(store, "copied", own, sessions=["a", "b"]) as run:
        with (
            pytest.raises(Conflict, match="from another copy of its folder"),
            attached(store, "copied", own, sessions=["a", "c"]),
        ):
            pytest.fail("it attached")
        assert run.confirm()
        assert models(store) == ["policy-copied"]
        store.begin_run("copied", "policy-copied", 60, sessions=["a", "b", "c"])  # a copy that was made meanwhile
        assert not run.confirm()
        with pytest.raises(RunGivenUp, match="goes on in another trainer, from another copy of its folder"):
            run.check()
    store.renew_run("copied", "c")  # what left is not what is attached
    store.end_run("copied", "c")
    with pytest.raises(Conflict, match="run copied is not attached"):
        store.renew_run("copied", "c")


def test_a_run_of_several_policies_has_the_engines_of_all_and_waits_for_each_alone(
    store: HttpStore, eventually: Callable[..., None]
) -> None:
    names = ["planner-five", "executor-five"]
    own = endpoint(served_as=names[0], more_models=names[1:], engines=[engine(name) for name in names])
    with attached(store, "five", own):
        assert sorted(models(store)) == sorted(names)
    assert models(store) == []
    store.begin_run("five", names[0], 60, names[1:])
    store.register_engine(names[1], "embedded", AWAY)

    def paused() -> bool:
        return bool(store.state()["models"][names[1]]["paused"])

    eventually(paused)
    store.renew_run("five")
    assert not paused()
    store.end_run("five")
    assert models(store) == []


def test_a_run_that_the_server_does_not_know_any_more_stops(store: HttpStore, eventually: Callable[..., None]) -> None:
    with attached(store, "two", endpoint(served_as="policy-two")) as run:
        store.end_run("two")

        def stopped() -> bool:
            try:
                run.check()
            except RunGivenUp as error:
                return "is not attached here" in str(error)
            return False

        eventually(stopped)


def test_what_a_silent_trainer_has_queued_waits_and_what_runs_is_lost(
    store: HttpStore, eventually: Callable[..., None]
) -> None:
    store.begin_run("gone", "policy-gone", 1.0)
    store.register_engine("policy-gone", "embedded", AWAY)
    store.enqueue([RolloutRequest(task=1, rollout_id=name) for name in ("r1.gone", "r2.gone", "r1.other")])
    assert [claim.rollout.rollout_id for claim in store.claim("w")] == ["r1.gone"]
    eventually(lambda: models(store) == [])
    [attempt] = store.rollout("r1.gone").attempts
    assert (attempt.status, attempt.error and attempt.error.type) == ("lost", "SessionEnded")
    assert [claim.rollout.rollout_id for claim in store.claim("w", limit=9)] == ["r1.other"]
    with pytest.raises(Conflict, match="its lease was over"):
        store.renew_run("gone")
    store.begin_run("gone", "policy-gone", 60)
    store.enqueue([RolloutRequest(task=1, rollout_id="r2.gone")])
    assert [claim.rollout.rollout_id for claim in store.claim("w", limit=9)] == ["r2.gone"]
    store.end_run("gone")


def test_a_run_that_is_given_up_leaves_the_engines_of_a_model_that_another_one_has(
    store: HttpStore, eventually: Callable[..., None]
) -> None:
    store.begin_run("first", "policy-same", 1.0)
    store.begin_run("second", "policy-same", 60)
    store.register_engine("policy-same", "embedded", AWAY)
    store.enqueue([RolloutRequest(task=1, rollout_id="r1.first")])
    assert len(store.claim("w")) == 1
    eventually(lambda: store.rollout("r1.first").status != "running")
    assert models(store) == ["policy-same"]
    store.end_run("second")
    assert models(store) == []


def test_calls_wait_for_a_trainer_that_is_silent_and_its_engines_with_it(
    store: HttpStore, eventually: Callable[..., None]
) -> None:
    store.begin_run("quiet", "policy-quiet", 60)
    store.register_engine("policy-quiet", "embedded", AWAY)

    def paused() -> bool:
        return bool(store.state()["models"]["policy-quiet"]["paused"])

    eventually(paused)
    store.renew_run("quiet")
    assert not paused()
    eventually(paused)
    store.pause("policy-quiet", mode="keep", lease_seconds=30)  # the trainer is there, and updates weights
    store.renew_run("quiet")
    assert paused(), "only the pause that was made for it ends with its silence"
    store.end_run("quiet")
    assert not paused()


def test_an_engine_whose_registration_outlasts_the_run_is_taken_out_again(store: HttpStore) -> None:
    attachment = attach.attach(store, "r-late", endpoint(served_as="p-late"), lease_seconds=60)
    register = store.register_engine

    def register_late(*args: Any, **fields: Any) -> dict[str, Any]:
        attachment.detach()  # the run ends while the server looks at the engine
        return register(*args, **fields)

    attachment.unregistered = [engine("p-late")]
    store.register_engine = register_late  # type: ignore[method-assign]
    try:
        attachment.register_missing(())
    finally:
        del store.register_engine  # type: ignore[attr-defined]
    assert "p-late" not in models(store)
