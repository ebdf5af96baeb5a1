"""Algorithms: what to roll out, and what to learn from it."""
