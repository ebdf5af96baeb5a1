"""placeholder"""


def run() -> None:
    """Write a report."""
