"""Put the checkout on ``sys.path``, so that the benchmarks run from a checkout as well as installed."""

from __future__ import annotations

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "bench" / "results"

for folder in (REPO / "bench", REPO / "examples", REPO / "examples" / "torchtitan"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
if str(REPO) not in sys.path:
    # Behind everything else, so that an installed pgraph wins over the checkout.
    sys.path.append(str(REPO))
