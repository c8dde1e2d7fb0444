"""The loop for beam search against Transformers' own."""

import math

import pytest
import torch
from combinations import few
from helpers import assert_pool_accounts, generate, needs_gpu, prompt, ragged, twins, used_blocks
from loop_cases import CountingCriterion, CountingProcessor, assert_same, both, own_loops, stock_loops
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_turbo.compat import CACHE_NAME
from hf_turbo.generation import columns, mixin
from hf_turbo.generation.finished_beams import FinishedBeams

PLAIN, RAGGED = prompt(2, 11), ragged(3, 7, 12, 19)
EVERYTHING = {"output_scores": True, "output_logits": True}


@pytest.fixture(scope="module")
def pairs():
    made = {}

    def pair(name):
        if name not in made:
            made[name] = twins(name, block_size=4)
        return made[name]

    return pair


@pytest.fixture
def llama(pairs):
    return pairs("llama")[1]


@pytest.fixture(autouse=True)
def shortcuts_are_right(monkeypatch):
    """Wherever the search went on by a look, the whole account must have said so, too."""
    promised, last, add, look = [], [], FinishedBeams.add, FinishedBeams.surely_goes_on

    def checked_look(self, step):
        promised.append(look(self, step))
        last[:] = promised[-1:]
        return promised[-1]

    def checked_add(self, step):
        add(self, step)
        assert not (last and last.pop() and self.search_is_over)

    monkeypatch.setattr(FinishedBeams, "surely_goes_on", checked_look)
    monkeypatch.setattr(FinishedBeams, "add", checked_add)
    return promised


EOS = {"none": None, "early": [9], "many": list(range(40)), "most": list(range(3, 110)), "all": list(range(1, 127))}


@pytest.mark.parametrize(
    "length_penalty, early_stopping, eos", few([-1.0, 0.0, 1.5], [True, False, "never"], EOS, together=2)
)
def test_same_as_transformers_loop(pairs, early_stopping, length_penalty, eos):
    stock, model = pairs("llama")
    options = {
        "num_beams": 4, "num_return_sequences": 3, "early_stopping": early_stopping, "length_penalty": length_penalty,
        "eos_token_id": EOS[eos], **EVERYTHING,
    }  # fmt: skip
    expected, got = both(model, RAGGED, **options)
    assert_same(expected, got)
    assert torch.equal(generate(stock, RAGGED, 14, **options).sequences, got.sequences)


def test_those_searches_end_at_different_steps(llama):
    lengths = set()
    for eos in EOS.values():
        with own_loops():
            lengths.add(len(generate(llama, RAGGED, 14, num_beams=4, eos_token_id=eos, **EVERYTHING).scores))
    assert len(lengths) >= 3


@pytest.mark.parametrize("model_name", ["gemma3_text", "gpt2"])
@pytest.mark.parametrize("inputs", [PLAIN, RAGGED], ids=["plain", "ragged"])
def test_other_models(pairs, model_name, inputs):
    stock, model = pairs(model_name)
    options = {"num_beams": 3, "eos_token_id": list(range(3, 20)), **EVERYTHING}
    expected, got = both(model, inputs, **options)
    assert_same(expected, got)
    assert torch.equal(generate(stock, inputs, 14, **options).sequences, got.sequences)


