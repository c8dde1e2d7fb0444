"""Forwards of token trees against plain forwards of the text up to each node: as they are, and as they are captured."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from drafting import tree_of
from helpers import assert_pool_accounts, prompt, used_blocks
from steps import tree_step
from tiny_models import build
from transformers import DynamicCache

import hf_turbo
from hf_turbo.cache.token_tree import TokenTree
from hf_turbo.compat import CACHE_NAME
from hf_turbo.generation.tree_steps import TreeSteps
from hf_turbo.ops import dispatch
from hf_turbo.patching import handle_of

#: name -> (architecture, overrides).
MODELS = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "neox": ("gpt_neox", {}),
    "phi": ("phi", {}),
    "window of 8": ("gemma3_text", {}),
    "window of 3": ("mistral", {"sliding_window": 3}),
    "window of 1": ("mistral", {"sliding_window": 1}),
    "soft caps": ("gemma2", {}),
    "sinks": ("gpt_oss", {}),
    "experts": ("mixtral", {}),
}
TREE_NAMES = ("one drafted node", "chain of 5", "full 2x2x2", "63 nodes", "64 nodes")


@pytest.fixture(autouse=True)
def _few_rows_merge(monkeypatch):
    """The kernels' table has no CPU in it: take what it says of a GPU."""
    monkeypatch.setattr(dispatch, "serves_linear", lambda rows, weights, dtype, device, *, activation: rows <= 64)


class Rounds:
    """A cache of left-padded rows that grow by paths of random trees, and their texts.

    Args:
        name: of `MODELS`.
        block_size, options: of the patched model.
        lengths: of the prompts.
    """

    def __init__(self, name: str, block_size: int = 4, lengths: tuple[int, ...] = (3, 9, 6, 12), **options) -> None:
        architecture, overrides = MODELS[name]
        self.stock, self.model = (build(architecture, **overrides) for _ in range(2))
        hf_turbo.patch(self.model, block_size=block_size, **options)
        self.texts = [prompt(1, n, seed=n)[0].tolist() for n in lengths]
        longest = max(lengths)
        ids = torch.tensor([[0] * (longest - len(text)) + text for text in self.texts])
        mask = torch.arange(longest)[None] >= longest - torch.tensor(lengths)[:, None]
        cache = hf_turbo.paged_cache(self.model)
        kwargs = {"attention_mask": mask.long(), CACHE_NAME: cache, "use_cache": True}
        kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
        output = self.model(input_ids=ids, **kwargs)
        kwargs = self.model._update_model_kwargs_for_generation(output, kwargs, is_encoder_decoder=False)
        self.steps = TreeSteps(self.model, kwargs, ids[:, -1:], None, alone=True)
        self.random = random.Random(0)

    def draft(self, tree: TokenTree) -> torch.Tensor:
        """Random tokens at all nodes."""
        return torch.tensor([[self.random.randrange(128) for _ in tree.parents] for _ in self.texts])

    def expected(self, tree: TokenTree, tokens: torch.Tensor) -> torch.Tensor:
        """What the stock model says at the end of each row's text and each node's path."""
        rows = []
        for text, drafted in zip(self.texts, tokens.tolist()):
            by_node = []
            for path in tree.paths:
                ids = torch.tensor([text + [drafted[node] for node in path]])
                by_node.append(self.stock(input_ids=ids, use_cache=False).logits[0, -1])
            rows.append(torch.stack(by_node))
        return torch.stack(rows)

    def positions(self, tree: TokenTree) -> torch.Tensor:
        return torch.tensor([[len(text) + depth for depth in tree.depths] for text in self.texts])

    def accept(self, tree: TokenTree, tokens: torch.Tensor, *caches) -> None:
        """Some node's path is kept of each row, in these caches and the texts."""
        paths = [tree.paths[self.random.randrange(tree.num_nodes)] for _ in self.texts]
        depth = tree.max_depth + 1
        padded = torch.tensor([list(path) + list(range(len(path), depth)) for path in paths])
        counts = torch.tensor([len(path) for path in paths])
        lengths = [len(text) + len(path) for text, path in zip(self.texts, paths)]
        for cache in caches:
            if not tree.is_chain:
                cache.move_accepted(padded, counts)
            cache.keep(lengths)
        self.steps.lengths = lengths
        for row, path in enumerate(paths):
            self.texts[row] += [tokens[row, node].item() for node in path]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_m01_a_node_sees_the_text_and_its_ancestors(name):
    """At the position that it would have in the text; round after round, whatever was kept of the trees before."""
    rounds = Rounds(name)
    for tree in map(tree_of, ("full 2x2x2", "chain of 5", "one drafted node")):
        tokens = rounds.draft(tree)
        got = rounds.steps.forward(tree, tokens)
        torch.testing.assert_close(got, rounds.expected(tree, tokens), rtol=1e-4, atol=1e-4)
        rounds.accept(tree, tokens, rounds.steps.cache)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", ["llama", "window of 8", "window of 3"])
