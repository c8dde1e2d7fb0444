"""What stands in a cache's place while a decode step is captured: no tokens of its own, only where things will be.

A captured step serves every cache of the model, so nothing of one may be read while it is made. Block tables and
lengths are tensors of fixed size and address; each step copies its cache's own into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..ops import dispatch
from ..ops.metadata import AttentionMetadata, LayerKV, QuantizedKV, TreeNodes
from .block_group import BlockGroup, LayerStore
from .forward_plan import ForwardPlan, tree_nodes
from .paged_cache import LAYER_ATTRIBUTE, MaskLength
from .token_tree import TokenTree


class StepUnsuited(Exception):
    """A model does something in a decode step that can't be captured. The message says what."""


class StepGroup:
    """The layers of one sliding window: their block tables, and the plan that every step follows.

    Args:
        blocks: the pool's group.
        num_columns: blocks that a row can have.
        seq_lens: int32 `[num_seqs]`, shared by all groups; unused sequences have a length of 0.
        cu_seqlens_q: int32 `[num_seqs + 1]`, the same.
        num_rows: of the batch, each with one query.
        max_seqlen_q: queries of a sequence at most.
        tree: the shape of the drafts that the step verifies; another with as many nodes may be loaded later. None:
            each row has one token.
        arrivals: as of `AttentionMetadata`; a captured step's groups follow each other and share them.
        reads_codes: of a quantized cache: older blocks are codes. Otherwise all that the step sees is wide.
        num_coded: of such a cache, blocks at most that become codes by the step's tokens.
    """

    def __init__(
        self,
        blocks: BlockGroup,
        num_columns: int,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        num_rows: int,
        max_seqlen_q: int,
        tree: TokenTree | None = None,
        arrivals: torch.Tensor | None = None,
        reads_codes: bool = True,
        num_coded: int = 0,
    ) -> None:
        num_seqs = len(seq_lens)
        self.blocks = blocks
        self.sliding_window = blocks.sliding_window
        self.block_tables = torch.zeros(num_seqs, num_columns, dtype=torch.int32, device=seq_lens.device)
        self._tree = tree
        self._nodes: TreeNodes | None = None
        if tree is not None and not tree.is_chain:
            self._nodes = tree_nodes(tree, self.sliding_window, num_seqs, seq_lens.device)
        #: Of a quantized cache.
        self.code_tables: torch.Tensor | None = None
        if blocks.codes is not None and reads_codes:
            self.code_tables = torch.zeros_like(self.block_tables)
        #: Wide blocks and what they become; -1 where there is none.
        self.coded: torch.Tensor | None = None
        if num_coded and self.code_tables is not None:
            self.coded = torch.full((num_coded, 2), -1, dtype=torch.int32, device=seq_lens.device)
        metadata = AttentionMetadata(
            self.block_tables,
            seq_lens,
            cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=num_columns * blocks.block_size,
            sliding_window=blocks.sliding_window,
            code_tables=self.code_tables,
            tree=self._nodes,
            arrivals=arrivals,
        )
        self.plan = ForwardPlan(0, num_rows, 1, metadata, metadata, keep_last=None, dense=False)

    def load_tree(self, tree: TokenTree) -> None:
        """Copies a tree's shape to where the step reads it."""
        if self._nodes is not None and tree != self._tree:
            newest = tree_nodes(tree, self.sliding_window, len(self.block_tables), self.block_tables.device)
            self._nodes.masks.copy_(newest.masks)
            self._nodes.depths.copy_(newest.depths)
            self._tree = tree

    def load_coded(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies to where the step reads it which blocks become codes, `(wide id, code id)`."""
        if self.coded is not None:
            filled = [*pairs, *[(-1, -1)] * (len(self.coded) - len(pairs))]
            self.coded.copy_(torch.tensor(filled, dtype=torch.int32), non_blocking=True)

    def load(self, block_tables: torch.Tensor, code_tables: torch.Tensor | None) -> None:
        """Copies a cache's tables, int32 `[rows, columns]`, to where the step reads them."""
        for target, newest in ((self.block_tables, block_tables), (self.code_tables, code_tables)):
            if target is not None and newest is not None:
                columns = min(newest.shape[1], target.shape[1])
                target[: len(newest), :columns].copy_(newest[:, :columns])


class StepLayer(CacheLayerMixin):
    """One layer of a `StepCache`."""

    is_croppable = False

    def __init__(self, group: StepGroup, layer_idx: int) -> None:
        self.group = group
        self.layer_idx = layer_idx
        self.store: LayerStore | None = None
        self._addresses: Any = None
        #: Steps that stored something here, and those that attended to it.
        self.num_updates = self.num_attended = 0

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_sliding(self) -> bool:
        return self.group.sliding_window is not None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Marks new keys and values `[rows, num_kv_heads, 1, head_dim]`; the attention function stores them."""
        self.num_updates += 1
        setattr(key_states, LAYER_ATTRIBUTE, self)
        setattr(value_states, LAYER_ATTRIBUTE, self)
        return key_states, value_states

    def kv(self, key: torch.Tensor, value: torch.Tensor) -> LayerKV | QuantizedKV:
        """The layer's blocks, for keys and values like these; more may come, at other addresses."""
        self.store = self.group.blocks.store_for(self.layer_idx, key, value)
        return self.group.blocks.kv(self.store).that_grows()

    def make_codes(self, kv: QuantizedKV) -> None:
        """Makes codes of the blocks that become such by the step's tokens, which have been stored."""
        coded = self.group.coded
        if coded is None:
            return
        if not dispatch.uses_triton(coded.device):
            dispatch.quantize_blocks([kv], [(wide, code) for wide, code in coded.tolist() if wide >= 0])
            return
        if self._addresses is None:  # when the step is computed, before it is captured
            self._addresses = dispatch.code_addresses([kv])
        self._addresses.quantize(coded)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = MaskLength(query_length)
        length.layer = self
        return length, 0

    def get_max_length(self) -> int:
        return -1 if self.group.sliding_window is None else self.group.sliding_window

    def get_seq_length(self) -> int:
        raise StepUnsuited("the model reads the cache's length on the host")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool's store is found when there is something to store."""

    def _not_in_a_step(self, *args: Any, **kwargs: Any) -> None:
        raise StepUnsuited("the model changes the cache within a step")

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = offload = prefetch = _not_in_a_step


class StepCache(Cache):
    """The cache that a model sees while its decode step is captured.

    Args:
        groups: by sliding window.
        sliding_windows: of each layer.
    """

    def __init__(self, groups: dict[int | None, StepGroup], sliding_windows: Sequence[int | None]) -> None:
        self.groups = groups
        self.layers: list[StepLayer]  # type: ignore[assignment]
        super().__init__(layers=[StepLayer(groups[window], i) for i, window in enumerate(sliding_windows)])

    @property
    def is_compileable(self) -> bool:
        return False

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """For the mask's builder; our mask function asks for nothing but the plan."""
        return 0

    def check_attended(self) -> None:
        """Raises where a layer stored keys that no attention of ours has read since."""
        for layer in self.layers:
            if layer.num_updates != layer.num_attended:
                raise StepUnsuited(f"layer {layer.layer_idx} attends to something else than what it caches")
