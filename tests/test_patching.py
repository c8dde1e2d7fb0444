"""P02: `patch` changes one instance and nothing else; `unpatch` gives back exactly what was there."""

import copy
import io
import json
import pickle
import subprocess
import sys

import pytest
import torch
from helpers import accelerated, generate, new_text, prompt, ragged, stepped_aside, twins, used_blocks
from tiny_models import build
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_turbo
from hf_turbo.patching import handle_of

BATCH = ragged(3, 19)
HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
]


def class_attributes(model) -> dict:
    return {(cls, name): value for cls in type(model).__mro__ for name, value in vars(cls).items()}


def snapshot(model) -> dict:
    """Whatever a patch could leave behind, by value and by identity."""
    modules = list(model.named_modules())
    return {
        "class": type(model),
        "class attributes": class_attributes(model),
        "config": model.config.to_dict(),
        "config object": id(model.config),
        "attention": model.config._attn_implementation,
        "generation config": model.generation_config and model.generation_config.to_dict(),
        "generation config object": id(model.generation_config),
        "attributes": {(path, name): id(value) for path, m in modules for name, value in vars(m).items()},
        "forwards": {path: (m.forward.__func__, id(m.forward.__self__)) for path, m in modules},
        "hooks": {(path, hooks): dict(vars(m)[hooks]) for path, m in modules for hooks in HOOKS if hooks in vars(m)},
        "state": {key: value.data_ptr() for key, value in model.state_dict().items()},
        "repr": repr(model),
    }


def registries() -> dict:
    """Transformers' attention and mask functions, without our own name."""
    found = {}
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        found |= {(id(registry), name): registry[name] for name in registry if name != "hf_turbo"}
    return found


def outputs(model) -> list[torch.Tensor]:
    output = generate(model, BATCH, 8, output_logits=True)
    return [output.sequences, *output.logits]


def assert_bit_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "t5", "mpt"])
def test_p02_unpatch_gives_everything_back(name):
    model = build(name)
    if name == "t5":
        model.generation_config.decoder_start_token_id = 0
    before_output = outputs(model)
    before, known = snapshot(model), registries()
    assert hf_turbo.patch(model, block_size=8) is model
    outputs(model)
    hf_turbo.patch(model, block_size=32)
    outputs(model)
    assert hf_turbo.unpatch(model) is model
    after = snapshot(model)
    for what, value in before.items():
        assert after[what] == value, what
    assert_bit_equal(outputs(model), before_output)
    assert registries() == known


def test_p02_snapshot_sees_a_patch():
    """The check above can fail."""
    model = build("llama")
    before = snapshot(model)
    after = snapshot(hf_turbo.patch(model))
    for what in ("class", "config object", "attention", "attributes"):
        assert before[what] != after[what]
    assert before["forwards"].pop("") != after["forwards"].pop(""), "the model's own: the class has another"
    for what in ("generation config", "forwards", "hooks", "state", "repr"):
        assert before[what] == after[what], f"a patch has no need to touch the {what}"


def test_p02_other_models_are_untouched():
    """One of the same class, and one that shares the config object."""
    model, sibling = build("llama"), build("llama")
    sharing = type(model)(model.config).eval()
    befores = [(m, snapshot(m), outputs(m)) for m in (sibling, sharing)]
    hf_turbo.patch(model)
    generate(model, BATCH)
    for other, before, expected in befores:
        assert snapshot(other) == before
        assert_bit_equal(outputs(other), expected)
        assert not hf_turbo.is_patched(other)
    hf_turbo.patch(sharing, block_size=8)
    assert hf_turbo.report(model).block_size == 16 and hf_turbo.report(sharing).block_size == 8
    hf_turbo.unpatch(model)
    with accelerated(sharing):
        generate(sharing, BATCH)
    hf_turbo.unpatch(sharing)
    assert sharing.config is model.config
    assert snapshot(sharing) == befores[1][1]


def test_p02_patching_again_replaces_the_options():
    stock, model = twins("llama", 8)
    first = handle_of(model)
    with accelerated(model):
        generate(model, BATCH)
    hf_turbo.patch(model, hf_turbo.TurboConfig(block_size=32))
    assert handle_of(model) is not first and hf_turbo.report(model).block_size == 32
    with accelerated(model):
        assert torch.equal(new_text(model, BATCH), new_text(stock, BATCH))
    hf_turbo.unpatch(model)
    assert type(model) is type(stock) and not hf_turbo.is_patched(model)
    hf_turbo.unpatch(model)  # nothing to do


def test_p02_user_arguments_are_not_changed():
    """One dict of arguments for models of 2 and of 5 layers."""
    _, small = twins("llama")
    stock, large = twins("llama", num_hidden_layers=5)
    arguments = dict(max_new_tokens=6, do_sample=False, num_beams=2, cache_implementation=None, use_cache=True)
    before = copy.deepcopy(arguments)
    small.generate(**BATCH, **arguments)
    assert torch.equal(large.generate(**BATCH, **arguments), stock.generate(**BATCH, **arguments))
    assert arguments == before
    assert large.generation_config.to_dict() == stock.generation_config.to_dict()


def test_patched_is_a_with_block():
    model = build("llama")
    before = snapshot(model)
    with hf_turbo.patched(model, block_size=8) as same:
        assert same is model and hf_turbo.is_patched(model)
        with accelerated(model):
            generate(model, BATCH)
    assert snapshot(model) == before
    with pytest.raises(KeyError), hf_turbo.patched(model):
        raise KeyError
    assert snapshot(model) == before


