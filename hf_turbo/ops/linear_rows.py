"""The Triton kernel for linears of a few rows: every warp by itself, straight from memory to the tensor cores.

Each warp of a program takes its own share of the columns, so all of a short row is on its way at once, nothing goes
through shared memory on the way, and the sums meet once, at the end. What a tensor core multiplies in one go may come
in any order of columns, if weights and x have the same: an order in which a thread's numbers are next to each other in
memory. The weights are asked for before the kernel before has ended. After the products nothing is left to wait for
but one exchange through shared memory: a sum over warps would take several.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .int4_kernels import thread_index
from .linear_kernels import finish, load_bias, pick_weight
from .norm import apply_norm_weight

#: Which of several dimensions Triton gives to threads first: the last, or the first, as it did up to 3.6.
LAST_FIRST = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)

# Signatures are laid out by kind of argument: weights, biases, other tensors, sizes, strides, constants.
# fmt: off


@triton.jit
def _load_slices(
    row_ptrs, row_inside, column, SHARES: tl.constexpr, K: tl.constexpr, POLICY: tl.constexpr, LAST_FIRST: tl.constexpr,
):
    """All columns in slices of 32 a share, each [4 threads, 8 rows, SHARES, rows / 8, 8 columns]; zeros outside.

    The shares' slices alternate. `row_inside` is None where all rows are.
    """
    WIDTH: tl.constexpr = SHARES * 32
    slices = ()
    for s in tl.static_range((K + WIDTH - 1) // WIDTH):
        ptrs = row_ptrs + (column + s * WIDTH)
        if (s + 1) * WIDTH > K:
            inside = column + s * WIDTH < K
            if row_inside is not None:
                inside = inside & row_inside
            part = tl.load(ptrs, mask=inside, other=0.0, eviction_policy=POLICY)
        elif row_inside is not None:
            part = tl.load(ptrs, mask=row_inside, other=0.0, eviction_policy=POLICY)
        else:
            part = tl.load(ptrs, eviction_policy=POLICY)
        if LAST_FIRST:
            part = tl.permute(part, (3, 2, 1, 0, 4))
        slices = slices + (part,)  # noqa: RUF005
    return slices


@triton.jit
def _normalize(xs, factors, eps, K: tl.constexpr, WEIGHTING: tl.constexpr):
    """The RMS norm of x's rows, rounded as a norm's kernel would; WEIGHTING as `norm_constants` gives it."""
    DTYPE: tl.constexpr = xs[0].dtype
    squares = xs[0].to(tl.float32) * xs[0].to(tl.float32)
    for s in tl.static_range(1, len(xs)):
        squares += xs[s].to(tl.float32) * xs[s].to(tl.float32)
    total = tl.sum(tl.sum(tl.sum(squares, 4, keep_dims=True), 0, keep_dims=True), 2, keep_dims=True)
    inverse = tl.rsqrt(total * (1.0 / K) + eps)
    normed = ()
    for s in tl.static_range(len(xs)):
        n = xs[s].to(tl.float32) * inverse
        n = apply_norm_weight(n, factors[s], DTYPE, WEIGHTING[0], WEIGHTING[1], WEIGHTING[2])
        normed = normed + (n.to(DTYPE),)  # noqa: RUF005
    return normed


@triton.jit
def _rows_first(part):
    """A slice as [SHARES, rows, 32]."""
    SHARES: tl.constexpr = part.shape[2]
    ROWS: tl.constexpr = part.shape[3] * 8
    part = tl.reshape(part, (4, 8, SHARES, ROWS // 8, 2, 2, 2))
    return tl.reshape(tl.permute(part, (2, 3, 1, 4, 5, 0, 6)), (SHARES, ROWS, 32))


@triton.jit
def _columns_first(part):
    """A slice as [SHARES, 32, rows], its columns in the same order as those of `_rows_first`."""
    SHARES: tl.constexpr = part.shape[2]
    ROWS: tl.constexpr = part.shape[3] * 8
    part = tl.reshape(part, (4, 8, SHARES, ROWS // 8, 2, 2, 2))
    return tl.reshape(tl.permute(part, (2, 4, 5, 0, 6, 3, 1)), (SHARES, 32, ROWS))


@triton.jit
def _add_slices(acc, weights, xs, WEIGHTS_FIRST: tl.constexpr):
    """`acc` plus all products. Slices take turns in several sums, as a product waits for the one before in its sum."""
    CHAINS: tl.constexpr = 3 if WEIGHTS_FIRST else 1  # x of all rows leaves no registers for more
    total = acc
    for chain in tl.static_range(CHAINS):
        part = acc if chain == 0 else tl.zeros_like(acc)
        for s in tl.static_range(chain, len(weights), CHAINS):
            if WEIGHTS_FIRST:
                part = tl.dot(_rows_first(weights[s]), _columns_first(xs[s]), part)
            else:
                part = tl.dot(_rows_first(xs[s]), _columns_first(weights[s]), part)
        total = part if chain == 0 else total + part
    return total


@triton.jit
def _add_shares(
    acc, up_acc, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, GATED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The sums over shares of [SHARES, ROWS, BLOCK_N] (or with WEIGHTS_FIRST [SHARES, BLOCK_N, ROWS]), of gate and up.

    They come as [ROWS * BLOCK_N], features next to each other, repeated up to one a thread. The gather gives a thread
    all shares of its outputs: of a tensor with one dimension, number i is in a register of thread i % THREADS. With
    PAIRS, a thread's outputs are neighbours, as a store takes them whose first column is known to be aligned.
    """
    SHARES: tl.constexpr = acc.shape[0]
    THREADS: tl.constexpr = SHARES * 32
    OUTPUTS: tl.constexpr = ROWS * BLOCK_N
    EACH: tl.constexpr = OUTPUTS // THREADS if OUTPUTS > THREADS else 1
    SIDES: tl.constexpr = 2 if GATED else 1
    if GATED:
        acc = tl.join(acc, up_acc)
    i = tl.arange(0, SIDES * EACH * SHARES * THREADS)
    thread, share = i % THREADS, i // THREADS % SHARES
    each, side = i // (THREADS * SHARES) % EACH, i // (THREADS * SHARES * EACH)
    output = (thread * EACH + each if PAIRS else each * THREADS + thread) % OUTPUTS
    if WEIGHTS_FIRST:
        output = output % BLOCK_N * ROWS + output // BLOCK_N
    parts = tl.gather(tl.reshape(acc, (SHARES * OUTPUTS * SIDES,)), (share * OUTPUTS + output) * SIDES + side, 0)
    sums = tl.permute(tl.sum(tl.reshape(parts, (SIDES, EACH, SHARES, THREADS)), 2), (2, 1, 0) if PAIRS else (1, 2, 0))
    if GATED:
        return tl.split(tl.reshape(sums, (THREADS * EACH, 2)))
    else:
        return tl.reshape(sums, (THREADS * EACH,)), 0.0


