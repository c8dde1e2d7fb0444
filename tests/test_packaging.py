"""The package stays light to import, its layers point one way, and its files stay short."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import hf_turbo

PACKAGE = Path(hf_turbo.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Bottom first. A module imports from layers below its own, and from its own where that is a folder.
LAYERS = [
    {"ops", "compat", "config"},
    {"quantization"},
    {"cache"},
    {"modeling"},
    {"handle"},
    {"generation"},
    {"engine"},
    {"patched_class"},
    {"patching"},
    {"report"},
    {"training"},
    {"sample_models", "__init__"},
    {"bench"},
    {"cli"},
]

OPTIONAL = {
    "triton", "typer", "flash_attn", "datasets", "matplotlib", "gguf", "rich", "peft", "sentencepiece",
    "cuda", "prometheus_client",
}  # fmt: skip
MAX_LINES = 450

# Those that need triton: dispatch imports them late.
KERNELS = {
    PACKAGE / "ops" / f"{name}.py"
    for name in (
        "accept_round", "activation", "angles", "argmax", "attention_masks", "copy_blocks", "embedding", "head_block",
        "int4_kernels", "int4_linear", "int4_rows", "int4_tiles", "kv_code_kernels", "kv_code_numbers",
        "linear_kernels", "linear_ring", "linear_rows", "merge_splits", "move_kv", "norm", "packed_tokens",
        "paged_attention", "permute_columns", "quantize_kv", "quantized_attention", "quantized_tiles", "repeat_text",
        "rotary", "rotate", "store_kv", "tree_tokens", "work_items",
    )
}  # fmt: skip


def layer_name(path: Path) -> str:
    """The part of the package that a file belongs to: its folder, or itself at the top."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def rank(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def imports(path: Path, everywhere: bool = True):
    """The modules a file imports, dotted, those of this package beginning with `hf_turbo.`.

    Args:
        everywhere: inside functions, too; what only a type checker sees is left out.
    """
    package = ("hf_turbo", *path.relative_to(PACKAGE).parent.parts)
    tree = ast.parse(path.read_text())
    type_checking = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree) if everywhere else tree.body:
        if node in type_checking:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = [*base, *(node.module or "").split(".")] if node.module else [*base]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def test_every_part_has_a_layer():
    assert {layer_name(path) for path in FILES} <= set().union(*LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    mine = layer_name(path)
    for module in imports(path):
        if module.startswith("hf_turbo."):
            theirs = module.split(".")[1]
            if (PACKAGE / theirs).is_dir() or (PACKAGE / f"{theirs}.py").exists():
                assert theirs == mine or rank(theirs) < rank(mine), f"{mine} imports {module}"


def test_ops_know_nothing_of_transformers():
    for path in (PACKAGE / "ops").glob("*.py"):
        assert not [m for m in imports(path) if m.split(".")[0] in ("transformers", "accelerate")], path


def test_block_manager_needs_no_torch():
    assert not [m for m in imports(PACKAGE / "cache" / "block_manager.py") if m.split(".")[0] == "torch"]


def test_optional_packages_are_imported_where_they_are_used():
    for path in FILES:
        found = {module.split(".")[0] for module in imports(path, everywhere=False)} & OPTIONAL
        assert found <= ({"triton"} if path in KERNELS else set()), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.fixture(scope="module")
def after_import():
    """What a fresh Python has loaded after what hf_turbo builds on, and what hf_turbo adds to that."""
    program = """
import json, sys, time
import torch, transformers
from transformers import PreTrainedModel, cache_utils, masking_utils
before, began = set(sys.modules), time.perf_counter()
import hf_turbo
print(json.dumps([time.perf_counter() - began, sorted(set(sys.modules) - before)]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_adds_no_optional_package(after_import):
    assert not {module.split(".")[0] for module in after_import[1]} & OPTIONAL


def test_import_is_quick(after_import):
    # A few milliseconds when nothing else runs; the bound is for a busy machine.
    assert after_import[0] < 1.0


def test_public_names_exist():
    assert hf_turbo.__all__ == sorted(hf_turbo.__all__)
    assert all(hasattr(hf_turbo, name) for name in hf_turbo.__all__)
    assert len(hf_turbo.__all__) <= 20
