"""The page of what the loss saw (tools/tokens.py): one harmless small file, and what it does in a real browser."""

import json
import os
import re
import shutil
import subprocess

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
KEYS = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def write_step(run, step, responses, updates):
    """Write a train-step file of one group an update, each with these responses, a pair of tokens and vectors."""
    about = {"problem": HOSTILE[0], "answer": HOSTILE[2], "truncated": False}
    rows = [about | {"tokens": text, "trained_T": [vectors != {}]} | vectors for text, vectors in responses]
    table = pandas.DataFrame(rows).assign(reward=[0, *[1.0] * (len(rows) - 1)])
    file = run / "samples" / f"train-step{step:05d}.parquet"
    file.parent.mkdir(exist_ok=True)
    pandas.concat([table.assign(group=p, update=p) for p in range(updates)]).to_parquet(file)
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


def test_a_big_run_stays_under_two_megabytes(tmp_path):
    """20 steps of 8 groups of 16 responses of 2,000 tokens with 10 vectors: the ends of responses are left out."""
    response = ([" a"] * 2000, {f"v{n}_T": [0.123456, -2.5] * 1000 for n in range(10)})
    first = write_step(tmp_path, 0, [response] * 16, updates=8)
    for step in range(1, 20):
        os.link(first, first.with_name(f"train-step{step:05d}.parquet"))
    page = tmp_path / "tokens.html"
    tokens.write_page([tmp_path], page)
    text = page.read_text()
    assert 1e6 < len(text.encode()) < 2e6
    assert "2 of 20 steps and 1 of 8 groups" in text


class Browser:
    """A headless Chromium with one page, spoken to through pipes by the DevTools protocol."""

    def __init__(self, chromium, folder, page):
        flags = ["--headless", "--no-sandbox", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        start = ["bash", "-c", 'exec "$0" "$@" 3<&0 4>&1 >/dev/null', chromium, *flags]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(start, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self.calls = 0
        self.errors = []
        self.session = {}
        tab = self.call("Target.createTarget", url=page.as_uri())
        self.session = {"sessionId": self.call("Target.attachToTarget", flatten=True, **tab)["sessionId"]}
        self.call("Runtime.enable")
        self.call("Log.enable")
        while not self.ask("document.URL != 'about:blank' && document.readyState == 'complete'"):
            pass

    def call(self, method, **params):
        """Return what a method returns; keep what the page's console says meanwhile."""
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": params, **self.session}
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while "result" not in message:
            line = b""
            while (byte := self.process.stdout.read(1)) not in b"\0":  # or nothing, when Chromium has ended
                line += byte
            message = json.loads(line)
            if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.errors.append(message)
        return message["result"]

    def ask(self, expression):
        """Return an expression's value."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def all(self, selector, what="e.textContent"):
        """Return something of all elements `e`."""
        return self.ask(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => {what})")

    def press(self, *keys):
        """Press keys."""
        for key in keys:
            self.call("Input.dispatchKeyEvent", type="rawKeyDown", key=key, windowsVirtualKeyCode=KEYS[key])


@pytest.fixture
def browser(page, tmp_path):
    """The page in the machine's Chromium."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        pytest.skip("no Chromium here: what the page does in a browser is not tested")
    browser = Browser(found, tmp_path / "chromium", page)
    yield browser
    browser.process.terminate()
    browser.process.communicate()


def test_the_page_in_a_browser(browser):
    """It draws what was written, hostile text as text. Colours and marks follow the quantity, the slider the step."""
    n = len(HOSTILE)
    shown = browser.all(".token")
    assert len(shown) == 2 * (n + 5)
    assert shown[:3] + shown[n : n + 4] == [*HOSTILE[:3], "1", "↵", "↵\n", "."]
    assert browser.all(".clipped, .segment") == ["↵\n", "."] * 2
    assert browser.all(".facts")[1:3] == ["✓ right, reward 1\nbecame a demonstration", "✓ right, reward 1\nno gradient"]
    assert len({*browser.all("code, .dead", "getComputedStyle(e).color")}) == 2
    colour = "getComputedStyle(e).backgroundColor"
    ratios = browser.all(".token", colour)
    low, none, missing, high, dead = ratios[n : n + 5]
    assert none == missing == dead == ratios[0] and len({low, none, high}) == 3
    assert browser.ask("quantity.value + scale.textContent") == "ratio_T0.811.2 (at 1 nothing happens)"
    browser.ask("quantity.value = 'mine_T'; quantity.dispatchEvent(new Event('change'))")
    mine = browser.all(".token", colour)
    assert len({*mine[:n]}) == n
    browser.press("Tab", "ArrowRight")
    assert browser.ask("shown.value") == "100" and browser.all(".token", colour) == mine
    assert browser.ask("document.title") == "What the loss saw" and not browser.errors


def test_all_values_of_a_token_show(browser):
    """Under the pointer and by keyboard; Tab comes back to the token that it left."""
    place = browser.all(".clipped", "e.getBoundingClientRect().toJSON()")[0]
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place["x"] + 2, y=place["y"] + 5)
    assert browser.all("#tip td")[::2] == ["1.2", "5", "1", "1"]
    browser.press("Tab", "Tab", "Tab", "ArrowRight")
    assert browser.all("#tip td") == ["1", "ratio_T: new probability over old", "1", "mine_T"]
    assert browser.all(":focus", "e.ariaDescribedByElements[0].id") == ["tip"]
    browser.press("ArrowDown", "ArrowRight")
    assert browser.all("#tip td")[0] == "not finite"
    browser.press("ArrowDown")
    assert browser.all("#tip p") == ["No gradient: the loss did not see it."]
    browser.press("ArrowUp", "ArrowLeft")
    browser.ask("quantity.focus()")
    browser.press("Tab")
    assert browser.all(":focus") == [HOSTILE[-1]] and not browser.errors
