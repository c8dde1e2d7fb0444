"""What people do with a model beside `generate()`, done to a patched one."""

import warnings

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers import (
    accelerated,
    assert_no_worse,
    generate,
    groups,
    needs_gpu,
    new_text,
    prompt,
    ragged,
    stepped_aside,
    twins,
)
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, PreTrainedTokenizerFast, pipeline

import hf_turbo

BATCH = ragged(4, 13)
# PEFT asks a model for a property that the newest Transformers renames
PEFT_IS_BEHIND = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")


# pipeline()


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 128)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", padding_side="left"
    )


@pytest.mark.parametrize("options", [{}, dict(num_beams=3), dict(batch_size=3)], ids=str)
def test_pipeline(tokenizer, options):
    stock, model = twins("llama")
    texts = ["w5 w9 w77", "w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 w17 w18 w19 w20", "w100"]
    options = dict(max_new_tokens=8, do_sample=False, **options)
    with accelerated(model):
        got, expected = (
            pipeline("text-generation", model=one, tokenizer=tokenizer)(texts, **options) for one in (model, stock)
        )
    assert got == expected


# PEFT


def lora(model) -> PeftModel:
    """The same adapter every time, with weights that make a difference."""
    torch.manual_seed(5)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False))
    return wrapped.eval()


@PEFT_IS_BEHIND
@pytest.mark.parametrize("order", ["adapter first", "patch first"])
def test_peft(order):
    base = new_text(build("llama"), BATCH)
    expected = new_text(lora(build("llama")), BATCH)
    assert not torch.equal(base, expected)
    if order == "adapter first":
        model = lora(build("llama"))
        assert hf_turbo.patch(model) is model
    else:
        model = lora(hf_turbo.patch(build("llama")))
    assert hf_turbo.is_patched(model) and hf_turbo.is_patched(model.get_base_model())
    with accelerated(model):
        assert torch.equal(new_text(model, BATCH), expected)
        with model.disable_adapter():
            assert torch.equal(new_text(model, BATCH), base)
    torch.testing.assert_close(model(**BATCH).logits, lora(build("llama"))(**BATCH).logits)
    hf_turbo.unpatch(model)
    assert not hf_turbo.is_patched(model) and type(model.get_base_model()) is type(build("llama"))
    assert torch.equal(new_text(model, BATCH), expected)


@PEFT_IS_BEHIND
def test_peft_merged_after_patching():
    model = lora(hf_turbo.patch(build("llama"))).merge_and_unload()
    with accelerated(model):
        assert torch.equal(new_text(model, BATCH), new_text(lora(build("llama")), BATCH))


@PEFT_IS_BEHIND
def test_peft_saves_its_adapter_alone(tmp_path):
    model = lora(hf_turbo.patch(build("llama")))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build("llama"), tmp_path).eval()
    assert torch.equal(new_text(loaded, BATCH), new_text(model, BATCH))


# training


