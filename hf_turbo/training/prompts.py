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
    return Prompts(_tokens(values, tokenizer), ready=False)


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


def _tokens(values: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    """All at once: fast tokenizers share a batch out over the cores."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    chats = {place: messages for place, value in enumerate(values) if (messages := _messages(value, has_template))}
    texts = {place: value for place, value in enumerate(values) if place not in chats}
    found: dict[int, list[int]] = {}
    if texts:
        found.update(zip(texts, tokenizer(list(texts.values())).input_ids, strict=True))
    if chats:
        encoded = tokenizer.apply_chat_template(
            list(chats.values()), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        found.update(zip(chats, encoded["input_ids"], strict=True))
    return [list(found[place]) for place in range(len(values))]


def _messages(value: Any, has_template: bool) -> list[Mapping[str, Any]] | None:
    """A conversation up to its last user message; None for a text that is the beginning of one.

    Raises:
        ValueError: it is neither, or no user speaks.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if has_template else None
    is_list = isinstance(value, Sequence)
    if not is_list or not all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in value):
        raise ValueError(f"a prompt is a text, a list of messages or a list of token ids, not {value!r:.80}")
    ends = [number for number, message in enumerate(value) if message["role"] == "user"]
    if not ends:
        raise ValueError(f"a conversation without a user's message: {value!r:.80}")
    return list(value[: ends[-1] + 1])
