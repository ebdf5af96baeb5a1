"""How many random examples a property is tried with: a quarter of those of `make test-all`, which sets EXAMPLES=all."""

import os


def examples(most: int) -> int:
    """`most` for a release, and for every other run a quarter of them."""
    return most if os.environ.get("EXAMPLES") == "all" else max(min(most, 5), most // 4)
