"""A pretended GPU: the project's CUDA branches on torch's CPU build, forward and backward, in seconds.

    python tests/pretend_gpu.py    answers jobs, a line of JSON each, such as {"job": "learn", "ranks": 8, "script": "gpg"}

CPU tensors are real. A CUDA tensor is fake: it has a shape, a dtype and a device, and its bytes are counted, but it has
no values. Integers that come from the CPU, and what is computed from them alone, keep their values: places, lengths, an
image's grid. Collectives move nothing: this process is rank 0, and the other ranks are imagined.

It cannot see values, the limits of kernels (head sizes, alignment, what cuDNN lacks), NCCL, the fragmentation of memory
and what CUDA itself takes, speed, or vLLM.

For whoever meets another torch: `patch` writes into tables of C++ whose slots are those of torch 2.13. Its comments say
where each is declared and what it is for. Look there, put the slots right, then change TORCH.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import sys
import tempfile
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import bench
import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import varlen
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoTokenizer

import common

TORCH = "2.13."
TOY = Path(__file__).parent.parent / "tools" / "toy" / "model"
KEPT = []  # C++ points at these
aten = torch.ops.aten


class Stream(torch.cpu.Stream):
    """What FSDP takes for a stream of CUDA."""

    def record_event(self, event=None):
        return torch.cpu.Event()


def patch() -> None:
    """Let this process trace CUDA tensors, for good. Raises RuntimeError for a torch whose C++ tables nobody has looked
    at, or one built for CUDA: writing there would end the process."""
    if not torch.__version__.startswith(TORCH) or torch.version.cuda:
        known = f"tests/pretend_gpu.py knows the C++ tables of the CPU build of torch {TORCH}x only"
        raise RuntimeError(f"{known}, and this is torch {torch.__version__}; its docstring says what to do")
    pointer = ctypes.c_void_p
    table = pointer * 64
    folder = Path(torch.__file__).parent / "lib"
    # The registry of device guards (c10/core/impl/DeviceGuardImplInterface.h) has a slot for each type of device; that
    # of CUDA is 1. Autograd asks a guard for streams. torch has one that does nothing and puts it in the place of one
    # that counts 0 devices, so first a guard is needed whose every method returns 0.
    guards = (pointer * 22).in_dll(ctypes.CDLL(folder / "libc10.so"), "_ZN3c104impl26device_guard_impl_registryE")
    zero = ctypes.CFUNCTYPE(ctypes.c_int8)(lambda: 0)
    zeros = table(*[ctypes.cast(zero, pointer).value] * 64)
    guard = pointer(ctypes.addressof(zeros))
    guards[1] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    # Autograd asks the hooks of CUDA (aten/src/ATen/detail/CUDAHooksInterface.h), too. A table of virtual methods has
    # them in the order of their declaration, bases first: 2 is isBuilt, which has to say yes, as the guard's first
    # method does (it returns its type, 1); 3 is isAvailable, which says no; 4 is hasPrimaryContext, which would raise.
    hooks_of = ctypes.CDLL(folder / "libtorch_cpu.so")._ZN2at6detail12getCUDAHooksEv
    hooks_of.restype = pointer
    hooks = pointer.from_address(hooks_of())
    methods = table(*table.from_address(hooks.value))
    methods[2] = table.from_address(pointer.from_address(guards[1]).value)[0]
    methods[4] = methods[3]
    hooks.value = ctypes.addressof(methods)
    KEPT.extend([zero, zeros, guard, methods])
    torch.cuda.Stream = Stream
    torch.cuda.Event = torch.cpu.Event
    torch.cuda.stream = torch.cpu.stream
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda *_: "pretended"
    torch.cuda._lazy_init = lambda: None


def values(func, args, kwargs):
    """Return what an operation on integers gives on the CPU; None where a value is unknown or not an integer."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    dtypes = [kwargs.get("dtype") or torch.int64] + [x.dtype for x in tensors]
    if any(dtype.is_floating_point for dtype in dtypes) or not (tensors or kwargs.get("dtype")):
        return None
    if not all(hasattr(x, "value") for x in tensors if isinstance(x, FakeTensor)):
        return None

    def real(x):
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return getattr(x, "value", x) if isinstance(x, FakeTensor) else x

    return func(*tree_map(real, args), **tree_map(real, kwargs))


