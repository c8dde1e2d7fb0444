"""Forwards of rows that bring different numbers of tokens, captured and not; on a CPU, graphs being computed anew."""

import pytest
import torch
from helpers import prompt, twins
from steps import serve_without_gpu

from hf_turbo.engine import forwards


@pytest.mark.parametrize("captures", [True, False])
@torch.no_grad()
def test_one_token_of_two_rows(monkeypatch, captures):
    """As a row of one token it has the shape that captured steps have: a row for each token."""
    serve_without_gpu(monkeypatch)
    stock, model = twins("llama", block_size=32)
    monkeypatch.setattr(forwards, "uses_triton", lambda device: captures)
    rows, ids = forwards.RowForwards(model), prompt(2, 12)
    rows.cache.add_rows(2)
    for start, q_lens, wanted in ((0, [9, 9], [8, 17]), (9, [0, 1], [0]), (9, [1, 0], [0]), (10, [2, 1], [1, 2])):
        new = [row[start : start + n] for row, n in zip(ids, q_lens, strict=True)]
        got = rows.packed(torch.cat(new), q_lens, wanted)
        ends = [start + n for n in q_lens if n]
        texts = [row for row, n in zip(ids, q_lens, strict=True) if n]
        expected = [stock(row[None, :end]).logits[:, -1] for row, end in zip(texts, ends, strict=True)]
        torch.testing.assert_close(got, torch.cat(expected), atol=1e-4, rtol=1e-4)
    rows.renew()
