"""The page on batches says what its examples print."""

from tests.pages import check_examples


def test_its_examples_print_what_it_says() -> None:
    assert check_examples("docs/concepts/batch.md") == 2
