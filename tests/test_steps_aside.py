"""What a patched model can't do faster it does the original way, and says why once."""

import logging

import pytest
import torch
from helpers import (
    accelerated,
    forward,
    generate,
    new_text,
    prompt,
    ragged,
    stepped_aside,
    twins,
    used_blocks,
)
from tiny_models import build
from transformers import DynamicCache

import hf_turbo
from hf_turbo.compat import CACHE_NAME

IDS = prompt(2, 13)


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("hf_turbo")]


@pytest.mark.parametrize(
    "name, reason",
    [
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("bloom", "attention interface"),
        ("mpt", "attention interface"),
        ("jamba", ""),
        ("bamba", ""),
        ("lfm2", "linear attention"),
        ("mamba", ""),
    ],
)
def test_whole_models(name, reason, caplog):
    stock, model = build(name), build(name)
    model.load_state_dict(stock.state_dict())
    with caplog.at_level(logging.WARNING):
        hf_turbo.patch(model)
        expected = [generate(stock, IDS).sequences, generate(stock, IDS, num_beams=2).sequences]
        got = [generate(model, IDS).sequences, generate(model, IDS, num_beams=2).sequences]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len(said(caplog)) == 1 and "steps aside" in said(caplog)[0] and reason in said(caplog)[0]
    report = hf_turbo.report(model)
    assert report.accelerated == {} and list(report.stepped_aside) == [said(caplog)[0].split(": ", 1)[1]]
    with pytest.raises(NotImplementedError, match="steps aside"):
        hf_turbo.paged_cache(model)
    hf_turbo.unpatch(model)
    assert type(model) is type(stock)


def user_cache(model):
    return {CACHE_NAME: DynamicCache(config=model.config)}


def filled_cache(model):
    """A cache that the model filled before it was patched, as one would bring it along."""
    cache = DynamicCache(config=model.config)
    forward(build("gemma2"), IDS[:, :5], cache)
    return {CACHE_NAME: cache}


CALLS = {
    "a DynamicCache": (user_cache, "DynamicCache"),
    "a cache made before patching": (filled_cache, "DynamicCache"),
    "a static cache": (lambda model: dict(cache_implementation="static"), "static"),
    "attentions": (lambda model: dict(output_attentions=True), "output_attentions"),
    "right padding": (lambda model: ragged(5, 13, side="right"), "left padding"),
    "holes": (
        lambda model: {"attention_mask": torch.ones(2, 13).index_fill(1, torch.tensor([4]), 0).long()},
        "left",
    ),
    "no cache": (lambda model: dict(use_cache=False), None),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls(call, caplog):
    stock, model = twins("gemma2", 4)
    make, reason = CALLS[call]
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            expected, got = (generate(one, inputs | make(one)) for one in (stock, model))
            assert torch.equal(got.sequences, expected.sequences)
    assert used_blocks(model) == 0 and hf_turbo.report(model).caches == 0
    if reason is None:
        assert said(caplog) == [] and stepped_aside(model) == {}
    else:
        [line] = said(caplog)
        assert line.startswith("hf_turbo steps aside: ") and reason in line
        assert list(stepped_aside(model).values()) == [2]
    with accelerated(model):  # and the next call is as fast as ever
        assert torch.equal(new_text(model, IDS), new_text(stock, IDS))


def assert_same_attentions(got, expected):
    assert len(got) == len(expected) > 0
    for mine, theirs in zip(got, expected, strict=True):
        assert len(mine) == len(theirs) == 2
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_attentions_are_those_of_eager(name):
    stock, model = twins(name)
    expected, got = (generate(one, IDS, 5, output_attentions=True) for one in (stock, model))
    assert_same_attentions(got.attentions, expected.attentions)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_attentions_of_a_forward(name):
    """Without a cache, and with a paged one."""
    stock, model = twins(name)
    expected = forward(stock, IDS, output_attentions=True)
    got = forward(model, IDS, output_attentions=True)
    assert_same_attentions([got.attentions], [expected.attentions])
    cache = hf_turbo.paged_cache(model)
    first = forward(model, IDS[:, :9], cache, output_attentions=True)
    second = forward(model, IDS[:, 9:], cache, output_attentions=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), expected.logits, atol=1e-4, rtol=1e-4)
    assert len(first.attentions) == len(second.attentions) == 2
    torch.testing.assert_close(second.attentions[-1], expected.attentions[-1][:, :, 9:], atol=5e-5, rtol=5e-5)


def four_d_mask(q_len: int, kv_len: int) -> torch.Tensor:
    """Causal, and every third token unseen: no padding can say that."""
    query = torch.arange(kv_len - q_len, kv_len)[:, None]
    key = torch.arange(kv_len)
    seen = (key <= query) & ((key % 3 != 1) | (key == query))
    return torch.zeros(1, 1, q_len, kv_len).masked_fill(~seen, torch.finfo(torch.float32).min).expand(2, -1, -1, -1)


