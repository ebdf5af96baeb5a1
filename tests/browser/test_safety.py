"""Text of agents is text, whatever it holds; other sites get nothing; what breaks is said in words."""

import functools
import http.server
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane.launch import launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import ErrorInfo, Finish, Log, RolloutRequest
from lightning_rl.viewer import report
from tests.browser import real_runs
from tests.browser.conftest import dashboard, until
from tests.browser.test_pages import ask, first
from tests.lightning_rl.inspect.runs import metrics_of, open_store, write_run
from tests.lightning_rl.viewer.viewed import add_rollout, message, record_of, small_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

KEY = "an-admin-key-of-32-characters-xx"
CORPUS = (
    "<script>globalThis.broken = 1</script>", "<img src=x onerror='globalThis.broken = 1'>", "</script><svg onload=globalThis.broken=1>",
    "<iframe srcdoc='<script>parent.broken=1</script>'>", "javascript:globalThis.broken=1", "{{constructor.constructor('broken=1')()}}",
    "${globalThis.broken=1}", "\u202egnirts\u202c and \u0000 and \u001b[31mred", "'\"><a href='javascript:globalThis.broken=1'>x</a>", "</textarea><b>",
)  # fmt: skip
ALL = " ".join(CORPUS)


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every field that an agent, a task or a service can write holds the corpus."""
    run_dir = tmp_path_factory.mktemp("runs") / "hostile <img src=x onerror=broken=1>"
    tool = {"id": ALL, "type": "function", "function": {"name": ALL, "arguments": json.dumps({ALL: ALL})}}
    picture = {"type": "image_url", "image_url": {"url": "javascript:globalThis.broken=1"}}
    remote = {"type": "image_url", "image_url": {"url": "http://evil.example/x.png"}}
    talk = [
        {"asked": [message("system", ALL), message(CORPUS[0], [{"type": "text", "text": ALL}, picture, remote])],
         "answered": message("assistant", ALL, reasoning_content=ALL, tool_calls=[tool]), "agent": ALL},
        {"asked": [message("tool", ALL, tool_call_id=ALL, name=ALL)], "answered": message("assistant", "x" * 1_000_000)},
    ]  # fmt: skip
    with open_store(run_dir) as store:
        for step in (0, 1):
            add_rollout(
                store,
                f"val-{step}",
                talk,
                mode="val",
                step=step,
                task={ALL: ALL, "question": ALL},
                reward=float(step),
                agent=ALL,
            )
        for k in (0, 1):
            add_rollout(
                store,
                f"train-{k}",
                talk,
                group="g",
                task=ALL,
                reward={ALL: 1.0, "reward": float(k)},
                log=Log(stdout=ALL, stderr=ALL),
            )
        error = ErrorInfo(type=CORPUS[1], message=ALL, traceback=ALL)
        add_rollout(store, "failed", talk, task=ALL, error=error)
    rows = [metrics_of(1) | {CORPUS[1]: 1.0, f"tokens/excluded/{CORPUS[0]}": 5.0}]
    return write_run(run_dir, steps=[record_of(1, {"train-0": (0.0, -1.0, 2), "train-1": (1.0, 1.0, 2)})], metrics=rows)


@pytest.mark.smoke
def test_nothing_that_an_agent_wrote_runs(hostile_run: Path, watch: Callable[..., Any]) -> None:
    seen = watch()
    with dashboard(str(hostile_run)) as url:
        key = _key(url)
        [task] = [each["task_key"] for each in ask(url, f"{key}/tasks")["tasks"]]
        for view, shows in (
            ("now", ".tile"), ("rollouts", "a.row"), ("rollouts?text=script", "a.row"), ("groups", "td a"), ("group/g", ".column .message"),
            ("tasks", "td a"), (f"task/{task}?mode=val", ".column .message"), ("config", ".view"),
            *((f"rollout/{name}{words}", ".call") for name in ("train-0", "failed", "val-1") for words in ("", "?colour=mask")),
        ):  # fmt: skip
            page = seen.open(f"{url}#/run/{key}/{view}", shows)
            page.wait_for_timeout(150)
            assert page.evaluate("globalThis.broken") is None, view
            assert (
                page.locator("#app script, #app iframe, #app img:not([src^='data:']), #app a:not([href^='#'])").count()
                == 0
            )
        page = seen.open(f"{url}#/", "table.list")
        assert page.evaluate("globalThis.broken") is None
        page = seen.open(f"{url}#/run/{key}/rollout/train-0", ".call")
        said = page.locator("article.call").first.inner_text()
        assert all(text in said for text in CORPUS[:3])  # it is shown, as what it is
        assert "\\u202egnirts" in said  # a character that turns text around it is named
        seen.is_well(url)


def _key(url: str) -> str:
    import urllib.request

    with urllib.request.urlopen(f"{url}api/runs") as answer:
        return str(json.load(answer)["runs"][0]["key"])


def test_a_report_runs_nothing_either_and_asks_for_nothing(
    hostile_run: Path, tmp_path: Path, watch: Callable[..., Any]
) -> None:
    file = report.write(hostile_run, tmp_path / "report.html")
    seen = watch(offline=True)
    page = seen.open(file.as_uri(), ".pair .token")
    page.wait_for_timeout(300)
    assert page.evaluate("globalThis.broken") is None
    assert page.locator("img").count() == 0
    page = seen.open(file.as_uri() + "#/run/run/rollout/val-1", ".call")
    assert page.evaluate("globalThis.broken") is None
    seen.is_well(file.as_uri())
    assert [url.partition("#")[0] for url in seen.requested if url.startswith("file:")] == [file.as_uri()] * 2


def test_a_report_of_the_quickstart_opens_offline_from_a_file(quickstart_run: Path, watch: Callable[..., Any]) -> None:
    file = quickstart_run / "report.html"
    assert not file.exists() or file.stat().st_size < report.LARGEST
    report.write(quickstart_run, file)
    seen = watch(offline=True)
    page = seen.open(file.as_uri(), ".pair .token")
    text = page.locator("body").inner_text()
    for told in (
        "Curves",
        "Token account",
        "Doctor",
        "Before and after",
        "not as by default",
        "Made with",
        "lightning-rl quickstart --seed 0",
    ):
        assert told in text, told
    page.locator("a", has_text="then, whole").first.click()
    page.wait_for_selector(".call .token")
    assert page.locator(".forest .node").count() >= 1
    page.locator("a", has_text="the report").click()
    page.wait_for_selector(".pair")
    seen.is_well(file.as_uri())


def test_without_scripts_a_report_is_still_read(quickstart_run: Path, browser: Any) -> None:
    file = report.write(quickstart_run, quickstart_run / "report.html")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert "held-out reward: best 0." in page.locator("body").inner_text()
    context.close()


def test_a_notebooks_cell_draws_the_rollout_in_a_frame_without_rights(
    quickstart_run: Path, tmp_path: Path, watch: Callable[..., Any]
) -> None:
    import lightning_rl as lrl

    run = lrl.Run(quickstart_run)
    cell = run.rollout(run.rollouts(mode="val", limit=1)[0]["rollout_id"])
    run.close()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>{cell._repr_html_()}</body>")
    seen = watch(offline=True)
    page = seen.open((tmp_path / "notebook.html").as_uri(), "iframe")
    frame = page.frame_locator("iframe")
    frame.locator(".call").first.wait_for()
    assert "SELECT" in frame.locator(".message.answer").first.inner_text()
    frame.locator("select").first.select_option("logprob")
    frame.locator(".token.sampled").first.wait_for()
    assert (
        page.frames[1].evaluate("(() => { try { return localStorage.length } catch { return 'no rights' } })()")
        == "no rights"
    )
    seen.is_well((tmp_path / "notebook.html").as_uri())


@pytest.fixture
def other_site(tmp_path: Path) -> Iterator[str]:
    """Another site in the same browser."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    (tmp_path / "index.html").write_text("<!doctype html><title>other</title>")
    yield f"http://localhost:{served.server_address[1]}/"
    served.shutdown()


