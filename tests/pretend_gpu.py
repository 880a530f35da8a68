"""A pretended GPU: the project's CUDA branches on torch's CPU build, forward and backward, in seconds.

test_pretend_gpu.py asks it for jobs such as {"ranks": 8, "script": "gpg"}.

It finds a tensor on the wrong device, and what stays on a GPU; a check that fails ends the process. CPU tensors are
real. A CUDA tensor is fake: it has a shape, a dtype, a device and a size, but no values. Integers that come from the
CPU, and what is computed from them alone, keep their values: places, lengths, an image's grid. Collectives move
nothing: this process is one rank, and the other ranks are imagined. It cannot see values, the limits of kernels, NCCL,
memory between operations, speed, or vLLM.

For whoever meets another torch: `patch` writes into tables of C++ whose slots are those of torch 2.13. Its comments say
where each is declared and what it is for. Look there, put the slots right, then change TORCH.
"""

import contextlib
import ctypes
import gc
import sys
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import prove
import torch
import torch.distributed as dist
from jobs import serve
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoTokenizer

import common

TORCH = "2.13."
KEPT = []  # C++ points at these
aten = torch.ops.aten


class Stream(torch.cpu.Stream):
    """What FSDP takes for a stream of CUDA."""

    def record_event(self, event=None):
        return torch.cpu.Event()


def patch() -> None:
    """Let this process trace CUDA tensors, for good. In a torch whose C++ tables nobody has looked at, writing there
    would end the process."""
    assert torch.__version__.startswith(TORCH), "its C++ tables are unknown: see above"
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
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.cuda._lazy_init = lambda: None
    # torch.tensor(…, device="cuda") then makes its tensor on the CPU and moves it, which `Gpu` sees.
    torch._C._set_only_lift_cpu_tensors(True)


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
    """`with Gpu() as gpu:` there is a torch.device("cuda", 0). 1 stands for every number that leaves it alone, such as
    a gradient's norm."""

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.storages = weakref.WeakSet()

    def held(self) -> int:
        """Return the bytes of what is there, without what only a cycle of references still holds."""
        gc.collect()
        return sum(storage.nbytes() for storage in self.storages)

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
            return torch.tensor(1, dtype=fakes[0].dtype).item() if real is None else real
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
        self.storages.add(x.untyped_storage())
        vars(x).pop("value", None)  # an operation in place may have made it unknown
        if value is not None:
            x.value = value
        return x


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
def places(tensors) -> set[str]:
    """Return the kinds of device on which these tensors are."""
    return {x.device.type for x in tensors}


def shards_of(policy):
    """Return where this rank's shares of the weights lie."""
    return [weight.to_local().untyped_storage()._cdata for weight in policy.parameters()]


def watched_score(gpu: Gpu):
    """Let `common.logprobs` check that a reference waits on the host, and that nothing stays on the GPU."""
    logprobs = common.logprobs

    def watched(policy, *rest, **how):
        weights = list(policy.parameters())
        home = {"cuda"} if weights[0].requires_grad else {"cpu"}
        before = gpu.held()
        shards = shards_of(policy)
        assert places(weights) == home
        result = logprobs(policy, *rest, **how)
        assert places(policy.parameters()) == home
        assert shards == shards_of(policy), "weights that did not change were copied"
        assert gpu.held() == before, "something stays gathered, or on the GPU"
        return result

    return mock.patch.object(common, "logprobs", watched)


def learn(script, model, ranks=8, local=8, irl=False, **flags):
    """Make a script's step on a model's real weights, and check what lies where. Every update begins with an empty
    micro-batch."""
    module, args = prove.load(f"{script}.py", ["--model", model, "--prompts-per-step=6", "--micro-batch-tokens=800"])
    args = replace(args, run_dir=tempfile.mkdtemp(), **flags)
    tokenizer = AutoTokenizer.from_pretrained(model)
    batch = prove.Batch(prove.fixed_groups(args, tokenizer, []))
    with world_of(ranks, local) as world, Gpu() as gpu, watched_score(gpu):
        record = common.Record(args, world)
        policy = common.load_policy(Path(model), args, world)
        optimizer = common.adamw(policy, args.lr, args)
        record.gap_checked = True  # the sampler's log-probs are made up
        if irl:
            module.learn_irl(policy, [batch] * 2, record)
        elif script == "sspo":
            alone = World(0, 1, 1, None, None)  # imagined ranks cut no responses into segments
            segments = partial(module.step_segments, world=alone)
            with mock.patch.object(module, "step_segments", lambda *given: segments(*given[:-1])):
                module.learn(policy, optimizer, batch, tokenizer, record)
        else:
            reference = None
            if args.kl_coef:
                reference = common.load_policy(Path(model), args, world).requires_grad_(False).to("cpu")
            seed = [5] if script == "cwgrpo" else []
            module.learn(policy, reference, optimizer, batch, *seed, record)
            del reference
        kept = [*policy.buffers()]
        for weight in policy.parameters():
            kept += [weight, weight.grad, *optimizer.state[weight].values()]
        assert places(kept) == {"cuda"}
        storages = {getattr(x, "_local_tensor", x).untyped_storage() for x in kept}
        assert gpu.held() == sum(storage.nbytes() for storage in storages), "a share of the policy, and nothing else"


if __name__ == "__main__":
    patch()
    gc.freeze()  # `held` need not look through what has been imported.
    tempfile.tempdir = sys.argv[-1]
    serve(learn)
