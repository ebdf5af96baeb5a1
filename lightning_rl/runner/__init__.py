"""Takes rollouts from the store and runs the agent: claim, run, heartbeat, finish."""
