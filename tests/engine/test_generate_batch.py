"""`generate_batch` and the other ways into many requests at once, over a toy engine and the engine itself."""

import asyncio
import copy
import pickle
import queue
import time
from unittest.mock import patch

import pytest
import torch
from helpers import build, new_text, ragged, stepped_aside, twins
from toy_engine import no_thread_left, toy_tokens, toys_instead
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_turbo
from hf_turbo.cache.forward_plan import PackedUnsuited
from hf_turbo.engine import manager as manager_module
from hf_turbo.engine.limits import limits_of
from hf_turbo.engine.manager import Manager
from hf_turbo.patching import handle_of

PROMPT = [5, 6, 7]

#: Nothing here takes seconds; a wait that does is one for ever.
SOON = 30.0


def test_generate_batch_gives_results_in_order(model, capsys):
    prompts = [[3 + i] for i in range(5)]
    with toys_instead() as toys:
        results = model.generate_batch(
            prompts, GenerationConfig(max_new_tokens=3), num_return_sequences=2, do_sample=True, progress_bar=True,
            record_timestamps=True,
        )  # fmt: skip
    assert list(results) == [name for i in range(5) for name in (f"req_{i}", f"req_{i}__child#0")]
    for i, prompt in enumerate(prompts):
        assert results[f"req_{i}"].prompt_ids == prompt
        assert results[f"req_{i}"].generated_tokens == toy_tokens(prompt, 3)
        assert results[f"req_{i}__child#0"].generated_tokens == toy_tokens(prompt, 2, 1)
        assert len(results[f"req_{i}"].timestamps) == 3
    assert "10/10" in capsys.readouterr().err
    assert toys[0].num_closed == 1 and no_thread_left()
    assert model.generate_batch([]) == {}


def test_generate_batch_raises_before_anything_is_computed(model):
    with toys_instead(too_long=3) as toys:
        with pytest.raises(ValueError, match="4 tokens never fit"):
            model.generate_batch([[3], [3, 4, 5, 6], [5]])
        assert toys[-1].num_steps == 0
        for error, match, options in (
            (ValueError, "temprature", dict(temprature=1.0)),
            (ValueError, "seed", dict(seed=[1, 2], do_sample=True)),
            (NotImplementedError, "guidance_scale", dict(guidance_scale=2.0)),
        ):
            with pytest.raises(error, match=match):
                model.generate_batch([[3], [4], [5]], **options)
            assert all(toy.num_closed == 1 for toy in toys)
        with pytest.raises(ValueError, match="at least one token"):
            model.generate_batch([[3], []])
        with pytest.raises(NotImplementedError, match="cpu_offload_space"):
            model.generate_batch([[3]], continuous_batching_config=ContinuousBatchingConfig(cpu_offload_space=1.0))
    assert all(toy.num_steps == 0 for toy in toys) and no_thread_left()


def test_generate_batch_and_failures(model):
    with toys_instead(fails_at=2) as toys, pytest.raises(ArithmeticError, match="the toy broke"):
        model.generate_batch([[3], [4]])
    assert toys[0].num_closed == 1 and no_thread_left()
    with toys_instead(bad_id="req_1"):
        results = model.generate_batch([[3], [4], [5]], max_new_tokens=3)
    assert [output.error for output in results.values()] == [None, "'its processor'", None]


def test_generate_batch_is_interrupted(model):
    class Interrupted(queue.SimpleQueue):
        pass

    def get(self, timeout):
        time.sleep(0.05)
        raise KeyboardInterrupt

    with toys_instead(seconds=0.001) as toys, patch("hf_turbo.engine.batch_mixin.SimpleQueue", Interrupted):
        Interrupted.get = get
        began = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            model.generate_batch([[3], [4]], max_new_tokens=10**6)
    assert time.perf_counter() - began < SOON
    assert toys[0].num_closed == 1 and no_thread_left()


