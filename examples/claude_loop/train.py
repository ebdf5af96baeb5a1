"""Train the loop as it is: only the base URL of Anthropic's SDK is ours.

Run it with `python -m examples.claude_loop.train`. Model and hyperparameters are the calculator's.
"""

from pathlib import Path

from examples.calculator.train import train
from examples.calculator.warm_start import make_model

from .agent import claude_loop

if __name__ == "__main__":
    train(Path("runs") / "claude_loop", make_model(Path("runs") / "calculator_model"), agent=claude_loop)
