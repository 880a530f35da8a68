"""What common.py is made of, and a reader of a step need not open."""