@pytest.mark.smoke
def test_beyond_the_loopback_the_key_opens_a_session_and_other_sites_get_nothing(
    tmp_path: Path, watch: Callable[..., Any], other_site: str
) -> None:
    run_dir = small_run(tmp_path / "small")
    with dashboard(str(run_dir), "--host", "0.0.0.0", LIGHTNING_RL_ADMIN_KEY=KEY) as url:
        url = url.replace("0.0.0.0", "127.0.0.1")
        seen = watch()
        page = seen.open(url, "#login")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=this is not the admin key")
        seen.errors.clear()  # the browser notes the 401
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector(".tile")
        assert KEY not in page.content() + page.url + page.evaluate(
            "JSON.stringify({...localStorage, ...sessionStorage})"
        )
        assert page.evaluate("document.cookie") == ""  # no script reads the session
        seen.is_well(url)
        attack = page.context.new_page()
        attack.goto(other_site)
        told = attack.evaluate(
            """async (url) => {
              const tried = {};
              for (const [name, how] of Object.entries({ read: {}, blind: { mode: "no-cors" }, sent: { method: "POST", mode: "no-cors", body: "{}" } }))
                tried[name] = await fetch(url + "api/runs", { credentials: "include", ...how }).then((answer) => answer.type + answer.status, () => "refused");
              tried.login = await fetch(url + "login", { method: "POST", mode: "no-cors", credentials: "include", body: "{}" }).then((answer) => answer.type + answer.status, () => "refused");
              const frame = document.createElement("iframe");
              frame.src = url;
              document.body.append(frame);
              await new Promise((done) => { frame.onload = done; setTimeout(done, 1500); });
              try { tried.frame = frame.contentDocument === null ? "closed" : "open"; } catch { tried.frame = "closed"; }
              return tried;
            }""",
            url,
        )
        assert set(told.values()) <= {"refused", "closed", "opaque0"}
        assert told["read"] == "refused"
        assert told["frame"] == "closed"


