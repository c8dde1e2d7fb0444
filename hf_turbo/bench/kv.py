"""What each format of the cache costs and gives: memory, time and predictions, beside the wide cache's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ..ops.kv_format import KV_FORMATS
from . import run as bench_run
from .cases import Case, Variant
from .kv_quality import Quality, cut_windows, measure, token_ids
from .models import DTYPES
from .rows import QualityRow, Row, device_name, versions

#: A user's word for every format.
ALL = "all"
#: Of every shorter window too much is wide.
_SHORTEST = 512
#: As many windows as hold so many tokens.
_ENOUGH = 2048
_NEWTON = "opticks_queries.txt"


@dataclass(frozen=True)
class Text:
    """What predictions are measured on.

    Args:
        name: what rows call it.
        ids: its tokens.
        bos: the token that begins every window, if any.
    """

    name: str
    ids: Sequence[int]
    bos: int | None

    def windows(self, length: int) -> list[torch.Tensor]:
        """Of this length, or of the text's if that is less."""
        length = min(length, len(self.ids) + (self.bos is not None))
        return cut_windows(self.ids, self.bos, length, -(-_ENOUGH // length))


@dataclass(frozen=True)
class Tradeoff:
    """One format in one case.

    Args:
        kv: its name; of the wide cache, which comes first, the dtype's.
        decode: its decode row.
        quality: its quality row.
        why_no_quality: where that is None.
    """

    kv: str
    decode: Row
    quality: QualityRow | None
    why_no_quality: str | None = None


def parse_formats(text: str) -> list[str]:
    """`all`, or names of formats with commas between.

    Raises:
        ValueError: there is no such format.
    """
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    names = list(KV_FORMATS) if names == [ALL] else names
    if not names or set(names) - set(KV_FORMATS):
        raise ValueError(f"kv {text!r}: {ALL}, or some of {', '.join(KV_FORMATS)} with commas between")
    return names


def read_text(path: Path | None, tokenizer: Any | None) -> Text | None:
    """A file's text, or the one that comes with the package: the queries that end Newton's Opticks (1730).

    Returns:
        None without a tokenizer.

    Raises:
        ValueError: the file can't be read, or holds too little.
    """
    if tokenizer is None:
        return None
    try:
        file = resources.files(__package__) / _NEWTON if path is None else path
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text {str(path)!r}: {error}") from error
    ids = token_ids(tokenizer, content)
    if len(ids) < _SHORTEST:
        raise ValueError(f"text {str(path)!r}: {len(ids)} tokens; give at least {_SHORTEST}")
    return Text("opticks" if path is None else path.stem, ids, tokenizer.bos_token_id)


def run(
    name: str,
    model: Any,
    cases: Sequence[Case],
    formats: Sequence[str],
    text: Text | None,
    rounds: int = 3,
    progress: bench_run.Progress = lambda text: None,
) -> Iterator[Tradeoff]:
    """The wide cache and each format in each case, as soon as the case is done.

    Args:
        name: what rows call the model.
        model: unpatched, as `load_model` gives it.
        text: None leaves predictions out.
        progress: told of each turn before it starts; there are `turns(cases, formats, text, rounds)`.
    """
    variants = _variants(wide_name(model.dtype), formats)
    for case in cases:
        decoded = list(bench_run.run(name, model, [case], variants, rounds, progress))
        found = _qualities(name, model, case, formats, text, progress)
        for row in decoded:
            kv = row.variant
            quality, why = found[kv]
            yield Tradeoff(kv, replace(row, case=f"{row.case}/kv-{kv}", variant="hf_turbo"), quality, why)


def turns(cases: Sequence[Case], formats: Sequence[str], text: Text | None, rounds: int) -> int:
    """How often `run` reports progress."""
    texts_read = len(cases) * len(formats) if text is not None else 0
    return bench_run.turns(cases, _variants("wide", formats), rounds) + texts_read


def wide_name(dtype: torch.dtype) -> str:
    """What a cache of the model's own dtype is called: bf16, fp16 or fp32."""
    return next((short for short, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


def quality_rows(
    name: str, model: Any, text: str, windows: Sequence[torch.Tensor], kv: str, quality: Quality
) -> tuple[QualityRow, QualityRow]:
    """The row of the wide cache and that of the format that was measured beside it.

    Args:
        name, text: what rows call the model and the text.
    """
    count, length = len(windows), len(windows[0])
    wide = wide_name(model.dtype)

    def row(kv: str, **figures: Any) -> QualityRow:
        case = f"{name}/{text}/w{count}x{length}/kv-{kv}"
        return QualityRow(
            bench="kv_quality", case=case, variant="hf_turbo", model=name, kv=kv, text=text, windows=count,
            length=length, dtype=str(model.dtype).removeprefix("torch."), device=device_name(model.device),
            versions=versions(), tokens=quality.tokens, **figures,
        )  # fmt: skip

    return (
        row(
            wide, perplexity=quality.wide_perplexity, ratio=1.0, same_top1=1.0, kl=0.0,
            kv_bytes_per_token=quality.wide_kv_bytes_per_token, protected_layers=0,
        ),
        row(
            kv, perplexity=quality.perplexity, ratio=quality.ratio, same_top1=quality.same_top1, kl=quality.kl,
            kv_bytes_per_token=quality.kv_bytes_per_token, protected_layers=quality.protected_layers,
        ),
    )  # fmt: skip


def _variants(wide: str, formats: Sequence[str]) -> list[Variant]:
    return [Variant(wide, {}), *(Variant(kv, {"kv_cache_dtype": kv}) for kv in formats)]


def _qualities(
    name: str,
    model: Any,
    case: Case,
    formats: Sequence[str],
    text: Text | None,
    progress: bench_run.Progress,
) -> dict[str, tuple[QualityRow | None, str | None]]:
    """Of each format, and of the wide cache: its row, or why there is none."""
    wide = wide_name(model.dtype)
    if text is None:
        return dict.fromkeys([wide, *formats], (None, "the model has no tokenizer"))
    found: dict[str, tuple[QualityRow | None, str | None]] = {wide: (None, "no format could be measured")}
    windows = text.windows(_length(model, case))
    for kv in formats:
        progress(f"{case.name}  {kv}  reading {text.name}")
        try:
            rows = quality_rows(name, model, text.name, windows, kv, measure(model, windows, kv))
        except Exception as error:
            found[kv] = None, bench_run.first_line(error)
        else:
            found[wide], found[kv] = (rows[0], None), (rows[1], None)
    return found


def _length(model: Any, case: Case) -> int:
    """Tokens of a window: as many as the case's texts have, within what codes and the model allow."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(max(case.prompt + case.new, _SHORTEST), limit or case.prompt + case.new)
