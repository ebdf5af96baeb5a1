"""What vLLM's and SGLang's servers have in common for a run: which are there, and who has the present weights."""
