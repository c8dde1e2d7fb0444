"""`patch`, `unpatch` and `report` of models with quantized linears, their own and other libraries'."""

import copy
import io
import logging
import pickle

import pytest
import torch
from foreign import ForeignLinear, with_foreign_linears
from helpers import accelerated, generate, new_text, ragged, stepped_aside
from tiny_models import build

import hf_turbo
from hf_turbo import patching
from hf_turbo.patching import handle_of
from hf_turbo.quantization import take_over as module_of_take_over
from hf_turbo.quantization.int4_linear import Int4Linear

BATCH = ragged(3, 19)


def foreign_model(name="llama", **kwargs):
    return with_foreign_linears(build(name), **kwargs)


def of_class(model, kind):
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def tensors(model):
    return {name: tensor.clone() for name, tensor in (*model.named_buffers(), *model.named_parameters())}


def attributes(model):
    """Everything but the tensors that a module gives away meanwhile."""
    skipped = ("_buffers", "_parameters")
    return {(n, k): id(v) for n, m in model.named_modules() for k, v in vars(m).items() if k not in skipped}


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_foreign_linears_are_taken_over_and_given_back(name, act_order):
    model = foreign_model(name, act_order=act_order)
    held, modules, state = tensors(model), dict(model.named_modules()), attributes(model)
    expected = generate(model, BATCH, 8, output_logits=True)
    hf_turbo.patch(model, block_size=8)
    assert not of_class(model, ForeignLinear) and len(of_class(model, Int4Linear)) == 14
    with accelerated(model):
        output = generate(model, BATCH, 8, output_logits=True)
    assert torch.equal(output.sequences, expected.sequences)
    for logits, wanted in zip(output.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)

    hf_turbo.unpatch(model)
    assert dict(model.named_modules()) == modules and attributes(model) == state
    back = tensors(model)
    assert back.keys() == held.keys() and all(torch.equal(back[key], held[key]) for key in held)
    again = generate(model, BATCH, 8, output_logits=True)
    assert all(torch.equal(x, y) for x, y in zip(again.logits, expected.logits, strict=True))


def test_for_the_length_of_a_block_and_twice():
    model = foreign_model()
    modules = dict(model.named_modules())
    with hf_turbo.patched(model), hf_turbo.patched(model, block_size=8):
        assert len(of_class(model, Int4Linear)) == 14
    assert dict(model.named_modules()) == modules
    hf_turbo.patch(hf_turbo.patch(model), block_size=8)
    assert hf_turbo.report(model).linears_taken_over == 14
    hf_turbo.unpatch(model)
    assert dict(model.named_modules()) == modules


def test_models_that_step_aside_keep_their_linears():
    model = with_foreign_linears(build("jamba"))
    modules = of_class(model, ForeignLinear)
    hf_turbo.patch(model)
    assert modules and of_class(model, ForeignLinear) == modules
    assert not hf_turbo.report(model).quantized_linears


def spoiled(model, *layers):
    """Gives linears of these layers a forward that their tensors do not explain."""
    for index in layers:
        module = model.model.layers[index].mlp.down_proj
        own = module.forward
        module.forward = lambda x, own=own: own(x) * 1.5
    return model


def test_what_is_left_is_said_once(caplog):
    model = spoiled(foreign_model(), 0, 1)
    expected = new_text(model, BATCH)
    with caplog.at_level(logging.WARNING, "hf_turbo"):
        hf_turbo.patch(model)
        text = new_text(model, BATCH)
    assert torch.equal(text, expected)
    [reason] = stepped_aside(model)
    assert reason.startswith("model.layers.0.mlp.down_proj and 1 more stay quantized as they were loaded: ")
    assert "does not compute what it computes itself" in reason
    assert caplog.text.count("down_proj") == 1
    report = hf_turbo.report(model)
    assert report.linears_taken_over == 12 and report.quantized_linears == {4: 12}
    assert report.linears_left.keys() == {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)}
    assert "12 of 4 bits" in str(report) and "12 taken over, 2 left as they were loaded" in str(report)


@pytest.mark.parametrize("where", ["taking over", "attention"])
def test_a_failure_changes_nothing(where, monkeypatch):
    model = foreign_model()
    held, modules, state = tensors(model), dict(model.named_modules()), attributes(model)
    cls, calls = type(model), []

    def fails(*args):
        calls.append(args)
        if where == "attention" or len(calls) > 3:
            raise MemoryError("no more")
        return read(*args)

    read = module_of_take_over._read
    if where == "attention":
        monkeypatch.setattr(patching, "AttentionName", fails)
    else:
        monkeypatch.setattr(module_of_take_over, "_read", fails)
    with pytest.raises(MemoryError):
        hf_turbo.patch(model)
    assert calls and not hf_turbo.is_patched(model) and type(model) is cls
    assert dict(model.named_modules()) == modules and attributes(model) == state
    assert all(torch.equal(tensor, held[name]) for name, tensor in tensors(model).items())


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, pickled, saved])
def test_copies(again):
    model = foreign_model()
    held, expected = tensors(model), new_text(model, BATCH)
    other = again(hf_turbo.patch(model))
    with accelerated(other):
        assert torch.equal(new_text(other, BATCH), expected)
    hf_turbo.unpatch(other)
    back = tensors(other)
    assert len(of_class(other, ForeignLinear)) == 14
    assert back.keys() == held.keys() and all(torch.equal(back[key], held[key]) for key in held)
    assert torch.equal(new_text(other, BATCH), expected)
    hf_turbo.release(model)
    with accelerated(model):
        assert torch.equal(new_text(model, BATCH), expected)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT's, of newer Transformers
def test_adapters_survive():
    """PEFT after patching, unpatched with the adapter still there."""
    peft = pytest.importorskip("peft")
    model = hf_turbo.patch(foreign_model())
    adapted = peft.get_peft_model(model, hf_turbo.allow_int4(peft.LoraConfig(target_modules=["q_proj"], r=4)))
    adapters = {name: x for name, x in adapted.named_parameters() if "lora_" in name}
    for parameter in adapters.values():
        torch.nn.init.normal_(parameter, std=0.5)
    expected = new_text(adapted, BATCH)
    hf_turbo.unpatch(adapted)
    assert len(of_class(adapted, ForeignLinear)) == 14 and not of_class(adapted, Int4Linear)
    assert {name for name, _ in adapted.named_parameters() if "lora_" in name} == adapters.keys()
    assert torch.equal(new_text(adapted, BATCH), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_report_of_a_models_own(bits):
    model = hf_turbo.patch(hf_turbo.quantize(build("llama"), bits=bits, group_size=16))
    layers = of_class(model, Int4Linear).values()
    report = hf_turbo.report(model)
    assert report.quantized_linears == {bits: 14} and report.linears_taken_over == 0 and not report.linears_left
    assert report.quantized_bytes == sum(x.nbytes for layer in layers for x in layer.buffers())
    assert f"quantized linears: 14 of {bits} bits, {report.quantized_bytes:,} bytes" in str(report)
    assert "taken over" not in str(report) and not handle_of(model).taken_over.layers
    assert "quantized" not in str(hf_turbo.report(hf_turbo.patch(build("llama"))))
