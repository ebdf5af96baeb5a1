"""The durable record of rollouts, attempts, spans, rewards and resources."""
