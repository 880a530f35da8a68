"""Helpers of common.py. A training step can be followed without opening them."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
