"""Images for vision-language models, for GPG's Tables 5 to 8: reading an image, its places in a prompt, its embeddings.

Only Qwen2-VL and Qwen2.5-VL are supported. `for_sampler`, `positions` and `add_images` are also called for problems
without an image. The suffixes of names, such as _N and _H, mean the same as in common.py.
"""

import io
import math
from functools import cache, lru_cache

import torch
from PIL import Image, ImageOps
from torch.nn import functional as F
from transformers import AutoImageProcessor


@cache
def processor_of(folder, max_pixels):
    """Return the image processor of the model in a folder. It shrinks images to at most max_pixels pixels."""
    return AutoImageProcessor.from_pretrained(folder, max_pixels=max_pixels, trust_remote_code=False)


class Picture:
    """The image of a problem. `data` is the content of the image file. It comes from the data set: a path in the data
    set is never opened, since it might name any file of the computer.

    In a prompt, a number of equal placeholder tokens stands for the image. `token` is the id of this token, and
    `tokens` is their number. `text` is the text of these tokens, with the markers before and after them. `grid` is
    (height, width) of the image in tokens. `patches` is the number of patches that the vision tower reads, several for
    each token."""

    def __init__(self, data, tokenizer, max_pixels):
        self.data = data
        self.token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.processor = processor_of(tokenizer.name_or_path, max_pixels)
        grid = self.processed()["image_grid_thw"][0, 1:]
        self.patches = grid.prod().item()
        self.grid = (grid // self.processor.merge_size).tolist()
        self.tokens = math.prod(self.grid)
        self.text = f"<|vision_start|>{'<|image_pad|>' * self.tokens}<|vision_end|>"

    def open(self):
        """Return the image as a PIL image in RGB, turned upright as its EXIF data say, and with a white background
        where it is transparent, as vLLM does and transformers does not."""
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(self.data))).convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")

    @lru_cache(maxsize=32)  # noqa: B019  An entry takes about 10 MB. A group's responses share it.
    def processed(self):
        """Return the input of the vision tower: pixel_values, with a row for each patch, and image_grid_thw, which is
        (1, height, width) in patches."""
        return self.processor(images=[self.open()], return_tensors="pt")


def for_sampler(problem):
    """Return the prompt of a problem as a dict for vLLM's `generate`. If the problem has an image, the dict holds it,
    and the prompt has only one placeholder token, because vLLM itself repeats this token."""
    ids = problem.prompt_ids
    image = problem.image
    if not image:
        return {"prompt_token_ids": ids}
    at = ids.index(image.token)
    return {
        "prompt_token_ids": ids[: at + 1] + ids[at + image.tokens :],
        "multi_modal_data": {"image": image.open()},
    }


def positions(problem):
    """Return position_3N, the positions (time, height, width) of the tokens of a problem's prompt. The three are equal
    for a token of text. In an image, whose first token is at `at`, they are `at` for the time, `at` + row for the
    height and `at` + column for the width. The text after the image continues with the largest of these, plus 1."""
    position_3N = torch.arange(len(problem.prompt_ids)).repeat(3, 1)
    image = problem.image
    if image:
        at = problem.prompt_ids.index(image.token)
        end = at + image.tokens
        position_3N[:, at:end] = torch.ones(1, *image.grid).nonzero().T + at
        position_3N[:, end:] += max(image.grid) - image.tokens
    return position_3N


def add_images(row, problems, position_3N, prompt_ids):
    """Add the images of `problems` to `row`, the model's input for a packed row, in place. Without images nothing
    changes. position_3N are the positions of all tokens of the row, and prompt_ids are the ids of the prompts' tokens,
    with which the row begins. The row gets these positions, image_at (the places of image tokens in the row), and the
    vision tower's pixel_values and image_grid_thw."""
    images = [problem.image for problem in problems if problem.image]
    if not images:
        return
    row["position_ids"] = position_3N[:, None]
    # Only prompts are searched: the policy may also sample a placeholder token in a response, where it is no image.
    row["image_at"] = torch.nonzero(prompt_ids == images[0].token)[:, 0]
    processed = [image.processed() for image in images]
    for name in ("pixel_values", "image_grid_thw"):
        row[name] = torch.cat([each[name] for each in processed])


def embed(model, row, embedding_1NH):
    """Return a copy of embedding_1NH, the token embeddings of a packed row, in which the embeddings of image tokens
    come from the vision tower. Removes the tower's inputs from `row`."""
    image_at = row.pop("image_at")
    images = model.get_image_features(row.pop("pixel_values"), row.pop("image_grid_thw"))
    return embedding_1NH.index_copy(1, image_at, torch.cat(images.pooler_output)[None].to(embedding_1NH))


def prepare_tower(model, args):
    """Change the vision tower of a model, in place, and return its layers. Its attention becomes `packed_attention`, so
    that the patches of several images can lie in one packed row. Its weights are trained only if the data have images
    (--image-column)."""
    visual = model.visual
    visual.requires_grad_(bool(args.image_column))
    visual.config._attn_implementation = "packed_flash"
    # The stride of this convolution equals its kernel, so a matrix product does the same. For the convolution, cuDNN
    # 9.20 is reported to fail in the bf16 gradient or to be very slow.
    conv = visual.patch_embed.proj
    conv.forward = lambda x: F.linear(x.flatten(1), conv.weight.flatten(1))
    return visual.blocks


def engine_settings(args, cuda):
    """Return the arguments that vllm.LLM gets only for a model with a vision tower. `cuda`: whether there is a GPU."""
    return {
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "mm_processor_kwargs": {"max_pixels": args.max_pixels},
        "skip_mm_profiling": not cuda,
        # If this were True, vLLM 0.32 would keep the mean and deviation of pixels among the weights, where
        # `load_format="dummy"` of common.py would overwrite them.
        "mm_device_do_normalize": False,
    }
