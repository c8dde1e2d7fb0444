"""`prefix_cache`: the text is the unpatched model's, whatever is found of it; and what should be found is."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from combinations import few
from helpers import (
    accelerated,
    assert_pool_accounts,
    forward,
    generate,
    needs_gpu,
    poison_what_is_freed,
    prompt,
    ragged,
    rows_alone,
    stepped_aside,
    used_blocks,
)
from peft import LoraConfig, get_peft_model
from tiny_models import build

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.patching import handle_of

NAMES = ["llama", "mistral", "gemma3_text"]  # all layers see everything, a window of 8, both
SIZES = [1, 4, 16]
PEFT_IS_BEHIND = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_what_is_freed(monkeypatch)


def pair(name: str = "llama", size: int = 4, **options):
    """The same tiny model twice: as it is, and patched with a prefix cache."""
    stock, model = build(name), build(name)
    model.load_state_dict(stock.state_dict())
    return stock, hf_turbo.patch(model, **{"block_size": size, "prefix_cache": True, **options})


def found(model) -> int:
    """Tokens that were found so far."""
    return hf_turbo.report(model).prefix_tokens_found


def stored(model) -> int:
    """Tokens whose keys and values were computed and stored so far."""
    return hf_turbo.report(model).tokens_stored


def cached(model) -> int:
    return hf_turbo.report(model).cached_blocks


def same_text(stock, model, inputs, new_tokens=12, seed=None, drafted=None, **options) -> tuple[torch.Tensor, int]:
    """Both models' text, which must be equal, and how many tokens of the prompts were found.

    Args:
        drafted: tokens that the patched model drafts by prompt lookup.
    """
    before, texts = found(model), []
    for one in (stock, model):
        if seed is not None:
            torch.manual_seed(seed)
        drafts = {"prompt_lookup_num_tokens": drafted} if drafted and one is model else {}
        texts.append(generate(one, inputs, new_tokens, **options, **drafts).sequences)
    assert torch.equal(*texts)
    assert used_blocks(model) == 0
    assert_pool_accounts(model)
    return texts[1], found(model) - before


def full(tokens: int, size: int) -> int:
    """Tokens in full blocks."""
    return tokens // size * size


@pytest.mark.parametrize("name, size", few(NAMES, SIZES))
def test_turns_of_a_conversation(name, size):
    """What was said is found, but for its last token and the block that is not full; only the rest is computed."""
    stock, model = pair(name, size)
    text, count = same_text(stock, model, prompt(1, 21))
    assert count == 0
    for seed in range(3):
        turn, before = torch.cat([text, prompt(1, 6, seed)], dim=1), stored(model)
        known = text.shape[1] - 1
        text, count = same_text(stock, model, turn)
        assert count == full(known, size)
        assert stored(model) - before == turn.shape[1] - count + 11


@pytest.mark.parametrize("name, system", few(NAMES, [5, 8, 9, 30]))
@pytest.mark.parametrize("size", [1, 4])
def test_users_of_one_system_prompt(name, size, system):
    """Shorter than a window, as long, longer; and a user's text that is long enough for it to leave the window."""
    stock, model = pair(name, size)
    first = prompt(1, system, seed=9)
    for user, length in enumerate([25, 3, 14]):
        ids = torch.cat([first, 3 + user + torch.zeros_like(first[:, :1]), prompt(1, length, seed=user)], dim=1)
        _, count = same_text(stock, model, ids)
        assert count == (full(system, size) if user else 0)


def common_columns(lengths: list[int], known: list[int], width: int) -> int:
    """The column up to which each row's tokens are known, of rows with so many tokens of which so many are known."""
    return min(width - length + count for length, count in zip(lengths, known, strict=True))


