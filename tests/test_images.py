"""Images: packed against one sequence at a time by transformers' own path, positions, ranks, vLLM."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import PACKED, check_sampler, refused, slow
from faults import differences
from jobs import Jobs
from safetensors.torch import load_file
from seeing import STOPS, load, png, settings, write_images, write_rows
from test_invariance import check_alike, largest_difference
from test_policy import group_of, one_at_a_time
from transformers import AutoModelForImageTextToText, AutoTokenizer

import common

CPU = torch.device("cpu")


def policy_and_batch(folder: Path) -> tuple[common.Policy, common.Batch]:
    """Return a model's policy, and two random responses to each problem; the second holds the placeholder of images as
    a word."""
    packed = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=PACKED)
    problems = load(folder / "problems.parquet", folder, max_pixels=1024)
    draw = torch.Generator().manual_seed(0)
    groups = []
    for problem in problems:
        ids = torch.randint(0, 250, (2, 5 + 3 * len(groups)), generator=draw)
        ids[1, 2] = problems[0].image.token
        group = group_of([], ids.tolist())
        group.problem = problem
        groups.append(group)
    common.vision.prepare_tower(packed.model, common.Args(image_column="image"))
    return common.Policy(packed, 0.7).train(), common.Batch(groups)


def logits_of(model, problem: common.Problem, ids: torch.Tensor) -> torch.Tensor:
    """Return logits by transformers' own positions and merging."""
    seen = torch.zeros_like(ids)
    seen[0, : len(problem.prompt_ids)] = torch.tensor(problem.prompt_ids) == model.config.image_token_id
    given = {"inputs_embeds": model.get_input_embeddings()(ids)}
    image = problem.image
    if image:
        patches = image.processor(images=[image.open()], return_tensors="pt")
        features = torch.cat(model.model.get_image_features(**patches).pooler_output)
        given["inputs_embeds"] = given["inputs_embeds"].masked_scatter((seen == 1)[..., None], features)
        given["position_ids"], _ = model.model.get_rope_index(ids, seen, patches["image_grid_thw"])
    return model.lm_head(model.model.language_model(**given).last_hidden_state)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_packed_log_probs_and_gradients(models, kind):
    """Of images of several sizes, a problem without one, and responses that hold the placeholder."""
    policy, batch = policy_and_batch(models[kind])
    reference = AutoModelForImageTextToText.from_pretrained(models[kind], attn_implementation="eager")
    grids = [group.problem.image and group.problem.image.grid for group in batch.groups]
    assert grids == [[2, 2], [2, 3], [4, 4], [1, 8], None, [4, 1]], "the third is shrunk"
    everything = batch.pack(list(range(12))[::-1], CPU)
    logp_T = torch.zeros(len(batch.response_T)).index_copy(0, everything.entry_T, policy(everything)[0])
    weight_T = torch.randn(len(logp_T))
    expected_T, _ = one_at_a_time(batch, 0.7, partial(logits_of, reference))
    torch.testing.assert_close(logp_T, expected_T, atol=1e-5, rtol=1e-5)
    (logp_T * weight_T).sum().backward()
    (expected_T * weight_T).sum().backward()
    mine, theirs = ({n: p.grad for n, p in each.named_parameters()} for each in (policy, reference))
    assert largest_difference(mine, theirs) < 1e-5 and sum("visual" in name for name in mine) > 30


@pytest.mark.parametrize("responses", [[], [8]])
def test_every_row_reaches_the_tower_once_the_step_has_an_image(models, responses):
    """An empty row, which reaches all other weights, too, and one of text: or collectives of some ranks would wait for
    those of others."""
    policy, batch = policy_and_batch(models["qwen2_vl"])
    policy(batch.pack(responses, CPU))[0].sum().backward()
    reached = [p for n, p in policy.named_parameters() if "visual" in n or not responses]
    assert all(p.grad is not None and not p.grad.any() for p in reached)


@pytest.mark.slow
def test_an_update_does_not_depend_on_ranks_or_packing(update, models):
    """Three ranks with small budgets: some rows are of text only, some empty."""
    model = models["qwen2_5_vl"]
    args = {"image_column": "image", "dataset": str(model / "problems.parquet"), "template": "plain"}
    one, three = (update(ranks, "gpg", model, args=args, budget=budget) for ranks, budget in ((1, 5000), (3, 300)))
    check_alike(three, one)


