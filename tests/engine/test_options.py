"""What a request may ask for, and what `generate()` would make of it."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from helpers import prompt, twins
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import SynthIDTextWatermarkingConfig, WatermarkingConfig

from hf_turbo.engine import supported
from hf_turbo.engine.merging import merge_key
from hf_turbo.engine.options import RequestOptions

IDS = prompt(1, 9)[0].tolist()


@pytest.fixture(scope="module")
def model():
    return twins("llama")[1]


@pytest.fixture
def said():
    """What Transformers has logged."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def options(model, config=None, ids=IDS, **overrides) -> RequestOptions:
    return RequestOptions.of(model, ids, config, {"max_new_tokens": 8, **overrides})


def test_every_attribute_of_a_config_is_decided_on():
    decided = [supported.SERVED, supported.WITHOUT_EFFECT, set(supported.REFUSED), {"watermarking_config"}]
    declared = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert declared <= set().union(*decided)
    assert sum(map(len, decided)) == len(set().union(*decided))


def test_an_attribute_that_nobody_has_decided_on_is_refused(model, monkeypatch):
    monkeypatch.setattr(supported, "SERVED", supported.SERVED - {"top_k"})
    options(model, top_k=50)  # its default
    with pytest.raises(NotImplementedError, match="top_k=7"):
        options(model, top_k=7, do_sample=True)


def test_other_entries_are_refused_unless_they_are_the_models_own(model, monkeypatch):
    config = GenerationConfig(max_new_tokens=4, of_mine=3)
    with pytest.raises(NotImplementedError, match="of_mine=3"):
        options(model, config)
    own = copy.deepcopy(model.generation_config)
    own.of_mine = 3
    monkeypatch.setattr(model, "generation_config", own)
    options(model)
    options(model, config)


REFUSED = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": [1],
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "guidance_scale": 1.5,
    "token_healing": True,
    "use_mtp": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "is_assistant": True,
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"nbits": 4},
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
}


def test_all_that_is_refused_is_tried():
    assert set(REFUSED) == set(supported.REFUSED)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("where", ["override", "config"])
@pytest.mark.filterwarnings("ignore")
def test_what_a_row_can_not_have_is_refused_by_name(model, name, where):
    value = REFUSED[name]
    config = GenerationConfig(max_new_tokens=4)
    extra = {"return_dict_in_generate": True}  # without it Transformers warns of some
    setattr(config, name, value)
    with pytest.raises(NotImplementedError, match=rf"{name}=.*; call generate\(\) for it"):
        options(model, **extra, **{name: value}) if where == "override" else options(model, config, **extra)
    for neutral in (None, *supported.REFUSED[name]):
        assert options(model, **{name: neutral}).num_sequences == 1


def test_watermarks_that_keep_no_state_are_had(model):
    assert len(options(model, watermarking_config=WatermarkingConfig()).processors) == 1
    with pytest.raises(NotImplementedError, match="watermarking_config="):
        options(model, watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3]))


def test_what_belongs_to_the_prompts_one_row_is_refused_for_several(model):
    three = dict(do_sample=True, num_return_sequences=3)
    with pytest.raises(NotImplementedError, match="encoder_repetition_penalty"):
        options(model, encoder_repetition_penalty=1.5, **three)
    with pytest.raises(NotImplementedError, match="prefix_allowed_tokens_fn"):
        RequestOptions.of(model, IDS, None, three, prefix_allowed_tokens_fn=lambda batch, text: [3])
    assert options(model, **three).num_sequences == 3


def test_unknown_names_are_listed(model):
    with pytest.raises(
        ValueError, match=r"^attention_mask, continuous_batching_config, temprature, validate: not known"
    ):
        options(model, temprature=1.0, validate=1, attention_mask=None, continuous_batching_config=None, top_p=0.9)


@pytest.mark.parametrize("seed", ["1", 1.0, True])
def test_a_seed_is_an_int(model, seed):
    with pytest.raises(ValueError, match="seed="):
        options(model, do_sample=True, seed=seed)


def test_seeds(model):
    assert options(model, do_sample=True, seed=5).seed == 5
    assert options(model, seed=5).seed is None
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append([options(model, do_sample=True).seed for _ in range(2)])
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 2


