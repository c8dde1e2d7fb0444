"""Hidden states and targets: which position guesses what, and that pads are nobody's."""

import pytest
import tiny_models
import torch
from torch import nn

from hf_turbo import patch
from hf_turbo.training.base_model import frozen, hidden_states_of, pad
from hf_turbo.training.continuations import Text
from hf_turbo.training.examples import NO_TARGET, Batches, Examples, make_examples, num_examples, targets_of

TEXTS = [Text([5, 6, 7, 8, 9, 10], 2), Text(list(range(20, 40)), 7), Text([3, 4], 1), Text([50, 51, 52], 1)]


def examples_of(model, texts, tmp_path, batch_size=8):
    done = []
    with frozen(model):
        found = make_examples(model, texts, 3, batch_size, tmp_path / "spill", done.append)
    assert sum(done) == len(texts)
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_head_i_at_position_t_guesses_token_t_plus_2_plus_i(text):
    tokens, prompt = text
    expected = [
        [tokens[t + 2 + i] if t + 2 + i < len(tokens) else NO_TARGET for i in range(4)]
        for t in range(prompt - 1, len(tokens) - 2)
    ]
    found = targets_of(text, 4)
    assert found.dtype == torch.int64 and found.tolist() == expected
    assert num_examples(text) == len(expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "cohere", "qwen2_moe"])
@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
def test_hidden_states_are_what_the_output_embedding_reads_without_pads(tmp_path, name, patched):
    overrides = {"word_embed_proj_dim": 16} if name == "opt" else {}
    model = tiny_models.build(name, **overrides)
    found = examples_of(patch(model) if patched else model, TEXTS, tmp_path)
    alone = tiny_models.build(name, **overrides)
    at = 0
    for text in sorted(TEXTS, key=lambda text: len(text.tokens)):
        seen = []
        hook = alone.get_output_embeddings().register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append(args[0])
        )
        with torch.no_grad():
            alone(torch.tensor([text.tokens]))
        hook.remove()
        end = at + num_examples(text)
        torch.testing.assert_close(found.hidden[at:end], seen[0][0, text.num_prompt_tokens - 1 : -2])
        assert torch.equal(found.targets[at:end], targets_of(text, 3))
        at = end
    assert at == len(found.hidden) == len(found.targets)
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_pads_change_nothing(tmp_path):
    model = tiny_models.build("llama")
    together = examples_of(model, TEXTS, tmp_path)
    alone = examples_of(model, TEXTS, tmp_path, batch_size=1)
    torch.testing.assert_close(together.hidden, alone.hidden)
    assert torch.equal(together.targets, alone.targets)


def test_examples_outlive_the_next_ones(tmp_path):
    model = tiny_models.build("llama")
    first = examples_of(model, TEXTS, tmp_path)
    kept = first.hidden.clone()
    examples_of(model, TEXTS[:1], tmp_path)
    assert torch.equal(first.hidden, kept)


class LastOnly(nn.Module):
    """A model that gives its output embedding the last position only."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 8)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache):
        return self.head(input=input_ids[:, -1:, None].expand(-1, -1, 4).float())


def test_a_model_that_hides_its_states():
    model = LastOnly()
    with hidden_states_of(model) as compute, pytest.raises(NotImplementedError, match=r"LastOnly .* but \[1, 1, 4\]"):
        compute([[1, 2, 3]])
    assert not model.head._forward_pre_hooks


@pytest.mark.parametrize("left", [False, True])
def test_padding(left):
    ids, mask = pad([[5, 6, 7], [8]], torch.device("cpu"), left=left)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8] if left else [8, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1] if left else [1, 0, 0]]


def numbered(size):
    return Examples(torch.arange(size).float().unsqueeze(1), torch.arange(size).unsqueeze(1))


def test_every_epoch_has_every_example_once():
    batches = Batches(numbered(10), 4, seed=3)
    rows = torch.cat([batches[number].targets[:, 0] for number in range(5)])
    assert sorted(rows[:10].tolist()) == sorted(rows[10:].tolist()) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()
    assert all(torch.equal(batches[n].hidden[:, 0].long(), batches[n].targets[:, 0]) for n in range(5))


def test_a_batch_depends_on_its_number_and_the_seed_alone():
    batches, others = Batches(numbered(10), 4, seed=3), Batches(numbered(10), 4, seed=4)
    in_order = [batches[number].targets.tolist() for number in range(6)]
    assert [Batches(numbered(10), 4, seed=3)[number].targets.tolist() for number in (5, 2)] == [
        in_order[5],
        in_order[2],
    ]
    assert others[0].targets.tolist() != in_order[0]
    assert len(Batches(numbered(3), 8, seed=0)[1].targets) == 8  # larger than an epoch
