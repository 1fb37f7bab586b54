"""A study: its config, its cells, its runs and its result rows."""
