"""Prompts of every form that people have them in, as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

#: Endings, and the readers of `datasets` for them.
_READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
#: Columns that hold prompts, the likeliest first.
_USUAL_FIELDS = ("prompt", "messages", "question", "instruction", "text")


@dataclass(frozen=True)
class Prompts:
    """Tokens to go on from, or to train on as they are.

    Attributes:
        tokens: of each prompt.
        ready: they are whole texts already; none is to be continued.
    """

    tokens: list[list[int]]
    ready: bool


def read_prompts(data: Any, tokenizer: Any | None, field: str | None = None) -> Prompts:
    """Prompts as tokens.

    A text is a user's message where the tokenizer has a chat template, else the beginning of a text. A list of messages
    (`{"role": ..., "content": ...}`) ends with its last user message; what comes after is left out.

    Args:
        data: the path of a .json, .jsonl, .csv, .parquet or .txt file; a `datasets.Dataset`; or a list of texts, of
            conversations, or of token ids. Lists of token ids are ready: they are trained on as they are.
        tokenizer: may be None for token ids.
        field: the column of a file or data set that holds the prompts. None takes the only one, or the first there is
            of prompt, messages, question, instruction and text.

    Raises:
        ValueError: nothing there, a form that is not known, or no tokenizer where one is needed.
        ImportError: `datasets` is missing and `data` is a file.
    """
    values = list(_values(data, field))
    if not values:
        raise ValueError("there are no prompts in the data")
    ready = [_is_tokens(value) for value in values]
    if all(ready):
        return Prompts([[int(token) for token in value] for value in values], ready=True)
    if any(ready):
        raise ValueError("some of the prompts are texts and others token ids; give one of the two")
    if tokenizer is None:
        raise ValueError("prompts that are texts need a tokenizer")
    return Prompts([_tokens(value, tokenizer) for value in values], ready=False)


def _values(data: Any, field: str | None) -> Iterable[Any]:
    if isinstance(data, (str, Path)):
        data = _read_file(Path(data))
    if hasattr(data, "column_names"):
        return data[_field(data.column_names, field)]
    if not isinstance(data, Sequence):
        raise ValueError(
            f"prompts are a file, a datasets.Dataset or a list, not {type(data).__name__}; take one split of a "
            "DatasetDict"
        )
    if field is not None:
        raise ValueError(f"field={field!r} names a column; a list has none")
    return data


def _read_file(path: Path) -> Any:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: prompts are read from {', '.join(_READERS)} files")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("reading prompts needs datasets: pip install 'hf-turbo[train]'") from error
    return load_dataset(reader, data_files=str(path), split="train")


def _field(names: Sequence[str], field: str | None) -> str:
    if field is not None:
        if field not in names:
            raise ValueError(f"the data has no field {field!r}; its fields are {', '.join(names)}")
        return field
    usual = [name for name in _USUAL_FIELDS if name in names]
    if not usual and len(names) != 1:
        raise ValueError(f"which field of the data holds the prompts? There are {', '.join(names)}")
    return usual[0] if usual else names[0]


def _is_tokens(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 1 and not value.is_floating_point()
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(token, int) for token in value)


def _tokens(value: Any, tokenizer: Any) -> list[int]:
    messages = _messages(value)
    if messages is None:
        if not isinstance(value, str):
            raise ValueError(f"a prompt is a text, a list of messages or a list of token ids, not {value!r:.80}")
        if getattr(tokenizer, "chat_template", None) is None:
            return list(tokenizer(value).input_ids)
        messages = [{"role": "user", "content": value}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoded["input_ids"])


def _messages(value: Any) -> list[Mapping[str, Any]] | None:
    """A conversation up to its last user message; None for anything else."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return None
    if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value):
        return None
    ends = [number for number, message in enumerate(value) if message["role"] == "user"]
    if not ends:
        raise ValueError(f"a conversation without a user's message: {value!r:.80}")
    return list(value[: ends[-1] + 1])
