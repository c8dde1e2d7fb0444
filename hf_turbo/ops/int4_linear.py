"""Linears with quantized weights (Triton): up to 64 rows from the packed codes, more through an unpacked weight.

One launch serves several weights with the same input; a bias, an activation between gate and up, and a residual after
are folded in, as in `linear`. Products are of x with small integers, exact, summed in fp32 and scaled by group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
from triton.runtime.jit import JITFunction

from .attention_config import ceil_div, device_facts, next_power_of_2
from .int4_config import MAX_ROWS, Int4Config, choose_config
from .int4_layout import UNIT_ROWS, packed_shape
from .int4_rows import int4_rows_kernel
from .int4_tiles import int4_dequantize_kernel, int4_tiles_kernel
from .launch import Launcher
from .linear import ACTIVATIONS, MERGE_BLOCK
from .linear_kernels import add_splits_kernel
from .packed_weight import PackedWeight, same_format
from .permute_columns import permute_columns
from .reference_linear import apply_activation

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Strips, and units across, that one program unpacks.
_UNPACK_STRIPS, _UNPACK_UNITS = 4, 2
#: Elements of a weight that are unpacked at a time for cuBLAS.
_UNPACK_ELEMENTS = 1 << 27

_launch_rows = Launcher(int4_rows_kernel)
_launch_tiles = Launcher(int4_tiles_kernel)
_launch_add_splits = Launcher(add_splits_kernel)
_launch_dequantize = Launcher(int4_dequantize_kernel)

#: Whether the kernels hold PTX; Triton's interpreter runs the same steps in plain operations.
USE_ASM = isinstance(int4_rows_kernel, JITFunction)
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
#: Whether Triton gives the k of a warp's product to its threads two at a time, or four, as it did up to 3.7.
K_IN_PAIRS = _VERSION > (3, 7)
#: Which of several dimensions it gives to threads first: the last, or the first, as it did up to 3.6.
LAST_FIRST = _VERSION > (3, 6)


def int4_linear(
    x: torch.Tensor,
    weights: Sequence[PackedWeight],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    places: torch.Tensor | None = None,
    config: Int4Config | None = None,
) -> torch.Tensor:
    """One or several linears of the same rows.

    Args:
        x: `[M, K]`, fp32, fp16 or bf16.
        weights: one to three of one format, each `[N_i, K]`.
        biases: None, or for each weight None or `[N_i]`; used in x's dtype.
        residual: `[M, N]` in x's dtype, added to the rounded result; with one weight and no activation.
        activation: None, or "silu", "gelu" or "gelu_tanh": the two weights are gate and up, of one size and order of
            columns, and the result is `act(gate) * up`.
        places: int32 `[N]`, which column of the result each output goes to (one weight, or gate and up); None: its own.
        config: overrides the table (for measuring; up to 64 rows).

    Returns:
        `[M, N]` in x's dtype, N the sum of the N_i: the outputs side by side; with an activation N is N_0.

    Raises:
        ValueError: for other shapes or dtypes, or weights that one launch can't serve.
    """
    biases = [None] * len(weights) if biases is None else [None if b is None else b.to(x.dtype) for b in biases]
    _check(x, weights, biases, residual, activation)
    rows, columns = x.shape
    if weights[0].perm is not None:
        if len({w.perm.data_ptr() for w in weights if w.perm is not None}) > 1:
            return torch.cat([int4_linear(x, [w], [b]) for w, b in zip(weights, biases, strict=True)], 1)
        x = permute_columns(x if x.stride(1) == 1 else x.contiguous(), weights[0].perm)
        weights, columns = [w.in_order() for w in weights], x.shape[1]
    if rows > MAX_ROWS:
        return _put(_by_unpacking(x, weights, biases, residual, activation), places)
    sizes = [weight.out_features for weight in weights]
    out = x.new_empty(rows, sizes[0] if activation is not None else sum(sizes))
    if rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    if config is None:
        features = sizes[0] if activation is not None else sum(sizes)
        weight, facts = weights[0], device_facts(x.device)
        gated = activation is not None
        config = choose_config(rows, features, columns, gated, weight.bits, weight.group_size, x.dtype, facts)
    placed = places if config.stream else None
    operands = _Operands(x, weights, biases, residual, activation, placed, out, config)
    with torch.cuda.device_of(x):
        (_run_rows if config.stream else _run_tiles)(operands)
    return out if placed is places else _put(out, places)


def _put(x: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """x with its columns in these places."""
    return x if places is None else torch.empty_like(x).index_copy_(1, places.long(), x)


def supports(x_rows: int, weights: Sequence[PackedWeight], dtype: torch.dtype, *, activation: bool) -> bool:
    """Whether one launch of `int4_linear` serves these weights together."""
    if not 1 <= x_rows <= MAX_ROWS or len(weights) > 3 or dtype not in _DTYPES or not same_format(weights):
        return False
    same_order = len({weight.perm.data_ptr() for weight in weights if weight.perm is not None}) <= 1
    return same_order and (not activation or len({weight.out_features for weight in weights}) == 1)


def dequantize(weight: PackedWeight, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight, `[N, columns]` in `dtype` (fp32, fp16, bf16): products in fp32, rounded once."""
    out = torch.empty(weight.out_features, weight.stored_columns(columns), dtype=dtype, device=weight.qweight.device)
    _unpack(weight, out, 0)
    if weight.perm is None:
        return out
    ordered = out.new_empty(weight.out_features, columns)
    real = weight.perm >= 0
    ordered[:, weight.perm[real].long()] = out[:, real]
    return ordered


