"""`kv_cache_dtype`: text equals that of a cache of the same policy that keeps all keys and computes codes anew."""

import copy

import pytest
import torch
from combinations import few
from helpers import assert_pool_accounts, forward, generate, groups, probed, prompt, ragged, used_blocks
from kv_policy import follow_policy, whole_cache
from steps import step
from tiny_models import build

import hf_turbo
from hf_turbo.cache.block_table import BlockTable
from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling import attention
from hf_turbo.ops.kv_format import KV_FORMATS, end_of_codes
from hf_turbo.patching import handle_of

B = 32
KINDS = ("int8", "fp8", "int4")
#: name -> (architecture, overrides)
MODELS = {
    "llama": ("llama", {}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "wide window": ("mistral", {"sliding_window": 110}),
    "narrow window": ("gemma3_text", {"sliding_window": 8}),
    "window and full": ("gemma3_text", {"sliding_window": 110}),
    "soft caps": ("gemma2", {"sliding_window": 110}),
    "sinks": ("gpt_oss", {"sliding_window": 110}),
}


def pair(name: str, kind: str = "int4", **options):
    """A stock model that follows the policy, and the same one patched."""
    architecture, overrides = MODELS[name]
    overrides = {"max_position_embeddings": 2048, **overrides}
    policy, model = build(architecture, **overrides), build(architecture, **overrides)
    hf_turbo.patch(model, block_size=B, kv_cache_dtype=kind, **options)
    handle = handle_of(model)  # what a prompt's keys would have to say of it is not asked
    handle.pool.formats |= dict.fromkeys(range(len(handle.sliding_windows)), kind)
    return follow_policy(policy, kind, B), model


def same_text(policy, model, inputs, new_tokens=40, seed=None, of_model=None, **options):
    """Both models' text, which must be equal; the patched one's free blocks are poisoned all along."""
    seen = policy.config.kv_policy.queries_with_codes
    outputs = []
    for one, own in ((policy, whole_cache()), (model, of_model or {})):
        if seed is not None:
            torch.manual_seed(seed)
        given = dict(inputs) if isinstance(inputs, dict) else {
            "input_ids": inputs, "attention_mask": torch.ones_like(inputs)
        }  # fmt: skip
        outputs.append(generate(one, {**own, **given}, new_tokens, **options))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert policy.config.kv_policy.queries_with_codes > seen, "nothing was read as codes: the test shows nothing"
    assert_all_accounts(model)
    return outputs


def assert_all_accounts(model):
    assert_pool_accounts(model)
    for group in groups(model).values():
        manager = group.codes.manager
        assert manager.num_free + manager.num_used == manager.num_blocks == sum(manager.segment_sizes)


def codes_of(cache) -> list[int]:
    return [sum(map(len, group.table.codes.rows)) for group in cache.groups.values()]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every block that is given back is filled with NaN, codes with 0xFF."""

    def poison(method):
        def poisoning(self, *args, **kwargs):
            result = method(self, *args, **kwargs)
            self.group.fill(255 if self.codes is None else float("nan"))
            return result

        return poisoning

    for name in ("grow", "truncate", "select"):
        monkeypatch.setattr(BlockTable, name, poison(getattr(BlockTable, name)))


@pytest.mark.parametrize("name", MODELS)
def test_greedy(name):
    policy, model = pair(name)
    outputs = same_text(policy, model, ragged(80, 110), 40)
    assert max(codes_of(outputs[1][CACHE_NAME])) >= 3
    del outputs
    assert used_blocks(model) == 0


@pytest.mark.parametrize("name, kind", few(["qwen2", "window and full"], ["int8", "fp8"]))
def test_other_formats(name, kind):
    policy, model = pair(name, kind)
    same_text(policy, model, prompt(1, 110), 40)


MODES = {
    "beams": dict(num_beams=3, num_return_sequences=2),
    "beam sampling": dict(num_beams=2, do_sample=True, seed=5),
    "lookup": dict(prompt_lookup_num_tokens=7),
    "sampling": dict(do_sample=True, top_k=10, seed=3),
    "return sequences": dict(do_sample=True, num_return_sequences=3, seed=4),
}


@pytest.mark.parametrize("mode, name", few(MODES, ["llama", "window and full"]))
def test_modes(name, mode):
    policy, model = pair(name)
    inputs = prompt(1, 110) if mode == "lookup" else ragged(80, 110)
    same_text(policy, model, inputs, 25, **MODES[mode])
    assert used_blocks(model) == 0


@pytest.mark.parametrize("chunk, name", few([7, 32, 100], ["llama", "window and full"]))
def test_chunks(name, chunk):
    policy, model = pair(name)
    same_text(policy, model, ragged(181, 150), 6, prefill_chunk_size=chunk)


@pytest.mark.parametrize("name, drafts", few(["llama", "wide window", "narrow window"], [(3, False), (35, True)]))
def test_assisted(name, drafts):
    drafted, draft_is_quantized = drafts
    policy, model = pair(name)
    architecture, overrides = MODELS[name]
    draft = build(architecture, noise=0.02, **{"max_position_embeddings": 2048, **overrides})
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.num_assistant_tokens = drafted
    hf_turbo.patch(draft, block_size=B, kv_cache_dtype="int8" if draft_is_quantized else None)
    # Drafts are what plain steps would see: the policy is asked step by step.
    same_text(policy, model, prompt(1, 110), 40, of_model={"assistant_model": draft})
    assert used_blocks(model) == used_blocks(draft) == 0


@pytest.mark.parametrize("name, crop", [("llama", 0), ("llama", 3), ("sinks", 0), ("window and full", 0)])
def test_second_turn(name, crop):
    policy, model = pair(name)
    texts, batch = [], ragged(80, 110)
    for one, own in ((policy, whole_cache()), (model, {})):
        first = generate(one, {**batch, **own}, 20)
        cache = first[CACHE_NAME]
        if crop:
            cache.crop(-crop)
        turn = torch.cat([first.sequences[:, : 129 - crop], prompt(2, 60, seed=8)], 1)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, turn.shape[1] - 110), value=1)
        texts.append(generate(one, {"input_ids": turn, "attention_mask": mask, CACHE_NAME: cache}, 20).sequences)
    assert torch.equal(*texts)
    del first, cache
    assert used_blocks(model) == 0
    assert_all_accounts(model)


@pytest.mark.parametrize("name", ["llama", "window and full", "narrow window", "soft caps", "sinks"])
def test_prompts_that_nothing_else_serves(monkeypatch, name):
    """A prompt sees itself as it is there, too, by way of blocks that are not the cache's."""
    monkeypatch.setattr(attention.prompt, "attend_prompt", lambda *args: None)
    policy, model = pair(name)
    for options in ({}, {}, {"num_beams": 2}):
        same_text(policy, model, ragged(140, 200), 5, **options)
    assert hf_turbo.report(model).tokens_stored == 2 * (340 + 8) + 340 + 2 * 2 * 4


def test_layers_of_another_format():
    policy, model = pair("llama")
    handle_of(model).pool.formats[1] = policy.config.kv_policy.kinds[1] = "int8"
    same_text(policy, model, prompt(1, 110), 40)
    report = hf_turbo.report(model)
    assert report.protected_layers == {1: "int8"} and "can't take int4: layers 1" in str(report)
    first, second = (store.codes.block_bytes for store in groups(model)[None].stores.values())
    assert first < second and report.kv_bytes_per_token == (first + second) / B


def test_codes_never_change():
    _, model = pair("llama")
    seen: dict[int, torch.Tensor] = {}

    def look():
        group = groups(model)[None]
        kv = group.kv(group.stores[0]).codes
        in_use = [i for i, is_free in enumerate(group.codes.manager.free_flags()[0]) if not is_free]
        for block in in_use:
            now = torch.cat([kv.k_segments[0][block].flatten(), kv.v_segments[0][block].flatten()])
            assert torch.equal(seen.setdefault(block, now), now)
        return len(in_use)

    _, counts = probed(model, ragged(100, 127), look, 75)
    assert counts[0] == 2 and counts[-1] == 7


# Rows, and tokens taken back (Q03)


def filled(model, length: int, rows: int = 2, seed: int = 0):
    """A cache of so many tokens a row, of which the last ones were brought one by one."""
    cache = hf_turbo.paged_cache(model)
    ids = prompt(rows, length, seed)
    forward(model, ids[:, : length - 3], cache)
    for i in range(length - 3, length):
        forward(model, ids[:, i : i + 1], cache)
    return cache


def content(cache) -> list[torch.Tensor]:
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


EDGES = (127, 128, 129)


@pytest.mark.parametrize("name, length", few(["llama", "window and full"], EDGES))
def test_q03_rows_change_places(name, length):
    """With codes and a block that has just become full: as if the tensors had been told to."""
    _, model = pair(name)
    for method, argument, rows in (
        ("reorder_cache", torch.tensor([1, 1]), [1, 1]),
        ("reorder_cache", torch.tensor([1, 0]), [1, 0]),
        ("batch_select_indices", torch.tensor([1]), [1]),
        ("batch_repeat_interleave", 3, [0, 0, 0, 1, 1, 1]),
    ):
        cache = filled(model, length)
        before, twin = content(cache), copy.deepcopy(cache)
        getattr(cache, method)(argument)
        assert all(torch.equal(now, x[rows]) for now, x in zip(content(cache), before, strict=True))
        step = prompt(len(rows), 4, seed=9)
        got = forward(model, step, cache).logits
        for row, source in enumerate(rows):
            alone = copy.deepcopy(twin)
            alone.batch_select_indices(torch.tensor([source]))
            expected = forward(model, step[row : row + 1], alone).logits
            torch.testing.assert_close(got[row : row + 1], expected, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(now, x) for now, x in zip(content(twin), before, strict=True))
    del cache, twin, alone
    assert used_blocks(model) == 0


@pytest.mark.parametrize("length", EDGES)
def test_q03_beams_just_after_codes_were_made(length):
    policy, model = pair("llama")
    same_text(policy, model, prompt(2, length), 5, num_beams=3)


@pytest.mark.parametrize("rejected, length", few([1, 32, 33, B + 3], EDGES))
def test_q03_rejected_tokens_leave_no_trace(length, rejected):
    """A forward's tokens are taken back, whichever blocks it filled: exactly what a cache has that never saw them."""
    _, model = pair("window and full")
    cache = filled(model, length)
    never = copy.deepcopy(cache)
    forward(model, prompt(2, rejected, seed=4), cache)
    cache.crop(-rejected)
    assert cache.get_seq_length() == length
    for seed in (5, 6):
        step = prompt(2, 35, seed=seed)
        assert torch.equal(forward(model, step, cache).logits, forward(model, step, never).logits)
    del cache, never
    assert used_blocks(model) == 0


@pytest.mark.parametrize("recorded", [False, True])
def test_q03_tokens_of_many_forwards_taken_back(recorded):
    """Exact where it was announced; otherwise within a step of the codes that have to serve again."""
    _, model = pair("llama", "int8")
    cache = filled(model, 150)
    never = copy.deepcopy(cache)
    if recorded:
        cache.activate_past_recording()
    for token in range(90):
        forward(model, prompt(2, 1, seed=token), cache)
    cache.crop(-90)
    for now, x in zip(content(cache), content(never), strict=True):
        step = (x.amax() - x.amin()) / 255
        assert (now - x).abs().max() <= (0 if recorded else step)
    turn = prompt(2, 40, seed=1)
    logits, expected = (forward(model, turn, one).logits for one in (cache, never))
    assert torch.equal(logits, expected) or (not recorded and (logits - expected).abs().max() < 1)
    cache.crop(-cache.get_seq_length())
    assert used_blocks(model) == never.num_blocks


@pytest.mark.parametrize("brought, length", few([1, 70], EDGES))
def test_a_forward_that_failed(length, brought):
    """It has made codes, taken blocks and written to some layers; the same tokens may be sent again."""
    _, model = pair("llama")
    cache, turn = filled(model, length), prompt(2, brought, seed=1)
    never = copy.deepcopy(cache)

    def fail(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        forward(model, turn, cache)
    hook.remove()
    cache.crop(-(cache.get_seq_length() - length))
    got, expected = forward(model, turn, cache).logits, forward(model, turn, never).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)  # blocks lie elsewhere: some CPUs round otherwise
    del cache, never
    assert used_blocks(model) == 0


@pytest.mark.parametrize("part, method", [(None, "quantize_blocks"), (None, "allocate"), ("codes", "allocate")])
def test_memory_that_ran_out(monkeypatch, part, method):
    """Nothing is lost, and codes that were not written are not taken for such."""
    _, model = pair("llama")
    cache = filled(model, 128)
    never = copy.deepcopy(cache)
    group = groups(model)[None]

    def fails(*args):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(group.codes if part else group, method, fails)
        with pytest.raises(torch.OutOfMemoryError):
            forward(model, prompt(2, 100), cache)
    for i in range(70):
        token = prompt(2, 1, seed=i)
        assert torch.equal(forward(model, token, cache).logits, forward(model, token, never).logits)
    del cache, never
    assert used_blocks(model) == 0


# Lengths, types and what a cache shows (Q04)


@pytest.mark.parametrize("kind, dtype", few(KINDS, [torch.float32, torch.float16, torch.bfloat16]), ids=str)
def test_q04_questions_on_one_context(kind, dtype):
    """A context once, then three questions with crops between them."""
    _, model = pair("window and full", kind)
    model.to(dtype)
    cache, context = hf_turbo.paged_cache(model), prompt(1, 150)
    cache.activate_past_recording()
    forward(model, context, cache)
    for seed in range(3):
        question = prompt(1, 40, seed=seed)
        for i in range(0, 40, 8):
            logits = forward(model, question[:, i : i + 8], cache).logits
            assert logits.isfinite().all() and logits.dtype == dtype
            length = 150 + i + 8
            assert cache.get_seq_length() == length
            assert cache.get_mask_sizes(1, 2) == (length + 1, 0)
            assert cache.get_mask_sizes(1, 0) == (110, length - 109)
            for layer in cache.layers:
                assert layer.keys.dtype == layer.values.dtype == dtype and layer.keys.device == model.device
                assert layer.keys.shape[2] == (109 if layer.is_sliding else length)
        cache.crop(-40)
        assert cache.get_seq_length() == 150
    for keys, values, _ in cache:
        assert keys.dtype == values.dtype == dtype and keys.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_layers_show(kind):
    """Wide blocks as they are, codes as the numbers they stand for; zeros at padding."""
    policy, model = pair("qwen2", kind)
    batch, texts = ragged(150, 170), []
    for one, own in ((policy, whole_cache()), (model, {})):
        texts.append(generate(one, {**batch, **own}, 2)[CACHE_NAME])
    for mine, theirs in zip(texts[1].layers, texts[0].layers, strict=True):
        for got, full in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert got.shape == full.shape and (got[0, :, :20] == 0).all()
            for row, padding in enumerate((20, 0)):
                end = padding + end_of_codes(171 - padding, B) * B
                for part in (slice(padding, padding + B), slice(end, None)):
                    torch.testing.assert_close(got[row, :, part], full[row, :, part])
                coded = got[row, :, padding + B : end], full[row, :, padding + B : end]
                assert not torch.equal(*coded)
                assert (coded[0] - coded[1]).norm() < {"int8": 0.01, "fp8": 0.06, "int4": 0.15}[kind] * coded[1].norm()


def test_bytes():
    """What the report says of a block of either kind is what the pool's tensors take."""
    _, model = pair("llama", "int8")
    cache = filled(model, 200)
    report, group = hf_turbo.report(model), groups(model)[None]
    tensors = [x for store in group.stores.values() for x in (*store.kv.k_segments, *store.kv.v_segments)]
    codes = [x for s in group.stores.values() for x in (*s.codes.kv.k_segments, *s.codes.kv.v_segments)]
    assert report.pool_bytes == sum(x.nbytes for x in tensors + codes)
    assert report.wide_kv_bytes_per_token == 2 * 2 * (8 + 8) * 4
    assert report.kv_bytes_per_token == 2 * 2 * KV_FORMATS["int8"].bytes_per_token(B, 8, 8)
    assert report.blocks_in_use == cache.num_blocks == 2 * (3 + 4)
    assert report.kv_cache_dtype == "int8" and "KV cache in int8" in str(report)
    del cache
    hf_turbo.release(model)
    assert hf_turbo.report(model).pool_bytes == 0
    caches = [filled(model, 200) for _ in range(2)]
    assert torch.equal(*(cache.layers[0].keys for cache in caches))


def test_a_step_as_it_is_captured():
    """Over the edge of a block, against the model's own forward."""
    _, model = pair("window and full")
    own, captured = filled(model, 124), filled(model, 124)
    with torch.no_grad():
        for i in range(124, 132):
            ids = prompt(2, 1, seed=i)
            expected = forward(model, ids, own).logits
            got = step(model, captured, input_ids=ids, position_ids=torch.full((2, 1), i), use_cache=True)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for now, x in zip(content(captured), content(own), strict=True):
        torch.testing.assert_close(now, x, rtol=1e-4, atol=1e-4)
