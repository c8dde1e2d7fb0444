"""The least time that a decode step can take: the bytes that it must read, over how fast the device reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from ..quantization.int4_linear import Int4Linear
from .cases import Case
from .measure import clock


def step_bytes(model: Any, case: Case) -> float:
    """Bytes that a decode step in the middle of a case's steady part must read.

    Weights count once. Of an input embedding only a few rows are read, which are left out, unless the same weight
    makes the logits. Of experts, no more count than the batch can choose.
    """
    return weight_bytes(model, case.rows) + kv_bytes(model.config, case, next(model.parameters()).element_size())


def weight_bytes(model: Any, rows: int) -> float:
    """Bytes of the weights, quantized or not, that a step of `rows` sequences must read."""
    head = list(_weights(model.get_output_embeddings()))
    decoder = model.get_decoder()
    is_head = {id(p) for _, p in head}
    embeddings = (m.weight for m in decoder.modules() if isinstance(m, nn.Embedding))
    rows_only = {id(weight) for weight in embeddings} - is_head
    weights = {id(p): (name, p) for name, p in [*_weights(decoder), *head]}
    share = _share_of_experts(model.config.get_text_config(decoder=True), rows)
    return sum(
        p.nbytes * (share if "experts" in name.split(".") else 1.0)
        for key, (name, p) in weights.items()
        if key not in rows_only
    )


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and what quantized linears hold in their place."""
    yield from module.named_parameters()
    for name, part in module.named_modules():
        if isinstance(part, Int4Linear):
            yield from ((f"{name}.{key}", buffer) for key, buffer in part.named_buffers(recurse=False))


def kv_bytes(config: Any, case: Case, element_size: int) -> float:
    """Bytes of the keys and values that a step reads: of the mean context over the steady steps.

    Beams have their prompt in common, so it counts once a prompt; what follows it counts once a beam.
    """
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    new = (case.settled + case.new - 1) / 2
    tokens = 0.0
    for layer in DynamicCache(config=text).layers:
        window = getattr(layer, "sliding_window", None) or float("inf")
        own = min(new, window)
        tokens += case.batch * min(case.prompt, window - own) + case.rows * own
    return tokens * 2 * heads * dim * element_size


def bandwidth(device: torch.device) -> float:
    """Bytes a second: of a large copy on a GPU, read and written; of a matrix-vector product on a CPU."""
    return _copy_bandwidth(device) if device.type == "cuda" else _read_bandwidth(device)


def _share_of_experts(config: Any, rows: int) -> float:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((getattr(config, name) for name in names if getattr(config, name, None)), 0)
    chosen = getattr(config, "num_experts_per_tok", None)
    return min(count, rows * chosen) / count if count and chosen else 1.0


def _copy_bandwidth(device: torch.device, copies: int = 10) -> float:
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.zeros(min(1 << 30, free // 4), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    with torch.cuda.device(device):
        for _ in range(5):
            begin.record()
            for _ in range(copies):
                target.copy_(source)
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes * copies / best


def _read_bandwidth(device: torch.device) -> float:
    matrix, vector = torch.ones(16384, 4096), torch.ones(4096)  # 256 MB, more than caches hold
    now, best = clock(device), float("inf")
    for _ in range(5):
        start = now()
        matrix.mv(vector)
        best = min(best, now() - start)
    return matrix.nbytes / best
