"""Prepare an image set of GPG's Tables 5 to 8 as data/NAME.parquet, with columns image, problem, solution and choices.

tasks/images.py geoqa PROMPTS.jsonl FOLDER        R1-V's 754 test questions; their images are in FOLDER
tasks/images.py sat SAT_train.parquet             array/SAT: those of the first 15,000 rows that have one image
tasks/images.py cvbench-count nyu-visionx/CV-Bench     a task of CV-Bench; also cvbench-relation, -depth, -distance
tasks/images.py lisa-train FOLDER                 the training set of ReasonSeg; also lisa-val, lisa-test
tasks/images.py flower LIST.pth NAMES.txt FOLDER  the images of FOLDER that Visual-RFT lists; also pets, aircraft, car

Only CV-Bench has choices. The training sets of Tables 5 and 6 need no preparation: a run reads them from the hub.
docs/gpg.md says which of these sets could be checked.
"""

import io
import json
import sys
from itertools import chain, islice
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from pyarrow.parquet import ParquetFile

TEXT = datasets.Value("string")
COLUMNS = datasets.Features(
    {"image": datasets.Image(), "problem": TEXT, "solution": TEXT, "choices": [TEXT]},
)

# For each set, the things that its images show, and the property that its questions ask for.
KINDS = {
    "flower": ("a plant", "species of the plant"),
    "pets": ("a pet", "species of the pet"),
    "aircraft": ("an aircraft", "model of the aircraft"),
    "car": ("a car", "model of the car"),
}


def row(image, problem, solution, choices=()):
    """Return a row in the format of the training sets on the hub, with the choices of CV-Bench as one more column."""
    boxed = f"<answer> {solution} </answer>"
    return {"image": image, "problem": problem, "solution": boxed, "choices": choices}


def geoqa(_, prompts, folder):
    """Yield a row for each of R1-V's questions in the file `prompts`, which names an image in `folder`."""
    for question in datasets.Dataset.from_json(prompts):
        image = Path(folder, question["image_path"]).read_bytes()
        yield row(image, question["question"], question["ground_truth"])


def sat(_, file):
    """Yield a row for each of SAT's first 15,000 rows that has one image. The prompt is that of process_dataset.py in
    VisualThinker-R1-Zero, the release of GPG's Table 7. The options are in a random order, which depends only on the
    number of the row, and the solution is the text of an option."""
    # All 5 GB of the file are one row group. With a memory map they stay on the disk.
    batches = ParquetFile(file, memory_map=True).iter_batches(100)
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, one in enumerate(islice(rows, 15_000)):
        if len(one["image_bytes"]) == 1:
            *options, last = np.random.default_rng(number).permutation(one["answers"]).tolist()
            options = f"{', '.join(options)} or {last}"
            problem = f"Answer in natural language. {one['question']} Choose between the following options: {options}"
            yield row(one["image_bytes"][0], problem, one["correct_answer"])


def cvbench(name, source):
    """Yield a row for each question of one task in CV-Bench's test split. A solution is "(C)" and the text of this
    choice."""
    rows = datasets.load_dataset(source, split="test")
    for one in rows.cast_column("image", datasets.Image(decode=False)):
        if name == f"cvbench-{one['task'].lower()}":
            words = one["choices"]["ABCDEF".index(one["answer"].strip("()"))]
            yield row(one["image"]["bytes"], one["prompt"], f"{one['answer']} {words}", one["choices"])


def lisa(name, folder):
    """Yield rows for ReasonSeg's images, each of which has a .json file beside it. The solution is the box around the
    first polygon of the target, in thousandths of the image. As in the release of Table 8, the training set has a row
    for each wording of a question, and boxes that are rounded down. The other sets have the first wording alone, with a
    full stop behind it, and boxes that are not rounded."""
    for file in sorted(Path(folder).glob("*.json")):
        about = json.loads(file.read_text(encoding="utf-8", errors="replace"))
        image = file.with_suffix(".jpg").read_bytes()
        targets = [shape["points"] for shape in about["shapes"] if shape["label"] not in ("flag", "ignore")]
        points = 1000 * (np.array(targets[0]) / Image.open(io.BytesIO(image)).size)
        corners = np.concatenate([points.min(0), points.max(0)]).clip(0, 1000)
        texts = [about["text"][0] + "."]
        if name == "lisa-train":
            corners = corners.astype(int)
            texts = about["text"]
        left, top, right, bottom = corners.tolist()
        for text in texts:
            problem = (
                f"Output the bounding box in the image corresponding to the instruction: {text} Output "
                'the thinking process in <think> </think> and your grouding box. Following "<think> thinking process '
                '</think>\n<answer>(x1,y1),(x2,y2)</answer>)" format.'
            )
            yield row(image, problem, f"({left},{top}),({right},{bottom})")


def classes(name, listed, names, folder):
    """Yield a row for each image that the file `listed` names, as a list of {path: {"label": number}}. The image is the
    file in `folder` that has the path's last part as its name. Line `number` of the file `names`, counted from 0, is
    the name of the class."""
    what, asked = KINDS[name]
    problem = (
        f"This is an image containing {what}. Please identify the {asked} based on the image.\n"
        "Output the thinking process in <think> </think> and final answer in <answer> </answer> tags."
        "The output answer format should be as follows:\n"
        "<think> ... </think> <answer>species name</answer>\nPlease strictly follow the format."
    )
    name_of = Path(names).read_text(encoding="utf-8").splitlines()
    for one in torch.load(listed, weights_only=True):
        for path, about in one.items():
            image = Path(folder, Path(path).name).read_bytes()
            yield row(image, problem, name_of[int(about["label"])].strip())


MAKERS = {"geoqa": geoqa, "sat": sat, "cvbench": cvbench, "lisa": lisa}


def main(name, *sources):
    """Write data/NAME.parquet in the current folder, from the files or the hub id in `sources`."""
    make = MAKERS.get(name.partition("-")[0], classes)
    rows = list(make(name, *sources))
    Path("data").mkdir(exist_ok=True)
    datasets.Dataset.from_list(rows, COLUMNS).to_parquet(f"data/{name}.parquet")
    print(f"data/{name}.parquet: {len(rows)} rows")


if __name__ == "__main__":
    main(*sys.argv[1:])
