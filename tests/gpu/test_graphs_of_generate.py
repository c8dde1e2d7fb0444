"""Captured decode steps under `generate()` and loops of the user's own: every text is that of the unpatched model."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from graph_cases import (
    BATCH,
    GPU,
    NEW,
    forced,
    on_gpu,
    patched_model,
    replays,
    rows_of,
    steps,
    stock_model,
)
from helpers import assert_pool_accounts, forward, generate, new_text, prompt, ragged, used_blocks
from loop_cases import stock_loops
from tiny_models import build
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.patching import handle_of

pytestmark = GPU


@pytest.fixture(scope="module")
def pairs():
    """Stock and patched models by name. (The tests that use them change neither.)"""
    made = {}

    def pair(name):
        if name not in made:
            made[name] = stock_model(name), patched_model(name)
        return made[name]

    return pair


# ways to generate

WAYS = {
    "greedy": {},
    "sampled": dict(do_sample=True, temperature=0.9, top_k=20),
    "copies": dict(do_sample=True, num_return_sequences=3),
    "beams": dict(num_beams=4),
    "beam copies": dict(num_beams=4, num_return_sequences=2),
    "beam sampling": dict(num_beams=3, do_sample=True),
    "penalty": dict(repetition_penalty=1.3, no_repeat_ngram_size=3),
}


@pytest.mark.parametrize("loops", [nullcontext, stock_loops], ids=["own loops", "Transformers' loops"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_ways_to_generate(pairs, name, way, loops):
    stock, model = pairs(name)
    torch.manual_seed(4)
    expected = new_text(stock, on_gpu(BATCH), NEW, **WAYS[way])
    with replays(model), loops():
        for _ in range(2):
            torch.manual_seed(4)
            assert torch.equal(new_text(model, on_gpu(BATCH), NEW, **WAYS[way]), expected)
    assert used_blocks(model) == 0
    assert_pool_accounts(model)


@pytest.mark.parametrize("way", ["assisted", "prompt lookup"])
def test_drafted_text(pairs, way):
    """Steps of several tokens between those of one."""
    stock, model = pairs("llama")
    draft = build("llama", noise=0.1).cuda()
    options = {"assistant_model": draft} if way == "assisted" else {"prompt_lookup_num_tokens": 3}
    for ids in (on_gpu(prompt(1, 11)), on_gpu(prompt(1, 11).repeat(1, 2))):
        expected = new_text(stock, ids, NEW)
        for _ in range(2):
            assert torch.equal(new_text(model, ids, NEW, **options), expected)


def test_patched_draft(pairs):
    stock, model = pairs("llama")
    ids = on_gpu(prompt(1, 11))
    draft = hf_turbo.patch(build("llama", noise=0.1).cuda(), block_size=8)
    assert torch.equal(new_text(model, ids, NEW, assistant_model=draft), new_text(stock, ids, NEW))


def test_embeddings_as_prompt(pairs):
    stock, model = pairs("llama")
    batch = on_gpu(BATCH)
    embeddings = stock.get_input_embeddings()(batch["input_ids"]).detach()
    inputs = {"inputs_embeds": embeddings, "attention_mask": batch["attention_mask"]}
    with replays(model):
        expected, got = (one.generate(**inputs, max_new_tokens=NEW, do_sample=False) for one in (stock, model))
    assert torch.equal(got, expected)


# loops of the user's own


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "qwen3"])
def test_a_loop_without_mask_or_positions(pairs, name):
    stock, model = pairs(name)
    ids = on_gpu(prompt(2, 50))
    with replays(model):
        for start in (20, 3):
            torch.testing.assert_close(forced(model, ids, start), forced(stock, ids, start), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_arguments_by_position(pairs):
    """Such calls give the same, by a graph or not."""
    stock, model = pairs("llama")
    ids = on_gpu(prompt(2, 20))
    caches = DynamicCache(config=stock.config), hf_turbo.paged_cache(model)
    for part in ids.split([5] + [1] * 15, dim=1):
        expected, got = (
            one(part, None, **{CACHE_NAME: cache}).logits for one, cache in zip((stock, model), caches, strict=True)
        )
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_results_stay_the_callers(pairs):
    """The next replay doesn't write to what an earlier one returned."""
    _, model = pairs("llama")
    ids = on_gpu(prompt(1, 20))
    cache = hf_turbo.paged_cache(model)
    forward(model, ids[:, :5], cache)
    with replays(model):
        outputs = [forward(model, ids[:, i : i + 1], cache) for i in range(5, 20)]
    kept = [output.logits.clone() for output in outputs]
    forced(model, ids.flip(1), 5)
    assert all(torch.equal(output.logits, x) for output, x in zip(outputs, kept, strict=True))
    assert not torch.equal(kept[-1], kept[-2])
    assert all(output[CACHE_NAME] is cache for output in outputs)


