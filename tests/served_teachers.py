"""What a teacher on a server says, beside the same weights in this process."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from lightning_rl.inference.load import load_model, vocabulary_size
from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.teacher import FrozenTeacher, ServedTeacher, TeacherRefused

TOLERANCE = 1e-3


def row(checkpoint: Path, tokens: int, seed: int) -> TrainingSequence:
    """Random tokens, the second half of them trained."""
    trained = np.arange(tokens // 2, tokens)
    each = np.ones(len(trained), np.float32)
    token_ids = np.random.default_rng(seed).integers(0, vocabulary_size(checkpoint), tokens)
    return TrainingSequence(0, token_ids, trained, -each, each, each)


def compare_scores(url: str, checkpoint: Path, longest: int, top: int) -> None:
    """Rows of several lengths: what the server says of them is what the weights do."""
    rows = [row(checkpoint, tokens, tokens) for tokens in (2, 17, 100, longest)]
    vocabulary = vocabulary_size(checkpoint)
    served = ServedTeacher("big", [url], vocabulary).score(rows, top)
    own = FrozenTeacher(load_model(checkpoint), 0, vocabulary).score(rows, top)
    for found, expected in zip(served, own, strict=True):
        assert found.log_probs == pytest.approx(expected.log_probs, abs=TOLERANCE)
        if top:
            assert found.top_log_probs == pytest.approx(expected.top_log_probs, abs=TOLERANCE)
            assert found.top_ids is not None
            assert expected.top_ids is not None
            assert np.mean(found.top_ids == expected.top_ids) > 0.99  # equal but where two are as likely


def compare_tokenizer(url: str, checkpoint: Path) -> None:
    """A server with the policy's tokenizer is taken, one that writes a text with other tokens is not."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    teacher = ServedTeacher("big", [url], vocabulary_size(checkpoint))
    ids = tokenizer.encode("Hello, world!", add_special_tokens=False).ids
    teacher.check([("Hello, world!", ids)])
    with pytest.raises(TeacherRefused, match=f"the server at {url} writes 'Hello, world!' as the tokens"):
        teacher.check([("Hello, world!", [*ids, 1])])
