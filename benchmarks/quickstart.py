"""The quickstart over several seeds: held-out accuracy by step, wall-clock time, and where the time goes.

    python benchmarks/quickstart.py --seeds 0 1 2 --out runs/benchmark

Writes one `seed-<n>/metrics.jsonl` per seed, `quickstart.png` with all curves, and prints a table.

    python benchmarks/quickstart.py --starts 3 --busy 6

measures the start alone: seconds to the first line, and to the end of the first step, beside so many endless loops.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from lightning_rl.telemetry.metrics.jsonl import read

PARTS = ("gen", "adv", "old_log_prob", "update_actor", "update_weights")


def run(seed: int, out: Path, steps: int | None) -> tuple[float, list[dict[str, float]]]:
    """One quickstart in a process of its own; its seconds, process start included, and its metrics."""
    folder = out / f"seed-{seed}"
    command = [sys.executable, "-m", "lightning_rl", "quickstart", "--seed", str(seed), "--run-dir", str(folder)]
    started = time.monotonic()
    subprocess.run(command + (["--steps", str(steps)] if steps else []), check=True)
    return time.monotonic() - started, read(folder / "metrics.jsonl")


def start(folder: Path, busy: int) -> tuple[float, float]:
    """Seconds to the first line that a quickstart prints, and to the end of its first step."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    command = [sys.executable, "-m", "lightning_rl", "quickstart", "--steps", "1", "--run-dir", str(folder)]
    started = time.monotonic()
    seconds: list[float] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as quickstart:
        assert quickstart.stdout is not None
        for line in quickstart.stdout:
            if not seconds or line.startswith("step 1/"):
                seconds.append(time.monotonic() - started)
    for loop in loops:
        loop.kill()
        loop.wait()
    first, step = seconds
    return first, step


def draw(histories: dict[int, list[dict[str, float]]], path: Path) -> None:
    """Held-out accuracy over steps, one line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    for seed, history in histories.items():
        rows = [row for row in history if "val/reward" in row]
        axes.plot([r["step"] for r in rows], [r["val/reward"] for r in rows], marker="o", label=f"seed {seed}")
    axes.set(xlabel="step", ylabel="held-out accuracy, sampled", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run the seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs") / "benchmark-quickstart")
    parser.add_argument("--starts", type=int, help="measure so many starts, and nothing else")
    parser.add_argument("--busy", type=int, default=0, help="endless loops beside the starts")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.starts:
        found = [start(arguments.out / f"start-{n}", arguments.busy) for n in range(arguments.starts)]
        lines, steps = (median(column) for column in zip(*found, strict=True))
        print(f"first line after {lines:.2f} s, first step after {steps:.2f} s (medians of {len(found)})")
        return
    results = {seed: run(seed, arguments.out, arguments.steps) for seed in arguments.seeds}
    draw({seed: history for seed, (_, history) in results.items()}, arguments.out / "quickstart.png")
    for seed, (seconds, history) in results.items():
        accuracy = " ".join(f"{row['step']:.0f}:{row['val/reward']:.3f}" for row in history if "val/reward" in row)
        print(f"seed {seed}: {seconds:.0f} s in all; held-out accuracy by step {accuracy}")
        steps = [row for row in history if "timing_s/step" in row]
        parts = {part: median(row[f"timing_s/{part}"] for row in steps) for part in PARTS}
        validation = sum(row.get("timing_s/testing", 0.0) for row in history)
        print(
            f"  step {median(row['timing_s/step'] for row in steps):.2f} s (median) = "
            + " + ".join(f"{part} {value:.2f}" for part, value in parts.items())
            + f"; validation {validation:.1f} s in all; {median(r['perf/calls_per_s'] for r in steps):.0f} calls/s"
        )


if __name__ == "__main__":
    main()