def stepped(model, cache, ids):
    """The logits of one forward for each column."""
    return torch.cat([forward(model, ids[:, i : i + 1], cache).logits for i in range(ids.shape[1])], dim=1)


def test_crop_and_go_on(pairs):
    """Tokens are taken back, also over a block's edge, and others follow."""
    stock, model = pairs("llama")
    ids, others = on_gpu(prompt(2, 40)), on_gpu(prompt(2, 60, seed=1))
    results = []
    with replays(model):
        for one, cache in ((stock, DynamicCache(config=stock.config)), (model, hf_turbo.paged_cache(model))):
            logits = [stepped(one, cache, ids)]
            for back in (1, 8, 19):
                cache.crop(-back)
                logits.append(stepped(one, cache, others[:, : back + 3]))
            results.append(torch.cat(logits, dim=1))
            assert cache.get_seq_length() == 40 + 3 * 3
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_two_caches_by_turns(pairs, name):
    """One graph serves both, and those of other callers that come and go between."""
    stock, model = pairs(name)
    lines = [on_gpu(prompt(1, n)) for n in (40, 29)]
    expected = [forced(stock, ids, 9)[:, :20] for ids in lines]
    caches = [hf_turbo.paged_cache(model) for _ in lines]
    got = [[forward(model, ids[:, :9], cache).logits[:, -1]] for ids, cache in zip(lines, caches, strict=True)]
    captured = steps(model).num_captured
    with replays(model):
        for i in range(9, 28):
            for ids, cache, logits in zip(lines, caches, got, strict=True):
                logits.append(forward(model, ids[:, i : i + 1], cache).logits[:, -1])
            if i % 3 == 0:
                assert torch.equal(forced(model, lines[1][:, :14], 9), forced(model, lines[1][:, :14], 9))
    for logits, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.stack(logits, dim=1), wanted, rtol=1e-3, atol=1e-3)
    assert steps(model).num_captured <= captured + 1


# the user's own parts


