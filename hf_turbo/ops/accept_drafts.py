"""Which tokens of a verified draft are kept, in one launch (Triton): in torch it is twenty small ones."""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import device_facts, next_power_of_2
from .launch import Launcher
from .reference_drafts import Verdict, check_drafts


@triton.jit(
    do_not_specialize_on_alignment=[
        "tokens_ptr", "chosen_ptr", "seq_lens_ptr", "parents_ptr", "ancestors_ptr", "paths_ptr", "depths_ptr",
        "preference_ptr", "outcome_ptr", "path_ptr", "counts_ptr", "last_ptr", "roots_ptr", "lengths_ptr",
    ],
)  # fmt: skip
def _accept_drafts_kernel(
    tokens_ptr, chosen_ptr, seq_lens_ptr, parents_ptr, ancestors_ptr, paths_ptr, depths_ptr, preference_ptr,
    outcome_ptr, path_ptr, counts_ptr, last_ptr, roots_ptr, lengths_ptr,
    NODES: tl.constexpr, STEPS: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row. STEPS: D + 1, the nodes of the longest path.

    What a row holds decides which nodes agree, and that decides which of the tree's entries are read: no number of
    `tokens` or `chosen` becomes an address.
    """
    if PDL:
        gdc_launch_dependents()
    node, step = tl.arange(0, BLOCK_NODES), tl.arange(0, BLOCK_STEPS)
    is_node, is_step = node < NODES, step < STEPS
    # No kernel writes the tree: it can be read while the one before still runs.
    parent = tl.load(parents_ptr + node, mask=is_node, other=0)
    preference = tl.load(preference_ptr + node, mask=is_node, other=0)
    is_entry = is_node[:, None] & is_step[None, :]
    ancestor = tl.load(ancestors_ptr + node[:, None] * STEPS + step[None, :], mask=is_entry, other=0)
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tokens_ptr += row * NODES
    chosen_ptr += row * NODES
    said = tl.load(tokens_ptr + node, mask=is_node, other=0)
    wanted = tl.load(chosen_ptr + parent, mask=is_node, other=0)
    seq_len = tl.load(seq_lens_ptr + row).to(tl.int64)
    agrees = (said == wanted) | (node == 0)
    agreed = tl.sum(agrees.to(tl.int64) << node, 0)  # one bit a node
    reached = tl.min((agreed >> ancestor) & 1, 1)
    last = tl.argmax(reached * preference, 0)  # the root is always reached; the preference of no node is 0
    accepted = tl.load(depths_ptr + last)
    root = tl.load(chosen_ptr + last)

    paths_ptr += last * STEPS
    path = tl.load(paths_ptr + step, mask=is_step)
    tl.store(path_ptr + row * STEPS + step, path.to(tl.int32), mask=is_step)
    following = tl.load(paths_ptr + step + 1, mask=step < STEPS - 1, other=0)  # a node in any case
    token = tl.load(tokens_ptr + following)
    token = tl.where(step < accepted, token, tl.where(step == accepted, root, -1))
    outcome_ptr += row * (STEPS + 1)
    tl.store(outcome_ptr + step, token, mask=is_step)
    tl.store(outcome_ptr + STEPS, accepted)
    tl.store(counts_ptr + row, (accepted + 1).to(tl.int32))
    tl.store(last_ptr + row, last.to(tl.int64))
    tl.store(roots_ptr + row, root)
    tl.store(lengths_ptr + row, seq_len - NODES + accepted + 1)


_launch_accept = Launcher(_accept_drafts_kernel)


def accept_drafts(
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    seq_lens: torch.Tensor,
    parents: torch.Tensor,
    ancestors: torch.Tensor,
    paths: torch.Tensor,
    depths: torch.Tensor,
    preference: torch.Tensor,
) -> Verdict:
    """See `reference_drafts.accept_drafts`.

    Rows of garbage do no harm. The tree's tensors (`parents` to `preference`) must not be written by work that is
    still under way on the device: on GPUs that can, they are read before the kernel in front has ended.
    """
    tree = (parents, ancestors, paths, depths, preference)
    check_drafts(tokens, chosen, seq_lens, *tree)
    (rows, num_nodes), steps, device = tokens.shape, paths.shape[1], tokens.device

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    verdict = Verdict(
        outcome=empty(rows, steps + 1), path=empty(rows, steps, dtype=torch.int32),
        counts=empty(rows, dtype=torch.int32), last=empty(rows), roots=empty(rows), lengths=empty(rows),
    )  # fmt: skip
    if not rows:
        return verdict
    pdl = device_facts(device).capability >= 90
    block_nodes, block_steps = next_power_of_2(num_nodes), next_power_of_2(steps)
    constants = (num_nodes, steps, block_nodes, block_steps, pdl)
    with torch.cuda.device_of(tokens):
        _launch_accept(
            (device, constants), (rows, 1, 1), tokens, chosen, seq_lens, *tree, *verdict, *constants,
            num_warps=4 if block_nodes * block_steps > 512 else 1, launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
    return verdict