def test_four_d_mask_with_a_paged_cache():
    stock, model = twins("llama", 4)
    caches = DynamicCache(config=stock.config), hf_turbo.paged_cache(model)
    for columns in (slice(0, 9), slice(9, 10), slice(10, 13)):
        mask = four_d_mask(columns.stop - columns.start, columns.stop)
        expected, got = (
            forward(one, IDS[:, columns], cache, attention_mask=mask).logits
            for one, cache in zip((stock, model), caches, strict=True)
        )
        torch.testing.assert_close(got, expected, atol=5e-5, rtol=5e-5)
        unmasked = forward(stock, IDS[:, : columns.stop]).logits[:, columns]
        assert columns.start == 0 or (got - unmasked).abs().max() > 1e-2, "the mask made no difference"


def test_packed_sequences_with_a_paged_cache():
    """Position ids that start again mean two texts in one row: no token sees the other text."""
    stock, model = twins("llama")
    positions = torch.cat([torch.arange(6), torch.arange(7)])[None].expand(2, -1)
    expected = forward(stock, IDS, position_ids=positions).logits
    got = forward(model, IDS, hf_turbo.paged_cache(model), position_ids=positions).logits
    reference = forward(stock, IDS, DynamicCache(config=stock.config), position_ids=positions).logits
    torch.testing.assert_close(got, reference, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(forward(model, IDS, position_ids=positions).logits, expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("batch", [IDS, ragged(4, 13)], ids=["plain", "padded"])
def test_paged_cache_after_unpatch(name, batch):
    """A returned cache outlives the patch: to the unpatched model it is a cache like any other."""
    stock, model = twins(name, 4)
    first = generate(model, batch)
    hf_turbo.unpatch(model)
    ids = torch.cat([first.sequences, prompt(2, 4)], dim=1)
    mask = torch.ones_like(ids) if batch is IDS else torch.nn.functional.pad(batch["attention_mask"], (0, 20), value=1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected = generate(stock, inputs, 10, output_logits=True)
    got = generate(model, {**inputs, CACHE_NAME: first[CACHE_NAME]}, 10, output_logits=True)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.logits, expected.logits, atol=5e-5, rtol=5e-5)


def test_paged_cache_of_another_patch():
    """A cache made before the model was patched anew keeps its own pool and goes on."""
    stock, model = twins("gemma2", 4)
    first = generate(model, IDS)
    hf_turbo.patch(model, block_size=32)
    ids = torch.cat([first.sequences, prompt(2, 4)], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE_NAME: first[CACHE_NAME]}
    assert torch.equal(new_text(model, inputs), new_text(stock, ids))
    assert stepped_aside(model) == {}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_changed_after_patching(implementation, caplog):
    stock, model = twins("llama")
    expected = new_text(stock, IDS)
    with caplog.at_level(logging.WARNING, "hf_turbo"):
        model.set_attn_implementation(implementation)
        for _ in range(2):
            assert torch.equal(new_text(model, IDS), expected)
    assert len(said(caplog)) == 1 and "attention implementation" in said(caplog)[0]
    assert used_blocks(model) == 0
    hf_turbo.patch(model)  # takes it over again
    with accelerated(model):
        assert torch.equal(new_text(model, IDS), expected)
    hf_turbo.unpatch(model)
    assert torch.equal(new_text(model, IDS), expected)


def test_loop_by_hand_steps_not_aside():
    """`paged_cache(model)` in a greedy loop of one's own gives the text of generate()."""
    stock, model = twins("gemma2", 4)
    cache, ids = hf_turbo.paged_cache(model), IDS
    step = ids
    for _ in range(16):
        step = forward(model, step, cache).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, step], dim=1)
    assert torch.equal(ids, generate(stock, IDS).sequences)
    assert used_blocks(model) == cache.num_blocks > 0 and stepped_aside(model) == {}


def test_mask_that_makes_padding_real_again():
    """A row's padding was never stored, so a later mask that counts it is an error, not another text."""
    _, model = twins("llama")
    batch = ragged(4, 13)
    cache = hf_turbo.paged_cache(model)
    forward(model, batch["input_ids"], cache, attention_mask=batch["attention_mask"])
    with pytest.raises(ValueError, match="padding"):
        forward(model, prompt(2, 1), cache, attention_mask=torch.ones(2, 14, dtype=torch.long))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_holes_over_a_paged_cache(name):
    """A mask with zeros among real tokens, step by step: the stored keys under the model's own mask."""
    stock, model = twins(name, 4)
    caches = DynamicCache(config=stock.config), hf_turbo.paged_cache(model)
    mask = torch.ones_like(IDS)
    mask[0, 3:5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for columns in (slice(0, 9), slice(9, 10), slice(10, 13)):
        expected, got = (
            forward(
                one,
                IDS[:, columns],
                cache,
                attention_mask=mask[:, : columns.stop],
                position_ids=positions[:, columns],
            ).logits
            for one, cache in zip((stock, model), caches, strict=True)
        )
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
