"""Many requests at once: tokens a second, how long they wait, and what shared prompts save.

    python -m benchmarks.batching throughput --model llama-3-8b --max-tokens 2048,4096 --max-chunk none,512 --out FILE
    python -m benchmarks.batching mix --model llama-3-8b --rate 16 --out FILE.jsonl
    python -m benchmarks.batching long --model llama-3-8b --max-chunk 256,512,1024 --out FILE.jsonl
    python -m benchmarks.batching prefix --model llama-3-8b --out FILE.jsonl

`throughput`: `generate_batch` of prompts of one length, beside an unpatched model's. `mix`: requests as long as those
of Spec-Bench, all at once and as they come. `long`: texts that go on while long prompts arrive. `prefix`: a second
turn, and many requests with one beginning. Prompts are random tokens, texts greedy and without an end token; some of
each measured load are compared with plain `generate()`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.batching_cases import (
    Job,
    Load,
    check_lengths,
    checked,
    collect,
    counted,
    counts,
    first_token_figures,
    gap_figures,
    gaps,
    mixed,
    quantile,
    same_length,
    same_start,
    serve,
    speed,
    two_turns,
)
from hf_turbo.bench.measure import clean
from hf_turbo.bench.models import DTYPES, load_model
from hf_turbo.bench.rows import device_name, short, versions
from hf_turbo.engine.engine import Engine
from hf_turbo.engine.limits import EngineLimits
from hf_turbo.engine.manager import Manager
from hf_turbo.patching import handle_of, is_patched, patch


@dataclass(frozen=True)
class BatchingRow:
    """One way to serve one load. What does not apply is None; where a text is wrong there are no figures.

    Args:
        case: `model/64x512x128`: requests x prompt x new tokens; `model/mix256/at once` or `/poisson16`;
            `model/long32+20x8000`; `model/turn8000` or `model/shared64x4096+128x32`.
        variant: `transformers`, `hf_turbo`, or that with the limits that differ from its own choice.
        limits: what the engine did at once, as `EngineLimits`. attention: what the unpatched model used.
        tokens_per_s: new tokens of all requests, from the call (the first arrival) to the last token.
        ready_s: how much longer the first call took than later ones, the engine's making included. What the process
            has compiled for an earlier variant isn't waited for again.
        ttft_p50_s, ttft_p99_s: from when a request was due to its first token.
        gap_p50_ms, gap_p99_ms, gap_p99_over_p50: between two tokens of a text; of `long`, of the texts that go on,
            while long prompts arrive. alone_gap_p50_ms: before they do.
        host_share: of the time of all steps, what the host needed beside launching and waiting.
        first_turn_s, second_turn_s, second_over_first: time to the first token; medians, and of the ratios.
        hit_rate: part of the prompt tokens that the prefix cache had.
        blocks, blocks_floor: in use at most after a step; and one copy of what is shared with each request's own rest,
            for a model whose layers are all of one kind.
        texts, same_texts: compared with plain `generate()` of the patched model, and the same, to rounding.
        error: why there are no figures.
    """

    bench: str
    case: str
    variant: str
    device: str
    versions: dict[str, str]
    dtype: str
    limits: dict[str, Any] | None = None
    attention: str | None = None
    tokens_per_s: float | None = None
    ready_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    gap_p50_ms: float | None = None
    gap_p99_ms: float | None = None
    gap_p99_over_p50: float | None = None
    alone_gap_p50_ms: float | None = None
    host_share: float | None = None
    rows_per_step: float | None = None
    preemptions: int | None = None
    first_turn_s: float | None = None
    second_turn_s: float | None = None
    second_over_first: float | None = None
    hit_rate: float | None = None
    blocks: int | None = None
    blocks_floor: int | None = None
    texts: int | None = None
    same_texts: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Variant:
    """`transformers`, or hf_turbo with these limits instead of those it chooses."""

    name: str
    limits: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.name != "transformers"


class WatchedEngine(Engine):
    """Notes the most blocks that were in use after a step."""

    most_blocks = 0

    def step(self) -> list[Any]:
        changed = super().step()
        self.most_blocks = max(self.most_blocks, self.metrics.blocks_used)
        return changed


Measure = Callable[[Any, Variant, argparse.Namespace], list[Load]]


def own_manager(model: Any, variant: Variant, reads_along: bool = True) -> tuple[Manager, dict[str, Any]]:
    """A manager of a patched model, which has its engine; and the engine's limits.

    Args:
        reads_along: as of `Manager`; False is what `generate_batch` does.
    """
    used: list[EngineLimits] = []

    def make(model: Any, limits: EngineLimits) -> Engine:
        used.append(replace(limits, **variant.limits))
        return WatchedEngine(model, used[0])

    manager = Manager(model, greedy(), make_engine=make, reads_along=reads_along)
    manager.warmup()
    return manager, asdict(used[0])


def greedy(**options: Any) -> GenerationConfig:
    """A config without an end token, a new one each time: Transformers writes into the one that it gets."""
    return GenerationConfig(do_sample=False, pad_token_id=0, **options)


def stock_config(model: Any, jobs: Sequence[Job]) -> ContinuousBatchingConfig:
    """What Transformers chooses itself; on a CPU with no more blocks than are needed, as it would take all memory."""
    config = ContinuousBatchingConfig()
    if model.device.type == "cpu":
        size = getattr(config, "page_size", None) or config.block_size  # its earlier name
        config.num_blocks = sum(-(-(len(job.prompt) + job.new) // size) + 1 for job in jobs)
        config.max_batch_tokens = 2048
    return config


@contextmanager
def serving(model: Any, variant: Variant, jobs: Sequence[Job] = ()) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A manager that runs, and its limits.

    Args:
        jobs: for which Transformers is to have room.
    """
    limits: dict[str, Any] = {}
    if variant.is_ours:
        manager, limits["limits"] = own_manager(model, variant)
    else:
        manager = model.init_continuous_batching(greedy(), stock_config(model, jobs))
        manager.warmup()
    manager.start()
    try:
        yield manager, limits
    finally:
        manager.stop(hard_stop=True)
        manager.destroy()
        clean(model.device)


