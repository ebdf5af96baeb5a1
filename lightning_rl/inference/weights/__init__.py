"""Weights on their way from the trainer to engines and files, and the check that an engine has them."""
