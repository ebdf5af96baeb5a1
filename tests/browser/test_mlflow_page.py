"""The page of `mlflow ui`, in a real browser: a trace opens with its spans, each under the one that it belongs to."""

from typing import Any

import pytest

from tests.e2e.test_mlflow_ui import _ask, command, url
from tests.lightning_rl.telemetry.traces.test_backends import TREE

pytestmark = [pytest.mark.browser, pytest.mark.long]

__all__ = ["command", "url"]  # fixtures


def test_a_trace_is_shown_nested(browser: Any, url: str) -> None:
    experiment = _ask(f"{url}/api/2.0/mlflow/experiments/get-by-name?experiment_name=p")["experiment"]["experiment_id"]
    page = browser.new_page()
    page.goto(f"{url}/#/experiments/{experiment}/traces?startTimeLabel=ALL")  # the recorded ones are old
    answer = page.get_by_text("three", exact=True).first
    answer.wait_for(timeout=60_000)
    if (told := page.get_by_text("Got it")).is_visible():
        told.click()  # news of MLflow's that lie over the table
    answer.click()
    left = {}
    for name in TREE:
        span = page.get_by_text(name, exact=True).first
        span.wait_for(timeout=30_000)
        left[name] = span.bounding_box()["x"]
    for name, parent in TREE.items():
        if parent is not None:
            assert left[name] > left[parent], f"{name} is not drawn under {parent}"
    page.close()
