"""`make test-gpu` without a GPU: the report of parts that pass, fail, hang and are skipped; what its files import; and
its checks, played on the CPU."""

import importlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_rl.training.layers import flex
from tests.gpu import checks, machine, report
from tests.gpu.report import PARTS, Part
from tests.lightning_rl.training.layers.blocks import by_blocks

ROOT = Path(__file__).parents[1]


def python(name: str, program: str, seconds: float = 60) -> Part:
    return Part(name, (sys.executable, "-c", program), seconds)


GOOD = python("a good one", "print('went well')")
BAD = python("a bad one", "import sys; print('CUDA error: no kernel image'); sys.exit(3)")
SLOW = python("a slow one", "import time; print('begun', flush=True); time.sleep(600)", 1.5)
SKIPPED = python("one that is left out", "print('SKIPPED: nccl goes between GPUs'); print('1 skipped in 0.01s')")


def test_a_part_that_fails_or_hangs_does_not_keep_the_others_from_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "without_gpu", lambda: None)
    absent = Part("one without a program", ("/nowhere/python",), 5)
    written = tmp_path / "gpu-report.md"
    assert report.main(["--to", str(written)], [BAD, SLOW, absent, SKIPPED, GOOD]) == 1
    told = written.read_text()
    verdicts = re.findall(r"^## (.+)$", told, re.M)
    assert verdicts == [
        "a bad one: failed",
        "a slow one: timed out after 2 s",
        "one without a program: failed",
        "one that is left out: skipped",
        "a good one: passed",
    ]
    for said in ("no kernel image", "begun", "/nowhere/python: No such file", "nccl goes between GPUs", "went well"):
        assert said in told
    assert "not passed: a bad one; a slow one; one without a program" in capsys.readouterr().out


def test_where_all_pass_or_are_skipped_the_status_is_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "without_gpu", lambda: None)
    written = tmp_path / "r.md"
    assert report.main(["--to", str(written)], [GOOD, SKIPPED]) == 0
    assert report.main(["--to", str(written), "--part", "good"], [GOOD, BAD]) == 0
    assert "a bad one" not in written.read_text()
    assert report.main(["--to", str(written), "--part", "no such"], [GOOD]) == 2


def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    found = report.run(python("it has a child", program, 2))
    pid = int(found.said.split()[0])
    assert found.verdict == "timed out"
    ask = ["ps", "-o", "stat=", "-p", str(pid)]
    until, state = time.monotonic() + 30, "R"
    while state[:1] not in ("", "Z") and time.monotonic() < until:  # one that is killed dies when it gets a core
        state = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    assert state[:1] in ("", "Z")  # a niced one is ZN


def test_the_most_memory_of_a_part_is_told() -> None:
    used = iter([100, 900, 300] + [200] * 1000)
    found = report.run(python("one that takes memory", "import time; time.sleep(2)"), lambda: next(used))
    assert found.memory == 900


def test_the_home_folder_is_not_told() -> None:
    found = report.run(python("one with a path", "from pathlib import Path; print(Path.home() / 'x')"))
    assert found.said == "~/x"


@pytest.mark.skipif(machine.without_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.report", "--to", "/dev/stdout"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "make test-gpu needs a GPU: there is no GPU: nvidia-smi" in done.stderr
    assert "**Nothing was run**" in done.stdout
    assert f"| torch | {torch.__version__} |" in done.stdout


def test_why_a_gpu_is_of_no_use_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\ncase $1 in *driver*) echo '0, NVIDIA L4, 23034, 570.86';; *used*) echo 512;; *) echo 0;; esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA: install a CUDA build" in str(machine.without_gpu())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "look at the driver's version" in str(machine.without_gpu())
    assert ("GPU 0", "NVIDIA L4, 23034 MiB, driver 570.86") in machine.facts()
    assert machine.used_memory() == 512


@pytest.mark.long
@pytest.mark.skipif(machine.without_gpu() is None, reason="there is a GPU")
def test_a_part_of_its_own_is_skipped_here_and_says_why() -> None:
    [learning] = [part for part in PARTS if "quickstart" in part.name]
    found = report.run(learning)
    assert found.verdict == "skipped", found.said
    assert "there is no GPU: nvidia-smi is not there, or finds none" in found.said


def test_its_parts_are_there_and_take_less_than_half_an_hour() -> None:
    assert sum(part.seconds for part in PARTS) < 30 * 60
    files = [word for part in PARTS for word in part.command if word.endswith(".py")]
    assert len(files) == len(PARTS)
    assert all((ROOT / file).is_file() for file in files)
    tests = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")} | {
        "tests/sglang/test_engine.py"
    }
    assert tests == {file for file in files if file.startswith("tests/")}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "tests/gpu").glob("test_*.py")))
def test_what_they_import_is_there(name: str) -> None:
    assert any(one.startswith("test_") for one in vars(importlib.import_module(f"tests.gpu.{name}")))


def test_attention_is_compared_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "attend", by_blocks)
    assert max(checks.differences_of_attention("cpu", torch.float32, 4, 2, 16).values()) < 1e-5
    monkeypatch.setattr(flex, "attend", lambda *given: by_blocks(*given) * 1.1)
    assert max(checks.differences_of_attention("cpu", torch.float32, 4, 2, 16).values()) > 0.05


def test_an_update_is_compared_as_on_a_gpu() -> None:
    log_probs, weights = checks.trained("cpu")
    same, others = checks.trained("cpu"), checks.trained("cpu", "actor_rollout_ref.actor.optim.lr=1e-2")
    assert all(torch.equal(a, b) for a, b in zip(log_probs, same[0], strict=True))
    assert any(not torch.equal(weight, others[1][name]) for name, weight in weights.items())
