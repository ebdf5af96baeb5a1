"""The reward: 1 where the number after `####` is the answer, as GSM8K writes it."""

import re


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    """1.0 for the right number behind the last `####` of the last answer, else 0.0."""
    found = re.findall(r"####\s*(-?\d+)", solution_str)
    return float(found[-1:] == [ground_truth])