class Recorder(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


class ForbidsOlder(LogitsProcessor):
    """Forbids what it liked best at the call before."""

    def __init__(self):
        self.last, self.seen = None, []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        best, last = scores.argmax(-1, keepdim=True), self.last
        self.last = best
        return scores if last is None else scores.scatter(1, last, float("-inf"))


class EndsAt(StoppingCriteria):
    """Ends all rows at its n-th call."""

    def __init__(self, n):
        self.n, self.seen = n, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return torch.full((len(input_ids),), len(self.seen) >= self.n, device=input_ids.device)


@pytest.mark.parametrize("parts", ["processor", "criterion", "streamer", "all"])
def test_parts_of_the_users_own(pairs, parts):
    """Called as often as by the unpatched model, with the same arguments."""
    pair = pairs("llama")
    ids = on_gpu(prompt(1, 12))
    eos = generate(pair[0], ids, NEW).sequences[0, -3].item()
    results = []
    for model in pair:
        processor, end, streamer = ForbidsOlder(), EndsAt(17), Recorder()
        options = {"eos_token_id": eos}
        if parts in ("processor", "all"):
            options["logits_processor"] = LogitsProcessorList([processor])
        if parts in ("criterion", "all"):
            options["stopping_criteria"] = StoppingCriteriaList([end])
        if parts in ("streamer", "all"):
            options["streamer"] = streamer
        with replays(model) if model is pair[1] else nullcontext():
            output = generate(model, ids, NEW, **options)
        length = output[CACHE_NAME].get_seq_length()
        results.append((output.sequences.tolist(), length, processor.seen, end.seen, streamer.seen))
    assert results[0] == results[1]
    assert any(results[0][2:])


# the end of a text


def ends(model, inputs, **options):
    """Tokens that end each row of its text a few steps before its length, at different steps."""
    sequences = generate(model, inputs, NEW, **options).sequences
    return [row[-4 - 3 * i].item() for i, row in enumerate(sequences)]


@pytest.mark.parametrize("way", ["greedy", "sampled", "beams"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
def test_eos_within(pairs, name, way):
    """The step that was launched too much is taken back: the sequences and the cache are as long as unpatched."""
    options = {"greedy": {}, "sampled": dict(do_sample=True), "beams": dict(num_beams=4)}[way]
    stock, model = pairs(name)
    torch.manual_seed(4)
    eos = ends(stock, on_gpu(BATCH), **options)
    results = []
    with replays(model):
        for one in (stock, model, model):
            torch.manual_seed(4)
            results.append(generate(one, on_gpu(BATCH), NEW, eos_token_id=eos, **options))
    for got in results[1:]:
        assert torch.equal(got.sequences, results[0].sequences)
        assert got[CACHE_NAME].get_seq_length() == results[0][CACHE_NAME].get_seq_length()
    if way == "greedy":
        assert results[0].sequences.shape[1] < BATCH["input_ids"].shape[1] + NEW


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
def test_a_second_turn_after_eos(pairs, name):
    stock, model = pairs(name)
    batch = on_gpu(BATCH)
    eos = ends(stock, batch)
    texts = []
    with replays(model):
        for one in (stock, model):
            first = generate(one, batch, NEW, eos_token_id=eos)
            ids = torch.cat([first.sequences, on_gpu(prompt(3, 5))], dim=1)
            mask = torch.ones_like(ids)
            mask[:, : batch["input_ids"].shape[1]] = batch["attention_mask"]
            inputs = {"input_ids": ids, "attention_mask": mask, CACHE_NAME: first[CACHE_NAME]}
            texts.append(new_text(one, inputs, 12))
    assert torch.equal(*texts)


# threads


def plain(model, length):
    return generate(model, on_gpu(ragged(3, length)), 8 + length % 5).sequences.tolist()


def short(model, length):
    return generate(model, on_gpu(ragged(length, 2, 6)), 5, eos_token_id=9).sequences.tolist()


def streaming(model, length):
    streamer = Recorder()
    generate(model, on_gpu(prompt(1, length)), 14, streamer=streamer)
    return streamer.seen


def beams(model, length):
    return generate(model, on_gpu(ragged(4, length)), 10, num_beams=3, num_return_sequences=2).sequences.tolist()


JOBS = [plain, short, streaming, beams]
LENGTHS = [5, 33, 12, 20, 9, 64]


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_threads(pairs, name):
    stock, model = pairs(name)[0], patched_model(name)
    expected = {job: [job(stock, length) for length in LENGTHS] for job in JOBS}
    start = threading.Barrier(len(JOBS))

    def work(job):
        start.wait(timeout=30)
        return [job(model, length) for length in LENGTHS * 2]

    with replays(model), ThreadPoolExecutor(len(JOBS)) as threads:
        futures = {job: threads.submit(work, job) for job in JOBS}
        for job, future in futures.items():
            assert future.result(timeout=120) == expected[job] * 2, job.__name__
    assert used_blocks(model) == 0
    assert_pool_accounts(model)


@pytest.mark.parametrize("shared", [False, True], ids=["another model", "the same model"])
def test_a_thread_that_draws_while_steps_are_captured(pairs, shared):
    """Random numbers are drawn on other streams while one is recorded."""
    stock, model = pairs("llama")[0], patched_model("llama")
    stop = threading.Event()

    def sample():
        count = 0
        while not stop.is_set():
            generate(model if shared else stock, on_gpu(prompt(1, 9)), 10, do_sample=True)
            count += 1
        return count

    with ThreadPoolExecutor(1) as threads:
        sampling = threads.submit(sample)
        try:
            for count in (2, 3, 4, 5, 6, 7, 8, 16, 24, 32):
                assert torch.equal(new_text(model, rows_of(count), 12), new_text(stock, rows_of(count), 12)), count
        finally:
            stop.set()
        assert sampling.result(timeout=60) > 0
    assert not handle_of(model).stepped_aside


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 4}], ids=str)
def test_no_step_waits_for_the_device(pairs, options):
    """A longer text makes the host wait no more often than a short one."""
    _, model = pairs("llama")
    inputs = on_gpu(BATCH)

    def waits(new_tokens):
        torch.manual_seed(0)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                generate(model, inputs, new_tokens, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in seen)

    waits(40)  # captures
    assert waits(40) == waits(10)
