"""Steps and prompts of quantized models as a GPU computes them, on a CPU: the same rules, the kernels' references."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, defaultdict

import pytest
import torch
from combinations import few
from helpers import accelerated, generate, ragged, stepped_aside
from loaded import load
from quantized_models import write
from steps import decode_steps, own_logits, step
from tiny_models import build
from torch import nn

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling import prompt_fusion
from hf_turbo.modeling.model_state import why_not_captured
from hf_turbo.modeling.prompt_fusion import PROMPT_RULES, TRANSIENT
from hf_turbo.modeling.step_graph import StepInputs
from hf_turbo.ops import dispatch, int4_linear, reference_int4, reference_layers
from hf_turbo.ops.deferred import DeferredMode
from hf_turbo.ops.packed_weight import PackedWeight, pack_weight
from hf_turbo.patching import handle_of
from hf_turbo.quantization import int4_linear as layers
from hf_turbo.quantization.int4_experts import Int4Experts
from hf_turbo.quantization.int4_linear import Int4Linear

NAMES = ["llama", "qwen2", "gemma2", "gemma3_text", "phi3"]
SIZES = {"hidden_size": 64, "intermediate_size": 96}
#: Linears that read the same input.
TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate and up", "up_proj": "gate and up"}

#: What one launch computes, and how often in a step: models of two layers, Gemma 3 of three.
LAUNCHES = {
    "llama": {"q, k, v": 2, "gate, up": 2, "with residual": 4, "norms": 5},
    "qwen2": {"q, k, v with bias": 2, "gate, up": 2, "with residual": 4, "norms": 5},
    "gemma2": {"q, k, v": 2, "gate, up": 2, "alone": 4, "norms": 9},
    "gemma3_text": {"q, k, v": 3, "gate, up": 3, "alone": 6, "norms": 13},
    "phi3": {"alone": 4, "with residual": 4, "norms": 5},
}


@pytest.fixture
def calls(monkeypatch):
    """Weights lie as on a GPU, the kernels' table answers as there, and what is launched is counted."""
    counted = Counter()

    def serves(rows, weights, dtype, device, *, activation):
        if isinstance(weights[0], PackedWeight):
            return int4_linear.supports(rows, weights, dtype, activation=activation)
        return rows <= 64

    def linear(x, weights, biases, *, residual=None, activation=None, places=None):
        kind = {1: "alone", 2: "two weights", 3: "q, k, v"}[len(weights)]
        kind = "gate, up" if activation else "with residual" if residual is not None else kind
        kind += " with bias" if any(bias is not None for bias in biases) else ""
        counted[kind + (" to places" if places is not None else "")] += 1
        return reference_int4.int4_linear(x, weights, biases, residual=residual, activation=activation, places=places)

    def rms_norm(*args, perm=None, **options):
        counted["norms" if perm is None else "norms in order"] += 1
        return reference_layers.rms_norm(*args, perm=perm, **options)

    def permute_columns(x, perm):
        counted["gathered"] += 1
        return reference_int4.permute_columns(x, perm)

    monkeypatch.setattr(layers, "pack_for_device", pack_weight)
    monkeypatch.setattr(dispatch, "serves_linear", serves)
    monkeypatch.setattr(dispatch, "int4_linear", linear)
    monkeypatch.setattr(dispatch, "rms_norm", rms_norm)
    monkeypatch.setattr(dispatch, "permute_columns", permute_columns)
    return counted


def quantized(name, symmetric=True, order=None):
    """A tiny quantized model; `order`: linears that read the same input have one act-order, or each its "own"."""
    model = hf_turbo.quantize(build(name, **SIZES), group_size=32, symmetric=symmetric)
    if order:
        perms = defaultdict(dict)
        for path, layer in list(model.named_modules()):
            if isinstance(layer, Int4Linear):
                parent, _, leaf = path.rpartition(".")
                group = TOGETHER.get(leaf, leaf) if order == "shared" else leaf
                perm = perms[parent].setdefault(group, torch.randperm(layer.in_features, dtype=torch.int32))
                weight = dataclasses.replace(layer.to_grouped(), perm=perm)
                setattr(model.get_submodule(parent), leaf, Int4Linear(weight, layer.bias, layer.spec))
    return model


def dense(model):
    """The same model with float weights."""
    twin = copy.deepcopy(model)
    for path, layer in list(twin.named_modules()):
        if isinstance(layer, Int4Linear):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            linear.weight.data, linear.bias = layer.dequantize(torch.float32), layer.bias
            parent, _, leaf = path.rpartition(".")
            setattr(twin.get_submodule(parent), leaf, linear)
    return twin


def close(logits, expected):
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def check_steps(model, calls):
    """Steps against those of the float twin, and of the model itself; leaves in `calls` what the last one launched."""
    prompt, steps = decode_steps(3)
    twin = dense(model)
    expected = own_logits(twin, twin(**prompt, use_cache=True)[CACHE_NAME], steps)
    for logits, wanted in zip(own_logits(model, model(**prompt, use_cache=True)[CACHE_NAME], steps), expected):
        close(logits, wanted)
    hf_turbo.patch(model, block_size=4)
    cache = hf_turbo.paged_cache(model)
    model(**prompt, **{CACHE_NAME: cache})
    for inputs, wanted in zip(steps, expected):
        calls.clear()
        close(step(model, cache, use_cache=True, **inputs), wanted)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_steps(name, symmetric, calls):
    check_steps(quantized(name, symmetric), calls)
    assert calls == Counter(LAUNCHES[name])


