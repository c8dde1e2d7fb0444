"""What follows the forward of a draft, in two launches (Triton): in torch it is thirty small ones.

Choices, acceptance, the hidden states that the next draft is guessed from, and the next round's lengths and positions.
"""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .argmax import chunk_argmax
from .attention_config import device_facts, next_power_of_2
from .launch import Launcher
from .reference_drafts import check_drafts
from .reference_rounds import Round, check_round

#: Numbers of a hidden state that a program copies at once.
_HIDDEN = 1024


@triton.jit(
    do_not_specialize_on_alignment=[
        "values_ptr", "indices_ptr", "tokens_ptr", "positions_ptr", "seq_lens_ptr", "last_position_ptr", "parents_ptr",
        "ancestors_ptr", "paths_ptr", "depths_ptr", "preference_ptr", "result_ptr", "outcome_ptr", "lengths_ptr",
        "path_ptr", "counts_ptr", "bases_ptr",
    ],
    do_not_specialize=["num_chunks"],
)  # fmt: skip
def _accept_round_kernel(
    values_ptr, indices_ptr, tokens_ptr, positions_ptr, seq_lens_ptr, last_position_ptr,
    parents_ptr, ancestors_ptr, paths_ptr, depths_ptr, preference_ptr, hidden_ptr,
    result_ptr, outcome_ptr, lengths_ptr, path_ptr, counts_ptr, bases_ptr, next_hidden_ptr, num_chunks, stride_hidden,
    NODES: tl.constexpr, STEPS: tl.constexpr, CHUNKS: tl.constexpr, PLANES: tl.constexpr, COLUMNS: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_STEPS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row. STEPS: D + 1, the nodes of the longest path; COLUMNS of the result; HIDDEN: 0 for none.

    What a row holds decides which nodes agree, and that decides which of the tree's entries are read: no token becomes
    an address.
    """
    if PDL:
        gdc_launch_dependents()
    node, step, chunk = tl.arange(0, BLOCK_NODES), tl.arange(0, BLOCK_STEPS), tl.arange(0, CHUNKS)
    is_node, is_step = node < NODES, step < STEPS
    # No kernel writes the tree: it can be read while the one before still runs.
    parent = tl.load(parents_ptr + node, mask=is_node, other=0)
    depth = tl.load(depths_ptr + node, mask=is_node, other=0)
    preference = tl.load(preference_ptr + node, mask=is_node, other=0)
    is_entry = is_node[:, None] & is_step[None, :]
    ancestor = tl.load(ancestors_ptr + node[:, None] * STEPS + step[None, :], mask=is_entry, other=0)
    if PDL:
        gdc_wait()
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    place = (row * NODES + node)[:, None] * num_chunks + chunk[None, :]
    is_place = is_node[:, None] & (chunk < num_chunks)[None, :]
    value = tl.load(values_ptr + place, mask=is_place, other=float("-inf"))
    index = tl.load(indices_ptr + place, mask=is_place, other=0)
    tokens_ptr += row * NODES
    said = tl.load(tokens_ptr + node, mask=is_node, other=0)
    seq_len = tl.load(seq_lens_ptr + row)
    last_position = tl.load(last_position_ptr)

    _, best = tl.max(value, 1, return_indices=True)
    chosen = tl.sum(tl.where(chunk[None, :] == best[:, None], index, 0), 1).to(tl.int64)
    agrees = (said == tl.gather(chosen, parent.to(tl.int32), 0)) | (node == 0)
    agreed = tl.sum(agrees.to(tl.int64) << node, 0)  # one bit a node
    reached = tl.min((agreed >> ancestor) & 1, 1)
    last = tl.argmax(reached * preference, 0)  # the root is always reached; the preference of no node is 0
    accepted = tl.load(depths_ptr + last)
    root = tl.sum(tl.where(node == last, chosen, 0), 0)
    paths_ptr += last * STEPS
    path = tl.load(paths_ptr + step, mask=is_step)
    following = tl.load(paths_ptr + step + 1, mask=step < STEPS - 1, other=0)  # a node in any case
    token = tl.load(tokens_ptr + following)

    token = tl.where(step < accepted, token, tl.where(step == accepted, root, -1))
    length = (seq_len - NODES + 1).to(tl.int64) + accepted
    result_ptr += row * COLUMNS
    outcome_ptr += row * (STEPS + 1)
    tl.store(result_ptr + step, token, mask=is_step)
    tl.store(outcome_ptr + step, token, mask=is_step)
    tl.store(result_ptr + STEPS, accepted)
    tl.store(outcome_ptr + STEPS, accepted)
    tl.store(result_ptr + STEPS + 1, length)
    tl.store(lengths_ptr + row, length)
    tl.store(result_ptr + STEPS + 2, root)
    count = (accepted + 1).to(tl.int32)
    tl.store(path_ptr + row * STEPS + step, path.to(tl.int32), mask=is_step)
    tl.store(counts_ptr + row, count)
    tl.store(bases_ptr + row, seq_len - NODES)
    if HIDDEN > 0:
        for start in tl.static_range(0, HIDDEN, BLOCK_HIDDEN):
            i = start + tl.arange(0, BLOCK_HIDDEN)
            x = tl.load(hidden_ptr + (row * NODES + last) * stride_hidden + i, mask=i < HIDDEN)
            tl.store(next_hidden_ptr + row * HIDDEN + i, x, mask=i < HIDDEN)
    for plane in tl.static_range(PLANES):
        first_ptr = positions_ptr + (plane * rows + row) * NODES
        position = tl.load(first_ptr) + count + depth
        tl.debug_barrier()  # all threads have read what is about to be written
        tl.store(first_ptr + node, tl.minimum(position, last_position), mask=is_node)
    tl.store(tokens_ptr, root)
    tl.store(seq_lens_ptr + row, tl.where(seq_len > NODES, seq_len + count, 0))


_launch_accept = Launcher(_accept_round_kernel)


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
    """See `reference_rounds.accept_round`; logits are bf16, fp16 or fp32, the last stride 1; NaN counts as infinity.

    Rows of garbage do no harm. The tree's tensors (`parents` to `preference`) must not be written by work that is
    still under way on the device: on GPUs that can, they are read before the kernel in front has ended.
    """
    check_round(logits, tokens, positions, last_position, hidden, room)
    tree = (parents, ancestors, paths, depths, preference)
    check_drafts(tokens, tokens, seq_lens, *tree)
    (rows, num_nodes), steps, device = tokens.shape, paths.shape[1], tokens.device
    columns, size = steps + 2 + room, 0 if hidden is None else hidden.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    after = Round(
        result=empty(rows, columns, dtype=torch.int64), outcome=empty(rows, steps + 1, dtype=torch.int64),
        lengths=empty(rows, dtype=torch.int64), path=empty(rows, steps), counts=empty(rows), bases=empty(rows),
        hidden=None if hidden is None else empty(rows, size, dtype=hidden.dtype),
    )  # fmt: skip
    values, indices = chunk_argmax(logits)
    if not rows:
        return after
    hiddens = (tokens, tokens) if hidden is None or after.hidden is None else (hidden, after.hidden)
    pdl, chunks = device_facts(device).capability >= 90, values.shape[1]
    blocks = (next_power_of_2(num_nodes), next_power_of_2(steps), min(_HIDDEN, next_power_of_2(max(size, 1))))
    constants = (num_nodes, steps, next_power_of_2(chunks), len(positions), columns, size, *blocks, pdl)
    numbers = blocks[0] * max(blocks[1], constants[2])
    key = (device, hiddens[0].dtype, hiddens[0].stride(0), hiddens[0].data_ptr() % 16, constants)
    with torch.cuda.device_of(tokens):
        _launch_accept(
            key, (rows, 1, 1), values, indices, tokens, positions, seq_lens, last_position, *tree,
            hiddens[0], *after[:6], hiddens[1], chunks, hiddens[0].stride(0), *constants,
            num_warps=min(max(numbers // 512, 1), 8), launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
    return after
