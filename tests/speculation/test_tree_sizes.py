"""Medusa trees of several sizes, each the beginning of the next: by rounds ahead, by the host, and in an engine."""

import itertools

import pytest
import torch
from helpers import new_text, prompt, ragged, twins, used_blocks

import hf_turbo
from hf_turbo.generation.medusa import _REPEATS
from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.generation.medusa_trees import search_tree
from hf_turbo.generation.pace import Pace
from hf_turbo.patching import handle_of

NEW = 24
#: The second head's third guess was right more often than its second one: siblings are found in their order anyway.
ACCURACIES = [[0.5, 0.2, 0.1, 0.05], [0.3, 0.1, 0.15, 0.05], [0.2, 0.1, 0.05, 0.0]]


@pytest.fixture
def drafted(tmp_path):
    """A stock model, and one with heads that guess by way of its own projection, mostly wrong."""
    stock, model = twins("llama", block_size=8)
    heads = MedusaHeads(3, 1, stock.config.hidden_size, stock.config.vocab_size)
    heads.accuracies = ACCURACIES
    for p in heads.parameters():
        torch.nn.init.normal_(p, std=0.2)
    heads.save_pretrained(tmp_path)
    hf_turbo.patch(model, block_size=8, speculation=hf_turbo.Medusa(tmp_path, num_nodes=20))
    return stock, model


@pytest.fixture
def in_turn(monkeypatch):
    """Every size follows every other one; those that rounds had."""
    sizes, seen, note = itertools.cycle([19, 19, 3, 7, 7, 3, 3, 15, 0, 15, 7, 19, 0, 0, 3, 19]), [], Pace.note

    def noted(pace, size, drafted, accepted, *rest):
        seen.append((size, drafted, accepted))
        note(pace, size, drafted, accepted, *rest)

    monkeypatch.setattr(Pace, "choose", lambda pace: next(sizes))
    monkeypatch.setattr(Pace, "note", noted)
    return seen


@pytest.mark.parametrize("min_match", [None, 1, 16])
def test_sizes(drafted, min_match, tmp_path):
    """The best tree of each size, and what is promised of it; for texts that repeat themselves a deeper one."""
    _, model = drafted
    hf_turbo.patch(model, speculation=hf_turbo.Medusa(tmp_path, num_nodes=20, min_match=min_match))
    drafter = handle_of(model).speculation.drafter
    assert drafter.sizes == (3, 7, 15, 19) and drafter.tree_of(19) is drafter.tree
    in_order = [[*itertools.accumulate(ranks, min)] for ranks in ACCURACIES]
    repeats = None if min_match is None else _REPEATS
    for size in drafter.sizes:
        tree = drafter.tree_of(size)
        paths = {tuple(tree.ranks[node] for node in path[1:]) for path in tree.paths[1:]}
        assert paths == set(search_tree(in_order, size, repeats)) and tree.num_nodes == size + 1
    if min_match is None:
        assert drafter.tree.max_depth == 3 and len(drafter.columns_of_repeats("cpu")) == 3
        assert drafter.expectation().tokens(3) == pytest.approx(1 + 0.7 * (0.5 + 0.2 + 0.5 * 0.3))
    else:
        assert len(drafter.columns_of_repeats("cpu")) == drafter.tree.max_depth > 3
        promised = 0.7 * (0.5 + 0.2 + 0.5 * 0.3) + 0.3 * (0.7 + 0.7**2)
        assert drafter.expectation().tokens(3) == pytest.approx(1 + 0.7 * promised)
    for options in (dict(adaptive=False), dict(tree=[[0], [0, 1], [1]]), dict(tree="mc_sim_7b_63")):
        hf_turbo.patch(model, speculation=hf_turbo.Medusa(tmp_path, num_nodes=20, **options))
        drafter = handle_of(model).speculation.drafter
        assert drafter.sizes == (drafter.tree.num_nodes - 1,)


@pytest.mark.parametrize("batch", [prompt(1, 9), ragged(3, 9, 6, 12)], ids=["one", "several"])
def test_rounds_ahead(ahead, drafted, in_turn, batch):
    counts, register = ahead
    stock, model = drafted
    register(model)
    inputs = batch if isinstance(batch, dict) else dict(input_ids=batch, attention_mask=torch.ones_like(batch))
    for _ in range(3):
        got = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(got[:, inputs["input_ids"].shape[1] :], new_text(stock, batch, NEW))
        assert used_blocks(model) == 0
    assert counts["gone on"] and {size for size, *_ in in_turn} == {0, 3, 7, 15, 19}
    assert any(accepted for *_, accepted in in_turn)


@pytest.mark.parametrize(
    "batch, options", [(ragged(3, 9, 6), {}), (prompt(1, 9), dict(do_sample=True, top_k=5))], ids=["greedy", "sampled"]
)
def test_rounds_by_the_host(drafted, in_turn, batch, options):
    """A sampled row has the text that its seed gives without drafts."""
    inputs = batch if isinstance(batch, dict) else dict(input_ids=batch, attention_mask=torch.ones_like(batch))
    for seed in range(3):
        texts = []
        for one in drafted:
            torch.manual_seed(seed)
            texts.append(one.generate(**inputs, max_new_tokens=NEW, **{"do_sample": False, **options}))
        assert torch.equal(*texts) and texts[0].shape[1] == inputs["input_ids"].shape[1] + NEW
        assert used_blocks(drafted[1]) == 0
    assert {size for size, *_ in in_turn} >= {3, 7, 15, 19}


def test_in_an_engine(drafted, in_turn):
    stock, model = drafted
    prompts = [prompt(1, n)[0].tolist() for n in (3, 9, 6)]
    results = model.generate_batch(prompts, max_new_tokens=NEW, do_sample=False)
    for ids, result in zip(prompts, results.values(), strict=True):
        assert result.generated_tokens == new_text(stock, torch.tensor([ids]), NEW)[0].tolist()
    assert len({size for size, *_ in in_turn} & {3, 7, 15, 19}) > 2
