"""What an attention op needs to know of the cache: one layer's blocks, and one forward's geometry."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch

from .block_ids import MAX_SEGMENTS, SEGMENT_BITS, SEGMENT_MASK, block_runs
from .kv_format import KVFormat


@dataclass(frozen=True)
class LayerKV:
    """The blocks of one layer, as a few segments that share their strides.

    Args:
        k_segments: per segment `[num_blocks, num_kv_heads, block_size, k_head_dim]`, any strides with the
            last one 1; all segments have the same strides, dtype and device.
        v_segments: the same with `v_head_dim`; their strides may differ from those of `k_segments`.
        segment_offsets: int64 `[2, MAX_SEGMENTS]` on the same device: elements from `k_segments[0]` (row 0)
            and `v_segments[0]` (row 1) to the segment's first element. A kernel adds them to one typed
            base pointer. Multiples of 16.
        segmented: kernels must read the offsets: there are several segments, or there may be later.
    """

    k_segments: tuple[torch.Tensor, ...]
    v_segments: tuple[torch.Tensor, ...]
    segment_offsets: torch.Tensor
    segmented: bool = False

    @classmethod
    def of(
        cls,
        k_segments: Sequence[torch.Tensor],
        v_segments: Sequence[torch.Tensor],
        segment_offsets: torch.Tensor | None = None,
    ) -> LayerKV:
        """Works out the offsets, into `segment_offsets` if that is given."""
        offsets = torch.zeros(2, MAX_SEGMENTS, dtype=torch.int64)
        for row, segments in enumerate((k_segments, v_segments)):
            places = [(t.data_ptr() - segments[0].data_ptr()) // t.element_size() for t in segments]
            offsets[row, : len(places)] = torch.tensor(places, dtype=torch.int64)
        if segment_offsets is None:
            segment_offsets = offsets.to(k_segments[0].device)
        else:
            segment_offsets.copy_(offsets)
        return cls(tuple(k_segments), tuple(v_segments), segment_offsets, len(k_segments) > 1)

    def that_grows(self) -> LayerKV:
        """The same for a captured kernel, which has to find segments that are added later."""
        return replace(self, segmented=True)

    @property
    def block_size(self) -> int:
        return self.k_segments[0].shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.k_segments[0].shape[1]


@dataclass(frozen=True)
class QuantizedKV:
    """The blocks of one layer whose older blocks are codes.

    Args:
        wide: blocks in the model's dtype; their ids are in `AttentionMetadata.block_tables`.
        codes: k_segments uint8 `[num_blocks, num_kv_heads, key_bytes]`, v_segments the same with `value_bytes`, as in
            `kv_format`; contiguous; their ids are in `AttentionMetadata.code_tables`.
    """

    wide: LayerKV
    codes: LayerKV
    format: KVFormat

    def that_grows(self) -> QuantizedKV:
        """The same for captured kernels; see `LayerKV.that_grows`."""
        return replace(self, wide=self.wide.that_grows(), codes=self.codes.that_grows())

    @property
    def block_size(self) -> int:
        return self.wide.block_size

    @property
    def num_kv_heads(self) -> int:
        return self.wide.num_kv_heads

    @property
    def k_dim(self) -> int:
        return self.wide.k_segments[0].shape[3]

    @property
    def v_dim(self) -> int:
        return self.wide.v_segments[0].shape[3]


@dataclass(frozen=True)
class CodedRows:
    """Blocks of each sequence of a quantized cache that `block_ids_cpu` does not hold, on the host.

    Args:
        anchors: the wide block of a sequence's first tokens, where `first_blocks_cpu` skips it and it is still there.
        code_ids: blocks in codes, in order.
        first_codes: how many blocks come before those.
    """

    anchors: list[int | None]
    code_ids: list[list[int]]
    first_codes: list[int]


@dataclass(frozen=True)
class TreeNodes:
    """Drafted tokens that one forward verifies together: each sequence's queries are the nodes of a tree.

    The nodes of a sequence come root first, parents before their children, at most `MAX_NODES`. Node `j` is stored at
    slot `L + j`, where L are the sequence's committed tokens; its position in the text is `L + depth`. It sees the
    committed slots within the window of its position, and of the nodes those of its mask. (The ancestor mask of
    SpecInfer, arXiv:2305.09781.)

    Args:
        masks: int64 `[total_q]`: bit `j` is set where a node sees node `j` of its own sequence: itself and those of
            its ancestors that a sliding window leaves.
        depths: int32 `[total_q]`: steps from the root, whose depth is 0.
    """

    MAX_NODES: ClassVar[int] = 64

    masks: torch.Tensor
    depths: torch.Tensor

    def __post_init__(self) -> None:
        if self.masks.dtype != torch.int64 or self.depths.dtype != torch.int32 or self.masks.shape != self.depths.shape:
            raise ValueError(
                "masks must be int64 and depths int32, one of each a node, got "
                f"{self.masks.dtype} {list(self.masks.shape)} and {self.depths.dtype} {list(self.depths.shape)}"
            )
        if self.masks.dim() != 1 or not (self.masks.is_contiguous() and self.depths.is_contiguous()):
            raise ValueError("masks and depths must be contiguous and have one dimension")

    def on(self, device: torch.device) -> TreeNodes:
        """The same on `device`."""
        return TreeNodes(self.masks.to(device), self.depths.to(device))


@dataclass(frozen=True)
class EvenRows:
    """Blocks of equally long rows in one segment.

    Args:
        first, step: where the first row's blocks begin, and how far it is from a row to the next.
        index: int64, the blocks' indices, row after row, where they don't all lie in a row; None if they do.
    """

    segment: int
    first: int
    step: int
    index: torch.Tensor | None


@dataclass(eq=False)
class AttentionMetadata:
    """The geometry of one forward over one group of layers (those that share block tables).

    Query token `j` of sequence `b` stands at position `seq_lens[b] - q_len[b] + j` and attends to the
    positions `p` of its own sequence with `p <= position`, and `p > position - sliding_window` where that
    is set. Position `p` lies in block `block_tables[b, p // block_size]`, row `p % block_size`. Entries
    of blocks that have left the window, and those past the end, are never read and may hold anything.

    Args:
        block_tables: int32 `[num_seqs, max_blocks]`, block ids (see `SEGMENT_BITS`).
        seq_lens: int32 `[num_seqs]`, tokens of each sequence, this forward's included.
        cu_seqlens_q: int32 `[num_seqs + 1]`, where each sequence's queries start in the packed `[total_q, ...]`.
        max_seqlen_q: the largest number of queries of one sequence in this forward.
        max_seqlen_k: an upper bound of `seq_lens`.
        sliding_window: how many tokens a query sees, itself included; None for all.
        is_fresh: no sequence had anything cached before this forward: the new keys are all the keys.
        seq_lens_cpu, q_lens_cpu: the same on the host, for the CPU path.
        block_ids_cpu: per sequence, the ids of its live blocks, in order.
        first_blocks_cpu: per sequence, how many blocks before those have left the window.
        code_tables: of a quantized cache, int32 `[num_seqs, max_blocks]`: the blocks that are codes. Which those are
            says `kv_format.end_of_codes`; the others are in `block_tables`.
        coded_rows: the same on the host.
        holds_new: of a quantized cache: `block_tables` has all blocks from the one before the first new token's on;
            otherwise only the last two (a prompt that attends to itself without the cache). The first is always there.
        tree: the queries are nodes of token trees, which see what it says and not all that is stored before them. Of a
            quantized cache, blocks of codes are full of committed tokens; all that hold nodes are wide.
        arrivals: int32 zeros, where lengths, or numbers of queries, may differ much: programs then share out the keys
            of all sequences evenly, count with these who has come, and leave zeros. As many as `MAX_ARRIVALS`: where a
            kernel needs more, or the queries are nodes, it does without. Not for forwards that run at the same time.
    """

    MAX_ARRIVALS: ClassVar[int] = 1 << 15

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    sliding_window: int | None = None
    is_fresh: bool = False
    seq_lens_cpu: list[int] = field(default_factory=list)
    q_lens_cpu: list[int] = field(default_factory=list)
    block_ids_cpu: list[list[int]] = field(default_factory=list)
    first_blocks_cpu: list[int] = field(default_factory=list)
    code_tables: torch.Tensor | None = None
    coded_rows: CodedRows | None = None
    holds_new: bool = True
    tree: TreeNodes | None = None
    arrivals: torch.Tensor | None = None
    _elsewhere: dict[torch.device, AttentionMetadata] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.tree is not None and self.max_seqlen_q > TreeNodes.MAX_NODES:
            raise ValueError(f"a tree has at most {TreeNodes.MAX_NODES} nodes a sequence, got {self.max_seqlen_q}")

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @cached_property
    def runs(self) -> list[list[tuple[int, int, int]]]:
        """Per sequence, its live blocks as `(segment, first index, count)` runs that lie in a row."""
        return [block_runs(ids) for ids in self.block_ids_cpu]

    @cached_property
    def even_rows(self) -> EvenRows | None:
        """Where the rows of a step lie, if they have one query each, are equally long and in one segment; else None."""
        if self.tree is not None:
            return None
        rows = zip(self.seq_lens_cpu, self.block_ids_cpu, self.first_blocks_cpu, strict=True)
        shapes = {(seq_len, len(ids), first) for seq_len, ids, first in rows}
        ids = [block for row in self.block_ids_cpu for block in row]
        segments = {block >> SEGMENT_BITS for block in ids}
        if self.q_lens_cpu.count(1) != self.num_seqs or len(shapes) != 1 or len(segments) != 1:
            return None
        starts = [row[0] & SEGMENT_MASK for row in self.block_ids_cpu]
        steps = {later - earlier for earlier, later in itertools.pairwise(starts)}
        in_a_row = all(len(runs) == 1 for runs in self.runs) and len(steps) == 1 and min(steps) > 0
        index = None if in_a_row else torch.tensor(ids) & SEGMENT_MASK
        return EvenRows(segments.pop(), starts[0], steps.pop() if in_a_row else 0, index)

    def on(self, device: torch.device) -> AttentionMetadata:
        """The same with its tensors on `device`."""
        if self.seq_lens.device == device:
            return self
        if device not in self._elsewhere:
            names = ("block_tables", "seq_lens", "cu_seqlens_q", "code_tables", "arrivals")
            tensors = {name: x.to(device) for name in names if (x := getattr(self, name)) is not None}
            tree = None if self.tree is None else self.tree.on(device)
            self._elsewhere[device] = replace(self, _elsewhere={}, tree=tree, **tensors)
        return self._elsewhere[device]


def new_arrivals(device: torch.device) -> torch.Tensor:
    """Counters as `AttentionMetadata` takes them."""
    return torch.zeros(AttentionMetadata.MAX_ARRIVALS, dtype=torch.int32, device=device)