def test_a_kept_manager_serves_the_next_call(model):
    with toys_instead() as toys:
        first = model.generate_batch([[3]], max_new_tokens=2, persistent_manager=True)
        assert toys[0].num_closed == 0 and no_thread_left()
        kept = handle_of(model).manager
        second = model.generate_batch([[3]], GenerationConfig(max_new_tokens=5), persistent_manager=True)
        assert len(toys) == 1 and handle_of(model).manager is kept
        assert (list(first), list(second)) == (["req_0"], ["req_1"])
        assert second["req_1"].generated_tokens == toy_tokens([3], 5)  # its own config
        third = model.generate_batch([[3]], persistent_manager=True)
        assert len(third["req_2"].generated_tokens) == 20  # the model's own, not the last call's
        assert model.init_continuous_batching(GenerationConfig(max_new_tokens=6)) is kept
        kept.start()
        assert handle_of(model).manager is None  # one session at a time
        assert len(kept.get_result(kept.add_request([3]), timeout=SOON).generated_tokens) == 6
        kept.stop(keep_for_next_session=True)
        other = ContinuousBatchingConfig(max_batch_tokens=64)
        model.generate_batch([[3]], max_new_tokens=2, continuous_batching_config=other, persistent_manager=True)
        assert [toy.num_closed for toy in toys] == [1, 0] and toys[1].limits.max_tokens == 64
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert handle_of(twin).manager is None
        model.destroy_cached_continuous_batching_manager()
        assert toys[1].num_closed == 1 and handle_of(model).manager is None
        model.generate_batch([[3]], max_new_tokens=2, persistent_manager=True)
        hf_turbo.release(model)
        assert toys[2].num_closed == 1
    fresh = hf_turbo.patch(build("llama"))
    with toys_instead() as toys:
        fresh.generate_batch([[3]], max_new_tokens=2, persistent_manager=True)
        hf_turbo.unpatch(fresh)
    assert toys[0].num_closed == 1


def test_who_reads_along(model, monkeypatch):
    """A manager's texts may be read as they come, those of a batch may not: only the former hold prompts back."""
    asked = []

    def noted(*args):
        asked.append(args[3])
        return limits_of(*args)

    monkeypatch.setattr(manager_module, "limits_of", noted)
    model.generate_batch([[5, 6]], GenerationConfig(max_new_tokens=2, do_sample=False))
    model.init_continuous_batching().destroy()
    assert asked == [False, True]


def test_the_context_manager(model):
    with toys_instead() as toys:
        with model.continuous_batching_context_manager(GenerationConfig(max_new_tokens=3)) as manager:
            assert isinstance(manager, Manager) and manager.is_running() and manager.warmed_up
            name = manager.add_request(PROMPT)
            assert manager.get_result(name, timeout=SOON).generated_tokens == toy_tokens(PROMPT, 3)
        assert not manager.is_running() and toys[0].num_closed == 1


def test_generate_with_the_paged_cache(model):
    ids = torch.tensor([[3, 4], [5, 6], [0, 7]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 1]])
    with toys_instead():
        got = model.generate(ids, attention_mask=mask, cache_implementation="paged", max_new_tokens=3)
    assert got.tolist() == [[row + toy_tokens(real, 3) for row, real in zip(ids.tolist(), ([3, 4], [5, 6], [7]))]]


@pytest.mark.parametrize(
    "options",
    [{}, {"eos_token_id": [*range(3, 14)]}, {"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}],
    ids=str,
)
def test_generate_with_the_paged_cache_gives_what_it_gives_without(options):
    stock, model = twins("llama")
    for one in (stock, model):
        one.generation_config.pad_token_id = 0
    batch = ragged(5, 9, 2)
    want = stock.generate(**batch, max_new_tokens=12, do_sample=False, **options)
    got = model.generate(**batch, max_new_tokens=12, do_sample=False, cache_implementation="paged", **options)
    assert torch.equal(got[0], want)
    assert not stepped_aside(model)


@pytest.mark.parametrize(
    "options", [{}, {"num_return_sequences": 2}, {"do_sample": True, "temperature": 5.0, "seed": [5, 6]}], ids=str
)
def test_beams_are_those_of_generate(options):
    stock, model = twins("llama")
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    results = model.generate_batch(prompts, GenerationConfig(num_beams=3), max_new_tokens=6, **options)
    plain = {name: value for name, value in options.items() if name != "seed"}
    wanted = {}
    for i, prompt in enumerate(prompts):
        torch.manual_seed(options.get("seed", [0, 0])[i])
        texts = stock.generate(torch.tensor([prompt]), num_beams=3, max_new_tokens=6, **plain)
        for j, text in enumerate(texts.tolist()):
            wanted[f"req_{i}" + (f"__child#{j - 1}" if j else "")] = text
    assert list(results) == list(wanted)
    for name, output in results.items():
        text = output.prompt_ids + output.generated_tokens
        assert text == wanted[name][: len(text)] and set(wanted[name][len(text) :]) <= {stock.config.pad_token_id}


@pytest.mark.parametrize("why", ["attention", "packed"])
def test_stepping_aside_is_transformers_own(why):
    stock, model = twins("llama")
    asked = dict(generation_config=GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1))
    config = dict(continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64))
    wanted = stock.generate_batch([PROMPT], **asked, **config)
    if why == "attention":
        model.set_attn_implementation("sdpa")
        got = model.generate_batch([PROMPT], **asked, **config)
    else:
        with patch.object(manager_module, "_new_engine", side_effect=PackedUnsuited("it looks at lengths")):
            got = model.generate_batch([PROMPT], **asked, **config)
        assert stepped_aside(model)["many requests at once: it looks at lengths"] >= 1
        assert handle_of(model).attention_is_ours()
    assert list(got) == list(wanted) == ["req_0"]
    assert got["req_0"].generated_tokens == wanted["req_0"].generated_tokens


