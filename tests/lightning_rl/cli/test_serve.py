"""`lightning-rl serve` as a person types it: an agent joins by HTTP alone, it ends cleanly, and refuses in one line."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import urllib3

from lightning_rl.cli import serve
from lightning_rl.cli.serve import ADMIN_KEY, ENGINE_KEY, RUNNER_KEY
from lightning_rl_proxy.http.limits import RequestLimits
from lightning_rl_proxy.rendering.load import FILES, load_renderer
from tests.commands import forked
from tests.proxy.engines.service import Service, running

TOKENIZER = str(Path(__file__).parents[3] / "examples/sql_agent/checkpoint")
NOWHERE = "embedded=http://127.0.0.1:9"
LONG = "a-key-of-more-than-16-characters"


@dataclass
class Serving:
    """A running command, and what it printed by the time it answered."""

    process: "subprocess.Popen[str]"
    printed: str
    url: str
    pool: urllib3.PoolManager = field(default_factory=lambda: urllib3.PoolManager(retries=False))

    @property
    def key(self) -> str:
        [key] = re.findall(rf"{ADMIN_KEY}=(\S+)", self.printed)
        return str(key)

    def post(self, path: str, fields: Any, key: str) -> urllib3.BaseHTTPResponse:
        headers = {"authorization": f"Bearer {key}"}
        return self.pool.request("POST", self.url + path, body=json.dumps(fields), headers=headers)

    def stop(self, how: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(how)
        out, errors = self.process.communicate(timeout=30)
        assert "Traceback" not in errors, errors
        return self.process.returncode, out + errors


def environment(**given: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in (ADMIN_KEY, RUNNER_KEY, ENGINE_KEY)}
    return {**inherited, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **given}


@contextlib.contextmanager
def serving(place: Path, *words: str, **given: str) -> Iterator[Serving]:
    model = [] if "--model" in words else ["--model", "policy"]
    command = [sys.executable, "-m", "lightning_rl", "serve", *model, "--port", "0", *words]
    process = subprocess.Popen(
        command, cwd=place, env=environment(**given), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        printed = ""
        while "Ctrl-C ends it." not in printed:
            line = process.stdout.readline()
            assert line, process.communicate()
            printed += line
        [url] = re.findall(r"^lightning-rl serves \S+ at (\S+)$", printed, re.MULTILINE)
        yield Serving(process, printed, url)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def refusal(place: Path, *words: str, **given: str) -> str:
    """The one line that says why nothing is served."""
    import lightning_rl.control_plane.process  # noqa: F401  # loaded once, not in every fork

    with tempfile.TemporaryDirectory() as output:
        port = [] if "--port" in words else ["--port", "0"]  # 8080 may be in use
        done = forked(place, Path(output), ["serve", "--model", "policy", *port, *words], environment(**given))
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1 + done.stderr.count("\ntokenizer "), done.stderr
    return done.stderr


@pytest.fixture
def service() -> Iterator[Service]:
    with running() as service:
        yield service


def test_an_agent_joins_is_recorded_and_all_of_it_is_there_after_a_restart(tmp_path: Path, service: Service) -> None:
    service.script.append("Three.")
    engine = ["--engine", f"openai={service.url}"]
    with serving(tmp_path, *engine, **{ENGINE_KEY: "sk-of-the-service"}) as server:
        command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        key = server.key
        claim = server.post("/api/v1/rollouts/start", {"task": "How many?"}, key).json()
        llm = claim["resources"]["main_llm"]
        assert llm["base_url"].startswith(server.url)
        client = openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"])
        answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "How many?"}])
        assert answer.choices[0].message.content == "Three."
        place = f"/api/v1/rollouts/{claim['rollout']['rollout_id']}/attempts/{claim['attempt']['attempt_id']}"
        assert server.post(f"{place}/finish", {"status": "succeeded", "reward": 1}, key).status == 200
        code, said = server.stop(signal.SIGINT)
    assert (code, said) == (130, "")
    assert service.keys == ["Bearer sk-of-the-service"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-server", "run.db", "run.db.lock"]
    for line in (f"log         {tmp_path}/run-server/server.log", f"journal     {tmp_path}/run-server/gateway.journal"):
        assert line in server.printed
    log = (tmp_path / "run-server" / "server.log").read_text()
    assert log
    for secret in (key, "sk-of-the-service", llm["api_key"]):
        assert secret not in log + server.printed.replace(key, "", 1)
        assert secret.encode() not in command
    with serving(tmp_path, *engine, **{ADMIN_KEY: "mine"}) as server:
        assert "mine" not in server.printed
        assert f"engines     openai policy {service.url}\n" in server.printed
        assert b"mine" not in Path(f"/proc/{server.process.pid}/environ").read_bytes()
        spans = server.pool.request("GET", server.url + f"{place}/spans", headers={"authorization": "Bearer mine"})
        assert len(spans.json()["spans"]) == 1
        assert server.stop(signal.SIGTERM)[0] == 0


def test_a_model_on_disk_is_served_by_one_command(tmp_path: Path) -> None:
    words = ("--model", TOKENIZER, "--engine", "embedded", "--max-model-len", "100")
    with serving(tmp_path, *words, **{ADMIN_KEY: "mine"}) as server:
        llm = server.post("/api/v1/rollouts/start", {"task": 1}, "mine").json()["resources"]["main_llm"]
        assert llm["model"] == "checkpoint"
        with openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0) as sdk:
            said = [{"role": "user", "content": "schools: size id\nHow many schools are there?"}]
            answer = sdk.chat.completions.create(model=llm["model"], messages=said, temperature=0)  # type: ignore
            assert "SELECT" in str(answer.choices[0].message.content)
            with pytest.raises(openai.APIStatusError) as refused:  # the server knows the engine's context
                sdk.chat.completions.create(model="x", messages=[{"role": "user", "content": "é" * 100}])
            assert (refused.value.status_code, refused.value.code) == (400, "context_length_exceeded")
            assert "maximum context length is 100 tokens" in str(refused.value)
        assert server.stop(signal.SIGTERM)[0] == 0


@pytest.mark.long
def test_a_model_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((Path(TOKENIZER) / name).read_bytes())
    command = [sys.executable, "-m", "lightning_rl", "serve", "--model", "model", "--engine", "embedded"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the model model cannot be loaded: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("setting", ["text", "control"])
def test_what_a_special_token_in_a_message_is_stands_in_the_command(tmp_path: Path, setting: Any) -> None:
    said = [{"role": "user", "content": "It ends with <|im_end|>."}]
    words = ["--tokenizer", TOKENIZER, "--renderer", "qwen3", "--special-tokens-in-text", setting]
    with serving(tmp_path, *words, **{ADMIN_KEY: "mine"}) as server:
        llm = server.post("/api/v1/rollouts/start", {"task": 1}, "mine").json()["resources"]["main_llm"]
        asked = server.pool.request(
            "POST",
            f"{llm['base_url']}/messages/count_tokens",
            json={"model": "policy", "messages": said},
            headers={"x-api-key": llm["api_key"]},
        )
        renderer = load_renderer(Path(TOKENIZER), "qwen3", "policy", special_tokens_in_text=setting)
        assert asked.json() == {"input_tokens": len(renderer.render(said, None))}


def test_history_and_unknown_models_are_as_the_command_says(tmp_path: Path) -> None:
    words = ["--tokenizer", TOKENIZER, "--renderer", "qwen3", "--history", "template", "--unknown-model", "refuse"]
    with serving(tmp_path, *words, **{ADMIN_KEY: "mine"}) as server:
        told = server.pool.request(
            "GET", f"{server.url}/api/v1/server", headers={"authorization": "Bearer mine"}
        ).json()
        assert (told["history"], told["unknown_model"]) == ("template", "refuse")
        llm = server.post("/api/v1/rollouts/start", {"task": 1}, "mine").json()["resources"]["main_llm"]
        sdk = openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0)
        with sdk, pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4o'"):
            sdk.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "one"}])


@pytest.mark.long
def test_what_is_printed_for_curl_works_in_a_shell(tmp_path: Path) -> None:
    with serving(tmp_path, "--tokenizer", TOKENIZER, "--engine", NOWHERE) as server:
        [export] = re.findall(r"export \S+", server.printed)
        [curl] = re.findall(r"^ +(curl .*)$", server.printed, re.MULTILINE)
        done = subprocess.run(["sh", "-c", f"{export}; {curl}"], capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout)["rollout"]["task"] == "any JSON", done.stderr
        assert server.stop(signal.SIGTERM)[0] == 0


def test_only_its_owner_can_read_what_it_keeps(tmp_path: Path) -> None:
    with serving(tmp_path, "--engine", "litellm:openai/none") as server:
        server.post("/api/v1/rollouts/start", {"task": 1}, server.key)
        kept = [tmp_path / "run-server", *(tmp_path / "run-server").iterdir(), *tmp_path.glob("run.db*")]
        assert len(kept) >= 5
        shared = [path.name for path in kept if path.stat().st_mode & 0o077]
        server.stop(signal.SIGTERM)
    assert shared in ([], ["run.lock"])  # which is empty


@pytest.mark.long
def test_a_runner_key_is_the_one_of_the_environment_or_none(tmp_path: Path, service: Service) -> None:
    engine = ["--engine", f"openai:other={service.url}"]
    claim = {"worker_id": "w"}
    with serving(tmp_path, *engine, **{ADMIN_KEY: "mine", RUNNER_KEY: "theirs"}) as server:
        assert server.post("/api/v1/rollouts/claim", claim, "theirs").status == 200
        assert server.post("/api/v1/rollouts/start", {"task": 1}, "theirs").status == 403
        server.stop(signal.SIGTERM)
    with serving(tmp_path, *engine, **{ADMIN_KEY: "mine"}) as server:
        assert [server.post("/api/v1/rollouts/claim", claim, key).status for key in ("theirs", "")] == [401, 401]
        server.stop(signal.SIGTERM)


@pytest.mark.long
def test_beyond_the_loopback_it_takes_ones_own_key(tmp_path: Path) -> None:
    words = ["--engine", "litellm:openai/none", "--host", "0.0.0.0", "--url", "https://runs.example/"]
    with serving(tmp_path, *words, **{ADMIN_KEY: LONG}) as server:
        assert server.url == "https://runs.example"
        server.stop(signal.SIGTERM)


@pytest.mark.parametrize(
    ("host", "given", "message"),
    [
        ("0.0.0.0", {}, f"set a key of your own: {ADMIN_KEY}"),
        ("::", {}, f"set a key of your own: {ADMIN_KEY}"),
        ("somewhere.example", {}, f"set a key of your own: {ADMIN_KEY}"),
        ("0.0.0.0", {RUNNER_KEY: LONG}, f"set a key of your own: {ADMIN_KEY}"),
        ("0.0.0.0", {ADMIN_KEY: "short"}, f"{ADMIN_KEY} has 5 characters; on 0.0.0.0 it needs at least 16"),
        ("0.0.0.0", {ADMIN_KEY: LONG, RUNNER_KEY: "short"}, f"{RUNNER_KEY} has 5 characters"),
        ("127.0.0.1", {ADMIN_KEY: LONG, RUNNER_KEY: LONG}, "every runner would be an admin"),
        ("127.0.0.1", {ADMIN_KEY: "two words"}, f"{ADMIN_KEY} holds what no header can"),
        ("127.0.0.1", {ADMIN_KEY: "schlüssel"}, f"{ADMIN_KEY} holds what no header can"),
    ],
)
def test_keys_that_are_not_safe_there_are_refused(
    tmp_path: Path, host: str, given: dict[str, str], message: str
) -> None:
    assert message in refusal(tmp_path, "--host", host, "--engine", "litellm", **given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "tgi=http://x"], "--engine tgi=http://x: Invalid enum value 'tgi'"),
        (["--engine", "vllm"], "needs its url"),
        (["--engine", "vllm=127.0.0.1:8000"], "--engine vllm=127.0.0.1:8000: "),
        (["--engine", NOWHERE], "started without a tokenizer"),
        (["--engine", NOWHERE, "--tokenizer", "nowhere"], "'nowhere' is neither a folder nor a model id"),
        (["--engine", NOWHERE, "--tokenizer", "."], "holds no tokenizer.json"),
        (["--engine", NOWHERE, "--tokenizer", "no-one/nothing"], "could not be taken from the hub"),
        (["--engine", NOWHERE, "--tokenizer", TOKENIZER, "--renderer", "qwen33"], "did you mean 'qwen3'?"),
        (
            ["--engine", NOWHERE, "--tokenizer", TOKENIZER, "--chat-template-kwargs", '{"enable_thinkin": false}'],
            "takes enable_thinking; did you mean 'enable_thinking'?",
        ),
        (["--chat-template-kwargs", "enable_thinking"], "--chat-template-kwargs enable_thinking: "),
        (["--chat-template-kwargs", "[1]"], "give a JSON object"),
        (["--history", "none"], "--history none: give keep or template"),
        (["--unknown-model", "any"], "--unknown-model any: give policy or refuse"),
        (["--special-tokens-in-text", "letters"], "--special-tokens-in-text letters: give text or control"),
        (["--store", "mysql://x/y"], "--store mysql://x/y is neither a SQLite file nor a PostgreSQL database"),
        (["--store", "sqlite://"], "--store sqlite:// is neither a SQLite file nor"),
        (["--store", "postgresql+psycopg://u:hidden@x"], "--store postgresql+psycopg://u:***@x names no database"),
        (
            ["--store", "postgresql://u:hidden@127.0.0.1:9/y"],
            "the store postgresql://u:***@127.0.0.1:9/y cannot be reach",
        ),
        (["--store", "sqlite:///none/run.db"], "there is no folder"),
        (["--limit", "body_bytes"], "--limit body_bytes: "),
        (["--max-model-len", "512"], "--max-model-len 512 is of --engine embedded: other engines have their own"),
        (["--limit", "bodies=3"], "unknown field `bodies`; give NAME=NUMBER, of body_bytes"),
        (["--limit", "messages=0"], "Expected `int` >= 1"),
        (["--url", "example.org"], "--url example.org is no URL"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    assert message in refusal(tmp_path, *words)


@pytest.mark.long
def test_a_port_in_use_a_store_that_cannot_be_written_and_a_folder_in_use_are_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for engine in ((), ("--model", TOKENIZER, "--engine", "embedded")):  # no word of a model that is loaded
            assert f"port {port} of 127.0.0.1 is in use" in refusal(tmp_path, "--port", port, *engine)
    (tmp_path / "folder.db").mkdir()
    assert "the store" in refusal(tmp_path, "--port", "0", "--store", "sqlite:///folder.db")
    with serving(tmp_path, "--store", "sqlite:///two.db") as server:
        busy = refusal(tmp_path, "--port", "0", "--store", "sqlite:///two.db")
        assert "another process is using the run folder" in busy
        server.stop(signal.SIGTERM)


@pytest.mark.long
def test_a_store_in_postgresql_is_told_without_its_password_and_keeps_what_was_recorded(
    tmp_path: Path, postgres_url: str
) -> None:
    store = postgres_url.replace("postgres@", "postgres:hidden@")
    for status in ("running", "running"):  # made, then found again by another process
        with serving(tmp_path, "--store", store, **{ADMIN_KEY: "mine"}) as server:
            assert "postgres:***@" in server.printed
            claim = server.post("/api/v1/rollouts/start", {"task": 1, "rollout_id": "r1"}, "mine").json()
            assert claim["rollout"]["status"] == status
            code, rest = server.stop(signal.SIGTERM)
            assert (code, "hidden" in server.printed + rest) == (0, False)
    [folder] = tmp_path.iterdir()
    assert folder.name.endswith("-server")
    assert "hidden" not in (folder / "server.log").read_text()


SMALL = ["body_bytes=3000", "control_body_bytes=4000", "header_bytes=1500", "messages=3", "open_attempts=2"]


@pytest.mark.long
def test_each_limit_of_the_command_line_holds(tmp_path: Path, service: Service) -> None:
    words = [word for limit in SMALL for word in ("--limit", limit)]
    with serving(tmp_path, "--engine", f"openai={service.url}", *words, **{ADMIN_KEY: "mine"}) as server:
        claim = server.post("/api/v1/rollouts/start", {"task": 1}, "mine").json()
        llm = claim["resources"]["main_llm"]
        door = llm["base_url"].removeprefix(server.url) + "/chat/completions"
        chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        assert server.post(door, chat, llm["api_key"]).status == 200
        assert server.post(door, chat | {"messages": chat["messages"] * 4}, llm["api_key"]).status == 400
        assert server.post(door, chat | {"user": "x" * 3000}, llm["api_key"]).status == 413
        assert server.post(door, chat, "x" * 1500).status == 431
        too_large = server.post("/api/v1/rollouts/start", {"task": "x" * 4000}, "mine")
        assert (too_large.status, too_large.json()["error"]["type"]) == (413, "request_too_large")
        assert server.post("/api/v1/rollouts/start", {"task": 1}, "x" * 1500).status == 431
        assert server.post("/api/v1/rollouts/start", {"task": 1}, "mine").status == 201
        for path, fields in (("start", {"task": 1}), ("claim", {"worker_id": "w"})):
            full = server.post(f"/api/v1/rollouts/{path}", fields, "mine")
            assert (full.status, full.json()["error"]["type"]) == (429, "rate_limited")
            assert (full.headers["retry-after"], full.headers["x-should-retry"]) == ("1", "true")
        place = f"/api/v1/rollouts/{claim['rollout']['rollout_id']}/attempts/{claim['attempt']['attempt_id']}"
        assert server.post(f"{place}/finish", {"status": "succeeded", "reward": 1}, "mine").status == 200
        assert server.post("/api/v1/rollouts/start", {"task": 1}, "mine").status == 201
        server.stop(signal.SIGTERM)


@pytest.mark.long
def test_a_head_that_does_not_end_is_cut_off_at_the_limit(tmp_path: Path) -> None:
    with serving(tmp_path, "--limit", "header_bytes=1500") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nx-endless: ")
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 2**27:
                    client.sendall(b"x" * 2**16)
                    sent += 2**16
            assert sent < 2**27, "it reads on and on"
            with contextlib.suppress(ConnectionError):
                assert client.recv(2**16).startswith(b"HTTP/1.1 431 ")
        assert server.pool.request("GET", server.url + "/healthz").status == 200
        server.stop(signal.SIGTERM)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("vllm=http://h:1/x=y", ("vllm", "m", "http://h:1/x=y", None)),
        ("sglang=http://h:1", ("sglang", "m", "http://h:1", None)),
        ("openai:gpt-5=https://h/v1", ("openai", "gpt-5", "https://h/v1", "sk-env")),
        ("litellm:anthropic/claude-sonnet-5", ("litellm", "anthropic/claude-sonnet-5", None, None)),
    ],
)
def test_an_engine_is_a_kind_a_name_and_a_url(
    word: str, expected: tuple[str, str, str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENGINE_KEY, "sk-env")
    engine = serve.engine_request(word, "m")
    assert (engine.kind, engine.model, engine.url, engine.api_key) == expected


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
        ("::", False), ("10.0.0.1", False), ("localhost.example", False), ("", False),
    ],
)  # fmt: skip
def test_the_loopback_is_told_from_the_world(host: str, alone: bool) -> None:
    assert serve.is_loopback(host) is alone


def test_limits_that_are_not_named_are_the_defaults() -> None:
    assert serve.limits([]) == RequestLimits()
    assert serve.limits(["messages=5"]) == RequestLimits(messages=5)


def test_a_tokenizer_comes_from_the_hub_without_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *of, **how: asked.append((of, how)) or str(tmp_path)
    )
    assert serve.tokenizer_folder("someone/model") == tmp_path
    [(of, how)] = asked
    assert of == ("someone/model",)
    assert how["allow_patterns"] == list(FILES)
    assert not [pattern for pattern in how["allow_patterns"] if "safetensors" in pattern or "*" in pattern]


@pytest.mark.long
def test_the_command_loads_no_torch() -> None:
    code = (
        "import sys, lightning_rl.cli.serve, lightning_rl.control_plane.process, lightning_rl.trainer\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"
