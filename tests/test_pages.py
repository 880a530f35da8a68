"""What the README and the pages of docs/ retype of the code."""

import re
import textwrap

import pytest
from conftest import ROOT


def test_the_tests_that_pages_name_exist():
    pages = "".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    named = set(re.findall(r"`(test_\w+)`", pages))
    defined = re.findall(r"^def (test_\w+)", "".join(file.read_text() for file in ROOT.glob("tests/*.py")), re.M)
    assert len(named) > 10 and named <= set(defined)


@pytest.mark.parametrize("script", ["sspo", "gpg", "cwgrpo", "sps", "README"])
def test_excerpts_are_the_scripts_lines(script):
    """A python block is lines of the page's script, or of lib/layers.py if it says so; a line `...` is a gap."""
    page = ROOT / ("README.md" if script == "README" else f"docs/{script}.md")
    source = (ROOT / f"{script.replace('README', 'sspo')}.py").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        lines = block.removeprefix("# lib/layers.py\n")
        text = source if lines == block else (ROOT / "lib" / "layers.py").read_text()
        for piece in re.split(r"^\.\.\.\n", lines, flags=re.M):
            indented = [textwrap.indent(piece, " " * depth) for depth in range(0, 40, 4)]
            assert any(f"\n{each}" in text for each in indented), piece
