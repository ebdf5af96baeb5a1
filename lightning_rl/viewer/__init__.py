"""A run to look at: its rollouts, tokens, curves and causes as a page, a report in one file, and a notebook's cell."""
