"""C11: the text does not depend on the batch, the cache or the patch; in 16 bit, but for near ties."""

import pytest
import torch
from helpers import accelerated, generate, prompt, twins
from promise import assert_promise, rounding

NEW = 12
PROMPTS = prompt(8, 14)


def text_and_logits(model, ids, **options):
    output = generate(model, ids, NEW, output_logits=True, **options)
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_any_batch_with_and_without_cache(name, dtype):
    stock, model = twins(name)
    stock, model = stock.to(dtype), model.to(dtype)
    alone = [text_and_logits(stock, PROMPTS[i : i + 1]) for i in range(len(PROMPTS))]
    reference, logits = (torch.cat(parts) for parts in zip(*alone, strict=True))
    for size in (1, 2, 4, 8):
        with accelerated(model):
            parts = [text_and_logits(model, rows)[0] for rows in PROMPTS.split(size)]
        assert_promise(torch.cat(parts), reference, logits, dtype, f"batches of {size}")
    uncached, _ = text_and_logits(model, PROMPTS, use_cache=False)
    assert_promise(uncached, reference, logits, dtype, "without a cache")


@pytest.fixture
def example():
    reference = torch.tensor([[5, 6, 7], [8, 9, 10]])
    logits = torch.zeros(2, 3, 16)
    logits.scatter_(2, reference[..., None], 10.0)
    return reference, logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_promise_is_broken_where_the_reference_is_sure(example, dtype):
    reference, logits = example
    assert assert_promise(reference, reference, logits, dtype) == 0
    wrong = reference.clone()
    wrong[1, 1] = 3
    with pytest.raises(AssertionError, match="differ"):
        assert_promise(wrong, reference, logits, dtype)


def test_near_tie_may_flip_in_16_bit_alone(example):
    reference, logits = example
    logits[1, 1, 3] = 10.0 - 0.9 * rounding(logits, torch.bfloat16)
    wrong = reference.clone()
    wrong[1, 1:] = 3  # what comes after the first difference is not compared
    assert assert_promise(wrong, reference, logits, torch.bfloat16) == 1
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(AssertionError, match="differ"):
            assert_promise(wrong, reference, logits, dtype)


def test_first_difference_counts(example):
    reference, logits = example
    wrong = reference.clone()
    logits[1, 2, 3] = 10.0
    wrong[1] = 3
    with pytest.raises(AssertionError, match="step 0"):
        assert_promise(wrong, reference, logits, torch.bfloat16)


def test_third_choice_is_no_near_tie(example):
    """A tie of the first two excuses neither a third."""
    reference, logits = example
    logits[0, 0, 3] = 10.0
    wrong = reference.clone()
    wrong[0, 0] = 4
    with pytest.raises(AssertionError, match="row 0"):
        assert_promise(wrong, reference, logits, torch.bfloat16)
