"""The same as `hf-turbo bench`, from a checkout: `python -m benchmarks.run MODEL ...`."""

import sys

from hf_turbo.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
