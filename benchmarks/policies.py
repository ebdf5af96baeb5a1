"""Two parts of one agent as two policies, as two adapters over one base, and as one shared policy: what each learns.

    python benchmarks/policies.py [--seeds 3] [--steps 40] [--kinds two adapters one]

The game is that of `examples/describer_builder`: its parts need opposite answers to equal prompts. Prints, for each way
and seed, the share of games that are won in the last quarter of the steps, the seconds of a step, and the peak memory
of the trainer's process, engines included.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
ONE_RUN = """
import json, resource, sys
from pathlib import Path

import lightning_rl as lrl
from examples.describer_builder.train import train

lrl.PPO.console = False
kind, model, folder, seed, steps = sys.argv[1:]
ppo = train(Path(folder), kind, Path(model), seed=int(seed), steps=int(steps))
rows = [row for row in ppo.history if "critic/score/mean" in row]
last = rows[-len(rows) // 4 :]
print(json.dumps({
    "won": sum(row["critic/score/mean"] for row in last) / len(last),
    "seconds": sorted(row["timing_s/step"] for row in rows)[len(rows) // 2],
    "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def run(kind: str, model: Path, folder: Path, seed: int, steps: int) -> dict[str, float]:
    """One run in a process of its own."""
    command = [sys.executable, "-c", ONE_RUN, kind, str(model), str(folder), str(seed), str(steps)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Every way with every seed."""
    from examples.describer_builder.train import KINDS
    from examples.describer_builder.warm_start import make_model

    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    asked = parser.parse_args()
    with TemporaryDirectory() as place:
        model = make_model(Path(place) / "model")
        for kind in asked.kinds:
            found = []
            for seed in range(asked.seeds):
                found.append(run(kind, model, Path(place) / f"{kind}-{seed}", seed, asked.steps))
                print(f"{kind:<9} seed {seed}  {found[-1]}", flush=True)
            won, seconds, mib = (median(one[name] for one in found) for name in ("won", "seconds", "mib"))
            print(f"{kind:<9} median  won {won:.2f}  {seconds:.2f} s a step  {mib:.0f} MiB", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
