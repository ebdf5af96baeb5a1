"""`python -m lightning_rl` is the command line."""

from lightning_rl.cli import main

main()
