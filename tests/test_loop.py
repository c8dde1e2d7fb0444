"""The loop for greedy and sampled text against Transformers' own, at once and one step behind."""

from unittest.mock import patch

import pytest
import torch
from helpers import assert_pool_accounts, forward, generate, needs_gpu, prompt, ragged, twins, used_blocks
from loop_cases import CountingCriterion, CountingProcessor, assert_same, both, own_loops, stock_loops
from tiny_models import PAD
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_turbo.compat import CACHE_NAME
from hf_turbo.generation import columns, loop, mixin, step
from hf_turbo.generation.choice import Choice

PLAIN, RAGGED = prompt(2, 11), ragged(3, 7, 12, 19)
EVERYTHING = {"output_scores": True, "output_logits": True}


@pytest.fixture(params=[False, True], ids=["at-once", "behind"])
def behind(request, monkeypatch):
    """Whether verdicts are read one step late, as on a GPU."""
    monkeypatch.setattr(loop, "runs_ahead", lambda device: request.param)
    return request.param


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


def early_eos(model, inputs, **options):
    """Tokens that end each row of the greedy text a few steps before its length, at different steps."""
    with stock_loops():
        sequences = generate(model, inputs, 14, **options).sequences
    return [row[-4 - 2 * i].item() for i, row in enumerate(sequences)]


WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "warped": {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.4},
    "penalised-sampled": {"do_sample": True, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "typical_p": 0.9},
    "min-length": {"min_length": 21},
    "min-new": {"min_new_tokens": 12, "do_sample": True},
    "max-length": {"max_new_tokens": None, "max_length": 23},
    "other-pad": {"pad_token_id": 5},
    "one": {"max_new_tokens": 1},
    "bad-words": {"bad_words_ids": [[7], [9, 10]], "suppress_tokens": [3, 4]},
    "copies": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize(
    ("model_name", "inputs", "way"),
    [("llama", "ragged", way) for way in WAYS]
    + [("llama", "plain", way) for way in ("greedy", "sampled")]
    + [(model, "ragged", way) for model in ("gemma3_text", "gpt2") for way in ("greedy", "sampled", "copies")],
)
def test_same_as_transformers_loop(pairs, behind, model_name, inputs, way):
    stock, model = pairs(model_name)
    inputs = {"plain": PLAIN, "ragged": RAGGED}[inputs]
    options = {"eos_token_id": early_eos(model, inputs), **EVERYTHING, **WAYS[way]}
    expected, got = both(model, inputs, **options)
    assert_same(expected, got)
    torch.manual_seed(5)
    assert torch.equal(generate(stock, inputs, 14, **options).sequences, got.sequences)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("eos", ["one", "list", "none", "never"])
def test_eos_ends_at_the_same_token(llama, behind, eos, do_sample):
    """One row: the first that ends is the last."""
    torch.manual_seed(5)  # as `both`
    ends = early_eos(llama, PLAIN[:1], do_sample=do_sample)
    token = {"one": ends[0], "list": [1, *ends, 2], "none": None, "never": 127}[eos]
    expected, got = both(llama, PLAIN[:1], eos_token_id=token, do_sample=do_sample, **EVERYTHING)
    assert_same(expected, got)
    assert (got.sequences.shape[1] < 25) == (eos in ("one", "list"))
    if eos in ("one", "list"):
        assert got.sequences[0, -1] == ends[0]


def test_a_step_that_is_taken_back_is_really_launched(llama, behind):
    """So that the tests above show something."""
    steps = []
    hook = llama.register_forward_pre_hook(lambda *_: steps.append(1))
    try:
        got = generate(llama, PLAIN, 14, eos_token_id=early_eos(llama, PLAIN))
        steps.clear()
        got = generate(llama, PLAIN, 14, eos_token_id=early_eos(llama, PLAIN))
        launched = len(steps) - 14  # those of early_eos
    finally:
        hook.remove()
    assert got.sequences.shape[1] < 25
    assert launched == got.sequences.shape[1] - 11 + behind


def test_no_step_beyond_the_length(llama, behind):
    steps = []
    hook = llama.register_forward_pre_hook(lambda *_: steps.append(1))
    try:
        generate(llama, PLAIN, 6, eos_token_id=127)
    finally:
        hook.remove()
    assert len(steps) == 6


