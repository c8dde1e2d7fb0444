"""Drafted text against this project's own plain decoding, in one run: what a verified draft costs, and what it brings.

    python -m benchmarks.speculation rounds --model llama-3-8b --out FILE.jsonl
    python -m benchmarks.speculation texts --model smollm2-135m-instruct --prompts spec_bench.jsonl \
        --medusa examples/medusa-smollm2 --out FILE.jsonl

`rounds`: a round with a draft that is never accepted, of one to 64 nodes, beside a plain step; and drafts of 4 tokens
of which 0.8 are right by construction. `texts`: prompts (JSON lines with "category" and "turns"), greedy, by category;
each text is compared with plain decoding's, to rounding.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_turbo.bench.measure import clock, synchronize
from hf_turbo.bench.models import DTYPES, load_model, load_tokenizer
from hf_turbo.bench.promise import differences
from hf_turbo.bench.rows import device_name, versions
from hf_turbo.cache.token_tree import TokenTree
from hf_turbo.generation.drafts import Draft, DraftContext
from hf_turbo.generation.expectation import OfTrees
from hf_turbo.generation.medusa import Medusa
from hf_turbo.generation.paced import paced
from hf_turbo.generation.prompt_lookup import PromptLookup
from hf_turbo.patching import handle_of, patch

#: Calls at most before a text is timed.
MOST_SETTLING = 6


@dataclass(frozen=True)
class SpeculationRow:
    """One way to draft in one case.

    Args:
        case: `model/b1/nodes64`, `model/b1/forced0.8x4` or `model/b8/new128/summarization`.
        step_ms: of a plain step: seconds a token of a row. round_ms: of a forward with its draft and its outcome.
        tokens_per_round: that a row got from a forward on average; speedup: over the plain variant of the same run.
        bound: of a forced acceptance, the speed-up if drafts and their verification were free.
        texts, same_texts: how many there were, and how many of them were plain decoding's, to rounding.
    """

    bench: str
    case: str
    variant: str
    device: str
    versions: dict[str, str]
    dtype: str
    step_ms: float | None = None
    round_ms: float | None = None
    tokens_per_s: float | None = None
    tokens_per_round: float | None = None
    acceptance: float | None = None
    speedup: float | None = None
    bound: float | None = None
    texts: int | None = None
    same_texts: int | None = None


class Useless:
    """Guesses on the device that are never right, as a tree or a chain of random tokens."""

    reads_hidden = keeps_text = False

    def __init__(self, tree: TokenTree, vocabulary: int, adaptive: bool) -> None:
        self.tree, self.vocabulary, self.adaptive = tree, vocabulary, adaptive
        self.sizes, self.num_columns = (max(tree.num_nodes - 1, 1),), tree.num_nodes

    def __repr__(self) -> str:
        return f"Useless({self.tree.parents}, adaptive={self.adaptive})"

    def attach(self, model: Any) -> Useless:
        return self

    def serves(self, speculation: Any) -> bool:
        return True

    def release(self) -> None: ...

    def cost(self, size: int) -> float:
        return 1.0

    def expectation(self) -> OfTrees:
        return OfTrees({self.sizes[0]: 1.0})

    def tree_of(self, size: int) -> TokenTree:
        return self.tree

    def follow(self, after: Any, out: Sequence[torch.Tensor]) -> None:
        tokens = self.tokens_after(out[0][:, 0])
        for x in out:
            x.copy_(tokens[:, : x.shape[1]])

    def tokens_after(self, roots: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(self.tree.num_nodes, device=roots.device) * 7919
        return (roots.unsqueeze(1) + shifts) % self.vocabulary

    def begin(self, context: DraftContext) -> Useless:
        return self

    decides = is_stale = False

    def propose(self, size: int, texts: Any) -> Draft:
        return Draft(self.tree, self.tokens_after(texts.last), self.tree.max_depth * texts.num_rows)

    def begin_ahead(self, newest: Any = None) -> Useless | None:
        return self

    def learn(self, *args: Any) -> None: ...

    miss = select = close = learn


class Forced(Useless):
    """Drafts from the host of which each token is the right one with a probability; the texts are known beforehand."""

    def __init__(self, texts: Sequence[Sequence[int]], size: int, rate: float, vocabulary: int) -> None:
        super().__init__(TokenTree.chain(size), vocabulary, adaptive=False)
        self.texts, self.rate = texts, rate
        self.random = random.Random(0)

    def __repr__(self) -> str:
        return f"Forced({self.tree.max_depth}, {self.rate})"

    def propose(self, size: int, texts: Any) -> Draft:
        drafts = []
        for text, new in zip(self.texts, texts.new, strict=True):
            right = [*text[len(new) : len(new) + size], *[0] * size][:size]
            drafts.append([t if self.random.random() < self.rate else (t + 1) % self.vocabulary for t in right])
        tokens = torch.cat([texts.last.unsqueeze(1), torch.tensor(drafts).to(texts.last.device)], dim=1)
        return Draft(self.tree, tokens, size * len(drafts))

    def begin_ahead(self, newest: Any = None) -> None:
        return None


def timed(model: Any, inputs: dict[str, torch.Tensor], new: int, **options: Any) -> tuple[float, torch.Tensor]:
    """Seconds of a greedy call of so many new tokens, and they."""
    now = clock(model.device)
    synchronize(model.device)
    began = now()
    text = model.generate(**inputs, max_new_tokens=new, do_sample=False, **options)
    synchronize(model.device)
    return now() - began, text[:, inputs["input_ids"].shape[1] :]


def per_token(call: Callable[[int], float], long: int, short: int, repeats: int) -> float:
    """Seconds that a call of `long` tokens takes more than one of `short`, a token between: median of some repeats."""
    call(long)
    return statistics.median((call(long) - call(short)) / (long - short) for _ in range(repeats))


def use(model: Any, speculation: Any | None) -> None:
    """Makes a patched model draft in this way from now on; its captured steps stay."""
    handle_of(model).speculation = None if speculation is None else paced(model, speculation)


def trees(sizes: Sequence[int]) -> Iterator[tuple[int, TokenTree]]:
    """A chain for each size up to 16, then trees four levels deep."""
    for size in sizes:
        chain = TokenTree.chain(min(size, 16) - 1)
        yield size, chain if size <= 16 else TokenTree((-1, *(i // 4 for i in range(size - 1))))


def rounds(args: argparse.Namespace) -> Iterator[SpeculationRow]:
    device = torch.device(args.device)
    model = patch(load_model(args.model, DTYPES[args.dtype], device))
    vocabulary = model.config.vocab_size
    common = dict(bench="speculation", device=device_name(device), versions=versions(), dtype=args.dtype)
    ids = torch.randint(1, vocabulary, (args.batch, args.context), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def call(new: int) -> float:
        return timed(model, inputs, new, min_new_tokens=None)[0]

    use(model, None)
    plain = per_token(call, args.new, 32, args.repeats)
    name = f"{args.model}/b{args.batch}"
    yield SpeculationRow(case=f"{name}/plain", variant="plain", step_ms=plain * 1e3, **common)
    for size, tree in trees(args.nodes):
        use(model, Useless(tree, vocabulary, adaptive=False))
        before = handle_of(model).speculation.stats()
        seconds = per_token(call, args.new, 32, args.repeats)
        after = handle_of(model).speculation.stats()
        tokens = (after.tokens - before.tokens) / (after.row_steps - before.row_steps)
        yield SpeculationRow(
            case=f"{name}/nodes{size}", variant="useless", step_ms=plain * 1e3, round_ms=seconds * tokens * 1e3,
            tokens_per_round=tokens, speedup=plain / seconds, **common,
        )  # fmt: skip
    # The text by forwards of the same shape: with random weights, another's rounding turns many ties.
    text = [[0] * args.new for _ in range(args.batch)]
    use(model, Forced(text, 4, 0.0, vocabulary))
    text = timed(model, inputs, args.new)[1].tolist()
    use(model, Forced(text, 4, 0.8, vocabulary))
    seconds = per_token(call, args.new, 32, args.repeats)
    stats = handle_of(model).speculation.stats()
    bound = stats.tokens_per_step
    yield SpeculationRow(
        case=f"{name}/forced0.8x4", variant="forced", step_ms=plain * 1e3, round_ms=seconds * bound * 1e3,
        tokens_per_round=bound, acceptance=stats.acceptance_rate, speedup=plain / seconds, bound=bound,
        same_texts=sum(a == b for a, b in zip(timed(model, inputs, args.new)[1].tolist(), text, strict=True)),
        texts=args.batch, **common,
    )  # fmt: skip


def batches(args: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Each category's first prompts as chat, left padded."""
    by_category: dict[str, list[str]] = defaultdict(list)
    for line in args.prompts.read_text().splitlines():
        question = json.loads(line)
        by_category[question["category"]].append(question["turns"][0])
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    for category, prompts in by_category.items():
        chosen = prompts[: args.per_category]
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
            for p in chosen
        ]
        for i in range(0, len(texts), args.batch):
            group = texts[i : i + args.batch]
            yield (
                category,
                dict(tokenizer(group, return_tensors="pt", padding=True, add_special_tokens=False).to(args.device)),
            )