# Nothing is gained by compiling for sizes that only bound rows.
@triton.jit(do_not_specialize=["num_rows", "n_0", "n_1", "n_2", "bias_n_0", "bias_n_1", "bias_n_2"])
def linear_rows_kernel(
    x_ptr, w_0, w_1, w_2, b_0, b_1, b_2, residual_ptr, out_ptr, norm_ptr,
    num_rows, n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2, eps,
    stride_x, stride_w, stride_res, stride_out,
    K: tl.constexpr, NUM_WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SHARES: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr, LAST_FIRST: tl.constexpr, PDL: tl.constexpr,
):
    """One program: BLOCK_N output features (of gate and up when gated), ROWS rows of x, a share of the columns a warp.

    Features come in sixteens and rows in eights with WEIGHTS_FIRST, the other way round without. NORM: None, or the
    weighting of an RMS norm before, which every program computes of its rows.
    """
    if PDL:
        gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION is not None
    tile, w_ptr, bias_ptr, size, bias_size, column = pick_weight(
        tl.program_id(0), w_0, w_1, w_2, b_0, b_1, b_2, n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2,
        BLOCK_N, 1 if GATED else NUM_WEIGHTS,
    )
    first_row = tile * BLOCK_N
    k = thread_index(4, 0, LAST_FIRST) * 8 + thread_index(SHARES, 2, LAST_FIRST) * 32
    k = k[:, :, :, :, None] + tl.arange(0, 8)[None, None, None, None, :]
    n = first_row + thread_index(8, 1, LAST_FIRST) + thread_index(BLOCK_N // 8, 3, LAST_FIRST) * 8
    w_offset = (tl.minimum(n, size - 1).to(tl.int64) * stride_w)[:, :, :, :, None]
    w_rows = w_ptr + w_offset
    up_rows = w_1 + w_offset
    first_m = tl.program_id(1) * ROWS
    m = first_m + thread_index(8, 1, LAST_FIRST) + thread_index(ROWS // 8, 3, LAST_FIRST) * 8
    x_rows = x_ptr + (m * stride_x)[:, :, :, :, None]
    x_inside = (m < num_rows)[:, :, :, :, None]

    weights = _load_slices(w_rows, None, k, SHARES, K, "evict_first", LAST_FIRST)
    ups = weights
    if GATED:
        ups = _load_slices(up_rows, None, k, SHARES, K, "evict_first", LAST_FIRST)
    factors = weights
    if NORM is not None and NORM[0]:
        # The same for all rows. Their dimension is there all the same, so that each thread loads what it multiplies.
        factor_ptrs = norm_ptr + (thread_index(8, 1, LAST_FIRST) * 0)[:, :, :, :, None]
        factors = _load_slices(factor_ptrs, None, k, SHARES, K, "evict_last", LAST_FIRST)
    # The outputs as `_add_shares` leaves them; without what it repeats.
    output = tl.arange(0, max(ROWS * BLOCK_N, SHARES * 32))
    m_out, n_out = first_m + output // BLOCK_N, first_row + output % BLOCK_N
    mask = (output < ROWS * BLOCK_N) & (m_out < num_rows) & (n_out < size)
    bias = load_bias(bias_ptr, n_out, bias_size, HAS_BIAS)
    up_bias = load_bias(b_1, n_out, bias_n_1, HAS_BIAS and GATED)
    if PDL:
        gdc_wait()
    xs = _load_slices(x_rows, x_inside, k, SHARES, K, "evict_last", LAST_FIRST)
    # What the end of the program needs is read now: there, nothing would hide the wait for it.
    residual = 0.0
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + m_out * stride_res + n_out, mask=mask, other=0.0)
    # All loads are sent before the first product: within one block of code, the assembler would put each load next to
    # its use, to save registers.
    tl.debug_barrier()
    if WEIGHTS_FIRST:
        acc = tl.zeros([SHARES, BLOCK_N, ROWS], tl.float32)
    else:
        acc = tl.zeros([SHARES, ROWS, BLOCK_N], tl.float32)
    up_acc = acc
    if num_rows > 0:  # always
        if NORM is not None:
            xs = _normalize(xs, factors, eps, K, NORM)
        acc = _add_slices(acc, weights, xs, WEIGHTS_FIRST)
        if GATED:
            up_acc = _add_slices(up_acc, ups, xs, WEIGHTS_FIRST)
    total, up_total = _add_shares(acc, up_acc, ROWS, BLOCK_N, WEIGHTS_FIRST, GATED, GATED or NUM_WEIGHTS == 1)
    finish(
        total, up_total, bias, up_bias, residual,
        out_ptr + column + m_out * stride_out + n_out, mask, HAS_RESIDUAL, ACTIVATION,
    )

# fmt: on
