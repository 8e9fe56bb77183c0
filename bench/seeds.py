"""Speed, memory and launches of the workloads for which others have published what CUDA graphs gain or cost.

    python bench/seeds.py --resume --deadline 560             # all there is, as far as it gets
    python bench/seeds.py --models 'seeds/bert-*' --timed-only --jobs 4 --resume --deadline 560
    python bench/seeds.py --models 'tiny/*' --device cpu --driver host --codegen aten --backends eager pgraph

The workloads are in ``bench/zoo/seeds.py``, all with random weights. Everything else is `coverage.py`: each
backend in a process of its own, compiled side by side and measured alone, checked against eager while inputs
and parameters move, merged and resumed. Timed training steps end with the optimizer here; a server's step
goes from the host's memory to the host's memory. A third process of some workloads counts the calls that
launch work, by the profiler (`coverage_count.py`).

Results go to ``bench/results/seeds-<gpu>.json``; `claims.py` measures what these steps do not show.
"""

from __future__ import annotations

from collections.abc import Sequence

import zoo
from coverage import Suite, run


def select(patterns: Sequence[str]) -> list[zoo.Entry]:
    """Workloads by pattern; all but the tiny ones without any."""
    return zoo.select(patterns, {**zoo.SEEDS, **zoo.TINY_SEEDS}, tuple(zoo.SEEDS.values()))


SEEDS = Suite("seeds", __doc__.split("\n", 1)[0], select)

if __name__ == "__main__":
    run(SEEDS)
