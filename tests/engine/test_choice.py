"""Tokens of many requests chosen at once are those that each request gets from `generate()` alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import product

import pytest
import torch
from helpers import prompt, twins
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation import WatermarkingConfig

from hf_turbo.engine import choice as choice_module
from hf_turbo.engine.choice import Chooser, RequestChoice
from hf_turbo.engine.merging import pad_texts
from hf_turbo.engine.options import RequestOptions
from hf_turbo.engine.stops import Stops

CPU = torch.device("cpu")
VOCABULARY = 128


class Favours(LogitsProcessor):
    """Makes a token likelier that depends on the last two; writes to the scores that it is given."""

    def __call__(self, input_ids, scores):
        assert input_ids.is_contiguous()
        favourite = (input_ids[:, -1] * 7 + input_ids[:, -2]) % scores.shape[1]
        scores[torch.arange(len(scores)), favourite] += 4.0
        return scores


class StopsAtSum(StoppingCriteria):
    """Ends a row whose last three tokens have a sum that five divides."""

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None
        return input_ids[:, -3:].sum(1) % 5 == 0


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of 128 letters, one a token."""
    known = [chr(33 + i) for i in range(94)] + [chr(0xC0 + i) for i in range(34)]
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(known)}, unk_token="!"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


EOS = list(range(3, 14))
HOT = dict(do_sample=True, temperature=1.5, top_k=0, seed=11)
CASES = {
    "greedy": dict(max_new_tokens=12),
    "greedy, many ends": dict(max_new_tokens=24, eos_token_id=EOS),
    "T = 1.5": dict(**HOT),
    "T = 1.5, another seed": dict(**(HOT | {"seed": 12})),
    "top_k = 1": dict(do_sample=True, top_k=1, seed=1),
    "top_p": dict(do_sample=True, top_p=0.8, temperature=1.3, seed=2),
    "min_p": dict(do_sample=True, min_p=0.05, temperature=2.0, seed=3),
    "typical_p": dict(do_sample=True, typical_p=0.7, temperature=1.4, seed=4),
    "top_h": dict(do_sample=True, top_h=0.6, temperature=1.4, seed=5),
    "epsilon and eta": dict(do_sample=True, epsilon_cutoff=0.01, eta_cutoff=0.02, top_k=0, seed=6),
    "suppressed": dict(suppress_tokens=list(range(20, 60)), begin_suppress_tokens=[70, 71]),
    "renormalized": dict(renormalize_logits=True, **HOT),
    "repetition penalty": dict(repetition_penalty=1.4),
    "repetition penalty, drawn": dict(repetition_penalty=1.4, max_new_tokens=30, **HOT),
    "no bigram twice": dict(no_repeat_ngram_size=2),
    "no early end": dict(min_new_tokens=9, eos_token_id=list(range(3, 60)), max_new_tokens=20),
    "no short text": dict(min_length=18, eos_token_id=list(range(3, 60)), max_new_tokens=20),
    "bad words": dict(bad_words_ids=[[17], [40, 41], [99, 3, 8]], max_new_tokens=20),
    "bias": dict(sequence_bias=[[[17], 4.0], [[40, 41], 5.0]], max_new_tokens=20),
    "forced end": dict(forced_eos_token_id=5, forced_bos_token_id=9),
    "longer and longer odds": dict(exponential_decay_length_penalty=(4, 1.5), eos_token_id=7, max_new_tokens=30),
    "prompt's bigrams": dict(encoder_no_repeat_ngram_size=2, **HOT),
    "prompt's tokens": dict(encoder_repetition_penalty=1.5),
    "watermark": dict(watermarking_config=WatermarkingConfig(bias=3.0), **HOT),
    "max_length": dict(max_length=19),
    "no time": dict(max_time=0.0),
    "three": dict(num_return_sequences=3, eos_token_id=EOS, max_new_tokens=24, **HOT),
    "three, padded": dict(num_return_sequences=3, eos_token_id=EOS, pad_token_id=77, max_new_tokens=24, **HOT),
    "three, no repetition": dict(
        num_return_sequences=3, eos_token_id=EOS, repetition_penalty=1.3, max_new_tokens=24, **HOT
    ),
    "three, no bigram twice": dict(
        num_return_sequences=3, eos_token_id=EOS, no_repeat_ngram_size=2, max_new_tokens=24, **(HOT | {"seed": 5})
    ),
    "stop string": dict(max_new_tokens=24),
    "own processor": dict(max_new_tokens=12),
    "own processor, three drawn": dict(num_return_sequences=3, eos_token_id=EOS, max_new_tokens=16, **HOT),
    "own penalty of new tokens": dict(max_new_tokens=12),
    "own criterion": dict(max_new_tokens=40),
    "own criterion, three drawn": dict(num_return_sequences=3, eos_token_id=EOS, max_new_tokens=24, **HOT),
    "allowed tokens": dict(max_new_tokens=12),
}


