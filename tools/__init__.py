"""Commands, one file each, and what they read."""
