"""What to measure: cases (how many prompts, how long) and variants (how the model is run), and how they are written."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from ..config import TurboConfig

_CASE = re.compile(r"(\d+)x(\d+)x(\d+)(?:b(\d+))?")
#: In a list of variants: one `hf_turbo` row per on/off option, with that option turned round.
EACH_OPTION = "options"


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `prompt` tokens, `new` tokens each, with `beams` beams.

    Raises:
        ValueError: a number is too small. A step needs two tokens.
    """

    batch: int
    prompt: int
    new: int
    beams: int = 1

    def __post_init__(self) -> None:
        if min(self.batch, self.prompt, self.beams) < 1 or self.new < 2:
            raise ValueError(f"{self.name}: batch, prompt and beams are at least 1, new at least 2")

    @property
    def name(self) -> str:
        return f"b{self.batch}/p{self.prompt}/n{self.new}" + (f"/beam{self.beams}" if self.beams > 1 else "")

    @property
    def rows(self) -> int:
        """Sequences that a step computes."""
        return self.batch * self.beams

    @property
    def settled(self) -> int:
        """New tokens after which steps count as steady; what a first step sets up is done by then."""
        return min(8, self.new // 2)


@dataclass(frozen=True)
class Variant:
    """One way to run the model.

    Args:
        name: what it is called in rows.
        options: of `patch`; None leaves the model unpatched.
        generate_options: for `generate()`, besides those of the case.
    """

    name: str
    options: dict[str, Any] | None = None
    generate_options: dict[str, Any] = field(default_factory=dict)

    @property
    def changes_numbers(self) -> bool:
        """Whether what was asked for gives another text than the unpatched model's."""
        return bool(self.options and self.options.get("kv_cache_dtype"))


_UNPATCHED = {
    "transformers": Variant("transformers"),
    "transformers-static": Variant("transformers-static", generate_options={"cache_implementation": "static"}),
}


def parse_case(text: str) -> Case:
    """`1x128x64` is batch x prompt x new; `1x128x64b4` the same with 4 beams.

    Raises:
        ValueError: written otherwise, or a number is too small.
    """
    match = _CASE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"case {text!r}: write batch x prompt x new as in 1x128x64, with 4 beams 1x128x64b4")
    return Case(*(int(number or 1) for number in match.groups()))


def grid(batches: str, prompts: str, new: str, beams: str) -> list[Case]:
    """All combinations of comma-separated numbers.

    Raises:
        ValueError: not numbers, or one is too small.
    """
    return [Case(*numbers) for numbers in itertools.product(*map(_numbers, (batches, prompts, new, beams)))]


def parse_variants(text: str) -> list[Variant]:
    """A comma-separated list of `transformers`, `transformers-static`, `hf_turbo`, `hf_turbo:option=value`, `options`.

    `options` is one `hf_turbo` variant for each on/off option, with that option turned round. Several options of one
    variant follow each other with commas: `hf_turbo:block_size=32,prompt_attention=triton`.

    Raises:
        ValueError: an unknown variant or option, or a value that is not allowed.
        ImportError: an option needs a package that is missing.
    """
    names: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if "=" in part and ":" not in part and names and names[-1].startswith("hf_turbo:"):
            names[-1] += f",{part}"
        else:
            names.append(part)
    variants = [v for name in names for v in (_each_option() if name == EACH_OPTION else [_variant(name)])]
    if not variants:
        raise ValueError("no variants given")
    return list({variant.name: variant for variant in variants}.values())


def _variant(name: str) -> Variant:
    if name in _UNPATCHED:
        return _UNPATCHED[name]
    kind, _, written = name.partition(":")
    if kind != "hf_turbo":
        known = ", ".join([*_UNPATCHED, "hf_turbo", "hf_turbo:option=value", EACH_OPTION])
        raise ValueError(f"unknown variant {name!r}; there are {known}")
    options = dict(_option(part) for part in written.split(",") if part)
    TurboConfig.of(None, options)
    return Variant(name, options)


def _each_option() -> Iterable[Variant]:
    switches = {f.name: f.default for f in fields(TurboConfig) if isinstance(f.default, bool)}
    return [_variant(f"hf_turbo:{name}={str(not default).lower()}") for name, default in switches.items()]


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"option {text!r}: write option=value")
    word = {"true": True, "false": False, "none": None}
    if value.lower() in word:
        return name, word[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a plain word
        return name, value


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r}: give whole numbers with commas between, as in 1,32") from None