def objects(name: str, ids: list[int]) -> dict:
    """What a case gives along that is not an attribute of a config; new ones each time."""
    if name == "stop string":
        text = pair()[0].generate(torch.tensor([ids]), max_new_tokens=24)[0]
        tokenizer = letters()
        return {"tokenizer": tokenizer, "stop_strings": [tokenizer.decode(text[-14:-12])]}
    if name.startswith("own processor"):
        return {"logits_processor": LogitsProcessorList([Favours()])}
    if name == "own penalty of new tokens":
        penalty = RepetitionPenaltyLogitsProcessor(1.8, prompt_ignore_length=len(ids))
        return {"logits_processor": LogitsProcessorList([penalty])}
    if name.startswith("own criterion"):
        return {"stopping_criteria": StoppingCriteriaList([StopsAtSum()])}
    if name == "allowed tokens":
        return {"prefix_allowed_tokens_fn": lambda batch, text: range(int(text[-1]) % 3 + batch, VOCABULARY, 3)}
    return {}


@cache
def pair():
    return twins("llama")


def ids_of(index: int) -> list[int]:
    """A prompt for a request; of three lengths."""
    return prompt(1, (7, 11, 9)[index % 3], seed=index)[0].tolist()


def options_of(arguments: dict, ids: list[int], **others) -> RequestOptions:
    arguments = dict(arguments)
    if "stop_strings" in others:
        arguments["stop_strings"] = others.pop("stop_strings")
    return RequestOptions.of(pair()[1], ids, None, arguments, **others)


@dataclass
class Running:
    """A request of the naive engine: its whole texts go through the model at every step, alone."""

    options: RequestOptions
    choice: RequestChoice
    texts: list[list[int]]
    done: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, arguments, ids, **others):
        options = options_of(arguments, ids, **others)
        number = options.num_sequences
        choice = RequestChoice(options, ids, CPU)
        return cls(options, choice, [list(ids) for _ in range(number)], [False] * number)

    @property
    def live(self) -> list[int]:
        return [i for i, done in enumerate(self.done) if not done]

    def logits(self) -> torch.Tensor:
        with torch.no_grad():
            return pair()[0](torch.tensor([self.texts[i] for i in self.live])).logits[:, -1]

    def take(self, tokens: list[int]) -> None:
        for index, token in zip(self.live, tokens, strict=True):
            self.texts[index].append(token)
            self.done[index] = self.choice.ends(index, self.texts[index])


def run_together(requests: list[Running], joins: list[int]) -> None:
    """Until all have ended. The order of the requests changes from step to step."""
    chooser, step = Chooser(), 0
    while not all(all(request.done) for request in requests):
        here = [r for r, join in zip(requests, joins, strict=True) if join <= step and not all(r.done)]
        here = here[::-1] if step % 2 else here
        logits = torch.cat([request.logits() for request in here])
        before = logits.clone()
        chosen = chooser.choose(logits, [(request.choice, request.live) for request in here])
        assert torch.equal(logits, before) and not chosen.errors
        assert chosen.doubts is None or not chosen.doubts.any()
        for request, tokens in zip(here, chosen.tokens.split([len(r.live) for r in here]), strict=True):
            request.choice.settle()
            request.take(tokens.tolist())
        step += 1


