"""The zoo: tiny random models of Transformers' causal-LM architectures.

`ZOO` says for each architecture how its config differs from `SIZES`, what `hf_turbo.patch` is expected to do
with it, and which of its features the generated text depends on (`guards`). `build(name)` makes the model.

The weights are drawn so that everything matters: attention is peaked, biases and norm weights are away from
their neutral values, windows are shorter than the prompts, raw scores pass the soft caps, sinks take a good
part of the attention. Each parameter is seeded by its own name, so every version of Transformers has the same
model, and a config override that adds or removes no parameter leaves the weights as they were.
"""

import inspect
import sys
import zlib
from dataclasses import dataclass, field, replace

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ACCELERATED = "accelerated"
STEPS_ASIDE = "steps aside"
BY_VERSION = "accelerated where Transformers sends it through its attention interface, else steps aside"

WINDOW = 8
PAD, BOS = 0, 1

# Given to every config that has a field of that name.
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # tied, a random model repeats its last token for ever
    # older names of the same things
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 256,
    "n_ctx": 256,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    "num_heads": 4,
    "num_layers": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "rotary_dim": 4,
    "word_embed_proj_dim": 32,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # multi-head latent attention: keys and values of different sizes
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    # state-space and linear-attention layers
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "state_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

SLIDING_FULL = ["sliding_attention", "full_attention"]
FULL_SLIDING = ["full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Fill:
    """A guard that overwrites every parameter whose name ends with `suffix`."""

    suffix: str
    value: float


@dataclass(frozen=True)
class Tiny:
    config: dict = field(default_factory=dict)
    expect: str = ACCELERATED
    # feature -> config overrides, or a Fill, that turn it off
    guards: dict = field(default_factory=dict)
    # multiplies the query weights: peaked attention, raw scores past the soft cap
    query_gain: float = 3.0
    # multiplies all weight matrices: layers that outweigh the embedding of the last token
    gain: float = 1.5
    seed: int = 0
    seq2seq: bool = False
    model_type: str | None = None  # when it is not the row's name


NO_WINDOW = {"sliding_window": 4096}
WINDOWED = {"window": NO_WINDOW}
NO_SINKS = Fill("sinks", -1e4)


def _off(option: str, value) -> dict:
    return {option: {option: value}}


# multi-head latent attention: the cache holds latents, from which keys of 16 and values of 12 are made
MLA = Tiny({"num_key_value_heads": 4}, expect=STEPS_ASIDE)


ZOO: dict[str, Tiny] = {
    # full attention in every layer
    "llama": Tiny(),
    "apertus": Tiny(seed=1),
    "arcee": Tiny(),
    "aria_text": Tiny(),
    "axk1": MLA,
    "biogpt": Tiny(),
    "bitnet": Tiny(),
    "codegen": Tiny(expect=BY_VERSION),
    "cohere": Tiny({"use_qk_norm": True, "logit_scale": 0.5}),
    "ctrl": Tiny({"dff": 48}, seed=4),
    "dbrx": Tiny({"attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4}}),
    "deepseek_v2": replace(MLA, seed=1),
    "deepseek_v3": MLA,
    "dots1": Tiny(seed=1),
    "ernie4_5": Tiny(),
    "ernie4_5_moe": Tiny(),
    "flex_olmo": Tiny(),
    "gemma": Tiny(seed=2),
    "glm": Tiny(),
    "glm4": Tiny(),
    "glm4_moe": Tiny(),
    "glm4_moe_lite": MLA,
    "gpt2": Tiny(
        {"scale_attn_by_inverse_layer_idx": True},
        guards=_off("scale_attn_by_inverse_layer_idx", False),
        seed=1,
    ),
    "gpt_bigcode": Tiny(seed=1),
    "gpt_neox": Tiny({"rotary_pct": 0.5}),
    "gptj": Tiny(expect=BY_VERSION, seed=1),
    "granite": Tiny(
        {
            "attention_multiplier": 0.6,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 1.5,
            "logits_scaling": 2.0,
        },
        guards=_off("attention_multiplier", 8**-0.5),
        seed=1,
    ),
    "granitemoe": Tiny({"attention_multiplier": 0.6}, guards=_off("attention_multiplier", 8**-0.5)),
    "granitemoeshared": Tiny({"attention_multiplier": 0.6, "shared_intermediate_size": 16}),
    "helium": Tiny(),
    "hunyuan_v1_dense": Tiny(),
    "hunyuan_v1_moe": Tiny(),
    "hy_v3": Tiny(),
    "hyperclovax": Tiny(),
    "internlm3": Tiny(),
    "jais2": Tiny(),
    "minicpm3": MLA,
    "minimax_m2": Tiny(),
    "nanochat": Tiny(seed=2),
    "nemotron": Tiny(seed=2),
    "olmo": Tiny({"clip_qkv": 2.0}, guards=_off("clip_qkv", None)),
    "olmo2": Tiny(seed=1),
    "olmoe": Tiny(),
    "opt": Tiny(seed=5),
    "persimmon": Tiny(),
    "phi": Tiny(seed=1),
    "qwen2": Tiny(),
    "qwen2_moe": Tiny(),
    "qwen3": Tiny(),
    "qwen3_moe": Tiny(),
    "seed_oss": Tiny(),
    "smollm3": Tiny({"no_rope_layers": [1, 0]}),
    "solar_open": Tiny(),
    "stablelm": Tiny({"use_qkv_bias": True, "qk_layernorm": True}, seed=5),
    "youtu": MLA,
    # sliding windows in every layer
    "mistral": Tiny(guards=WINDOWED),
    "ministral3": Tiny(guards=WINDOWED),
    "mixtral": Tiny(guards=WINDOWED),
    "phi3": Tiny(guards=WINDOWED),
    "phimoe": Tiny(guards=WINDOWED),
    "starcoder2": Tiny(guards=WINDOWED),
    # windows in some layers, soft caps, sinks
    "afmoe": Tiny({"layer_types": SLIDING_FULL}, guards=WINDOWED),
    "cohere2": Tiny({"layer_types": SLIDING_FULL, "logit_scale": 0.5}, guards=WINDOWED),
    "cohere2_moe": Tiny({"layer_types": SLIDING_FULL, "logit_scale": 0.5}, guards=WINDOWED),
    "cwm": Tiny({"layer_types": FULL_SLIDING}, guards=WINDOWED),
    "exaone4": Tiny({"layer_types": SLIDING_FULL}, guards=WINDOWED),
    "exaone_moe": Tiny({"layer_types": SLIDING_FULL}, guards=WINDOWED),
    "gemma2": Tiny(
        {"layer_types": SLIDING_FULL, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
        guards={
            **WINDOWED,
            **_off("attn_logit_softcapping", None),
            **_off("query_pre_attn_scalar", 64),
        },
    ),
    "gemma3_text": Tiny(
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 4,
        },
        guards={**WINDOWED, **_off("query_pre_attn_scalar", 64)},
    ),
    "gpt_oss": Tiny(guards={**WINDOWED, "sinks": NO_SINKS}),
    "granite_swa": Tiny({"layer_types": FULL_SLIDING, "attention_multiplier": 0.6}, guards=WINDOWED),
    "granitemoe_swa": Tiny({"layer_types": FULL_SLIDING, "attention_multiplier": 0.6}, guards=WINDOWED),
    "laguna": Tiny({"layer_types": FULL_SLIDING}, guards=WINDOWED),
    "mellum": Tiny({"layer_types": FULL_SLIDING}, guards=WINDOWED),
    "mimo_v2_flash": Tiny({"layer_types": FULL_SLIDING}, guards={**WINDOWED, "sinks": NO_SINKS}),
    "ministral": Tiny({"layer_types": SLIDING_FULL}, guards=WINDOWED),
    "modernbert-decoder": Tiny(
        {"layer_types": FULL_SLIDING, "local_attention": 2 * WINDOW}, guards=_off("local_attention", 4096)
    ),
    "olmo3": Tiny({"layer_types": SLIDING_FULL}, guards=WINDOWED),
    "vaultgemma": Tiny(
        {"layer_types": SLIDING_FULL, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
        guards={**WINDOWED, **_off("attn_logit_softcapping", None)},
    ),
    # chunks, and layers that share their keys and values
    "llama4_text": Tiny(
        {
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 48,
            "floor_scale": 4,
        },
        expect=STEPS_ASIDE,
        guards=_off("attention_chunk_size", 4096),
    ),
    "gemma3n_text": Tiny(
        {
            "num_hidden_layers": 4,
            "layer_types": SLIDING_FULL * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        },
        expect=STEPS_ASIDE,
        guards=WINDOWED,
    ),
    "gemma4_text": Tiny(
        {
            "num_hidden_layers": 4,
            "layer_types": SLIDING_FULL * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "global_head_dim": 16,
            "num_experts": None,
        },
        expect=STEPS_ASIDE,
        guards=WINDOWED,
    ),
    # attention of their own, or a bias in it
    "bloom": Tiny(expect=STEPS_ASIDE, seed=9),
    "doge": Tiny(
        {"sliding_window": None, "keep_window_size": 4},
        guards=_off("keep_window_size", 4096),
        expect=STEPS_ASIDE,
    ),
    "falcon": Tiny(expect=STEPS_ASIDE),
    "falcon-alibi": Tiny({"alibi": True}, expect=STEPS_ASIDE, model_type="falcon", seed=8),
    "diffllama": Tiny(expect=STEPS_ASIDE),
    "jetmoe": Tiny({"kv_channels": 8}, expect=STEPS_ASIDE),
    "gpt_neo": Tiny({"attention_types": [[["global", "local"], 1]], "window_size": WINDOW}, expect=STEPS_ASIDE),
    "gpt_neox_japanese": Tiny(expect=STEPS_ASIDE),
    "mpt": Tiny(expect=STEPS_ASIDE, seed=4),
    "openai-gpt": Tiny(expect=STEPS_ASIDE, seed=15),
    "xglm": Tiny(expect=STEPS_ASIDE, seed=2),
    # state-space, convolution and linear-attention layers
    "bamba": Tiny({"attn_layer_indices": [1]}, expect=STEPS_ASIDE),
    "falcon_mamba": Tiny(expect=STEPS_ASIDE),
    "jamba": Tiny({"attn_layer_period": 2, "attn_layer_offset": 1}, expect=STEPS_ASIDE),
    "lfm2": Tiny({"layer_types": ["conv", "full_attention"]}, expect=STEPS_ASIDE),
    "mamba": Tiny(expect=STEPS_ASIDE),
    "minimax": Tiny({"layer_types": ["linear_attention", "full_attention"]}, expect=STEPS_ASIDE, seed=5),
    "olmo_hybrid": Tiny({"layer_types": ["linear_attention", "full_attention"]}, expect=STEPS_ASIDE),
    "qwen3_next": Tiny({"layer_types": ["linear_attention", "full_attention"]}, expect=STEPS_ASIDE),
    "rwkv": Tiny(expect=STEPS_ASIDE),
    # encoders with a decoder
    "bart": Tiny(gain=4.0, seed=17, expect=STEPS_ASIDE, seq2seq=True),
    "t5": Tiny({"decoder_start_token_id": PAD}, gain=4.0, seed=5, expect=STEPS_ASIDE, seq2seq=True),
}

# What most people run, and one of each kind: these take more cases of the matrix than the others.
COMMON = set(
    """
    bart bloom cohere cohere2 deepseek_v3 doge exaone4 falcon gemma gemma2 gemma3_text gemma4_text glm4
    gpt2 gpt_neo gpt_neox gpt_oss gptj granite granitemoe helium jamba llama llama4_text ministral
    mistral mixtral nemotron olmo2 olmoe opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm
    starcoder2
    """.split()  # noqa: SIM905
)
assert ZOO.keys() >= COMMON

# One of each kind of attention, and of what steps aside: what is tried in every way.
THOROUGH = {"bloom", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "llama", "llama4_text", "mistral", "mixtral", "phi3"}
assert COMMON >= THOROUGH


def in_this_transformers(name: str) -> bool:
    return ZOO[name].seq2seq or model_type(name) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def model_type(name: str) -> str:
    return ZOO[name].model_type or name


def expectation(model: PreTrainedModel, name: str) -> str:
    """What patch() should do with this model: the table's word, settled where it depends on the version."""
    if ZOO[name].expect != BY_VERSION:
        return ZOO[name].expect
    uses_interface = hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")
    return ACCELERATED if uses_interface else STEPS_ASIDE


def config(name: str, **overrides):
    """The tiny config of an architecture; `overrides` win over the table's."""
    config_class = CONFIG_MAPPING[model_type(name)]
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    known |= set(getattr(config_class, "__dataclass_fields__", {}))
    sizes = {key: value for key, value in SIZES.items() if key in known}
    return config_class(**{**sizes, **ZOO[name].config, **overrides})


def build(name: str, noise: float = 0.0, **overrides) -> PreTrainedModel:
    """The tiny model of an architecture; `noise` moves its weights, for a draft model that is often right."""
    auto = AutoModelForSeq2SeqLM if ZOO[name].seq2seq else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)  # some small parameters start at random
        model = auto.from_config(config(name, **overrides), attn_implementation="eager").eval()
    _draw_weights(model, ZOO[name], noise)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    model.tiny_name = name
    return model


def build_without(name: str, feature: str) -> PreTrainedModel:
    """The same weights with one feature of the architecture forced off."""
    guard = ZOO[name].guards[feature]
    if not isinstance(guard, Fill):
        return build(name, **guard)
    model = build(name)
    targets = [p for n, p in model.named_parameters() if n.endswith(guard.suffix)]
    assert targets, f"{name} has no parameter ending in {guard.suffix!r}"
    for parameter in targets:
        parameter.data.fill_(guard.value)
    return model


_QUERIES = ("q_proj", "q_b_proj", "q_norm", "query", "qkv", "c_attn", "Wqkv")


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, tiny: Tiny, noise: float) -> None:
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        values = torch.Generator().manual_seed(zlib.crc32(name.encode()) + tiny.seed)
        drawn = torch.randn(parameter.shape, generator=values)
        if parameter is embedding:
            parameter.copy_(drawn)
        elif name.endswith("sinks"):
            parameter.copy_(drawn + 3.0)
        elif parameter.ndim >= 2 and "A_log" not in name:
            parameter.copy_(drawn * tiny.gain * parameter.shape[-1] ** -0.5)
        else:
            # norm weights, biases and the like keep what they are near to: 1, or 0
            parameter.add_(drawn * 0.2)
        if any(part in name for part in _QUERIES):
            parameter.mul_(tiny.query_gain)
        if head is not None and parameter is head.weight:
            parameter.mul_(3.0)
        if noise:
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=values))
