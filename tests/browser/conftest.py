"""A real browser, and `lightning-rl dashboard` in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser import real_runs

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
LAPTOP = {"width": 1280, "height": 800}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert Path(CHROMIUM).exists(), f"there is no {CHROMIUM}: apt-get install chromium, or name one with CHROMIUM=..."
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Watched:
    """A page, and all that must not happen in it: errors, dialogs, requests to other places."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self.requested: list[str] = []
        page.on("console", self._told)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._dialog)
        page.on("request", lambda request: self.requested.append(request.url))

    def _told(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def open(self, url: str, shows: str) -> Any:
        """Go there, and wait until `shows` (a selector) is seen."""
        self.page.goto("about:blank")  # another hash alone would be no new page
        self.page.goto(url)
        self.page.wait_for_selector(shows, timeout=15_000)
        return self.page

    def is_well(self, *places: str) -> None:
        """Nothing went wrong, and nothing was asked for elsewhere than at `places`."""
        assert not self.errors
        assert not self.dialogs
        elsewhere = [url for url in self.requested if not url.startswith((*places, "data:", "about:"))]
        assert not elsewhere


def until(page: Any, holds: str, seconds: float = 30.0) -> None:
    """Wait until an expression holds. The page's own policy forbids Playwright to do so in it."""
    for _ in range(int(seconds / 0.05)):
        if page.evaluate(holds):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"it never held: {holds}")


@pytest.fixture
def watch(browser: Any) -> Iterator[Callable[..., Watched]]:
    """Pages of the browser, each of its own context."""
    with ExitStack() as close:

        def opened(theme: str = "light", **more: Any) -> Watched:
            context = browser.new_context(viewport=LAPTOP, color_scheme=theme, **more)
            close.callback(context.close)
            context.grant_permissions(["clipboard-read", "clipboard-write"])
            return Watched(context.new_page())

        yield opened


@contextmanager
def dashboard(*words: str, **environment: str) -> Iterator[str]:
    """The URL of a page; it ends with the block."""
    command = [sys.executable, "-u", "-m", "lightning_rl", "dashboard", *words, "--port", "0"]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        assert served.stdout is not None
        [url] = re.findall(r"http://\S+/", served.stdout.readline())
        yield url
    finally:
        served.terminate()
        served.wait(20)


@pytest.fixture(scope="session")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By kind; made at the same time."""
    folder = tmp_path_factory.mktemp("runs")
    names = {"quickstart": "quickstart", "graph": "langgraph", "images": "images"}
    with ThreadPoolExecutor(len(names)) as threads:
        made = {kind: threads.submit(real_runs.made, kind, folder / name) for kind, name in names.items()}
    return {kind: run.result() for kind, run in made.items()}


@pytest.fixture(scope="session")
def quickstart_run(all_runs: dict[str, Path]) -> Path:
    return all_runs["quickstart"]


@pytest.fixture(scope="session")
def graph_run(all_runs: dict[str, Path]) -> Path:
    return all_runs["graph"]


@pytest.fixture(scope="session")
def image_run(all_runs: dict[str, Path]) -> Path:
    return all_runs["images"]


@pytest.fixture(scope="session")
def runs(quickstart_run: Path, graph_run: Path, image_run: Path) -> Iterator[str]:
    """A page of all three."""
    with dashboard(*map(str, (quickstart_run, graph_run, image_run))) as url:
        yield url