def alone(arguments: dict, ids: list[int], **others) -> list[list[int]]:
    """The texts of `generate()`."""
    arguments = dict(arguments)
    torch.manual_seed(arguments.pop("seed", 0))
    inputs = torch.tensor([ids])
    return pair()[1].generate(inputs, attention_mask=torch.ones_like(inputs), **arguments, **others).tolist()


def padded(request: Running) -> list[list[int]]:
    """The texts as `generate()` returns them."""
    length, padding = max(map(len, request.texts)), request.options.generation_config._pad_token_tensor
    return [text + [int(padding)] * (length - len(text)) if len(text) < length else text for text in request.texts]


@cache
def ran_together() -> dict[str, tuple[Running, ...]]:
    """Every case twice, with different prompts, all of them in one engine."""
    made = [
        (name, Running.of(case, ids_of(i + k), **objects(name, ids_of(i + k))))
        for k in (0, 50)
        for i, (name, case) in enumerate(CASES.items())
    ]
    run_together([request for _, request in made], [i % 5 for i in range(len(made))])
    return {name: tuple(request for other, request in made if other == name) for name in CASES}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("name", CASES)
def test_each_request_gets_its_own_text(name):
    for k, request in zip((0, 50), ran_together()[name], strict=True):
        ids = ids_of(list(CASES).index(name) + k)
        assert padded(request) == alone(CASES[name], ids, **objects(name, ids))


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_the_cases_show_what_they_are_about():
    ran = ran_together()
    plain = {k: ran["greedy"][k].texts[0] for k in (0, 1)}
    assert len({tuple(ran[name][0].texts[0][-5:]) for name in CASES}) > len(CASES) // 2
    assert len({len(text) for text in ran["three"][0].texts}) > 1
    assert len(ran["stop string"][0].texts[0]) < len(plain[0]) + 12
    assert any(len(r.texts[0]) < len(ids_of(0)) + 24 for r in ran["greedy, many ends"])
    assert len(ran["own criterion"][0].texts[0]) < 40
    assert len(ran["no time"][0].texts[0]) - ran["no time"][0].options.num_prompt == 1


# What follows chooses by random logits.


def logits_of(rows: int, step: int, dtype=torch.float32) -> torch.Tensor:
    values = torch.Generator().manual_seed(97 * step + rows)
    return (3 * torch.randn(rows, VOCABULARY, generator=values)).to(dtype)


def choice_of(ids: list[int] | None = None, processors=None, **arguments) -> RequestChoice:
    ids = ids_of(0) if ids is None else ids
    options = options_of({"max_new_tokens": 40, **arguments}, ids, logits_processor=processors)
    return RequestChoice(options, ids, CPU)


def takers_of(*choices: RequestChoice):
    return [(choice, list(range(choice.options.num_sequences))) for choice in choices]


@pytest.fixture
def argmaxes(monkeypatch):
    """What the argmax of the kernels was called with."""
    seen, real = [], choice_module.argmax
    monkeypatch.setattr(choice_module, "argmax", lambda x: seen.append(x) or real(x))
    return seen


def calls_of(monkeypatch, kind) -> list[int]:
    """The rows that processors of a kind are called with, one number a call."""
    rows, real = [], kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, ids, scores: rows.append(len(scores)) or real(self, ids, scores))
    return rows


