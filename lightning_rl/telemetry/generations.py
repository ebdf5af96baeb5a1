"""What was sampled, as text under verl's names: a file for each step, a line for each row of its rollouts.

For people, and for viewers made for verl's files; nothing here reads them. The store has the same rollouts whole.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.files import write_whole
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer


class Generations:
    """Writes `STEP.jsonl` into `folder`, which is made; `tokenizer` is the folder of the policy's."""

    def __init__(self, folder: str | Path, tokenizer: Path) -> None:
        self._folder = Path(folder).expanduser()
        self._tokenizer_folder = tokenizer

    def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Write the rollouts of a step, in the place of what an earlier session wrote for it.

        Each line has `input` (the first prompt of the row) and `output` (the rest of it, with what tools and users
        said), without special tokens; `gts` (the task's `reward_model.ground_truth`), `score` (what the rollout counts
        with), `step`, `request_id` (the rollout's), and its named rewards. A rollout that made no call has a line
        without texts.
        """
        lines = [msgspec.json.encode(line) + b"\n" for each in trajectories for line in self._lines(step, each)]
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"{step}.jsonl", b"".join(lines))

    def _lines(self, step: int, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
        fields = {
            "gts": _ground_truth(trajectory.task),
            "score": trajectory.reward,
            "step": step,
            "request_id": trajectory.rollout_id,
        }
        taken = {*fields, "input", "output"}
        more = {name: value for name, value in trajectory.rewards.named.items() if name not in taken}
        for row, leaf in zip(trajectory.rows, trajectory.forest.leaves(), strict=True):
            prompt = len(leaf.path()[0].call.prompt_ids)
            texts = {"input": self._text(row.token_ids[:prompt]), "output": self._text(row.token_ids[prompt:])}
            yield texts | fields | more
        if not trajectory.rows:
            yield {"input": "", "output": ""} | fields | more

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    @functools.cached_property
    def _tokenizer(self) -> FastTokenizer:
        return FastTokenizer(self._tokenizer_folder)


def _ground_truth(task: Any) -> Any:
    held = task.get("reward_model") if isinstance(task, Mapping) else None
    return held.get("ground_truth") if isinstance(held, Mapping) else None
