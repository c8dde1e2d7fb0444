"""P01: threads that share one patched model get what they would get alone."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import accelerated, assert_pool_accounts, forward, generate, prompt, ragged, twins, used_blocks
from transformers.generation.streamers import BaseStreamer

import hf_turbo
from hf_turbo.compat import CACHE_NAME

PROMPTS = [5, 33, 12, 20]


class Tokens(BaseStreamer):
    def __init__(self):
        self.received = []

    def put(self, value):
        self.received += value.flatten().tolist()

    def end(self):
        self.received.append("end")


def plain(model, length):
    return generate(model, ragged(3, length), 8 + length % 5).sequences.tolist()


def streaming(model, length):
    streamer = Tokens()
    generate(model, prompt(1, length), 12, streamer=streamer)
    return streamer.received


def beams(model, length):
    return generate(model, ragged(4, length), 10, num_beams=3, num_return_sequences=2).sequences.tolist()


def lookup(model, length):
    return generate(model, prompt(1, length).repeat(1, 2), 12, prompt_lookup_num_tokens=3).sequences.tolist()


JOBS = [plain, streaming, beams, lookup]


def training_loss(model, length):
    ids = prompt(2, length)
    loss = model(input_ids=ids, labels=ids).loss
    return [loss.item(), *(g.abs().sum().item() for g in torch.autograd.grad(loss, list(model.parameters())))]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_results_are_those_of_serial_calls(name):
    stock, model = twins(name, 4)
    expected = {job: [job(stock, length) for length in PROMPTS] for job in JOBS}
    losses = [training_loss(stock, length) for length in PROMPTS]
    start = threading.Barrier(len(JOBS) + 1)

    def work(job):
        start.wait(timeout=30)
        return [job(model, length) for length in PROMPTS]

    with accelerated(model), ThreadPoolExecutor(len(JOBS) + 1) as threads:
        futures = {job: threads.submit(work, job) for job in JOBS}
        trained = threads.submit(work, training_loss)
        for job, future in futures.items():
            assert future.result(timeout=120) == expected[job], job.__name__
        for got, wanted in zip(trained.result(timeout=120), losses, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)
    assert used_blocks(model) == 0
    assert_pool_accounts(model)


def test_caches_of_one_prompt_in_several_threads():
    """Copies of a prefilled cache share its blocks across threads; each writes to its own."""
    stock, model = twins("llama", 4)
    prefix = prompt(1, 22)
    cache = hf_turbo.paged_cache(model)
    forward(model, prefix, cache)
    turns = [torch.cat([prefix, prompt(1, 3, seed=s)], dim=1) for s in range(6)]
    expected = [generate(stock, ids).sequences for ids in turns]

    def work(ids, own):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE_NAME: own}
        return generate(model, inputs).sequences

    copies = [copy.deepcopy(cache) for _ in turns]
    with ThreadPoolExecutor(len(turns)) as threads:
        for got, wanted in zip(threads.map(work, turns, copies), expected, strict=True):
            assert torch.equal(got, wanted)
    assert_pool_accounts(model)


def test_release_beside_running_calls():
    """Memory is given back while another thread generates: no block in use goes with it."""
    stock, model = twins("llama", 4)
    expected = generate(stock, prompt(2, 40), 30).sequences
    stop = threading.Event()

    def give_back():
        while not stop.wait(0.001):  # without a pause it takes most of the one interpreter's time
            hf_turbo.release(model)

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(give_back)
        try:
            for _ in range(3):
                assert torch.equal(generate(model, prompt(2, 40), 30).sequences, expected)
        finally:
            stop.set()
        running.result(timeout=30)