def throughput(model: Any, variant: Variant, args: argparse.Namespace) -> list[Load]:
    def load(seed: int) -> list[Job]:
        return same_length(args.requests, args.prompt, args.new, model.config.vocab_size, f"load{seed}")

    figures: dict[str, Any] = {}
    seen: set[str] = set()
    manager = None
    began = time.perf_counter()
    if variant.is_ours:
        manager, figures["limits"] = own_manager(model, variant, reads_along=False)
        manager.start()
        manager.stop(keep_for_next_session=True)
        config = None
    else:
        config = stock_config(model, load(0))
        hook = model.register_forward_pre_hook(lambda *_: seen.add(model.config._attn_implementation))
    try:
        batch(model, load(0), config)
        first = time.perf_counter() - began
        if not variant.is_ours:
            hook.remove()
            figures["attention"] = ", ".join(sorted(seen))
        speeds, calls, before = [], [], counts(manager)
        for repeat in range(args.repeats):
            jobs = load(repeat + 1)
            began = time.perf_counter()
            outputs = batch(model, jobs, config)
            calls.append(time.perf_counter() - began)
            speeds.append(speed(began, outputs))
        figures |= counted(manager, before)
    finally:
        model.destroy_cached_continuous_batching_manager()
        clean(model.device)
    figures |= {"tokens_per_s": statistics.median(speeds), "ready_s": first - statistics.median(calls)}
    return [Load(f"{args.requests}x{args.prompt}x{args.new}", figures, jobs, outputs)]


def batch(model: Any, jobs: Sequence[Job], config: ContinuousBatchingConfig | None) -> list[Any]:
    """The outputs of a call of `generate_batch` that keeps its manager.

    Raises:
        RuntimeError: a request has failed or is too short.
    """
    outputs = model.generate_batch(
        [job.prompt for job in jobs], greedy(max_new_tokens=jobs[0].new), config, record_timestamps=True,
        persistent_manager=True,
    )  # fmt: skip
    errors = [output.error for output in outputs.values() if output.error is not None]
    if errors or len(outputs) < len(jobs):
        raise RuntimeError(f"{len(outputs)} of {len(jobs)} requests were served: {errors[:1]}")
    check_lengths(jobs, list(outputs.values()))
    return list(outputs.values())


def mix(model: Any, variant: Variant, args: argparse.Namespace) -> list[Load]:
    def load(seed: str, rate: float | None = None) -> list[Job]:
        return mixed(args.requests, args.mean_new, args.most_new, model.config.vocab_size, seed, rate)

    loads = {"at once": load("at once"), f"poisson{args.rate:g}": load("poisson", args.rate)}
    served = []
    with serving(model, variant, load("warm")) as (manager, limits):
        serve(manager, load("warm"), args.stream)
        for name, jobs in loads.items():
            before = counts(manager)
            began, outputs = serve(manager, jobs, args.stream)
            figures = {"tokens_per_s": speed(began, outputs), **first_token_figures(jobs, began, outputs), **limits}
            figures |= gap_figures(gaps(outputs)) | counted(manager, before)
            served.append(Load(f"mix{args.requests}/{name}", figures, jobs, outputs))
    return served


