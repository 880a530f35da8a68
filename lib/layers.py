"""The two parts of a policy that transformers lacks: attention inside the pieces of a packed row, and a head that
gives log-probs and entropies without keeping the logits. common.py explains the suffixes of names."""

from functools import cache

import torch
import transformers
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right


def packed_attention(
    _, query, key, value, attention_mask, *, scaling, cu_seq_lens_q, cu_seq_lens_k, keys_at=None, is_causal=True, **rest
):
    """Attend inside the pieces of a packed row. A piece is a prompt, a response or, in a vision tower, an image or its
    window. query (1, heads, N, size), key and value (1, key heads, N, size) -> (1, N, heads, size), None; size is that
    of a head.

    The queries of piece i are those from cu_seq_lens_q[i] to cu_seq_lens_q[i + 1]. keys_at, if given, lists the places
    in the row of the keys of all pieces, one piece after another: a response has the keys of its prompt and then its
    own. The keys of piece i are entries cu_seq_lens_k[i] to cu_seq_lens_k[i + 1] of keys_at or, without it, of the row.
    If `is_causal`, the last query of a piece sees all keys of the piece, and any other query sees one key less than the
    query after it. Otherwise every query sees all keys of its piece."""
    if keys_at is not None:
        # On a CPU, the threads of key[:, :, keys_at] would sum the gradient in an order that varies. The sum is in
        # float32, because a prompt's keys get the gradients of all its responses. Besides, the Triton kernel that the
        # compiler makes on a GPU adds float32 faster than bf16.
        key, value = (x.float().index_select(2, keys_at).to(x.dtype) for x in (key, value))
    if query.is_cuda and query.dtype == torch.bfloat16:
        from torch.nn.attention.varlen import varlen_attn  # Only GPUs have it, and not for float32.

        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        window = (-1, 0 if is_causal else -1)
        out = varlen_attn(
            query,
            key,
            value,
            cu_seq_lens_q,
            cu_seq_lens_k,
            rest["max_length_q"],
            rest["max_length_k"],
            scale=scaling,
            window_size=window,
            enable_gqa=True,
        )
        return out[None], None
    lengths_q = cu_seq_lens_q.diff().tolist()
    lengths_k = cu_seq_lens_k.diff().tolist()
    pieces = zip(query.split(lengths_q, 2), key.split(lengths_k, 2), value.split(lengths_k, 2), strict=True)
    out = []
    for q, k, v in pieces:
        mask = causal_lower_right(q.shape[2], k.shape[2]) if is_causal else None
        attended = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True)
        out.append(attended)
    return torch.cat(out, 2).transpose(1, 2), None


transformers.AttentionInterface.register("packed", packed_attention)
# A vision tower passes cu_seq_lens only to attention with "flash" in its name.
transformers.AttentionInterface.register("packed_flash", packed_attention)

# `Policy.forward` of common.py calls `Head` for chunks of tokens, with at most this many logits. The backward pass of a
# chunk writes a gradient of all the head's weights, so a few large chunks are faster.
LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 30}


@cache
def compiled_on_gpu(function):
    """Return the function. If there is a GPU, compile it, so that it reads and writes each tensor only once. Without a
    GPU this is not worth the seconds that loading the compiler takes."""
    return torch.compile(function) if torch.cuda.is_available() else function


def head_logits(hidden_TH, weight_VH):
    """Return logits_TV. For bf16 they are in float32, in which a product of two bf16 numbers is exact. In bf16, a logit
    above 8 would be rounded to a multiple of 0.06."""
    if hidden_TH.dtype == torch.bfloat16:
        return torch.mm(hidden_TH, weight_VH.T, out_dtype=torch.float32)
    return hidden_TH @ weight_VH.T


def logp_and_entropy(logits_TV, target_T, temperature):
    """Return logp_T, entropy_T (nats), max_T1, sum_T1. The softmax is exp(logits / temperature - max_T1) / sum_T1."""
    scaled_TV = logits_TV / temperature
    max_T1 = scaled_TV.amax(-1, keepdim=True)
    scaled_TV -= max_T1
    exp_TV = scaled_TV.exp()
    sum_T1 = exp_TV.sum(-1, keepdim=True)
    logp_T1 = scaled_TV.gather(1, target_T[:, None]) - sum_T1.log()
    entropy_T1 = sum_T1.log() - exp_TV.mul_(scaled_TV).sum(-1, keepdim=True) / sum_T1  # -sum of p log p
    return logp_T1[:, 0], entropy_T1[:, 0], max_T1, sum_T1


def logits_gradient(
    logits_TV,
    target_T,
    entropy_T,
    max_T1,
    sum_T1,
    temperature,
    grad_logp_T,
    grad_entropy_T,
    dtype,
):
    """Return the gradient of a loss with respect to logits_TV, in dtype. grad_logp_T is the loss's gradient with
    respect to logp_T. grad_entropy_T is its gradient with respect to entropy_T, or None if the loss does not depend on
    the entropy. With p = softmax(logits / temperature), and t = 1 for the target and 0 for other tokens, d logp / d
    logits is (t - p) / temperature, and d entropy / d logits is -p (log p + entropy) / temperature."""
    scaled_TV = (logits_TV / temperature).sub_(max_T1)
    p_TV = scaled_TV.exp().div_(sum_T1)
    token_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    is_target_TV = token_V == target_T[:, None]
    scale_T1 = -grad_logp_T[:, None] / temperature
    grad_TV = p_TV.add(is_target_TV, alpha=-1).mul_(scale_T1)
    if grad_entropy_T is not None:
        logp_TV = scaled_TV - sum_T1.log()
        grad_TV -= p_TV * (logp_TV + entropy_T[:, None]) * grad_entropy_T[:, None] / temperature
    return grad_TV.to(dtype)


class Head(torch.autograd.Function):
    """hidden_TH, weight_VH, target_T, temperature -> logp_T, entropy_T. `backward` computes the logits again, so that
    they need not be kept. A loss must depend on logp_T, and may depend on entropy_T."""

    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, target_T, temperature):
        ctx.set_materialize_grads(False)
        logp_T, *others = compiled_on_gpu(logp_and_entropy)(head_logits(hidden_TH, weight_VH), target_T, temperature)
        ctx.save_for_backward(hidden_TH, weight_VH, target_T, *others)
        ctx.temperature = temperature
        return logp_T, others[0]

    @staticmethod
    def backward(ctx, grad_logp_T, grad_entropy_T):
        hidden_TH, weight_VH, *known = ctx.saved_tensors
        logits_TV = head_logits(hidden_TH, weight_VH)
        given = (ctx.temperature, grad_logp_T, grad_entropy_T, hidden_TH.dtype)
        grad_TV = compiled_on_gpu(logits_gradient)(logits_TV, *known, *given)
        return grad_TV @ weight_VH, grad_TV.T @ hidden_TH, None, None