def test_without_a_dict(llama, behind):
    eos = early_eos(llama, PLAIN)
    expected, got = both(llama, PLAIN, eos_token_id=eos, return_dict_in_generate=False)
    assert torch.equal(expected, got)
    assert got.untyped_storage().nbytes() == 8 * got.numel()
    assert used_blocks(llama) == 0
    assert_pool_accounts(llama)


@pytest.mark.parametrize("model_name", ["llama", "gemma3_text", "mistral"])
def test_the_returned_cache_goes_on(pairs, behind, model_name):
    """Windows of 8, and a first turn that may leave one token too many in them."""
    stock, model = pairs(model_name)

    def two_turns(model):
        first = generate(model, RAGGED, 14, eos_token_id=eos)
        ids = torch.cat([first.sequences, prompt(4, 5)], dim=1)
        extra = ids.shape[1] - RAGGED["input_ids"].shape[1]
        mask = torch.cat([RAGGED["attention_mask"], torch.ones(4, extra, dtype=torch.long)], dim=1)
        inputs = {"input_ids": ids, "attention_mask": mask, CACHE_NAME: first[CACHE_NAME]}
        return first.sequences, generate(model, inputs, 10).sequences

    eos = early_eos(model, RAGGED)
    with own_loops():
        got = two_turns(model)
    assert got[0].shape[1] < 19 + 14
    for expected, ours in zip(two_turns(stock), got, strict=True):
        assert torch.equal(expected, ours)


def test_tokens_can_be_taken_back_from_a_cache_that_records(pairs, behind):
    _, model = pairs("mistral")
    with torch.no_grad():
        cache = model._hf_turbo.new_cache()
        cache.activate_past_recording()
    eos = early_eos(model, PLAIN)
    inputs = {"input_ids": PLAIN, "attention_mask": torch.ones_like(PLAIN), CACHE_NAME: cache}
    got = generate(model, inputs, 14, eos_token_id=eos)
    length = got[CACHE_NAME].get_seq_length()
    assert length == got.sequences.shape[1] - 1
    got[CACHE_NAME].crop(-9)
    assert cache.get_seq_length() == length - 9


def test_embeddings_as_prompt(llama, behind):
    embeddings = llama.get_input_embeddings()(PLAIN).detach()
    mask = torch.ones_like(PLAIN)
    inputs = {"inputs_embeds": embeddings, "attention_mask": mask}
    expected, got = both(llama, inputs, repetition_penalty=1.3, **EVERYTHING)
    assert_same(expected, got)
    assert got.sequences.shape == (2, 14)


def test_prompt_in_chunks(llama, behind):
    expected, got = both(llama, RAGGED, prefill_chunk_size=6)
    assert_same(expected, got)


@pytest.mark.parametrize("length", [1, 600])
def test_longer_than_a_buffer(llama, behind, monkeypatch, length):
    monkeypatch.setattr(columns, "_PIECE", 3)
    monkeypatch.setattr(step, "_POSITIONS", 4)
    expected, got = both(llama, prompt(2, length), 17, do_sample=True, repetition_penalty=1.1)
    assert_same(expected, got)


def test_mask_with_holes_over_a_given_cache(llama, behind):
    """Such a mask is read at each step: ones at its end don't tell what is before them."""
    ids, mask = prompt(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, 4:7] = 0

    def inputs():
        with torch.no_grad():
            cache = llama._hf_turbo.new_cache()
            forward(llama, ids[:, :2], cache=cache)
        return {"input_ids": ids, "attention_mask": mask, CACHE_NAME: cache}

    with stock_loops():
        expected = generate(llama, inputs(), 8).sequences
    with own_loops():
        got = generate(llama, inputs(), 8).sequences
    assert torch.equal(expected, got)
    assert not torch.equal(generate(llama, ids, 8).sequences, got)


def test_positions_of_ones_own(llama, behind):
    inputs = {"input_ids": PLAIN, "attention_mask": torch.ones_like(PLAIN), "position_ids": torch.arange(3, 14)[None]}
    expected, got = both(llama, inputs, **EVERYTHING)
    assert_same(expected, got)


