"""Where drafted tokens stand: at their depth behind each row's text, and never beyond its last place."""

import pytest
import torch
from helpers import ragged, twins

import hf_turbo
from hf_turbo.cache.token_tree import TokenTree
from hf_turbo.generation.tree_steps import TreeSteps

NEW = 20
TREES = [TokenTree.chain(0), TokenTree.chain(7), TokenTree.of_paths([[0], [1], [0, 0]])]


@pytest.mark.parametrize("kept", [[0, 1, 2], [2, 0]])
def test_positions_end_where_texts_do(monkeypatch, kept):
    """Positions are only compared with the last one where the host can't say that they stay below it."""
    _, model = twins("llama", block_size=4)
    hf_turbo.patch(model, block_size=4, speculation=hf_turbo.PromptLookup())
    seen = []
    monkeypatch.setattr(TreeSteps, "close", lambda steps: seen.append(steps))
    model.generate(**ragged(9, 6, 12), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    [steps] = seen
    first, last = [9, 6, 12], 12 + NEW - 1
    if kept != [0, 1, 2]:
        for tree in TREES:  # what is kept of them is of these rows
            steps._arguments(tree, torch.zeros(3, tree.num_nodes, dtype=torch.int64), torch.tensor(first))
        steps.select(kept)
    for new in range(NEW + 12):
        for ahead in (0, 1, 9):
            steps.lengths = [first[row] + max(new - i, 0) for i, row in enumerate(kept)]
            lengths = torch.tensor(steps.lengths) + torch.tensor([ahead, 0, min(ahead, 1)])[: len(kept)]
            for tree in TREES:
                tokens = torch.zeros(len(kept), tree.num_nodes, dtype=torch.int64)
                positions = steps._arguments(tree, tokens, lengths, ahead)["position_ids"]
                wanted = [[min(n + depth, last) for depth in tree.depths] for n in lengths.tolist()]
                assert positions.view(tokens.shape).tolist() == wanted
