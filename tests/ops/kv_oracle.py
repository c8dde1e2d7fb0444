"""Rows of a quantized cache as the cache runs them, and what attention over them should give in float64.

The rows' blocks are poison until something is written to them, and again when they are given up.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch
from oracle import GARBAGE_BLOCK

from hf_turbo.ops import kv_codes, reference_kv
from hf_turbo.ops.block_ids import SEGMENT_BITS, SEGMENT_MASK
from hf_turbo.ops.kv_format import KV_FORMATS
from hf_turbo.ops.metadata import AttentionMetadata, CodedRows, LayerKV, QuantizedKV


def make_layer(fmt, num_blocks, block_size, heads, k_dim, v_dim, dtype=torch.float32, device="cpu", segments=1):
    """A layer of poison: NaN in every wide number, 0xFF in every byte of codes."""
    fmt = KV_FORMATS[fmt]

    def wide(dim):
        return torch.full((num_blocks, block_size, heads, dim), math.nan, dtype=dtype, device=device).transpose(1, 2)

    def codes(num_bytes):
        return torch.full((num_blocks, heads, num_bytes), 0xFF, dtype=torch.uint8, device=device)

    sizes = fmt.key_bytes(block_size, k_dim), fmt.value_bytes(block_size, v_dim)
    return QuantizedKV(
        LayerKV.of(*([wide(dim) for _ in range(segments)] for dim in (k_dim, v_dim))),
        LayerKV.of(*([codes(size) for _ in range(segments)] for size in sizes)),
        fmt,
    )


@dataclass
class Row:
    """One sequence: all its tokens, `[tokens, heads, dim]`, and where its blocks are, by their numbers."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    length: int = 0
    wide: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)


