from __future__ import annotations

import pytest
import torch

from hf_turbo.cache.block_pool import BlockPool
from hf_turbo.ops.copy_blocks import LayerAddresses


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_all_layers_at_once(dtype):
    """In two segments, some of which came later; blocks that are no target stay as they were."""
    pool = BlockPool(16)
    group = pool.group(None)
    group.ensure_free(8)
    key = torch.zeros(1, 3, 1, 40, dtype=dtype, device="cuda")
    stores = [group.store_for(layer, key, key) for layer in range(5)]
    for store in stores:
        group.cover(store)
    group.ensure_free(60)
    layers = [group.cover(store) for store in stores]
    assert len(layers[0].k_segments) == 2 and LayerAddresses.serve(layers)
    for kv in layers:
        for t in (*kv.k_segments, *kv.v_segments):
            t.copy_(torch.randn_like(t))
    before = [[t.clone() for t in (*kv.k_segments, *kv.v_segments)] for kv in layers]
    later = 1 << 23
    pairs = [(0, 3), (1, later + 2), (later + 5, 7), (later + 1, later + 9)]
    group.copy_blocks(stores, pairs)
    for kv, old in zip(layers, before):
        for half in range(2):
            expected = [t.clone() for t in old[2 * half : 2 * half + 2]]
            for source, target in pairs:
                expected[target >> 23][target & (later - 1)] = old[2 * half + (source >> 23)][source & (later - 1)]
            now = (kv.k_segments, kv.v_segments)[half]
            assert all(torch.equal(a, b) for a, b in zip(now, expected))
