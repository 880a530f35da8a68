"""The page of what the loss saw (tools/tokens.py): one harmless small file, and what it does in a real browser."""

import fcntl
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import plot
import pytest
import tokens
from jobs import ROOT

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
KEYS = {"Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def response(tokens, **vectors):
    """Return a response of a train-step file, with its vectors, or a dead one."""
    return {"reward": 1.0, "truncated": False, "tokens": tokens, "vectors": vectors}


def write_step(run, step, responses, updates=1):
    """Write a train-step file of one group an update, all with these responses."""
    groups = [
        {"update": update, "problem": HOSTILE[0], "answer": HOSTILE[2], "responses": responses}
        for update in range(updates)
    ]
    samples = run / "samples"
    samples.mkdir(exist_ok=True, parents=True)
    file = samples / f"train-step{step:05d}.json"
    file.write_text(json.dumps({"script": "sspo", "step": step, "groups": groups}))
    return file


def draw(monkeypatch, run, page):
    """Draw the page as the command does."""
    monkeypatch.setattr("sys.argv", ["plot.py", str(run), "--figure", "tokens", "-o", str(page)])
    plot.main()
    return page.read_text()


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page of a run of two steps: of each, a response of hostile tokens, one with several segments, a dead one."""
    n = len(HOSTILE)
    for step in (20, 100):
        hostile = response(HOSTILE, ratio_T=[1.0] * n, mine_T=list(range(n)))
        vectors = {
            "advantage_T": [0.5] * 4,
            "ratio_T": [0.8, 1.0, None, 1.2],
            "segment_T": [4.0, 4.0, 5.0, 5.0],
            "clipped_T": [0.0, 0.0, 0.0, 1.0],
        }
        plain = response(["1", " +", " 2", "."], **vectors)
        write_step(tmp_path, step, [hostile, plain, response(["no"])], updates=2)
    draw(monkeypatch, tmp_path, tmp_path / "tokens.html")
    return tmp_path / "tokens.html"


class Scripts(HTMLParser):
    """The elements of a page and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.scripts = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)

    def handle_data(self, data):
        if self.lasttag == "script" and data.strip():
            self.scripts.append(data)


def test_the_page_is_one_harmless_file(page):
    """Nothing in it comes from elsewhere, and the text of a model opens no element."""
    text = page.read_text()
    parsed = Scripts(text)
    data, script = parsed.scripts
    assert parsed.elements.count("script") == 2 and not {"img", "link", "iframe"}.intersection(parsed.elements)
    assert not re.search("http:|https:|@import|url\\(|innerHTML", text) and data.isascii()
    said = json.loads(data)["steps"][0]["groups"][0]
    assert said["problem"] == HOSTILE[0] and said["about"] == f"answer {HOSTILE[2]}, update 2 of 2"
    shown = said["responses"][0]["tokens"]
    assert shown[:3] == HOSTILE[:3] and shown[6:] == ["\ufffd", "שלום", "", "↵↵\n", "  two blanks"]
    assert shown[3:6] == [r"\u0000\u001b[2J", r"\u202e\u2066\u061c", r"\u2028\u2029"]
    assert len((ROOT / "tools" / "tokens.html").read_bytes()) <= 9000


def test_a_run_without_vectors_is_refused(tmp_path, monkeypatch):
    """So are two runs."""
    with pytest.raises(SystemExit, match=f"{tmp_path}/samples: no train-step"):
        draw(monkeypatch, tmp_path, tmp_path / "tokens.html")
    with pytest.raises(SystemExit, match="one run"):
        plot.write_page([tmp_path, tmp_path], tmp_path / "tokens.html")


def test_what_is_left_out_when_there_is_no_room(tmp_path, monkeypatch):
    """First later groups, then steps between the first and the last, then the ends of responses."""
    files = [
        write_step(tmp_path, step, [response(["a"] * 100, mine_T=[0.5, 1.5] * 50)], updates=3) for step in range(5)
    ]
    [size, *_] = tokens.read(files[0], 5000)["sizes"]
    for room, kept, groups, length in ((15, 5, 3, 100), (14, 5, 2, 100), (5, 5, 1, 100), (4, 3, 1, 100), (1, 2, 1, 42)):
        monkeypatch.setattr(tokens, "ROOM", room * size)
        steps, remark = tokens.fit(files)
        assert [len(steps), len(steps[0]["groups"]), steps[0]["step"], steps[-1]["step"]] == [kept, groups, 0, 4]
        said = steps[-1]["groups"][0]["responses"][0]
        assert len(said["tokens"]) == len(said["vectors"]["mine_T"]) == length
        assert (f"{100 - length} more tokens" in said["facts"]) == (length < 100)
        assert (f"{kept} of 5 steps, and of each the first {groups} groups" in remark) == (room < 15)


def test_a_big_run_stays_under_two_megabytes(tmp_path, monkeypatch):
    """20 steps of 8 groups of 16 responses of 2,000 tokens with 10 vectors."""
    vectors = {f"v{n}_T": [0.123456, -2.5] * 1000 for n in range(10)}
    first = write_step(tmp_path, 0, [response([" a"] * 2000, **vectors)] * 16, updates=8)
    for step in range(1, 20):
        os.link(first, first.with_name(f"train-step{step:05d}.json"))
    page = draw(monkeypatch, tmp_path, tmp_path / "tokens.html")
    assert 1e6 < len(page.encode()) < 2e6