class Rows:
    """Some sequences in one layer, which grow by forwards.

    Args:
        ops: the module with `store_kv`, `quantize_blocks` and `dequantize_blocks`.
        attention: the module with `paged_attention`.
        scattered: blocks are taken in a random order, over all segments.
    """

    def __init__(
        self, fmt, lengths, *, block_size=8, heads=2, group=3, k_dim=16, v_dim=None, dtype=torch.float32, device="cpu",
        segments=1, window=None, softcap=None, sinks=False, scattered=False, seed=0,
        ops=reference_kv, attention=reference_kv,
    ):  # fmt: skip
        v_dim = v_dim or k_dim
        self.size, self.window, self.device, self.ops, self.attention = block_size, window, device, ops, attention
        num_blocks = sum(n // block_size + 2 for n in lengths)
        self.kv = make_layer(fmt, num_blocks, block_size, heads, k_dim, v_dim, dtype, device, segments)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(device, dtype)

        channels = normal(heads, k_dim).exp() * 2  # keys have channels of very different sizes, and biases
        self.rows = [
            Row(normal(n, heads * group, k_dim), (normal(n, heads, k_dim) + 1) * channels, normal(n, heads, v_dim))
            for n in lengths
        ]
        self.arguments = {
            "softmax_scale": k_dim**-0.5 / 4,
            "logit_softcap": softcap,
            "sinks": normal(heads * group) if sinks else None,
        }
        ids = [(s << SEGMENT_BITS) | i for s in range(segments) for i in range(num_blocks)]
        self.free = {"wide": ids[::-1], "codes": ids[::-1]}
        if scattered:
            for i, pool in enumerate(self.free.values()):
                random.Random(seed + i).shuffle(pool)

    def own(self, length):
        """The last token's block."""
        return max(length - 1, 0) // self.size

    def forward(self, q_lens, *, attend=True, holds_new=True, keep_last=None):
        """Runs a forward; returns its attention, `[total_q, heads, v_dim]`, or None."""
        pairs, first = [], []
        for row, q_len in zip(self.rows, q_lens):
            old, new = row.length, row.length + q_len
            f, row.length = old // self.size, new
            oldest = max((new if keep_last else old) - self.window + 1, 0) // self.size if self.window else 0
            if q_len and f >= 3 and f - 2 not in row.codes and f - 2 >= oldest:
                row.codes[f - 2] = self.free["codes"].pop()
                pairs.append((row.wide[f - 2], row.codes[f - 2]))
            first.append((f, oldest))
        if pairs:
            self.ops.quantize_blocks([self.kv], pairs)
        for row, q_len, (f, oldest) in zip(self.rows, q_lens, first):
            if q_len == 0:
                continue
            own = self.own(row.length)
            start = max(f - 1 if holds_new else own - 1, oldest)
            self.give_up(row.wide, "wide", [b for b in row.wide if b < oldest or 0 < b < start])
            self.give_up(row.codes, "codes", [b for b in row.codes if b < oldest])
            for block in [0] * (oldest == 0) + list(range(max(start, 0), own + 1)):
                if block not in row.wide:
                    row.wide[block] = self.free["wide"].pop()
            for block in range(max(f - 1, oldest, 1), own - 1):
                row.codes[block] = self.free["codes"].pop()
        metadata = self.metadata(q_lens, holds_new)
        new = [slice(row.length - n, row.length) for row, n in zip(self.rows, q_lens)]
        keys, values, q = (
            torch.cat([getattr(row, name)[part] for row, part in zip(self.rows, new)])
            for name in ("keys", "values", "q")
        )
        self.ops.store_kv(keys, values, self.kv, metadata, keep_last)
        return self.attention.paged_attention(q, self.kv, metadata, **self.arguments) if attend else None

    def metadata(self, q_lens, holds_new=True):
        lens = [row.length for row in self.rows]
        tables = torch.full((2, len(lens), max(lens) // self.size + 2), GARBAGE_BLOCK, dtype=torch.int32)
        for i, row in enumerate(self.rows):
            for table, blocks in zip(tables, (row.wide, row.codes)):
                for block, place in blocks.items():
                    table[i, block] = place
        tails = [tail_of(row.wide) for row in self.rows]
        coded = [min(row.codes, default=1) for row in self.rows]
        return AttentionMetadata(
            block_tables=tables[0].to(self.device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=self.device),
            cu_seqlens_q=torch.tensor([0, *q_lens], device=self.device).cumsum(0).to(torch.int32),
            max_seqlen_q=max(q_lens),
            max_seqlen_k=max(lens),
            sliding_window=self.window,
            seq_lens_cpu=lens,
            q_lens_cpu=list(q_lens),
            block_ids_cpu=[[row.wide[b] for b in tail] for row, tail in zip(self.rows, tails)],
            first_blocks_cpu=[tail[0] if tail else 0 for tail in tails],
            code_tables=tables[1].to(self.device),
            coded_rows=CodedRows(
                [row.wide.get(0) if tail and tail[0] > 0 else None for row, tail in zip(self.rows, tails)],
                [[row.codes[b] for b in sorted(row.codes)] for row in self.rows],
                coded,
            ),
            holds_new=holds_new,
        )

    def crop(self, length):
        """Takes every row back to `length` tokens."""
        pairs = []
        own = self.own(length)
        for row in self.rows:
            row.length = length
            for block in {0, max(own - 1, 0), own} - set(row.wide):
                row.wide[block] = self.free["wide"].pop()
                pairs.append((row.codes[block], row.wide[block]))
                tokens = slice(block * self.size, (block + 1) * self.size)
                row.keys[tokens], row.values[tokens] = (
                    fake[tokens].to(row.keys.dtype) for fake in self.fake_quantized(row)
                )
        if pairs:
            self.ops.dequantize_blocks([self.kv], pairs)
        for row in self.rows:
            self.give_up(row.codes, "codes", [b for b in row.codes if b >= own - 1])
            self.give_up(row.wide, "wide", [b for b in row.wide if b > own])

    def give_up(self, blocks, pool, numbers):
        for number in numbers:
            place = blocks.pop(number)
            self.free[pool].insert(0, place)
            layer = getattr(self.kv, pool)
            for segments in (layer.k_segments, layer.v_segments):
                at(segments, place).fill_(math.nan if pool == "wide" else 0xFF)

    def code_bytes(self, row):
        """The bytes of a row's codes, by the blocks' numbers."""
        sides = (self.kv.codes.k_segments, self.kv.codes.v_segments)
        return {number: [at(side, place).clone() for side in sides] for number, place in self.rows[row].codes.items()}

    def fake_quantized(self, row):
        """A row's keys and values, of which every full block has been codes, float64."""
        fmt, fakes = self.kv.format, []
        for x, quantize, dequantize in (
            (row.keys, kv_codes.quantize_keys, kv_codes.dequantize_keys),
            (row.values, kv_codes.quantize_values, kv_codes.dequantize_values),
        ):
            fake = x.double()
            for start in range(0, len(x) - self.size + 1, self.size):
                tokens = slice(start, start + self.size)
                block = x[tokens].transpose(0, 1)
                fake[tokens] = dequantize(quantize(block, fmt), fmt, *block.shape[1:]).transpose(0, 1)
            fakes.append(fake)
        return fakes

    def expected(self, row, start, stop):
        """Attention of a row's tokens `start` to `stop`, float64 `[tokens, heads, v_dim]`."""
        row = self.rows[row]
        group = row.q.shape[1] // row.keys.shape[1]
        q = row.q[start:stop].double()
        (wide_k, wide_v), (coded_k, coded_v) = (
            [x[:stop].repeat_interleave(group, 1).double() for x in side]
            for side in ((row.keys, row.values), self.fake_quantized(row))
        )
        position = torch.arange(start, stop, device=q.device)[:, None]
        token = torch.arange(stop, device=q.device)
        own, block = position // self.size, token // self.size
        seen = (token <= position) & (token > position - (self.window or stop))
        is_wide = (block == 0) | (block == own - 1) | (block == own)
        products = (torch.einsum("phd,thd->hpt", q, keys) for keys in (wide_k, coded_k))
        scores = torch.where(is_wide, *products) * self.arguments["softmax_scale"]
        cap, sinks = self.arguments["logit_softcap"], self.arguments["sinks"]
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.exp() * seen
        total = weights.sum(-1) + (0 if sinks is None else sinks.double().exp()[:, None])
        parts = ((weights * is_wide, wide_v), (weights * ~is_wide, coded_v))
        return sum(torch.einsum("hpt,thd->phd", part, values) for part, values in parts) / total.T[..., None]


def tail_of(wide):
    """The wide blocks that follow one another, up to the last."""
    numbers = sorted(wide)
    return [b for i, b in enumerate(numbers) if numbers[-1] - b == len(numbers) - 1 - i]


def at(segments, place):
    return segments[place >> SEGMENT_BITS][place & SEGMENT_MASK]
