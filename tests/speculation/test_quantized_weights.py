"""Drafts with INT4 weights, other dtypes and their combinations: M05 of the cases."""

from __future__ import annotations

import copy

import pytest
import torch
from drafting import RAGGED, Knowing, heads_of, tree_of
from helpers import generate, ragged, stepped_aside, used_blocks
from quantized_models import write
from tiny_models import build
from transformers import AutoModelForCausalLM

import hf_turbo
from hf_turbo.generation.draft_model import DraftModel
from hf_turbo.generation.medusa import Medusa
from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.generation.prompt_lookup import PromptLookup
from hf_turbo.patching import handle_of
from hf_turbo.quantization.int4_linear import Int4Linear
from hf_turbo.quantization.registry import int4_registered

#: Eight query heads share two of keys and values.
GROUPED = dict(num_attention_heads=8, num_key_value_heads=2, hidden_size=64, intermediate_size=96)


def assert_plain(model, batch, want, tmp_path, **options):
    """Every way of drafting gives the text that the model gives without."""
    new_tokens = want.shape[1] - batch["input_ids"].shape[1]
    speculations = [
        PromptLookup(5, min_match=1, adaptive=False),
        *(Knowing(want, tree_of(tree)) for tree in ("full 2x2x2", "64 nodes")),
        Medusa(heads_of(model, tmp_path), adaptive=False),
        DraftModel(copy.deepcopy(hf_turbo.unpatch(model)), 5, adaptive=False),
    ]
    for speculation in speculations:
        hf_turbo.patch(model, speculation=speculation, **options)
        got = generate(model, batch, new_tokens, return_dict_in_generate=False)
        assert torch.equal(got, want), speculation
        assert not stepped_aside(model) and used_blocks(model) == 0
        assert sum(pace.stats().rounds for pace in handle_of(model).drafters.values())


@pytest.mark.parametrize("layout", ["gptq", "awq_gemm"])
def test_m05_int4_checkpoints(layout, tmp_path):
    folder, _ = write(build("llama", **GROUPED), tmp_path / layout, layout)
    with int4_registered():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert any(isinstance(module, Int4Linear) for module in model.modules())
    want = generate(model, RAGGED, 40).sequences
    assert_plain(model, RAGGED, want, tmp_path / "heads", block_size=4)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_m05_int4_weights_over_a_quantized_cache(kind, tmp_path):
    """Against the same model without drafts."""
    model = hf_turbo.quantize(build("llama", **GROUPED), group_size=16)
    batch, options = ragged(66, 97), dict(block_size=32, kv_cache_dtype=kind)
    hf_turbo.patch(model, **options)
    want = generate(model, batch, 40).sequences
    assert not stepped_aside(model)
    assert_plain(model, batch, want, tmp_path, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_m05_heads_are_cast_to_the_model(dtype, tmp_path):
    """Whatever dtype their file has."""
    model = build("llama").to(torch.bfloat16)
    folder = heads_of(model, tmp_path, dtype=dtype)
    heads = MedusaHeads.from_pretrained(folder, model)
    assert {p.dtype for p in heads.parameters()} == {torch.bfloat16}
    hf_turbo.patch(model, block_size=4, speculation=Medusa(folder, adaptive=False))
    got = generate(model, RAGGED, 24).sequences
    assert got.shape[1] == 12 + 24 and not stepped_aside(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_up_to_rounding(dtype, tmp_path):
    """Where texts differ, the plain model's first two candidates are within rounding of each other."""
    stock, model = build("llama").to(dtype), build("llama").to(dtype)
    want = generate(stock, RAGGED, 40, output_logits=True)
    text = want.sequences[:, 12:]
    for speculation in (PromptLookup(5, min_match=1, adaptive=False), Knowing(want.sequences, tree_of("full 2x2x2"))):
        hf_turbo.patch(model, block_size=4, speculation=speculation)
        got = generate(model, RAGGED, 40).sequences[:, 12:]
        for row in range(4):
            differs = (got[row] != text[row]).nonzero()
            if len(differs):
                first = differs[0, 0].item()
                top = want.logits[first][row].float().topk(2).values
                assert (top[0] - top[1]) < 8 * torch.finfo(dtype).eps * top[0].abs()