def test_overrides_come_last_and_the_config_is_not_changed(model, said):
    config = GenerationConfig(max_new_tokens=4, do_sample=True, temperature=0.7, eos_token_id=5, bad_words_ids=[[4]])
    before = copy.deepcopy(vars(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = RequestOptions.of(model, IDS, config, {"temperature": 1.5, "eos_token_id": None, "max_new_tokens": 6})
    assert vars(config) == before
    made = one.generation_config
    assert (made.temperature, made.max_new_tokens, made.do_sample, made.max_length) == (1.5, 6, True, 9 + 6)
    assert not one.stops.ends_with(5, 10) and one.stops.ends_with(4, 15)
    assert RequestOptions.of(model, IDS, config, {}).stops.ends_with(5, 10)
    assert said == []


def test_the_models_own_config_counts(model, monkeypatch):
    own = copy.deepcopy(model.generation_config)
    own.eos_token_id, own.repetition_penalty, own.do_sample = [7, 8], 1.2, True
    monkeypatch.setattr(model, "generation_config", own)
    one = options(model)
    assert one.samples and one.stops.ends_with(8, 10)
    assert type(one.processors[0]).__name__ == "RepetitionPenaltyLogitsProcessor"
    assert not options(model, do_sample=False, repetition_penalty=1.0).processors


def test_lengths(model):
    assert options(model).max_new_tokens == 8
    assert RequestOptions.of(model, IDS, None, {"max_length": 30}).max_new_tokens == 21
    criteria = StoppingCriteriaList([MaxLengthCriteria(11)])
    assert RequestOptions.of(model, IDS, None, {"max_new_tokens": 8}, stopping_criteria=criteria).max_new_tokens == 2
    with pytest.raises(ValueError, match="Input length"):
        RequestOptions.of(model, IDS, None, {"max_length": 9})


def test_what_generate_says_is_said(model, said):
    with pytest.warns(UserWarning, match="model-agnostic default `max_length`"):
        assert RequestOptions.of(model, IDS, None, {}).max_new_tokens == 20
    assert options(model, max_length=30).max_new_tokens == 8
    assert any("Both `max_new_tokens`" in line for line in said)
    with pytest.warns(UserWarning, match="Unfeasible length constraints"):
        options(model, min_new_tokens=9, eos_token_id=5)
    with pytest.raises(ValueError, match="num_return_sequences"):
        options(model, num_return_sequences=2)
    with pytest.raises(ValueError, match="tokenizer"):
        options(model, stop_strings=["a"])


class Mine(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "overrides, objects, plain, reads, ahead",
    [
        (dict(eos_token_id=5), {}, True, False, True),
        (dict(temperature=0.5, do_sample=True), {}, False, False, True),
        (dict(suppress_tokens=[3]), {}, False, False, True),
        (dict(repetition_penalty=1.2), {}, False, True, True),
        (dict(max_time=9.0), {}, False, True, False),
        ({}, {"logits_processor": LogitsProcessorList([Mine()])}, False, True, False),
        ({}, {"stopping_criteria": StoppingCriteriaList([Never()])}, False, True, False),
    ],
)
def test_what_the_engine_may_do(model, overrides, objects, plain, reads, ahead):
    one = RequestOptions.of(model, IDS, None, {"max_new_tokens": 4, **overrides}, **objects)
    assert (one.is_plain, one.reads_text, one.may_go_ahead) == (plain, reads, ahead)


WARM = dict(do_sample=True, temperature=1.2)


@pytest.mark.parametrize(
    "left, right, equal",
    [
        ({}, dict(eos_token_id=4, max_new_tokens=3), True),
        (WARM, WARM | {"seed": 3}, True),
        (WARM, dict(do_sample=True, temperature=1.3), False),
        (WARM, WARM | {"top_p": 0.9}, False),
        (dict(suppress_tokens=[3, 4]), dict(suppress_tokens=[3, 4]), True),
        (dict(suppress_tokens=[3, 4]), dict(suppress_tokens=[3, 5]), False),
        (WARM | {"eta_cutoff": 0.01}, WARM | {"eta_cutoff": 0.01}, True),
        (dict(repetition_penalty=1.2), dict(repetition_penalty=1.2), True),
        (dict(repetition_penalty=1.2), dict(repetition_penalty=1.3), False),
        (dict(renormalize_logits=True), dict(renormalize_logits=True, do_sample=True, top_k=0), False),
    ],
)
def test_which_requests_are_chosen_for_together(model, left, right, equal):
    left, right = options(model, **left).merge_key, options(model, **right).merge_key
    assert left is not None and right is not None
    assert (left == right) == equal


def test_processors_that_read_the_text_are_never_shared(model):
    assert options(model, no_repeat_ngram_size=2).merge_key is None
    assert options(model, min_new_tokens=2, eos_token_id=3).merge_key is None
    assert merge_key(LogitsProcessorList([Mine()])) is None
    of_new_tokens = RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=4)
    assert merge_key(LogitsProcessorList([of_new_tokens])) is None
