"""A program that people run from a shell, as an agent."""
