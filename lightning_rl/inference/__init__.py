"""Inference: a model from disk and what samples it, as an algorithm opens them together (a policy).

`load` reads a model, `engine` samples from it in this process with continuous batching, `server` speaks vLLM's token
wire format over HTTP; `embedded` is a policy of these, `vllm` and `sglang` have one of servers, and `proof` compares
what a server computes with the model. Token ids in, token ids out: nothing in this room knows text.
"""