def test_class_is_the_same_to_users():
    stock, model = twins("llama")
    cls = type(model)
    assert isinstance(model, type(stock)) and cls is not type(stock)
    assert (cls.__name__, cls.__module__, cls.__doc__) == (
        type(stock).__name__, type(stock).__module__, type(stock).__doc__,
    )  # fmt: skip


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), "llama", None])
def test_not_a_model(wrong):
    with pytest.raises(TypeError, match="not a Transformers model"):
        hf_turbo.patch(wrong)


def test_model_without_a_head():
    model = build("llama").model
    model.generation_config = None
    before = snapshot(model)
    with pytest.raises(ValueError, match="can't generate"):
        hf_turbo.patch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("ask", [hf_turbo.report, hf_turbo.paged_cache, hf_turbo.release])
def test_unpatched_models_have_no_report(ask):
    with pytest.raises(ValueError, match="isn't patched"):
        ask(build("llama"))


# copies


def _pickled(model):
    return pickle.loads(pickle.dumps(model))


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, _pickled, _saved], ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_copies_of_a_patched_model(name, again):
    """A copy is patched, too, with blocks of its own; what is done to it leaves the original alone."""
    stock, model = twins(name, 8)
    held = generate(model, BATCH)
    blocks = used_blocks(model)
    other = again(model)
    assert hf_turbo.is_patched(other) and type(other) is type(model)
    assert handle_of(other).pool is not handle_of(model).pool and used_blocks(other) == 0
    assert other.config is not model.config and hf_turbo.report(other).block_size == 8
    with accelerated(other):
        assert torch.equal(new_text(other, BATCH), new_text(stock, BATCH))
    assert used_blocks(model) == blocks
    hf_turbo.unpatch(other)
    assert type(other) is type(stock) and other.config._attn_implementation == "eager"
    assert other.config.to_dict() == stock.config.to_dict()
    assert torch.equal(new_text(other, BATCH), new_text(stock, BATCH))
    del held
    with accelerated(model):
        assert torch.equal(new_text(model, BATCH), new_text(stock, BATCH))


PLAIN_LOAD = """
import json, sys
sys.modules["hf_turbo"] = None
import torch
from transformers import AutoModelForCausalLM
ids = torch.tensor(json.loads(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
texts = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
print("TEXT", texts.tolist())
"""


def test_save_pretrained_while_patched(tmp_path):
    """The files are those of the unpatched model, and load where hf_turbo is not installed."""
    stock, model = twins("llama")
    generate(model, BATCH)
    stock.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "patched")
    names = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert sorted(path.name for path in (tmp_path / "patched").iterdir()) == names
    for name in names:
        assert (tmp_path / "patched" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes(), name
    assert "hf_turbo" not in (tmp_path / "patched" / "config.json").read_text()
    ids = prompt(2, 9)
    command = [sys.executable, "-c", PLAIN_LOAD, str(tmp_path / "patched"), json.dumps(ids.tolist())]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    [line] = [line for line in printed.splitlines() if line.startswith("TEXT ")]
    assert json.loads(line[5:]) == generate(stock, ids, 8).sequences.tolist()


# report


def test_what_was_set_on_the_config_meanwhile_stays():
    model = build("llama")
    original, before = model.config, dict(vars(model.config))
    hf_turbo.patch(model)
    model.config.use_cache, model.config.note = False, "mine"
    assert vars(original) == before, "another model may share it"
    hf_turbo.unpatch(model)
    assert model.config is original
    assert vars(original) == before | {"use_cache": False, "note": "mine"}


def test_with_block_on_a_patched_model():
    """The patch from before comes back, with its options."""
    model = hf_turbo.patch(build("llama"), block_size=32)
    with hf_turbo.patched(model, block_size=8):
        assert hf_turbo.report(model).block_size == 8
    assert hf_turbo.report(model).block_size == 32


def test_report_counts_tokens():
    """Padding is no token, and of a prompt's four copies one is stored."""
    _, model = twins("llama", 4)
    generate(model, ragged(5, 12), 3, do_sample=True, num_return_sequences=4)
    report = hf_turbo.report(model)
    assert report.tokens_stored == (5 + 12) + 8 * 2  # the last new token is never put in
    assert report.tokens_shared == 3 * (5 + 12)
    assert f"{report.tokens_stored} stored" in str(report)


def test_report_of_an_accelerated_model():
    _, model = twins("gemma2", 4)
    report = hf_turbo.report(model)
    assert set(report.accelerated) == {"sliding window of 8", "full attention"}
    assert set(report.accelerated.values()) == {"1 layer over the paged cache (PyTorch)"}
    assert report.stepped_aside == {} and report.blocks_total == report.pool_bytes == report.caches == 0
    held = generate(model, prompt(1, 20), 8, num_beams=2)
    report = hf_turbo.report(model)
    assert report.caches == 1 and report.block_size == 4
    assert 0 < report.blocks_shared <= report.blocks_in_use <= report.peak_blocks <= report.blocks_total
    block_bytes = 4 * 2 * (8 + 8) * 4  # tokens, heads, K and V of 8, fp32
    assert report.kv_bytes == report.blocks_in_use * block_bytes
    assert report.peak_kv_bytes == report.peak_blocks * block_bytes
    assert report.pool_bytes == report.blocks_total * block_bytes
    del held
    assert hf_turbo.report(model).blocks_in_use == hf_turbo.report(model).kv_bytes == 0
    text = str(report)
    for part in (
        "full attention",
        "sliding window of 8",
        f"{report.blocks_in_use} in use",
        f"{report.kv_bytes:,}",
    ):
        assert part in text


def test_report_counts_what_stepped_aside():
    _, model = twins("llama")
    for _ in range(3):
        generate(model, BATCH, 2, cache_implementation="static")
    [(reason, count)] = stepped_aside(model).items()
    assert "cache_implementation" in reason and count == 3
    assert f"stepped aside (3x): {reason}" in str(hf_turbo.report(model))
