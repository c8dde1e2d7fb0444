"""The commands. Only `main` imports this, so `import hf_turbo` needs nothing of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import torch

try:
    import typer
except ImportError as error:
    raise ImportError(f"the command line needs {error.name}: pip install 'hf-turbo[cli]'") from error

from ..bench import cases as bench_cases
from ..bench import kv as bench_kv
from ..bench import kv_plot, kv_table, models, plot, rows, run, table
from ..patching import patch
from ..quantization.data_free import quantize as quantize_model
from ..report import report
from ..sample_models import SampleModelName
from . import quantize as quantizing
from . import train_medusa as training

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="hf-turbo",
    help="Speed and memory for Transformers models in place: the same text sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_MODEL_HELP = f"A folder, an id of the Hugging Face Hub, or one of: {models.known_names()}."
_IN_HELP = f"A folder, an id of the Hugging Face Hub, or one of: {', '.join(get_args(SampleModelName))}."
_GRID_DEFAULTS = {"batch": "1", "prompt": "128", "new": "128", "beams": "1"}
#: Codes begin after some two hundred tokens.
_KV_GRID_DEFAULTS = {**_GRID_DEFAULTS, "prompt": "1024"}
_TABLE_WIDTH = 120  # where no terminal says

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]


def _listed(name: str, meaning: str) -> Any:
    return typer.Option(f"--{name}", metavar="N,...", help=f"{meaning} (default: {_GRID_DEFAULTS[name]})")


@app.command()
def bench(
    model: ModelName,
    batch: Annotated[str | None, _listed("batch", "Prompts in a batch.")] = None,
    prompt: Annotated[str | None, _listed("prompt", "Tokens of each prompt.")] = None,
    new: Annotated[str | None, _listed("new", "New tokens of each, at least 2.")] = None,
    beams: Annotated[str | None, _listed("beams", "Beams of each; 1 is greedy.")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BxPxN[bBEAMS]",
            help="One case, as 1x1024x64 or, with 4 beams, 1x1024x64b4. May be repeated; instead of the four above.",
        ),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="transformers, transformers-static (static cache, compiled), hf_turbo, hf_turbo:option=value,..., "
            "options (hf_turbo with each on/off option turned round). Options are those of hf_turbo.TurboConfig. "
            "(default: transformers, transformers-static, hf_turbo, options; on a CPU, where the others do nothing: "
            "transformers, hf_turbo)",
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT,...",
            help="What kv_cache_dtype costs and gives: memory, speed and perplexity of int8, fp8, int4, or all of "
            "them, beside the model's own dtype. Instead of --variants. The first 192 tokens of a text stay as they "
            "are, so --prompt is 1024 if you don't say otherwise.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="A plain text that --kv measures perplexity on. (default: part of Newton's Opticks)"
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. (default: bf16 on a GPU, else fp32)")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu. (default: a GPU if there is one)")] = None,
    bits: Annotated[
        int | None, typer.Option(help="Quantize the linears of the layers to 4 or 8 bits first, without data.")
    ] = None,
    group_size: Annotated[int, typer.Option(help="Input channels that share a scale, with --bits.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each variant; figures are medians.")] = 3,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="A JSONL file; a line for each row is added to it.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="A picture of the rows, .png or .svg; overwritten.")
    ] = None,
) -> None:
    """Time generate(), unpatched and patched, and check the text.

    All variants take turns on one model. A variant whose text differs from
    the unpatched model's (in bf16 and fp16: by more than rounding explains)
    gets no figures, and the exit code is 1; so it is if all variants fail.
    """
    with _usage_errors():
        place = _device(device)
        defaults = _GRID_DEFAULTS if kv is None else _KV_GRID_DEFAULTS
        chosen = _cases(case, {"batch": batch, "prompt": prompt, "new": new, "beams": beams}, defaults)
        formats = _formats(kv, text, variants)
        ways = bench_cases.parse_variants(variants or _default_variants(place))
        kind = _dtype(dtype, place)
        if plot_file is not None:
            plot.require(plot_file)
        loaded = models.load_model(model, kind, place)
        name = model if bits is None else f"{model}-int{bits}-g{group_size}"
        if bits is not None:
            quantize_model(loaded, bits, group_size)
        read = bench_kv.read_text(text, models.load_tokenizer(model)) if formats else None
    if formats:
        found = _compare_formats(name, loaded, chosen, formats, read, rounds, out, plot_file)
    else:
        found = _compare_variants(name, loaded, chosen, ways, rounds, out, plot_file)
    if any(row.is_refused for row in found) or all(row.error for row in found):
        raise typer.Exit(1)


@app.command()
def info(model: ModelName) -> None:
    """Tell which layers would use the paged cache and what steps aside. Needs no weights and no GPU.

    What only shows while a model runs is in `hf_turbo.report(model)`.
    """
    with _usage_errors():
        empty = models.empty_model(model)
        patch(empty)
    found = report(empty)
    typer.echo(f"{model}: {type(empty).__name__}, {sum(p.numel() for p in empty.parameters()):,} parameters")
    for kind, how in found.accelerated.items():
        typer.echo(f"accelerated: {kind}: {how.removesuffix(' (PyTorch)')}")  # by what depends on the device
    for reason in found.stepped_aside:
        typer.echo(f"steps aside: {reason}")


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(metavar="IN", help=_IN_HELP)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    bits: Annotated[int, typer.Option(help="4 or 8.")] = 4,
    group_size: Annotated[
        int, typer.Option(help="Input channels that share a scale: 16, 32, 64, 128, ..., or -1 for all of a row.")
    ] = 128,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="With zero points.")] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Leave the linears of this name, or part of it. May be repeated."),
    ] = None,
) -> None:
    """Write a copy of a model with its linears in 4 or 8 bits, as a GPTQ checkpoint.

    Needs no data, no GPU, and memory for one of the model's files.
    """
    with _usage_errors():
        for line in quantizing.quantize(source, target, bits, group_size, not asymmetric, skip or ()):
            typer.echo(line)


@app.command("train-medusa")
def train_medusa(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_IN_HELP)],
    data: Annotated[Path, typer.Option(dir_okay=False, help="Prompts: a .jsonl, .json, .csv, .parquet or .txt file.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="A folder for the heads, the log and the picture.")],
    field: Annotated[
        str | None,
        typer.Option(
            help="The field that holds the prompts: texts, or lists of messages. (default: the only one, or prompt, "
            "messages, question, instruction or text)"
        ),
    ] = None,
    heads: Annotated[int, typer.Option(help="How many tokens beyond the next one are guessed.")] = 3,
    layers: Annotated[int, typer.Option(help="Blocks of each head.")] = 1,
    own_projection: Annotated[
        bool, typer.Option("--own-projection", help="Train a vocabulary projection for each head, too.")
    ] = False,
    new_tokens: Annotated[int, typer.Option(help="Tokens that the model says to a prompt, at most.")] = 256,
    max_length: Annotated[int, typer.Option(help="Tokens of prompt and answer; longer prompts are left out.")] = 1024,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 takes the most likely token.")] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Sequences that the model sees at once.")] = 64,
    batch_tokens: Annotated[int, typer.Option(help="Positions that a training step sees.")] = 4096,
    accumulate: Annotated[int, typer.Option(help="Such batches before the weights change.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="The highest; warmed up to, then a cosine down.")] = 1e-3,
    epochs: Annotated[float, typer.Option(help="How often each position is seen.")] = 2.0,
    steps: Annotated[int | None, typer.Option(help="Changes of the weights, instead of --epochs.")] = None,
    held_out: Annotated[float, typer.Option(help="The fraction of answers that accuracies are measured on.")] = 0.05,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between states to go on from.")] = 500,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    resume: Annotated[
        bool, typer.Option(help="Go on from what is in the folder; else begin anew and remove that.")
    ] = True,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. (default: bf16 on a GPU, else fp32)")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu. (default: a GPU if there is one)")] = None,
) -> None:
    """Train Medusa heads on what a model says to prompts; the model stays as it is.

    A run that was cut off goes on where it was when it is started again.
    """
    options = dict(
        num_heads=heads,
        num_layers=layers,
        shared_projection=not own_projection,
        gradient_accumulation=accumulate,
        new_tokens=new_tokens,
        max_length=max_length,
        temperature=temperature,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        epochs=epochs,
        steps=steps,
        held_out=held_out,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    with _usage_errors():
        place = training.own_device(_device(device))
        trained = training.train(model, data, out, _dtype(dtype, place), place, field, resume, options)
    if training.is_first_process():
        _console().print(training.table(trained))
        typer.echo(f"{out}: {heads} heads")


def _compare_variants(
    name: str,
    model: Any,
    cases: list[bench_cases.Case],
    variants: list[bench_cases.Variant],
    rounds: int,
    out: Path | None,
    picture: Path | None,
) -> list[rows.Row]:
    found = []
    with _progress(run.turns(cases, variants, rounds)) as progress:
        for row in run.run(name, model, cases, variants, rounds, progress):
            found.append(row)
            _keep(row, out)
    _console().print(table.table(found))
    if picture is not None:
        plot.draw(found, picture)
    return found


def _compare_formats(
    name: str,
    model: Any,
    cases: list[bench_cases.Case],
    formats: list[str],
    text: bench_kv.Text | None,
    rounds: int,
    out: Path | None,
    picture: Path | None,
) -> list[rows.Row]:
    found = []
    with _progress(bench_kv.turns(cases, formats, text, rounds)) as progress:
        for one in bench_kv.run(name, model, cases, formats, text, rounds, progress):
            found.append(one)
            _keep(one.decode, out)
            _keep(one.quality, out)
    _console().print(kv_table.table(found))
    if picture is not None:
        kv_plot.draw(found, picture)
    return [one.decode for one in found]


def _keep(row: rows.Row | rows.QualityRow | None, out: Path | None) -> None:
    if row is not None and out is not None:
        rows.append_row(row, out)


def _formats(kv: str | None, text: Path | None, variants: str | None) -> list[str]:
    """What --kv asks for; nothing without it."""
    if kv is None:
        if text is not None:
            raise ValueError("--text is what --kv reads; give --kv, too")
        return []
    if variants is not None:
        raise ValueError("--kv says it all; leave out --variants")
    return bench_kv.parse_formats(kv)


def _cases(written: list[str] | None, given: dict[str, str | None], defaults: dict[str, str]) -> list[bench_cases.Case]:
    """The cases asked for one by one, else those of the grid."""
    if not written:
        filled = {name: text or defaults[name] for name, text in given.items()}
        return bench_cases.grid(filled["batch"], filled["prompt"], filled["new"], filled["beams"])
    if clash := [f"--{name}" for name, text in given.items() if text]:
        raise ValueError(f"--case says it all; leave out {', '.join(clash)}")
    return [bench_cases.parse_case(text) for text in written]


def _device(name: str | None) -> torch.device:
    """A device by name, if torch can use it."""
    num_gpus = torch.cuda.device_count()
    name = name or ("cuda" if num_gpus else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ValueError(f"device {name!r}: give cuda, cuda:1 or cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        found = f"cuda:0 to cuda:{num_gpus - 1}" if num_gpus else "no GPU"
        raise ValueError(f"device {name!r}: torch finds {found} here")
    return device


def _default_variants(device: torch.device) -> str:
    if device.type != "cuda":
        return "transformers,hf_turbo"
    return f"transformers,transformers-static,hf_turbo,{bench_cases.EACH_OPTION}"


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    name = name or ("bf16" if device.type == "cuda" else "fp32")
    if name not in models.DTYPES:
        raise ValueError(f"dtype {name!r}: one of {', '.join(models.DTYPES)}")
    return models.DTYPES[name]


@contextmanager
def _usage_errors() -> Iterator[None]:
    """What was asked for can't be had: said in one sentence, without a traceback."""
    try:
        yield
    except (ValueError, NotImplementedError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def _progress(total: int) -> Iterator[run.Progress]:
    """A bar on stderr, or lines where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: typer.echo(text, err=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        started = -1

        def progress(text: str) -> None:
            nonlocal started
            started += 1
            bar.update(task, completed=started, description=text)

        yield progress


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_TABLE_WIDTH)
