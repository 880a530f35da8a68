"""The processes of a run: how they find each other, what they exchange, and who asks the hub."""

import ctypes
import hashlib
import os
import sys
from collections import namedtuple
from contextlib import contextmanager
from datetime import timedelta
from signal import SIG_IGN, SIGKILL, SIGUSR1, signal

import datasets
import huggingface_hub
import torch
import torch.distributed as dist

from lib.messages import ALONE, BY_TORCHRUN, Refused, print_error, refuse_errors


def end_with_parent():
    """Let the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(1, SIGKILL)  # PR_SET_PDEATHSIG


class World(namedtuple("World", "rank size local_size device mesh")):
    """This process among the others. `mesh` shards inside a node, of local_size, and replicates across nodes."""

    def all_gather(self, thing):
        """Return every rank's picklable `thing`, in rank order."""
        things = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def all_gather_shares(self, mine):
        """Return the items of which every rank has made a share, `mine`: rank r made items r, r + size, and so on."""
        shares = self.all_gather(mine)
        return [shares[n % self.size][n // self.size] for n in range(sum(map(len, shares)))]

    def from_rank_0(self, thing):
        """Return rank 0's `thing`, on every rank: its clock and its view of the disk decide for all."""
        return self.all_gather(thing)[0]

    def all_reduce(self, x):
        """Add a CPU tensor over ranks, in place, and return it."""
        dist.all_reduce(x)
        return x


def init_world():
    """Join torchrun's process group, or for plain `python` make one of a single process."""
    if not BY_TORCHRUN:
        os.environ.update(ALONE, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # 0 is any free port.
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in ALONE)
    signal(SIGUSR1, SIG_IGN)  # What this process starts inherits that; `answer_signals` lets it end a run.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    device = torch.device("cpu")
    backends = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backends = "cpu:gloo,cuda:nccl"  # The default has none for CPU tensors.
    with refuse_errors(
        "between nodes GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface; `ip -br addr` shows it"
    ):
        dist.init_process_group(backends, timeout=timedelta(minutes=5))
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=30))  # Ranks wait while one saves a model.
    show = sys.excepthook  # torch's, which writes the rank before each line, and calls ours.

    def end(kind, error, trace):
        tell = print_error if isinstance(error, Refused) else show
        tell(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        # A usual exit would let vLLM take the process group down, which waits for ranks that may never come.
        os._exit(1)

    sys.excepthook = end
    if local_rank:  # See `fetched_once`.
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    mesh = dist.init_device_mesh(device.type, (size // local_size, local_size), mesh_dim_names=("replicate", "shard"))
    if size == local_size:
        mesh = mesh["shard"]
    return World(rank, size, local_size, device, mesh)


@contextmanager
def fetched_once():
    """Let the first rank of each node do what is inside, which may fetch something from the hub. Then let the node's
    other ranks do the same: they are offline, and find it in the cache. So a node of 16 ranks asks the hub as often as
    one rank does. Without a token the hub answers 500 calls in five minutes."""
    if dist.is_initialized():
        fetched = dist.new_group(backend="gloo", timeout=timedelta(days=1))  # A large model takes hours to fetch.
        others = os.environ["LOCAL_RANK"] != "0"
        if others:
            dist.barrier(fetched)
        try:
            yield
        finally:
            if not others:
                dist.barrier(fetched)
    else:
        yield


def seed_of(*parts):
    """Return a 63-bit hash of the parts, the same in every process; near neighbours share nothing."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1
