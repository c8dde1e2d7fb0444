"""Short prompts on a GPU: captured at the first, replayed for others of about as many tokens."""

import random

import pytest
import torch
from graph_cases import GPU, on_gpu, patched_model, steps, stock_model
from helpers import assert_pool_accounts, fill_free_blocks, generate, new_text, prompt, ragged

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.patching import handle_of

pytestmark = GPU


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "gpt_oss", "mistral"])
def test_prompts_of_all_lengths(name):
    """A few graphs serve them; what a graph's unused rows read and write is nobody's."""
    options = {"max_position_embeddings": 1024}
    stock, model = stock_model(name, **options), patched_model(name, **options)
    shapes = random.Random(0)
    for _ in range(24):
        lengths = [shapes.choice((1, 2, 15, 63, 64, 65, 130, 300)) for _ in range(shapes.randint(1, 4))]
        inputs = on_gpu(ragged(*lengths, max(lengths[0], 2)))
        fill_free_blocks(model, float("nan"))
        assert torch.equal(new_text(model, inputs, 4), new_text(stock, inputs, 4)), lengths
    packed = [key for key in steps(model)._graphs if key[1][-1]]
    assert len(packed) == 1 if name == "gpt_oss" else 2 < len(packed) <= 14  # of experts only what is short
    assert not handle_of(model).stepped_aside
    assert_pool_accounts(model)


def test_a_second_call_launches_one_graph():
    model = patched_model("llama")
    inputs = on_gpu(ragged(20, 31))
    new_text(model, inputs, 2)
    captured, replayed = steps(model).num_captured, steps(model).num_replayed
    assert captured == 2
    new_text(model, on_gpu(ragged(9, 25)), 2)
    assert steps(model).num_captured == captured and steps(model).num_replayed == replayed + 2


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_second_turns(name):
    stock, model = stock_model(name), patched_model(name)
    for length in (40, 25):
        texts = []
        for one in (stock, model):
            first = on_gpu(prompt(1, length))
            out = generate(one, first, 8)
            ids = torch.cat([out.sequences, on_gpu(prompt(1, 9, seed=3))], dim=1)
            texts.append(new_text(one, ids, 8, **{CACHE_NAME: out[CACHE_NAME]}))
        assert torch.equal(*texts)
    assert not handle_of(model).stepped_aside


def test_released_and_moved():
    """A graph whose blocks are gone serves nobody: blocks of another address are found."""
    stock, model = stock_model("llama"), patched_model("llama")
    inputs = on_gpu(ragged(20, 31))
    expected = new_text(stock, inputs, 8)
    for _ in range(3):
        for _ in range(2):
            assert torch.equal(new_text(model, inputs, 8), expected)
        hf_turbo.release(model)
    model.to(torch.float64).to(torch.float32)
    for _ in range(2):
        assert torch.equal(new_text(model, inputs, 8), expected)


def test_no_prompt_waits_for_the_device_but_to_read_its_mask():
    """Without a mask, nothing waits."""
    model = patched_model("llama")
    ids = on_gpu(prompt(2, 20))
    positions = torch.arange(20, device="cuda").repeat(2, 1)

    def first():
        cache = hf_turbo.paged_cache(model)
        return model(input_ids=ids, position_ids=positions, logits_to_keep=1, use_cache=True, **{CACHE_NAME: cache})

    with torch.no_grad():
        expected = first().logits
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits = first().logits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(logits, expected) and steps(model).num_replayed == 1