#: The same with act-order: what else is launched, and what is in another order.
IN_ORDER = {
    "shared": {
        "llama": {"q, k, v": 2, "gate, up to places": 2, "with residual": 4},
        "qwen2": {"q, k, v with bias": 2, "gate, up to places": 2, "with residual": 4},
        "gemma2": {"q, k, v": 2, "gate, up to places": 2, "alone": 4},
        "gemma3_text": {"q, k, v": 3, "gate, up to places": 3, "alone": 6},
        "phi3": {"alone": 4, "with residual": 4},
    },
    "own": {
        "llama": {"alone": 10, "with residual": 4},
        "phi3": {"alone": 4, "with residual": 4},
    },
}
#: Norms in the order of the product after them, in other orders, and what had to be gathered.
ORDERED = {
    ("shared", "llama"): (4, 1, 2),
    ("shared", "qwen2"): (4, 1, 2),
    ("shared", "gemma2"): (4, 5, 2),
    ("shared", "gemma3_text"): (6, 7, 3),
    ("shared", "phi3"): (4, 1, 4),
    ("own", "llama"): (10, 1, 4),
    ("own", "phi3"): (4, 1, 4),
}


@pytest.mark.parametrize("order, name", ORDERED)
@torch.no_grad()
def test_steps_with_act_order(order, name, calls):
    check_steps(quantized(name, symmetric=False, order=order), calls)
    norms = zip(("norms in order", "norms", "gathered"), ORDERED[order, name])
    assert calls == Counter({**IN_ORDER[order][name], **dict(norms)})


@pytest.mark.parametrize("name, many, order", few(NAMES, [2, 1000], [None, "shared", "own"], together=2))
@torch.no_grad()
def test_prompts(name, many, order, calls, monkeypatch):
    """Their logits, and those of a step after them; whether or not rows are so many that MLPs go by pieces."""
    monkeypatch.setattr(prompt_fusion, "_MANY", many)
    monkeypatch.setattr(prompt_fusion, "_PIECE", 8)
    model = quantized(name, symmetric=order is None, order=order)
    prompt, steps = decode_steps(1)
    twin = dense(model)
    expected = twin(**prompt, use_cache=True)
    [expected_step] = own_logits(twin, expected[CACHE_NAME], steps)
    hf_turbo.patch(model, block_size=4)
    cache, real = hf_turbo.paged_cache(model), prompt["attention_mask"].bool()
    mode = DeferredMode(PROMPT_RULES, torch.device("cpu"), TRANSIENT)
    with mode:
        output = model(**prompt, **{CACHE_NAME: cache})
    close(mode.tensor(output.logits)[real], expected.logits[real])
    close(own_logits(model, cache, steps)[0], expected_step)


@torch.no_grad()
def test_prompts_by_pieces(calls, monkeypatch):
    """Norm, gate, up and down of a piece go together: each linear once a piece of 8 of the 33 rows."""
    monkeypatch.setattr(prompt_fusion, "_MANY", 2)
    monkeypatch.setattr(prompt_fusion, "_PIECE", 8)
    model = hf_turbo.patch(quantized("llama"))
    prompt, _ = decode_steps(0)
    calls.clear()
    mode = DeferredMode(PROMPT_RULES, torch.device("cpu"), TRANSIENT)
    with mode:
        output = model(**prompt, **{CACHE_NAME: hf_turbo.paged_cache(model)})
    mode.tensor(output.logits)
    assert calls["alone"] == 2 * (3 + 1 + 3 * 5)


# experts


@pytest.fixture
def mixture(tmp_path, registered):
    folder, twin = write(build("mixtral"), tmp_path)
    return load(folder), load(twin)


@torch.no_grad()
def test_steps_of_quantized_experts_are_not_captured(mixture):
    """They go the model's own way, over the cache that the attempt has left."""
    model, twin = mixture
    prompt, steps = decode_steps(2)
    expected = own_logits(twin, twin(**prompt, use_cache=True)[CACHE_NAME], steps)
    assert any(isinstance(module, Int4Experts) for module in model.modules())
    assert why_not_captured(twin) is None and "experts" in why_not_captured(model)
    hf_turbo.patch(model, block_size=4)
    cache, graphs = hf_turbo.paged_cache(model), handle_of(model).steps
    model(**prompt, **{CACHE_NAME: cache})
    forward = type(model)._hf_turbo_original_class.forward
    assert graphs._run(model, lambda **k: forward(model, **k), cache, StepInputs.of(steps[0])) is None
    assert any("its quantized experts" in reason for reason in stepped_aside(model))
    for logits, wanted in zip(own_logits(model, cache, steps), expected, strict=True):
        close(logits, wanted)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_text_of_quantized_experts(mixture, options):
    model, _ = mixture
    batch = ragged(3, 19)
    expected = generate(model, batch, 8, output_logits=True, **options)
    hf_turbo.patch(model, block_size=4)
    with accelerated(model):
        output = generate(model, batch, 8, output_logits=True, **options)
    assert torch.equal(output.sequences, expected.sequences)
    for logits, wanted in zip(output.logits, expected.logits, strict=True):
        close(logits, wanted)
