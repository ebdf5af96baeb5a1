"""PPO: the loop, and the parts of one training step."""