# ---- with the engine itself


def alone(stock, prompt, **options):
    """The new tokens of a prompt's own `generate()`."""
    ids = torch.tensor([prompt])
    return stock.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_texts_are_those_of_generate_in_every_mode(mode):
    stock, model = twins("llama")
    prompts = [[5, 6, 7], [9] * 20, [11]]
    options = dict(max_new_tokens=8, do_sample=False, repetition_penalty=1.2)
    with mode():
        results = model.generate_batch(prompts, **options)
    assert [output.generated_tokens for output in results.values()] == [alone(stock, p, **options) for p in prompts]
    assert hf_turbo.report(model).blocks_in_use == 0
    assert alone(model, prompts[1], **options) == alone(stock, prompts[1], **options)  # on the same pool


def test_autocast_is_that_of_the_caller():
    model = hf_turbo.patch(build("llama"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.generate_batch([[5, 6, 7]], max_new_tokens=2)
        seen = []
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        model.generate_batch([[5, 6, 7]], max_new_tokens=2)
    assert seen and set(seen) == {torch.bfloat16}
    seen.clear()
    model.generate_batch([[5, 6, 7]], max_new_tokens=2)
    assert seen and set(seen) == {torch.float32}


def test_transformers_server_uses_it():
    serving = pytest.importorskip("transformers.cli.serving.utils")
    stock, model = twins("llama")
    config = GenerationConfig(max_new_tokens=5, do_sample=False)

    class Processor:
        def decode(self, ids, skip_special_tokens):
            return " ".join(map(str, ids))

    async def main():
        server = serving.CBGenerateManager()
        server.init_cb(model, config)
        prompts = [[3, 4, 5 + i] for i in range(4)]
        asked = (
            server.generate_non_streaming(model, Processor(), {"input_ids": prompt}, config, f"request {i}")
            for i, prompt in enumerate(prompts)
        )
        for prompt, (text, length, ids) in zip(prompts, await asyncio.gather(*asked)):
            assert ids == alone(stock, prompt, max_new_tokens=5, do_sample=False) and length == len(prompt)
            assert text == " ".join(map(str, ids))
        assert server.is_alive()
        server.stop()

    asyncio.run(asyncio.wait_for(main(), 10 * SOON))
    assert no_thread_left()


@pytest.mark.parametrize("num_beams", [1, 2])
def test_none_means_what_it_means_to_generate(num_beams):
    """`eos_token_id=None` takes the model's own end away."""
    stock, model = twins("llama")
    ids, options = torch.tensor([PROMPT]), dict(do_sample=False, num_beams=num_beams)
    said = new_text(stock, ids, 12, **options)[0].tolist()
    for one in (stock, model):
        one.generation_config.eos_token_id = said[4]
    [short] = model.generate_batch([PROMPT], max_new_tokens=12, **options).values()
    [long] = model.generate_batch([PROMPT], max_new_tokens=12, eos_token_id=None, **options).values()
    assert short.generated_tokens == new_text(stock, ids, 12, **options)[0].tolist() != said
    assert long.generated_tokens == new_text(stock, ids, 12, eos_token_id=None, **options)[0].tolist() == said
