"""Real runs for the browser's tests: each trains for a few steps in a folder.

python -m tests.browser.real_runs quickstart|graph|images FOLDER
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GRAPH = Path(__file__).parent / "branching_graph.py"
CHECKPOINT = ROOT / "examples" / "sql_agent" / "checkpoint"


def quickstart(folder: Path, steps: int = 10) -> None:
    """The tutorial, for a few steps."""
    from lightning_rl.cli import quickstart as tutorial

    tutorial.run(seed=0, steps=steps, run_dir=folder)


def graph(folder: Path) -> None:
    """A LangGraph graph that whose conversations branch."""
    import lightning_rl as lrl

    config: dict[str, Any] = {
        "data": {"train_batch_size": 2, "max_response_length": 16},
        "actor_rollout_ref": {
            "model": {"path": str(CHECKPOINT)},
            "rollout": {"n": 4, "renderer": "qwen3", "multi_turn": {"langgraph": {"path": f"{GRAPH}:graph"}}},
        },
        "trainer": {"total_training_steps": 2},
    }
    tasks = [{"question": f"{what}: size id\nHow many {what}?"} for what in ("cars", "lakes", "birds", "ships")]
    lrl.Trainer(n_runners=2, run_dir=folder).fit(lrl.PPO(config), tasks)


def images(folder: Path) -> None:
    """An agent that shows its model images."""
    import lightning_rl as lrl
    from tests import seeing
    from tests.e2e.test_images import looker

    model = seeing.make_folder(folder.with_name(f"{folder.name}-model"))
    config: dict[str, Any] = {
        "actor_rollout_ref": {
            "model": {"path": str(model)},
            "rollout": {"n": 2, "max_model_len": 600},
            "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-3}},
        },
        "data": {"train_batch_size": 2},
        "trainer": {"total_training_steps": 1},
    }
    lrl.Trainer(looker, n_runners=2, run_dir=folder).fit(lrl.PPO(config), [{"seed": seed} for seed in range(4)])


def made(kind: str, folder: Path) -> Path:
    """The run of this kind in `folder`, made in a process of its own; where REAL_RUNS names a folder, the one that is
    kept there from an earlier time."""
    if kept := os.environ.get("REAL_RUNS"):
        folder = Path(kept) / folder.name
        if (folder / "finished.json").exists():
            return folder
    words = [sys.executable, "-m", "tests.browser.real_runs", kind, str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


if __name__ == "__main__":
    {"quickstart": quickstart, "graph": graph, "images": images}[sys.argv[1]](Path(sys.argv[2]))
