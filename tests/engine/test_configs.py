"""Configs that requests share: prepared once, and as if each had been prepared alone."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import prompt, twins
from transformers import GenerationConfig

from hf_turbo.engine import configs as module
from hf_turbo.engine.configs import RequestConfigs
from hf_turbo.engine.options import RequestOptions

IDS = prompt(1, 9)[0].tolist()
CPU = torch.device("cpu")


@pytest.fixture
def model(monkeypatch):
    model = twins("llama")[1]
    monkeypatch.setattr(model, "generation_config", copy.deepcopy(model.generation_config))
    return model


@pytest.fixture
def prepared(model, monkeypatch):
    """How often Transformers has prepared a config."""
    calls, prepare = [], model._prepare_generation_config

    def counted(*args, **kwargs):
        calls.append(args)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(model, "_prepare_generation_config", counted)
    return calls


def seen(options: RequestOptions):
    """All that a request has of its config, comparable."""
    config = {name: value for name, value in vars(options.generation_config).items() if not torch.is_tensor(value)}
    processors = [(type(p), sorted((k, str(v)) for k, v in vars(p).items())) for p in options.processors]
    return config, processors, options.stops.max_length, options.stops.ends, options.seed, options.max_new_tokens


ASKS = [
    (None, {"max_new_tokens": 8}),
    (None, {"max_length": 30}),
    (None, {"max_new_tokens": 3, "eos_token_id": [5, 7], "min_new_tokens": 2}),
    ({"do_sample": True, "top_k": 5, "eos_token_id": 4}, {"max_new_tokens": 6, "temperature": 0.5, "seed": 3}),
    ({"repetition_penalty": 1.3, "encoder_repetition_penalty": 1.2, "max_new_tokens": 5}, {}),
    ({"bad_words_ids": [[4], [5, 6]], "suppress_tokens": [9]}, {"max_new_tokens": 7, "forced_eos_token_id": 2}),
]


@pytest.mark.parametrize("given, overrides", ASKS)
def test_what_is_shared_is_what_each_would_have_alone(model, prepared, given, overrides):
    given = None if given is None else GenerationConfig(**given)
    shared = RequestConfigs(model)
    for ids in (IDS, IDS[:3], IDS * 2):
        found = RequestOptions.of(model, ids, given, overrides, configs=shared)
        assert seen(found) == seen(RequestOptions.of(model, ids, given, overrides))
    assert len(prepared) == 3 + 1  # and the three that are alone


def test_requests_of_other_lengths_share(model, prepared):
    shared = RequestConfigs(model)
    for new in (3, 200, 1):
        options = RequestOptions.of(model, IDS, None, {"max_new_tokens": new}, configs=shared)
        assert options.max_new_tokens == options.generation_config.max_new_tokens == new
    assert len(prepared) == 1
    for bad in (0, -1):
        with pytest.raises(ValueError, match="max_new_tokens"):
            RequestOptions.of(model, IDS, None, {"max_new_tokens": bad}, configs=shared)
    assert RequestOptions.of(model, IDS, None, {"max_length": 20}, configs=shared).max_new_tokens == 11


def test_the_models_own_limit_counts_the_prompt(model):
    """Not as Transformers' default of so many tokens, which does not."""
    model.generation_config.max_length = 20
    assert RequestOptions.of(model, IDS, None, {}).max_new_tokens == 20 - len(IDS)


def test_a_model_that_was_moved_has_its_special_tokens_there(model):
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    shared = RequestConfigs(model)
    for device in ("cpu", "meta"):
        config = shared.prepare(None, {"max_new_tokens": 4}, torch.device(device)).config
        assert config._bos_token_tensor.device.type == device


def test_a_config_that_was_changed_is_another_one(model):
    shared, given = RequestConfigs(model), GenerationConfig(eos_token_id=[5], do_sample=True)

    def ends(words=None):
        overrides = {"max_new_tokens": 4, "bad_words_ids": words}
        return RequestOptions.of(model, IDS, given, overrides, configs=shared)

    assert ends().stops.ends == {5}
    given.eos_token_id.append(6)
    assert ends().stops.ends == {5, 6}
    given.eos_token_id = None
    assert ends().stops.ends == set()
    model.generation_config.eos_token_id = [7]
    assert ends().stops.ends == {7}
    model.generation_config.eos_token_id.append(8)
    assert ends().stops.ends == {7, 8}
    words = [[4]]
    assert ends(words).generation_config.bad_words_ids == [[4]]
    words[0].append(9)
    assert ends([[4]]).generation_config.bad_words_ids == [[4]]  # of which nobody else has the list
    assert ends(words).generation_config.bad_words_ids == [[4, 9]]


def test_a_config_that_is_changed_while_it_is_prepared_is_not_kept(model, monkeypatch):
    shared, own, prepare = RequestConfigs(model), model.generation_config, model._prepare_generation_config

    def late(*args):
        own.eos_token_id = 9  # by another thread
        return prepare(*args)

    own.eos_token_id = 7
    with monkeypatch.context() as patched:
        patched.setattr(model, "_prepare_generation_config", late)
        shared.prepare(None, {"max_new_tokens": 4}, CPU)
    own.eos_token_id = 7
    assert shared.prepare(None, {"max_new_tokens": 4}, CPU).eos.tolist() == [7]


def test_values_of_other_types_are_others(model):
    shared = RequestConfigs(model)
    warm = {"max_new_tokens": 4, "do_sample": True}
    RequestOptions.of(model, IDS, None, {**warm, "top_k": 2}, configs=shared)
    with pytest.raises(ValueError, match="top_k"):
        RequestOptions.of(model, IDS, None, {**warm, "top_k": 2.0}, configs=shared)


def test_what_is_given_may_be_changed(model):
    shared = RequestConfigs(model)
    first = shared.prepare(None, {"max_new_tokens": 4}, CPU).config
    before, first.temperature = first.temperature, 9.0
    assert shared.prepare(None, {"max_new_tokens": 4}, CPU).config.temperature == before != 9.0


def test_what_transformers_refuses_of_the_models_config_stays_refused(model, monkeypatch):
    shared = RequestConfigs(model)
    shared.prepare(None, {"max_new_tokens": 4}, CPU)
    monkeypatch.setattr(model.config, "temperature", 0.7, raising=False)
    with pytest.raises(ValueError, match="modified the pretrained model configuration"):
        shared.prepare(None, {"max_new_tokens": 4}, CPU)
    shared.prepare(GenerationConfig(), {"max_new_tokens": 4}, CPU)


def test_what_can_not_be_compared_is_prepared_anew(model, prepared):
    model.generation_config.of_mine = lambda: None
    shared = RequestConfigs(model)
    for _ in range(2):
        shared.prepare(None, {"max_new_tokens": 4}, CPU)
    assert len(prepared) == 2


def test_those_are_kept_that_were_asked_for_last(model, prepared, monkeypatch):
    monkeypatch.setattr(module, "_MAX_KEPT", 2)
    shared = RequestConfigs(model)
    for top_k in (1, 2, 1, 3, 1, 2):
        shared.prepare(None, {"top_k": top_k, "do_sample": True}, CPU)
    assert len(prepared) == 4  # 1, 2, 3, and 2 again
