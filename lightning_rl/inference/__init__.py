"""Inference: the embedded engine, which samples tokens from a transformers model in this process.

`load` reads a model, `engine` samples from it with continuous batching, `server` speaks vLLM's token
wire format over HTTP. Token ids in, token ids out: nothing in this room knows text.
"""
