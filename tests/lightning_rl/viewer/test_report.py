"""A report is one file, whole and safe; what a notebook shows is made of the same."""

import base64
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.errors import Explained
from lightning_rl.inspect.recorded import NotRecorded
from lightning_rl.telemetry.metrics.notebook import curve
from lightning_rl.viewer import bundle, report, search
from tests.lightning_rl.inspect.runs import open_store, write_run
from tests.lightning_rl.viewer.viewed import PNG, add_rollout, small_run, turn, with_image

HOSTILE = "</script><script>globalThis.broken = 1</script><img src=x onerror='globalThis.broken = 1'>"


def answers_of(text: str) -> dict[str, Any]:
    [packed] = re.findall(r'id="answers">([A-Za-z0-9+/=]+)</script>', text)
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return found


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_run(tmp_path_factory.mktemp("runs") / "small", data={"train_batch_size": 2})
    with (folder / "config.yaml").open("a") as config:
        config.write("agent: my_agent:solve\n")
    return folder


def test_a_report_tells_what_was_trained_and_how_to_repeat_it(run_dir: Path, tmp_path: Path) -> None:
    file = report.write(run_dir, tmp_path / "deep" / "report.html")
    text = file.read_text()
    told = answers_of(text)
    [pair] = told["report"]["pairs"]
    assert [row["rollout_id"] for row in pair["rows"]] == ["val-0", "val-2"]
    assert (pair["before"], pair["after"]) == (0.0, 1.0)
    assert told["report"]["changed"]["data.train_batch_size"] == 2
    assert told["report"]["repeat"] == [f"lightning-rl train --config {run_dir}/config.yaml"]
    assert told["report"]["doctor"]["looked_at"]["rollouts"] == 6
    assert "runs/run/rollouts/val-2/calls/1/1" in told
    plain = text.split('<div id="app">')[1].split("</div>")[0]
    assert "held-out reward: best 1.000 at step 2" in plain  # for whoever opens it without scripts


def test_its_policy_names_its_one_script_and_style_and_lets_nothing_else_run(run_dir: Path, tmp_path: Path) -> None:
    text = report.write(run_dir, tmp_path / "report.html").read_text()
    [code] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    policy = re.findall(r'Security-Policy" content="([^"]+)"', text)[0].replace("&#x27;", "'")
    assert f"script-src '{bundle._digest(code)}'" in policy
    assert f"style-src '{bundle._digest(style)}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "import " not in code.split('"use strict"')[0]
    assert not re.findall(r"^(import|export) ", code, re.MULTILINE)
    assert text.count("<script") == 2  # it and the answers


def test_no_top_level_name_stands_in_two_modules() -> None:
    """They are one script in a report."""
    names = [
        name
        for module in bundle.modules("report.js")
        for name in re.findall(
            r"^(?:export )?(?:async )?(?:function|const|class|let) (\w+)",
            (bundle.STATIC / module).read_text(),
            re.MULTILINE,
        )
    ]
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))


def test_a_task_of_more_rollouts_than_a_page_holds_has_its_first_and_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_LARGEST_PAGE", 6)
    with open_store(tmp_path) as store:
        for step in range(1, 6):
            for k in range(2):
                add_rollout(
                    store, f"s{step}-{k}", [turn("q", "a")], task="one", step=step, group=f"g{step}", reward=step / 5
                )
    report.write(tmp_path, tmp_path / "report.html")
    answers = answers_of((tmp_path / "report.html").read_text())
    [pair] = answers["report"]["pairs"]
    assert [row["rollout_id"][:2] for row in pair["rows"]] == ["s1", "s5"]


