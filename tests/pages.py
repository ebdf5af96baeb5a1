"""Pages whose examples run: each block of Python, one after the other, prints the block of text below it."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parents[1]


def check_examples(page: str) -> int:
    """Run the page's blocks in one namespace; how many there were."""
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "page"}
    printed, ran = "", 0
    for language, block in blocks:
        if language == "python":
            out = io.StringIO()
            with redirect_stdout(out):
                exec(compile(block, page, "exec"), names)
            printed, ran = out.getvalue(), ran + 1
        else:
            assert printed == block, f"{page} says\n{block}and the code above it prints\n{printed}"
    return ran
