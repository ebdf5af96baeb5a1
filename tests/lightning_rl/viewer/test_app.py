"""Who may look at the page, and that nothing an agent wrote, and no other site, gets a say in it."""

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from lightning_rl.cli import dashboard
from lightning_rl.processes.service_keys import ADMIN_KEY
from lightning_rl.viewer.access import COOKIE, HEADERS, Access
from lightning_rl.viewer.app import STATIC, create_app, keyed
from lightning_rl.viewer.run import ViewedRun
from lightning_rl.viewer.run_folder import runs_below
from tests.lightning_rl.viewer.viewed import small_run

KEY = "an-admin-key-of-32-characters-xx"
SENT = {"x-lightning-rl": "viewer"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture
def here(run_dir: Path) -> Iterator[TestClient]:
    """A page on the loopback."""
    with TestClient(create_app([ViewedRun(run_dir)], Access("127.0.0.1", None)), "http://127.0.0.1:8199") as client:
        yield client


@pytest.fixture
def beyond(run_dir: Path) -> Iterator[TestClient]:
    """A page that others can reach."""
    app = create_app([ViewedRun(run_dir)], Access("0.0.0.0", KEY))
    with TestClient(app, "http://gpu-box:8199", follow_redirects=False) as client:
        yield client


def test_the_page_and_its_answers(here: TestClient) -> None:
    assert "lightning_rl" in here.get("/").text
    [run] = here.get("/api/runs").json()["runs"]
    assert run["key"] == "small"
    assert here.get("/api/runs/small/rollouts?mode=val").json()["total"] == 2
    assert here.get("/api/runs/small/rollouts/train-2-1").json()["reward"] == 1.0


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/api/runs/other/summary", 404, "there is no run 'other' here; there are small"),
        ("/api/runs/small/rollouts/nothing", 404, "there is no rollout 'nothing' in this run"),
        ("/api/runs/small/rollouts?sort=key", 400, "there is no column 'key' to sort by"),
        ("/api/runs/small/rollouts/train-2-1/calls/x/y", 400, "are numbers"),
    ],
)
def test_what_cannot_be_answered_is_said_in_words(here: TestClient, path: str, status: int, told: str) -> None:
    answer = here.get(path)
    assert answer.status_code == status
    assert told in answer.json()["error"]


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js", "/login", "/api/runs/other/x"])
def test_every_answer_has_the_headers_that_keep_scripts_and_frames_out(here: TestClient, path: str) -> None:
    headers = here.get(path).headers
    assert {name: headers[name] for name in HEADERS} == HEADERS
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/..%2f..%2ferrors.py", "/static/%2e%2e/run.py"])
def test_no_other_file_is_handed_out(here: TestClient, path: str) -> None:
    assert here.get(path).status_code == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8199", "127.0.0.1.evil.example", ""])
