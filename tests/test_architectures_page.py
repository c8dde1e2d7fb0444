"""docs/architectures.md says what patch() and report() say today."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs" / "make_architectures.py"


def test_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_architectures", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text()
    assert page == script.updated(page), f"run `python docs/{SCRIPT.name}`"
