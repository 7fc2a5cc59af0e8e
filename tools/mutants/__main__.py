"""Which suite of tests catches which defect.

`record` runs the tests of `make test` once under coverage and notes which lines each test executes. `run`
plants each defect in a copy of the code, and runs the tests that touch it until one fails, then, if none does, all
others; what has a verdict is left out, so that an interrupted run goes on where it was. `table` shows the verdicts.
"""

import collections
import concurrent.futures
import enum
import queue
from typing import Annotated

import rich
import rich.table
import typer

from tests.support.suites import SUITES
from tools.mutants.contexts import Contexts
from tools.mutants.contexts import record as record_tests
from tools.mutants.defects import ROOT, Defect, load
from tools.mutants.plant import Copy
from tools.mutants.verdicts import Verdict, Verdicts, fingerprint

RECORDED = ROOT / ".mutants"


class Reach(enum.StrEnum):
    """Which tests run: those that touch a defect, all of `make test`, all of `make test-full`; or tests/gpu alone."""

    near = "near"
    test = "test"
    full = "full"
    gpu = "gpu"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def record(
    paths: Annotated[
        list[str] | None, typer.Argument(help="tests to add to what is recorded; all anew if none")
    ] = None,
    jobs: int = 2,
) -> None:
    """Runs the tests of `make test` under coverage, and keeps what they touch in .mutants."""
    record_tests(RECORDED, paths or [], jobs)


@app.command()
def run(
    only: Annotated[
        list[str] | None, typer.Argument(help="defects; if none is named, all without a valid verdict")
    ] = None,
    reach: Annotated[Reach, typer.Option(help="which tests are run before a defect counts as not caught")] = Reach.full,
    gpu_tests: Annotated[str, typer.Option(help="of `--reach gpu`: a file or folder of tests")] = "tests/gpu",
    again: Annotated[bool, typer.Option("--all", help="those that have a verdict, too")] = False,
    jobs: Annotated[int, typer.Option(help="copies at work at once")] = 2,
) -> None:
    """Brings the verdicts up to date."""
    defects, verdicts = load(), Verdicts()
    contexts = None if reach is Reach.gpu else Contexts(RECORDED)
    verdicts.keep(set(defects))
    if unknown := set(only or ()) - set(defects):
        raise typer.BadParameter(f"there is no defect {', '.join(sorted(unknown))}")

    def is_open(defect: Defect) -> bool:
        """Without a verdict, or its test is gone, or in a larger suite than the verdict says."""
        verdict = verdicts.of(defect)
        if verdict is None or contexts is None or verdict.caught_by not in SUITES:
            return verdict is None
        now = contexts.suites.get(verdict.test)
        return now is None or SUITES.index(now) > SUITES.index(verdict.caught_by)

    wanted = [defects[id] for id in only] if only else [d for d in defects.values() if again or is_open(d)]
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for _ in range(jobs):
        copies.put(Copy())

    def judged(defect: Defect) -> Verdict | None:
        copy = copies.get()
        try:
            with copy.planted(defect):
                if contexts is not None:
                    return judge(defect, copy, contexts, reach)
                outcome = copy.run_files([gpu_tests], "full")
                return _verdict(defect, "gpu", outcome.failed, outcome.seconds) if outcome.failed else None
        finally:
            copies.put(copy)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        begun = {pool.submit(judged, defect): defect for defect in wanted}
        for done, future in enumerate(concurrent.futures.as_completed(begun), 1):
            verdict, says = future.result(), "not caught by what was run: without a verdict"
            if verdict is not None:
                verdicts.put(begun[future], verdict)
                says = f"{verdict.caught_by}: {verdict.test}" if verdict.caught_by else "nothing catches it"
                says += f" ({verdict.seconds:.0f} s)"
            print(f"{done} of {len(wanted)}  {begun[future].id}  {says}", flush=True)
    if contexts is None:
        return
    failing = _fail_without_a_defect(copies.get(), {v.test for d in wanted if (v := verdicts.of(d))}, contexts)
    if failing:
        print("fails without any defect, so its verdicts are worth nothing:", failing)
        raise typer.Exit(1)
    table()


def judge(defect: Defect, copy: Copy, contexts: Contexts, reach: Reach) -> Verdict | None:
    """Runs what touches a defect, suite by suite, and then all others, up to the first failure.

    Without one there is a verdict only if everything was run.
    """
    seconds = 0.0
    lists = [contexts.order(defect, [each]) for each in ("quick", "test")]
    stages = [near for near, *_ in lists] + [[test for _, beside, _ in lists for test in beside]]
    if reach is not Reach.near:
        stages.append([test for *_, others in lists for test in others])
    for tests in filter(None, stages):
        outcome = copy.run(tests, "test")
        seconds += outcome.seconds
        if outcome.failed:
            known = contexts.tests.get(outcome.failed)
            return _verdict(defect, known.suite if known else "test", outcome.failed, seconds)
    if reach is not Reach.full:
        return None
    near = {contexts.tests[test].file for tests in stages[:2] for test in tests}
    for files in filter(None, (sorted(near), ["tests"])):
        outcome = copy.run_files(files, "full")
        seconds += outcome.seconds
        if outcome.failed:
            return _verdict(defect, "full", outcome.failed, seconds)
    return _verdict(defect, "", "", seconds)


def _verdict(defect: Defect, suite: str, test: str, seconds: float) -> Verdict:
    return Verdict(suite, test, round(seconds, 1), fingerprint(defect))  # type: ignore[arg-type]


def _fail_without_a_defect(copy: Copy, tests: set[str], contexts: Contexts) -> str:
    """One of some tests that fails in a copy as it is, "" if none does."""
    known = sorted(tests & set(contexts.tests))
    return copy.run(known, "test").failed if known else ""


@app.command()
def table() -> None:
    """Shows how many defects of each area each suite catches, and those that `make test` does not."""
    defects, verdicts = load(), Verdicts()
    counts = collections.Counter((d.area, v.caught_by) for d in defects.values() if (v := verdicts.of(d)) is not None)
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
    for defect in defects.values():
        verdict = verdicts.of(defect)
        if verdict is None or verdict.caught_by not in ("quick", "test"):
            print(f"{defect.id}: {'no verdict' if verdict is None else verdict.test or 'nothing catches it'}")


if __name__ == "__main__":
    app()
