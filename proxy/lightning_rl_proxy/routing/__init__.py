"""Which engine takes a call: routing, load, health."""
