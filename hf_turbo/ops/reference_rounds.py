"""What follows the forward of a draft, in plain torch: the oracle of the kernels' tests, and what a CPU runs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .reference_drafts import MAX_NODES, accept_drafts


class Round(NamedTuple):
    """What a verified draft comes to; B rows, D the tree's greatest depth, H the size of a hidden state."""

    #: int64 `[B, D + 3 + room]`: `outcome`, `lengths`, the next draft's root, and room for the rest of that draft, not
    #: filled in.
    result: torch.Tensor
    #: int64 `[B, D + 2]`: the accepted tokens, at their number the model's own next token, -1 beyond, and in the last
    #: column that number.
    outcome: torch.Tensor
    #: int64 `[B]`: tokens that stay in the cache.
    lengths: torch.Tensor
    #: int32 `[B, D + 1]`: the accepted node at each depth, beginning with the root; k beyond.
    path: torch.Tensor
    #: int32 `[B]`: nodes that stay in the cache: the accepted tokens and the root.
    counts: torch.Tensor
    #: int32 `[B]`: tokens that were in the cache before the draft; negative in rows that are not used.
    bases: torch.Tensor
    #: `[B, H]`: what the next root was chosen by; None where no hidden states were given.
    hidden: torch.Tensor | None


def accept_round(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    last_position: torch.Tensor,
    parents: torch.Tensor,
    ancestors: torch.Tensor,
    paths: torch.Tensor,
    depths: torch.Tensor,
    preference: torch.Tensor,
    hidden: torch.Tensor | None = None,
    room: int = 1,
) -> Round:
    """Keeps of a drafted tree what the model chooses itself, and leaves the next round's inputs where this one's were.

    `reference_drafts.accept_drafts` says which nodes are kept. Written are, for another tree of this shape, the rows'
    `seq_lens` (of rows that are not used: 0), the nodes' `positions` and the roots' `tokens`.

    Args:
        logits: of the nodes, `[B * N, vocabulary]`; a node's choice is the largest, the first of equals.
        tokens: of the nodes, int64 `[B, N]`; the root's is not compared.
        positions: of the nodes, int64 `[planes, B, N]`; where a position is several numbers, there are as many planes.
        seq_lens: tokens in the cache, all nodes included, int32 `[B]`; at most N where the row is not used.
        last_position: the greatest that is written, int64 `[1]`.
        parents, ancestors, paths, depths, preference: the tree, as of `accept_drafts`.
        hidden: of the nodes, `[B * N, H]`; the last stride 1.
        room: columns of the result from the next root's on, at least 1.

    Raises:
        ValueError: for other shapes or dtypes, a tensor that is not contiguous, or more than 64 nodes. Nothing has been
            written.
    """
    check_round(logits, tokens, positions, last_position, hidden, room)
    num_nodes = tokens.shape[1]
    chosen = logits.argmax(dim=-1).view(tokens.shape)
    verdict = accept_drafts(tokens, chosen, seq_lens, parents, ancestors, paths, depths, preference)
    steps = paths.shape[1]
    result = verdict.outcome.new_full((len(tokens), steps + 2 + room), -1)
    result[:, : steps + 1], result[:, steps + 1], result[:, steps + 2] = verdict.outcome, verdict.lengths, verdict.roots
    if hidden is not None:
        rows = torch.arange(len(tokens), device=tokens.device) * num_nodes
        hidden = hidden.index_select(0, rows + verdict.last)
    bases = seq_lens - num_nodes
    tokens[:, 0] = verdict.roots
    roots = positions[..., :1] + verdict.counts.unsqueeze(1)
    positions.copy_(torch.minimum(roots + depths, last_position))
    seq_lens.copy_(torch.where(seq_lens > num_nodes, seq_lens + verdict.counts, 0))
    return Round(result, verdict.outcome, verdict.lengths, verdict.path, verdict.counts, bases, hidden)


def check_round(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    last_position: torch.Tensor,
    hidden: torch.Tensor | None,
    room: int,
) -> None:
    """Refuses what `accept_round` does not take, but for what `check_drafts` looks at."""
    if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= MAX_NODES:
        raise ValueError(f"tokens must be [rows, nodes] of 1 to {MAX_NODES} nodes, got {list(tokens.shape)}")
    nodes = tokens.numel()
    if logits.dim() != 2 or len(logits) != nodes or not logits.shape[1]:
        raise ValueError(f"logits must be [{nodes}, vocabulary], got {list(logits.shape)}")
    if positions.dim() != 3 or positions.shape[1:] != tokens.shape or positions.dtype != torch.int64:
        shape = ["planes", *tokens.shape]
        raise ValueError(f"positions must be int64 {shape}, got {list(positions.shape)} of {positions.dtype}")
    if not positions.is_contiguous():
        raise ValueError(f"positions must be contiguous, got strides {positions.stride()}")
    if last_position.shape != (1,) or last_position.dtype != torch.int64:
        raise ValueError(f"last_position must be int64 [1], got {list(last_position.shape)} of {last_position.dtype}")
    if hidden is not None and (hidden.dim() != 2 or len(hidden) != nodes or hidden.stride(1) != 1):
        raise ValueError(
            f"hidden must be [{nodes}, H] with a last stride of 1, got {list(hidden.shape)}, {hidden.stride()}"
        )
    if room < 1:
        raise ValueError(f"room must be at least 1, for the next root, got {room}")
