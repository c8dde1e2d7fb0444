"""A captured decode step is never of a model that is no more: whatever changed, the text is of the model as it is."""

from contextlib import contextmanager

import pytest
import torch
from graph_cases import (
    BATCH,
    GPU,
    NEW,
    assert_differs,
    assert_same,
    forced,
    on_gpu,
    outcome,
    patched_model,
    replays,
    steps,
    stock_model,
    warmed_up,
)
from helpers import assert_no_worse, prompt
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import LogitsProcessor, LogitsProcessorList

pytestmark = GPU


def mlp(model):
    return model.model.layers[0].mlp


def written_weight(model):
    mlp(model).down_proj.weight.mul_(-2)


def written_data(model):
    mlp(model).down_proj.weight.data.copy_(mlp(model).down_proj.weight.flip(0))


def written_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def trained(model):
    with torch.enable_grad():
        logits = model(**on_gpu(BATCH), use_cache=False).logits
        logits.logsumexp(-1).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad(set_to_none=True)


def assigned_weight(model):
    mlp(model).down_proj.weight = nn.Parameter(mlp(model).down_proj.weight.flip(0))


def other_data(model):
    mlp(model).down_proj.weight.data = mlp(model).down_proj.weight.flip(0)


def other_head(model):
    model.set_output_embeddings(nn.Linear(*model.lm_head.weight.shape[::-1], bias=False, device="cuda"))
    torch.manual_seed(3)
    model.lm_head.weight.copy_(torch.randn(model.lm_head.weight.shape))
    model.lm_head.eval()