class Browser:
    """A headless Chromium that is spoken to through a pipe, by the DevTools protocol."""

    def __init__(self, chromium, folder):
        pipes = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (*os.pipe(), *os.pipe())]
        its_input, output, input, its_output = pipes
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        start = ["bash", "-c", f'exec "$@" 3<&{its_input} 4>&{its_output}', "bash", chromium, *flags]
        self.process = subprocess.Popen(
            start, pass_fds=(its_input, its_output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(its_input)
        os.close(its_output)
        self.output = open(output, "wb", buffering=0)
        self.input = open(input, "rb")
        self.buffer = b""
        self.calls = 0
        self.session = {}
        self.errors = []

    def receive(self):
        """Return its next message."""
        while b"\0" not in self.buffer:
            read = self.input.read1(2**16)
            assert read, "Chromium has ended"
            self.buffer += read
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        """Call a method and return its result; keep what the page's console says meanwhile."""
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": params, **self.session}
        self.output.write(json.dumps(message).encode() + b"\0")
        while True:
            message = self.receive()
            if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.errors.append(message["params"])
            if message.get("id") == self.calls:
                return message["result"]

    def show(self, page):
        """Open a file in a new tab and wait until it is drawn."""
        self.session = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=page.as_uri())
        while self.ask("document.URL + document.readyState") != page.as_uri() + "complete":
            pass

    def ask(self, expression):
        """Return an expression's value."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, *keys):
        """Press keys as a person does."""
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def all(self, selector, what):
        """Return something of all elements."""
        return self.ask(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => {what})")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """The machine's Chromium."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not chromium:
        pytest.skip("no Chromium here: what the page does in a browser is not tested")
    browser = Browser(chromium, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.session = {}
    browser.call("Browser.close")
    browser.process.wait(30)


def test_the_page_in_a_browser(page, browser):
    """It draws what was written, hostile text as text; colours, marks and the slider follow what is chosen."""
    browser.errors.clear()
    browser.show(page)
    shown = browser.all(".token", "e.textContent")
    assert len(shown) == 2 * (len(HOSTILE) + 5) and shown[:3] == HOSTILE[:3] and shown[7] == "שלום"
    assert browser.ask("document.title") == "What the loss saw"
    assert browser.all("h2", "e.firstChild.data") == [HOSTILE[0]] * 2
    colours = "getComputedStyle(e).backgroundColor"
    first = len(HOSTILE)
    ratios = browser.all(".token", colours)
    low, none, missing, high, dead = ratios[first : first + 5]
    assert browser.ask("quantity.value") == "ratio_T" and len({low, none, high}) == 3
    assert ratios[0] == none == missing == dead
    assert "0.8" in browser.ask("scale.textContent") and "1 (" not in browser.ask("scale.textContent")
    assert browser.all(".clipped", "e.textContent") == ["."] * 2
    assert browser.all(".segment", "e.textContent") == [" 2"] * 2
    assert (
        browser.all(".dead", "e.textContent + e.previousSibling.textContent")
        == ["no✓ right, reward 1\nno gradient"] * 2
    )
    greys = {*browser.all(".dead .token, .facts", "getComputedStyle(e).color")}
    assert len(greys) == 1 and greys.isdisjoint(browser.all(".clipped", "getComputedStyle(e).color"))
    assert browser.all("option", "e.value")[-1] == "mine_T"
    browser.ask("quantity.value = 'mine_T'; quantity.dispatchEvent(new Event('change'))")
    mine = browser.all(".token", colours)
    assert mine != ratios and len({*mine[:first]}) == first
    assert browser.ask("shown.value") == "20"
    browser.press("Tab", "ArrowRight")
    assert browser.ask("shown.value") == "100" and browser.all(".token", colours) == mine
    assert not browser.errors


def test_all_values_of_a_token_show(page, browser):
    """Under the pointer and by keyboard; Tab goes to the token that it left."""
    browser.errors.clear()
    browser.show(page)
    place = browser.all(".clipped", "e.getBoundingClientRect().toJSON()")[0]
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place["x"] + 2, y=place["y"] + 5)
    said = browser.all("#tip tr", "e.innerText")
    assert (
        "1.2\tratio_T: new probability over old" in said
        and "1\tclipped_T: 1 if clipped, and then without gradient" in said
    )
    browser.press("Tab", "Tab", "Tab", "ArrowRight")
    focused = "[...places.keys()].indexOf(document.activeElement)"
    assert browser.ask(focused) == 1
    assert browser.all("#tip tr", "e.innerText") == ["1\tratio_T: new probability over old", "1\tmine_T"]
    assert browser.ask("document.activeElement.getAttribute('aria-describedby')") == "tip"
    browser.press("ArrowDown", "ArrowRight")
    assert browser.ask(focused) == len(HOSTILE) + 2 and "not finite\tratio_T" in browser.ask("tip.innerText")
    browser.press("Escape")
    assert browser.ask("tip.hidden")
    browser.press("ArrowDown")
    assert "No gradient" in browser.ask("tip.innerText")
    browser.press("ArrowUp", "ArrowLeft", "Tab")
    assert browser.ask("tip.hidden")
    browser.call(
        "Input.dispatchKeyEvent", type="rawKeyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9, modifiers=8
    )
    assert browser.ask(focused) == len(HOSTILE) - 1 + 0
    assert not browser.errors
