"""`hf-turbo quantize`: a folder of float weights to one of INT4 weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from ..quantization.quantize_folder import Progress, quantize_folder
from ..sample_models import SampleModelName, sample_model

# What a copy needs of a repository: no weights in other forms.
_NEEDED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.md", "LICENSE*", "NOTICE*"]


def quantize(
    source: str, target: Path, bits: int, group_size: int, symmetric: bool, skip: Sequence[str]
) -> Iterator[str]:
    """Quantizes, with a bar on stderr if that is a terminal, and yields lines on what was done.

    Raises:
        ValueError, NotImplementedError: as `quantize_folder`; or there is no such model.
    """
    folder = _folder(source)
    with _progress() as progress:
        done = quantize_folder(folder, target, bits, group_size, symmetric=symmetric, skip=skip, progress=progress)
    gigabytes = " to ".join(f"{size / 1e9:.3g} GB" for size in (done.bytes_before, done.bytes_after))
    yield f"{target}: {done.linears} linears in {bits} bits; {gigabytes}"
    if done.left:
        yield f"left as they are: experts stored in one tensor, {len(done.left)} layers, such as {done.left[0]}"


def _folder(name: str) -> Path:
    """The folder of a model's name, fetched if it is none yet."""
    if name in get_args(SampleModelName):
        return sample_model(name)  # type: ignore[arg-type]
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_NEEDED))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"no model {name!r}: give a folder or an id of the Hub ({reason})") from error


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name, done, total: None
        return
    columns = (BarColumn(), DownloadColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, visible=False)

        def progress(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=name, visible=True)

        yield progress
