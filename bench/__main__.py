"""`python -m bench kernels|quantize|residual key=value ...`: measurements on this GPU; `--help` lists the keys."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench import kernels, quantize, residual
from specter.arguments import run_command


def main(arguments: Sequence[str]) -> None:
    """Exits with 2 on bad input, and with 1 if a section failed."""
    name, *options = arguments or ("",)
    if name == "kernels":
        run_command(kernels.main, kernels.Options, options)
    elif name == "quantize":
        run_command(quantize.main, quantize.Options, options)
    elif name == "residual":
        run_command(residual.main, residual.Options, options)
    else:
        print(f"error: bench {name or '(none)'} is unknown: use kernels, quantize or residual", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