@pytest.mark.parametrize("name, size", few(NAMES, SIZES))
def test_batches_of_several_lengths(name, size):
    """Left-padded rows go on from the column up to which all of them are known; rows may begin after it."""
    stock, model = pair(name, size)
    lengths = [6, 19, 33]
    batch = ragged(*lengths)
    text, _ = same_text(stock, model, batch)
    for row in rows_alone(batch):
        assert same_text(stock, model, row)[1] == min(full(row.shape[1], size), row.shape[1] - 1)
    column = common_columns(lengths, [min(full(n, size), n - 1) for n in lengths], 33)
    assert same_text(stock, model, batch)[1] == sum(max(column - 33 + n, 0) for n in lengths)
    turn = torch.cat([text, prompt(3, 5)], dim=1)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 17), value=1)
    known = lengths if name != "llama" else [n + 11 for n in lengths]  # in a window, what was said only from its end on
    column = common_columns([n + 17 for n in lengths], [full(n, size) for n in known], 50)
    count = same_text(stock, model, {"input_ids": turn, "attention_mask": mask})[1]
    expected = sum(max(column - 33 + n, 0) for n in lengths)
    assert count >= expected and (name != "llama" or count == expected)
    other = ragged(*lengths, seed=3)
    other["input_ids"][2, :20] = batch["input_ids"][2, :20]
    assert same_text(stock, model, other)[1] == min(full(20, size), 14), "a row of which nothing is known"


MODES = {
    "beams": dict(num_beams=3, num_return_sequences=2),
    "beam sampling": dict(num_beams=2, do_sample=True, seed=5),
    "lookup": dict(drafted=3),
    "sampling": dict(do_sample=True, top_k=10, seed=3),
    "return sequences": dict(do_sample=True, num_return_sequences=3, seed=4),
    "end of text": dict(eos_token_id=list(range(60, 80))),
    "drafts of rows that end": dict(eos_token_id=list(range(60, 80)), drafted=3),
    "scores": dict(output_scores=True, output_logits=True),
}


@pytest.mark.parametrize("mode, name", few(MODES, NAMES))
def test_modes(name, mode):
    """Before, between and after plain calls: texts of every kind are found and leave what can be found."""
    stock, model = pair(name)
    one_row = mode == "lookup"
    batch = ragged(22) if one_row else ragged(9, 22)
    _, count = same_text(stock, model, batch, **MODES[mode])
    assert count == 0
    text, count = same_text(stock, model, batch, **MODES[mode])
    assert count >= 20
    turn = torch.cat([text[-1:], prompt(1, 6)], dim=1)
    mask = torch.nn.functional.pad(batch["attention_mask"][-1:], (0, turn.shape[1] - 22), value=1)
    _, count = same_text(stock, model, {"input_ids": turn, "attention_mask": mask}, **MODES[mode])
    assert count >= 20
    if "num_beams" not in MODES[mode]:
        said = text[-1, 22:].tolist()
        ends = [i for i, token in enumerate(said) if token in MODES[mode].get("eos_token_id", ())]
        assert count >= full(22 + (ends[0] if ends else 11), 4), "what was said is not found"


def test_beams_that_were_running_are_found():
    stock, model = pair("llama")
    text, _ = same_text(stock, model, prompt(1, 22), num_beams=3)
    _, count = same_text(stock, model, torch.cat([text, prompt(1, 6)], dim=1))
    assert count == full(22 + 11, 4)


def test_assisted_by_a_model():
    stock, model = pair("llama")
    draft = build("llama", noise=0.1)
    draft.generation_config.num_assistant_tokens = 3
    text, _ = same_text(stock, model, prompt(1, 22), assistant_model=draft)
    _, count = same_text(stock, model, torch.cat([text, prompt(1, 6)], dim=1), assistant_model=draft)
    assert count == full(22 + 11, 4)


@pytest.mark.parametrize("options", [dict(prefill_chunk_size=5), dict(output_hidden_states=True)])
def test_calls_whose_prompt_must_be_whole(options):
    """They find nothing, and are found."""
    stock, model = pair("llama")
    for _ in range(2):
        _, count = same_text(stock, model, prompt(1, 21), **options)
        assert count == 0
    states = generate(model, prompt(1, 21), 2, **options).get("hidden_states")
    assert states is None or states[0][0].shape[1] == 21
    assert same_text(stock, model, prompt(1, 21))[1] == 20


