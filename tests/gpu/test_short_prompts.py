"""Short prompts on a GPU: captured at the first, replayed for others of about as many tokens."""

import random
from contextlib import contextmanager, nullcontext

import pytest
import torch
from graph_cases import GPU, on_gpu, patched_model, steps, stock_model
from helpers import assert_pool_accounts, fill_free_blocks, generate, new_text, prompt, ragged
from tiny_models import build

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


KV = {"kv_cache_dtype": "int4"}


def quantized_model(kind="int4", **turbo):
    """A model whose layers' formats are settled."""
    model = patched_model("llama", block_size=32, turbo={"kv_cache_dtype": kind, **turbo}, max_position_embeddings=2048)
    handle_of(model).pool.formats |= dict.fromkeys(range(model.config.num_hidden_layers), kind)
    return model


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_prompts_of_a_quantized_cache(kind):
    """The text that they give without captured steps: of one turn, and of two."""
    own, model = quantized_model(kind, cuda_graphs=False), quantized_model(kind)
    for lengths, more in (((20, 97), 3), ((97, 200), 60), ((300,), 200), ((64, 65, 1), 96), ((128,), 32)):
        texts = []
        for one in (own, model):
            fill_free_blocks(one, float("nan"))
            first = on_gpu(ragged(*lengths))
            out = generate(one, first, 40)
            ids = torch.cat([out.sequences, on_gpu(prompt(len(lengths), more, seed=3))], dim=1)
            mask = torch.nn.functional.pad(first["attention_mask"], (0, 40 + more), value=1)
            again = {"input_ids": ids, "attention_mask": mask, CACHE_NAME: out[CACHE_NAME]}
            texts.append(generate(one, again, 40).sequences)
            del out, again
        assert torch.equal(*texts), (lengths, more)
    kinds = {key[1][-2] for key in steps(model)._graphs if key[1][-1]}
    assert kinds == {False, True} and not handle_of(model).stepped_aside  # prompts, and what follows a text
    assert_pool_accounts(model)


def test_a_quantized_cache_after_a_prompt():
    """Its codes are those that the prompt's own way makes, to the last bit where its keys are."""
    own, model = quantized_model(cuda_graphs=False), quantized_model()
    for _ in range(2):
        caches = [generate(one, on_gpu(prompt(2, 300)), 1)[CACHE_NAME] for one in (own, model)]
    for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        for got, expected in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert (got - expected).abs().mean() < 1e-4 * expected.abs().mean()


def test_the_first_prompt_of_int4_tells_the_formats():
    model = patched_model("llama", block_size=32, turbo=KV, max_position_embeddings=2048)
    for length, captured, unsettled in ((40, 1, 2), (100, 1, 0), (100, 2, 0), (100, 2, 0)):
        new_text(model, on_gpu(prompt(1, length)), 1)
        assert (steps(model).num_captured, hf_turbo.report(model).unsettled_layers) == (captured, unsettled)


@pytest.mark.parametrize("follows", [False, True])
def test_no_prompt_of_a_quantized_cache_waits_for_the_device(follows):
    model = quantized_model()
    ids, more = on_gpu(prompt(2, 300)), on_gpu(prompt(2, 80))
    positions = torch.arange(380, device="cuda").repeat(2, 1)

    def forward(cache, ids, start):
        places = positions[:, start : start + ids.shape[1]]
        return model(input_ids=ids, position_ids=places, logits_to_keep=1, use_cache=True, **{CACHE_NAME: cache}).logits

    def run(guarded):
        cache = hf_turbo.paged_cache(model)
        if not follows:
            with guarded():
                return forward(cache, ids, 0)
        forward(cache, ids, 0)
        with guarded():
            return forward(cache, more, 300)

    @contextmanager
    def no_waits():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with torch.no_grad():
        expected = [run(nullcontext) for _ in range(2)][1]
        captured = steps(model).num_captured
        assert torch.equal(run(no_waits), expected) and steps(model).num_captured == captured


def test_prompts_of_experts():
    """Many tokens, too, where the code that Transformers chooses for prompts sorts them by their experts."""
    model = build("qwen3_moe", hidden_size=64, moe_intermediate_size=64).to("cuda", torch.bfloat16)
    hf_turbo.patch(model)
    if "grouped_mm" not in model.get_experts_implementation().values():
        pytest.skip("the experts are computed otherwise")
    captured = []
    for length in (20, 200, 20, 200, 210, 30):
        new_text(model, on_gpu(prompt(1, length)), 12)
        captured.append(steps(model).num_captured)
    assert captured[1] == captured[-1] == 3 and steps(model).num_dropped == 0
    assert not handle_of(model).stepped_aside
    own = hf_turbo.patch(build("qwen3_moe", hidden_size=64, moe_intermediate_size=64).to("cuda", torch.bfloat16))
    inputs = {"input_ids": on_gpu(prompt(1, 200)), "use_cache": True}
    with torch.no_grad():
        logits = [
            one(**inputs, logits_to_keep=keep, **{CACHE_NAME: hf_turbo.paged_cache(one)}).logits[:, -1].float()
            for one, keep in ((own, 2), (model, 1))
        ]
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.05 * logits[0].abs().max().item())
