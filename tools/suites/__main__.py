"""Measures tests, and chooses those of `make quick` and `make test`.

`measure` runs tests and records what each costs and reaches, of all that no record has if no paths are given, and
chooses anew. `choose` does that alone. `show` says what a suite has.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import rich
import rich.table
import typer

from tests.support.suites import FOLDER, SUITES, Recorded, read, write
from tools.mutants.verdicts import Verdicts
from tools.suites.choose import BUDGETS, Facts, choose, function_of

ROOT = Path(__file__).parent.parent.parent
TESTS, REACHED = FOLDER / "tests.txt", FOLDER / "reached.json"
SAME, NOTHING = 1.3, 0.1
"""A cost that is less than that many times the recorded one, or differs by less than that many seconds, is the same."""
KEPT = 3
"""How many tests are kept of those that reach something: the cheapest."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "tools.suites.recorder"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def measure(
    paths: Annotated[list[str] | None, typer.Argument(help="tests; all that have no record if none")] = None,
    jobs: int = 2,
) -> None:
    """Records what tests cost and reach, and chooses anew; on a machine that does nothing else."""
    with tempfile.TemporaryDirectory(prefix="tilewright-tests-") as folder:
        command = [*PYTEST, f"--measured={folder}", "-n", str(jobs), "--dist", "worksteal"]
        # Programs are compiled as on a machine where nothing was run before.
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs", "TILEWRIGHT_HYPOTHESIS_PROFILE": "ci"}
        failed = subprocess.run([*command, *(paths or ["--unmeasured"])], cwd=ROOT, env=env, check=False).returncode
        lines = [json.loads(line) for part in Path(folder).glob("*.jsonl") for line in part.read_text().splitlines()]
    tests, reached = merged(read(TESTS), json.loads(REACHED.read_text()) if REACHED.exists() else {}, lines)
    write(TESTS, tests)
    REACHED.write_text(json.dumps(dict(sorted(reached.items())), indent=1) + "\n")
    choose_anew()
    raise typer.Exit(failed)


def merged(
    tests: dict[str, Recorded], reached: dict[str, list[str]], lines: list[dict[str, Any]]
) -> tuple[dict[str, Recorded], dict[str, list[str]]]:
    """Records with what was measured now in place of what was of the same tests."""
    tests, measured = dict(tests), {line["test"]: line for line in lines}
    for test, line in measured.items():
        seconds, old = line["seconds"], tests.get(test)
        if old is not None and is_same(old.seconds, seconds):
            seconds = old.seconds
        tests[test] = Recorded(old.suite if old else SUITES[-1], seconds)
    # Some that were recorded may be gone.
    kept = tests.keys() - measured.keys()
    found = {element: [test for test in known if test in kept] for element, known in reached.items()}
    for test, line in measured.items():
        for element in () if line["skipped"] else line["reached"]:
            found.setdefault(element, []).append(test)
    cheapest = {e: sorted(known, key=lambda t: (tests[t].seconds, t))[:KEPT] for e, known in found.items()}
    return tests, {element: known for element, known in cheapest.items() if known}


def is_same(old: float, new: float) -> bool:
    """True if two costs may be two measurements of one test."""
    return old / SAME < new < old * SAME or abs(old - new) < NOTHING


@app.command(name="choose")
def choose_anew() -> None:
    """Chooses the tests of `make quick` and `make test` from what is recorded, and forgets tests that are gone."""
    command = [*PYTEST, "--collect-only", "--no-header"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    there, known = {line for line in listed if "::" in line}, read(TESTS)
    facts = Facts(
        seconds={test: each.seconds for test, each in known.items() if test in there},
        reached=json.loads(REACHED.read_text()),
        caught={defect: verdict.tests for defect, verdict in Verdicts().known.items()},
        now={test: each.suite for test, each in known.items()},
    )
    write(TESTS, choose(facts))
    show()
    if unknown := there - set(known):
        print(f"{len(unknown)} tests have no record and run in every suite: make test-costs")


@app.command()
def show() -> None:
    """Shows how many tests each suite has, and what they cost."""
    tests = read(TESTS)
    table = rich.table.Table("suite", "tests", "functions", "processor seconds", "budget")
    for suite in SUITES:
        within = {t: each for t, each in tests.items() if each.is_in(suite)}
        seconds, budget = sum(each.seconds for each in within.values()), BUDGETS.get(suite)
        row = len(within), len(set(map(function_of, within))), round(seconds), "" if budget is None else round(budget)
        table.add_row(suite, *map(str, row))
    rich.print(table)


if __name__ == "__main__":
    app()
