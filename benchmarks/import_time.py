"""What ``import tilewright`` costs beyond ``import jax``: fresh interpreters, in turn.

Goal: at most 0.15 s. ``python -m benchmarks.import_time``
"""

import argparse
import subprocess
import sys

from benchmarks.common import Timing, record

GOAL_S = 0.15
_PROGRAM = """
import time
import jax
start = time.perf_counter()
{statement}
print(time.perf_counter() - start)
"""


def seconds(statement: str) -> float:
    """Seconds that a statement takes after ``import jax`` in an interpreter of its own."""
    program = _PROGRAM.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    statements = {"import tilewright": "import tilewright", "import tilewright.modules": "import tilewright.modules",
                  "nothing": "pass"}  # fmt: skip
    for statement in statements.values():
        seconds(statement)  # the first run writes bytecode and fills the page cache
    samples: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(rounds):
        for name, statement in statements.items():
            samples[name].append(seconds(statement))
    timings = {name: Timing(tuple(values)) for name, values in samples.items()}
    for name, timing in timings.items():
        print(f"{name:28} median {timing.median * 1e3:7.1f} ms   minimum {timing.minimum * 1e3:7.1f} ms")
    added = timings["import tilewright"].median
    print(f"goal {GOAL_S * 1e3:.0f} ms: {'met' if added <= GOAL_S else 'missed'}")
    file = record(
        "import_time", {"goal_s": GOAL_S, "timings": {name: timing.to_json() for name, timing in timings.items()}}
    )
    print(f"written to {file}")


if __name__ == "__main__":
    main()
