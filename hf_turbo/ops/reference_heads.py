"""What Medusa heads compute, in plain torch: the oracle of the kernels' tests, and what a CPU runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from .reference_drafts import MAX_NODES, check_ranks, top_ranks


def head_block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A residual block of several heads: `x + SiLU(W x + b)`, each with weights of its own.

    Method: Cai et al., Medusa (arXiv:2401.10774), section 2.1.

    Args:
        x: `[rows, H]`, which all heads read, or each head's own `[rows, heads, H]`.
        weight: `[heads, H, H]`.
        bias: `[heads, H]`.

    Returns:
        `[rows, heads, H]`.
    """
    if x.dim() == 3:
        return x + F.silu(head_by_head(x, weight) + bias)
    y = F.linear(x, weight.flatten(0, 1), bias.flatten())  # all heads read the same rows: one product
    return x.unsqueeze(1) + F.silu(y.view(len(x), *bias.shape))


def head_by_head(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, K]` times each head's `[N, K]`: `[rows, heads, N]`."""
    return torch.bmm(x.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1)


def tree_tokens(
    logits: torch.Tensor,
    roots: torch.Tensor,
    heads: torch.Tensor,
    ranks: torch.Tensor,
    num: int,
    out: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The tokens of a tree of guesses: at the root the one that is known, at a node its head's guess of its rank.

    A head's guesses are its largest logits, of equals the lowest column first; NaN counts as larger than all numbers.

    Args:
        logits: `[rows, heads, columns]`, bf16, fp16 or fp32; the last stride 1.
        roots: the root's tokens, int64 `[rows]`.
        heads: each node's head, int64 `[nodes]`; -1 at the root, which comes first.
        ranks: each node's rank among its head's guesses, int64 `[nodes]`, less than `num`.
        num: 1 to 16, and no more than the columns.
        out: up to two tensors that get the tokens, int64 `[rows, nodes]`, the last stride 1; the second may be of the
            first nodes alone. `roots` may be the first column of one. None: a new one is made.

    Returns:
        int64 `[rows, nodes]`: the first of `out`.

    Raises:
        ValueError: for other shapes, strides, dtypes or numbers.
    """
    check_tree(logits, roots, heads, ranks, num, out)
    best = top_ranks(logits.flatten(0, 1), num).view(*logits.shape[:2], num)
    return place_ranks(best, roots, heads, ranks, out)


def place_ranks(
    best: torch.Tensor, roots: torch.Tensor, heads: torch.Tensor, ranks: torch.Tensor, out: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """The same of known guesses, int64 `[rows, heads, num]`."""
    tokens = torch.cat([roots.unsqueeze(1), best[:, heads[1:], ranks[1:]]], dim=1)
    for x in out:
        x.copy_(tokens[:, : x.shape[1]])
    return out[0] if out else tokens


def check_tree(
    logits: torch.Tensor,
    roots: torch.Tensor,
    heads: torch.Tensor,
    ranks: torch.Tensor,
    num: int,
    out: Sequence[torch.Tensor],
) -> None:
    """Refuses what `tree_tokens` does not take."""
    if logits.dim() != 3:
        raise ValueError(f"logits must be [rows, heads, columns], got {list(logits.shape)}")
    check_ranks(logits[0] if len(logits) else logits.flatten(0, 1), num)
    rows, nodes = len(logits), len(heads)
    if not 1 <= nodes <= MAX_NODES or len(out) > 2:
        raise ValueError(f"a tree has 1 to {MAX_NODES} nodes and goes to up to 2 tensors, not {nodes} to {len(out)}")
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...]]]
    wanted = {"roots": (roots, (rows,)), "heads": (heads, (nodes,)), "ranks": (ranks, (nodes,))}
    sizes = (nodes, min(max(out[1].shape[-1], 1), nodes)) if len(out) > 1 else (nodes,)
    wanted.update({f"out[{i}]": (x, (rows, size)) for i, (x, size) in enumerate(zip(out, sizes, strict=False))})
    for name, (x, shape) in wanted.items():
        is_whole = name == "roots" or x.stride(-1) == 1
        if x.shape != shape or x.dtype != torch.int64 or x.device != logits.device or not is_whole:
            raise ValueError(
                f"{name} must be {list(shape)} of int64 on {logits.device} with a last stride of 1, got "
                f"{list(x.shape)} of {x.dtype} on {x.device} with strides {x.stride()}"
            )
