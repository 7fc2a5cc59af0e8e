"""Which tests catch which defect.

`grow` lists new defects by rule, for the files of one backend of an op. `run` plants each defect in a copy of the code
and runs the tests near it, cheapest first, until some fail; what has a verdict is left out, so that an interrupted run
goes on where it was. `table` shows the verdicts.
"""

import collections
import concurrent.futures
import enum
import queue
from typing import Annotated

import rich
import rich.table
import typer

from tests.support.suites import costs, suites_of
from tools.mutants import pairs
from tools.mutants.defects import Defect, load
from tools.mutants.near import plan
from tools.mutants.plant import Copy
from tools.mutants.plugin import Plan
from tools.mutants.verdicts import Verdict, Verdicts


class Reach(enum.StrEnum):
    """Which tests run: those near a defect, then all others, too; or those of an accelerator alone."""

    near = "near"
    all = "all"
    gpu = "gpu"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def grow(
    op: str,
    backend: str,
    count: Annotated[int, typer.Option(help="defects to list")] = pairs.FEWEST,
    seed: Annotated[int, typer.Option(help="of the order in which they are drawn")] = 0,
) -> None:
    """Lists defects by rule that are not stored yet, as entries of defects/*.toml.

    Store those that make the backend wrong, and the ids of the others in rejected.toml, with the reason: that they
    change nothing, or speed alone. Which tests catch them must not decide.
    """
    for defect in pairs.grown(op, backend, count, seed, load().values()):
        print(pairs.as_toml(defect))


@app.command()
def run(
    only: Annotated[
        list[str] | None, typer.Argument(help="defects; if none is named, all without a valid verdict")
    ] = None,
    reach: Annotated[Reach, typer.Option(help="which tests are run before nothing catches a defect")] = Reach.near,
    gpu_tests: Annotated[str, typer.Option(help="of `--reach gpu`: a file or folder of tests")] = "tests/gpu",
    again: Annotated[bool, typer.Option("--all", help="those that have a verdict, too")] = False,
    jobs: Annotated[int, typer.Option(help="copies at work at once")] = 2,
) -> None:
    """Brings the verdicts up to date."""
    defects, verdicts, known = load(), Verdicts(), costs()
    verdicts.keep(set(defects))
    if unknown := set(only or ()) - set(defects):
        raise typer.BadParameter(f"there is no defect {', '.join(sorted(unknown))}")

    def is_open(defect: Defect) -> bool:
        verdict = verdicts.of(defect)
        return verdict is None or not verdict.stands()

    wanted = [defects[id] for id in only] if only else [d for d in defects.values() if again or is_open(d)]
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for _ in range(jobs):
        copies.put(Copy())

    def judged(defect: Defect) -> Verdict | None:
        copy = copies.get()
        try:
            with copy.planted(defect):
                if reach is Reach.gpu:
                    outcome = copy.run(Plan(((gpu_tests,),), known))
                    return Verdict.on(defect, outcome.failed, outcome.seconds) if outcome.failed else None
                return judge(defect, copy, known, reach)
        finally:
            copies.put(copy)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        begun = {pool.submit(judged, defect): defect for defect in wanted}
        for done, future in enumerate(concurrent.futures.as_completed(begun), 1):
            verdict, says = future.result(), "not caught by what was run: without a verdict"
            if verdict is not None:
                verdicts.put(begun[future], verdict)
                says = f"{', '.join(verdict.tests) or 'nothing catches it'} ({verdict.seconds:.0f} s)"
            print(f"{done} of {len(wanted)}  {begun[future].id}  {says}", flush=True)
    if reach is Reach.gpu:
        return
    failing = fail_without_a_defect(copies.get(), {t for d in wanted if (v := verdicts.of(d)) for t in v.tests}, known)
    if failing:
        print("fail without any defect, so their verdicts are worth nothing:", *sorted(failing))
        raise typer.Exit(1)
    table()


def judge(defect: Defect, copy: Copy, known: dict[str, float], reach: Reach) -> Verdict | None:
    """Runs the tests near a defect, then all others if wanted, until some fail.

    Without one there is a verdict only if all of the tests were run.
    """
    near = plan(defect, known)
    # The first files are collected in a second, and enough for most.
    plans = [near.of_stages(slice(1)), near.of_stages(slice(1, None))]
    if reach is Reach.all:
        plans.append(plan(defect, known, all_tests=True))
    seconds, complete = 0.0, True
    for each in plans:
        if not each.stages:
            continue
        outcome = copy.run(each)
        seconds += outcome.seconds
        if outcome.failed:
            return Verdict.on(defect, outcome.failed, seconds)
        complete = outcome.complete
    return Verdict.on(defect, (), seconds) if complete else None


def fail_without_a_defect(copy: Copy, tests: set[str], known: dict[str, float]) -> set[str]:
    """Those of some tests that fail in a copy as it is."""
    if not tests:
        return set()
    everything = Plan((tuple(sorted(tests)),), known, enough=len(tests), after=1e9)
    return set(copy.run(everything).failed)


@app.command()
def table() -> None:
    """Shows how many defects of each area each suite catches, and those that `make test` does not."""
    defects, verdicts, suites = load(), Verdicts(), suites_of()
    caught = {d.id: v.caught_by(suites) for d in defects.values() if (v := verdicts.of(d)) is not None}
    counts = collections.Counter((d.area, caught[d.id]) for d in defects.values() if d.id in caught)
    areas = sorted({defect.area for defect in defects.values()})
    shown = rich.table.Table(
        "area", "defects", "make quick", "make test", "make test-full", "make test-gpu alone", "nothing"
    )
    for area in [*areas, "all"]:
        within = areas if area == "all" else [area]
        quick, test, full, gpu, none = (sum(counts[a, s] for a in within) for s in ("quick", "test", "full", "gpu", ""))
        total = sum(d.area in within for d in defects.values())
        shown.add_row(area, *map(str, (total, quick, quick + test, quick + test + full, gpu, none)))
    rich.print(shown)
    for id in defects:
        if caught.get(id) not in ("quick", "test"):
            print(f"{id}: {caught[id] or 'nothing catches it' if id in caught else 'no verdict'}")


if __name__ == "__main__":
    app()