def gradients(model, checkpointing: bool, generates: bool) -> list[torch.Tensor]:
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if generates:
        model.eval()
        generate(model, BATCH, 4)
        model.train()
    loss = model(**BATCH, labels=BATCH["input_ids"]).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_training(name, checkpointing):
    stock, model = twins(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Transformers says that checkpointing and caching don't mix
        expected = gradients(stock, checkpointing, generates=False)
        got = gradients(model, checkpointing, generates=True)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_trained_weights_are_used():
    """After a step the next call computes with the new weights, over a cache that held the old ones' keys."""
    stock, model = twins("llama")
    before = new_text(model, BATCH)
    for one in (stock, model):
        one(**BATCH, labels=BATCH["input_ids"]).loss.backward()
        torch.optim.SGD(one.parameters(), lr=0.5).step()
    with accelerated(model):
        after = new_text(model, BATCH)
    assert torch.equal(after, new_text(stock, BATCH)) and not torch.equal(after, before)


def test_other_dtype_after_the_first_call():
    stock, model = twins("llama")
    generate(model, BATCH)
    stock.double(), model.double()
    ids = prompt(2, 13)  # stock eager gives NaN for a padded row in float64
    with accelerated(model):
        assert torch.equal(new_text(model, ids), new_text(stock, ids))
    assert {s.dtype for g in groups(model).values() for s in g.stores.values()} == {torch.float64}


# accelerate's hooks


class CountingHook(ModelHook):
    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("order", ["hooks first", "patch first"])
def test_hooks_are_called(order):
    """P04 on one device: what accelerate put around a layer's forward stays around it."""
    stock, model = build("llama"), build("llama")
    hook = CountingHook()
    if order == "hooks first":
        add_hook_to_module(model.model.layers[1], hook)
        hf_turbo.patch(model)
    else:
        hf_turbo.patch(model)
        add_hook_to_module(model.model.layers[1], hook)
    with accelerated(model):
        assert torch.equal(new_text(model, BATCH, 8), new_text(stock, BATCH, 8))
    assert hook.calls == 8
    hf_turbo.unpatch(model)
    assert torch.equal(new_text(model, BATCH, 8), new_text(stock, BATCH, 8))
    assert hook.calls == 16 and model.model.layers[1]._hf_hook is hook


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # the weights are elsewhere between calls
def test_offloaded_weights():
    """Weights that come to the device for their layer's forward and leave again."""
    stock, model = build("llama"), build("llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    hf_turbo.patch(model)
    assert model.model.layers[0].self_attn.q_proj.weight.device.type == "meta"
    with accelerated(model):
        for options in ({}, dict(num_beams=3)):
            assert torch.equal(new_text(model, BATCH, **options), new_text(stock, BATCH, **options))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layers_on_two_gpus(name, tmp_path):
    """P04: a layer's blocks lie where the layer does; the text is that of one device."""
    stock = build(name)
    stock.save_pretrained(tmp_path)
    device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    device_map |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    model = hf_turbo.patch(AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map, dtype=torch.float32))
    one = stock.cuda(0)
    batch = {key: value.cuda(0) for key, value in BATCH.items()}
    with accelerated(model):
        for options in ({}, dict(num_beams=3), dict(prefill_chunk_size=5)):
            assert torch.equal(new_text(model, batch, **options).cpu(), new_text(one, batch, **options).cpu())
    places = {layer: store.device.index for g in groups(model).values() for layer, store in g.stores.items()}
    assert places == {0: 0, 1: 1}
    assert all(hasattr(layer, "_hf_hook") for layer in model.model.layers)


@needs_gpu
def test_moved_to_the_gpu_after_a_call():
    stock, model = twins("llama")
    generate(model, BATCH)
    model.cuda(), stock.cuda()
    batch = {key: value.cuda() for key, value in BATCH.items()}
    with accelerated(model):
        assert torch.equal(new_text(model, batch), new_text(stock, batch))


# Transformers' own continuous batching


def continuous(model):
    """The tokens of `generate_batch`, or what it raises."""
    prompts = [prompt(1, n, seed=n)[0].tolist() for n in (4, 9)]
    try:
        small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
        results = model.generate_batch(prompts, max_new_tokens=5, continuous_batching_config=small)
    except Exception as error:
        return type(error), str(error).split("\n")[0]
    return [result.generated_tokens for result in results.values()]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_continuous_batching_is_as_unpatched(implementation):
    stock, model = build("llama"), build("llama")
    for one in (stock, model):
        one.set_attn_implementation(implementation)
    hf_turbo.patch(model)
    for one in (stock, model):
        one.generation_config.do_sample = False
    assert continuous(model) == continuous(stock)
    with accelerated(model):  # what it changes on the config is undone
        assert torch.equal(new_text(model, BATCH), new_text(stock, BATCH))
    assert all("attention implementation" not in reason for reason in stepped_aside(model))


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_autocast(attn_implementation):
    """Keys that were rotated in fp32 and values in bf16 share blocks; logits are as precise as the stock model's."""
    stock, model = twins("llama", attn_implementation=attn_implementation)
    exact = generate(stock, ragged(5, 9), 6, output_logits=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = generate(stock, ragged(5, 9), 6, output_logits=True)
        ours = generate(model, ragged(5, 9), 6, output_logits=True)
    assert not stepped_aside(model)
    assert_no_worse(ours.logits[0], theirs.logits[0], exact.logits[0])
    assert_no_worse(ours.logits[1], theirs.logits[1], exact.logits[1])


def test_inference_mode_and_out_of_it():
    """What a call in inference mode has made serves later calls that grow it outside."""
    stock, model = twins("gemma3_text", block_size=4)
    with torch.inference_mode():
        assert torch.equal(new_text(model, ragged(5, 9)), new_text(stock, ragged(5, 9)))
    assert torch.equal(new_text(model, ragged(30, 9, 50), 40), new_text(stock, ragged(30, 9, 50), 40))
    with torch.inference_mode():
        assert torch.equal(new_text(model, ragged(5, 60), 40), new_text(stock, ragged(5, 60), 40))
