"""One target under the coverage-guided fuzzer.

python -m tests.fuzz.run TARGET [options of libFuzzer] [corpus]
"""

from __future__ import annotations

import sys

INSTRUMENTED = ["hdserve", "deployments"]
COMPILED = [  # numba reads their bytecode
    "hdserve.databases.cache_lines",
    "hdserve.databases.history",
    "hdserve.databases.last_positions",
    "hdserve.databases.ngram",
    "hdserve.databases.recycled",
    "hdserve.drafting.arrays",
    "hdserve.drafting.candidates",
    "hdserve.drafting.cells",
    "hdserve.drafting.chances",
    "hdserve.drafting.growth",
    "hdserve.drafting.handles",
    "hdserve.drafting.known_contexts",
    "hdserve.drafting.learning",
    "hdserve.drafting.mixing",
    "hdserve.drafting.pointers",
    "hdserve.drafting.recycling",
    "hdserve.drafting.vectors",
    "hdserve.drafting.votes",
    "hdserve.noise",
]


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED, exclude=COMPILED):
        from tests.fuzz.targets import TARGETS
    name, *options = sys.argv[1:]
    atheris.Setup([name, *options], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
