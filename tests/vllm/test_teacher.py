"""A teacher on a real vLLM server says what the same weights say in the trainer's process."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from lightning_rl.inference.load import load_model, vocabulary_size
from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.teacher import FrozenTeacher, ServedTeacher, TeacherRefused
from tests.vllm import reference
from tests.vllm.server import CHECKPOINT, CONTEXT, Server


def row(tokens: int, seed: int) -> TrainingSequence:
    """Random tokens, the second half of them trained."""
    vocabulary = vocabulary_size(CHECKPOINT)
    trained = np.arange(tokens // 2, tokens)
    each = np.ones(len(trained), np.float32)
    token_ids = np.random.default_rng(seed).integers(0, vocabulary, tokens)
    return TrainingSequence(0, token_ids, trained, -each, each, each)


@pytest.mark.parametrize("top", [0, 5])
def test_scores_are_those_of_the_weights(raw: Server, top: int) -> None:
    rows = [row(tokens, tokens) for tokens in (2, 17, 100, CONTEXT - 1)]
    vocabulary = vocabulary_size(CHECKPOINT)
    served = ServedTeacher("big", [raw.url], vocabulary).score(rows, top)
    own = FrozenTeacher(load_model(CHECKPOINT), 0, vocabulary).score(rows, top)
    for found, expected in zip(served, own, strict=True):
        assert found.log_probs == pytest.approx(expected.log_probs, abs=reference.TOLERANCE)
        if top:
            assert found.top_log_probs == pytest.approx(expected.top_log_probs, abs=reference.TOLERANCE)
            assert found.top_ids is not None
            assert expected.top_ids is not None
            assert np.mean(found.top_ids == expected.top_ids) > 0.99  # equal but where two are as likely


def test_its_tokenizer_is_compared(raw: Server) -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    teacher = ServedTeacher("big", [raw.url], vocabulary_size(CHECKPOINT))
    ids = tokenizer.encode("Hello, world!", add_special_tokens=False).ids
    teacher.check([("Hello, world!", ids)])
    with pytest.raises(TeacherRefused, match=f"the server at {raw.url} writes 'Hello, world!' as the tokens"):
        teacher.check([("Hello, world!", [*ids, 1])])


def test_a_row_that_does_not_fit_is_an_error_that_says_what_to_change(raw: Server) -> None:
    with pytest.raises(Exception, match="vLLM at") as told:
        ServedTeacher("big", [raw.url], vocabulary_size(CHECKPOINT)).score([row(CONTEXT + 1, 0)], 0)
    assert "--max-model-len" in " ".join(told.value.__notes__)
