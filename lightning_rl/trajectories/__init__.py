"""Finished rollouts as data: what training and inspection both read. No server, no agents."""
