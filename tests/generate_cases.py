"""Ways of calling generate() that a patched model must answer as the unpatched one does.

A case is a function of a model that returns named results: tensors, lists or tuples of them. `CASES` has all
by name. They cross the edges that matter to a cache of blocks: prompts and texts are longer than a block of 4
and than the zoo's windows of 8.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from helpers import generate, prompt, ragged
from tiny_models import build
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from hf_turbo.compat import CACHE_NAME

NEW_TOKENS = 14
SEED = 7


@dataclass(frozen=True)
class Case:
    run: Callable[..., dict]
    # the model may leave its fast path for this call, saying so
    may_step_aside: bool = False
    # the case whose text this one gives too: asked of the patched model where the unpatched one raises
    text_of: str | None = None
    # also run for the less common architectures when time is short
    core: bool = False


CASES: dict[str, Case] = {}


def case(**options):
    def register(function):
        CASES[function.__name__.replace("_", "-")] = Case(function, **options)
        return function

    return register


SINGLE = prompt(1, 11)
PLAIN = prompt(2, 11)
RAGGED = ragged(3, 7, 12, 19)  # 19 - 12 and 12 - 7 leave whole blocks of padding


def run(model, inputs, **options):
    return generate(model, inputs, NEW_TOKENS, **options)


def text(output) -> dict:
    return {"sequences": output.sequences}


@case()
def greedy(model):
    return text(run(model, PLAIN))


@case()
def left_padded(model):
    return text(run(model, RAGGED))


@case(may_step_aside=True)
def right_padded(model):
    return text(run(model, ragged(3, 7, 12, side="right")))


@case(may_step_aside=True)
def holes_in_mask(model):
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 3:5] = 0
    mask[1, [0, 1, 6]] = 0
    return text(run(model, {"input_ids": PLAIN, "attention_mask": mask}))


@case()
def end_of_text(model):
    """Rows that stop at different steps: tokens of their own greedy text are declared the end."""
    unstopped = run(model, RAGGED).sequences[:, -NEW_TOKENS:]
    ends = [unstopped[0, 4].item(), unstopped[2, 7].item()]
    return text(run(model, RAGGED, eos_token_id=ends))


@case()
def sampling(model):
    torch.manual_seed(SEED)
    return text(run(model, PLAIN, do_sample=True, temperature=1.3, top_k=20, top_p=0.9))


@case()
def return_sequences(model):
    torch.manual_seed(SEED)
    return text(run(model, RAGGED, do_sample=True, num_return_sequences=4))


@case()
def beams(model):
    output = run(model, PLAIN, num_beams=4, num_return_sequences=2, output_scores=True)
    return {**text(output), "sequences_scores": output.sequences_scores}


@case(core=True)
def left_padded_beams(model):
    output = run(model, RAGGED, num_beams=4, num_return_sequences=2, output_scores=True)
    return {**text(output), "sequences_scores": output.sequences_scores}


@case()
def beam_sampling(model):
    torch.manual_seed(SEED)
    return text(run(model, PLAIN, do_sample=True, num_beams=3))


@case()
def processors(model):
    return text(run(model, RAGGED, repetition_penalty=1.3, no_repeat_ngram_size=2))


def two_turns(model, inputs: dict) -> dict:
    """The user adds tokens to the text and goes on with the cache that the first call returned."""
    first = run(model, inputs)
    user = prompt(len(first.sequences), 5)
    ids = torch.cat([first.sequences, user], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"]
    second = run(model, {"input_ids": ids, "attention_mask": mask, CACHE_NAME: first[CACHE_NAME]})
    return {"first": first.sequences, "second": second.sequences}


@case()
def second_turn(model):
    return two_turns(model, {"input_ids": PLAIN, "attention_mask": torch.ones_like(PLAIN)})


@case(core=True)
def second_turn_left_padded(model):
    return two_turns(model, RAGGED)


@case(text_of="left-padded", core=True)
def prefill_chunks_of_3(model):
    return text(run(model, RAGGED, prefill_chunk_size=3))


@case(text_of="left-padded")
def prefill_chunks_of_16(model):
    return text(run(model, RAGGED, prefill_chunk_size=16))


@case()
def single(model):
    return text(run(model, SINGLE))


@case(text_of="single")
def assisted(model):
    """Drafts from a model that is often, not always, right."""
    draft = build(model.tiny_name, noise=0.1)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.num_assistant_tokens = 3
    return text(run(model, SINGLE, assistant_model=draft))


@case(text_of="single", core=True)
def prompt_lookup(model):
    return text(run(model, SINGLE, prompt_lookup_num_tokens=3))


@case()
def inputs_embeds(model):
    with torch.no_grad():
        embeds = model.get_input_embeddings()(RAGGED["input_ids"])
    return text(run(model, {"inputs_embeds": embeds, "attention_mask": RAGGED["attention_mask"]}))


@case()
def scores_and_logits(model):
    output = run(model, RAGGED, output_scores=True, output_logits=True)
    return {**text(output), "scores": output.scores, "logits": output.logits}


@case()
def hidden_states(model):
    output = run(model, PLAIN, output_hidden_states=True)
    name = "decoder_hidden_states" if "decoder_hidden_states" in output else "hidden_states"
    return {**text(output), "hidden_states": output.get(name)}


@case(may_step_aside=True)
def attentions(model):
    output = run(model, PLAIN, output_attentions=True)
    name = "decoder_attentions" if "decoder_attentions" in output else "attentions"
    return {**text(output), "attentions": output.get(name)}


class _Collector(BaseStreamer):
    def __init__(self):
        self.received = []
        self.ended = 0

    def put(self, value):
        self.received += value.flatten().tolist()

    def end(self):
        self.ended += 1


@case()
def streamer(model):
    collector = _Collector()
    output = run(model, SINGLE, streamer=collector)
    return {**text(output), "received": collector.received, "ended": collector.ended}


@case(may_step_aside=True)
def own_cache(model):
    return text(run(model, PLAIN, **{CACHE_NAME: DynamicCache(config=model.config.get_text_config(decoder=True))}))


@case(may_step_aside=True)
def no_cache(model):
    return text(run(model, PLAIN, use_cache=False))


@case(may_step_aside=True)
def static_cache(model):
    return text(run(model, PLAIN, cache_implementation="static"))