def variants_of(args: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """What drafts, by name; plain text first."""
    variants: dict[str, Any] = {"plain": None, "prompt lookup": PromptLookup()}
    for nodes in args.nodes if args.medusa else ():
        variants[f"medusa{nodes}"] = Medusa(args.medusa, num_nodes=nodes)
        variants[f"medusa{nodes} alone"] = Medusa(args.medusa, num_nodes=nodes, min_match=None)
    useless = TokenTree.of_paths([[0], [1], [0, 0], [0, 1]])
    variants["useless"] = Useless(useless, vocabulary, adaptive=True)
    unknown = set(args.variants or ()) - variants.keys()
    if unknown:
        raise ValueError(f"no variant {', '.join(sorted(unknown))}: there are {', '.join(variants)}")
    return {name: one for name, one in variants.items() if name in ("plain", *(args.variants or variants))}


def texts(args: argparse.Namespace) -> Iterator[SpeculationRow]:
    """Rows of a category as soon as it is done."""
    device = torch.device(args.device)
    model, tokenizer = patch(load_model(args.model, DTYPES[args.dtype], device)), load_tokenizer(args.model)
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    variants = variants_of(args, model.config.vocab_size)
    groups = list(batches(args, tokenizer))
    for _, inputs in groups[:: max(len(groups) // 8, 1)]:
        for speculation in variants.values():
            drafted(model, speculation, inputs, args.new)
    common = dict(bench="speculation", device=device_name(device), versions=versions(), dtype=args.dtype)
    place = 0
    for category, same_kind in groupby(groups, key=itemgetter(0)):
        measured: dict[str, list[DraftedText]] = defaultdict(list)
        same: Counter[str] = Counter()
        for _, inputs in same_kind:
            found = in_turns(args, model, variants, inputs, place)
            place += 1
            for name, one in found.items():
                measured[name].append(one)
                same[name] += count_same(model, inputs, args.new, one.text, found["plain"].text)
        case = f"{args.model}/b{args.batch}/new{args.new}/{category}"
        yield from text_rows(case, measured, same, model.generation_config.pad_token_id, common)


def in_turns(
    args: argparse.Namespace, model: Any, variants: dict[str, Any], inputs: dict[str, torch.Tensor], place: int
) -> dict[str, DraftedText]:
    """A typical call of each variant; none always comes first, and what the host is busy with meets all of them."""
    names = [*variants]
    turn = names[place % len(names) :] + names[: place % len(names)]
    for name in turn:
        settle(model, variants[name], inputs, args.new)
    calls = [{name: drafted(model, variants[name], inputs, args.new) for name in turn} for _ in range(args.repeats)]
    return {name: typical_of(one[name] for one in calls) for name in names}


def text_rows(
    case: str, measured: dict[str, list[DraftedText]], same: Counter[str], padding: int, common: dict[str, Any]
) -> Iterator[SpeculationRow]:
    """What the calls of each variant come to together, beside those of plain text."""
    plain = seconds_per_token(measured["plain"], padding)
    for name, each in measured.items():
        num_tokens = sum(sum(one.lengths(padding)) for one in each)
        got, steps, accepted, guessed = (sum(one.counts[i] for one in each) for i in range(4))
        yield SpeculationRow(
            case=case, variant=name, tokens_per_s=num_tokens / sum(one.seconds for one in each),
            tokens_per_round=got / steps if steps else None, acceptance=accepted / guessed if guessed else None,
            speedup=plain / seconds_per_token(each, padding), texts=sum(len(one.text) for one in each),
            same_texts=None if name == "plain" else same[name], **common,
        )  # fmt: skip


class DraftedText(NamedTuple):
    """A call: seconds, new tokens `[rows, new]`, and of its rounds tokens, forwards a row, accepted and drafted."""

    seconds: float
    text: torch.Tensor
    counts: tuple[int, int, int, int]

    def lengths(self, padding: int) -> list[int]:
        """New tokens of each row."""
        return [min(int((row != padding).sum()) + 1, len(row)) for row in self.text]  # what ends a text may be padding


def seconds_per_token(calls: Sequence[DraftedText], padding: int) -> float:
    """Of the longest row of each: a text that rounding has led elsewhere may end elsewhere, too."""
    return sum(one.seconds for one in calls) / sum(max(one.lengths(padding)) for one in calls)


def typical_of(calls: Iterable[DraftedText]) -> DraftedText:
    """The one that took the median time."""
    ordered = sorted(calls, key=lambda one: one.seconds)
    return ordered[len(ordered) // 2]


def drafted(model: Any, speculation: Any | None, inputs: dict[str, torch.Tensor], new: int) -> DraftedText:
    """A greedy call, drafted in this way."""
    use(model, speculation)
    drafter = handle_of(model).speculation
    before = None if drafter is None else drafter.stats()
    seconds, text = timed(model, inputs, new)
    after = None if drafter is None else drafter.stats()
    names = ("tokens", "row_steps", "accepted", "drafted")
    a, b, c, d = (0 if after is None else getattr(after, name) - getattr(before, name) for name in names)
    return DraftedText(seconds, text, (a, b, c, d))


def settle(model: Any, speculation: Any | None, inputs: dict[str, torch.Tensor], new: int) -> None:
    """Calls until nothing new is captured: how much is drafted changes with what calls have learnt."""
    steps = handle_of(model).steps
    for _ in range(MOST_SETTLING):
        before = steps.num_captured
        drafted(model, speculation, inputs, new)
        if steps.num_captured == before:
            return


def count_same(model: Any, inputs: dict[str, torch.Tensor], new: int, text: torch.Tensor, plain: torch.Tensor) -> int:
    """How many rows are the plain text, or leave it where the plain model hardly prefers its own token."""
    longest = max(text.shape[1], plain.shape[1])
    pad = model.generation_config.pad_token_id
    text, plain = (torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=pad) for x in (text, plain))
    if torch.equal(text, plain):
        return len(text)
    use(model, None)
    out = model.generate(
        **inputs, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    found = differences(text.cpu(), plain.cpu(), out.logits, model.dtype)
    return len(text) - sum(not d.is_rounding for d in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["rounds", "texts"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=[*DTYPES], default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--per-category", type=int, default=8)
    parser.add_argument("--medusa", help="heads; each number of nodes with what the text repeats, and without")
    parser.add_argument("--variants", nargs="+", help="of texts, beside plain; all of them by default")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with args.out.open("a") as file:
        for row in (rounds if args.what == "rounds" else texts)(args):
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            figures = {k: round(v, 4) for k, v in asdict(row).items() if isinstance(v, (int, float))}
            print(f"{row.case:44} {row.variant:14} {figures}", flush=True)


if __name__ == "__main__":
    main()
