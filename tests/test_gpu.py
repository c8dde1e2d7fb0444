"""The cases that need a CUDA device: 16-bit numbers, memory, and the kernels inside whole models."""

import gc

import pytest
import torch
from helpers import (
    assert_no_worse,
    fill_free_blocks,
    forward,
    generate,
    prompt,
    ragged,
    stepped_aside,
    twins,
)
from promise import assert_promise
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import hf_turbo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MiB = 2**20
#: What attention may take beside the cache: split-KV partial results, packed queries, the logits of a step.
WORKSPACE = 64 * MiB
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def on_gpu(batch):
    return {key: value.cuda() for key, value in batch.items()}


def gpu_twins(name, dtype, block_size=16, **overrides):
    pair = [one.to("cuda", dtype) for one in twins(name, block_size, **overrides)]
    for one in pair:
        if name == "gpt_oss":
            one.set_experts_implementation("eager")  # the grouped matrix product wants bf16 and larger experts
    return pair


def llama(layers=2, heads=32, kv_heads=4, head_dim=128):
    """A model whose cache outweighs all else."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=512, num_hidden_layers=layers, head_dim=head_dim,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=32_768,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


def kv_bytes(model, tokens: int) -> int:
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens * model.dtype.itemsize


class Memory:
    """What a block of code takes at most, beyond what was there before it."""

    def __enter__(self):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_):
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated() - self.before


def largest_allocation(call) -> int:
    """The most bytes that one op of `call` allocates on the device."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as seen:
        call()
        torch.cuda.synchronize()
    largest = max(event.self_device_memory_usage for event in seen.events())
    assert largest > 0, "the profiler saw no allocation"
    return largest


# C02, C07, C08, C11, P05


@HALF
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("prompt_attention", ["auto", "torch", "triton"])
def test_c02_padded_rows(name, dtype, prompt_attention):
    """Rows of 1 and of 64 tokens: nothing of the padding comes through, with the pool full of NaN."""
    stock, model = gpu_twins(name, dtype)
    hf_turbo.patch(model, prompt_attention=prompt_attention)
    batch = on_gpu(ragged(1, 64))
    generate(model, batch, 4)
    fill_free_blocks(model, float("nan"))
    output = generate(model, batch, 8, output_logits=True)
    assert torch.stack(output.logits).isfinite().all()
    ids, mask = batch.values()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = forward(model, ids, hf_turbo.paged_cache(model), attention_mask=mask, position_ids=positions).logits
    same_dtype = forward(stock, ids, attention_mask=mask, position_ids=positions).logits
    exact = forward(stock.float(), ids, attention_mask=mask, position_ids=positions).logits
    real = mask.bool()
    assert logits[real].isfinite().all()
    assert_no_worse(logits[real], same_dtype[real], exact[real])
    assert not stepped_aside(model)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "granite", "gpt2"])
def test_fp32_text(name, block_size):
    """The kernels in fp32: every token of greedy, beams, chunks and sampling."""
    stock, model = gpu_twins(name, torch.float32, block_size)
    batch = on_gpu(ragged(3, 33, 70))
    for options in (
        {},
        dict(num_beams=3),
        dict(prefill_chunk_size=7),
        dict(num_return_sequences=3, do_sample=True),
    ):
        fill_free_blocks(model, float("nan"))
        texts = []
        for one in (stock, model):
            torch.manual_seed(4)
            kept = {k: v for k, v in options.items() if one is model or k != "prefill_chunk_size"}
            texts.append(generate(one, batch, 12, **kept).sequences)
        assert torch.equal(*texts), options
    assert not stepped_aside(model)


@HALF
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_c11_text_in_16_bit(name, dtype):
    """The promise: at the first step that differs, the reference's top-1 to top-2 gap is within rounding."""
    stock, model = gpu_twins(name, dtype)
    batch = on_gpu(ragged(9, 40, 21, 64))
    expected = generate(stock, batch, 24, output_logits=True)
    got = generate(model, batch, 24).sequences[:, 64:]
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 24), value=1)
    options = dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    rounded = forward(stock, expected.sequences, **options).logits[:, 63:-1]
    exact = forward(stock.float(), expected.sequences, **options).logits[:, 63:-1]
    noise = (rounded.float() - exact).abs().amax(-1)
    assert_promise(got, expected.sequences[:, 64:], torch.stack(expected.logits, dim=1), dtype, name, noise)