def test_plain_requests_are_one_argmax(argmaxes):
    logits = logits_of(5, 0, torch.bfloat16)
    chosen = Chooser().choose(logits, takers_of(*(choice_of(ids_of(i)) for i in range(5))))
    assert [x.data_ptr() for x in argmaxes] == [logits.data_ptr()] and argmaxes[0].shape == logits.shape
    assert torch.equal(chosen.tokens, logits.float().argmax(-1))
    assert chosen.logprobs is None and chosen.doubts is None and chosen.errors == {}


def test_plain_requests_among_others_are_one_argmax(argmaxes):
    choices = [choice_of(), choice_of(**HOT), choice_of(), choice_of(no_repeat_ngram_size=2), choice_of()]
    logits = logits_of(5, 0, torch.bfloat16)
    chosen = Chooser().choose(logits, takers_of(*choices))
    assert [(len(x), x.dtype) for x in argmaxes] == [(3, torch.bfloat16), (1, torch.float32)]
    assert torch.equal(chosen.tokens[[0, 2, 4]], logits.float().argmax(-1)[[0, 2, 4]])


def test_equal_processors_are_called_once(monkeypatch):
    rows = calls_of(monkeypatch, TemperatureLogitsWarper)
    warm = dict(do_sample=True, temperature=1.2)
    choices = [choice_of(seed=i, **warm) for i in range(3)] + [choice_of(seed=3, do_sample=True, temperature=1.3)]
    choices += [choice_of(seed=4, num_return_sequences=3, **warm)]
    Chooser().choose(logits_of(7, 0), takers_of(*choices))
    assert rows == [6, 1]


def test_equal_processors_are_called_once_where_only_criteria_read_the_text(monkeypatch):
    rows = calls_of(monkeypatch, TemperatureLogitsWarper)
    looked_at = options_of(
        {"max_new_tokens": 9, **HOT}, ids_of(0), stopping_criteria=StoppingCriteriaList([StopsAtSum()])
    )
    choices = [choice_of(**HOT), RequestChoice(looked_at, ids_of(0), CPU)]
    token = Chooser().choose(logits_of(1, 0).expand(2, -1), takers_of(*choices)).tokens[1].item()
    assert rows == [2]
    assert choices[1].text(0).tolist() == [[*ids_of(0), token]]


def test_equal_penalties_are_called_once_with_texts_of_any_length(monkeypatch):
    rows = calls_of(monkeypatch, RepetitionPenaltyLogitsProcessor)
    prompts = [ids_of(0), ids_of(1) + ids_of(2), ids_of(1)]
    choices = [choice_of(ids, repetition_penalty=1.4, suppress_tokens=[5, 6]) for ids in prompts]
    other = choice_of(repetition_penalty=1.5)
    logits = logits_of(4, 0)
    tokens = Chooser().choose(logits, takers_of(*choices, other)).tokens
    assert rows == [3, 1]
    for row, ids in enumerate(prompts):  # the penalty, as its paper has it
        penalized = logits[row].clone()
        for token in set(ids):
            penalized[token] *= 1.4 if penalized[token] < 0 else 1 / 1.4
        penalized[[5, 6]] = -float("inf")
        assert tokens[row] == penalized.argmax()


def test_texts_are_padded_with_what_they_have():
    short, long = torch.tensor([[5, 6, 7], [5, 5, 8]]), torch.tensor([[3, 2, 1, 0, 4]])
    assert pad_texts([short, long]).tolist() == [[5, 6, 7, 7, 7], [5, 5, 8, 8, 8], [3, 2, 1, 0, 4]]
    assert pad_texts([short]) is short


def test_logits_are_left_as_they_are():
    logits = logits_of(1, 0)
    chosen = Chooser().choose(logits, takers_of(choice_of(processors=LogitsProcessorList([Favours()]))))
    assert torch.equal(logits, logits_of(1, 0))
    logits[0, (ids_of(0)[-1] * 7 + ids_of(0)[-2]) % VOCABULARY] += 4.0
    assert torch.equal(chosen.tokens, logits.argmax(-1))


