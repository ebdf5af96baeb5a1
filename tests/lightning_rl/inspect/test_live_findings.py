"""What doctor knows is a warning while the run happens, once."""

import threading
from pathlib import Path

import pytest

from lightning_rl.config import compose
from lightning_rl.inspect import live_findings
from lightning_rl.inspect.doctor import Diagnosis
from lightning_rl.inspect.live_findings import Findings
from lightning_rl.inspect.run_stats import Evidence, of_run
from tests.lightning_rl.inspect.runs import metrics_of, open_store, rollout_record, step_of, write_run

DEAD = {"critic__score__mean": 0.0, "critic__score__max": 0.0, "critic__score__min": 0.0}


def alike(step: int) -> list[object]:
    return [rollout_record(f"r{step}-{k}", f"g{step}", 0.0) for k in range(2)]


def test_steps_of_one_reward_are_warned_of_once_and_the_run_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    findings = Findings(tmp_path, compose({}), {})
    history = []
    for step in range(1, 7):
        findings.add(step_of(step, *alike(step)), "")
        history.append(metrics_of(step, **DEAD))
        findings.look(history)
        if step == 2:
            assert not caplog.messages, "by chance"
    dead, same = [text for text in caplog.messages if "store" not in text]
    assert dead.startswith("step 3: stops learning: every reward of all 3 steps is 0: there is nothing to learn from. ")
    assert dead.endswith(f"more with `lightning-rl doctor {tmp_path}`")
    assert "100% of 3 groups have rewards that are all the same" in same


def test_the_store_is_looked_at_now_and_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path):
        pass
    history = [metrics_of(step) for step in range(1, 9)]
    write_run(tmp_path, metrics=[metrics_of(step, **DEAD) for step in range(1, 9)], config={})
    findings = Findings(tmp_path, compose({}), {})
    for steps in (3, 5, 6, 7):
        findings.look(history[:steps])
    assert not caplog.messages
    findings.look(history)
    assert [text for text in caplog.messages if "every reward of all 8 steps is 0" in text]


def test_a_long_run_is_looked_at_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def diagnose(evidence: Evidence) -> Diagnosis:
        looked.append(len(evidence.metrics))
        return Diagnosis(run_dir="", looked_at={}, findings=[])

    monkeypatch.setattr(live_findings, "_EACH", 8)
    monkeypatch.setattr(live_findings, "diagnose", diagnose)
    findings, history = Findings(tmp_path, compose({}), {}), []
    for step in range(1, 65):
        history.append(metrics_of(step))
        findings.look(history)
    assert looked == [*range(3, 17), 18, 20, 22, 24, 27, 30, 32, 36, 40, 45, 48, 54, 56, 63, 64]
    looked.clear()
    findings.look([{"step": float(step), "rollouts/rows": 8.0} for step in range(1, 9)])  # nobody gives a reward
    findings.look([{"step": float(step), "val/reward": 0.5} for step in range(1, 9)])
    assert looked == [8]


def test_the_store_of_a_server_elsewhere_is_read_behind_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose({})
    dead = of_run(tmp_path, config, [metrics_of(step, **DEAD) for step in range(1, 9)], {})
    (tmp_path / "server.url").write_text("http://127.0.0.1:1")
    answers, looks = threading.Event(), list[Path]()

    def gather(run_dir: Path) -> Evidence:
        looks.append(run_dir)
        assert answers.wait(60)
        return dead

    monkeypatch.setattr(live_findings, "gather", gather)
    findings, history = Findings(tmp_path, config, {}), [metrics_of(step) for step in range(1, 17)]
    for steps in (4, 5, 8):
        findings.look(history[:steps])
    assert not caplog.messages, "the server does not answer"
    answers.set()
    [thread] = [each for each in threading.enumerate() if each.name == "the doctor's look"]
    thread.join(60)
    findings.look(history[:9])
    assert [text for text in caplog.messages if "every reward of all 8 steps is 0" in text]
    assert looks == [tmp_path], "one look at a time"


def test_what_gets_worse_is_told_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    findings = Findings(tmp_path, compose({}), {})
    differ = [rollout_record(f"s{k}", "h", float(k), 1.0) for k in range(2)]
    findings.add(step_of(1, *alike(1), *differ), "")
    rows = [metrics_of(step) for step in (1, 2, 3)]
    findings.look(rows)
    findings.look(rows)
    for step in range(2, 21):
        findings.add(step_of(step, *alike(step)), "")
    findings.look(rows)
    assert [text.split(": ")[1] for text in caplog.messages] == ["slows learning", "stops learning"]
