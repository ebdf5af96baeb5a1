"""What leaves a run for people's tools: metrics, and traces of rollouts."""
