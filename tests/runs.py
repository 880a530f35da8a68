"""Run whole scripts on one vLLM engine in each process: a job is {"script": "sspo", "flags": ["--steps", "3", ...]}.

The process group and the engine, whose model and dtype are the first arguments, stay; everything else is each run's
own, the weights in the engine included. test_script.py holds the numbers of a run here against those of one that was
started by itself.
"""

import contextlib
import gc
import importlib
import io
import multiprocessing
import signal
import sys
from pathlib import Path

import tyro
from jobs import serve
from transformers import AutoTokenizer

import common


def same_engine(**settings):
    """Stand in for the constructor of vllm.LLM; the scheduler ends responses where an engine of one's own would."""
    config = llm.llm_engine.model_config
    assert settings["max_model_len"] <= config.max_model_len and settings["dtype"] == config.dtype
    llm.llm_engine.engine_core.engine_core.scheduler.max_model_len = settings["max_model_len"]
    return llm


def run(script: str, flags: list) -> str:
    """Call the script's main as its command line would; return what rank 0 printed."""
    module, flags = importlib.import_module(script), list(map(str, flags))
    sys.argv = [module.__file__, *flags]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        if script == "eval":
            module.main()
        else:
            module.main(tyro.cli(module.Args, args=flags))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # whose handler would keep the record, and the lock of its folder
    for child in multiprocessing.active_children():
        child.kill()  # its verifier's processes
    gc.collect()  # no weights of this run beside those of the next one
    return printed.getvalue()


if __name__ == "__main__":
    model = Path(sys.argv[1])
    world = common.init_world()
    args = common.Args(model=str(model), max_prompt_tokens=160, max_response_tokens=96, compute_dtype=sys.argv[2])
    llm = common.Sampler(model, AutoTokenizer.from_pretrained(model), args, world).llm
    llm.llm_engine.engine_core.shutdown = lambda: None
    common.init_world = lambda: world
    sys.modules["vllm"].LLM = same_engine
    serve(run)
