"""The `hf-turbo` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; where its packages are missing, one sentence says so."""
    try:
        from .app import app
    except ImportError as error:
        sys.exit(f"hf-turbo: {error}")
    app(args=arguments)
