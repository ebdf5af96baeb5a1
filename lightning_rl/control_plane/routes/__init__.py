"""Every route under /api/v1, a file for each noun."""
