"""Off-policy training: when groups of rollouts are asked for, which make a batch, and which are in flight."""
