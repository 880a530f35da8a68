"""The page of what the loss saw (tools/tokens.py): one harmless small file, and what a real browser draws of it."""

import html
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pandas
import plot
import pytest
import tokens

HOSTILE = [
    "</script><script>document.title='ran'</script>",
    "<!--<script>",
    "<img src=x onerror=document.title='ran'>",
    "\x00\x1b[2J",
    "\u202e\u2066\u061c",
    "שלום",
    "",
    "\n\n",
]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page of a run of two steps of two groups each: a wrong response of hostile tokens, and a right one."""
    decode = SimpleNamespace(batch_decode=lambda rows: [HOSTILE[token] for (token,) in rows])
    monkeypatch.setattr(tokens, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda model: decode))
    (tmp_path / "run.json").write_text(json.dumps({"args": {"model": "any", "updates_per_step": 2}}))
    (tmp_path / "samples").mkdir()
    about = {"problem": HOSTILE[0], "answer": HOSTILE[2], "truncated": False, "trained_T": [True]}
    wrong = about | {"ids": list(range(len(HOSTILE))), "reward": 0.0, "ratio_T": [0.8, *[1.0] * (len(HOSTILE) - 1)]}
    right = about | {"ids": [0], "reward": 1.0, "ratio_T": [None]}
    groups = [row | {"group": group} for group in range(2) for row in (wrong, right)]
    for step in (20, 100):
        pandas.DataFrame(groups).to_parquet(tmp_path / "samples" / f"train-step{step:05d}.parquet")
    monkeypatch.setattr("sys.argv", ["plot.py", str(tmp_path), "--figure", "tokens", "-o", str(tmp_path / "a.html")])
    plot.main()
    return tmp_path / "a.html"


def test_the_page_is_one_harmless_file(page):
    """Nothing in it comes from elsewhere, and the text of a model opens no element."""
    text = page.read_text()
    [data] = re.findall('id="data">(.*?)</script>', text)
    assert "<" not in data
    assert not re.search("http:|https:|@import|url[(]|src=|innerHTML", text.replace(data, ""))
    steps = json.loads(data)["steps"]
    assert [step["step"] for step in steps] == [20, 100]
    first, second = steps[0]["groups"]
    assert first["about"].endswith("update 2 of 2") and second["about"].endswith("update 1 of 2")
    assert first["responses"][0]["tokens"][3:5] == [r"\u0000\u001b[2J", r"\u202e\u2066\u061c"]
    assert [response["vectors"]["ratio_T"] for response in first["responses"]] == [[0.8, *[1] * 7], None]


READER = """<script nonce="own">
const tokens = [...document.querySelectorAll(".token")].map(e => e.textContent);
document.body.textContent = JSON.stringify([tokens, document.title]);
</script>"""


def test_the_page_in_a_browser(page):
    """It draws what was written, hostile text as text."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no Chromium here: what the page does in a browser is not tested")
    page.write_text(page.read_text() + READER)
    flags = ["--headless", "--no-sandbox", f"--user-data-dir={page.parent}/chromium", "--dump-dom", page.as_uri()]
    shown = subprocess.run([chromium, *flags], capture_output=True, text=True, check=True).stdout
    drawn, title = json.loads(html.unescape(re.search("<body>(.*)</body>", shown, re.DOTALL)[1]))
    assert drawn[:3] == HOSTILE[:3] and len(drawn) == 18 and title == "What the loss saw"