@torch.no_grad()
def test_m01_what_is_kept_is_what_a_plain_forward_caches(name, block_size):
    """And nothing of the siblings: to the last column."""
    rounds = Rounds(name, block_size)
    cache = rounds.steps.cache
    for tree in map(tree_of, TREE_NAMES):
        tokens = rounds.draft(tree)
        rounds.steps.forward(tree, tokens)
        rounds.accept(tree, tokens, cache)
        for row, text in enumerate(rounds.texts):
            plain = DynamicCache(config=rounds.stock.config)
            rounds.stock(input_ids=torch.tensor([text]), **{CACHE_NAME: plain})
            for mine, theirs in zip(cache.layers, plain.layers, strict=True):
                for got, want in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                    length = min(got.shape[2], want.shape[2])
                    assert length or mine.sliding_window == 1
                    expected = want[0, :, want.shape[2] - length :]
                    torch.testing.assert_close(got[row, :, got.shape[2] - length :], expected, rtol=1e-5, atol=1e-5)
    assert cache.layout.lengths(cache.get_seq_length()) == list(map(len, rounds.texts))
    del cache, rounds.steps
    assert used_blocks(rounds.model) == 0
    assert_pool_accounts(rounds.model)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_captured_forward_equals_the_models_own(name):
    """Through the deferred mode with every rule, round after round; caches stay alike, too."""
    rounds = Rounds(name)
    own = rounds.steps.cache
    captured = copy.deepcopy(own)
    for tree in map(tree_of, ("full 2x2x2", "chain of 5", "63 nodes", "one drafted node")):
        tokens = rounds.draft(tree)
        expected = rounds.steps.forward(tree, tokens)
        got = tree_step(rounds.model, captured, tree, tokens, rounds.positions(tree), use_cache=True)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        rounds.accept(tree, tokens, own, captured)
        for (k, v, _), (own_k, own_v, _) in zip(captured, own, strict=True):
            torch.testing.assert_close(k, own_k, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(v, own_v, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_captured_forward_serves_other_trees_of_as_many_nodes():
    """Their shape is loaded before each replay."""
    rounds, graphs = Rounds("window of 8"), {}
    for parents in ((-1, 0, 0, 1, 1, 2), (-1, 0, 0, 0, 0, 0), (-1, 0, 1, 1, 2, 2)):
        tree = TokenTree(parents)
        captured = copy.deepcopy(rounds.steps.cache)
        tokens = rounds.draft(tree)
        expected = rounds.steps.forward(tree, tokens)
        rounds.steps.keep([0] * 4)
        got = tree_step(rounds.model, captured, tree, tokens, rounds.positions(tree), graphs, use_cache=True)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "window of 8"])
@torch.no_grad()
def test_a_captured_forward_reads_codes(name, kind):
    """Over the ends of blocks of a quantized cache."""
    rounds = Rounds(name, 32, (93, 127, 110, 96), kv_cache_dtype=kind)
    own = rounds.steps.cache
    captured = copy.deepcopy(own)
    for tree in map(tree_of, ("full 2x2x2", "chain of 5", "63 nodes", "64 nodes", "chain of 5")):
        tokens = rounds.draft(tree)
        expected = rounds.steps.forward(tree, tokens)
        got = tree_step(rounds.model, captured, tree, tokens, rounds.positions(tree), use_cache=True)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        rounds.accept(tree, tokens, own, captured)
    assert captured.groups[None].table.codes.rows[1]


@pytest.mark.parametrize("alone, serves", [(True, True), (True, False), (False, True)])
@torch.no_grad()
def test_whether_the_next_round_must_look_at_the_model(monkeypatch, alone, serves):
    """Not where a captured round has done so and no code of the caller's runs between them."""
    rounds, tree = Rounds("llama"), TokenTree.chain(2)
    steps, done = rounds.steps, object() if serves else None
    steps._alone = alone
    monkeypatch.setattr(handle_of(rounds.model).steps, "run_drafts", lambda *arguments: done)
    assert steps.forward_ahead(tree, rounds.draft(tree), None, 0, "key", None) is done
    assert steps.cache.model_is_as_it_was == (alone and serves)
