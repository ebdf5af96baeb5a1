"""Spans of agents' own instrumentation, each read alone: which convention wrote it, its tokens, its messages."""
