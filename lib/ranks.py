"""The ranks of a run, which are its processes: how they find each other, what they exchange, and which of them download
from the Hugging Face hub.
"""

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

from lib.messages import ALONE, BY_TORCHRUN, print_error, refuse_errors


def end_with_parent():
    """Let the kernel kill this process when its parent process ends."""
    ctypes.CDLL(None).prctl(1, SIGKILL)  # PR_SET_PDEATHSIG


class World(namedtuple("World", "rank size local_size device mesh")):
    """The place of this process in the run. `rank` is its number, `size` the number of ranks in the run, and
    `local_size` the number of ranks on its node. `device` is its torch.device. With the DeviceMesh `mesh`, FSDP shards
    weights over the ranks of a node, and every node has all shards."""

    def all_gather(self, thing):
        """Return a list of the picklable `thing` of every rank, in the order of ranks."""
        things = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def all_gather_shares(self, mine):
        """Return the list of all items, on every rank. Each rank has made a share of the items, which it gives as
        `mine`: rank r has made the items r, r + size, r + 2 size and so on."""
        shares = self.all_gather(mine)
        return [shares[n % self.size][n // self.size] for n in range(sum(map(len, shares)))]

    def from_rank_0(self, thing):
        """Return the `thing` of rank 0, on every rank. Ranks may see different clocks and files: those of rank 0 decide
        for all ranks."""
        return self.all_gather(thing)[0]

    def all_reduce(self, x):
        """Sum a CPU tensor over all ranks, in place, and return the tensor."""
        dist.all_reduce(x)
        return x


def init_world():
    """Join the process group of torchrun and return this rank's World. If plain `python` has started the script, make a
    process group of one process. From this call on, an uncaught error ends the process (`print_error`)."""
    if not BY_TORCHRUN:
        os.environ.update(ALONE, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # 0 means any free port.
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in ALONE)
    # Child processes inherit this, so that SIGUSR1 does not kill them. `Record.answer_signals` sets a handler later.
    signal(SIGUSR1, SIG_IGN)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    device = torch.device("cpu")
    backends = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backends = "cpu:gloo,cuda:nccl"  # By default GPU processes have no backend for CPU tensors.
    with refuse_errors(
        "with several nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to their interface; `ip -br addr` shows it"
    ):
        dist.init_process_group(backends, timeout=timedelta(minutes=5))
    # Ranks find each other within minutes. Later, all wait longer while rank 0 alone saves a model.
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=30))
    sys.excepthook = print_error  # in place of torch's
    if local_rank:  # Only the first rank of a node asks the hub: see `fetched_once`.
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    mesh = dist.init_device_mesh(device.type, (size // local_size, local_size), mesh_dim_names=("replicate", "shard"))
    if size == local_size:
        mesh = mesh["shard"]
    return World(rank, size, local_size, device, mesh)


@contextmanager
def fetched_once():
    """Run the `with` block, which may download from the hub, on the first rank of every node, and after that on the
    other ranks. All ranks must enter. Only first ranks may ask the hub; the others are offline and find the files in
    the hub's cache. So a node of 16 ranks sends no more requests than one rank does. The hub answers only 500 requests
    in five minutes without a token. If there is no process group, just run the block."""
    if dist.is_initialized():
        # Downloading a large model takes hours.
        fetched = dist.new_group(backend="gloo", timeout=timedelta(days=1))
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
    """Return a 63-bit hash of the parts as a seed. It is the same in every process. Seeds of similar parts, such as two
    consecutive numbers, are unrelated."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1
