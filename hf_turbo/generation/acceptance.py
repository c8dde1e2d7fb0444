"""Which drafted tokens are kept: pure functions of a tree, its tokens and what the model says at each node.

Nothing here waits for the device, looks at a tensor's values on the host or makes a shape that depends on them, so a
CUDA graph can hold it; call `tree.tensors(device)` once before the capture. Throughout, B is the number of rows, N of
nodes, D the tree's greatest depth and V the vocabulary. `drafted` has the root's token at node 0, which is not read,
and -1 where there is no token: such a node is never accepted, nor what follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..cache.token_tree import TokenTree, TreeTensors


class Accepted(NamedTuple):
    """What one round adds to each row: `counts` drafted tokens and one more, the model's own."""

    #: int64 `[B, D + 1]`: the accepted tokens, then at `counts` the model's own, then -1.
    tokens: torch.Tensor
    #: int64 `[B, D + 1]`: the accepted node at each depth up to `counts`, beginning with the root; k beyond. Never
    #: less than k, so keys can be moved from place path[k] to k in ascending order within one buffer.
    path: torch.Tensor
    #: int64 `[B]`: how many drafted tokens are accepted.
    counts: torch.Tensor


def accept_greedy(tree: TokenTree, drafted: torch.Tensor, chosen: torch.Tensor) -> Accepted:
    """Keeps the longest path on which each token is what was chosen at its parent.

    Where several are as long, which takes siblings of one token, the first in the tree's order.

    Args:
        tree: the shape of the draft.
        drafted: int64 `[B, N]`.
        chosen: the model's token after each node, int64 `[B, N]`: its argmax.
    """
    _check(tree, drafted)
    tree_tensors = tree.tensors(drafted.device)
    agrees = (drafted == chosen[:, tree_tensors.parents]) & (drafted >= 0)
    last = _longest(tree_tensors, agrees)
    return _accepted(tree_tensors, drafted, last, chosen.gather(1, last.unsqueeze(1)))


def accept_matching(
    tree: TokenTree,
    drafted: torch.Tensor,
    choose: Callable[[int, torch.Tensor], torch.Tensor],
    all_ended: Callable[[torch.Tensor], bool] | None = None,
) -> Accepted:
    """Lets the model choose token after token, as long as what it chooses has been drafted.

    Every token is the model's own choice, so the text's distribution is the model's, whatever the draft is. Of
    siblings with one token the first is taken.

    Args:
        tree: the shape of the draft.
        drafted: int64 `[B, N]`.
        choose: called with a depth, 0 to D, and the node int64 `[B]` that each row has come to; answers with the
            token that follows, int64 `[B]`: sampled, or the likeliest, after any logits processors. Rows that have
            ended are at the node where they did; their answer is ignored.
        all_ended: looks at which rows have ended, bool `[B]`, after each depth; True ends the walk. Leave it out
            where that would wait for the device.
    """
    _check(tree, drafted)
    tree_tensors = tree.tensors(drafted.device)
    nodes = torch.zeros_like(drafted[:, 0])
    ended = torch.zeros_like(nodes, dtype=torch.bool)
    tokens = torch.full((drafted.shape[0], tree.max_depth + 1), -1, dtype=torch.int64, device=drafted.device)
    for depth in range(tree.max_depth + 1):
        chosen = choose(depth, nodes)
        tokens[:, depth] = chosen.masked_fill(ended, -1)
        if depth == tree.max_depth:
            break
        children = tree_tensors.children[nodes]
        said = drafted.gather(1, children.clamp_min(0))
        fits = (said == chosen.unsqueeze(1)) & (children >= 0) & (said >= 0)
        child = torch.where(fits, children, tree.num_nodes).amin(dim=1)
        ended = ended | (child == tree.num_nodes)
        nodes = torch.where(ended, nodes, child)
        if all_ended is not None and all_ended(ended):
            break
    return Accepted(tokens, tree_tensors.paths[nodes], tree_tensors.depths[nodes])


