"""`docs/works-with.md` is what the table says."""

from tests.works_with.page import PAGE, page


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.works_with.page`"
