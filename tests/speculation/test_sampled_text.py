"""Sampled text with drafts has the distribution of the model's own: S05 of the cases."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from drafting import Knowing, drafted, heads_of, pair, stats, tree_of
from helpers import generate, prompt, stepped_aside, used_blocks
from scipy.stats import chisquare
from tiny_models import build

from hf_turbo.generation.draft_model import DraftModel
from hf_turbo.generation.medusa import Medusa
from hf_turbo.generation.prompt_lookup import PromptLookup

VOCABULARY = 8
SMALL = dict(vocab_size=VOCABULARY, num_hidden_layers=1, pad_token_id=None, bos_token_id=None)
PROMPT = prompt(1, 6) % VOCABULARY
NUM_TEXTS = 1000
#: Filters, as `generate` takes them.
FILTERS = {
    "cold": dict(temperature=0.3),
    "as it is": dict(temperature=1.0),
    "hot": dict(temperature=2.0),
    "top-p": dict(top_p=0.8, temperature=1.5),
    "top-k": dict(top_k=3, temperature=1.5),
    "penalty": dict(repetition_penalty=1.5, temperature=1.2),
}


def small():
    """The pair of models; their logits are flat enough that many tokens are likely."""
    one = pair("llama", **SMALL)
    for model in (one.stock, one.model):
        weight = model.lm_head.weight
        weight.data.copy_(build("llama", **SMALL).lm_head.weight / 4)
    return one


def draft_model(agrees: bool):
    """Another model of as many tokens, or the same one."""
    draft = build("llama", noise=0.0 if agrees else 0.8, **SMALL)
    draft.lm_head.weight.data /= 4
    return draft


@cache
def exact(filters: str) -> torch.Tensor:
    """The probabilities of three tokens, `[8, 8, 8]`: from the stock model's logits, filtered anew."""
    options = eval(filters)
    model, joint = small().stock, torch.ones(VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
    prefixes = [PROMPT[0].tolist()]
    for _ in range(3):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(prefixes)).logits[:, -1].double()
        p = torch.stack([filtered(row, prefix, **options) for row, prefix in zip(logits, prefixes)])
        depth = {1: 0, VOCABULARY: 1, VOCABULARY**2: 2}[len(prefixes)]
        joint *= p.view([VOCABULARY] * (depth + 1) + [1] * (2 - depth))
        prefixes = [[*prefix, token] for prefix in prefixes for token in range(VOCABULARY)]
    return joint


def filtered(logits, prefix, temperature=1.0, top_k=None, top_p=None, repetition_penalty=1.0):
    """One row of logits as probabilities, in float64."""
    for token in set(prefix):
        logits[token] = logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
    p = torch.softmax(logits / temperature, dim=0)
    order = p.argsort(descending=True)
    kept = order[:top_k]
    if top_p is not None:
        kept = order[: int((p[order].cumsum(0) < top_p).sum()) + 1]
    only = torch.zeros_like(p)
    only[kept] = p[kept]
    return only / only.sum()


def assert_distribution(texts: torch.Tensor, expected: torch.Tensor) -> None:
    """Of three tokens, `[n, 3]`: nothing that can't be, and each place given those before it by chi-square."""
    counts = torch.zeros_like(expected)
    counts.index_put_(tuple(texts.T), torch.ones(len(texts), dtype=counts.dtype), accumulate=True)
    assert (counts[expected == 0] == 0).all(), "a token that the filters leave out"
    for dims in ((1, 2), (2,), ()):  # the first token, the first two, all three
        seen, wanted = (x.sum(dims) if dims else x for x in (counts, expected * len(texts)))
        seldom = wanted < 5
        seldom.view(-1)[wanted.argmax()] = True  # together with the likeliest they are enough
        seen, wanted = (torch.cat([x[~seldom], x[seldom].sum()[None]]) for x in (seen, wanted))
        assert len(seen) > 1
        assert chisquare(seen.numpy(), wanted.numpy()).pvalue > 1e-3


def texts_of(model, filters, num_tokens=3, **extra):
    """That many tokens of many texts of one prompt, `[n, num_tokens]`."""
    options = {"top_k": 0, **filters}
    found = generate(
        model, PROMPT, num_tokens, do_sample=True, num_return_sequences=NUM_TEXTS, return_dict_in_generate=False,
        **options, **extra,
    )  # fmt: skip
    assert not stepped_aside(model) and used_blocks(model) == 0
    return found[:, PROMPT.shape[1] :][:, :3]


@pytest.mark.parametrize("num_tokens, name", [*((2, name) for name in FILTERS), (1, "hot")])
def test_s05_draft_models(name, num_tokens):
    """Drafts are drawn after the same filters, and rejected in part; the third token may follow an accepted draft."""
    one, filters = small(), FILTERS[name]
    drafted(one, DraftModel(draft_model(agrees=False), num_tokens, adaptive=False), block_size=16)
    assert_distribution(texts_of(one.model, filters), exact(repr(filters)))
    assert 0.02 < stats(one.model).acceptance_rate < 0.95


def test_s05_a_draft_that_says_what_the_model_says():
    """Everything is accepted."""
    one = small()
    drafted(one, DraftModel(draft_model(agrees=True), 2, adaptive=False), block_size=16)
    assert_distribution(texts_of(one.model, FILTERS["hot"]), exact(repr(FILTERS["hot"])))
    assert stats(one.model).acceptance_rate == 1


@pytest.mark.parametrize("way", ["lookup", "heads", "tree"])
def test_s05_drafts_that_are_not_drawn(way, tmp_path):
    """The model draws each token itself, whatever is proposed."""
    one = small()
    speculation = {
        "lookup": lambda: PromptLookup(2, min_match=1, adaptive=False),
        "heads": lambda: Medusa(heads_of(one.model, tmp_path), tree=[(0,), (1,), (0, 0), (1, 0)], adaptive=False),
        "tree": lambda: Knowing(one.plain(PROMPT, 8), tree_of("full 2x2x2"), vocabulary=VOCABULARY),
    }[way]()
    drafted(one, speculation, block_size=16)
    assert_distribution(texts_of(one.model, FILTERS["hot"]), exact(repr(FILTERS["hot"])))
    assert 0 < stats(one.model).acceptance_rate < 1


def test_s05_by_transformers_arguments():
    one = small()
    for extra in ({"assistant_model": draft_model(agrees=False)}, {"prompt_lookup_num_tokens": 2}):
        drafted(one, None, block_size=16)
        assert_distribution(texts_of(one.model, FILTERS["top-p"], **extra), exact(repr(FILTERS["top-p"])))


def test_s05_hardly_any_temperature_is_greedy():
    one = pair("llama")
    drafted(one, DraftModel(build("llama", noise=0.1), 5, adaptive=False))
    got = generate(one.model, prompt(1, 9), 32, do_sample=True, temperature=1e-4, num_return_sequences=3).sequences
    assert torch.equal(got, one.plain(prompt(1, 9), 32).expand(3, -1))
