"""HTTP: doors, keys, limits, and the work on one request."""
