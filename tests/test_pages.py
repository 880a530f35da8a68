"""What the pages of docs/ link to, and what they say of the tables that they print."""

import re

import pytest
from conftest import ROOT
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

import sps

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
SSPO = (ROOT / "docs" / "sspo.md").read_text()
SPS = (ROOT / "docs" / "sps.md").read_text()


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


def sspo_rows() -> list[tuple[str, list[float]]]:
    """Return the rows of SSPO's Tables 4 and 5 as docs/sspo.md prints them: flags, five scores, their average."""
    rows = re.findall(r"^\| ([^|]+) \|((?: \d\d\.\d\d \|){6})$", SSPO, re.M)
    return [(flags, [float(cell) for cell in cells.split("|")[:-1]]) for flags, cells in rows]


def test_sspos_averages_are_those_of_the_cells_but_for_the_slips_that_the_page_names():
    wrong = []
    for flags, (*cells, average) in sspo_rows():
        if abs(sum(cells) / 5 - average) > 0.011:  # printed to two decimals, some cut off and some rounded
            wrong.append((flags, f"{average:.2f} | {sum(cells) / 5:.2f}"))
    assert [flags for flags, _ in wrong] == ["`--alpha 0.05`", "`--alpha 0.2`"]
    for (_, figures), name in zip(wrong, ("Table 4, α 0.05", "Table 5, α 0.2"), strict=True):
        assert f"| {name} | {figures} |" in SSPO


def test_sspos_scores_are_whole_numbers_of_problems():
    """Of 673 of OlympiadBench, not of the 675 that section 5.4 names."""
    rows = sspo_rows()
    assert len(rows) == 11 + 8

    def whole(score: float, problems: int) -> bool:
        return abs(round(score * problems / 100) / problems * 100 - score) < 0.0051

    for flags, cells in rows:
        for score, problems in zip(cells, (30, 83, 500, 272, 673), strict=False):
            assert whole(score, problems), (flags, score, problems)
    assert sum(whole(cells[4], 675) for _, cells in rows) <= 2
    assert whole(51.81, 83) and not whole(51.49, 83)


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("The answer is 42.", "42"),
        ("we find x = 42", "42"),
        ("3 + 4 = 7, then we take 11 and", "11"),
        (r"So it is \boxed{5}. That is wrong, because 2 + 4 is 6. Therefore \boxed{6}.", r"\{5, 6\}"),
    ],
)
def test_what_math_verify_finds_without_a_box(completion, answer):
    """The table of docs/evaluation.md."""
    found = parse(completion, [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()])
    assert verify(parse(f"${answer}$"), found)
    assert not verify(parse("$6$"), found)


@pytest.mark.parametrize("problems, ends", [(3000, [188, 376, 564]), (5000, [313, 626]), (10_000, [625])])
def test_the_ends_of_spss_stages(problems, ends):
    """docs/sps.md says that its runs evaluate there, and that --eval-every 100 alone would not."""
    args = sps.Args()
    rl_steps, _ = sps.stage_lengths(args, problems)
    assert list(range(rl_steps, args.steps + 1, rl_steps)) == ends and all(end % 100 for end in ends)
    assert ", ".join(map(str, ends)).replace(", 564", " and 564").replace(", 626", " and 626") in SPS
