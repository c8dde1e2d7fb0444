"""What `kv_cache_dtype` may be, for which models, and what calls and copies of a model make of it."""

import copy
import pickle

import pytest
import torch
from helpers import generate, prompt, used_blocks
from tiny_models import build

import hf_turbo
from hf_turbo.ops.kv_format import KV_BLOCK_SIZES, KV_FORMATS
from hf_turbo.patching import handle_of


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(kv_cache_dtype="int2"), "int8, fp8, int4"),
        (dict(kv_cache_dtype=8), "int8, fp8, int4"),
        (dict(kv_cache_dtype="int8", block_size=16), "32, 64, 128"),
    ],
)
def test_options_that_are_not_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        hf_turbo.patch(build("llama"), **options)


def test_all_that_the_formats_have_is_allowed():
    for kind in KV_FORMATS:
        for size in KV_BLOCK_SIZES:
            assert hf_turbo.TurboConfig(kv_cache_dtype=kind, block_size=size).block_size_on("cpu") == size


def test_block_size():
    assert hf_turbo.report(hf_turbo.patch(build("llama"), kv_cache_dtype="fp8")).block_size == 64
    assert hf_turbo.report(hf_turbo.patch(build("llama"))).block_size == 16


@pytest.mark.parametrize(
    "name, overrides", [("bloom", {}), ("falcon_mamba", {}), ("gpt2", {"hidden_size": 36, "n_embd": 36})]
)
def test_models_that_can_not_have_it(name, overrides):
    """The user asked for it by name: an error, and nothing has changed."""
    model = build(name, **overrides)
    kind, attributes = type(model), set(vars(model))
    with pytest.raises(NotImplementedError, match="kv_cache_dtype"):
        hf_turbo.patch(model, kv_cache_dtype="int8")
    assert type(model) is kind and set(vars(model)) == attributes
    if name == "gpt2":
        hf_turbo.patch(model)
        with pytest.raises(NotImplementedError, match="kv_cache_dtype"):
            hf_turbo.patch(model, kv_cache_dtype="int8")
        assert handle_of(model).config.kv_cache_dtype is None
        generate(model, prompt(1, 5), 2)


def test_a_model_that_shows_it_at_its_first_prompt():
    model = hf_turbo.patch(build("deepseek_v3"), kv_cache_dtype="int8")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="kv_cache_dtype"):
            generate(model, prompt(1, 5), 2)
    assert used_blocks(model) == 0


def test_calls_that_step_aside_say_so():
    stock, model = build("llama"), hf_turbo.patch(build("llama"), kv_cache_dtype="int4")
    options = {"cache_implementation": "static"}
    assert torch.equal(generate(model, prompt(1, 20), **options).sequences, generate(stock, prompt(1, 20)).sequences)
    assert any("cache_implementation" in reason for reason in hf_turbo.report(model).stepped_aside)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model(again):
    model = hf_turbo.patch(build("llama"), kv_cache_dtype="int4", block_size=32)
    handle_of(model).pool.formats[0] = "int8"
    other = again(model)
    assert handle_of(other).pool.formats == {0: "int8"} and handle_of(other).pool.kv_cache_dtype == "int4"
    assert torch.equal(generate(other, prompt(1, 110)).sequences, generate(model, prompt(1, 110)).sequences)
