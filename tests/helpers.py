"""What the tests beside the matrix share: pairs of models, greedy text, the state of a pool."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from tiny_models import PAD, build
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_turbo
from hf_turbo.cache.block_table import BlockTable
from hf_turbo.cache.coded_group import CodeStore
from hf_turbo.compat import CACHE_NAME
from hf_turbo.patching import handle_of


def needs_gpu(test):
    """Marks a test, or a class of them, as one for a CUDA device."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


def twins(name: str, block_size: int = 16, **overrides):
    """The same tiny model twice: as it is, and patched."""
    stock, model = build(name, **overrides), build(name, **overrides)
    model.load_state_dict(stock.state_dict())
    return stock, hf_turbo.patch(model, block_size=block_size)


def prompt(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids `[rows, length]`, none of them padding."""
    values = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 128, (rows, length), generator=values)


def ragged(*lengths: int, side: str = "left", seed: int = 0) -> dict[str, torch.Tensor]:
    """A padded batch of prompts of these lengths, and its mask."""
    ids = prompt(len(lengths), max(lengths), seed)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    return {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}


def rows_alone(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The prompts of a padded batch, each `[1, length]`."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask.bool()][None] for ids, mask in pairs]


def generate(model, inputs, new_tokens: int = 16, **options):
    """What `generate()` returns, as a dict; greedy if nothing else is asked for."""
    if isinstance(inputs, torch.Tensor):
        inputs = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
    options = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True, **options}
    return model.generate(**inputs, **options)


def new_text(model, inputs, new_tokens: int = 16, **options) -> torch.Tensor:
    """The new tokens, `[rows, new]`."""
    ids = inputs if isinstance(inputs, torch.Tensor) else inputs["input_ids"]
    return generate(model, inputs, new_tokens, **options).sequences[:, ids.shape[1] :]


def forward(model, ids, cache=None, **options):
    """`model(ids)`, with the cache under the name that this Transformers gives it."""
    if cache is not None:
        options[CACHE_NAME] = cache
    with torch.no_grad():
        return model(input_ids=ids, **options)


def groups(model):
    """The groups of layers of a patched model's pool, by sliding window."""
    return handle_of(model).pool.groups


def used_blocks(model) -> int:
    """Blocks of a patched model that something holds."""
    return hf_turbo.report(model).blocks_in_use


def fill_free_blocks(model, value: float) -> None:
    """Writes `value` into every block that nobody owns."""
    for group in groups(model).values():
        group.fill(value)


def poison_what_is_freed(monkeypatch) -> None:
    """From now on every block that becomes free is filled with NaN, codes with 0xFF."""

    def poison(method):
        def poisoning(self, *args, **kwargs):
            result = method(self, *args, **kwargs)
            is_of_codes = any(isinstance(store, CodeStore) for store in self.group.stores.values())
            self.group.fill(255 if is_of_codes else float("nan"))
            return result

        return poisoning

    for name in ("grow", "truncate", "select", "release"):
        monkeypatch.setattr(BlockTable, name, poison(getattr(BlockTable, name)))


def stepped_aside(model) -> dict[str, int]:
    return hf_turbo.report(model).stepped_aside


@contextmanager
def accelerated(model):
    """Fails when the model steps aside within the block: a comparison of stock with stock shows nothing."""
    before = stepped_aside(model)
    caches = hf_turbo.report(model).caches
    yield
    assert stepped_aside(model) == before
    assert hf_turbo.report(model).caches > caches


def assert_pool_accounts(model) -> None:
    """`free + used + cached == total`, and as many owners as the blocks say."""
    for group in groups(model).values():
        manager = group.manager
        assert (
            manager.num_free + manager.num_used + manager.num_cached == manager.num_blocks == sum(manager.segment_sizes)
        )
        assert manager.num_free == sum(flags.count(1) for flags in manager.free_flags())


class Probe(StoppingCriteria):
    """Calls a function at every step of `generate()`; stops nothing. The results are in `seen`."""

    def __init__(self, look):
        self.look = look
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(self.look())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def probed(model, inputs, look, new_tokens: int = 16, **options):
    """What `generate()` returns, and what `look()` saw at its steps."""
    probe = Probe(look)
    output = generate(model, inputs, new_tokens, stopping_criteria=StoppingCriteriaList([probe]), **options)
    return output, probe.seen


def assert_no_worse(got: torch.Tensor, stock: torch.Tensor, exact: torch.Tensor, factor: float = 2.0) -> None:
    """The error, against fp32, is at most `factor` times that of the stock model in the same dtype."""
    error, allowed = ((x.float() - exact.float()).square().mean().sqrt().item() for x in (got, stock))
    floor = 1e-5 * exact.float().abs().max().item()
    assert error <= factor * allowed + floor, f"rms error {error:.2e}, stock {allowed:.2e}"
