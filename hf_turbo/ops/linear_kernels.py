"""The Triton kernels of `linear.py`.

Up to `MAX_GEMV_ROWS` rows are multiplied on the CUDA cores, one or a few weight rows a program; more rows on the
tensor cores, the weights as the operand with the many rows. On Hopper every kernel lets the next one start early,
and reads its own first weights, which no kernel writes, before it waits for the kernel before it.
"""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .norm import apply_norm_weight

# Signatures are laid out by kind of argument: weights, biases, other tensors, sizes, strides, constants.
# fmt: off


@triton.jit
def pick_weight(
    tile, w_0, w_1, w_2, b_0, b_1, b_2, n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2,
    BLOCK_N: tl.constexpr, NUM_WEIGHTS: tl.constexpr,
):
    """The weight that output tile `tile` belongs to: (tile within it, weight, bias, rows, rows with a bias, the
    column of the output at which it starts)."""
    w, b, n, bias_n = w_0, b_0, n_0, bias_n_0
    column = n_0 * 0
    if NUM_WEIGHTS > 1:
        tiles_0 = tl.cdiv(n_0, BLOCK_N)
        if tile >= tiles_0:
            tile = tile - tiles_0
            w, b, n, bias_n = w_1, b_1, n_1, bias_n_1
            column = n_0
            if NUM_WEIGHTS > 2:
                tiles_1 = tl.cdiv(n_1, BLOCK_N)
                if tile >= tiles_1:
                    tile = tile - tiles_1
                    w, b, n, bias_n = w_2, b_2, n_2, bias_n_2
                    column = n_0 + n_1
    return tile, w, b, n, bias_n, column


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # 0.5 * (1 + tanh(u)) is the sigmoid of 2 u
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def load_bias(bias_ptr, n, bias_size, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        return tl.load(bias_ptr + n, mask=n < bias_size, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def finish(
    acc, up, bias, up_bias, residual, out_ptrs, mask, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
):
    """Bias, activation, residual and the store. It rounds where torch, op by op, would."""
    dtype = out_ptrs.dtype.element_ty
    result = (acc + bias).to(dtype)
    if ACTIVATION is not None:
        gate = activate(result.to(tl.float32), ACTIVATION).to(dtype)
        result = (gate.to(tl.float32) * (up + up_bias).to(dtype).to(tl.float32)).to(dtype)
    if HAS_RESIDUAL:
        result = (residual.to(tl.float32) + result.to(tl.float32)).to(dtype)
    tl.store(out_ptrs, result, mask=mask)


@triton.jit
def load_columns(rows_ptr, step, POLICY: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns `step * BLOCK_K` on of rows given as a [., ., 1] tensor of pointers; zeros beyond K."""
    k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    if K % BLOCK_K == 0:
        return tl.load(rows_ptr + k, eviction_policy=POLICY)
    else:
        return tl.load(rows_ptr + k, mask=k < K, other=0.0, eviction_policy=POLICY)


@triton.jit
def prefetch(rows_ptr, first_column, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Asks the L2 cache for COLUMNS columns of rows given as a [., 1] tensor of pointers."""
    LINE: tl.constexpr = 128 * 8 // rows_ptr.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, COLUMNS // LINE)[None, :] * LINE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [rows_ptr + tl.minimum(first_column + line, K - 1)],
        dtype=tl.int32, is_pure=False, pack=1,
    )


# Nothing is gained by compiling for sizes that only bound rows.
@triton.jit(do_not_specialize=["n_0", "n_1", "n_2", "bias_n_0", "bias_n_1", "bias_n_2"])
def gemv_kernel(
    x_ptr, w_0, w_1, w_2, b_0, b_1, b_2, residual_ptr, out_ptr, norm_ptr,
    n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2, eps,
    stride_x, stride_w, stride_res, stride_out,
    M: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, NUM_WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """One program: BLOCK_N output features (of gate and up when gated) for all M rows of x, ROWS with padding.

    Everything is [ROWS of x, rows of w, columns], in a layout in which a thread holds the same columns of all rows.
    NORM: None, or the weighting of an RMS norm before, of rows that are one step.
    """
    if PDL:
        gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION is not None
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile, w_ptr, bias_ptr, size, bias_size, column = pick_weight(
        tl.program_id(0), w_0, w_1, w_2, b_0, b_1, b_2, n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2,
        BLOCK_N, 1 if GATED else NUM_WEIGHTS,
    )
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last read it again: cheaper than a mask on every load.
    w_offset = tl.minimum(n, size - 1).to(tl.int64)[None, :, None] * stride_w
    w_rows = w_ptr + w_offset
    m = tl.arange(0, ROWS)
    x_rows = x_ptr + tl.minimum(m, M - 1)[:, None, None] * stride_x

    w = load_columns(w_rows, 0, "evict_first", K, BLOCK_K)
    if GATED:
        up_rows = w_1 + w_offset
        up_w = load_columns(up_rows, 0, "evict_first", K, BLOCK_K)
    factor = 1.0
    if NORM is not None and NORM[0]:
        factor = load_columns(norm_ptr, 0, "evict_last", K, BLOCK_K)
    m_out, n_out = m[:, None], n[None, :]
    mask = (n_out < size) & (m_out < M)
    bias = load_bias(bias_ptr, n_out, bias_size, HAS_BIAS)
    up_bias = load_bias(b_1, n_out, bias_n_1, HAS_BIAS and GATED)
    if PDL:
        gdc_wait()
    # What the end of the program needs is read now: there, nothing would hide the wait for it.
    residual = 0.0
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + m_out * stride_res + n_out, mask=mask, other=0.0)

    x = load_columns(x_rows, 0, "evict_last", K, BLOCK_K).to(tl.float32)
    if NORM is not None:
        DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        x = x * tl.rsqrt(tl.sum(x * x, 2, keep_dims=True) * (1.0 / K) + eps)
        x = apply_norm_weight(x, factor, DTYPE, NORM[0], NORM[1], NORM[2]).to(DTYPE).to(tl.float32)
    acc = w.to(tl.float32) * x
    up_acc = acc
    if GATED:
        up_acc = up_w.to(tl.float32) * x
    for step in range(1, STEPS):
        w = load_columns(w_rows, step, "evict_first", K, BLOCK_K)
        x = load_columns(x_rows, step, "evict_last", K, BLOCK_K).to(tl.float32)
        acc += w.to(tl.float32) * x
        if GATED:
            up_w = load_columns(up_rows, step, "evict_first", K, BLOCK_K)
            up_acc += up_w.to(tl.float32) * x
    finish(
        tl.sum(acc, 2), tl.sum(up_acc, 2) if GATED else 0.0, bias, up_bias, residual,
        out_ptr + column + m_out * stride_out + n_out, mask, HAS_RESIDUAL, ACTIVATION,
    )


@triton.jit(do_not_specialize=["num_rows", "n_0", "n_1", "n_2", "bias_n_0", "bias_n_1", "bias_n_2"])
def dot_kernel(
    x_ptr, w_0, w_1, w_2, b_0, b_1, b_2, residual_ptr, out_ptr, partial_ptr,
    num_rows, n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2,
    stride_x, stride_w, stride_res, stride_out,
    K: tl.constexpr, NUM_WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, SPLIT_K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):
    """One program: BLOCK_N output features (of gate and up when gated), all rows of x, a share of the columns.

    The tile is [features, rows]: the weights are the tensor cores' first operand, whose rows come in sixteens.
    """
    if PDL:
        gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION is not None
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (STEPS + SPLIT_K - 1) // SPLIT_K
    tile, w_ptr, bias_ptr, size, bias_size, column = pick_weight(
        tl.program_id(0), w_0, w_1, w_2, b_0, b_1, b_2, n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2,
        BLOCK_N, 1 if GATED else NUM_WEIGHTS,
    )
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_offset = tl.minimum(n, size - 1).to(tl.int64)[:, None] * stride_w
    w_rows = w_ptr + w_offset
    up_rows = w_1 + w_offset
    m = tl.arange(0, ROWS)
    x_rows = x_ptr + m[:, None] * stride_x
    first = split * (SHARE * BLOCK_K)
    if PDL:
        if PREFETCH > 0:
            prefetch(w_rows, first, K, PREFETCH)
            if GATED:
                prefetch(up_rows, first, K, PREFETCH)
        gdc_wait()

    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up_acc = acc
    for step in range(SHARE):
        k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_rows + k, mask=(m < num_rows)[:, None] & (k < K), other=0.0)
        # The last share may be short.
        if K % (BLOCK_K * SPLIT_K) == 0:
            w = tl.load(w_rows + k, eviction_policy="evict_first")
        else:
            w = tl.load(w_rows + k, mask=k < K, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            if K % (BLOCK_K * SPLIT_K) == 0:
                up_w = tl.load(up_rows + k, eviction_policy="evict_first")
            else:
                up_w = tl.load(up_rows + k, mask=k < K, other=0.0, eviction_policy="evict_first")
            up_acc = tl.dot(up_w, tl.trans(x), up_acc, input_precision="ieee")

    m, n = m[None, :], n[:, None]
    mask = (n < size) & (m < num_rows)
    if SPLIT_K > 1:
        width = n_0 + n_1 + n_2
        partial_ptrs = partial_ptr + (split * num_rows + m) * width + column + n
        tl.store(partial_ptrs, acc, mask=mask)
        if GATED:
            tl.store(partial_ptrs + n_0, up_acc, mask=mask)
    else:
        bias = load_bias(bias_ptr, n, bias_size, HAS_BIAS)
        up_bias = load_bias(b_1, n, bias_n_1, HAS_BIAS and GATED)
        residual = 0.0
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + m * stride_res + n, mask=mask, other=0.0)
        finish(
            acc, up_acc, bias, up_bias, residual,
            out_ptr + column + m * stride_out + n, mask, HAS_RESIDUAL, ACTIVATION,
        )


@triton.jit(do_not_specialize=["n_0", "n_1", "n_2", "bias_n_0", "bias_n_1", "bias_n_2"])
def add_splits_kernel(
    partial_ptr, b_0, b_1, b_2, residual_ptr, out_ptr,
    n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2, stride_res, stride_out,
    NUM_WEIGHTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs of one row of x, their partial sums added in order."""
    if PDL:
        gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION is not None
    # Only the biases matter here; they stand in for the weights.
    tile, _, bias_ptr, size, bias_size, column = pick_weight(
        tl.program_id(0), b_0, b_1, b_2, b_0, b_1, b_2, n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2,
        BLOCK_N, 1 if GATED else NUM_WEIGHTS,
    )
    row = tl.program_id(1)
    num_rows = tl.num_programs(1)
    width = n_0 + n_1 + n_2
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < size
    bias = load_bias(bias_ptr, n, bias_size, HAS_BIAS)
    up_bias = load_bias(b_1, n, bias_n_1, HAS_BIAS and GATED)
    if PDL:
        gdc_wait()
    residual = 0.0
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_res + n, mask=mask, other=0.0)
    acc = tl.zeros([BLOCK_N], tl.float32)
    up_acc = acc
    for split in tl.static_range(SPLIT_K):
        partial_ptrs = partial_ptr + (split * num_rows + row) * width + column + n
        acc += tl.load(partial_ptrs, mask=mask, other=0.0)
        if GATED:
            up_acc += tl.load(partial_ptrs + n_0, mask=mask, other=0.0)
    finish(
        acc, up_acc, bias, up_bias, residual,
        out_ptr + column + row * stride_out + n, mask, HAS_RESIDUAL, ACTIVATION,
    )


@triton.jit(do_not_specialize=["num_experts", "size"])
def expert_kernel(
    x_ptr, w_ptr, bias_ptr, ids_ptr, out_ptr,
    num_experts, size, stride_x, stride_expert, stride_w, stride_bias, stride_out,
    REPEAT: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """One program: BLOCK_N features of one output row, by that row's expert.

    Rows come before features in the launch order, so rows with the same expert find its weights in the L2 cache.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :, None]
    if PDL:
        gdc_wait()
    one = tl.zeros([1, 1, 1], tl.int32)
    expert = tl.load(ids_ptr + row + one).to(tl.int64)
    real = (expert >= 0) & (expert < num_experts)
    expert = tl.where(real, expert, 0)
    w_rows = w_ptr + expert * stride_expert + tl.minimum(n, size - 1).to(tl.int64) * stride_w
    x_rows = x_ptr + (row // REPEAT) * stride_x + one
    acc = tl.zeros([1, BLOCK_N, BLOCK_K], tl.float32)
    for step in range((K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
        w = tl.load(w_rows + k, mask=real & (k < K), other=0.0)
        acc += w.to(tl.float32) * load_columns(x_rows, step, "evict_last", K, BLOCK_K).to(tl.float32)
    total = tl.sum(acc, 2, keep_dims=True)
    total += load_bias(bias_ptr + expert * stride_bias, n, size, HAS_BIAS)
    # Zeros for the padding, even if its row of x holds an infinity or NaN.
    total = tl.where(real, total, 0.0)
    tl.store(out_ptr + row.to(tl.int64) * stride_out + n, total.to(out_ptr.dtype.element_ty), mask=n < size)

# fmt: on