def _zero_pairs(weight: PackedWeight) -> torch.Tensor:
    """Zero points, two in each int16, as the kernels read them; the scales where there are none."""
    if weight.zeros is None:
        return weight.scales
    even = weight.zeros if weight.out_features % 2 == 0 else F.pad(weight.zeros, (0, 1))
    return even.view(torch.int16)


def _check(
    x: torch.Tensor,
    weights: Sequence[PackedWeight],
    biases: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None,
    activation: str | None,
) -> None:
    if x.ndim != 2 or x.dtype not in _DTYPES:
        raise ValueError(f"x must be [M, K] in fp32, fp16 or bf16, got {list(x.shape)}, {x.dtype}")
    if not 1 <= len(weights) <= 3 or len(biases) != len(weights):
        raise ValueError(f"one launch takes 1 to 3 weights and a bias or None for each, got {len(weights)} weights")
    for weight in weights:
        units = packed_shape(weight.out_features, weight.stored_columns(x.shape[1]), weight.bits)[1]
        if weight.qweight.ndim != 3 or weight.qweight.shape[1] != units:
            shape = list(weight.qweight.shape)
            raise ValueError(f"x has {x.shape[1]} columns, which the packed weight {shape} has not")
    if not same_format(weights):
        raise ValueError(
            "the weights of one launch must have the same bits, groups and dtype of scales, and all or none of them "
            "zero points and another order of columns"
        )
    for weight, bias in zip(weights, biases, strict=True):
        if bias is not None and bias.shape != (weight.out_features,):
            raise ValueError(f"a bias must be [{weight.out_features}], got {list(bias.shape)}")
    sizes = [weight.out_features for weight in weights]
    if activation is not None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be None or one of {ACTIVATIONS}, got {activation!r}")
        if len(sizes) != 2 or sizes[0] != sizes[1] or residual is not None:
            raise ValueError("an activation takes two weights of one size, gate and up, and no residual")
        perms = [weight.perm for weight in weights]
        if perms[0] is not None and perms[1] is not None and perms[0].data_ptr() != perms[1].data_ptr():
            raise ValueError("gate and up must have the same order of columns: one tensor")
    if residual is not None and (len(weights) != 1 or residual.shape != (x.shape[0], sizes[0])):
        raise ValueError(f"a residual takes one weight and must be {[x.shape[0], sizes[0]]}")


class _Operands:
    """The kernels' arguments, by kind and in their order, and what they are compiled for.

    A tensor that is absent is replaced by another one, and not read.
    """

    def __init__(
        self,
        x: torch.Tensor,
        weights: Sequence[PackedWeight],
        biases: Sequence[torch.Tensor | None],
        residual: torch.Tensor | None,
        activation: str | None,
        places: torch.Tensor | None,
        out: torch.Tensor,
        config: Int4Config,
    ) -> None:
        rows, columns = x.shape
        first, missing = weights[0], 3 - len(weights)
        self.x, self.out, self.config, self.rows = x, out, config, rows
        padded = [*weights, *[first] * missing]
        self.codes = tuple(w.qweight for w in padded)
        self.scales = tuple(w.scales for w in padded)
        self.zeros = tuple(_zero_pairs(w) for w in padded)
        self.biases = (*(x if bias is None else bias for bias in biases), *[x] * missing)
        self.residual = x if residual is None else residual
        self.places = first.qweight if places is None else places
        self.has_places = places is not None
        self.sizes = (*(w.out_features for w in weights), *[0] * missing)
        # The rows of each weight, and how many of them have a bias.
        self.bounds = (*self.sizes, *(0 if bias is None else len(bias) for bias in biases), *[0] * missing)
        # A single row's stride is never used; a fixed number compiles nothing anew.
        self.strides = tuple(t.stride(0) if rows > 1 else columns for t in (x, self.residual, out))
        self.shape = (
            columns, first.qweight.shape[1], first.group_size, len(first.scales),
            first.bits, first.zeros is not None,
        )  # fmt: skip
        self.epilogue = (len(weights), any(self.bounds[3:]), residual is not None, activation)
        self.output_sizes = self.sizes[:1] if activation is not None else self.sizes
        tensors = (x, *self.codes, *self.scales, *self.zeros, *self.biases, self.residual, self.places, out)
        aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        self.key = (x.device, x.dtype, first.scales.dtype, self.strides, aligned, config)

    def tiles(self, rows: int) -> int:
        return sum(ceil_div(size, rows) for size in self.output_sizes)


