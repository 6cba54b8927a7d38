"""`python -m bench kernels|families|rounds|quantize key=value ...`: measures the runtime on this GPU."""

from __future__ import annotations

import sys

from bench.families import main as families
from bench.kernels import main as kernels
from bench.quantize import main as quantize
from bench.rounds import main as rounds
from specter.errors import SpecterError

BENCHES = {"kernels": kernels, "families": families, "rounds": rounds, "quantize": quantize}


def main(arguments: list[str]) -> int:
    try:
        if not arguments or arguments[0] not in BENCHES:
            raise SpecterError(f"bench {' '.join(arguments[:1]) or '(none)'} is unknown", f"use {' or '.join(BENCHES)}")
        BENCHES[arguments[0]](arguments[1:])
    except SpecterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
