"""`make test-gpu`: the parts one after the other, each for a limited time, and `gpu-report.md` about all of them.

Invariant: a part that fails or hangs does not keep the others from running, nor the report from being written. The
status is 0 only where every part passed or says why it was skipped; without a GPU no part runs, and it is 2.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tests.gpu.machine import facts, used_memory, without_gpu

ROOT = Path(__file__).parents[2]
_TAIL_LINES: Final = 40
_LOOK_SECONDS: Final = 0.5
_TRAIN_STEP = (sys.executable, "benchmarks/train_step.py", "--device", "cuda", "--prompts", "256", "--tries", "1")
_RECIPES = (sys.executable, "benchmarks/recipes.py")
_PYTEST = (sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Part:
    """What is run, for so many seconds at most."""

    name: str
    command: Sequence[str]
    seconds: float


PARTS: Final = [
    Part("the trainer on the device", (*_PYTEST, "tests/gpu/test_devices.py"), 240),
    Part("vLLM: each transfer, asleep and awake, a run", (*_PYTEST, "tests/gpu/test_vllm.py"), 390),
    Part("SGLang: its tokens, its weights, a run", (*_PYTEST, "tests/sglang/test_engine.py"), 290),
    Part("the quickstart learns", (*_PYTEST, "tests/gpu/test_learning.py"), 180),
    Part("what an update of 1.5B takes on 24 GB", (*_RECIPES, "--recipes", "1.5B-24", "--limit", "22.5"), 180),
    Part("how long an update takes", _TRAIN_STEP, 150),
    Part("Spider with Qwen2.5-Coder, two steps", (*_PYTEST, "tests/gpu/test_spider.py"), 360),
]


@dataclass(frozen=True)
class Outcome:
    """What came of a part: `memory` is the most MiB in use on one GPU meanwhile, `said` the end of what it printed."""

    part: Part
    verdict: Literal["passed", "failed", "skipped", "timed out"]
    seconds: float
    memory: int
    said: str


def run(part: Part, memory: Callable[[], int] = used_memory) -> Outcome:
    """Run a part in a process group of its own, which is ended with it."""
    began, most = time.monotonic(), 0
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        try:
            process = subprocess.Popen(
                part.command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            return Outcome(part, "failed", 0, 0, f"{part.command[0]}: {error.strerror}")
        try:
            while process.poll() is None and time.monotonic() < began + part.seconds:
                most = max(most, memory())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_SECONDS)
            status = process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        printed = log.read().decode(errors="replace")
    said = "\n".join(printed.splitlines()[-_TAIL_LINES:]).replace(str(Path.home()), "~")
    return Outcome(part, _verdict(status, printed), time.monotonic() - began, most, said)


def _verdict(status: int | None, printed: str) -> Literal["passed", "failed", "skipped", "timed out"]:
    if status is None:
        return "timed out"
    if status:
        return "failed"
    last = printed.rstrip().rpartition("\n")[2]  # of pytest: "2 skipped in 0.1s"
    return "skipped" if re.search(r"\d+ skipped", last) and not re.search(r"\d+ passed", last) else "passed"


def report(machine: Sequence[tuple[str, str]], outcomes: Sequence[Outcome], missing: str | None = None) -> str:
    """The report as Markdown."""
    lines = ["# What a GPU made of lightning_rl", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in machine]
    if missing:
        return "\n".join([*lines, "", f"**Nothing was run**: {missing}.", ""])
    lines += ["", "| part | | seconds | GPU memory in use at most, MiB |", "|---|---|---|---|"]
    for one in outcomes:
        lines.append(f"| {one.part.name} | {one.verdict} | {one.seconds:.0f} | {one.memory or ''} |")
    for one in outcomes:
        limit = f" after {one.part.seconds:.0f} s" if one.verdict == "timed out" else ""
        lines += ["", f"## {one.part.name}: {one.verdict}{limit}", "", f"`{_shown(one.part.command)}`", ""]
        lines += ["```text", one.said.replace("```", "'''"), "```"]
    return "\n".join([*lines, ""])


def _shown(command: Sequence[str]) -> str:
    return " ".join("python" if word == sys.executable else word for word in command)


def main(words: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the parts, write the report, and say what came of them; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("gpu-report.md"), help="where the report is written")
    parser.add_argument("--part", action="append", help="only parts whose names have this in them; may be repeated")
    given = parser.parse_args(words)
    machine, missing = facts(os.environ.get("VLLM_PYTHON")), without_gpu()
    if missing:
        given.to.write_text(report(machine, [], missing))
        print(f"make test-gpu needs a GPU: {missing}. {given.to} says what this machine is.", file=sys.stderr)
        return 2
    chosen = [part for part in parts if not given.part or any(name in part.name for name in given.part)]
    if not chosen:
        print(f"no part is called so; there are: {'; '.join(part.name for part in parts)}", file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    for part in chosen:
        print(f"{part.name} (at most {part.seconds:.0f} s) ...", flush=True)
        outcomes.append(run(part))
        print(f"  {outcomes[-1].verdict} after {outcomes[-1].seconds:.0f} s", flush=True)
        given.to.write_text(report(machine, outcomes))  # an interrupt leaves what is known so far
    bad = [one.part.name for one in outcomes if one.verdict in ("failed", "timed out")]
    print(f"{given.to}: " + (f"not passed: {'; '.join(bad)}" if bad else "all passed or skipped, with reasons"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