def test_the_user_s_caches_are_his():
    """Caches that are given are neither filled nor entered; one that was returned goes on as ever."""
    stock, model = pair("llama")
    ids = prompt(1, 21)
    same_text(stock, model, ids)
    text = generate(stock, ids, 12).sequences
    own, before = hf_turbo.paged_cache(model), found(model)
    forward(model, ids, own)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE_NAME: hf_turbo.paged_cache(model)}
    outputs = generate(model, given, 12)
    assert torch.equal(outputs.sequences, text) and found(model) == before
    first = generate(model, ids, 12)
    assert found(model) > before
    turn = torch.cat([first.sequences, prompt(1, 6)], dim=1)
    kept = cached(model) + used_blocks(model)
    given = {"input_ids": turn, "attention_mask": torch.ones_like(turn), CACHE_NAME: first[CACHE_NAME]}
    assert torch.equal(generate(model, given, 12).sequences, generate(stock, turn, 12).sequences)
    del first, given, outputs, own
    assert used_blocks(model) == 0 and cached(model) <= kept
    assert same_text(stock, model, torch.cat([turn, turn[:, :1]], dim=1))[1] == full(32, 4)


def test_a_returned_cache_that_is_cropped_spoils_nothing():
    """Its last block is kept for others: what it goes on with is written elsewhere."""
    stock, model = pair("llama")
    first = generate(model, prompt(1, 21), 12)
    cache = first[CACHE_NAME]
    cache.crop(-3)  # 32 tokens are 8 full blocks
    turn = torch.cat([first.sequences[:, :29], prompt(1, 6)], dim=1)
    given = {"input_ids": turn, "attention_mask": torch.ones_like(turn), CACHE_NAME: cache}
    assert torch.equal(generate(model, given, 12).sequences, generate(stock, turn, 12).sequences)
    text = first.sequences
    del cache, given, first
    assert same_text(stock, model, torch.cat([text, prompt(1, 3)], dim=1))[1] == 32


# B01: what is not the same text is not found


TOKENS = prompt(1, 64, seed=1)


HASHES = ["own", "constant"]


def with_hash(model, kind: str):
    if kind == "constant":
        handle_of(model).pool.index._hash = lambda parent, content: 0
    return model


def weights_in_place(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def a_row_in_place(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[:3].mul_(2)


def weights_by_data(model):
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)


def weights_replaced(model):
    linear = model.model.layers[0].self_attn.v_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 1.5)


def weights_elsewhere(model):
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data = weight.data * 1.5


def norm_changed(model):
    model.model.norm.variance_epsilon = model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def rope_changed(model):
    model.model.rotary_emb.attention_scaling = 1.3


def rope_frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def other_dtype(model):
    model.to(torch.float64)


CHANGES = [
    weights_in_place, a_row_in_place, weights_by_data, weights_replaced, weights_elsewhere, norm_changed, rope_changed,
    rope_frequencies, other_dtype,
]  # fmt: skip


@pytest.mark.parametrize("change, hash_kind", few(CHANGES, HASHES))
def test_b01_a_model_that_was_changed(change, hash_kind):
    stock, model = pair("llama")
    with_hash(model, hash_kind)
    for expected in (0, 63):
        assert same_text(stock, model, TOKENS)[1] == expected
    before = generate(stock, TOKENS, 12).sequences
    change(stock)
    change(model)
    text, count = same_text(stock, model, TOKENS)
    assert count == 0
    assert change is other_dtype or not torch.equal(text, before), "the change changes nothing: the test shows nothing"
    assert same_text(stock, model, TOKENS)[1] == 63


def adapted(model, seed: int):
    torch.manual_seed(seed)
    config = LoraConfig(target_modules=["k_proj", "v_proj"], r=4, init_lora_weights=False)
    return get_peft_model(model, config).eval()


@PEFT_IS_BEHIND
@pytest.mark.parametrize("hash_kind", HASHES)
def test_b01_adapters(hash_kind):
    """None, one, one of the same name, merged and not: each has texts of its own."""
    stock, model = pair("llama")
    with_hash(model, hash_kind)
    texts = [same_text(stock, model, TOKENS)[0]]
    for seed in (1, 2):
        with_stock, with_model = adapted(stock, seed), adapted(model, seed)
        expected = generate(with_stock, TOKENS, 12).sequences
        for count in (0, 63):
            before = found(model)
            assert torch.equal(generate(with_model, TOKENS, 12).sequences, expected)
            assert found(model) - before == count
        texts.append(expected)
        with with_model.disable_adapter():
            before = found(model)
            assert torch.equal(generate(with_model, TOKENS, 12).sequences, texts[0])
            assert found(model) == before
        with_model.merge_adapter()
        before = found(model)
        assert torch.equal(generate(with_model, TOKENS, 12).sequences, expected)
        assert found(model) == before
        with_model.unmerge_adapter()
        with_stock.unload()
        with_model.unload()
    assert len({tuple(text[0].tolist()) for text in texts}) == 3


