"""Small tensors on their way to the host."""

import time

import pytest
import torch
from graph_cases import GPU

from hf_turbo.generation.readback import Letter, _mail

pytestmark = GPU


@pytest.mark.parametrize("sizes", [(5, 3, 9, 9, 1), (1, 2, 3, 4, 300, 2)], ids=str)
def test_letters_of_changing_sizes(sizes):
    """One letter's memory serves them all; what is read is the newest."""
    letter, memory = Letter(), set()
    for i, size in enumerate(sizes):
        tokens = torch.arange(size, device="cuda") + 1000 * i
        scores = None if i % 2 else torch.rand(size, 2, device="cuda")
        got = letter.send(tokens, scores).open()
        assert torch.equal(got[0], tokens.cpu()) and got[0].is_pinned()
        assert got[1] is None if scores is None else torch.equal(got[1], scores.cpu())
        memory.add(got[0].data_ptr())
    assert len(memory) < len(set(sizes))


def test_letters_of_changing_dtypes():
    """Of the same shape each time: nothing is made another dtype of on the way."""
    letter = Letter()
    for dtype in (torch.bool, torch.float32, torch.int64):
        x = torch.tensor([0, 3], device="cuda").to(dtype)
        [got] = letter.send(x).open()
        assert got.dtype == dtype and torch.equal(got, x.cpu())


def late_stream():
    """One that has something to do for a good part of a second."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
    return stream


def test_what_was_sent_is_nobody_elses_before_it_has_been_read():
    """The copy comes late, and memory that nobody holds goes to the next tensor of that size."""
    letter, steps = Letter(), torch.cuda.current_stream()
    letter.send(torch.zeros(1000, device="cuda")).open()
    _mail(steps).wait_stream(late_stream())
    letter.send(torch.ones(1000, device="cuda"))
    for _ in range(8):
        torch.full((1000,), 2.0, device="cuda")
    [got] = letter.open()
    assert torch.equal(got, torch.ones(1000))


def test_letters_of_one_stream_do_not_wait_for_another():
    letters, slow = [Letter(), Letter()], late_stream()
    torch.cuda.synchronize()
    for letter in letters:
        letter.send(torch.zeros(1, device="cuda")).open()  # has its memory now
    with torch.cuda.stream(slow):
        torch.cuda._sleep(1_000_000_000)
        letters[0].send(torch.ones(1, device="cuda"))
    began = time.perf_counter()
    letters[1].send(torch.ones(1, device="cuda")).open()
    seconds = time.perf_counter() - began
    letters[0].open()
    assert seconds < (time.perf_counter() - began) / 2