def test_texts_are_kept_only_where_they_are_read():
    read = choice_of(no_repeat_ngram_size=2)
    assert read.text(0).tolist() == [ids_of(0)]
    for arguments in ({}, HOT, dict(eos_token_id=EOS, suppress_tokens=[4])):
        with pytest.raises(ValueError, match="not on the device"):
            choice_of(**arguments).text(0)


DIFFERENT = {
    "greedy": {},
    "drawn": HOT,
    "three": dict(num_return_sequences=3, repetition_penalty=1.3, **HOT),
    "text": dict(no_repeat_ngram_size=1, repetition_penalty=1.2),
}


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("kept", [0, 2, 4])
def test_choices_that_are_taken_back_have_not_been_made(name, kept):
    chooser = Chooser()

    def go(choice, *steps):
        rows = choice.options.num_sequences
        return [chooser.choose(logits_of(rows, step), takers_of(choice)).tokens.tolist() for step in steps]

    one, other = choice_of(**DIFFERENT[name]), choice_of(**DIFFERENT[name])
    expected = go(one, *range(9))
    assert go(other, 0, 1) == expected[:2]
    other.settle()
    assert go(other, *range(2, 2 + kept)) == expected[2 : 2 + kept]
    go(other, *range(50 + kept, 54))
    other.undo(4 - kept)
    other.settle()
    assert go(other, *range(2 + kept, 9)) == expected[2 + kept :]
    if one.options.reads_text:
        assert torch.equal(one.text(0), other.text(0))


def test_no_more_is_taken_back_than_was_chosen():
    choice = choice_of(**HOT)
    for step in range(3):
        Chooser().choose(logits_of(1, step), takers_of(choice))
    choice.undo(0)
    choice.settle()
    with pytest.raises(ValueError, match="0 were made"):
        choice.undo(1)