def _run_rows(o: _Operands) -> None:
    config = o.config
    constants = (
        *o.shape, *o.epilogue, o.has_places, max(8, next_power_of_2(o.rows)), config.shares, config.strips,
        config.units, config.ahead, K_IN_PAIRS, LAST_FIRST, config.pdl, USE_ASM,
    )  # fmt: skip
    _launch_rows(
        (o.key, constants), (o.tiles(config.strips * UNIT_ROWS), 1, 1),
        o.x, *o.codes, *o.scales, *o.zeros, *o.biases, o.residual, o.places, o.out, o.rows, *o.bounds, *o.strides,
        *constants, num_warps=config.num_warps, num_stages=1, launch_pdl=config.pdl, enable_fp_fusion=True,
    )  # fmt: skip


def _run_tiles(o: _Operands) -> None:
    config = o.config
    partial = o.out
    if config.shares > 1:
        partial = torch.empty(config.shares, o.rows, sum(o.sizes), dtype=torch.float32, device=o.x.device)
    pairs = K_IN_PAIRS or (device_facts(o.x.device).capability == 90 and config.num_warps == 4)
    constants = (
        *o.shape, *o.epilogue, max(16, next_power_of_2(o.rows)), config.shares, config.strips, config.units,
        pairs, LAST_FIRST, config.pdl, USE_ASM,
    )  # fmt: skip
    _launch_tiles(
        (o.key, constants), (o.tiles(config.strips * UNIT_ROWS), config.shares, 1),
        o.x, *o.codes, *o.scales, *o.zeros, *o.biases, o.residual, o.out, partial, o.rows, *o.bounds, *o.strides,
        *constants, num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=config.pdl,
        enable_fp_fusion=True,
    )  # fmt: skip
    if config.shares > 1:
        merge_constants = (*o.epilogue, config.shares, MERGE_BLOCK, config.pdl)
        _launch_add_splits(
            (o.key, merge_constants), (o.tiles(MERGE_BLOCK), o.rows, 1),
            partial, *o.biases, o.residual, o.out, *o.bounds, *o.strides[1:], *merge_constants,
            num_warps=2, launch_pdl=config.pdl, enable_fp_fusion=True,
        )  # fmt: skip


def _by_unpacking(
    x: torch.Tensor,
    weights: Sequence[PackedWeight],
    biases: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """Many rows: products by cuBLAS, weights unpacked in x's dtype a part at a time."""
    parts = [_multiply_unpacked(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if activation is not None:
        return apply_activation(parts[0], activation).mul_(parts[1])
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return out if residual is None else out.add_(residual)


def _multiply_unpacked(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    rows, columns = weight.out_features, x.shape[1]
    step = max(UNIT_ROWS, _UNPACK_ELEMENTS // columns // UNIT_ROWS * UNIT_ROWS)
    if rows <= step:
        part = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
        _unpack(weight, part, 0)
        return F.linear(x, part, bias)
    out = x.new_empty(x.shape[0], rows)
    for start in range(0, rows, step):
        part = torch.empty(min(step, rows - start), columns, dtype=x.dtype, device=x.device)
        _unpack(weight, part, start // UNIT_ROWS)
        some = slice(start, start + len(part))
        out[:, some] = F.linear(x, part, None if bias is None else bias[some])
    return out


def _unpack(weight: PackedWeight, out: torch.Tensor, first_strip: int) -> None:
    """Rows of the weight from strip `first_strip` on into out, columns as they are stored."""
    size, units = weight.out_features, weight.qweight.shape[1]
    rows, columns = out.shape
    constants = (
        columns, units, weight.group_size, len(weight.scales), weight.bits, weight.zeros is not None, _UNPACK_STRIPS,
        _UNPACK_UNITS, LAST_FIRST, USE_ASM,
    )  # fmt: skip
    tensors = (weight.qweight, weight.scales, _zero_pairs(weight), out)
    aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    with torch.cuda.device_of(out):
        _launch_dequantize(
            (out.device, out.dtype, weight.scales.dtype, aligned, constants),
            (units // _UNPACK_UNITS, ceil_div(rows, _UNPACK_STRIPS * UNIT_ROWS), 1),
            *tensors, min(size, first_strip * UNIT_ROWS + rows), first_strip, out.stride(0), *constants,
            num_warps=4, num_stages=1,
        )  # fmt: skip
