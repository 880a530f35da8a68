"""What libraries do not promise and we lean on. A version without it fails here, not in silence or only on a GPU."""

from multiprocessing import forkserver
from pathlib import Path

import torch

LIBRARIES = Path(torch.__file__).parent.parent
LEANED_ON = {
    "_forkserver_alive_fd": forkserver.__file__,
    "def _set_pg_timeout": "torch/distributed/distributed_c10d.py",
    "def _apply": "torch/distributed/fsdp/_fully_shard/_fully_shard.py",  # It reshards what is gathered.
    "activation_memory_budget": "torch/_functorch/config.py",
    'getattr(tensor, "_is_hf_initialized"': "transformers/initialization.py",
    "def _init_weights": "transformers/modeling_utils.py",
    "_tokenizer = None": "transformers/tokenization_utils_tokenizers.py",
    "self.config._attn_implementation": "transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py",
    "def reload_weights": "vllm/v1/worker/gpu_worker.py",
}


def test_the_libraries_have_them():
    for name, file in LEANED_ON.items():
        assert name in (LIBRARIES / file).read_text(), name
