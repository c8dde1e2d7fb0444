"""Writes the blocks of a quantized cache: a forward's new tokens, and whole blocks to codes and back (Triton)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import triton
import triton.language as tl

from .attention_config import ceil_div, next_power_of_2
from .block_ids import MAX_SEGMENTS
from .kv_code_kernels import load_keys, load_values, part_of_dim, store_key_codes, store_value_codes
from .kv_format import KV_BLOCK_SIZES
from .launch import Launcher
from .metadata import AttentionMetadata, QuantizedKV
from .store_kv import block_offset
from .store_kv import store_kv as store_wide

_MAX_SEGMENTS = tl.constexpr(MAX_SEGMENTS)

#: Numbers of a tile that a thread holds.
_NUMBERS_PER_THREAD = 32


@triton.jit
def _store_block(
    new_ptr, first_row, wide_ptr, codes_ptr, wide_offsets_ptr, code_offsets_ptr, wide_table_ptr, code_table_ptr,
    block, old, new, is_held, is_coded, head, stride_t,
    STRIDES: tl.constexpr, SCALES: tl.constexpr, UNIT: tl.constexpr, CODE_BYTES: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDE_SEGMENTED: tl.constexpr,
    CODES_SEGMENTED: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, ZERO_VALUES: tl.constexpr,
    GROUPS: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """One block's keys or values, one head. `first_row`: the row in `new_ptr` that position 0 would have.

    GROUPS: parts of the block that are coded each on its own, one after another.
    """
    # The table entry of a block that is not held may be anything, as may that of one that is not coded.
    has_old = is_coded & (block * BLOCK_SIZE < old)
    wide_id = tl.load(wide_table_ptr + block, mask=is_held | has_old, other=0)
    wide_ptr += block_offset(wide_id, wide_offsets_ptr, STRIDES[0], WIDE_SEGMENTED) + head * STRIDES[1]
    code_id = tl.load(code_table_ptr + block, mask=is_coded, other=0)
    codes_ptr += block_offset(code_id, code_offsets_ptr, HEADS * CODE_BYTES, CODES_SEGMENTED) + head * CODE_BYTES

    dim, is_dim = part_of_dim(DIM, BITS)
    for group in tl.range(0, GROUPS, num_stages=1):
        token = group * (BLOCK_SIZE // GROUPS) + tl.arange(0, BLOCK_SIZE // GROUPS)
        position = block * BLOCK_SIZE + token
        is_new = ((position >= old) & (position < new))[:, None, None] & is_dim[None, :, :]
        rows = (first_row + position).to(tl.int64) * stride_t
        x = tl.load(new_ptr + rows[:, None, None] + dim[None, :, :], mask=is_new, other=0)
        wide_rows = wide_ptr + (token * STRIDES[2])[:, None, None] + dim[None, :, :]
        if is_held:
            tl.store(wide_rows, x, mask=is_new)
        if is_coded:
            is_old = (position < old)[:, None, None] & is_dim[None, :, :]
            tile = tl.where(is_old, tl.load(wide_rows, mask=is_old, other=0), x).to(tl.float32)
            if OF_KEYS:
                store_key_codes(tile, codes_ptr, group, SCALES, BLOCK_SIZE, DIM, BITS, IS_FLOAT, GROUPS)
            else:
                store_value_codes(tile, codes_ptr, SCALES, UNIT, BLOCK_SIZE, DIM, BITS, IS_FLOAT, ZERO_VALUES)


@triton.jit(
    do_not_specialize=["stride_tb", "stride_cb", "keep_last"],
    do_not_specialize_on_alignment=["block_tables_ptr", "code_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr"],
)
def _store_quantized_kernel(
    k_ptr, v_ptr, k_wide_ptr, v_wide_ptr, k_codes_ptr, v_codes_ptr, wide_offsets_ptr, code_offsets_ptr,
    block_tables_ptr, code_tables_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    keep_last, stride_kt, stride_kh, stride_vt, stride_vh, stride_tb, stride_cb,
    HOLDS_NEW: tl.constexpr, WIDE_SEGMENTED: tl.constexpr, CODES_SEGMENTED: tl.constexpr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, V_UNIT: tl.constexpr,
    K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr,
    ZERO_VALUES: tl.constexpr, KEY_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program: the keys or the values of one head in one of the blocks that a sequence's new tokens can touch."""
    seq = tl.program_id(2)
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    new = tl.load(seq_lens_ptr + seq)
    old = new - q_len  # below zero in a padding row, whose new is 0
    first = tl.maximum(old // BLOCK_SIZE - 1, 0)
    block = first + tl.program_id(0)
    is_kept = (block + 1) * BLOCK_SIZE > new - keep_last
    if (block * BLOCK_SIZE >= new) | (is_kept == 0):
        return
    own = (new - 1) // BLOCK_SIZE
    is_held = (block == 0) | (block >= (first if HOLDS_NEW else own - 1))
    is_coded = (block >= 1) & (block <= own - 2)
    first_row = q_start + q_len - new
    wide_table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_tb
    code_table_ptr = code_tables_ptr + seq.to(tl.int64) * stride_cb
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    if tl.program_id(1) < HEADS:
        _store_block(
            k_ptr + head * stride_kh, first_row, k_wide_ptr, k_codes_ptr, wide_offsets_ptr, code_offsets_ptr,
            wide_table_ptr, code_table_ptr, block, old, new, is_held, is_coded, head, stride_kt,
            K_STRIDES, K_SCALES, 0, K_BYTES, HEADS, K_DIM, BLOCK_SIZE, WIDE_SEGMENTED, CODES_SEGMENTED,
            BITS, IS_FLOAT, ZERO_VALUES, KEY_GROUPS, OF_KEYS=True,
        )  # fmt: skip
    else:
        _store_block(
            v_ptr + head * stride_vh, first_row, v_wide_ptr, v_codes_ptr,
            wide_offsets_ptr + _MAX_SEGMENTS, code_offsets_ptr + _MAX_SEGMENTS,
            wide_table_ptr, code_table_ptr, block, old, new, is_held, is_coded, head, stride_vt,
            V_STRIDES, V_SCALES, V_UNIT, V_BYTES, HEADS, V_DIM, BLOCK_SIZE, WIDE_SEGMENTED, CODES_SEGMENTED,
            BITS, IS_FLOAT, ZERO_VALUES, 1, OF_KEYS=False,
        )  # fmt: skip


@triton.jit
def _recode_block(
    bases_ptr, offsets_ptr, wide_id, code_id, head, DTYPE: tl.constexpr, TO_CODES: tl.constexpr,
    STRIDES: tl.constexpr, SCALES: tl.constexpr, UNIT: tl.constexpr, CODE_BYTES: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, ZERO_VALUES: tl.constexpr, GROUPS: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """One block's keys or values, one head. The pointers are at the wide blocks' entry; that of the codes is next."""
    wide = tl.multiple_of(tl.load(bases_ptr).to(tl.pointer_type(DTYPE)), 16)
    wide_offsets = tl.load(offsets_ptr).to(tl.pointer_type(tl.int64))
    codes = tl.multiple_of(tl.load(bases_ptr + 1).to(tl.pointer_type(tl.uint8)), 16)
    code_offsets = tl.load(offsets_ptr + 1).to(tl.pointer_type(tl.int64))
    wide += block_offset(wide_id, wide_offsets, STRIDES[0], True) + head * STRIDES[1]
    codes += block_offset(code_id, code_offsets, HEADS * CODE_BYTES, True) + head * CODE_BYTES

    dim, is_dim = part_of_dim(DIM, BITS)
    for group in tl.range(0, GROUPS, num_stages=1):
        token = group * (BLOCK_SIZE // GROUPS) + tl.arange(0, BLOCK_SIZE // GROUPS)
        rows = wide + (token * STRIDES[2])[:, None, None] + dim[None, :, :]
        mask = (token < BLOCK_SIZE)[:, None, None] & is_dim[None, :, :]
        if TO_CODES:
            x = tl.load(rows, mask=mask, other=0).to(tl.float32)
            if OF_KEYS:
                store_key_codes(x, codes, group, SCALES, BLOCK_SIZE, DIM, BITS, IS_FLOAT, GROUPS)
            else:
                store_value_codes(x, codes, SCALES, UNIT, BLOCK_SIZE, DIM, BITS, IS_FLOAT, ZERO_VALUES)
        else:
            if OF_KEYS:
                x = load_keys(codes, group, SCALES, BLOCK_SIZE, DIM, BITS, IS_FLOAT, GROUPS)
            else:
                x = load_values(codes, SCALES, UNIT, BLOCK_SIZE, DIM, BITS, IS_FLOAT, ZERO_VALUES)
            tl.store(rows, x.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["bases_ptr", "offsets_ptr", "pairs_ptr"])
def _recode_kernel(
    bases_ptr, offsets_ptr, pairs_ptr, DTYPE: tl.constexpr, TO_CODES: tl.constexpr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, V_UNIT: tl.constexpr,
    K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr,
    ZERO_VALUES: tl.constexpr, KEY_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program: the keys or the values of one head of one block in one layer, to codes or back."""
    pair_ptr = pairs_ptr + 2 * tl.program_id(0)
    source_id, target_id = tl.load(pair_ptr), tl.load(pair_ptr + 1)
    if source_id < 0:
        return
    wide_id = source_id if TO_CODES else target_id
    code_id = target_id if TO_CODES else source_id
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    layer = 4 * tl.program_id(2)
    if tl.program_id(1) < HEADS:
        _recode_block(
            bases_ptr + layer, offsets_ptr + layer, wide_id, code_id, head, DTYPE, TO_CODES,
            K_STRIDES, K_SCALES, 0, K_BYTES, HEADS, K_DIM, BLOCK_SIZE, BITS, IS_FLOAT, ZERO_VALUES, KEY_GROUPS,
            OF_KEYS=True,
        )  # fmt: skip
    else:
        _recode_block(
            bases_ptr + layer + 2, offsets_ptr + layer + 2, wide_id, code_id, head, DTYPE, TO_CODES,
            V_STRIDES, V_SCALES, V_UNIT, V_BYTES, HEADS, V_DIM, BLOCK_SIZE, BITS, IS_FLOAT, ZERO_VALUES, 1,
            OF_KEYS=False,
        )  # fmt: skip


_launch_store = Launcher(_store_quantized_kernel)
_launch_recode = Launcher(_recode_kernel)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, kv: QuantizedKV, metadata: AttentionMetadata, keep_last: int | None = None
) -> None:
    """Writes the new keys and values of one layer to their wide blocks, and what is behind those to codes.

    With B the block size, f the block of a sequence's first new token and l that of its last: new tokens are stored in
    block 0 and, with `metadata.holds_new`, in all from f - 1 on, otherwise in l - 1 and l. Blocks max(f - 1, 1) to
    l - 2 are written as codes, their old tokens taken from the wide blocks. Nothing else is written, or read of the
    tables.

    Args:
        k, v, metadata: as in `store_kv.store_kv`; `metadata.code_tables` too.
        kv: the layer's blocks, written in place.
        keep_last: only blocks that have some of a sequence's last `keep_last` tokens are written; those in full.
    """
    if metadata.max_seqlen_q == 1 or metadata.tree is not None:  # a step: nothing is behind yet
        store_wide(k, v, kv.wide, metadata, keep_last)
        return
    _check_new_tokens(k, v, kv, keep_last)
    if metadata.code_tables is None:
        raise ValueError("metadata.code_tables is needed to store several tokens in a quantized cache")
    num_seqs, max_seqlen_q = metadata.num_seqs, metadata.max_seqlen_q
    if num_seqs == 0 or max_seqlen_q == 0:
        return

    blocks = ceil_div(max_seqlen_q - 1, kv.block_size) + 2  # that q tokens can lie in, and the one before
    tensors = (k, v, *(t[0] for x in (kv.wide, kv.codes) for t in (x.k_segments, x.v_segments)))
    misaligned = tuple(t.data_ptr() % 16 for t in tensors)
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    constants = (metadata.holds_new, kv.wide.segmented, kv.codes.segmented, *_constants(kv))
    with torch.cuda.device_of(k):
        _launch_store(
            (k.device, k.dtype, strides, misaligned, constants), (blocks, 2 * kv.num_kv_heads, num_seqs),
            *tensors, kv.wide.segment_offsets, kv.codes.segment_offsets,
            metadata.block_tables, metadata.code_tables, metadata.seq_lens, metadata.cu_seqlens_q,
            2**30 if keep_last is None else keep_last, *strides,
            metadata.block_tables.stride(0), metadata.code_tables.stride(0), *constants,
            num_warps=_num_warps(kv), enable_fp_fusion=False,
        )  # fmt: skip


class CodeAddresses:
    """Where the blocks of several layers lie, on their devices, to turn blocks into codes in all of them at once.

    Good for as long as the layers' segments stay where they are.

    Args:
        layers: on GPUs. Those that are alike (device, shapes, strides, dtype, format) take one launch.

    Raises:
        ValueError: a layer's blocks are not aligned to 16 bytes.
    """

    def __init__(self, layers: Sequence[QuantizedKV]) -> None:
        groups: dict[Hashable, list[QuantizedKV]] = {}
        for kv in layers:
            first = kv.wide.k_segments[0]
            groups.setdefault((first.device, first.dtype, _constants(kv)), []).append(kv)
        self._alike = [_AlikeLayers(group) for group in groups.values()]

    def quantize(self, pairs: torch.Tensor) -> None:
        """Writes wide blocks as codes: int32 `[pairs, 2]`, wide id and code id, on the layers' device; -1: no block."""
        for layers in self._alike:
            layers.recode(pairs, to_codes=True)

    def dequantize(self, pairs: torch.Tensor) -> None:
        """Writes codes as wide blocks: int32 `[pairs, 2]`, code id and wide id, on the layers' device."""
        for layers in self._alike:
            layers.recode(pairs, to_codes=False)


class _AlikeLayers:
    """The same of layers whose blocks one launch can do."""

    def __init__(self, layers: Sequence[QuantizedKV]) -> None:
        bases, offsets = [], []
        for kv in layers:
            for row, name in enumerate(("k_segments", "v_segments")):
                for blocks in (kv.wide, kv.codes):
                    bases.append(getattr(blocks, name)[0].data_ptr())
                    place = row * MAX_SEGMENTS * blocks.segment_offsets.element_size()
                    offsets.append(blocks.segment_offsets.data_ptr() + place)
        if any(base % 16 for base in bases):
            raise ValueError("the blocks of a quantized cache must be aligned to 16 bytes")
        self._like = layers[0]
        self._num_layers = len(layers)
        first = layers[0].wide.k_segments[0]
        self._device = first.device
        self._constants = (_TRITON_DTYPES[first.dtype], _constants(layers[0]))
        self._bases, self._offsets = torch.tensor([bases, offsets]).to(first.device)

    def recode(self, pairs: torch.Tensor, to_codes: bool) -> None:
        if len(pairs) == 0:
            return
        dtype, constants = self._constants
        with torch.cuda.device_of(self._bases):
            _launch_recode(
                (self._device, dtype, to_codes, constants),
                (len(pairs), 2 * self._like.num_kv_heads, self._num_layers),
                self._bases, self._offsets, pairs, dtype, to_codes, *constants,
                num_warps=_num_warps(self._like), enable_fp_fusion=False,
            )  # fmt: skip


_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def quantize_blocks(layers: Sequence[QuantizedKV], pairs: torch.Tensor) -> None:
    """`CodeAddresses.quantize`, once."""
    CodeAddresses(layers).quantize(pairs)


def dequantize_blocks(layers: Sequence[QuantizedKV], pairs: torch.Tensor) -> None:
    """`CodeAddresses.dequantize`, once."""
    CodeAddresses(layers).dequantize(pairs)


def _constants(kv: QuantizedKV) -> tuple[Hashable, ...]:
    """What the kernels are compiled for: their parameters from K_STRIDES on."""
    size, k_dim, v_dim, fmt = kv.block_size, kv.k_dim, kv.v_dim, kv.format
    if size not in KV_BLOCK_SIZES:
        raise ValueError(f"a quantized cache's block size must be one of {KV_BLOCK_SIZES}, got {size}")
    return (
        kv.wide.k_segments[0].stride()[:3], kv.wide.v_segments[0].stride()[:3], kv.num_kv_heads, k_dim, v_dim, size,
        fmt.key_scales(size, k_dim), fmt.value_scales(size, v_dim), fmt.value_unit(size, v_dim),
        fmt.key_bytes(size, k_dim), fmt.value_bytes(size, v_dim), fmt.bits, fmt.is_float, fmt.zero_values,
        fmt.key_groups(size),
    )  # fmt: skip


def _num_warps(kv: QuantizedKV) -> int:
    numbers = kv.block_size * next_power_of_2(max(kv.k_dim, kv.v_dim))
    return min(max(numbers // (32 * _NUMBERS_PER_THREAD), 1), 16)


def _check_new_tokens(k: torch.Tensor, v: torch.Tensor, kv: QuantizedKV, keep_last: int | None) -> None:
    heads, dtype = kv.num_kv_heads, kv.wide.k_segments[0].dtype
    if k.shape[1:] != (heads, kv.k_dim) or v.shape[1:] != (heads, kv.v_dim):
        raise ValueError(
            f"k and v must be [total_q, {heads}, {kv.k_dim}] and [total_q, {heads}, {kv.v_dim}] for this cache, "
            f"got {list(k.shape)} and {list(v.shape)}"
        )
    if k.dtype != dtype or v.dtype != dtype:
        raise ValueError(f"k and v must have the cache's dtype {dtype}, got {k.dtype} and {v.dtype}")
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the last dimension of k and v must have stride 1")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, or None to store every token, got {keep_last}")