def test_on_the_loopback_another_name_is_refused(here: TestClient, host: str) -> None:
    """A site whose name leads here, by DNS, reads nothing."""
    assert here.get("/api/runs", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8199", "localhost:8199", "[::1]:8199"])
def test_the_loopbacks_own_names_are_taken(here: TestClient, host: str) -> None:
    assert here.get("/api/runs", headers={"host": host}).status_code == 200


def test_pages_of_other_sites_read_nothing_but_may_link_here(here: TestClient) -> None:
    cross = {"sec-fetch-site": "cross-site"}
    assert here.get("/api/runs", headers={**cross, "sec-fetch-mode": "cors"}).status_code == 403
    assert here.get("/static/app.js", headers={**cross, "sec-fetch-mode": "no-cors"}).status_code == 403
    assert here.get("/", headers={**cross, "sec-fetch-mode": "navigate"}).status_code == 200


def test_a_page_that_others_can_reach_needs_a_key() -> None:
    with pytest.raises(ValueError, match="needs a key"):
        Access("0.0.0.0", None)
    assert KEY not in repr(Access("0.0.0.0", KEY))


def test_beyond_the_loopback_nothing_is_shown_without_a_session(beyond: TestClient) -> None:
    assert beyond.get("/").headers["location"] == "/login"
    for path in ("/api/runs", "/api/runs/small/rollouts", "/docs", "/openapi.json"):
        assert beyond.get(path).status_code == 401
    assert beyond.get("/api/runs", headers={"authorization": f"Bearer {KEY}"}).status_code == 401
    assert beyond.get(f"/api/runs?key={KEY}").status_code == 401
    assert beyond.get("/api/runs", headers={"cookie": f"{COOKIE}={KEY}"}).status_code == 401
    assert beyond.get("/login").status_code == 200


def test_the_admin_key_begins_a_session_that_ends(beyond: TestClient) -> None:
    assert beyond.post("/login", json={"key": "wrong"}, headers=SENT).status_code == 401
    answer = beyond.post("/login", json={"key": KEY}, headers=SENT)
    assert answer.status_code == 204
    cookie = answer.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/"))
    assert KEY not in cookie
    assert beyond.get("/api/runs").status_code == 200
    assert KEY not in beyond.get("/api/runs").text
    assert beyond.post("/logout", headers=SENT).status_code == 204
    assert beyond.get("/api/runs").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},  # a form cannot send the header
        {**SENT, "origin": "http://evil.example"},
        {**SENT, "origin": "null"},
        {**SENT, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"},
    ],
)
def test_a_session_is_begun_from_the_page_alone(beyond: TestClient, headers: dict[str, str]) -> None:
    assert beyond.post("/login", json={"key": KEY}, headers=headers).status_code == 403
    assert beyond.post("/logout", headers=headers).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_nothing_here_changes_a_run(here: TestClient, method: str) -> None:
    answer = here.request(method, "/api/runs/small/rollouts/train-2-1", headers=SENT)
    assert answer.status_code == 405


def test_sessions_are_bounded() -> None:
    access = Access("0.0.0.0", KEY)
    made = [asyncio.run(access.begin(KEY)) for _ in range(300)]
    assert all(made)
    assert sum(access.is_open(str(session)) for session in made) == 256
    assert access.is_open(str(made[-1]))


def test_the_command_asks_for_a_key_beyond_the_loopback(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    with pytest.raises(dashboard.NoKey, match=f"set {ADMIN_KEY}"):
        dashboard.run([run_dir], host="0.0.0.0", port=0)
    monkeypatch.setenv(ADMIN_KEY, "short")
    with pytest.raises(dashboard.NoKey, match="at least 16 characters"):
        dashboard.run([run_dir], host="0.0.0.0", port=0)


def test_a_run_that_begins_later_is_listed(tmp_path: Path) -> None:
    small_run(tmp_path / "a" / "one")
    [first] = runs_below([tmp_path])
    known: set[Path | None] = {first}
    since = functools.partial(dashboard._begun_since, [tmp_path], known)
    with TestClient(create_app([ViewedRun(first)], Access("127.0.0.1", None), since), "http://127.0.0.1:8199") as page:
        assert [run["key"] for run in page.get("/api/runs").json()["runs"]] == ["one"]
        small_run(tmp_path / "b" / "one")
        for _ in range(2):
            assert [run["key"] for run in page.get("/api/runs").json()["runs"]] == ["one", "one~2"]
        assert page.get("/api/runs/one~2/rollouts?mode=val").json()["total"] == 2


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [ViewedRun(tmp_path / place / "my run") for place in "ab"]
    assert list(keyed(runs)) == ["my-run", "my-run~2"]


def test_no_script_of_the_page_makes_markup_of_text() -> None:
    """`textContent` alone: a lint, since one line would be enough."""
    scripts = [file for file in STATIC.iterdir() if file.suffix == ".js"]
    assert len(scripts) > 10
    words = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser",
             "srcdoc", "javascript:", "createContextualFragment", "setHTML")  # fmt: skip
    for file in scripts:
        found = [word for word in words if word in file.read_text()]
        assert not found, f"{file.name} has {found}"


def test_the_page_has_no_inline_script_and_loads_nothing_from_elsewhere() -> None:
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, file.name
        assert "https://" not in text, file.name
        if file.suffix == ".html":
            assert " on" not in "".join(part for part in text.split("<")[1:] if "=" in part).split(">")[0]
            assert all('src="/static/' in part for part in text.split("<script")[1:])
