"""What the tests of captured decode steps share: models on a GPU, what they answer, and what their graphs did."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from helpers import generate, ragged
from tiny_models import build
from transformers import DynamicCache

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.patching import handle_of

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MiB = 2**20

#: Blocks as long as the zoo's windows: the new tokens cross the edges of both.
BLOCK = 8
BATCH = ragged(5, 19, 12, seed=4)  # no near ties in any of the zoo's texts
NEW = 24


def on_gpu(batch):
    """A batch, or ids alone, on the GPU."""
    return batch.cuda() if isinstance(batch, torch.Tensor) else {key: x.cuda() for key, x in batch.items()}


def stock_model(name, dtype=torch.float32, **overrides):
    """A tiny model as it is, the same each time."""
    model = build(name, **overrides).to("cuda", dtype)
    if "grouped_mm" in model.get_experts_implementation().values():
        model.set_experts_implementation("batched_mm")  # the grouped matrix product wants bf16 and larger experts
    return model


def patched_model(name, dtype=torch.float32, block_size=BLOCK, turbo=None, **overrides):
    """The same, patched with the options in `turbo`."""
    return hf_turbo.patch(stock_model(name, dtype, **overrides), block_size=block_size, **(turbo or {}))


def steps(model):
    """The captured steps of a patched model."""
    return handle_of(model).steps


class Outcome(NamedTuple):
    """New tokens, int64 `[rows, NEW]`, and their logits `[rows, NEW, vocab]`."""

    tokens: torch.Tensor
    logits: torch.Tensor


def outcome(model, **options) -> Outcome:
    """What a model makes of `BATCH`."""
    output = generate(model, on_gpu(BATCH), NEW, output_logits=True, **options)
    return Outcome(output.sequences[:, -NEW:], torch.stack(output.logits, dim=1))


def assert_same(got: Outcome, expected: Outcome) -> None:
    """Every token, and logits within the rounding of sums in another order."""
    assert torch.equal(got.tokens, expected.tokens)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-3, atol=1e-3)


def assert_differs(got: Outcome, other: Outcome) -> None:
    """So far apart that one can't be taken for the other in `assert_same`."""
    assert (got.logits - other.logits).abs().max() > 0.1


@contextmanager
def replays(model):
    """Fails when no captured step is replayed in this block."""
    before = steps(model).num_replayed
    yield
    assert steps(model).num_replayed > before, f"no graph ran; stepped aside: {dict(handle_of(model).stepped_aside)}"


def warmed_up(model) -> Outcome:
    """The model's outcome, of steps that were captured and replayed."""
    with replays(model):
        return outcome(model)


@torch.no_grad()
def forced(model, ids, start: int):
    """Logits of a loop of the user's own, `[rows, columns - start + 1, vocab]`.

    The columns of `ids` before `start` come at once, those from it on one by one, without mask or positions.
    """
    cache = hf_turbo.paged_cache(model) if hf_turbo.is_patched(model) else DynamicCache(config=model.config)
    parts = ids.split([start] + [1] * (ids.shape[1] - start), dim=1)
    return torch.stack([model(input_ids=part, **{CACHE_NAME: cache}).logits[:, -1] for part in parts], dim=1)


def settled() -> tuple[int, int]:
    """Bytes allocated and reserved, without what nobody holds any longer.

    (cuBLAS keeps a workspace for every stream that it has ever run on; those of a capture's stream are no leak.)
    """
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def rows_of(count: int):
    """A left-padded batch of so many rows."""
    return on_gpu(ragged(*[3 + (5 * i) % 17 for i in range(count)]))
