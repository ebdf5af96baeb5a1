"""What a run leaves for people and their tools: metrics, traces of rollouts, what it was made with."""
