"""Data and rewards: small tasks that train in minutes, images, and the rewards of papers."""
