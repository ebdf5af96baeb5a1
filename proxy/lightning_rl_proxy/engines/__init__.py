"""Engines: what samples tokens, one file a wire format."""
