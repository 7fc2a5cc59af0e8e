"""Programs that others wrote, with our ops in place: ``make programs``.

python -m tools.model_programs             # all, in the environment of make programs
python -m tools.model_programs 'gemma 4'   # those whose names contain it
python -m tools.model_programs --diff      # what is edited, as a patch

Each program (a model of gemma or Tunix of random weights, as small as its form allows) runs in two processes: as its
library has it, and with a copy of the library to which ``edits.toml`` is applied. Compared are the logits, the
gradients of all parameters and decoding with a cache. Exits with 1 if results differ, if a program does not call an op
that its edits put in, or if the parameters have other names.
"""

import argparse
import difflib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tools.model_programs.edits import edited, edits

ROOT = Path(__file__).parent.parent.parent
type Arrays = Mapping[str, np.ndarray]

TOLERANCE = 1e-5
"""Of the greatest value of an array, in float32: some ten roundings, sums in another order over a few layers."""
SENSITIVITY = 20 * 2.0**-16
"""Times the program's own error in bfloat16, where that is more: a program that amplifies roundings does so in both
dtypes, of which one has 16 bits more. One error is a greatest, the other a mean."""
NOISE = 1.25
"""Times the program's own error in bfloat16: both are means over thousands of roundings, of other intermediates."""
HEAD = "| program | calls: forward + backward + a step of decoding | logits | gradients | decoding | bfloat16 |"


def child(side: str, names: list[str], folder: Path) -> None:
    """Writes the results of the programs, as float32 and bfloat16, and what they call if they are edited."""
    import jax.numpy as jnp

    from tools.model_programs.programs import PROGRAMS, calls, results

    for name in names:
        for dtype in (jnp.float32, jnp.bfloat16):
            found = results(PROGRAMS[name], dtype, ours=side == "ours")
            np.savez(folder / f"{name} {side} {jnp.dtype(dtype)}.npz", **found)  # type: ignore[arg-type]
        if side == "ours":
            (folder / f"{name}.json").write_text(json.dumps(calls(PROGRAMS[name])))


def run(side: str, names: list[str], folder: Path, packages: Path | None) -> "subprocess.Popen[bytes]":
    """Begins the process of one side; with ``packages`` in front of what is installed."""
    path = os.pathsep.join(str(each) for each in (packages, ROOT) if each is not None)
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [sys.executable, "-W", "ignore", "-m", "tools.model_programs", "--child", side, str(folder), *names]
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The greatest difference, by the greatest value."""
    return float(np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30))


def spread(found: Arrays, exact: Arrays) -> float:
    """The root of the mean square of relative errors: of each array as one, over all arrays."""
    each = [np.sum(np.square(found[name] - want)) / max(np.sum(np.square(want)), 1e-30) for name, want in exact.items()]
    return float(np.sqrt(np.mean(each)))


def compared(theirs: Mapping[str, Arrays]) -> Arrays:
    """The program's arrays in float32, but for those that are zero up to roundings, which bfloat16 has by far larger.

    Such is the gradient of a scale in front of a norm: Gemma 4's last ``skip_scale``.
    """
    return {name: want for name, want in theirs["float32"].items() if not error(theirs["bfloat16"][name], want) > 10}


def judged(
    theirs: Mapping[str, Arrays], ours: Mapping[str, Arrays], calls: Mapping[str, int], ops: tuple[str, ...]
) -> Iterator[str]:
    """What is wrong with a program, by its results in each dtype."""
    if other := ours["float32"].keys() ^ theirs["float32"].keys():
        yield f"other parameters: {sorted(other)}"
        return
    exact = compared(theirs)
    own, mine = spread(theirs["bfloat16"], exact), spread(ours["bfloat16"], exact)
    for name, want in exact.items():
        if not (off := error(ours["float32"][name], want)) <= max(TOLERANCE, SENSITIVITY * own):
            yield f"{name} differs by {off:.1e} of its greatest value"
    if not mine <= NOISE * own:
        yield f"in bfloat16 the error is {mine:.2e}, the program's own {own:.2e}"
    for op in ops:
        if missing := [each for each in ("forward", "backward") if not calls.get(f"{op} {each}")]:
            yield f"no call of {op}, {' and '.join(missing)}"


def row(name: str, theirs: Mapping[str, Arrays], ours: Mapping[str, Arrays], calls: Mapping[str, int]) -> str:
    """A row of the table of docs/notes/drop_ins.md."""
    exact, mine = compared(theirs), ours["float32"]
    ops = dict.fromkeys(key.split()[0] for key in calls)
    called = ", ".join(
        f"`{op}` "
        + " + ".join(str(calls.get(f"{op} {each}", 0)) for each in ("forward", "backward", "forward decoding"))
        for op in ops
    )
    gradients = max(error(mine[key], want) for key, want in exact.items() if key.startswith("gradient"))
    off = [error(mine["logits"], exact["logits"]), gradients, error(mine["decoding"], exact["decoding"])]
    rounded = [f"{spread(side['bfloat16'], exact):.1e}" for side in (theirs, ours)]
    return f"| {name} | {called} | {' | '.join(f'{each:.0e}' for each in off)} | {' / '.join(rounded)} |"


def patch(packages: Path) -> Iterator[str]:
    """The edits as a unified diff."""
    with tempfile.TemporaryDirectory() as made:
        edited(packages, Path(made), edits())
        for name in dict.fromkeys(edit.file for edit in edits()):
            sides = ((packages / name).read_text().splitlines(), Path(made, name).read_text().splitlines())
            yield from difflib.unified_diff(*sides, f"a/{name}", f"b/{name}", lineterm="")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.model_programs", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("only", nargs="?", default="", help="a part of the programs' names")
    parser.add_argument("--diff", action="store_true", help="print the edits as a patch, and run nothing")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    packages = Path(sysconfig.get_paths()["purelib"])
    if given.child:
        child(given.child[0], given.child[2:], Path(given.child[1]))
        return 0
    if given.diff:
        print("\n".join(patch(packages)))
        return 0

    from tools.model_programs.programs import PROGRAMS

    names = [name for name in PROGRAMS if given.only in name]
    if not names:
        parser.error(f"no program has {given.only!r} in its name; there are {', '.join(PROGRAMS)}")
    with tempfile.TemporaryDirectory() as made:
        folder, copies = Path(made, "results"), Path(made, "packages")
        folder.mkdir()
        edited(packages, copies, edits())
        sides = [run("theirs", names, folder, None), run("ours", names, folder, copies)]
        ended = [side.wait() for side in sides]
        return 1 if any(ended) else report(names, folder)


def report(names: list[str], folder: Path) -> int:
    """Prints the table, and what is wrong."""
    from tools.model_programs.programs import PROGRAMS

    wrong: list[str] = []
    print(HEAD)
    print("| --- | --- | --- | --- | --- | --- |")
    for name in names:
        theirs, ours = (
            {dtype: dict(np.load(folder / f"{name} {side} {dtype}.npz")) for dtype in ("float32", "bfloat16")}
            for side in ("theirs", "ours")
        )
        calls = json.loads((folder / f"{name}.json").read_text())
        print(row(name, theirs, ours, calls))
        wrong += [f"{name}: {each}" for each in judged(theirs, ours, calls, PROGRAMS[name].ops)]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