def long(model: Any, variant: Variant, args: argparse.Namespace) -> list[Load]:
    vocabulary = model.config.vocab_size
    room = model.config.max_position_embeddings - args.prompt
    texts = same_length(args.requests, args.prompt, args.new or room, vocabulary, "texts")

    def paced(count: int, seed: str) -> list[Job]:
        jobs = same_length(count, args.long_prompt, args.long_new, vocabulary, seed)
        return [replace(job, due=i * args.every) for i, job in enumerate(jobs)]

    arrivals, warm = paced(args.arrivals, "long"), paced(args.warm, "warm")
    with serving(model, variant) as (manager, limits):
        names = [manager.add_request(job.prompt, max_new_tokens=job.new, record_timestamps=True) for job in texts]
        serve(manager, warm)  # at the same pace beside the same texts: all that is captured once is there afterwards
        for seed in ("once", "again"):  # the second waits for the step of the texts alone, which is captured before it
            serve(manager, same_length(1, args.prompt, 1, vocabulary, seed))
        alone_began = time.perf_counter()
        time.sleep(args.alone)
        before = counts(manager)
        began, late = serve(manager, arrivals)
        figures = limits | counted(manager, before)
        for name in names:
            manager.cancel_request(name)
        ended = collect(manager, len(names))
    going, end = [ended[name] for name in names], max(output.timestamps[-1] for output in late)
    figures |= first_token_figures(arrivals, began, late) | gap_figures(gaps(going, began, end))
    alone = gaps(going, alone_began, began)
    figures["alone_gap_p50_ms"] = quantile(alone, 0.5) * 1e3 if alone else None
    name = f"long{args.requests}+{args.arrivals}x{args.long_prompt}"
    return [Load(name, figures, texts + arrivals, going + late, longest=64)]


def prefix(model: Any, variant: Variant, args: argparse.Namespace) -> list[Load]:
    vocabulary = model.config.vocab_size
    jobs = same_start(args.requests, args.shared, args.own, args.new, vocabulary)
    with serving(model, variant) as (manager, limits):
        turns = [
            two_turns(manager, args.prompt, args.new, args.more, vocabulary, f"turns{i}")
            for i in range(args.repeats + 1)
        ][1:]  # what is compiled in the first ones isn't to be timed
        before = counts(manager)
        manager.batch_processor.most_blocks = 0
        began, outputs = serve(manager, jobs)
        figures = first_token_figures(jobs, began, outputs) | counted(manager, before)
        figures["blocks"] = manager.batch_processor.most_blocks
    size = handle_of(model).pool.block_size
    whole, total = args.shared // size, args.shared + args.own + args.new
    figures["blocks_floor"] = whole + args.requests * (-(-total // size) - whole)
    firsts, seconds = ([turn[which].ttft for turn in turns] for which in (0, 1))
    turn_figures = {
        "first_turn_s": statistics.median(firsts),
        "second_turn_s": statistics.median(seconds),
        "second_over_first": statistics.median(b / a for a, b in zip(firsts, seconds, strict=True)),
        "hit_rate": statistics.median(second.hit_rate for _, second in turns),
    }
    each = [turn for both in turns for turn in both]
    name = f"shared{args.requests}x{args.shared}+{args.own}x{args.new}"
    return [
        Load(f"turn{args.prompt}", limits | turn_figures, [turn.job for turn in each], [turn.output for turn in each]),
        Load(name, limits | figures, jobs, outputs),
    ]


def rows(args: argparse.Namespace) -> Iterator[BatchingRow]:
    """All rows of a subcommand. A variant that fails has a row that says why."""
    device = torch.device(args.device)
    model = load_model(args.model, DTYPES[args.dtype], device)
    common = dict(bench="batching", device=device_name(device), versions=versions(), dtype=args.dtype)
    unjudged: list[tuple[Variant, Load]] = []
    for variant in args.variants:
        if variant.is_ours and not is_patched(model):
            patch(model)
        try:
            unjudged += [(variant, load) for load in args.measure(model, variant, args)]
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            yield BatchingRow(case=f"{args.model}/{args.what}", variant=variant.name, error=reason, **common)
        if not variant.is_ours:
            continue  # judging it now would compile what the next variant's first call is to be timed with
        for served, load in unjudged:
            figures = load.figures | checked(model, load, args.check)
            row = BatchingRow(case=f"{args.model}/{load.case}", variant=served.name, **common, **figures)
            yield of_right_text(row)
        unjudged = []


def of_right_text(row: BatchingRow) -> BatchingRow:
    """The row, without its figures if a text is wrong."""
    if row.same_texts == row.texts:
        return row
    kept = {"limits", "attention", "texts", "same_texts"}
    figures: dict[str, Any] = {f.name: None for f in fields(row) if f.default is None and f.name not in kept}
    return replace(row, **{**figures, "error": f"{row.texts - row.same_texts} of {row.texts} texts are wrong"})


def table(found: Sequence[BatchingRow]) -> str:
    """The figures of the rows, a line each, and below what went wrong."""
    names = [f.name for f in fields(BatchingRow) if any(_is_figure(getattr(row, f.name)) for row in found)]
    lines = [["case", "variant", *names]]
    lines += [[row.case, row.variant, *(_cell(getattr(row, name)) for name in names)] for row in found]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*shown, *(f"{row.case}, {row.variant}: {row.error}" for row in found if row.error)])


