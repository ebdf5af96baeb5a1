"""The pictures of docs/dashboard.md, taken of real runs: `make screenshots` writes them, and a test run looks that each
can be taken."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.viewer import report
from tests.browser.real_runs import ROOT
from tests.browser.test_pages import ask, first

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(300)]

# Where this machine keeps things is no part of a picture.
PLACES = r"""([root, shown]) => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    let text = walk.currentNode.textContent.replaceAll(root, shown);
    text = text.replace(/\/tmp\/[\w./-]*?\/(\w+)$/, "~/runs/$1");
    if (text !== walk.currentNode.textContent) walk.currentNode.textContent = text;
  }
}"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("SCREENSHOTS")
    folder = ROOT / kept if kept else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def views(url: str) -> dict[str, tuple[str, str, str]]:
    """The pictures: name -> (address, what shows that it is drawn, theme)."""
    trained = first(url, "quickstart", mode="train", sort="-advantage")
    group = ask(url, "quickstart/groups", step=3)["groups"][0]["group_id"]
    task = ask(url, "quickstart/tasks")["tasks"][0]["task_key"]
    return {
        "rollouts": ("#/run/quickstart/rollouts?sort=-advantage", "a.row", "light"),
        "rollout": (f"#/run/quickstart/rollout/{trained}?colour=entropy&call=1&token=2", ".token.sampled", "light"),
        "rollout-dark": (f"#/run/quickstart/rollout/{trained}?colour=logprob&call=1&token=2", ".token.sampled", "dark"),
        "branches": (f"#/run/langgraph/rollout/{first(url, 'langgraph', sort='-advantage')}", ".forest .node", "light"),
        "images": (f"#/run/images/rollout/{first(url, 'images')}", ".image img", "light"),
        "now": ("#/run/quickstart/now", ".curve svg", "dark"),
        "runs": ("#/?runs=quickstart,langgraph", ".curve svg", "light"),
        "group": (f"#/run/quickstart/group/{group}", ".column .message", "light"),
        "then-and-now": (f"#/run/quickstart/task/{task}?mode=val", ".two-columns mark", "light"),
    }


def test_pictures_of_every_view(runs: str, pictures: Path, watch: Callable[..., Any]) -> None:
    for name, (address, shows, theme) in views(runs).items():
        seen = watch(theme)
        page = seen.open(runs + address, shows)
        page.wait_for_timeout(1500)  # the doctor looks through the run behind the page
        page.evaluate(PLACES, [str(ROOT), "~/lightning_rl"])
        page.screenshot(path=pictures / f"dashboard-{name}.png")
        seen.is_well(runs)
        assert (pictures / f"dashboard-{name}.png").stat().st_size > 10_000


def test_a_picture_of_a_report(quickstart_run: Path, pictures: Path, watch: Callable[..., Any]) -> None:
    file = report.write(quickstart_run, quickstart_run / "report.html")
    page = watch(offline=True).open(file.as_uri(), ".pair .token")
    page.evaluate(PLACES, [str(ROOT), "~/lightning_rl"])
    page.screenshot(path=pictures / "report.png")
