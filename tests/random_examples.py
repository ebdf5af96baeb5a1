"""How many random examples a property is tried with: a third of what `make test-all` tries, which sets EXAMPLES=all."""

import os


def examples(most: int) -> int:
    """`most` for a release, and for every other run a third of them."""
    return most if os.environ.get("EXAMPLES") == "all" else max(min(most, 5), most // 3)