class Recorder(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        assert value.device.type == "cpu"
        self.seen.append(value.clone())

    def end(self):
        self.seen.append("end")


@pytest.mark.parametrize("eos", ["early", "none"])
def test_streamer_gets_each_token_once_and_none_after_the_end(llama, behind, eos):
    token = early_eos(llama, PLAIN[:1]) if eos == "early" else None
    streamer, stock = Recorder(), Recorder()
    with stock_loops():
        generate(llama, PLAIN[:1], 14, eos_token_id=token, streamer=stock)
    with own_loops():
        got = generate(llama, PLAIN[:1], 14, eos_token_id=token, streamer=streamer)
    assert streamer.seen.pop() == stock.seen.pop() == "end"
    assert [x.tolist() for x in streamer.seen] == [x.tolist() for x in stock.seen]
    assert [(x.shape, x.dtype) for x in streamer.seen] == [(x.shape, x.dtype) for x in stock.seen]
    assert torch.cat([x.flatten() for x in streamer.seen]).tolist() == got.sequences[0].tolist()


def test_streamer_is_one_step_behind_at_most(llama, behind):
    events = []

    class Order(BaseStreamer):
        def put(self, value):
            events.append("put")

        def end(self):
            pass

    hook = llama.register_forward_pre_hook(lambda *_: events.append("step"))
    try:
        generate(llama, PLAIN[:1], 5, streamer=Order())
    finally:
        hook.remove()
    steps = [i for i, event in enumerate(events) if event == "step"]
    for number, at in enumerate(steps):
        assert events[:at].count("put") >= 1 + number - behind  # the prompt is put first
    assert events.count("put") == 6


def test_a_processor_of_the_user_gets_a_tensor_of_its_own(llama, behind):
    strides = []

    class Views(CountingProcessor):
        def __call__(self, input_ids, scores):
            strides.append(input_ids.is_contiguous())
            return scores

    generate(llama, PLAIN, 6, logits_processor=LogitsProcessorList([Views()]))
    assert strides == [True] * 6


def test_a_processor_of_the_user_is_called_as_often(llama, behind):
    eos = early_eos(llama, PLAIN)
    processors = []

    def made():
        processors.append(CountingProcessor())
        return LogitsProcessorList([processors[-1]])

    expected, got = both(llama, PLAIN, logits_processor=made, eos_token_id=eos, top_k=20, do_sample=True, **EVERYTHING)
    assert_same(expected, got)
    assert processors[0].lengths == processors[1].lengths


@pytest.mark.parametrize("kept", [{}, EVERYTHING], ids=["", "scores"])
def test_a_criterion_of_the_user_is_called_as_often(llama, behind, kept):
    criteria = []

    def made():
        criteria.append(CountingCriterion(length=20))
        return StoppingCriteriaList([criteria[-1]])

    expected, got = both(llama, PLAIN, stopping_criteria=made, eos_token_id=early_eos(llama, PLAIN), **kept)
    assert_same(expected, got)
    assert criteria[0].seen == criteria[1].seen
    assert got.sequences.shape[1] == 20


def test_stop_strings(llama, behind):
    letters = [chr(33 + i) for i in range(94)] + [chr(0xC0 + i) for i in range(34)]
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="!"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    with stock_loops():
        text = generate(llama, PLAIN[:1], 14).sequences[0]
    word = "".join(letters[token] for token in text[-7:-5])
    expected, got = both(llama, PLAIN[:1], stop_strings=[word], tokenizer=tokenizer)
    assert_same(expected, got)
    assert 11 < got.sequences.shape[1] < 25


def test_no_time_left(llama, behind):
    expected, got = both(llama, PLAIN, max_time=0.0)
    assert_same(expected, got)
    assert got.sequences.shape[1] == 12


def test_probabilities_that_are_no_numbers(behind):
    _, model = twins("llama", block_size=4)
    model.lm_head.weight.data[5] = float("nan")
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        generate(model, PLAIN, 4, do_sample=True)


@pytest.mark.parametrize("rows", [1, 3])
def test_sampling_as_on_a_gpu(llama, rows):
    """The operations of the GPU's path, on the CPU: which tokens, and when rows with numbers are told from others."""
    scores = torch.randn(rows, 50)
    config = llama.generation_config
    choice = Choice([], config, torch.device("cpu"), can_undo=False)
    tokens = choice._sample_without_checks(torch.softmax(scores, -1))
    assert tokens.shape == choice.check.shape == (rows,)
    assert (choice.check > 0).all()
    counts = torch.zeros(50)
    for _ in range(3000):
        counts[choice._sample_without_checks(torch.softmax(scores[:1], -1))] += 1
    torch.testing.assert_close(counts / 3000, torch.softmax(scores[0], -1), atol=0.03, rtol=0)
    for bad in (float("nan"), float("inf")):
        spoilt = scores.clone()
        spoilt[-1, 7] = bad
        choice._sample_without_checks(torch.softmax(spoilt, -1))
        assert choice.check.isnan().tolist() == [False] * (rows - 1) + [True]


@pytest.mark.parametrize(
    "options",
    [{"use_cache": False}, {"output_hidden_states": True}, {"output_attentions": True}],
    ids=lambda options: next(iter(options)),
)
def test_what_is_out_of_reach_runs_transformers_loop(pairs, options):
    stock, model = pairs("llama")

    def fail(*_):
        raise RuntimeError("our loop ran")

    with patch.object(mixin, "sample", fail):
        got = generate(model, PLAIN, 6, **options)
    assert torch.equal(generate(stock, PLAIN, 6, **options).sequences, got.sequences)


@pytest.mark.parametrize("method", ["prepare_inputs_for_generation", "_update_model_kwargs_for_generation"])
@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_model_with_steps_of_its_own_runs_transformers_loop(method, where):
    stock, model = twins("llama", block_size=4)
    calls = []
    inherited = getattr(type(stock), method)

    def own(self, *args, **kwargs):
        calls.append(1)
        return inherited(self, *args, **kwargs)

    if where == "class":
        with patch.object(model._hf_turbo_original_class, method, own):
            got = generate(model, PLAIN, 6).sequences
    else:
        setattr(model, method, own.__get__(model))
        got = generate(model, PLAIN, 6).sequences
    assert len(calls) >= 5
    assert torch.equal(generate(stock, PLAIN, 6).sequences, got)


def test_pad_is_what_follows_an_early_end(llama, behind):
    with stock_loops():
        text = generate(llama, PLAIN, 14).sequences
    eos = text[0, 14].item()
    got = generate(llama, PLAIN, 14, eos_token_id=eos).sequences
    end = got[0].tolist().index(eos, 11)
    assert set(got[0, end + 1 :].tolist()) == {PAD}


@needs_gpu
@pytest.mark.parametrize("way", WAYS)
def test_same_as_transformers_loop_on_a_gpu(way):
    _, model = twins("llama", block_size=16)
    model.to("cuda")
    inputs = {name: x.cuda() for name, x in RAGGED.items()}
    eos = early_eos(model, inputs)
    expected, got = both(model, inputs, eos_token_id=eos, **EVERYTHING, **WAYS[way])
    assert torch.equal(expected.sequences, got.sequences)
    assert len(expected.scores) == len(got.scores)
    assert expected[CACHE_NAME].get_seq_length() == got[CACHE_NAME].get_seq_length()


@needs_gpu
def test_random_numbers_on_a_gpu_go_on_where_they_would():
    _, model = twins("llama", block_size=16)
    model.to("cuda")
    ids = PLAIN.cuda()
    eos = early_eos(model, ids)
    after = []
    for loops in (stock_loops, own_loops):
        torch.manual_seed(3)
        with loops():
            generate(model, ids, 14, do_sample=True, eos_token_id=eos)
        after.append(torch.rand(4, device="cuda"))
    assert torch.equal(*after)


@needs_gpu
def test_no_wait_in_a_step():
    """CUDA says so where the host waits; the letters to the host are the only wait that is left."""
    _, model = twins("llama", block_size=16)
    model.to("cuda")
    ids = PLAIN.cuda()
    generate(model, ids, 14, do_sample=True, eos_token_id=127)
    waits = []
    with patch.object(torch.Tensor, "tolist", lambda self: waits.append(1) or self.cpu().numpy().tolist()):
        generate(model, ids, 40, do_sample=True, top_k=20, eos_token_id=127)
        short = len(waits)
        generate(model, ids, 80, do_sample=True, top_k=20, eos_token_id=127)
    assert len(waits) - short == short
