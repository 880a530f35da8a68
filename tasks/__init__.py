"""Small tasks that train in minutes, sets of images, and the rewards of the papers."""
