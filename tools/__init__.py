"""Commands: one Python file for each, and the files that they read."""
