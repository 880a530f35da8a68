"""What comes in from outside is data: nothing in a model folder, a data set, an answer or a run folder is run as code,
and no row of a data set reads other files or the network."""

import json
import pickle
import shutil
import socket
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import refused
from seeing import load

import sps


class Hostile:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("code from outside was run",)


def test_a_hostile_file_of_demonstrations_is_refused(tmp_path):
    torch.save([Hostile()], tmp_path / "step-00001.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        sps.draw_demonstrations(tmp_path, range(1, 2), [], 1, 0)


@pytest.fixture
def seeing(models) -> Path:
    return models["qwen2_vl"]


def test_code_of_an_image_processor_is_not_run(seeing, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = tmp_path / "model"
    shutil.copytree(seeing, folder)
    (folder / "code.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass P: pass\n")
    about = {"image_processor_type": "P", "auto_map": {"AutoImageProcessor": "code.P"}}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    with refused("trust_remote_code"):
        load(seeing / "problems.parquet", folder)
    assert not (tmp_path / "mark").exists()


def test_no_row_is_fetched_from_the_network(seeing, tmp_path):
    """A column that the file's metadata calls an image would be fetched when the row is read."""
    server = socket.create_server(("127.0.0.1", 0))
    image = {"bytes": None, "path": f"http://127.0.0.1:{server.getsockname()[1]}/a.png"}
    text = datasets.Value("string")
    features = datasets.Features(problem=text, answer=text, image=datasets.Image())
    table = datasets.Dataset.from_list([{"problem": "1+1?", "answer": "2", "image": image}], features).data.table
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, file)
    (problem,) = load(file, seeing, reward="mine.py:score", image_column="")  # which is given every column
    assert problem.graded_by[0]["image"] == image
    with refused(r"row 1: cannot identify image file"):
        load(file, seeing)
    server.setblocking(False)
    with pytest.raises(BlockingIOError):  # nobody has called
        server.accept()