WAYS = {
    "penalty": {"repetition_penalty": 1.4},
    "ngrams": {"no_repeat_ngram_size": 2, "eos_token_id": list(range(3, 40))},
    "min-new": {"min_new_tokens": 6, "eos_token_id": list(range(3, 110))},
    "one": {"max_new_tokens": 1},
    "two-beams": {"num_beams": 2, "eos_token_id": 9},
    "many-beams": {"num_beams": 16, "num_return_sequences": 16, "eos_token_id": list(range(3, 20))},
    "other-pad": {"pad_token_id": 5, "eos_token_id": list(range(3, 40))},
    "chunks": {"prefill_chunk_size": 6},
    "strong-penalty": {"length_penalty": -9.0, "eos_token_id": list(range(3, 20))},
    "forbidden": {"suppress_tokens": list(range(2, 126)), "eos_token_id": 1},
    "forced-end": {"forced_eos_token_id": 7, "eos_token_id": 7},
    "no-time": {"max_time": 0.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_asking(llama, monkeypatch, way):
    monkeypatch.setattr(columns, "_PIECE", 3)
    options = {"num_beams": 4, "num_return_sequences": 2, **EVERYTHING, **WAYS[way]}
    expected, got = both(llama, RAGGED, **options)
    assert_same(expected, got)


def test_few_allowed_tokens(llama):
    """Beams that can't go on have scores of -inf or -1e9: what counts as open, or finished, is up to those."""
    allowed = {"prefix_allowed_tokens_fn": None}
    for tokens in ([5], [5, 9], [1], [1, 5]):
        options = {"num_beams": 4, "eos_token_id": 1, "num_return_sequences": 4, **EVERYTHING}
        results = []
        for loops in (stock_loops, own_loops):
            allowed["prefix_allowed_tokens_fn"] = lambda row, ids, tokens=tokens: tokens
            with loops():
                results.append(generate(llama, PLAIN, 6, **options, **allowed))
        assert_same(*results)


def test_the_look_is_taken(llama, shortcuts_are_right):
    generate(llama, PLAIN, 10, num_beams=3)
    assert shortcuts_are_right == [True] * 9 + [False]


def test_without_a_dict(llama):
    expected, got = both(llama, PLAIN, num_beams=3, eos_token_id=[9, 10], return_dict_in_generate=False)
    assert torch.equal(expected, got)
    assert used_blocks(llama) == 0
    assert_pool_accounts(llama)


def test_sequences_without_scores(llama):
    expected, got = both(llama, PLAIN, num_beams=3)
    assert_same(expected, got)
    assert "sequences_scores" not in got
    assert "beam_indices" in got


def test_scores_add_up(llama):
    """Transformers' own check of what a beam search returns."""
    got = generate(llama, PLAIN, 10, num_beams=3, length_penalty=0.0, eos_token_id=list(range(3, 12)), **EVERYTHING)
    steps = llama.compute_transition_scores(got.sequences, got.scores, got.beam_indices)
    torch.testing.assert_close(steps.sum(1), got.sequences_scores)


def test_embeddings_as_prompt(llama):
    embeddings = llama.get_input_embeddings()(PLAIN).detach()
    inputs = {"inputs_embeds": embeddings, "attention_mask": torch.ones_like(PLAIN)}
    expected, got = both(llama, inputs, num_beams=3, eos_token_id=[9, 10], **EVERYTHING)
    assert_same(expected, got)


def test_the_returned_cache_goes_on(pairs):
    stock, model = pairs("gemma3_text")

    def two_turns(model):
        first = generate(model, PLAIN[:1], 12, num_beams=3)
        cache = first[CACHE_NAME]
        cache.reorder_cache(torch.tensor([0, 0, 0]))  # the running beams, whichever they are
        ids = torch.cat([first.sequences, prompt(1, 5)], dim=1)
        inputs = {"input_ids": ids.expand(3, -1), "attention_mask": torch.ones(3, ids.shape[1]), CACHE_NAME: cache}
        return generate(model, inputs, 10).sequences

    with own_loops():
        got = two_turns(model)
    assert torch.equal(two_turns(stock), got)


def test_a_processor_of_the_user_is_called_as_often(llama):
    processors = []

    def made():
        processors.append(CountingProcessor())
        return LogitsProcessorList([processors[-1]])

    expected, got = both(llama, RAGGED, num_beams=3, logits_processor=made, eos_token_id=[9, 10], **EVERYTHING)
    assert_same(expected, got)
    assert processors[0].lengths == processors[1].lengths


@pytest.mark.parametrize("kept", [{}, EVERYTHING], ids=["", "scores"])
def test_a_criterion_of_the_user_is_called_as_often(llama, kept):
    criteria = []

    def made():
        criteria.append(CountingCriterion(length=23))
        return StoppingCriteriaList([criteria[-1]])

    expected, got = both(llama, RAGGED, num_beams=3, stopping_criteria=made, eos_token_id=[9, 10], **kept)
    assert_same(expected, got)
    assert criteria[0].seen == criteria[1].seen


def test_a_criterion_sees_the_candidates_texts(llama):
    """Stops what contains a token of the prompt's own neighbourhood, so that the text itself decides."""

    class Repeats(CountingCriterion):
        def __call__(self, input_ids, scores, **kwargs):
            self.seen.append(input_ids.clone())
            return (input_ids[:, 11:-1] == input_ids[:, -1:]).any(1)

    criteria = []

    def made():
        criteria.append(Repeats(0))
        return StoppingCriteriaList([criteria[-1]])

    expected, got = both(llama, PLAIN, num_beams=3, stopping_criteria=made, **EVERYTHING)
    assert_same(expected, got)
    assert all(torch.equal(a, b) for a, b in zip(criteria[0].seen, criteria[1].seen, strict=True))


@pytest.mark.parametrize("options", [{"do_sample": True}, {"use_cache": False}], ids=["sampled", "no-cache"])
def test_what_is_out_of_reach_runs_transformers_loop(pairs, monkeypatch, options):
    stock, model = pairs("llama")

    def fail(*_):
        raise RuntimeError("our loop ran")

    monkeypatch.setattr(mixin, "beam_search", fail)
    results = []
    for each in (stock, model):
        torch.manual_seed(0)
        results.append(generate(each, PLAIN, 6, num_beams=3, **options).sequences)
    assert torch.equal(*results)


def test_few_operations_after_the_forward(llama):
    """Without processors: no more than the step needs, however long the text."""

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            views = ("view", "slice", "select", "unsqueeze", "t", "transpose", "expand", "split", "detach", "alias")
            self.count += name not in views and not name.startswith("_unsafe_view")
            return function(*args, **(kwargs or {}))

        count = 0

    from hf_turbo.generation import beam_loop

    ops = []
    choose = beam_loop._Beams.choose

    def counted(self, logits):
        with Counting() as mode:
            result = choose(self, logits)
        ops.append(mode.count)
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(beam_loop._Beams, "choose", counted)
        generate(llama, PLAIN, 20, num_beams=4, eos_token_id=9)
    assert max(ops) <= 14
    assert math.isclose(sum(ops[1:-1]) / (len(ops) - 2), ops[1])


@needs_gpu
@pytest.mark.parametrize("eos", EOS)
def test_same_as_transformers_loop_on_a_gpu(eos):
    _, model = twins("llama", block_size=16)
    model.to("cuda")
    inputs = {name: x.cuda() for name, x in RAGGED.items()}
    with stock_loops():
        expected = generate(model, inputs, 14, num_beams=4, eos_token_id=EOS[eos], **EVERYTHING)
    with own_loops():
        got = generate(model, inputs, 14, num_beams=4, eos_token_id=EOS[eos], **EVERYTHING)
    assert torch.equal(expected.sequences, got.sequences)
    assert torch.equal(expected.beam_indices, got.beam_indices)
    torch.testing.assert_close(expected.sequences_scores, got.sequences_scores)
    assert expected[CACHE_NAME].get_seq_length() == got[CACHE_NAME].get_seq_length()