def assigned_state(model):
    state = {key: x.flip(0) if "down_proj" in key else x.clone() for key, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def assigned_buffer(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def added_bias(model):
    mlp(model).down_proj.bias = nn.Parameter(torch.ones(32, device="cuda"))


def swapped_modules(model):
    first, second = model.model.layers
    first.mlp, second.mlp = second.mlp, first.mlp


def layers_in_another_order(model):
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def one_layer_less(model):
    del model.model.layers[1]


def other_activation(model):
    mlp(model).act_fn = nn.GELU(approximate="tanh")
    mlp(model).act_fn.eval()


def other_eps(model):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 3.0


def other_scale_of_attention(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.3


def other_scale_of_logits(model):
    model.logit_scale = 2.0


def other_config(model):
    model.config.logits_scaling = 0.5


def other_softcap(model):
    model.config.final_logit_softcapping = 3.0


def other_softcap_of_attention(model):
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 30.0


#: What happens to which model, and whether the graphs stay as they are.
CHANGES = [
    ("llama", written_weight, True),
    ("llama", written_data, True),
    ("llama", written_buffer, True),
    ("llama", trained, True),
    ("llama", assigned_weight, False),
    ("llama", other_data, False),
    ("llama", other_head, False),
    ("llama", assigned_state, False),
    ("llama", assigned_buffer, False),
    ("llama", added_bias, False),
    ("llama", swapped_modules, False),
    ("llama", layers_in_another_order, False),
    ("llama", one_layer_less, False),
    ("llama", other_activation, False),
    ("llama", other_eps, False),
    ("llama", other_scale_of_attention, False),
    ("cohere2", other_scale_of_logits, False),
    ("granite", other_config, False),
    ("gemma2", other_softcap, False),
    ("gemma2", other_softcap_of_attention, False),
]


@pytest.mark.parametrize("name, change, keeps_graphs", CHANGES, ids=[change.__name__ for _, change, _ in CHANGES])
@torch.no_grad()
def test_a_changed_model_is_the_one_that_runs(name, change, keeps_graphs):
    stock, model = stock_model(name), patched_model(name)
    before = warmed_up(model)
    change(stock)
    expected = outcome(stock)
    assert_differs(expected, before)
    dropped = steps(model).num_dropped
    change(model)
    with replays(model):
        for _ in range(2):
            assert_same(outcome(model), expected)
    assert (steps(model).num_dropped == dropped) == keeps_graphs


class Changes(LogitsProcessor):
    """Changes a model at its ninth call."""

    def __init__(self, model, change):
        self.model, self.change, self.calls = model, change, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 9:
            self.change(self.model)
        return scores


@pytest.mark.parametrize("change", [written_weight, assigned_weight, other_data, swapped_modules, other_eps])
@torch.no_grad()
def test_a_model_changed_between_two_steps(change):
    stock, model = stock_model("llama"), patched_model("llama")
    before = warmed_up(model)
    expected = outcome(stock, logits_processor=LogitsProcessorList([Changes(stock, change)]))
    assert torch.equal(expected.tokens[:, :9], before.tokens[:, :9])
    assert_differs(expected, before)
    with replays(model):
        assert_same(outcome(model, logits_processor=LogitsProcessorList([Changes(model, change)])), expected)


@torch.no_grad()
def test_another_dtype_and_back():
    stock, model = stock_model("llama"), patched_model("llama")
    ids = on_gpu(prompt(3, 30))
    exact = forced(stock, ids, 10)
    warmed_up(model)
    stock.to(torch.bfloat16), model.to(torch.bfloat16)
    with replays(model):
        for _ in range(2):
            got = forced(model, ids, 10)
            assert got.dtype == torch.bfloat16
            assert_no_worse(got, forced(stock, ids, 10), exact)
    stock.float(), model.float()
    with replays(model):
        for _ in range(2):
            assert_same(outcome(model), outcome(stock))


@torch.no_grad()
def test_training_mode_has_no_graphs():
    """Dropout draws anew at each step."""
    model = patched_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    expected = warmed_up(model)
    replayed = steps(model).num_replayed
    model.train()
    assert not torch.equal(outcome(model).logits, outcome(model).logits)
    assert steps(model).num_replayed <= replayed + 1, "the step that found it out"
    model.eval()
    with replays(model):
        assert_same(outcome(model), expected)


# hooks


@contextmanager
def forward_hook(module, calls):
    hook = module.register_forward_hook(lambda module, args, out: calls.append(1) or out * 1.5)
    yield
    hook.remove()


@contextmanager
def pre_hook(module, calls):
    hook = module.register_forward_pre_hook(lambda module, args: calls.append(1) or (args[0] * 1.5,))
    yield
    hook.remove()


@contextmanager
def hook_on_all_modules(module, calls):
    hook = register_module_forward_hook(lambda m, args, out: (calls.append(1) or out * 1.5) if m is module else None)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def replaced_forward(module, calls):
    own = module.forward
    module.forward = lambda *args: calls.append(1) or own(*args) * 1.5
    yield
    del module.forward


@pytest.mark.parametrize("hooked", [forward_hook, pre_hook, hook_on_all_modules, replaced_forward])
@torch.no_grad()
def test_hooks_are_called_at_every_step(hooked):
    stock, model = stock_model("llama"), patched_model("llama")
    before = warmed_up(model)
    stock_calls, calls = [], []
    with hooked(mlp(stock), stock_calls):
        expected = outcome(stock)
    assert_differs(expected, before)
    with hooked(mlp(model), calls):
        assert_same(outcome(model), expected)
        assert len(calls) == len(stock_calls) == NEW
        assert_same(outcome(model), expected)
    assert len(calls) == 2 * NEW
    with replays(model):
        assert_same(outcome(model), before)
    assert len(calls) == 2 * NEW


# adapters


def add_adapter(model, name):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(len(name))
    config = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4, init_lora_weights=False)
    if name == "default":
        model = get_peft_model(model, config)
    else:
        model.add_adapter(name, config)
        model.set_adapter(name)
    return model.eval()


def other_scaling(model):
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] *= 3


#: In this order. The last two change how the same text is computed.
ADAPTER_CHANGES = {
    "scaled": other_scaling,
    "another": lambda model: add_adapter(model, "another"),
    "first again": lambda model: model.set_adapter("default"),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "enabled": lambda model: model.base_model.enable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "unmerged": lambda model: model.unmerge_adapter(),
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_adapters():
    pytest.importorskip("peft")
    stock, patched = stock_model("llama"), patched_model("llama")
    before = warmed_up(patched)
    stock, model = add_adapter(stock, "default"), add_adapter(patched, "default")
    for name, change in {"added": lambda model: None, **ADAPTER_CHANGES}.items():
        change(stock), change(model)
        expected = outcome(stock)
        if name not in ("merged", "unmerged"):
            assert_differs(expected, before)
        with replays(patched):
            for _ in range(2):
                assert_same(outcome(model), expected)
        before = expected
    with replays(patched), stock.disable_adapter(), model.disable_adapter():
        assert_same(outcome(model), outcome(stock))
    with replays(patched):
        assert_same(outcome(model), expected)


# autocast


def test_autocast():
    """Its copies of the weights are gone when its block ends; a graph doesn't read them after that."""
    stock, model = stock_model("llama"), patched_model("llama")
    full = outcome(stock)
    ids = on_gpu(prompt(3, 30))
    exact = forced(stock, ids, 10)
    assert_same(warmed_up(model), full)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            rounded = forced(stock, ids, 10)
        for _ in range(2):
            with torch.autocast("cuda", dtype=dtype):
                got = forced(model, ids, 10)
            assert_no_worse(got, rounded, exact)
            garbage = [torch.full((n,), float("nan"), device="cuda") for n in (256, 512, 768, 1024, 2048) * 40]
            del garbage
    assert_same(outcome(model), full)
