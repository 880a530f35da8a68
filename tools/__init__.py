"""What run.sh calls, what makes the toys, and what common.py needs for answers and images."""
