"""The page of what the loss saw (tools/tokens.py): one harmless file, whatever a model writes."""

import json
import re
from types import SimpleNamespace

import pandas
import plot
import tokens

HOSTILE = [
    "</script><script>document.title='ran'</script>",
    "<img src=x onerror=document.title='ran'>",
    "\x00\x1b[2J",
    "\u202e\u2066\u061c",
]


def test_the_page_is_one_harmless_file(tmp_path, monkeypatch):
    """Of hostile tokens. Nothing in it comes from elsewhere, and the text of a model opens no element."""
    decode = SimpleNamespace(batch_decode=lambda rows: [HOSTILE[token] for (token,) in rows])
    monkeypatch.setattr(tokens, "AutoTokenizer", SimpleNamespace(from_pretrained={tmp_path / "samples": decode}.get))
    about = {"cwd": str(tmp_path), "args": {"model": "samples", "seed": 1}}
    (tmp_path / "run.json").write_text(json.dumps(about))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "samples").mkdir()
    about = {"problem": HOSTILE[0], "answer": HOSTILE[2], "truncated": False, "trained_T": [True], "right": False}
    hostile = about | {"ids": list(range(len(HOSTILE))), "reward": 0.0, "ratio_T": [0.8, None, 1.0, 1.0], "group": 0}
    right = hostile | {"right": True, "reward": 0.9}  # with a penalty on its length
    pandas.DataFrame([hostile, right]).to_parquet(tmp_path / "samples" / "train-step00020.parquet")
    plot.main((tmp_path,), figure="tokens")
    text = (tmp_path / "tokens.html").read_text()
    [data] = re.findall('id="data">(.*?)</script>', text)
    assert "<" not in data
    assert not re.search("http:|https:|@import|url[(]|src=|innerHTML", text.replace(data, ""))
    [step] = json.loads(data)["steps"]
    response, other = step["groups"][0]["responses"]
    assert other["facts"] == "✓ right, reward 0.9"
    assert response["tokens"] == [*HOSTILE[:2], r"\u0000\u001b[2J", r"\u202e\u2066\u061c"]
    assert response["vectors"]["ratio_T"][0] == 0.8