def embeddings(model):
    with torch.no_grad():
        return {"inputs_embeds": 1.5 * model.get_input_embeddings()(TOKENS), "input_ids": TOKENS}


def moved(model):
    return {"input_ids": TOKENS, "position_ids": torch.arange(3, 67)[None], "attention_mask": torch.ones_like(TOKENS)}


@pytest.mark.parametrize("inputs, hash_kind", few([embeddings, moved], HASHES))
def test_b01_what_tokens_do_not_say(inputs, hash_kind):
    """Neither found nor entered."""
    stock, model = pair("llama")
    with_hash(model, hash_kind)
    given = inputs(model)
    expected = generate(stock, given, 12).sequences
    assert torch.equal(generate(model, given, 12).sequences, expected)
    assert cached(model) == 0
    same_text(stock, model, TOKENS)
    before, asked = cached(model), hf_turbo.report(model).prefix_tokens
    assert torch.equal(generate(model, given, 12).sequences, expected)
    assert hf_turbo.report(model).prefix_tokens == asked and cached(model) == before


def test_b01_other_kv_formats_and_salts():
    _, model = pair("llama", kv_cache_dtype="int4", size=32)
    handle = handle_of(model)
    seen = {handle.prefix_domain(model), handle.prefix_domain(model, salt="A"), handle.prefix_domain(model, salt="1")}
    for layer, kind in ((0, "int8"), (0, "int4"), (1, "int8")):
        handle.pool.formats[layer] = kind
        seen.add(handle.prefix_domain(model))
    torch.backends.cuda.matmul.allow_tf32 ^= True
    seen.add(handle.prefix_domain(model))
    torch.backends.cuda.matmul.allow_tf32 ^= True
    with torch.autocast("cpu", torch.bfloat16):
        seen.add(handle.prefix_domain(model))
    assert len(seen) == 8 and handle.prefix_domain(model) in seen


def test_b01_autocast_in_between():
    """Keys of another dtype lie in other tensors; when the first dtype comes back, those are new, too."""
    stock, model = pair("llama")
    same_text(stock, model, TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, TOKENS, 3)
    assert same_text(stock, model, TOKENS)[1] == 0


def test_b01_a_constant_hash_changes_nothing():
    """Many texts under one hash: each is found, none for another."""
    stock, model = pair("gemma3_text")
    with_hash(model, "constant")
    texts = [torch.cat([prompt(1, 12, seed=s % 3), prompt(1, 9, seed=s)], dim=1) for s in range(6)]
    for again in range(2):
        for number, ids in enumerate(texts):
            _, count = same_text(stock, model, ids, 6)
            assert count == (20 if again else 12 if number >= 3 else 0)


@pytest.mark.parametrize("length", [1, 3, 4])
def test_texts_of_less_than_a_block(length):
    stock, model = pair("llama")
    for count in (0, 3 if length == 4 else 0):
        assert same_text(stock, model, prompt(1, length), 1)[1] == count


# What steps aside


def test_hooks_may_do_anything():
    stock, model = pair("llama")
    factor = [1.0]
    hooked = [one.model.layers[0].register_forward_hook(lambda m, i, out: out * factor[0]) for one in (stock, model)]
    for value in (1.0, 1.5):
        factor[0] = value
        assert same_text(stock, model, TOKENS)[1] == 0
    assert any("has a forward hook" in reason for reason in stepped_aside(model))
    for hook in hooked:
        hook.remove()
    for count in (0, 63):
        assert same_text(stock, model, TOKENS)[1] == count


