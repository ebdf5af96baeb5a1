"""A tool by decorator: what a dozen is.

A function has no state, so what it gives back is all there is: the text that the model reads, and the reward of the
call. Looking something up costs a little.
"""

from typing import Literal

from lightning_rl.tools import function_tool

PIECES = {"dozen": 12, "pairs of": 2}
COST = 0.02  # of a call


@function_tool
def pieces(amount: int, unit: Literal["dozen", "pairs of"]) -> tuple[str, float]:
    """Count pieces.

    Args:
        amount: number
        unit: unit
    """
    return str(amount * PIECES[unit]), -COST
