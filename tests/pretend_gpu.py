"""A pretended GPU: the project's CUDA branches on torch's CPU build, forward and backward, in seconds.

test_pretend_gpu.py asks it for jobs such as {"name": "learn", "ranks": 8, "script": "gpg"}.

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
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import bench
import numpy as np
import torch
import torch.distributed as dist
from jobs import serve
from safetensors.torch import load_file
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
import sspo

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
        chosen_by_mask = func is aten.index.Tensor and getattr(args[1][0], "dtype", None) == torch.bool
        if chosen_by_mask and real is None:
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
        # torch.tensor(…, device="cuda") then makes its tensor on the CPU and moves it, which this mode sees.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        torch._C._set_only_lift_cpu_tensors(False)
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
def described(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return the dtypes and the kinds of device that there are among these tensors."""
    return sorted({f"{x.dtype} on {x.device.type}" for x in tensors})


def places(model) -> list[str]:
    """Return the kinds of device on which a model's parameters and buffers are."""
    return sorted({x.device.type for x in (*model.parameters(), *model.buffers())})


def held(gpu: Gpu) -> int:
    """Return the bytes on the GPU, without those that only a cycle of references still held."""
    gc.collect()
    return gpu.now


def checked_attention(windows: set) -> Callable:
    """Return varlen_attn that checks what reaches it, and notes windows. A piece may see more keys than it has queries,
    which is how responses see their prompt."""
    attention = varlen.varlen_attn

    def checked(query, key, value, query_ends, key_ends, longest_query, longest_key, **how):
        queries, keys = query_ends.value.diff(), key_ends.value.diff()
        assert described([query, key, value]) == ["torch.bfloat16 on cuda"]
        assert described([query_ends, key_ends]) == ["torch.int32 on cuda"]
        assert query_ends.value[[0, -1]].tolist() == [0, len(query)], "queries are covered"
        assert key_ends.value[[0, -1]].tolist() == [0, len(key)] == [0, len(value)], "keys are covered"
        assert (keys >= queries).all(), "a piece sees itself"
        assert longest_query >= queries.max().item() and longest_key >= keys.max().item()
        assert type(longest_query) is type(longest_key) is int
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert how["enable_gqa"], "else heads could not be grouped"
        windows.add(tuple(how["window_size"]))
        return attention(query, key, value, query_ends, key_ends, longest_query, longest_key, **how)

    return checked


def lower_right(queries: int, keys: int) -> torch.Tensor:
    """Return the mask that torch's causal_lower_right stands for, a tensor of a class that no mode can see."""
    return torch.ones(queries, keys, device="cuda").tril(keys - queries).bool()


def noted_linear(logits: set) -> Callable:
    """Return F.linear that notes the dtypes of logits, which have a column for each of the 263 words."""
    linear = torch.nn.functional.linear

    def noted(*operands):
        out = linear(*operands)
        if out.shape[-1] == 263:
            logits.add(str(out.dtype))
        return out

    return noted


def checked_score(gpu: Gpu, scored: set) -> Callable:
    """Return `common.score` that checks that a reference waits on the host, and that nothing stays on the GPU. It notes
    of each model whether it trains."""
    score = common.score

    def checked(policy, *rest, **how):
        trains = any(x.requires_grad for x in policy.parameters())
        home = ["cuda"] if trains else ["cpu"]
        within = []
        hook = policy.register_forward_pre_hook(lambda *_: within.extend(places(policy)))
        before = held(gpu)
        assert places(policy) == home
        result = score(policy, *rest, **how)
        hook.remove()
        assert set(within) == {"cuda"} and places(policy) == home
        assert held(gpu) == before, "something stays gathered, or on the GPU"
        scored.add(trains)
        return result

    return checked


