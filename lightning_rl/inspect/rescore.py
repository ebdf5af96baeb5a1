"""What the newest weights of a run make of a recorded call: its answer's logprobs, teacher forced, on the CPU.

Invariant: the same numbers as the trainer would compute: over the whole path of the call, at its own temperature.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from lightning_rl.errors import Explained
from lightning_rl.inference.load import load_model
from lightning_rl.training import checkpoint
from lightning_rl.vision import PlacedImage, vision_of
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.forest import check_held


class NoWeights(Explained):
    """There is nothing to compute a logprob with, or of."""


def newest(run_dir: Path) -> Path:
    """The run's newest checkpoint. Raises NoWeights."""
    folder = checkpoint.latest(run_dir / "checkpoints")
    if folder is None:
        raise NoWeights(
            f"{run_dir.resolve()} holds no checkpoint: one is written at the end, and every trainer.save_freq steps"
        )
    return folder


def log_probs(folder: Path, path: Sequence[Call], media: Mapping[str, bytes] = MappingProxyType({})) -> list[float]:
    """The logprobs of the tokens that the last call of `path` (root first) sampled; `media` has the images that the
    path shows, by their SHA-256.

    Raises NoWeights where the tokens of the path are not all known, or none was sampled by the policy.
    """
    call = path[-1]
    if unknown := next((each for each in path if not each.exact), None):
        raise NoWeights(f"call {call.call_id} has no logprobs now: the token ids of call {unknown.call_id} are unknown")
    if not call.trainable:
        raise NoWeights(f"call {call.call_id} is of model {call.model!r}, which this run does not train")
    if not call.response_ids:
        return []
    token_ids = [token for each in path for token in (*each.prompt_ids, *each.response_ids)]
    sampled = len(call.response_ids)
    # Recorded as `greedy` or `raw`, logprobs are those of temperature 1.
    temperature = call.temperature if call.logprob_kind == "sampled" else 1.0
    model = load_model(folder)
    vision = vision_of(folder, model)
    with torch.inference_mode():
        ids = torch.tensor([token_ids])
        images = _images(path, media)
        options = {"use_cache": False, "logits_to_keep": sampled + 1}
        output = vision.run(model, ids, [images], **options) if vision and images else model(input_ids=ids, **options)
        logits = output.logits[0, :-1].float()
        logprobs = torch.log_softmax(logits / temperature, dim=-1).gather(-1, ids[0, -sampled:, None]).squeeze(-1)
    values: list[float] = logprobs.tolist()
    return values


def _images(path: Sequence[Call], media: Mapping[str, bytes]) -> list[PlacedImage]:
    """The images of the whole path."""
    images: list[PlacedImage] = []
    length = 0
    for each in path:
        check_held(each.media, media, f"call {each.call_id}")
        images += [PlacedImage(one.start + length, one.length, one.sha256, media[one.sha256]) for one in each.media]
        length += len(each.prompt_ids) + len(each.response_ids)
    return images
