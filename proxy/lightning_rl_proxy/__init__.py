"""The gateway: an LLM proxy that records every call token by token. Imports no torch."""