def groups(problems: list[common.Problem] | None = None) -> list[common.Group]:
    """Return four responses of 1 to 29 tokens to each problem, by default to six random ones; half are right."""
    rng = np.random.default_rng(7)
    if problems is None:
        problems = [common.Problem("", rng.integers(0, 263, rng.integers(2, 12)).tolist(), "0") for _ in range(6)]
    found = []
    reward_G = torch.tensor([1.0, 0.0, 0.0, 1.0]).double()
    for problem in problems:
        rollouts = []
        for length in rng.integers(1, 30, 4):
            rollouts.append(common.Rollout(rng.integers(0, 263, length), np.zeros(length, np.float32), "", False))
        found.append(common.Group(problem, rollouts, reward_G, reward_G))
    return found


def step(script: str, policy, reference, optimizer, batch, record) -> dict:
    """Make a script's step, each with the arguments of its own, and return its metrics."""
    module = importlib.import_module(script)
    learn = module.learn
    if script == "sspo":
        whole = SimpleNamespace(
            rank=0, size=1, all_gather=lambda mine: [mine]
        )  # no share that the others, imagined, had
        of_world = module.step_segments
        with mock.patch.object(module, "step_segments", lambda *how: of_world(*how[:-1], whole)):
            return learn(policy, optimizer, batch, AutoTokenizer.from_pretrained(record.args.model), record)[0]
    seed = [5] if script == "cwgrpo" else []
    return learn(policy, reference, optimizer, batch, *seed, record)[0]


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
    """Make a script's step on a model's real weights, and check what lies where."""
    module = importlib.import_module(script)
    folder = Path(tempfile.mkdtemp())
    limits = {"max_prompt_tokens": 160, "max_response_tokens": 100, "micro_batch_tokens": 300}
    if images:
        limits |= {"image_column": "image", "dataset": f"{model}/problems.parquet", "micro_batch_tokens": 800}
    args = module.Args(model=model, run_dir=str(folder / "run"), group_size=4, template="plain", **limits | flags)
    windows = set()
    scored = set()
    logits = set()
    with world_of(ranks, local or ranks) as world, Gpu(scalar) as gpu, contextlib.ExitStack() as watching:
        watching.enter_context(mock.patch.object(varlen, "varlen_attn", checked_attention(windows)))
        watching.enter_context(mock.patch.object(common, "score", checked_score(gpu, scored)))
        watching.enter_context(mock.patch.object(common.F, "linear", noted_linear(logits)))
        watching.enter_context(mock.patch.object(common, "causal_lower_right", lower_right))
        problems = None
        if images:
            problems = common.load_problems(args.dataset, AutoTokenizer.from_pretrained(model), args, "--dataset")
        batch = common.Batch(groups(problems))
        record = common.Record(args, script, world)
        policy = common.load_policy(Path(model), args, world)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, fused=True)
        if irl:
            module.learn_irl(policy, [batch] * 2, record)
        else:
            reference = None
            if script != "sspo" and args.kl_coef:
                reference = common.load_policy(Path(model), args, world).requires_grad_(False).to("cpu")
            step(script, policy, reference, optimizer, batch, record)
            del reference
        weights = list(policy.parameters())
        gradients = [x.grad for x in weights]
        moments = [x for state in optimizer.state.values() for x in state.values()]
        sharded = [getattr(x, "_local_tensor", x) for x in (*weights, *gradients, *moments)]
        storages = {x.untyped_storage() for x in (*sharded, *policy.buffers())}
        assert places(policy) == ["cuda"] and described(gradients) == ["torch.float32 on cuda"]
        here = sum(x.to_local().numel() for x in weights)
        assert 1 <= here * (local or ranks) / sum(x.numel() for x in weights) < 1.05, "a share of the policy"
        assert held(gpu) == sum(-(-x.nbytes() // 512) * 512 for x in storages), "and nothing else"
        return {
            "optimizer_steps": len(record.grad_norms[""]),
            "skipped": record.skipped,
            "windows": windows,
            "scored": scored,
            "moments": described(moments),
            "logits": logits,
        }


def folders() -> None:
    """Load a model, update it, write a checkpoint, resume from it and save the model, and check what comes of it."""
    folder = Path(tempfile.mkdtemp())
    limits = {"max_prompt_tokens": 100, "max_response_tokens": 100, "micro_batch_tokens": 300}
    args = sspo.Args(model=str(TOY), run_dir=str(folder / "run"), group_size=4, updates_per_step=1, **limits)
    with world_of(1, 1) as world, Gpu() as gpu:
        record = common.Record(args, "sspo", world)
        policy, other = (common.load_policy(TOY, args, world) for _ in range(2))
        mine, its = (torch.optim.AdamW(each.parameters(), fused=True) for each in (policy, other))
        step("sspo", policy, None, mine, common.Batch(groups()), record)
        record.write("metrics.jsonl", "{}")  # a checkpoint knows how far they went
        common.save_checkpoint(policy, mine, 1, 24, record)
        record.args = replace(args, resume=True)
        assert common.resume(other, its, record) == (1, 24) and places(other) == ["cuda"]
        moments = [x for state in its.state.values() for x in state.values()]
        assert described(moments) == ["torch.float32 on cuda"] and len(its.state) == len(list(other.parameters()))
        before = held(gpu)
        sent = dict(common.full_weights(policy, torch.bfloat16))
        common.save_model(policy, folder / "model", TOY, torch.bfloat16, world)
        saved = load_file(folder / "model" / "model.safetensors")
        assert described(sent.values()) == ["torch.bfloat16 on cuda"]
        assert described(saved.values()) == ["torch.bfloat16 on cpu"]
        assert {name: x.shape for name, x in sent.items()} == {name: x.shape for name, x in saved.items()}
        del sent
        assert held(gpu) == before, "something stays gathered"


def peak(shape: str, ranks: int, local: int, tokens: int, recompute: bool, layers: int = 0) -> list[int]:
    """Return the peak of bytes on a GPU over two updates of two micro-batches of so many tokens, and what
    `bench.training_bytes` computes. Fewer `layers` than the shape's take less time."""
    name = bench.SHAPES[shape]
    name = name._replace(layers=layers or name.layers)
    folder = tempfile.mkdtemp()
    bench.config_of(name).save_pretrained(folder)
    count = tokens // 1024
    batch = bench.random_batch(name.vocabulary, 128, 896, count)
    args = common.Args(activation_checkpointing=recompute)
    unread = mock.patch.multiple(common, dcp=mock.DEFAULT, reader_of=mock.DEFAULT)  # there are no weights to read
    with unread, world_of(ranks, local) as world, Gpu() as gpu:
        policy = common.load_policy(Path(folder), args, world)
        optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
        micro = batch.pack(list(range(count)), world.device)
        gpu.peak = held(gpu)
        for _ in range(2):  # The second finds moments.
            optimizer.zero_grad()
            for _ in range(2):  # The second finds gradients.
                policy(micro)[0].sum().backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).full_tensor().item()
            optimizer.step()
    return [gpu.peak, bench.training_bytes(name, local, tokens, recompute)]


def join() -> None:
    """Check what `init_world` makes of this process where there is a GPU; the fake backend is in NCCL's place."""
    really_join = dist.init_process_group
    backends = []

    def joined(backend, **how):
        backends.append(backend)
        really_join(backend.replace("nccl", "fake"), **how)

    yes = dict.fromkeys(("is_available", "is_initialized", "set_device"), lambda *_: True)
    replaced = mock.patch.object(dist, "init_process_group", joined)
    with mock.patch.multiple(torch.cuda, **yes), replaced:
        world = common.init_world()
    assert backends == ["cpu:gloo,cuda:nccl"] and world.device == torch.device("cuda", 0)
    assert (world.mesh.device_type, world.mesh.shape, world.mesh.mesh_dim_names) == ("cuda", (1,), ("shard",))
    assert world.all_gather(7) == [7] and world.all_reduce(torch.tensor([1.0])).tolist() == [1.0]
    dist.destroy_process_group()


def do(name: str, **job):
    """Do a job: call the function of that name."""
    return {"learn": learn, "folders": folders, "peak": peak, "join": join}[name](**job)


if __name__ == "__main__":
    patch()
    gc.freeze()  # `held` need not look through what has been imported.
    tempfile.tempdir = sys.argv[-1]
    serve(do)
