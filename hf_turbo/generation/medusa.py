"""Drafts of Medusa heads: trees of their best guesses for the next few places, and of what the text repeats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from ..cache.token_tree import MAX_NODES, TokenTree
from ..modeling.head_input import HeadInput, make_watchable
from ..ops.dispatch import linear, serves_linear, tree_tokens
from ..ops.reference_drafts import MAX_MATCH
from ..ops.reference_heads import head_by_head
from ..ops.reference_rounds import Round
from .acceptance import Accepted
from .device_texts import SpareTexts
from .drafts import Draft, DraftContext, Guesses, cost_to_verify
from .expectation import OfTrees
from .medusa_heads import MedusaHeads, is_plain_linear, output_projection
from .medusa_trees import PUBLISHED_TREES, Repeats, expected_length, search_tree
from .paced import most_drafted
from .repeats import DeviceRepeats, HostRepeats, best_path
from .texts import Texts

#: Nodes of a tree where nothing else is asked for, and the tree of heads whose accuracies are not known.
_NUM_NODES = 16
_PUBLISHED = "mc_sim_7b_63"
#: Drafted tokens of the smaller trees that are tried: few, as a captured step serves one.
_SIZES = (3, 7, 15, 31)
#: What trees are chosen by. In what SmolLM2 answers to Spec-Bench's 13 kinds of questions there is a match of two
#: tokens or more at 0.46 of all places, and 0.75, 0.82, 0.86 of what followed is right, each of those before; but some
#: kinds repeat much more than others.
_REPEATS = Repeats(share=0.3, rate=0.7)


class Medusa:
    """Medusa heads (Cai et al., arXiv:2401.10774), from a folder, a file or an id of the Hugging Face Hub.

    Args:
        path: as of `MedusaHeads.from_pretrained`.
        num_nodes: of a tree that is chosen by the accuracies that were measured with the heads, the root included; up
            to 64. Heads without such get Medusa's published tree.
        tree: paths of ranks, as Medusa publishes its trees (`medusa_choices`), or the name of one of those, in place
            of that. What asks for more heads or ranks than there are is left out.
        adaptive: trees of 4, 8, 16, 32 and `num_nodes` nodes are drafted, whichever gives the most tokens a second;
            none where none pays. A tree that was asked for, or is published, is drafted as a whole or not at all.
        typical: where tokens are sampled, accept guesses that are typical of the model (the paper's section 2.3.1):
            the probability that is always enough, and the factor of exp(-entropy) that is enough where many tokens are
            likely; (0.09, 0.3) in the paper. More is accepted, and the text's distribution is not the model's any more.
            Not with processors that read the text, such as a repetition penalty. None: exactly.
        min_match: where the last tokens of a text, so many at least, have been in it before, what followed takes the
            place of the heads' best guesses, as in prompt lookup; 1 to 16. A tree that is chosen by accuracies is
            chosen for that. None: the heads alone.

    Raises:
        ValueError: an argument is not allowed.
    """

    def __init__(
        self,
        path: str | Path,
        num_nodes: int = _NUM_NODES,
        tree: Sequence[Sequence[int]] | str | None = None,
        adaptive: bool = True,
        typical: tuple[float, float] | None = None,
        min_match: int | None = 2,
    ) -> None:
        if min_match is not None and (not isinstance(min_match, int) or not 1 <= min_match <= MAX_MATCH):
            raise ValueError(f"min_match={min_match!r}: 1 to {MAX_MATCH} tokens, or None for the heads alone")
        if typical is not None and (len(typical) != 2 or not all(0 < x <= 1 for x in typical)):
            raise ValueError(f"typical={typical!r}: a threshold and a factor, both above 0 and at most 1")
        if not isinstance(num_nodes, int) or not 2 <= num_nodes <= MAX_NODES:
            raise ValueError(f"num_nodes={num_nodes!r}: a tree has 2 to {MAX_NODES} nodes, the root included")
        if isinstance(tree, str):
            if tree not in PUBLISHED_TREES:
                raise ValueError(f"tree={tree!r}: the published ones are {', '.join(PUBLISHED_TREES)}")
            tree = PUBLISHED_TREES[tree]
        if tree is not None:
            TokenTree.of_paths(tree)
        self.path, self.num_nodes, self.tree, self.adaptive = path, num_nodes, tree, adaptive
        self.typical, self.min_match = typical, min_match

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> Medusa:
        """The same, by the name that Transformers uses. The heads are read when a model is patched with them."""
        return cls(path, **options)

    def __repr__(self) -> str:
        shape = f"num_nodes={self.num_nodes}" if self.tree is None else f"tree of {len(self.tree)} paths"
        typical = "" if self.typical is None else f", typical={self.typical}"
        return f"Medusa({str(self.path)!r}, {shape}, adaptive={self.adaptive}{typical}, min_match={self.min_match})"

    @property
    def repeats(self) -> Repeats | None:
        """What is expected of texts that repeat themselves, if that is looked at."""
        return None if self.min_match is None else _REPEATS

    def attach(self, model: Any) -> MedusaDrafter:
        """Reads the heads for a model, and lets them see what its own head is given.

        Raises:
            ValueError: no heads are there, or they don't fit the model.
        """
        heads = MedusaHeads.from_pretrained(self.path, model)
        tree = self._tree(heads, most_drafted(model))
        longest = tree.num_nodes - 1
        is_searched = self.tree is None and heads.accuracies is not None  # so each beginning is the best of its size
        smaller = [size for size in _SIZES if size < longest] if self.adaptive and is_searched else []
        if (change := make_watchable(model)) is not None:
            model._hf_turbo.undo.append(change)
        return MedusaDrafter(model, heads, tree, (*smaller, longest), self)

    def _tree(self, heads: MedusaHeads, most: int) -> TokenTree:
        """`most`: tokens in a row that the model can be asked to verify; a tree of one's own may ask for more."""
        longest = heads.num_heads
        if self.tree is not None:
            tree = TokenTree.of_paths(self.tree)
        elif heads.accuracies is None:
            tree = TokenTree.of_paths(PUBLISHED_TREES[_PUBLISHED])
        else:  # no rank counts for more than those before it, so that siblings are found in their order
            accuracies = [[*accumulate(ranks, min)] for ranks in heads.accuracies]
            tree = TokenTree.of_paths(search_tree(accuracies, self.num_nodes - 1, self.repeats), as_given=True)
            longest = min(max(longest, tree.max_depth), most)
        tree = tree.pruned(longest, heads.vocab_size - 1)
        if tree.num_nodes == 1:
            raise ValueError(f"nothing is left of the tree with {heads.num_heads} heads")
        return tree


class MedusaDrafter:
    """Heads that have been read for a model.

    Args:
        model: whose heads they are.
        heads: in the model's dtype, on its device.
        tree: what is made of their guesses.
        sizes: how many of its tokens may be drafted, from the first on, ascending.
        asked: for.
    """

    decides = False
    reads_hidden = True
    keeps_text = False

    def __init__(
        self, model: Any, heads: MedusaHeads, tree: TokenTree, sizes: tuple[int, ...], asked: Medusa
    ) -> None:
        self.tree, self.sizes, self.adaptive, self.typical = tree, sizes, asked.adaptive, asked.typical
        self.min_match, self.num_columns = asked.min_match, tree.num_nodes
        self._asked = asked
        self._heads = heads
        self._project = output_projection(model)
        self._fuses = model._hf_turbo.config.fused_layers
        self._num_ranks = max(tree.ranks) + 1
        self._num_heads = min(heads.num_heads, tree.max_depth)
        # Each node's head and rank. Beyond the heads, nodes are there for what the text repeats: any guess will do.
        self._places = torch.tensor([[min(depth, self._num_heads) - 1 for depth in tree.depths], tree.ranks])
        self._best_path = torch.tensor(best_path(tree), dtype=torch.int64)  # none where no best guess is tried
        self._spare = SpareTexts(len(self._best_path), asked.min_match or 1)

    def cost(self, size: int) -> float:
        """Of verifying it."""
        return cost_to_verify(size + 1)

    def expectation(self) -> OfTrees:
        """By the accuracies of the heads; of those without any, that a tree brings one token."""
        paths = [[self.tree.ranks[node] for node in path[1:]] for path in self.tree.paths[1:]]
        known, repeats = self._heads.accuracies, self._asked.repeats
        promised = dict.fromkeys(self.sizes, 0.0)
        if known is not None:
            promised = {size: expected_length(paths[:size], known, repeats) - 1 for size in self.sizes}
        return OfTrees({size: tokens if tokens > 0 else 1.0 for size, tokens in promised.items()})

    def tree_of(self, size: int) -> TokenTree:
        """The beginning of the tree."""
        return self.tree.beginning(size + 1)

    def serves(self, speculation: Any) -> bool:
        """Heads are read once for a model."""
        return vars(speculation) == vars(self._asked)

    def release(self) -> None:
        """Of texts on the device."""
        self._spare.clear()

    def begin(self, context: DraftContext) -> _Session:
        """Reads the prompt's last hidden states."""
        if context.head_input is None:
            raise ValueError("Medusa heads need what the model's head is given")
        repeats: HostRepeats | DeviceRepeats | None = None
        if self.min_match is not None:
            ahead = context.goes_ahead
            repeats = DeviceRepeats(context, self, self._spare) if ahead else HostRepeats(context, self)
        return _Session(self, context.head_input, repeats)

    def columns_of_repeats(self, device: torch.device) -> torch.Tensor:
        """Nodes that what followed takes the place of, one after another, int64 `[tokens]`.

        The first call for a device copies from the host: make it before a CUDA graph is captured.
        """
        if self._best_path.device != device:
            self._best_path = self._best_path.to(device)
        return self._best_path

    def follow(self, after: Round, out: Sequence[torch.Tensor]) -> None:
        """See `Guesses`."""
        self.guess(after.hidden, out[0][:, 0], out)

    def skip(self, after: Round) -> None:
        """See `Guesses`."""

    @torch.no_grad()
    def guess(
        self, hidden: torch.Tensor | None, roots: torch.Tensor, out: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """The whole tree's tokens, int64 `[rows, nodes]`, without what the text repeats.

        Args:
            hidden: `[rows, hidden_size]`, what the newest tokens were chosen by.
            roots: the rows' newest tokens, int64 `[rows]`; they may be a column of `out`.
            out: up to two tensors to leave them in, as of `tree_tokens`.
        """
        if hidden is None:
            raise ValueError("Medusa heads need what the model's head is given")
        logits = self._logits(self._heads.features(hidden, self._num_heads))
        if self._places.device != logits.device:
            self._places = self._places.to(logits.device)
        heads, ranks = self._places
        return tree_tokens(logits, roots, heads, ranks, self._num_ranks, out)

    def _logits(self, features: torch.Tensor) -> torch.Tensor:
        """`[rows, heads, vocabulary]` of what the blocks gave, `[rows, heads, hidden_size]`."""
        if self._heads.projections is not None:
            return head_by_head(features, self._heads.projections[: self._num_heads])
        project, rows = self._project, features.flatten(0, 1)
        if self._fuses and is_plain_linear(project, rows.device):
            weight: Any = project.weight
            if serves_linear(len(rows), [weight], rows.dtype, rows.device, activation=False):
                logits = linear(rows, [weight], [project.bias])
                return logits.view(*features.shape[:2], -1)
        return project(features)


class _Session:
    def __init__(
        self, drafter: MedusaDrafter, watch: HeadInput, repeats: HostRepeats | DeviceRepeats | None
    ) -> None:
        self._drafter, self._watch, self._repeats = drafter, watch, repeats
        self._has_missed = False
        self._hidden = watch.take()[:, -1]  # [rows, hidden_size], which the newest tokens are chosen by

    @property
    def is_stale(self) -> bool:
        return self._has_missed or (self._repeats is not None and self._repeats.is_outgrown)

    def propose(self, size: int, texts: Texts) -> Draft | None:
        drafter = self._drafter
        tree, tokens = drafter.tree_of(size), drafter.guess(self._hidden, texts.last)
        if self._repeats is not None:
            self._repeats.lay_over(tokens, texts)
        return Draft(tree, tokens[:, : tree.num_nodes], tree.max_depth * texts.num_rows, typical=drafter.typical)

    def begin_ahead(self, newest: torch.Tensor | None = None) -> Guesses:
        return self._drafter if self._repeats is None else self._repeats.begin_ahead(newest)

    def learn(self, accepted: Accepted, num_nodes: int) -> None:
        hidden = self._watch.take()
        hidden = hidden.reshape(-1, num_nodes, hidden.shape[-1])
        last = accepted.path.gather(1, accepted.counts.unsqueeze(1)).unsqueeze(2)
        self._hidden = hidden.gather(1, last.expand(-1, 1, hidden.shape[-1]))[:, 0]
        self._has_missed = False
        self._change()

    def miss(self) -> None:
        self._has_missed = True
        self._change()

    def select(self, rows: Sequence[int]) -> None:
        self._hidden = self._hidden[torch.tensor(rows, device=self._hidden.device)]
        if self._repeats is not None:
            self._repeats.select(rows)

    def close(self) -> None:
        if self._repeats is not None:
            self._repeats.close()

    def _change(self) -> None:
        if self._repeats is not None:
            self._repeats.change()