def test_frequencies_that_depend_on_the_length():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    stock, model = (build("llama", rope_parameters=scaling, max_position_embeddings=32) for _ in range(2))
    hf_turbo.patch(model, block_size=4, prefix_cache=True)
    for _ in range(2):
        assert same_text(stock, model, prompt(1, 20), 30)[1] == 0
    assert any("frequencies" in reason for reason in stepped_aside(model))


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        model = build("llama")
    hf_turbo.patch(model, prefix_cache=True)
    generate(model, prompt(1, 40), 3)
    assert cached(model) == 0 and any("can't be seen" in reason for reason in stepped_aside(model))


def test_training_mode_keeps_nothing():
    _, model = pair("llama")
    generate(model.train(), TOKENS, 3)
    assert cached(model) == 0


# Memory


@pytest.mark.parametrize("name", NAMES)
def test_a_small_limit(name):
    """The oldest texts go, those in use never do, and the pool stays as large as it must be."""
    stock, model = pair(name, prefix_cache=30_000)
    texts = [prompt(1, 40, seed=s) for s in range(8)]
    for ids in texts:
        same_text(stock, model, ids)
        report = hf_turbo.report(model)
        assert 0 < report.cached_bytes <= 30_000
    assert report.evicted_blocks > 0 and report.pool_bytes < 120_000
    assert same_text(stock, model, texts[-1])[1] >= 36
    assert same_text(stock, model, texts[0])[1] == 0


def test_release_gives_all_back():
    stock, model = pair("gemma3_text")
    same_text(stock, model, TOKENS)
    report = hf_turbo.report(model)
    assert report.cached_blocks > 0 and report.cached_bytes > 0
    assert "prefix cache: 0 of 64 prompt tokens found" in str(report)
    hf_turbo.release(model)
    report = hf_turbo.report(model)
    assert report.cached_blocks == report.blocks_total == 0
    assert same_text(stock, model, TOKENS)[1] == 0


def test_copies_of_a_model_have_a_cache_of_their_own():
    stock, model = pair("llama")
    same_text(stock, model, TOKENS)
    other = copy.deepcopy(model)
    assert cached(other) == 0
    for count in (0, 63):
        assert same_text(stock, other, TOKENS)[1] == count


def test_without_the_option_nothing_is_kept():
    stock, model = pair("llama", prefix_cache=False)
    for _ in range(2):
        assert same_text(stock, model, TOKENS)[1] == 0
    assert cached(model) == 0 and "prefix cache" not in str(hf_turbo.report(model))


@pytest.mark.parametrize("value", [-1, "yes", 1.5, None])
def test_what_the_option_may_be(value):
    with pytest.raises(ValueError, match="prefix_cache"):
        hf_turbo.TurboConfig(prefix_cache=value)


def test_threads():
    """Several threads, one model, texts that begin alike; memory is given back now and then."""
    stock, model = pair("gemma3_text")
    first = prompt(1, 24)
    turns = [torch.cat([first[:, : 12 + 4 * (s % 4)], prompt(1, 5, seed=s)], dim=1) for s in range(8)]
    expected = [generate(stock, ids, 8).sequences for ids in turns]

    def work(number):
        texts = []
        for turn in range(4):
            texts.append(generate(model, turns[number], 8).sequences)
            if number == 0 and turn == 1:
                hf_turbo.release(model)
        return texts

    with accelerated(model), ThreadPoolExecutor(4) as threads:
        for texts, wanted in zip(threads.map(work, range(8)), expected, strict=True):
            assert all(torch.equal(text, wanted) for text in texts)
    assert found(model) > 0 and used_blocks(model) == 0
    assert_pool_accounts(model)


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name):
    stock, model = pair(name)
    stock, model = stock.cuda(), model.cuda()
    batch = {key: x.cuda() for key, x in ragged(9, 22, 40).items()}
    for expected in (0, 40):
        _, count = same_text(stock, model, batch, 30)
        assert count >= expected
    text, _ = same_text(stock, model, batch, 30, num_beams=3)
    turn = torch.cat([text, prompt(3, 5).cuda()], dim=1)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 35), value=1)
    _, count = same_text(stock, model, {"input_ids": turn, "attention_mask": mask}, 30)
    assert count > 0
