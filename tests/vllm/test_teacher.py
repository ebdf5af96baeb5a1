"""A teacher on a real vLLM server says what the same weights say in the trainer's process."""

import pytest

from lightning_rl.inference.load import vocabulary_size
from lightning_rl.training.teacher import ServedTeacher
from tests.served_teachers import compare_scores, compare_tokenizer, row
from tests.vllm.server import CHECKPOINT, CONTEXT, Server


@pytest.mark.smoke
@pytest.mark.parametrize("top", [0, 5])
def test_scores_are_those_of_the_weights(raw: Server, top: int) -> None:
    compare_scores(raw.url, CHECKPOINT, CONTEXT - 1, top)


def test_its_tokenizer_is_compared(raw: Server) -> None:
    compare_tokenizer(raw.url, CHECKPOINT)


def test_a_row_that_does_not_fit_is_an_error_that_says_what_to_change(raw: Server) -> None:
    with pytest.raises(Exception, match="vLLM at") as told:
        ServedTeacher("big", [raw.url], vocabulary_size(CHECKPOINT)).score([row(CHECKPOINT, CONTEXT + 1, 0)], 0)
    assert "--max-model-len" in " ".join(told.value.__notes__)
