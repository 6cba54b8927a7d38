from __future__ import annotations

import sys

from specter.quantize.cli import main

sys.exit(main())
