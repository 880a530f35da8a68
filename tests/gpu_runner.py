"""What vLLM samples with on GPUs, on a CPU: Model Runner V2 with asynchronous scheduling, its kernels interpreted.

test_gpu_runner.py starts it with TRITON_INTERPRET and VLLM_USE_V2_MODEL_RUNNER. An engine that sleeps has NaN in its
weights and buffers until they are loaded, as a GPU's memory is lost. It prints what it found.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import sampler_checks
import torch
from transformers import AutoTokenizer
from triton.backends import backends

import common


def sleep(worker, level: int) -> None:
    """Lose weights and buffers; at level 2 a GPU keeps a copy of the buffers alone."""
    worker.kept = {name: buffer.clone() for name, buffer in worker.model_runner.model.named_buffers()}
    for lost in (*worker.model_runner.model.parameters(), *worker.model_runner.model.buffers()):
        lost.data.fill_(torch.nan)


def wake_up(worker, tags: list[str]) -> None:
    """Give the buffers back, as on a GPU."""
    if "weights" in tags:
        for name, buffer in worker.model_runner.model.named_buffers():
            buffer.data.copy_(worker.kept[name])


def main(model: str, folder: str) -> None:
    """Do what sampler_checks.py does, asleep between any two samplings."""
    # vLLM asks for a driver of the device before it takes Triton's kernels
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker

    checked = CpuPlatform.check_and_update_config

    def schedule_ahead(config) -> None:
        checked(config)
        config.scheduler_config.async_scheduling = True  # which this platform turns off

    CpuPlatform.check_and_update_config = staticmethod(schedule_ahead)
    CPUWorker.sleep = sleep
    CPUWorker.wake_up = wake_up
    torch.cuda.empty_cache = lambda: None
    args = common.Args(model, max_prompt_tokens=32, max_response_tokens=8, run_dir=folder, temperature=1.3)
    world = common.init_world()
    tokenizer = AutoTokenizer.from_pretrained(model)
    sampler = common.Sampler(model, tokenizer, args, world)
    sampler.stop = set(range(0, 263, 9))  # so many that of these short responses some stop and some are cut
    sampler.sleeps = True
    sampler.sleep()
    problems = [common.Problem("", tokenizer.encode("hdx39=?\n" * 3)[: 6 + 3 * n], "0") for n in range(3)]
    policy = common.load_policy(Path(model), args, world)
    found = sampler_checks.check(args, sampler, policy, problems)
    config = sampler.llm.llm_engine.vllm_config
    found["runner"] = config.use_v2_model_runner
    found["ahead"] = config.scheduler_config.async_scheduling
    found["stop"] = sorted(sampler.stop)
    print(json.dumps(found))


main(*sys.argv[1:])
