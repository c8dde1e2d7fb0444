"""What followed the last time that a text ended as it does now (Triton): prompt lookup without the host.

Two launches: many programs compare each row's end with what stands before every place of its text, then one for each
row takes the best of them, copies what followed, be it as a draft or into one, and appends the row's new tokens.
"""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import ceil_div, device_facts, next_power_of_2
from .launch import Launcher
from .reference_drafts import MAX_MATCH, check_lay, check_repeat

#: Places of a text that one program looks at: 8 for each of its 128 threads.
_PLACES = 1024
_MASK = tl.constexpr(2**32 - 1)


@triton.jit
def _tokens(text_ptr, outcome_ptr, place, start, mask):
    """The text's tokens, int32, of which those from `start` on are the new ones. They are not in `text` yet."""
    old = tl.load(text_ptr + place, mask=mask & (place >= 0) & (place < start), other=-1)
    new = tl.load(outcome_ptr + place - start, mask=mask & (place >= start), other=-1)
    return tl.where(place < start, old, new.to(tl.int32))


@triton.jit
def _row(text_ptr, outcome_ptr, lengths_ptr, row, room, COLUMNS: tl.constexpr):
    """Where a row's text and new tokens lie, how many tokens it has with those, and how many without."""
    text_ptr += row.to(tl.int64) * room
    outcome_ptr += row.to(tl.int64) * COLUMNS
    end = (tl.load(lengths_ptr + row) + 1).to(tl.int32)
    start = end - 1 - tl.load(outcome_ptr + COLUMNS - 1).to(tl.int32)
    return text_ptr, outcome_ptr, end, start