HEAD_DIMS = [32, 40, 64, 72, 80, 96, 112, 128, 192, 224, 256]
BLOCK_SIZES = [8, 48, 64, 192, 256]
SIZES = [(dim, 16) for dim in HEAD_DIMS] + [(128, size) for size in BLOCK_SIZES]
SIZES += [(dim, BLOCK_SIZES[i % 5]) for i, dim in enumerate(HEAD_DIMS) if dim != 128]


@pytest.mark.parametrize("head_dim, block_size", SIZES)
def test_p06_head_and_block_sizes(head_dim, block_size):
    options = dict(head_dim=head_dim, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    stock, model = gpu_twins("llama", torch.float32, block_size, **options)
    ids = prompt(2, 264).cuda()
    cache = hf_turbo.paged_cache(model)
    logits = [forward(model, part, cache).logits for part in ids.split([63, 2, 126, 1, 1, 62, 1, 8], dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), forward(stock, ids).logits, atol=1e-3, rtol=1e-3)


# R01: memory as the cache grows


@torch.no_grad()
def test_r01_peak_is_the_cache():
    """8k tokens and 512 new ones: the blocks once, while they grow, and a fixed workspace."""
    model = hf_turbo.patch(llama(layers=24, heads=8, kv_heads=8))
    ids = prompt(1, 8192).cuda()
    generate(model, ids[:, :100], 4)  # kernels are compiled, and the libraries have their workspaces
    hf_turbo.release(model)
    with Memory() as activations:
        model(ids, use_cache=False, logits_to_keep=1)
    with Memory() as memory:
        output = generate(model, ids, 512)
    exact = kv_bytes(model, 8192 + 511)
    allowed = 1.1 * exact + 1.1 * activations.peak + WORKSPACE
    assert allowed < 2 * exact, "the bound would let a second copy through"
    assert memory.peak <= allowed, f"{memory.peak / MiB:.0f} MiB, allowed {allowed / MiB:.0f}"
    report = hf_turbo.report(model)
    assert report.kv_bytes <= exact + 16 * report.kv_bytes / (8192 + 511), "more than the end of one block is wasted"
    assert report.pool_bytes <= 1.1 * exact
    del output


@torch.no_grad()
def test_r01_growth_makes_no_second_copy():
    """The pool of a cache that grows step by step peaks at what it holds, not at twice that."""
    model = hf_turbo.patch(llama(layers=8, kv_heads=8))
    generate(model, prompt(1, 100).cuda(), 4)
    hf_turbo.release(model)
    cache = hf_turbo.paged_cache(model)
    with Memory() as memory:
        for _ in range(16):
            forward(model, prompt(1, 1024).cuda(), cache, logits_to_keep=1)
    exact = kv_bytes(model, 16 * 1024)
    assert cache.get_seq_length() == 16 * 1024
    assert memory.peak <= 1.1 * exact + 2 * WORKSPACE, f"{memory.peak / MiB:.0f} MiB, exact {exact / MiB:.0f}"


@torch.no_grad()
def test_r01_alternating_requests_do_not_fragment():
    """50 requests of 200 and of 6,000 tokens: after the first of each, reserved memory stays as it is."""
    model = hf_turbo.patch(llama())
    lengths = [200, 6000] * 25
    for length in lengths[:4]:
        generate(model, prompt(1, length).cuda(), 4)
    reserved, pool = torch.cuda.memory_reserved(), hf_turbo.report(model).pool_bytes
    for length in lengths[4:]:
        generate(model, prompt(1, length).cuda(), 4)
    assert torch.cuda.memory_reserved() <= reserved
    assert hf_turbo.report(model).pool_bytes == pool
    generate(model, prompt(1, 16_000).cuda(), 4)
    report = hf_turbo.report(model)
    assert report.pool_bytes <= 1.2 * kv_bytes(model, 16_004), (
        "a longer request came on top of the blocks of the others"
    )


@torch.no_grad()
def test_release_gives_memory_back():
    model = hf_turbo.patch(llama())
    generate(model, prompt(1, 100).cuda(), 4)
    hf_turbo.release(model)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    generate(model, prompt(1, 6000).cuda(), 4)
    assert torch.cuda.memory_allocated() > before + kv_bytes(model, 5000)
    hf_turbo.release(model)
    assert torch.cuda.memory_allocated() <= before + MiB


# R04: grouped queries read the keys of 4 heads, and nobody makes 32 of them


LONG = 16_000


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 1000])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_r04_decode_expands_nothing(padding, head_dim):
    """A step over 16k tokens: no tensor of query heads x tokens, and no scores of tokens x tokens."""
    model = hf_turbo.patch(llama(head_dim=head_dim))
    rows = 2 if padding else 1
    mask = torch.ones(rows, LONG, dtype=torch.long, device="cuda")
    mask[0, :padding] = 0
    ids, step = prompt(rows, LONG).cuda(), prompt(rows, 1).cuda()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = hf_turbo.paged_cache(model)
    forward(model, ids, cache, attention_mask=mask, position_ids=positions, logits_to_keep=1)

    def decode():
        nonlocal mask
        mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
        return forward(model, step, cache, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1)

    for _ in range(20):  # also past the edge of a block
        decode()
    stored = sum(t.untyped_storage().nbytes() for g in _groups(model) for s in g.stores.values() for t in _tensors(s))
    assert stored <= 1.2 * kv_bytes(model, rows * (LONG + 40) - padding), "more is stored than the key-value heads"
    expanded = 32 * LONG * head_dim * model.dtype.itemsize  # K or V of one layer, repeated for the query heads
    with Memory() as memory:
        largest = largest_allocation(decode)
    assert largest < expanded / 8, f"an op allocated {largest / MiB:.1f} MiB; K of all heads is {expanded / MiB:.0f}"
    assert memory.peak < expanded / 4, f"{memory.peak / MiB:.1f} MiB in a step"
    assert not stepped_aside(model)


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 1000])
def test_r04_prompt_makes_no_square(padding):
    """Prefill of 16k tokens, plain and padded, and of a second chunk over a filled cache."""
    model = hf_turbo.patch(llama(layers=1, head_dim=64))
    rows = 2 if padding else 1
    mask = torch.ones(rows, LONG, dtype=torch.long, device="cuda")
    mask[0, :padding] = 0
    ids = prompt(rows, LONG).cuda()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    queries = rows * LONG * 32 * 64 * 2
    square = LONG * LONG  # a mask of tokens x tokens, a byte each
    assert queries < square / 1.5
    forward(model, ids[:, :64], hf_turbo.paged_cache(model), logits_to_keep=1)
    for cuts in ([LONG], [LONG // 2, LONG - LONG // 2]):
        cache = hf_turbo.paged_cache(model)

        def prefill(cache=cache, cuts=cuts):
            start = 0
            for stop in (sum(cuts[: i + 1]) for i in range(len(cuts))):
                forward(
                    model, ids[:, start:stop], cache, attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop], logits_to_keep=1,
                )  # fmt: skip
                start = stop

        with Memory() as memory:
            largest = largest_allocation(prefill)
        assert largest < square / 1.2, f"an op allocated {largest / MiB:.0f} MiB"
        assert memory.peak < kv_bytes(model, rows * LONG) * 1.1 + 12 * queries + WORKSPACE, (
            f"{memory.peak / MiB:.0f} MiB"
        )
    assert not stepped_aside(model)


def _groups(model):
    return hf_turbo.patching.handle_of(model).pool.groups.values()


def _tensors(store):
    return (*store.kv.k_segments, *store.kv.v_segments)
