"""Every route under /api/v1, and the process that serves them together with the gateway."""
