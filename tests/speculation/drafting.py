"""What the tests of drafted text share: pairs of models, drafters whose hits are chosen, and the comparison."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from helpers import assert_pool_accounts, generate, prompt, ragged, stepped_aside, used_blocks
from tiny_models import ZOO, build
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_turbo
from hf_turbo.cache.token_tree import TokenTree
from hf_turbo.compat import CACHE_NAME
from hf_turbo.generation.drafts import Draft
from hf_turbo.generation.expectation import OfTrees
from hf_turbo.generation.medusa import Medusa
from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.generation.pace import PaceStats
from hf_turbo.ops import reference
from hf_turbo.patching import handle_of

#: Shapes of drafts, as paths of ranks.
TREES = {
    "one drafted node": [(0,)],
    "chain of 5": [(0,) * n for n in range(1, 6)],
    "full 2x2x2": [path for n in (1, 2, 3) for path in itertools.product((0, 1), repeat=n)],
    "63 nodes": "mc_sim_7b_63",
    "64 nodes": [(rank,) for rank in range(21)]
    + [(rank, 0) for rank in range(21)]
    + [(rank, 0, 0) for rank in range(20)]
    + [(3, 0, 1)],
}

SINGLE = prompt(1, 9)
RAGGED = ragged(3, 9, 6, 12)


@dataclass
class Pair:
    """A stock model, the same one to patch, and the stock one's texts so far."""

    stock: Any
    model: Any
    texts: dict[Any, torch.Tensor] = field(default_factory=dict)

    def plain(self, inputs: Any, new_tokens: int, **options: Any) -> torch.Tensor:
        """What the stock model says, int64 `[rows, columns]`."""
        ids = inputs if isinstance(inputs, torch.Tensor) else inputs["input_ids"]
        key = (str(ids.tolist()), new_tokens, repr(options))
        if key not in self.texts:
            self.texts[key] = generate(self.stock, inputs, new_tokens, **options).sequences
        return self.texts[key]


@cache
def _pair(name: str, overrides: str) -> Pair:
    stock, model = (build(name, **eval(overrides)) for _ in range(2))
    return Pair(stock, model)


def pair(name: str, **overrides: Any) -> Pair:
    """The same pair for the same arguments: patch its second model anew before use."""
    return _pair(name, repr(overrides))


def truncated(name: str, **overrides: Any) -> Any:
    """The model's first layer alone, between the same embeddings and head: sometimes right."""
    layer_types = overrides.get("layer_types", ZOO[name].config.get("layer_types"))
    shorter = {} if layer_types is None else {"layer_types": layer_types[:1]}
    return build(name, **{**overrides, "num_hidden_layers": 1, **shorter})


def random_model(name: str, **overrides: Any) -> Any:
    """The same architecture with other weights: hardly ever right."""
    model = build(name, **overrides)
    values = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=values))
    return model


def heads_of(model: Any, folder: Any, num_heads: int = 4, **options: Any) -> Any:
    """Random Medusa heads for a model, in a folder."""
    config = model.config.get_text_config(decoder=True)
    heads = MedusaHeads(num_heads, 1, config.hidden_size, config.vocab_size, **options)
    values = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=values) * parameter.shape[-1] ** -0.5)
    heads.save_pretrained(folder)
    return folder


class Moves:
    """What `TokenAddresses` is on a GPU."""

    def __init__(self, layers):
        self.layers = layers

    def move(self, *where):
        reference.move_kv(self.layers, *where)


