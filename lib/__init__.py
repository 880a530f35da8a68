"""What common.py is made of, and a reader of a step need not open."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
