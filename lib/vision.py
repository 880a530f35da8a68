"""What models that see need, for GPG's Tables 5 to 8: an image, its places in a prompt, what the tower makes of it.

common.py calls this for a problem with an image and a model with a tower, Qwen2-VL or Qwen2.5-VL. Shapes as there.
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
    """Return a model's image processor."""
    return AutoImageProcessor.from_pretrained(folder, max_pixels=max_pixels, trust_remote_code=False)


class Picture:
    """The image of a problem. Its data lie in the data set: a path, which might lead anywhere, is not followed. `token`
    is the id of its tokens, `grid` its height and width in them; `text` is what stands for it in a prompt."""

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
        """Return the image upright, on white where transparent: vLLM does so, transformers does not."""
        safe = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # PIL hands others to programs: EPS to Ghostscript.
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(self.data), formats=safe)).convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")

    @lru_cache(maxsize=32)  # noqa: B019  10 MB each, one for a group
    def processed(self):
        """Return the vision tower's pixel_values, a row for each patch, and image_grid_thw."""
        return self.processor(images=[self.open()], return_tensors="pt")


def for_sampler(problem):
    """Return a prompt as vLLM takes it, with one placeholder for an image, which vLLM multiplies."""
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
    """Return a prompt's position_3N (time, height, width): three times the same, but in an image; text behind it goes
    on after the largest."""
    position_3N = torch.arange(len(problem.prompt_ids)).repeat(3, 1)
    image = problem.image
    if image:
        at = problem.prompt_ids.index(image.token)
        end = at + image.tokens
        position_3N[:, at:end] = torch.ones(1, *image.grid).nonzero().T + at
        position_3N[:, end:] += max(image.grid) - image.tokens
    return position_3N


def add_images(row, problems, position_3N, prompts_N):
    """Add to a packed row what the tower needs of its images, if it has any. prompts_N are the ids with which it
    begins, prompts'."""
    images = [problem.image for problem in problems if problem.image]
    if not images:
        return
    row["position_ids"] = position_3N[:, None]
    # Only of prompts: a response may hold the placeholder as a word.
    row["image_N"] = torch.nonzero(prompts_N == images[0].token)[:, 0]
    processed = [image.processed() for image in images]
    for name in ("pixel_values", "image_grid_thw"):
        row[name] = torch.cat([each[name] for each in processed])


def embed(model, row, embedding_1NH):
    """Return the embeddings of a row with those of its images in their places."""
    image_N = row.pop("image_N")
    images = model.get_image_features(row.pop("pixel_values"), row.pop("image_grid_thw"))
    return embedding_1NH.index_copy(1, image_N, torch.cat(images.pooler_output)[None].to(embedding_1NH))


def prepare(model, args):
    """Let the vision tower of a model take packed rows and, with images, train; return its layers."""
    visual = model.visual
    visual.requires_grad_(bool(args.image_column))
    visual.config._attn_implementation = "packed_flash"
    # Its stride is its kernel, so it is a plain product; cuDNN 9.20 is reported to fail in bf16's gradient or to crawl.
    conv = visual.patch_embed.proj
    conv.forward = lambda x: F.linear(x.flatten(1), conv.weight.flatten(1))
    return visual.blocks


def engine_settings(args, cuda):
    """Return vLLM's settings for a model that sees."""
    return {
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "mm_processor_kwargs": {"max_pixels": args.max_pixels},
        "skip_mm_profiling": not cuda,
        "mm_device_do_normalize": False,  # vLLM 0.32's dummy loading overwrites the mean and deviation
    }
