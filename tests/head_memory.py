"""Print by how many GiB one forward and backward of the policy raises this process's peak memory: for test_policy.py.

4,096 response tokens, vocabulary 151,936, hidden size 64: full float32 logits and their gradient would take 4.6 GiB.
"""

import resource

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import common


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
config = Qwen2Config(vocab_size=151_936, num_hidden_layers=1, tie_word_embeddings=True, **shape)
config._attn_implementation = "packed"
policy = common.Policy(Qwen2ForCausalLM(config), 1.0).train()
rng = np.random.default_rng(0)
rollouts = [common.Rollout(rng.integers(0, 151_936, 1024), np.zeros(1024, np.float32), "", False) for _ in range(4)]
batch = common.Batch([common.Problem("", [0] * 8, "0")] * 4, rollouts)
micro = batch.pack([0, 1, 2, 3], torch.device("cpu"))
before = peak()
logp_T, entropy_T = policy(micro)
logp_T.sum().backward()
assert len(logp_T) == len(entropy_T) == 4096
print(f"rise {peak() - before:.3f}")
