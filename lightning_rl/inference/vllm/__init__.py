"""vLLM as the engine of a run: its servers started, watched and restarted, or attached; and given the policy's weights.

`command` is how a server is started, `supervisor` the process that holds it, `server` its side here, `control` what is
asked of it over HTTP, `plugin` what it loads in its own environment, and `policy` all of it for an algorithm.
"""
