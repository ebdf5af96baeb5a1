"""A teacher on a real SGLang server says what the same weights say in the trainer's process."""

import pytest

from lightning_rl.inference.load import vocabulary_size
from lightning_rl.inference.sglang import ScoresRefused
from lightning_rl.training.teacher import ServedTeacher
from tests.served_teachers import compare_scores, compare_tokenizer, row
from tests.sglang.conftest import CHECKPOINT, ON_GPU

CONTEXT = 512  # of the tutorial's model


@pytest.mark.skipif(ON_GPU, reason="in bfloat16 they are further apart")
@pytest.mark.parametrize("top", [0, 5])
def test_scores_are_those_of_the_weights(url: str, top: int) -> None:
    compare_scores(url, CHECKPOINT, CONTEXT - 10, top)


def test_its_tokenizer_is_compared(url: str) -> None:
    compare_tokenizer(url, CHECKPOINT)


def test_a_row_that_does_not_fit_is_an_error_that_says_what_to_change(url: str) -> None:
    with pytest.raises(ScoresRefused, match="SGLang at") as told:
        ServedTeacher("big", [url], vocabulary_size(CHECKPOINT)).score([row(CHECKPOINT, CONTEXT + 1, 0)], 0)
    assert "--context-length" in " ".join(told.value.__notes__)