@triton.jit(
    do_not_specialize=["room"],
    do_not_specialize_on_alignment=["text_ptr", "outcome_ptr", "lengths_ptr", "keys_ptr"],
)
def _match_text_kernel(
    text_ptr, outcome_ptr, lengths_ptr, keys_ptr, room,
    COLUMNS: tl.constexpr, LONGEST: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the longest match that ends at one of PLACES places of a row, the last of equals, as one number."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1)
    text_ptr, outcome_ptr, end, start = _row(text_ptr, outcome_ptr, lengths_ptr, row, room, COLUMNS)
    keys_ptr += row * tl.num_programs(0) + chunk
    if (chunk * PLACES + 1 >= end) | (end > room):
        tl.store(keys_ptr, 0)
        return
    place = chunk * PLACES + 1 + tl.arange(0, PLACES)  # tokens up to the piece's end
    agrees = place < end
    length = tl.zeros([PLACES], dtype=tl.int64)
    for back in tl.static_range(1, LONGEST + 1):
        wanted = _tokens(text_ptr, outcome_ptr, end - back, start, end >= back)
        agrees &= (place >= back) & (_tokens(text_ptr, outcome_ptr, place - back, start, agrees) == wanted)
        length += agrees.to(tl.int64)
    tl.store(keys_ptr, tl.max(tl.where(length > 0, (length << 32) + place, 0), 0))


@triton.jit
def _best_match(keys_ptr, row, num_keys, BLOCK_KEYS: tl.constexpr):
    """Tokens of the longest match of a row, 0 without any, and where it ends."""
    key = tl.arange(0, BLOCK_KEYS)
    best = tl.max(tl.load(keys_ptr + row.to(tl.int64) * num_keys + key, mask=key < num_keys, other=0), 0)
    return best >> 32, (best & _MASK).to(tl.int32)


@triton.jit
def _following(text_ptr, outcome_ptr, place, start, end, i, found, NUM: tl.constexpr):
    """The first NUM tokens that followed a match that ends at `place`, going round; int64, anything if not found."""
    period = tl.where(found, end - place, 1)
    return _tokens(text_ptr, outcome_ptr, place + i % period, start, i < tl.where(found, NUM, 0)).to(tl.int64)


@triton.jit
def _append(text_ptr, outcome_ptr, start, end, room, BLOCK_NEW: tl.constexpr):
    """Writes a row's new tokens behind its text, as far as there is room."""
    new = tl.arange(0, BLOCK_NEW)
    target = start + new
    mask = (target < end) & (target >= 0) & (target < room)
    token = tl.load(outcome_ptr + new, mask=mask, other=0)
    tl.store(text_ptr + target, token.to(tl.int32), mask=mask)


@triton.jit(
    do_not_specialize=["room", "num_keys", "stride_out"],
    do_not_specialize_on_alignment=["text_ptr", "outcome_ptr", "lengths_ptr", "keys_ptr", "out_ptr", "draft_ptr"],
)
def _go_on_kernel(
    text_ptr, outcome_ptr, lengths_ptr, keys_ptr, out_ptr, draft_ptr, room, num_keys, stride_out,
    COLUMNS: tl.constexpr, NUM: tl.constexpr, NODES: tl.constexpr, MIN_MATCH: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_NEW: tl.constexpr, BLOCK_NUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: what followed in one row, its first NODES tokens once more; new tokens are written to the text."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    text_ptr, outcome_ptr, end, start = _row(text_ptr, outcome_ptr, lengths_ptr, row, room, COLUMNS)
    length, place = _best_match(keys_ptr, row, num_keys, BLOCK_KEYS)
    found = length >= MIN_MATCH
    newest = tl.load(outcome_ptr + end - 1 - start)

    i = tl.arange(0, BLOCK_NUM)
    tokens = _following(text_ptr, outcome_ptr, place, start, end, i, found, NUM)
    tokens = tl.where(found, tokens, newest)
    out_ptr += row.to(tl.int64) * stride_out
    tl.store(out_ptr, newest)
    tl.store(out_ptr + 1 + i, tokens, mask=i < NUM)
    tl.store(out_ptr + 1 + NUM, tl.where(found, length, 0))
    if NODES > 0:
        draft_ptr += row.to(tl.int64) * NODES
        tl.store(draft_ptr, newest)
        tl.store(draft_ptr + 1 + i, tokens, mask=i < NODES - 1)
    _append(text_ptr, outcome_ptr, start, end, room, BLOCK_NEW)


@triton.jit(
    do_not_specialize=["room", "num_keys", "stride_draft", "stride_other"],
    do_not_specialize_on_alignment=[
        "text_ptr", "outcome_ptr", "lengths_ptr", "keys_ptr", "columns_ptr", "draft_ptr", "other_ptr",
    ],
)  # fmt: skip
def _lay_over_kernel(
    text_ptr, outcome_ptr, lengths_ptr, keys_ptr, columns_ptr, draft_ptr, other_ptr, room, num_keys, stride_draft,
    stride_other,
    COLUMNS: tl.constexpr, NUM: tl.constexpr, NODES: tl.constexpr, OTHER: tl.constexpr, MIN_MATCH: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_NEW: tl.constexpr, BLOCK_NUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: what followed in one row goes into columns of its drafts; new tokens are written to the text.

    NUM: 0 for the latter alone. NODES, OTHER: columns of the drafts, 0 where there is none.
    """
    if PDL:
        gdc_launch_dependents()
    i = tl.arange(0, BLOCK_NUM)
    column = tl.load(columns_ptr + i, mask=i < NUM, other=0)  # no kernel writes them
    if PDL:
        gdc_wait()
    row = tl.program_id(0)
    text_ptr, outcome_ptr, end, start = _row(text_ptr, outcome_ptr, lengths_ptr, row, room, COLUMNS)
    if NUM > 0:
        length, place = _best_match(keys_ptr, row, num_keys, BLOCK_KEYS)
        found = length >= MIN_MATCH
        tokens = _following(text_ptr, outcome_ptr, place, start, end, i, found, NUM)
        mask = i < tl.where(found, NUM, 0)
        tl.store(draft_ptr + row.to(tl.int64) * stride_draft + column, tokens, mask=mask & (column < NODES))
        if OTHER > 0:
            tl.store(other_ptr + row.to(tl.int64) * stride_other + column, tokens, mask=mask & (column < OTHER))
    _append(text_ptr, outcome_ptr, start, end, room, BLOCK_NEW)


_launch_match = Launcher(_match_text_kernel)
_launch_go_on = Launcher(_go_on_kernel)
_launch_lay_over = Launcher(_lay_over_kernel)


def repeat_text(
    text: torch.Tensor,
    outcome: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: int,
    min_match: int = 1,
    out: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """See `reference_drafts.repeat_text`. Rows whose lengths are impossible do no harm."""
    check_repeat(text, outcome, lengths, num_tokens, min_match, out)
    (rows, room), columns, device = text.shape, outcome.shape[1], text.device
    result = out[0] if out else torch.empty(rows, num_tokens + 2, dtype=torch.int64, device=device)
    if not rows:
        return result
    draft, num_nodes = (out[1], out[1].shape[1]) if len(out) > 1 else (result, 0)
    pdl = device_facts(device).capability >= 90
    with torch.cuda.device_of(text):
        keys = _match(text, outcome, lengths, pdl)
        chunks = keys.shape[1]
        sizes = (next_power_of_2(chunks), next_power_of_2(columns - 1), next_power_of_2(num_tokens))
        constants = (columns, num_tokens, num_nodes, min_match, *sizes, pdl)
        _launch_go_on(
            (device, constants), (rows, 1, 1), text, outcome, lengths, keys, result, draft, room, chunks,
            result.stride(0), *constants, num_warps=1, launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
    return result


def lay_repeats(
    text: torch.Tensor,
    outcome: torch.Tensor,
    lengths: torch.Tensor,
    columns: torch.Tensor,
    min_match: int,
    drafts: Sequence[torch.Tensor],
) -> None:
    """See `reference_drafts.lay_repeats`. Rows whose lengths are impossible do no harm.

    `columns` must not be written by work that is still under way on the device: on GPUs that can, they are read before
    the kernel in front has ended.
    """
    check_lay(text, outcome, lengths, columns, min_match, drafts)
    (rows, room), device, num = text.shape, text.device, len(columns) if drafts else 0
    if not rows:
        return
    pdl = device_facts(device).capability >= 90
    with torch.cuda.device_of(text):
        keys = _match(text, outcome, lengths, pdl) if num else outcome
        draft, other = (*drafts, outcome, outcome)[:2]
        nodes, others = ([x.shape[1] for x in drafts] + [0, 0])[:2]
        chunks, width = keys.shape[1], outcome.shape[1]
        sizes = (next_power_of_2(chunks), next_power_of_2(width - 1), next_power_of_2(max(num, 1)))
        constants = (width, num, nodes, others, min_match, *sizes, pdl)
        _launch_lay_over(
            (device, constants), (rows, 1, 1), text, outcome, lengths, keys, columns, draft, other, room, chunks,
            draft.stride(0), other.stride(0), *constants, num_warps=1, launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip


def _match(text: torch.Tensor, outcome: torch.Tensor, lengths: torch.Tensor, pdl: bool) -> torch.Tensor:
    """The best match of each part of each row, int64 `[rows, parts]`."""
    (rows, room), columns, device = text.shape, outcome.shape[1], text.device
    chunks = max(ceil_div(room, _PLACES), 1)
    keys = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    _launch_match(
        (device, columns, pdl), (chunks, rows, 1), text, outcome, lengths, keys, room,
        columns, MAX_MATCH, _PLACES, pdl, num_warps=4, launch_pdl=pdl, enable_fp_fusion=True,
    )  # fmt: skip
    return keys
