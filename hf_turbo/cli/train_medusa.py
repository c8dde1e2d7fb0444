"""`hf-turbo train-medusa`: heads for a model from a file of prompts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from ..generation.medusa_heads import MedusaHeads
from ..generation.medusa_trees import expected_length, search_tree
from ..patching import patch
from ..sample_models import SampleModelName, sample_model

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Drafted tokens of the trees that the table tells of.
_TREES = (8, 16, 32, 63)
_RANKS = 5


def train(
    name: str,
    data: Path,
    out: Path,
    dtype: torch.dtype,
    device: torch.device,
    field: str | None,
    resume: bool,
    options: dict[str, Any],
) -> MedusaHeads:
    """Loads and patches the model, and trains heads for it.

    Raises:
        ValueError, ImportError: as `train_medusa`; or there is no such model.
    """
    from ..training.medusa import train_medusa

    model, tokenizer = _load(name, dtype, device)
    return train_medusa(patch(model), tokenizer, data, out, field=field, resume=resume, **options)


def _load(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(sample_model(name)) if name in get_args(SampleModelName) else name  # type: ignore[arg-type]
    place = {"device_map": str(device)} if device.type == "cuda" else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **place)
        return model, AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"can't load {name!r}: {reason}") from error


def own_device(device: torch.device) -> torch.device:
    """The GPU of this process, where `accelerate launch` has started one for each."""
    if str(device) == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return device


def is_first_process() -> bool:
    """Whether this process is the one that tells what has been done."""
    return int(os.environ.get("RANK", 0)) == 0


def table(heads: MedusaHeads) -> RenderableType:
    """How often each head's guesses are right, and what trees of them should give."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    accuracies = heads.accuracies or []
    ranks = min(_RANKS, *(len(of_head) for of_head in accuracies))
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column("head")
    grid.add_column("guesses", justify="right")
    for rank in range(1, ranks + 1):
        grid.add_column(f"top {rank}", justify="right")
    for number, of_head in enumerate(accuracies, 1):
        shares = [f"{sum(of_head[:rank]):.1%}" for rank in range(1, ranks + 1)]
        grid.add_row(str(number), f"token +{number + 1}", *shares)
    trees = [f"{size}: {expected_length(search_tree(accuracies, size), accuracies):.2f}" for size in _TREES]
    note = "tokens a step that trees of so many drafted tokens should give, guesses taken as independent: "
    return Group(grid, Text(note + ", ".join(trees)))
