"""The kernel for linears of a few rows and many columns on Hopper: a ring of stages in shared memory (Triton's Gluon).

At 4.4 TB/s a launch of 34 MB lasts 8 us, of which each beginning and end takes some: a program asks for weights, waits
for them, and has nothing on its way at its end. So a program asks for its first weights, all but one stage of its ring,
before the kernel before has ended, and only x is waited for. Triton's own pipelines begin a loop's loads with the loop:
after that wait, or with x before it. Programs are sized so that two kernels' fit on a multiprocessor where that is
faster than more stages, which `linear_config.py` says.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import linear_kernels

#: Versions of Triton whose Gluon this is written for: it changes from one to the next.
FIRST_VERSION, LAST_VERSION = (3, 6), (3, 9)
if not FIRST_VERSION <= tuple(map(int, triton.__version__.split(".")[:2])) <= LAST_VERSION:
    raise ImportError(f"written for the Gluon of Triton {FIRST_VERSION} to {LAST_VERSION}, not of {triton.__version__}")

#: Triton has renamed it in between.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
pick_weight = gluon.jit(linear_kernels.pick_weight.fn)
load_bias = gluon.jit(linear_kernels.load_bias.fn)
activate = gluon.jit(linear_kernels.activate.fn)
finish = gluon.jit(linear_kernels.finish.fn)

# Signatures are laid out by kind of argument: weights, biases, other tensors, sizes, strides, constants.
# fmt: off


@gluon.jit
def _add_stage(accs, weights, x, MMA: gl.constexpr, WARPGROUPS: gl.constexpr):
    """`accs` plus a stage's product of weights `[features, columns]` and x `[rows, columns]`.

    Products take turns in several sums, as each waits for the one before in its sum.
    """
    CHAINS: gl.constexpr = len(accs)
    PART: gl.constexpr = x.shape[1] // CHAINS
    added = ()
    if WARPGROUPS:
        added = (warpgroup_mma(weights, x.permute([1, 0]), accs[0]),)
    else:
        for c in gl.static_range(CHAINS):
            w_part = weights.slice(c * PART, PART, 1).load(gl.DotOperandLayout(0, MMA, 2))
            x_part = x.slice(c * PART, PART, 1).permute([1, 0]).load(gl.DotOperandLayout(1, MMA, 2))
            added = added + (mma_v2(w_part, x_part, accs[c]),)  # noqa: RUF005
    return added


@gluon.jit
def _zeros(COUNT: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, MMA: gl.constexpr):
    accs = ()
    for _ in gl.static_range(COUNT):
        accs = accs + (gl.zeros([BLOCK_N, ROWS], gl.float32, MMA),)  # noqa: RUF005
    return accs


@gluon.jit
def _sum(accs):
    total = accs[0]
    for c in gl.static_range(1, len(accs)):
        total += accs[c]
    return total


@gluon.jit(do_not_specialize=["num_rows", "n_0", "n_1", "n_2", "bias_n_0", "bias_n_1", "bias_n_2"])
def linear_ring_kernel(
    x_ptr, w_0, w_1, w_2, b_0, b_1, b_2, residual_ptr, out_ptr, partial_ptr,
    num_rows, n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2,
    stride_x, stride_w, stride_res, stride_out,
    K: gl.constexpr, NUM_WEIGHTS: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr, SPLIT_K: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    WARPGROUPS: gl.constexpr, PDL: gl.constexpr,
):
    """One program: BLOCK_N output features (of gate and up when gated), all rows of x, a share of the columns.

    WARPGROUPS: four warps multiply together, straight from shared memory, as many rows need it; otherwise each warp
    multiplies features of its own. K is a multiple of BLOCK_K * SPLIT_K, rows begin at multiples of 32 bytes.
    """
    if PDL:
        gdc_launch_dependents()
    GATED: gl.constexpr = ACTIVATION is not None
    STEPS: gl.constexpr = K // BLOCK_K // SPLIT_K
    CHAINS: gl.constexpr = 1 if WARPGROUPS else 2
    LANES: gl.constexpr = BLOCK_K // 8 if BLOCK_K < 256 else 32
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = (
        gl.NVMMASharedLayout(128, 16, 2) if WARPGROUPS else gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    MMA: gl.constexpr = (
        gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16]) if WARPGROUPS
        else gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    )
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    tile, w_ptr, bias_ptr, size, bias_size, column = pick_weight(
        gl.program_id(0), w_0, w_1, w_2, b_0, b_1, b_2, n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2,
        BLOCK_N, 1 if GATED else NUM_WEIGHTS,
    )
    split = gl.program_id(1)
    k = split * (STEPS * BLOCK_K) + gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))[None, :]
    n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))
    # Features beyond the last read it again: cheaper than a mask on every load.
    offsets = (gl.minimum(n, size - 1).to(gl.int64) * stride_w)[:, None] + k
    w_tile = w_ptr + offsets
    up_tile = w_1 + offsets
    # Of x, rows that are not there are not read: all programs would ask for the same one at once.
    m = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))[:, None]
    x_tile = x_ptr + m * stride_x + k

    w_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], SHARED)
    up_ring = w_ring
    if GATED:
        up_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], SHARED)
    x_ring = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, BLOCK_K], SHARED)
    for s in gl.static_range(STAGES - 1):
        copy_async(w_ring.index(s), w_tile + s * BLOCK_K)
        if GATED:
            copy_async(up_ring.index(s), up_tile + s * BLOCK_K)
        async_copy.commit_group()
    m_out = gl.arange(0, ROWS, gl.SliceLayout(0, MMA))[None, :]
    n_out = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))[:, None]
    mask = (n_out < size) & (m_out < num_rows)
    bias = load_bias(bias_ptr, n_out, bias_size, HAS_BIAS and SPLIT_K == 1)
    up_bias = load_bias(b_1, n_out, bias_n_1, HAS_BIAS and GATED and SPLIT_K == 1)
    if PDL:
        gdc_wait()
    for s in gl.static_range(STAGES - 1):
        copy_async(x_ring.index(s), x_tile + s * BLOCK_K, mask=m < num_rows)
        async_copy.commit_group()
    # What the end of the program needs is read now: there, nothing would hide the wait for it.
    residual = 0.0
    if HAS_RESIDUAL and SPLIT_K == 1:
        residual = gl.load(residual_ptr + m_out * stride_res + n_out, mask=mask, other=0.0)

    accs = _zeros(CHAINS, BLOCK_N, ROWS, MMA)
    up_accs = _zeros(CHAINS, BLOCK_N, ROWS, MMA)
    for step in range(STEPS):
        # Groups come in order: that of x after those of its weights, or one for both.
        async_copy.wait_group(STAGES - 2)
        stage = step % STAGES
        ahead = step + STAGES - 1
        if ahead < STEPS:
            free = ahead % STAGES
            copy_async(w_ring.index(free), w_tile + ahead * BLOCK_K)
            if GATED:
                copy_async(up_ring.index(free), up_tile + ahead * BLOCK_K)
            copy_async(x_ring.index(free), x_tile + ahead * BLOCK_K, mask=m < num_rows)
        async_copy.commit_group()
        if WARPGROUPS:
            fence_async_shared()
        x = x_ring.index(stage)
        accs = _add_stage(accs, w_ring.index(stage), x, MMA, WARPGROUPS)
        if GATED:
            up_accs = _add_stage(up_accs, up_ring.index(stage), x, MMA, WARPGROUPS)

    acc = _sum(accs)
    up_acc = _sum(up_accs)
    if SPLIT_K > 1:
        width = n_0 + n_1 + n_2
        partial_ptrs = partial_ptr + (split * num_rows + m_out) * width + column + n_out
        gl.store(partial_ptrs, acc, mask=mask)
        if GATED:
            gl.store(partial_ptrs + n_0, up_acc, mask=mask)
    else:
        finish(
            acc, up_acc, bias, up_bias, residual,
            out_ptr + column + m_out * stride_out + n_out, mask, HAS_RESIDUAL, ACTIVATION,
        )
# fmt: on