@pytest.fixture(scope="module", params=["qwen2_5_vl", *slow("qwen2_vl")])
def seeing(request, models, tmp_path_factory):
    """A process with a vLLM engine of a model that sees, which runs scripts; and that model."""
    pytest.importorskip("torchvision", reason="vLLM's models that see need torchvision; all else does not")
    model = models[request.param]
    jobs = Jobs("runs.py", tmp_path_factory.mktemp("seeing-engine"), model, "float32")
    yield jobs, model
    jobs.end()


def test_a_row_may_have_a_list_of_one_image(models, tmp_path, capsys):
    """It stands where the problem has a mark."""
    (problem,) = load(write_rows(tmp_path, [png(28, 28, 1, 3)]), models["qwen2_vl"])
    assert "1 problems; left out: none; the first" in capsys.readouterr().out
    assert problem.image and len(problem.prompt_ids) == problem.cost - problem.image.patches
    with refused("row 2: 2 images, and a prompt can have one"):
        load(write_rows(tmp_path, [png(28, 28, 1, 3)], [png(28, 28, 1, 3)] * 2), models["qwen2_vl"])


def test_what_vllm_samples_is_what_is_trained(seeing, tmp_path):
    engine, model = seeing
    flags = ["--image-column", "image", "--dataset", model / "problems.parquet", "--template", "plain"]
    found = check_sampler(engine, [*flags, "--model", model, "--run-dir", tmp_path / "run"])
    assert found["gap after a sync"] < 1e-4
    assert min(found["gap with stale weights"], found["gap with another image"]) > 1e-2
    end = AutoTokenizer.from_pretrained(model).get_vocab()["<|im_end|>"]
    last = {ids[-1] for ids in found["texts"]}
    assert end in last and last & {*STOPS}, "nothing could go on behind them"
    assert not any(token in (end, *STOPS) for ids in found["texts"] for token in ids[:-1])


@pytest.mark.slow
def test_a_run_stopped_before_and_after_its_first_image_is_resumed(seeing, tmp_path):
    """The metrics and weights of one that was never stopped, bit for bit; AdamW has no moments of a tower unreached."""
    engine, model = seeing
    order = list(common.problems_from(range(6), common.Args(prompts_per_step=6), 0).values())
    write_images(tmp_path / "mixed.parquet", [None if n in order[:2] else (16, 24) for n in range(6)])
    (tmp_path / "even.py").write_text("def even(completion, row):\n    return float(len(completion) % 2)\n")
    flags = ["--model", model, "--template", "plain", "--dataset", tmp_path / "mixed.parquet"]
    flags += ["--image-column", "image", "--reward", f"{tmp_path}/even.py:even", "--prompts-per-step", 1]
    flags += ["--max-prompt-tokens", 128, "--max-response-tokens", 32, "--lr", 1e-3, "--beta-th", 0]
    engine(script="gpg", flags=[*flags, "--steps", 4, "--run-dir", tmp_path / "whole"])
    for steps, resume in ((2, []), (3, ["--resume"]), (4, ["--resume"])):
        engine(script="gpg", flags=[*flags, "--steps", steps, "--run-dir", tmp_path / "parts", *resume])
    assert differences(tmp_path / "parts", tmp_path / "whole") == []


def test_a_saved_model_is_whole(models, tmp_path, plain_python):
    """Names as on the hub, and the image processor beside it."""
    folder = models["qwen2_5_vl"]
    record = SimpleNamespace(args=settings(folder), world=common.init_world(), folder=tmp_path, say=print)
    policy = common.load_policy(folder, record.args, record.world)
    common.save_model(policy, "model", folder, 5, record)
    assert (tmp_path / "model" / "preprocessor_config.json").is_file()
    saved, source = (load_file(each / "model.safetensors") for each in (tmp_path / "model", folder))
    assert saved.keys() == source.keys() and all(torch.equal(saved[name], source[name]) for name in saved)
