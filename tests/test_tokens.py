"""The page of what the loss saw (tools/tokens.py): one harmless small file, and what it does in a real browser."""

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
    "\u2028\u2029",
    "\ufffd",
    "שלום",
    "",
    "\n\n",
    "  two blanks",
]


TEXTS = [*HOSTILE, "1", "\n", ".", "no", "a"]  # by token id


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    """One that decodes to TEXTS."""
    made = SimpleNamespace(batch_decode=lambda rows: [TEXTS[token] for (token,) in rows])
    monkeypatch.setattr(tokens, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda model: made))


def write_step(run, step, responses, updates):
    """Write a train-step file of one group an update, each with these responses, a pair of tokens and vectors."""
    (run / "run.json").write_text(json.dumps({"args": {"model": "any", "updates_per_step": updates}}))
    about = {"problem": HOSTILE[0], "answer": HOSTILE[2], "truncated": False}
    rows = [
        about | {"ids": [*map(TEXTS.index, text)], "trained_T": [vectors != {}]} | vectors
        for text, vectors in responses
    ]
    table = pandas.DataFrame(rows).assign(reward=[0, *[1.0] * (len(rows) - 1)])
    file = run / "samples" / f"train-step{step:05d}.parquet"
    file.parent.mkdir(exist_ok=True)
    pandas.concat([table.assign(group=p) for p in range(updates)]).to_parquet(file)
    return file


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page of a run of two steps: of each, a response of hostile tokens, one with segments, a dead one."""
    n = len(HOSTILE)
    hostile = {"ratio_T": [1.0] * n, "mine_T": list(range(n))}
    usual = {
        "ratio_T": [0.8, 1, None, 1.2],
        "segment_T": [4, 4, 5, 5],
        "clipped_T": [0, 0, 0, 1],
        "demonstration_T": [1, 1, 1, 1],
    }
    for step in (20, 100):
        write_step(tmp_path, step, [(HOSTILE, hostile), (["1", "\n", "\n", "."], usual), (["no"], {})], updates=2)
    page = tmp_path / "tokens.html"
    monkeypatch.setattr("sys.argv", ["plot.py", str(tmp_path), "--figure", "tokens", "-o", str(page)])
    plot.main()
    return page


def test_the_page_is_one_harmless_file(page):
    """Nothing in it comes from elsewhere, and the text of a model opens no element."""
    text = page.read_text()
    [data] = re.findall('id="data">(.*?)</script>', text)
    assert "<" not in data
    assert not re.search("http:|https:|@import|url[(]|src=|innerHTML", text.replace(data, ""))
    group = json.loads(data)["steps"][0]["groups"][0]
    assert group["problem"] + group["about"] == f"{HOSTILE[0]}answer {HOSTILE[2]}, update 2 of 2"
    signs = [r"\u0000\u001b[2J", r"\u202e\u2066\u061c", r"\u2028\u2029"]
    assert group["responses"][0]["tokens"] == [*HOSTILE[:3], *signs, *HOSTILE[6:9], "↵↵\n", HOSTILE[10]]


def test_a_run_without_vectors_is_refused(tmp_path):
    """So are two runs."""
    for runs, said in (([tmp_path], f"{tmp_path}/samples: no train-step"), ([tmp_path] * 2, "one run")):
        with pytest.raises(SystemExit, match=said):
            tokens.write_page(runs, tmp_path / "tokens.html")


def test_what_is_left_out_when_there_is_no_room(tmp_path, monkeypatch):
    """First later groups, then steps between the first and the last."""
    files = [write_step(tmp_path, step, [(["a"], {"mine_T": [0.5]})] * 2, updates=3) for step in range(5)]
    size = tokens.read(files[0], 5000)["sizes"][0]
    for room, left in (15, (5, 3)), (14, (5, 2)), (4, (3, 1)), (2, (2, 1)):
        monkeypatch.setattr(tokens, "ROOM", room * size)
        steps, _ = tokens.fit(files)
        assert (len(steps), len(steps[0]["groups"]), steps[-1]["step"]) == (*left, 4)


# what a reader does and what then is there, as JSON; a real Chromium runs it behind the page's own script
READER = """<script nonce="own">
const errors = [];
addEventListener("error", event => errors.push(event.message));
const all = (selector, what = e => e.textContent) => [...document.querySelectorAll(selector)].map(what);
const colours = () => all(".token", e => getComputedStyle(e).backgroundColor);
const seen = {
  tokens: all(".token"),
  marked: all(".clipped, .segment"),
  facts: all(".facts"),
  inks: all("code, .dead", e => getComputedStyle(e).color),
  ratios: colours(),
  scale: quantity.value + scale.textContent,
};
// a headless page that has not been given the focus yet moves it without an event
const focus = HTMLElement.prototype.focus;
HTMLElement.prototype.focus = function () {
  focus.call(this);
  if (!document.hasFocus()) this.dispatchEvent(new FocusEvent("focusin", {bubbles: true}));
};
all(".clipped", e => e)[0].dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
seen.pointed = all("#tip td");
all(".token", e => e)[LAST].focus();
const press = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
seen.keys = ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft"].map(
  key => (press(key), [document.activeElement.textContent, all("#tip td, #tip p")[0]]));
seen.tab = all("main [tabindex='0']");
seen.describes = document.activeElement.ariaDescribedByElements[0].id;
quantity.value = "mine_T";
quantity.dispatchEvent(new Event("change"));
seen.mine = colours();
step.value = 1;
step.dispatchEvent(new Event("input"));
seen.later = [shown.value, document.title, errors, colours().join() == seen.mine.join()];
document.body.textContent = JSON.stringify(seen);
</script>"""


def test_the_page_in_a_browser(page):
    """It draws what was written, hostile text as text. Colours and marks follow the quantity, the slider the step. All
    values of a token show under the pointer and by keyboard; Tab comes back to the token that it left."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no Chromium here: what the page does in a browser is not tested")
    n = len(HOSTILE)
    page.write_text(page.read_text() + READER.replace("LAST", str(n - 1)))
    flags = ["--headless", "--no-sandbox", f"--user-data-dir={page.parent}/chromium", "--dump-dom", page.as_uri()]
    shown = subprocess.run([chromium, *flags], capture_output=True, text=True, check=True).stdout
    seen = json.loads(html.unescape(re.search("<body>(.*)</body>", shown, re.DOTALL)[1]))
    tokens = seen["tokens"]
    assert len(tokens) == 2 * (n + 5)
    assert tokens[:3] + tokens[n : n + 4] == [*HOSTILE[:3], "1", "↵", "↵\n", "."]
    assert seen["marked"] == ["↵\n", "."] * 2
    assert seen["facts"][1:3] == ["✓ right, reward 1\nbecame a demonstration", "✓ right, reward 1\nno gradient"]
    assert len({*seen["inks"]}) == 2
    low, still, missing, high, dead = seen["ratios"][n : n + 5]
    assert still == missing == dead == seen["ratios"][0] and len({low, still, high}) == 3
    assert seen["scale"] == "ratio_T0.811.2 (at 1 nothing happens)"
    assert len({*seen["mine"][:n]}) == n
    assert seen["later"] == ["100", "What the loss saw", [], True]
    assert seen["pointed"][::2] == ["1.2", "5", "1", "1"]
    none = "No gradient: the loss did not see it."
    walk = [["1", "0.8"], ["↵", "1"], ["↵\n", "not finite"], ["no", none], ["1", "0.8"], [HOSTILE[-1], "1"]]
    assert seen["keys"] == walk and seen["tab"] == [HOSTILE[-1]] and seen["describes"] == "tip"
