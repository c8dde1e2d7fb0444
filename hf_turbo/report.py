"""`report(model)`: what is accelerated, what stepped aside and why, and how many blocks it takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from .generation.pace import PaceStats
from .modeling.key_check import MIN_TOKENS
from .ops import dispatch
from .patching import handle_of
from .quantization.int4_linear import Int4Linear


@dataclass(frozen=True)
class Report:
    """A patched model's state.

    Args:
        accelerated: per kind of layer, how.
        stepped_aside: reasons, and how often each came up.
        block_size: tokens a block.
        kv_cache_dtype: what older blocks are kept as; None: what the model computes.
        kv_bytes_per_token: over all layers, in a block that is kept so; `wide_kv_bytes_per_token`: in one that is as
            the model computes it. 0 until something was stored.
        protected_layers: layer -> what its older blocks are kept as, where that is not `kv_cache_dtype`.
        unsettled_layers: how many are kept in int8 until a prompt shows whether their keys can take `kv_cache_dtype`.
        blocks_total, blocks_in_use, blocks_shared, peak_blocks: over all groups of layers, those of codes included; a
            shared block has several owners (beams, return sequences, copies of a cache).
        kv_bytes, peak_kv_bytes: bytes of the blocks in use, now and at most; `pool_bytes`: of all blocks.
        copied_blocks: shared blocks that were copied because a sequence went its own way.
        tokens_stored, tokens_shared: tokens that went through the cache so far: those that were written, and those of
            a prompt's copies, whose keys and values were there already.
        cached_blocks, cached_bytes: blocks that nothing uses and that `prefix_cache` keeps for texts that begin alike.
        prefix_tokens, prefix_tokens_found: tokens of prompts that were looked up, and those that were found.
        evicted_blocks: blocks that were given up for others, of those that were kept.
        caches: how many caches were made.
        graphs, graph_bytes: captured decode steps, and the device memory they took.
        steps_captured, steps_replayed: how many steps were captured and replayed so far.
        quantized_linears: bits -> how many of the model's linears are `Int4Linear`, those of its experts, too.
        quantized_bytes: of their weights, with scales and zero points.
        linears_taken_over: how many of them stand in for another library's.
        linears_left: name -> why a quantized linear of another library was left as it is.
        drafts: drafter -> what its drafts have come to: tokens drafted and accepted, tokens a step, on or off.
    """

    accelerated: dict[str, str]
    stepped_aside: dict[str, int]
    block_size: int
    kv_cache_dtype: str | None
    kv_bytes_per_token: float
    wide_kv_bytes_per_token: float
    protected_layers: dict[int, str]
    unsettled_layers: int
    blocks_total: int
    blocks_in_use: int
    blocks_shared: int
    peak_blocks: int
    kv_bytes: int
    peak_kv_bytes: int
    pool_bytes: int
    copied_blocks: int
    tokens_stored: int
    tokens_shared: int
    cached_blocks: int
    cached_bytes: int
    prefix_tokens: int
    prefix_tokens_found: int
    evicted_blocks: int
    caches: int
    graphs: int
    graph_bytes: int
    steps_captured: int
    steps_replayed: int
    quantized_linears: dict[int, int]
    quantized_bytes: int
    linears_taken_over: int
    linears_left: dict[str, str]
    drafts: dict[str, PaceStats]

    def __str__(self) -> str:
        lines = [f"{kind}: {how}" for kind, how in self.accelerated.items()]
        lines += [f"stepped aside ({n}x): {reason}" for reason, n in self.stepped_aside.items()]
        lines += [
            f"blocks of {self.block_size} tokens: {self.blocks_in_use} in use ({self.blocks_shared} shared), "
            f"{self.peak_blocks} at most, {self.blocks_total} in the pool",
            f"KV bytes: {self.kv_bytes:,} in use, {self.peak_kv_bytes:,} at most, {self.pool_bytes:,} in the pool",
            *self._codes(),
            f"tokens: {self.tokens_stored:,} stored, {self.tokens_shared:,} shared; caches made: {self.caches:,}",
        ]
        if self.prefix_tokens:
            lines.append(
                f"prefix cache: {self.prefix_tokens_found:,} of {self.prefix_tokens:,} prompt tokens found; "
                f"{self.cached_blocks} blocks kept, {self.cached_bytes:,} bytes; {self.evicted_blocks:,} evicted"
            )
        if self.steps_captured:
            lines.append(
                f"decode steps: {self.steps_captured:,} captured, {self.steps_replayed:,} replayed; "
                f"{self.graphs} graphs held, {self.graph_bytes:,} bytes"
            )
        lines += [
            f"{name}: {s.drafted:,} tokens drafted, {s.acceptance_rate:.0%} accepted, {s.tokens_per_step:.2f} tokens a "
            f"step; {'on' if s.is_on else 'off, as it does not pay now'}"
            for name, s in self.drafts.items()
        ]
        if self.quantized_linears:
            lines.append(self._quantized())
        return "\n".join(lines)

    def _codes(self) -> list[str]:
        if self.kv_cache_dtype is None:
            return []
        lines = [f"KV cache in {self.kv_cache_dtype}: {self.kv_bytes_per_token:,.1f} bytes a token"]
        if self.wide_kv_bytes_per_token:
            lines[0] += f" of {self.wide_kv_bytes_per_token:,.1f}, {self._share_of_wide():.0%}"
        for name in sorted(set(self.protected_layers.values())):
            layers = [str(i) for i, own in sorted(self.protected_layers.items()) if own == name]
            why = f"as they see few tokens, or their keys can't take {self.kv_cache_dtype}"
            lines.append(f"kept in {name}, {why}: layers {', '.join(layers)}")
        if self.unsettled_layers:
            tells = f"a prompt of {MIN_TOKENS} tokens shows whether their keys can take {self.kv_cache_dtype}"
            lines.append(f"kept in int8 until {tells}: {self.unsettled_layers} layers")
        return lines

    def _share_of_wide(self) -> float:
        return self.kv_bytes_per_token / self.wide_kv_bytes_per_token

    def _quantized(self) -> str:
        kinds = " and ".join(f"{n:,} of {bits} bits" for bits, n in sorted(self.quantized_linears.items()))
        taken = f", {self.linears_taken_over:,} taken over" if self.linears_taken_over else ""
        left = f", {len(self.linears_left):,} left as they were loaded" if self.linears_left else ""
        return f"quantized linears: {kinds}, {self.quantized_bytes:,} bytes{taken}{left}"


def report(model: nn.Module) -> Report:
    """What `patch` did to a model, and what its cache holds now.

    Raises:
        ValueError: the model isn't patched.
    """
    handle = handle_of(model)
    pool, groups, index = handle.pool, handle.pool.all_groups(), handle.pool.index
    wide = list(pool.groups.values())
    kinds = Counter(handle.sliding_windows)
    unsuited = handle.attention and handle.attention.unsuited
    reasons = dict(handle.stepped_aside)
    if unsuited:
        reasons.setdefault(unsuited, 1)
    linears = [module for module in model.modules() if isinstance(module, Int4Linear)]
    backend = "Triton" if dispatch.uses_triton(next(model.parameters()).device) else "PyTorch"
    how = {_kind(w): f"{n} layer{'s' * (n > 1)} over the paged cache ({backend})" for w, n in kinds.items()}
    return Report(
        accelerated={} if unsuited else how,
        stepped_aside=reasons,
        block_size=pool.block_size,
        kv_cache_dtype=pool.kv_cache_dtype,
        kv_bytes_per_token=sum((g.codes or g).block_bytes for g in wide) / pool.block_size,
        wide_kv_bytes_per_token=sum(g.block_bytes for g in wide) / pool.block_size,
        protected_layers=pool.protected_layers,
        unsettled_layers=sum(not pool.is_settled(i) for i in range(len(handle.sliding_windows))),
        blocks_total=sum(g.manager.num_blocks for g in groups),
        blocks_in_use=sum(g.manager.num_used for g in groups),
        blocks_shared=sum(g.manager.num_shared for g in groups),
        peak_blocks=sum(g.peak_blocks for g in groups),
        kv_bytes=sum(g.manager.num_used * g.block_bytes for g in groups),
        peak_kv_bytes=sum(g.peak_blocks * g.block_bytes for g in groups),
        pool_bytes=sum(g.manager.num_blocks * g.block_bytes for g in groups),
        copied_blocks=sum(g.copied_blocks for g in wide),
        tokens_stored=max((g.stored_tokens for g in wide), default=0),
        tokens_shared=max((g.shared_tokens for g in wide), default=0),
        cached_blocks=sum(g.manager.num_cached for g in groups),
        cached_bytes=sum(g.manager.num_cached * g.block_bytes for g in groups),
        prefix_tokens=index.tokens_asked,
        prefix_tokens_found=index.tokens_found,
        evicted_blocks=index.num_evicted,
        caches=handle.num_caches,
        graphs=handle.steps.num_graphs,
        graph_bytes=handle.steps.num_bytes,
        steps_captured=handle.steps.num_captured,
        steps_replayed=handle.steps.num_replayed,
        quantized_linears=dict(Counter(layer.bits for layer in linears)),
        quantized_bytes=_num_bytes(linears),
        linears_taken_over=len(handle.taken_over.layers),
        linears_left=dict(handle.taken_over.left),
        drafts={name: known.stats() for name, known in handle.drafters.items()},
    )


def _num_bytes(linears: list[Int4Linear]) -> int:
    """Of the weights; layers may share what orders their columns."""
    tensors = {id(x): x for layer in linears for x in layer.buffers()}
    return sum(x.nbytes for x in tensors.values())


def _kind(window: int | None) -> str:
    return "full attention" if window is None else f"sliding window of {window}"