class Gpu(TorchDispatchMode):
    """`with Gpu() as gpu:` there is a torch.device("cuda", 0). `now` and `peak` are the bytes of its tensors; `scalar`
    stands for every floating-point number that leaves it alone, such as a gradient's norm."""

    def __init__(self, scalar: float = 1.0):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.scalar = scalar
        self.held = {}
        self.now = 0
        self.peak = 0

    def count(self, key: int, size: int) -> None:
        """Note how many bytes a storage has now; torch hands them out in multiples of 512."""
        rounded = -(-size // 512) * 512
        self.now += rounded - self.held.get(key, 0)
        self.held[key] = rounded
        self.peak = max(self.peak, self.now)

    def forget(self, key: int) -> None:
        self.now -= self.held.pop(key)

    def see(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata not in self.held:
            weakref.finalize(storage, self.forget, storage._cdata)
        self.count(storage._cdata, storage.nbytes())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented
        leaves = tree_leaves((args, kwargs))
        fakes = [x for x in leaves if isinstance(x, FakeTensor)]
        cuda = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
        if active_fake_mode() or not (fakes or cuda):  # DTensor thinks about the shapes of whole tensors
            return func(*args, **kwargs)
        real = values(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            unknown = self.scalar if fakes[0].is_floating_point() else 1
            return torch.tensor(unknown, dtype=fakes[0].dtype).item() if real is None else real
        if func is aten.index.Tensor and real is None and args[1][0].dtype == torch.bool:
            return args[0].flatten()  # as if all were chosen
        with self.fake:
            try:
                out = func(*args, **kwargs)
            except DynamicOutputShapeException:
                if real is None:
                    raise
                out = tree_map(lambda x: torch.empty_like(x, device="cuda"), real)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0].zero_() if real is None else real
        if real is None:
            return tree_map(self.landed, out)
        return tree_map(self.landed, out, real)

    def landed(self, x, value=None):
        """Return an operation's result: on the CPU a real tensor, zeros where nobody knows better."""
        if not isinstance(x, FakeTensor):
            return x
        if x.device.type == "cpu":
            return torch.zeros(x.shape, dtype=x.dtype) if value is None else value
        self.see(x)
        vars(x).pop("value", None)  # an operation in place may have made it unknown
        if value is not None:
            x.value = value
        return x

    def __enter__(self):
        resize = self.resize = torch.UntypedStorage.resize_

        def counted(storage, size):
            resize(storage, size)
            if storage._cdata in self.held:
                self.count(storage._cdata, storage.nbytes())

        torch.UntypedStorage.resize_ = counted  # how FSDP frees what it has gathered
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)


class World(common.World):
    """A rank whose others, imagined, have what it has."""

    def all_gather(self, thing) -> list:
        return [thing] * self.size


@contextlib.contextmanager
def world_of(ranks: int, local: int) -> Iterator[World]:
    """Rank 0 of so many, `local` of them on a node."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    dims = {"shard": local} if ranks == local else {"replicate": ranks // local, "shard": local}
    mesh = init_device_mesh("cuda", tuple(dims.values()), mesh_dim_names=tuple(dims))
    yield World(0, ranks, local, torch.device("cuda", 0), mesh)
    dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------------------- jobs
def described(calls: list) -> callable:
    """Return varlen_attn that first notes what reaches it; keys may be more than queries."""
    real = varlen.varlen_attn

    def noting(query, key, value, query_ends, key_ends, longest_query, longest_key, **how):
        pieces = [ends.value.diff() for ends in (query_ends, key_ends)]
        calls.append(
            {
                "dtypes": sorted({str(x.dtype) for x in (query, key, value)}),
                "borders": sorted({str(x.dtype) for x in (query_ends, key_ends)}),
                "devices": sorted({x.device.type for x in (query, key, value, query_ends, key_ends)}),
                "row ends": query_ends.value[[0, -1]].tolist() == [0, len(query)],
                "keys end": key_ends.value[[0, -1]].tolist() == [0, len(key)] and len(key) == len(value),
                "a piece sees itself": bool((pieces[1] >= pieces[0]).all()),
                "longest": [longest_query, longest_key] == [int(each.max()) for each in pieces],
                "numbers": type(longest_query) is type(longest_key) is int,
                "channels lie together": query.stride(-1) == key.stride(-1) == value.stride(-1) == 1,
                "window": list(how["window_size"]),
                "heads": [query.shape[1], key.shape[1], how["enable_gqa"]],
            }
        )
        return real(query, key, value, query_ends, key_ends, longest_query, longest_key, **how)

    return noting


def groups(problems: list[common.Problem] | None = None) -> list[common.Group]:
    """Return four responses of 1 to 29 tokens to each problem, by default to six random ones; half are right."""
    rng = np.random.default_rng(7)
    if problems is None:
        problems = [common.Problem("", rng.integers(0, 263, rng.integers(2, 12)).tolist(), "0") for _ in range(6)]
    found = []
    for problem in problems:
        rollouts = []
        for length in rng.integers(1, 30, 4):
            rollouts.append(common.Rollout(rng.integers(0, 263, length), np.zeros(length, np.float32), "", False))
        reward_G = torch.tensor([1.0, 0.0, 0.0, 1.0]).double()
        found.append(common.Group(problem, rollouts, reward_G, reward_G))
    return found


def places(model) -> list[str]:
    """Return the kinds of device on which a model's parameters and buffers are."""
    return sorted({x.device.type for x in (*model.parameters(), *model.buffers())})


def held(gpu: Gpu) -> int:
    """Return the bytes on the GPU without what only a cycle of references still holds."""
    gc.collect()
    return gpu.now


def learn(
    script: str,
    ranks: int = 1,
    local: int = 0,
    model: str = str(TOY),
    images: bool = False,
    irl: bool = False,
    scalar: float = 1.0,
    **flags,
) -> dict:
    """Make a script's step on a model's real weights; return what happened where."""
    module = importlib.import_module(script)
    folder = Path(tempfile.mkdtemp())
    limits = {"max_prompt_tokens": 160, "max_response_tokens": 100, "micro_batch_tokens": 300}
    if images:
        limits |= {"image_column": "image", "dataset": f"{model}/problems.parquet", "micro_batch_tokens": 800}
    args = module.Args(model=model, run_dir=str(folder / "run"), group_size=4, template="plain", **limits | flags)
    attention = []
    scored = []
    score = common.score
    with world_of(ranks, local or ranks) as world, Gpu(scalar) as gpu, contextlib.ExitStack() as after:
        after.callback(setattr, common, "score", score)
        after.callback(setattr, varlen, "varlen_attn", varlen.varlen_attn)
        varlen.varlen_attn = described(attention)

        def watched(policy, *rest):
            note = {"model": "policy" if policy is models[0] else "reference", "before": places(policy)}
            hook = policy.register_forward_pre_hook(lambda *_: note.update(within=places(policy)))
            bytes_before = held(gpu)
            result = score(policy, *rest)
            hook.remove()
            scored.append(note | {"after": places(policy), "left": held(gpu) - bytes_before})
            return result

        common.score = watched
        tokenizer = AutoTokenizer.from_pretrained(model)
        problems = common.load_problems(args.dataset, tokenizer, args, "--dataset") if images else None
        record = common.Record(args, script, world)
        models = [common.load_policy(Path(model), args, world)]
        if script != "sspo" and not irl:
            models.append(None)
            if args.kl_coef:
                models[1] = common.load_policy(Path(model), args, world).requires_grad_(False).to("cpu")
        policy = models[0]
        optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, fused=True)
        batch = common.Batch(groups(problems))
        if irl:
            metrics = module.learn_irl(policy, [batch] * 2, record)
        else:
            more = {"sspo": [tokenizer], "cwgrpo": [5]}.get(script, [])
            metrics = module.learn(*models, optimizer, batch, *more, record)
        trained = [x for x in policy.parameters() if x.requires_grad]
        gradients = [x.grad for x in trained if x.grad is not None]
        moments = [x for state in optimizer.state.values() for x in state.values()]
        local_tensors = [getattr(x, "_local_tensor", x) for x in (*policy.parameters(), *gradients, *moments)]
        storages = {x.untyped_storage() for x in (*local_tensors, *policy.buffers())}
        return {
            "metrics": metrics,
            "skipped": record.skipped,
            "attention": attention,
            "scored": scored,
            "places": places(policy),
            "gradients": [sorted({str(x.dtype) for x in gradients}), len(gradients), len(trained)],
            "moments": sorted({f"{x.dtype} on {x.device.type}" for x in moments}),
            "weights": sum(x.numel() for x in policy.parameters()),
            "its weights": sum(x.to_local().numel() for x in policy.parameters()),
            "bytes": held(gpu),
            "own bytes": sum(-(-x.nbytes() // 512) * 512 for x in storages),
        }


def folders(ranks: int = 1, local: int = 0) -> dict:
    """Load a model, update it, write a checkpoint, resume from it and save the model; return what came of it."""
    import sspo

    folder = Path(tempfile.mkdtemp())
    limits = {"max_prompt_tokens": 100, "max_response_tokens": 100, "micro_batch_tokens": 300}
    args = sspo.Args(model=str(TOY), run_dir=str(folder / "run"), group_size=4, **limits)
    with world_of(ranks, local or ranks) as world, Gpu():
        record = common.Record(args, "sspo", world)
        policy, other = (common.load_policy(TOY, args, world) for _ in range(2))
        mine, its = (torch.optim.AdamW(each.parameters(), fused=True) for each in (policy, other))
        sspo.learn(policy, mine, common.Batch(groups()), AutoTokenizer.from_pretrained(TOY), record)
        common.save_checkpoint(policy, mine, 1, 24, record)
        record.args = replace(args, resume=True)
        at = common.resume(other, its, record)
        sent = {name: [str(x.dtype), x.device.type, list(x.shape)] for name, x in common.full_weights(policy, torch.bfloat16)}
        common.save_model(policy, folder / "model", TOY, torch.bfloat16, world)
        with safe_open(folder / "model" / "model.safetensors", "pt") as file:
            saved = {name: [str(x.dtype), list(x.shape)] for name in file.keys() for x in [file.get_tensor(name)]}
        return {
            "resumed at": at,
            "checkpoint": sorted(file.name for file in (folder / "run/checkpoints/step-00001").iterdir()),
            "places": places(other),
            "moments": sorted({f"{x.dtype} on {x.device.type}" for state in its.state.values() for x in state.values()}),
            "with moments": [len(its.state), len(list(other.parameters()))],
            "sent": sent,
            "saved": saved,
        }


def peak(shape: str, tokens: int, ranks: int = 1, local: int = 0, recompute: bool = True, length: int = 1024) -> dict:
    """Return the peak of bytes on a GPU over an update of two micro-batches of so many tokens, once the moments are
    there, as `bench.training_bytes` computes it."""
    name = bench.SHAPES[shape]
    folder = Path(tempfile.mkdtemp())
    bench.config_of(name).save_pretrained(folder)
    count = tokens // length
    batch = bench.random_batch(name.vocabulary, length // 8, length - length // 8, count)
    args = common.Args(activation_checkpointing=recompute)
    load = common.dcp.load
    peaks = []
    with world_of(ranks, local or ranks) as world, Gpu() as gpu, contextlib.ExitStack() as after:
        after.callback(setattr, common.dcp, "load", load)
        common.dcp.load = lambda *_, **__: None  # there are no weights to be read
        policy = common.load_policy(folder, args, world)
        optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
        micro = batch.pack(list(range(count)), world.device)
        for _ in range(2):
            optimizer.zero_grad()
            gpu.peak = held(gpu)
            for _ in range(2):
                logp_T, _ = policy(micro)
                logp_T.sum().backward()
                del logp_T
                peaks.append(gpu.peak)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).full_tensor().item()
            optimizer.step()
            peaks.append(gpu.peak)
    return {"peak": max(peaks), "peaks": peaks, "computed": bench.training_bytes(name, local or ranks, tokens, recompute)}


JOBS = {"learn": learn, "folders": folders, "peak": peak}


def main() -> None:
    """Answer the jobs on stdin: a line of JSON for each, its result or its traceback."""
    replies = sys.stdout
    sys.stdout = sys.stderr
    patch()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            reply = {"result": JOBS[job.pop("job")](**job)}
        except Exception:
            reply = {"error": traceback.format_exc()}
            if dist.is_initialized():
                dist.destroy_process_group()
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