class Knowing:
    """A drafter that knows the texts, and says a random part of what it knows somewhere in a tree of rubbish.

    Args:
        texts: int64 `[rows, columns]`, prompts included.
        tree: the shape of its drafts.
        seed: of what is right and what is not.
        vocabulary: how many tokens the rubbish is of.
    """

    adaptive = False
    decides = False
    reads_hidden = False
    is_stale = False

    def __init__(self, texts: torch.Tensor, tree: TokenTree, seed: int = 0, vocabulary: int = 128) -> None:
        self.texts, self.tree, self.vocabulary = texts.tolist(), tree, vocabulary
        self.random = random.Random(seed)
        self.sizes = (max(tree.num_nodes - 1, 1),)

    def attach(self, model: Any) -> Knowing:
        return self

    def tree_of(self, size: int) -> TokenTree:
        return self.tree

    def cost(self, size: int) -> float:
        return 1.0

    def expectation(self) -> OfTrees:
        return OfTrees({self.sizes[0]: 1.0})

    def release(self) -> None: ...

    def serves(self, speculation: Any) -> bool:
        return speculation is self

    def begin(self, context: Any) -> Knowing:
        self.rows = list(range(context.texts.num_rows))
        return self

    def propose(self, size: int, texts: Any) -> Draft:
        drafts = []
        for row, length, last in zip(self.rows, texts.lengths, texts.last.tolist(), strict=True):
            tokens = [last] + [self.random.randrange(-1, self.vocabulary) for _ in range(self.tree.num_nodes - 1)]
            path = self.tree.paths[self.random.randrange(self.tree.num_nodes)]
            coming = self.texts[row % len(self.texts)][length:]
            for node, token in zip(path[1:], coming):
                tokens[node] = token
            drafts.append(tokens)
        return Draft(self.tree, torch.tensor(drafts), self.tree.max_depth * len(drafts))

    def begin_ahead(self, newest: Any = None) -> None:
        pass

    def learn(self, accepted: Any, num_nodes: int) -> None:
        pass

    def miss(self) -> None:
        pass

    def select(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def close(self) -> None:
        pass


def tell(model: Any, texts: torch.Tensor) -> None:
    """Other texts for the `Knowing` drafter of a patched model."""
    handle_of(model).speculation.drafter.texts = texts.tolist()


def tree_of(name: str) -> TokenTree:
    """One of `TREES`."""
    return TokenTree.of_paths(Medusa("", tree=TREES[name]).tree)


def stats(model: Any) -> PaceStats:
    """What the drafts of a model that has one drafter have come to."""
    [pace] = handle_of(model).drafters.values()
    return pace.stats()


def drafted(one: Pair, speculation: Any, block_size: int = 4, **options: Any) -> Any:
    """The pair's patched model, drafting."""
    return hf_turbo.patch(one.model, block_size=block_size, speculation=speculation, **options)


def assert_same_text(
    one: Pair, inputs: Any, new_tokens: int = 64, *, needs_drafts: bool = True, **options: Any
) -> PaceStats:
    """The model that `drafted` has made says what the stock one says, with drafts, and holds nothing afterwards.

    Args:
        needs_drafts: there must have been some; a short text may have nothing to repeat.

    Returns:
        The statistics of its drafts.
    """
    want = one.plain(inputs, new_tokens, **options)
    got = generate(one.model, inputs, new_tokens, **{"return_dict_in_generate": False, **options})
    assert got.dtype == want.dtype and torch.equal(got, want), f"{got.tolist()} is not {want.tolist()}"
    assert_drafted(one.model, needs_drafts)
    return stats(one.model)


def assert_drafted(model: Any, needs_drafts: bool = True) -> None:
    """There were drafts, nothing stepped aside, and no block is held."""
    assert not stepped_aside(model)
    drafters = handle_of(model).drafters.values()
    assert drafters and (not needs_drafts or any(pace.stats().rounds for pace in drafters))
    assert used_blocks(model) == 0
    assert_pool_accounts(model)


def assert_same_output(stock: Any, got: Any, mask: torch.Tensor, ends: Any = ()) -> None:
    """Dicts of `generate()`: text, scores and logits while a row's text goes on, and what the caches hold.

    Args:
        mask: of the prompt.
        ends: tokens that end a text, one or several.
    """
    ends = torch.tensor(ends).reshape(-1)
    new = stock.sequences[:, mask.shape[1] :]
    assert stock.keys() == got.keys()
    assert torch.equal(stock.sequences, got.sequences)
    for name in {"scores", "logits"} & stock.keys():
        assert len(stock[name]) == len(got[name])
        for i, (want, have) in enumerate(zip(stock[name], got[name])):
            goes_on = ~torch.isin(new[:, :i], ends).any(1)
            torch.testing.assert_close(have[goes_on], want[goes_on], rtol=1e-4, atol=1e-4)
            assert (have[~goes_on] == 0).all() and have.dtype == want.dtype
    assert_same_cache(stock[CACHE_NAME], got[CACHE_NAME], mask)


def assert_same_cache(stock: Any, got: Any, mask: torch.Tensor) -> None:
    """Lengths, and keys and values of the columns that both have and that are no padding."""
    assert got.get_seq_length() == stock.get_seq_length()
    for mine, theirs in zip(got.layers, stock.layers, strict=True):
        for have, want in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert have.shape == want.shape
            real = torch.nn.functional.pad(mask, (0, stock.get_seq_length() - mask.shape[1]), value=1).bool()
            real = real[:, real.shape[1] - have.shape[2] :]
            have, want = (x.transpose(1, 2)[real] for x in (have, want))
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of 128 letters, one a token."""
    known = [chr(33 + i) for i in range(94)] + [chr(0xC0 + i) for i in range(34)]
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(known)}, unk_token="!"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)