@pytest.mark.long
def test_a_run_is_watched_while_it_is_written(tmp_path: Path, watch: Callable[..., Any]) -> None:
    run_dir = tmp_path / "growing"
    words = [sys.executable, "-m", "lightning_rl", "quickstart", "--steps", "14", "--run-dir", str(run_dir)]
    run = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        while not (run_dir / "metrics.jsonl").exists():
            assert run.poll() is None
            time.sleep(0.2)
        with dashboard(str(run_dir)) as url:
            seen = watch()
            page = seen.open(f"{url}#/run/growing/now", ".chip.running")
            steps = set()
            while "finished" not in page.locator(".rollout-head").inner_text():
                steps.add(page.locator(".rollout-head .big").inner_text())
                engines = page.locator(".two").inner_text()
                assert KEY not in page.content()
                page.wait_for_timeout(400)
            assert len(steps) > 3  # it went on by itself
            assert "embedded" in engines or "Engines run while the run does." in engines
            page = seen.open(f"{url}#/run/growing/rollouts", "a.row")
            until(page, "document.querySelector('.count').textContent.includes('4,184')")
            seen.is_well(url)
        assert run.wait(120) == 0
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            run.wait(60)


@pytest.mark.smoke
def test_many_updates_leave_the_page_as_large_as_it_was(tmp_path: Path, watch: Callable[..., Any]) -> None:
    run_dir = small_run(tmp_path / "small")
    with dashboard(str(run_dir)) as url:
        page = watch().open(f"{url}#/run/small/now", ".curve")
        count = "document.getElementsByTagName('*').length"
        before = page.evaluate(count)
        for number in range(12):
            with (run_dir / "metrics.jsonl").open("ab") as file:
                file.write(json.dumps(metrics_of(3 + number)).encode() + b"\n")
            page.wait_for_timeout(500)
        until(page, "document.querySelector('.rollout-head').textContent.includes('14')")
        assert page.evaluate(count) < before * 1.5 + 200


@pytest.mark.smoke
def test_what_breaks_while_the_page_is_open_is_said(tmp_path: Path, watch: Callable[..., Any]) -> None:
    run_dir = small_run(tmp_path / "small")
    seen = watch()
    with dashboard(str(run_dir)) as url:
        page = seen.open(f"{url}#/run/small/rollouts", "a.row")
        with sqlite3.connect(run_dir / "store.db") as store:
            store.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
        store.close()
        page.wait_for_selector("text=has schema version 99, this program reads", timeout=15_000)
        assert page.locator("a.row").count() > 3  # what was read stays
    page.wait_for_selector("text=the dashboard does not answer", timeout=15_000)


def test_the_rollouts_of_a_server_are_looked_at_over_its_control_plane(
    tmp_path: Path, watch: Callable[..., Any]
) -> None:
    policy = Endpoint(model="policy", tokenizer=str(real_runs.CHECKPOINT), renderer="qwen3", engines=[])
    with launch(tmp_path, policy, admin_key=KEY, runner_key="runner") as serving:
        server = serving.url
        store = HttpStore(server, KEY)
        store.publish({"main_llm": {"resource_type": "proxy_llm", "endpoint": server, "model": "policy"}})
        store.enqueue(
            [RolloutRequest(task={"question": f"question {k}"}, rollout_id=f"r-{k}", group_id="g") for k in range(3)]
        )
        [claim] = store.claim("worker", limit=1, wait_seconds=5)
        with dashboard("--url", server, LIGHTNING_RL_ADMIN_KEY=KEY) as url:
            seen = watch()
            key = _key(url)
            page = seen.open(f"{url}#/run/{key}/rollouts", "a.row")
            assert page.locator("a.row").count() == 3
            store.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, Finish(status="succeeded", reward=0.5))
            until(page, "document.body.textContent.includes('0.500')")
            assert first(url, key, status="succeeded") == claim.rollout.rollout_id
            page = seen.open(f"{url}#/run/{key}/now", ".tile")
            assert "calls parked" in page.locator(".tiles").inner_text()
            assert KEY not in page.content()
            seen.is_well(url)
        store.close()
