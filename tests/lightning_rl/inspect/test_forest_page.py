"""`docs/concepts/forest.md` shows what `explain` draws today, and knows every cause and reason."""

import re
from pathlib import Path

from lightning_rl_adapters import semconv
from tests.lightning_rl.inspect.pictures import BLOCKS

PAGE = (Path(__file__).parents[3] / "docs" / "concepts" / "forest.md").read_text()


def test_the_pages_pictures_are_what_explain_draws() -> None:
    assert re.findall(r"^```text\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL) == BLOCKS


def test_the_pages_table_has_every_cause_of_a_fork() -> None:
    table = PAGE[PAGE.index("| cause |") :]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) != []
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {cause.value for cause in semconv.ForkCause}


def test_every_picture_names_a_cause_of_the_closed_list() -> None:
    named = re.findall(r"begins anew: (\w+)", PAGE)
    assert named
    assert set(named) <= {cause.value for cause in semconv.ForkCause}