class Raises(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores.fill_(0.0)
        raise KeyError("mine")


class Shrinks(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores[:, :5]


@pytest.mark.parametrize("kind, error", [(Raises, KeyError), (Shrinks, ValueError)])
def test_a_processor_that_raises_fails_its_request_alone(kind, error):
    def others():
        return [choice_of(), choice_of(**HOT), choice_of(no_repeat_ngram_size=1)]

    bad, logits = choice_of(processors=LogitsProcessorList([kind()])), logits_of(4, 0)
    first, *rest = others()
    chosen = Chooser().choose(logits, takers_of(first, bad, *rest))
    assert list(chosen.errors) == [bad] and isinstance(chosen.errors[bad], error)
    expected = Chooser().choose(logits[[0, 2, 3]], takers_of(*others())).tokens
    assert torch.equal(chosen.tokens[[0, 2, 3]], expected)


def test_a_row_that_shared_processors_can_not_take_fails_its_request_alone(monkeypatch):
    # torch refuses to make a distribution of NaN, until something is compiled in this process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    warm = dict(do_sample=True, top_h=0.5)
    logits = logits_of(3, 0)
    expected = Chooser().choose(logits, takers_of(*(choice_of(seed=i, **warm) for i in range(3)))).tokens
    logits[1] = float("nan")
    choices = [choice_of(seed=i, **warm) for i in range(3)]
    chosen = Chooser().choose(logits, takers_of(*choices))
    assert list(chosen.errors) == [choices[1]]
    assert torch.equal(chosen.tokens[[0, 2]], expected[[0, 2]])


def test_probabilities_that_are_no_numbers_are_told():
    choices = [choice_of(**HOT), choice_of(), choice_of(num_return_sequences=3, **HOT), choice_of(**HOT)]
    logits = logits_of(6, 0)
    assert Chooser().choose(logits, takers_of(*choices)).doubts.tolist() == [False] * 6
    logits[0, 5], logits[1, 5], logits[3] = float("nan"), float("nan"), -float("inf")
    doubts = Chooser().choose(logits, takers_of(*choices)).doubts
    assert doubts.tolist() == [True, False, False, True, False, False]


def test_log_probabilities_are_those_of_the_processed_scores():
    choices = [choice_of(**HOT), choice_of(), choice_of(suppress_tokens=[int(logits_of(3, 0)[2].argmax())])]
    logits = logits_of(3, 0)
    chosen = Chooser(return_logprobs=True).choose(logits, takers_of(*choices))
    logits[0] /= 1.5
    logits[2, logits[2].argmax()] = -float("inf")
    expected = logits.double().softmax(-1).gather(1, chosen.tokens[:, None])[:, 0].log()
    torch.testing.assert_close(chosen.logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    assert chosen.logprobs.dtype == torch.float32


def test_rounded_logits_are_processed_in_fp32():
    logits = logits_of(2, 0, torch.bfloat16)
    rounded = Chooser().choose(logits, takers_of(choice_of(**HOT), choice_of(repetition_penalty=1.01)))
    exact = Chooser().choose(logits.float(), takers_of(choice_of(**HOT), choice_of(repetition_penalty=1.01)))
    assert torch.equal(rounded.tokens, exact.tokens)


def test_rows_must_be_those_of_the_sequences():
    choice = choice_of(num_return_sequences=3, **HOT)
    with pytest.raises(ValueError, match="2 rows of logits for 3 sequences"):
        Chooser().choose(logits_of(2, 0), takers_of(choice))
    with pytest.raises(ValueError, match="0 were made"):  # nothing has been drawn
        choice.undo(1)


def test_new_tokens_are_kept_up_to_the_end():
    ids = ids_of(0)
    choice = choice_of(ids, eos_token_id=[7, 9], max_new_tokens=4)
    assert choice.keep(0, [5, 6], len(ids)) == ([5, 6], False)
    assert choice.keep(0, [5, 9, 6], len(ids)) == ([5, 9], True)
    assert choice.keep(0, [5, 6, 8], len(ids) + 2) == ([5, 6], True)
    assert choice.ends(0, [*ids, 5, 7]) and not choice.ends(0, [*ids, 5, 5])


def test_texts_that_surely_go_on_are_those_of_which_there_is_nothing_to_say():
    num_prompt = len(ids_of(0))
    stops = choice_of(ids_of(0), eos_token_id=[7, 9], max_new_tokens=4).options.stops
    seen = set()
    for token, length in product((5, 7, 9), range(num_prompt + 1, num_prompt + 7)):
        has_ended = stops.keep([token], length - 1, lambda end: None)[1]
        assert _surely_goes_on(stops, token, length) == (not has_ended)
        seen.add(has_ended)
    assert seen == {False, True}
    endless = Stops(StoppingCriteriaList([EosTokenCriteria(7)]))
    assert _surely_goes_on(endless, 5, 10**9) and not _surely_goes_on(endless, 7, 10)
    # Transformers says something of the text that is one token longer than the model was made for.
    warned = Stops(StoppingCriteriaList([MaxLengthCriteria(50, max_position_embeddings=20)]))
    assert _surely_goes_on(warned, 5, 20) and not _surely_goes_on(warned, 5, 21)
    assert not _surely_goes_on(Stops(StoppingCriteriaList([StopsAtSum()])), 5, 10)


def _surely_goes_on(stops, token, length):
    return length < stops.quiet_below and token not in stops.ends


def test_criteria_read_the_text_up_to_each_token():
    seen = []

    class Looks(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append(input_ids.tolist())
            return torch.tensor([input_ids.shape[1] == len(ids) + 2])

    ids = ids_of(0)
    options = options_of({"max_new_tokens": 9}, ids, stopping_criteria=StoppingCriteriaList([Looks()]))
    choice = RequestChoice(options, ids, CPU)
    new = [int(Chooser().choose(logits_of(1, step), takers_of(choice)).tokens) for step in range(3)]
    assert choice.keep(0, new, len(ids)) == (new[:2], True)
    assert seen == [[ids + new[:1]], [ids + new[:2]]]
