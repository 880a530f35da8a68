"""A stand-in for the hub on the loopback; as a program, a rank that fetches from it.

python tests/hub.py "MODEL DATASET"... tries one pair after another, and says what a run of these flags says.
"""

import hashlib
import json
import re
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from transformers import AutoTokenizer

import common

COMMIT = "a" * 40
REQUEST = re.compile(r"/(?:api/)?(datasets|models|)/?([^/]+/[^/]+)/?(tree|resolve|revision|)/?[^/]*/?(.*)")


class Hub(ThreadingHTTPServer):
    """Serves models/OWNER/NAME and datasets/OWNER/NAME of a folder; `asked` counts requests."""

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder
        self.asked = Counter()
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fetched(self) -> set[str]:
        """Return the files that were asked for whole."""
        return {path for path in self.asked if path.startswith("GET") and "/resolve/" in path}


class Answer(BaseHTTPRequestHandler):
    """To huggingface_hub and `datasets`, of which each asks in its own way."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.asked[f"{self.command} {path}"] += 1
        kind, name, what, inside = REQUEST.fullmatch(path).groups()
        base = self.server.folder / (kind or "models") / name
        place = base / inside
        if not place.exists():
            missing = "EntryNotFound" if base.exists() else "RepoNotFound"
            self.answer(b"", 404, "X-Error-Code", missing)
        elif what == "resolve":
            content = place.read_bytes()
            self.answer(content, 200, "ETag", hashlib.sha1(content).hexdigest())
        else:
            about = {"id": name, "sha": COMMIT}
            if what == "tree":
                files = [file for file in place.rglob("*") if file.is_file()]
                about = [
                    {"type": "file", "path": str(file.relative_to(base)), "oid": "0", "size": file.stat().st_size}
                    for file in files
                ]
            self.answer(json.dumps(about).encode(), 200, "Content-Type", "application/json")

    do_HEAD = do_GET

    def log_message(self, *_):
        """Say nothing."""

    def answer(self, body: bytes, code: int, *header: str):
        self.send_response(code)
        self.send_header(*header)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


if __name__ == "__main__":
    common.init_world()
    for pair in sys.argv[1:]:
        model, dataset = pair.split()
        args = common.Args(model=model, dataset=dataset, template="plain", max_prompt_tokens=64, max_response_tokens=64)
        try:
            folder = common.model_folder(args)
            common.load_data(args, AutoTokenizer.from_pretrained(folder))
        except Exception as error:
            if common.IS_RANK_0:
                print(error)
