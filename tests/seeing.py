"""Small random models that see (seeing.toml), and problems with images of several sizes, one of them without."""

import io
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

import common

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
STOPS = (41, 51, 61)  # end a response, too, by generation_config.json
SIZES = ((16, 16), (24, 16), (40, 40), (9, 60), None, (32, 8))  # of images, height and width in pixels


def random_seeing_model(folder: Path, kind: str, tied: bool) -> Path:
    """Save a random qwen2_vl or qwen2_5_vl with a tower of 3 blocks and 2 layers, its tokenizer, and problems."""
    from toy.make import make_tokenizer

    tokenizer = make_tokenizer(folder, extra_special_tokens=[*SPECIAL, "<|im_end|>"])
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    about = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    text = about["text"] | {"vocab_size": len(tokenizer)} | ends
    tower = about["tower"] | about[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, text_config=text, vision_config=tower, tie_word_embeddings=tied, **ids)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():  # far from what an untaught model says of any image
        if parameter.ndim > 1:
            parameter.data *= 3
        else:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *STOPS]
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(about["processor"]))
    write_images(folder / "problems.parquet")
    return folder


def png(height: int, width: int, seed: int = 0, channels: int = 3, turned: bool = False) -> bytes:
    """Return an image of random pixels, with 4 channels partly transparent; turned: to be shown upright by its EXIF."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1  # orientation: a quarter
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    return file.getvalue()


def write_images(file: Path, sizes=SIZES) -> None:
    """Write a problem for each size; the second image is turned, the third partly transparent."""
    rows = []
    for n, size in enumerate(sizes):
        image = size and {"bytes": png(*size, n, 3 + (n == 2), turned=n == 1), "path": None}
        rows.append({"image": image, "problem": f"what is {n}?", "answer": str(n), "solution": str(n)})
    columns = {"image": datasets.Image()} | dict.fromkeys(("problem", "answer", "solution"), datasets.Value("string"))
    datasets.Dataset.from_list(rows, datasets.Features(columns)).to_parquet(file)


def settings(folder: Path, **flags) -> common.Args:
    fixed = {"model": str(folder), "dataset": str(folder / "problems.parquet"), "template": "plain"}
    limits = {"max_prompt_tokens": 160, "max_response_tokens": 64}
    return common.Args(image_column="image", **fixed | limits | flags)


def load(file: Path, model: Path, **changes) -> list[common.Problem]:
    args = replace(settings(model), dataset=str(file), **changes)
    return common.load_problems(args.dataset, AutoTokenizer.from_pretrained(model), args, "--dataset")


def write_rows(folder: Path, *images: list[bytes]) -> Path:
    """Write a row for each list of images."""
    rows = []
    for its in images:
        files = [{"bytes": data, "path": None} for data in its]
        rows.append({"image": files, "problem": "<image>a?", "answer": "1"})
    datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"
