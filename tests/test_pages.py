"""What the README and the pages of docs/ link to, and what they retype of the code."""

import re
import textwrap

import pytest
from conftest import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("docs/*.md"))]
# how a script's line says which equation it is; CW-GRPO's have no numbers
EQUATION = re.compile("# (Eq[.]|C[.]1|L2TE|k3|Algorithm 1$|loss$|covariance$|kernel$|normalisation$)")


def headings(page) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if not target.startswith("http"):
            leads_to = page.parent / target if target else page
            assert leads_to.exists(), target
            assert not anchor or anchor in headings(leads_to), (target, anchor)


def test_the_tests_that_reliability_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
    defined = re.findall(r"^def (test_\w+)", "".join(file.read_text() for file in ROOT.glob("tests/*.py")), re.M)
    assert len(named) > 25 and named <= set(defined)


@pytest.mark.parametrize("script", ["sspo", "gpg", "cwgrpo", "sps", "README"])
def test_excerpts_are_the_scripts_lines(script):
    """A python block is lines of the page's script, or of common.py if it says so; a line `...` is a gap."""
    page = README if script == "README" else ROOT / "docs" / f"{script}.md"
    source = (ROOT / f"{script.replace('README', 'sspo')}.py").read_text()
    shown = set()
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        lines = block.removeprefix("# common.py\n")
        text = source if lines == block else (ROOT / "common.py").read_text()
        for piece in re.split(r"^\.\.\.\n", lines, flags=re.M):
            indented = [textwrap.indent(piece, " " * depth) for depth in range(0, 40, 4)]
            assert any(f"\n{each}" in text for each in indented), piece
        shown.update(line.strip() for line in lines.splitlines())
    if page != README:
        numbered = {line.strip() for line in source.splitlines() if EQUATION.search(line)}
        missing = numbered - shown
        assert not missing
