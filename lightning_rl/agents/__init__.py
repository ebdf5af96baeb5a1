"""Agents: what a person wrote, how it is run on a claimed rollout, and what it may emit on its way."""