def accept_by_rejection(tree: TokenTree, drafted: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> Accepted:
    """Keeps sampled tokens so that the text's distribution is the target's: recursive rejection without replacement.

    At each node, with p the target's probabilities and q the draft's, its children are tried in order: token c is
    accepted with probability min(1, p(c) / q(c)). Once it is rejected, p becomes max(p - q, 0) and q loses c, both
    normalised. Where no child is accepted the next token is drawn from what p has become; after the last node of a
    path, from p there. With one child a node it is speculative sampling (arXiv:2211.17192, arXiv:2302.01318); with
    several see SpecInfer (arXiv:2305.09781), arXiv:2401.06706 and, without replacement, arXiv:2402.14160. Random
    numbers come from the device's default generator.

    Args:
        tree: the shape of the draft.
        drafted: int64 `[B, N]`. The children of a node must have been drawn from its `draft` without replacement, in
            their order; after one that has no token its later siblings are not tried, as what they were drawn from
            is not known. A token of which q has nothing (left) counts as none: a q of fewer tokens than the node has
            children has run out.
        target: the model's probabilities after each node, floats `[B, N, V]`, after temperature and filters.
        draft: the probabilities that each node's children were drawn from, floats `[B, N, V]`. Not read at nodes
            without children.
    """
    _check(tree, drafted, target, draft)
    tree_tensors = tree.tensors(drafted.device)
    rows = torch.arange(drafted.shape[0], device=drafted.device)
    nodes = torch.zeros_like(rows)
    p = target[:, 0].float()
    walks = torch.ones_like(nodes, dtype=torch.bool)
    for num_children in tree.most_children:
        q = draft[rows, nodes].float()
        children = tree_tensors.children[nodes]
        tries, following = walks, nodes
        for rank in range(num_children):
            child = children[:, rank]
            token = drafted.gather(1, child.clamp_min(0).unsqueeze(1))
            accepted, tries, p = _try_token(p, q, token, tries & (child >= 0))
            if rank + 1 < num_children:
                q = _without(q, token, tries)
            following = torch.where(accepted, child, following)
        nodes, walks = following, following != nodes
        p = torch.where(walks.unsqueeze(1), target[rows, nodes].float(), p)
    return _accepted(tree_tensors, drafted, nodes, sample(p))


def accept_typical(
    tree: TokenTree,
    drafted: torch.Tensor,
    logits: torch.Tensor,
    posterior_threshold: float,
    posterior_alpha: float,
    temperature: float,
) -> Accepted:
    """Keeps tokens that are typical of what the model would say (Medusa, arXiv:2401.10774, section 2.3.1).

    A token is accepted when its probability after its parent is above min(threshold, alpha * exp(-entropy)): in a
    place where many tokens are likely, a less likely one will do. The longest accepted path is kept; where several are
    as long, the first in the tree's order. The text's distribution is *not* the model's. The paper chooses the one
    token of the model's own greedily; here it follows the temperature: sampled from the last node's probabilities. At
    temperature 0 everything is greedy: the rule's limit, and the model's own greedy text.

    Args:
        tree: the shape of the draft.
        drafted: int64 `[B, N]`.
        logits: what the model says at each node, floats `[B, N, V]`, before the temperature.
        posterior_threshold: the paper's epsilon, a probability that is always enough.
        posterior_alpha: the paper's delta; its authors use the square root of epsilon.
        temperature: divides the logits; 0 is greedy.
    """
    _check(tree, drafted, logits)
    if temperature == 0:
        return accept_greedy(tree, drafted, logits.argmax(dim=-1))
    tree_tensors = tree.tensors(drafted.device)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    entropy = torch.special.entr(probabilities).sum(dim=-1)
    enough = (posterior_alpha * torch.exp(-entropy)).clamp_max(posterior_threshold)
    rows = torch.arange(drafted.shape[0], device=drafted.device)
    said = probabilities[rows.unsqueeze(1), tree_tensors.parents, drafted.clamp_min(0)]
    last = _longest(tree_tensors, (said > enough[:, tree_tensors.parents]) & (drafted >= 0))
    return _accepted(tree_tensors, drafted, last, sample(probabilities[rows, last]))


def _try_token(
    p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, tries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One trial of rejection sampling: who accepts and who rejects, bool `[B]`, and what p has become, `[B, V]`.

    Args:
        p: what the token should come from, `[B, V]`.
        q: what it was drawn from, `[B, V]`.
        token: what is tried, int64 `[B, 1]`; where it is none, nothing is accepted or rejected.
        tries: which rows try, bool `[B]`; nothing changes for the others.
    """
    place = token.clamp_min(0)
    p_token, q_token = p.gather(1, place).squeeze(1), q.gather(1, place).squeeze(1)
    tries = tries & (token.squeeze(1) >= 0) & (q_token > 0)
    accepted = tries & (torch.rand_like(q_token) * q_token < p_token)
    rejected = tries & ~accepted
    residual = (p - q).clamp_min(0)
    total = residual.sum(dim=1, keepdim=True)
    # Nothing left is rounding: p and q were equal there, and p itself is as good.
    return accepted, rejected, torch.where(rejected.unsqueeze(1) & (total > 0), residual / total, p)


def _without(q: torch.Tensor, token: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """What the next token was drawn from in rows that rejected one, `[B, V]`; NaN where q had no other."""
    rest = q.scatter(1, token.clamp_min(0), 0.0)
    return torch.where(rejected.unsqueeze(1), rest / rest.sum(dim=1, keepdim=True), q)


def sample(probabilities: torch.Tensor) -> torch.Tensor:
    """One token a row, int64 `[B, 1]`: a race of exponential clocks, as `torch.multinomial` is, without its checks."""
    noise = torch.empty_like(probabilities).exponential_(1)
    return (probabilities / noise).argmax(dim=1, keepdim=True)


def _longest(tree: TreeTensors, agrees: torch.Tensor) -> torch.Tensor:
    """The last node of the longest path of which all nodes agree, int64 `[B]`; the first of several as long.

    Args:
        agrees: bool `[B, N]`; changed: the root always agrees.
    """
    agrees[:, 0] = True
    reached = agrees[:, tree.ancestors].all(dim=-1)
    return (reached * tree.preference).argmax(dim=1)


def _accepted(tree: TreeTensors, drafted: torch.Tensor, last: torch.Tensor, own: torch.Tensor) -> Accepted:
    """Everything up to the last accepted nodes, int64 `[B]`, and then the model's own tokens, int64 `[B, 1]`."""
    path, counts = tree.paths[last], tree.depths[last]
    steps = tree.paths[0]
    left = counts.unsqueeze(1) - steps
    tokens = torch.cat([drafted.gather(1, path[:, 1:]), own], dim=1)
    tokens = torch.where(left == 0, own, tokens).masked_fill(left < 0, -1)
    return Accepted(tokens, path, counts)


def _check(tree: TokenTree, drafted: torch.Tensor, *by_node: torch.Tensor) -> None:
    if drafted.ndim != 2 or drafted.shape[1] != tree.num_nodes:
        raise ValueError(f"`drafted` must be [rows, {tree.num_nodes}] for this tree, not {list(drafted.shape)}.")
    for x in by_node:
        if x.ndim != 3 or x.shape[:2] != drafted.shape:
            wanted = f"[{drafted.shape[0]}, {tree.num_nodes}, vocabulary]"
            raise ValueError(f"Each node needs numbers for the vocabulary, {wanted}, not {list(x.shape)}.")