def test_text_of_agents_is_never_markup(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for step in (0, 1):
            add_rollout(
                store, f"val-{step}", [turn(HOSTILE, HOSTILE)], mode="val", step=step, reward=float(step), task=HOSTILE
            )
    write_run(tmp_path, metrics=[{"step": 1.0, "val/reward": 1.0}])
    text = report.write(tmp_path, tmp_path / "report.html").read_text()
    assert "<img src=x" not in text
    assert text.count("<script") == 2
    assert answers_of(text)["runs/run/rollouts/val-1"]["task"] == HOSTILE
    run = lrl.Run(tmp_path)
    cell = run.rollout("val-1")._repr_html_()
    run.close()
    assert "<script" not in cell  # all of it is an attribute
    assert 'sandbox="allow-scripts"' in cell


def test_images_are_in_the_file(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for step in (0, 1):
            add_rollout(
                store, f"val-{step}", [with_image()], mode="val", step=step, reward=float(step), task="t", images=[PNG]
            )
    told = answers_of(report.write(tmp_path, tmp_path / "report.html").read_text())
    images = [answer for path, answer in told.items() if "/images/" in path]
    assert images == [f"data:image/png;base64,{base64.b64encode(PNG).decode()}"] * 2


@pytest.mark.long
def test_a_report_that_would_be_too_large_says_what_it_leaves_out(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = report.write(run_dir, tmp_path / "whole.html").stat().st_size
    monkeypatch.setattr(report, "LARGEST", whole - 1)
    told = answers_of(report.write(run_dir, tmp_path / "less.html").read_text())
    assert (told["report"]["pairs"], told["report"]["left_out"]) == ([], 1)
    monkeypatch.setattr(report, "LARGEST", 1000)
    with pytest.raises(report.TooLarge, match="without a single rollout"):
        report.write(run_dir, tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def test_a_run_without_a_store_has_its_curves(tmp_path: Path) -> None:
    write_run(tmp_path, metrics=[{"step": 1.0, "critic/score/mean": 0.5}])
    told = answers_of(report.write(tmp_path, tmp_path / "report.html").read_text())
    assert told["runs/run/summary"]["best"]["value"] == 0.5
    assert told["report"]["pairs"] == []


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="holds no run"):
        report.write(tmp_path, tmp_path / "report.html")


def test_no_report_takes_the_place_of_a_file_of_its_run(run_dir: Path, tmp_path: Path) -> None:
    before = (run_dir / "store.db").read_bytes()
    with pytest.raises(Explained, match=r"store\.db is a file of the run"):
        report.write(run_dir, run_dir / "store.db")
    assert (run_dir / "store.db").read_bytes() == before
    folder = tmp_path / "folder"
    folder.mkdir()
    assert report.write(run_dir, folder) == folder / "report.html"
    assert report.write(run_dir, run_dir / "report.html") == report.write(run_dir, run_dir)  # it may be written anew


def test_the_command_writes_it_into_the_runs_folder(run_dir: Path) -> None:
    words = [sys.executable, "-m", "lightning_rl", "report", str(run_dir)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{run_dir}/report.html (0.")


def test_a_notebook_lists_and_shows_rollouts(run_dir: Path) -> None:
    run = lrl.Run(run_dir)
    assert [row["rollout_id"] for row in run.rollouts(mode="val", limit=1)] == ["val-2"]
    cell = run.rollout("train-2-1")
    assert repr(cell) == f"rollout train-2-1 of {run_dir}"
    assert answers_of(cell.html)["report"] == {"only": "train-2-1"}
    run.close()


def test_a_trainer_leads_to_its_run(tmp_path: Path) -> None:
    assert lrl.Trainer(run_dir=tmp_path).run.run_dir == tmp_path
    with pytest.raises(RuntimeError, match="call fit first"):
        _ = lrl.Trainer().run


def test_the_curve_of_a_notebook_is_numbers_alone() -> None:
    assert curve([]) == ""
    drawn = curve([(1, {"critic/score/mean": 0.25}), (2, {"critic/score/mean": 0.75, "val/reward": 0.5})])
    assert drawn.count("<polyline") == 2
    assert "held-out" in drawn
    assert "step 2" in drawn