def _is_figure(value: Any) -> bool:
    return isinstance(value, (int, float))


def _cell(value: Any) -> str:
    return short(value) if isinstance(value, float) else "" if value is None else str(value)


def variants_of(args: argparse.Namespace) -> list[Variant]:
    """The unpatched model where it is a peer, and hf_turbo with every combination of the limits asked for."""
    found = [Variant("transformers")] if args.peer else []
    choices = {"max_tokens": args.max_tokens, "max_chunk": args.max_chunk, "prefix_cache": args.prefix_cache}
    for values in itertools.product(*choices.values()):
        limits = {name: value for name, value in zip(choices, values, strict=True) if value != "default"}
        named = ",".join(f"{name}={value}" for name, value in limits.items())
        found.append(Variant(f"hf_turbo:{named}" if named else "hf_turbo", limits))
    return found


def limit_values(text: str) -> list[Any]:
    """A comma-separated list of whole numbers, `none` and `default` (what the engine chooses itself).

    Raises:
        ValueError: something else.
    """
    words = {"none": None, "default": "default"}
    return [words[word] if word in words else int(word) for word in text.split(",")]


def parser() -> argparse.ArgumentParser:
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--model", required=True)
    both.add_argument("--dtype", choices=[*DTYPES], help="bf16, on a CPU fp32")
    both.add_argument("--device", default="cuda")
    both.add_argument("--check", type=int, default=4, help="texts of each load to compare with generate()")
    both.add_argument("--max-tokens", type=limit_values, default=["default"], help="a list: 2048,4096")
    both.add_argument("--max-chunk", type=limit_values, default=["default"], help="a list: none,256,512")
    both.add_argument("--out", type=Path, required=True)
    both.set_defaults(peer=False, prefix_cache=["default"])
    top = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    each = top.add_subparsers(dest="what", required=True)

    def sub(name: str, measure: Measure, defaults: dict[str, Any], **more: Any) -> argparse.ArgumentParser:
        added = each.add_parser(name, parents=[both])
        for option, value in defaults.items():
            added.add_argument(f"--{option.replace('_', '-')}", type=type(value), default=value)
        added.set_defaults(measure=measure, **more)
        return added

    batches = sub("throughput", throughput, dict(requests=64, prompt=512, new=128, repeats=2))
    mixes = sub("mix", mix, dict(requests=256, mean_new=160.0, most_new=512, rate=16.0))
    mixes.add_argument("--stream", action="store_true", help="results for every token")
    for added, runs in ((batches, True), (mixes, False)):
        added.add_argument("--peer", action=argparse.BooleanOptionalAction, default=runs, help="Transformers beside it")
    longs = sub(
        "long", long, dict(requests=32, prompt=128, arrivals=20, every=1.0, long_prompt=8000, long_new=64, alone=2.0)
    )
    longs.add_argument("--warm", type=int, default=4, help="long prompts at that pace before what is measured")
    longs.add_argument("--new", type=int, help="of the texts that go on; as many as the model has positions")
    sub(
        "prefix", prefix, dict(requests=64, prompt=8000, new=32, more=64, shared=4096, own=128, repeats=3),
        prefix_cache=["default", False],
    )  # fmt: skip
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    args.dtype = args.dtype or ("fp32" if args.device == "cpu" else "bf16")
    args.variants = variants_of(args)
    found = []
    with args.out.open("a") as file:
        for row in rows(args):
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            found.append(row)
    print(table(found))


if __name__ == "__main__":
    main()
