"""Runs the tests of other libraries with our functions and layers in the place of theirs.

python -m tools.drop_ins equinox FOLDER         # FOLDER has Equinox's tests/, as its repository does
python -m tools.drop_ins flax FOLDER            # an unpacked sdist of Flax
python -m tools.drop_ins dot_product_attention FOLDER       # JAX's repository, as the three below
python -m tools.drop_ins ragged_dot FOLDER
python -m tools.drop_ins ragged_paged_attention FOLDER
python -m tools.drop_ins paged_attention FOLDER --every 30  # of 864, some seconds each on a CPU

Each suite runs twice, once as the library has it and once replaced, in processes of their own. The output is a row of
the table in docs/notes/drop_ins.md, each test that fails only when replaced, with the reason, and how many tests
reached what was replaced. It exits with 1 if a test that is none of `EXPECTED` fails only when replaced.
The tests are theirs and are not kept here: download them (the sdists of Flax have them, those of Equinox and JAX do
not), of versions near those that are installed.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTCOMES = ("passed", "failed", "skipped")

EXPECTED: Mapping[str, str] = {
    "test_causal_mask_equivalence1": "no query sees a key: zeros in ours, the average in Flax's own for weights"
}
"""What a replaced test may fail with, by its name: the pages say that the results differ."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """The tests of one replaced name.

    Attributes:
      library: the distribution whose tests they are.
      files: in the folder that is given.
      select: pytest's ``-k``.
      replace: puts ours in the place of theirs, in this process.
    """

    library: str
    files: tuple[str, ...]
    select: str
    replace: Callable[[], None]


@dataclasses.dataclass
class Result:
    """The outcomes of one run, by test."""

    outcomes: dict[str, str]
    reasons: dict[str, str]
    reached: list[str]

    def count(self, outcome: str) -> int:
        return list(self.outcomes.values()).count(outcome)


# In the process that runs their tests: a plugin of pytest (-p tools.drop_ins).

OURS: dict[str, Callable[..., Any]] = {}
"""Ours by the name of the suite; each counts its calls."""
_calls: collections.Counter[str] = collections.Counter()


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, under the name of its suite, counting its calls."""

    @functools.wraps(function)
    def calling(*args: Any, **kwargs: Any) -> Any:
        _calls[name] += 1
        return function(*args, **kwargs)

    OURS[name] = calling
    return calling


def _set(owner: object, **attributes: object) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


def _replace_equinox() -> None:
    import equinox.nn

    from tilewright.integrations import equinox as ours

    _set(ours, flash_attention=counted("equinox", ours.flash_attention))
    _set(equinox.nn, MultiheadAttention=ours.MultiheadAttention)


def _replace_flax() -> None:
    import inspect

    from tilewright.integrations import flax as integration

    ours = counted("flax", integration.dot_product_attention)
    for name in ("linen_attention", "nnx_attention"):
        theirs = getattr(integration, name)
        # Ours goes on to call theirs for weights.
        copy = types.FunctionType(theirs.__code__, theirs.__globals__, name, theirs.__defaults__)
        _set(integration, **{name: copy})
        # Layers hold the function as a default, so it is not its name that changes but what it does.
        theirs.__code__ = _to_ours.__code__
        theirs.__defaults__, theirs.__kwdefaults__ = None, None
        _set(theirs, __signature__=inspect.signature(ours))


def _to_ours(*args: Any, **kwargs: Any) -> Any:
    # Its code runs among Flax's globals.
    import tools.drop_ins

    return tools.drop_ins.OURS["flax"](*args, **kwargs)


def _replace_dot_product_attention() -> None:
    import jax

    from tilewright.modules import dot_product_attention

    _set(jax.nn, dot_product_attention=counted("dot_product_attention", dot_product_attention))


def _replace_ragged_dot() -> None:
    import jax

    from tilewright.modules import grouped_matmul

    _set(jax.lax, ragged_dot=counted("ragged_dot", grouped_matmul))


def _replace_paged_attention() -> None:
    from jax._src import test_util
    from jax.experimental.pallas.ops.tpu import paged_attention, ragged_paged_attention

    from tilewright.integrations import jax_serving

    _set(paged_attention, paged_attention=counted("paged_attention", jax_serving.paged_attention))
    ours = counted("paged_attention", jax_serving.ragged_paged_attention)
    _set(ragged_paged_attention, ragged_paged_attention=ours)
    # Their kernels need a TPU, ours do not.
    _set(test_util, is_device_tpu_at_least=lambda version: version <= 5)
    _set(test_util, is_device_tpu=lambda version=None, variant="": version in (None, 5))


SUITES: Mapping[str, Suite] = {
    "equinox": Suite(
        "equinox",
        ("tests/test_nn.py", "tests/test_shared.py", "tests/test_tree.py"),
        "multihead_attention or test_shared_node or test_multi_shared or test_inference_mode",
        _replace_equinox,
    ),
    "flax": Suite("flax", ("tests/linen/linen_attention_test.py", "tests/nnx/nn/attention_test.py"), "", _replace_flax),
    "dot_product_attention": Suite("jax", ("tests/nn_test.py",), "DotProductAttention", _replace_dot_product_attention),
    "ragged_dot": Suite("jax", ("tests/lax_test.py",), "ragged_dot and not general", _replace_ragged_dot),
    "paged_attention": Suite("jax", ("tests/pallas/tpu_paged_attention_kernel_test.py",), "", _replace_paged_attention),
    "ragged_paged_attention": Suite(
        "jax", ("tests/pallas/tpu_ragged_paged_attention_test.py",), "", _replace_paged_attention
    ),
}


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--replaced", default="", help="the suite whose functions are ours; empty for none")
    parser.addoption("--every", type=int, default=1, help="run every n-th test alone")
    parser.addoption("--outcomes", help="the file that the outcomes are written to")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    items[:] = items[:: config.getoption("every")]


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(_Recorder(Path(config.getoption("outcomes"))))
    if name := config.getoption("replaced"):
        SUITES[name].replace()


class _Recorder:
    """Writes the outcome of every test, and which tests called ours."""

    def __init__(self, file: Path):
        self._file, self._result, self._before = file, Result({}, {}, []), 0

    def pytest_runtest_setup(self, item: Any) -> None:
        self._before = _calls.total()

    def pytest_runtest_logreport(self, report: Any) -> None:
        # The setup of a test that is skipped, or fails, is its outcome; else it is the call.
        if report.when == "call" or report.outcome != "passed":
            self._result.outcomes[report.nodeid] = report.outcome
            if report.outcome == "failed":
                crash = getattr(report.longrepr, "reprcrash", None)
                self._result.reasons[report.nodeid] = str(crash.message if crash else report.longrepr)
        if report.when == "call" and _calls.total() > self._before:
            self._result.reached.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(dataclasses.asdict(self._result)))


# In the process that compares.


def run(name: str, folder: Path, *, replaced: bool, every: int = 1) -> Result:
    """The outcomes of a suite in a process of its own.

    Raises:
      RuntimeError: pytest could not run it, or found no test.
    """
    suite = SUITES[name]
    with tempfile.TemporaryDirectory() as made:
        file = Path(made, "outcomes.json")
        command = [
            sys.executable, "-m", "pytest", "-p", "tools.drop_ins", "-p", "no:cacheprovider", "-q", "--tb=short",
            "-o", "addopts=", "-o", "filterwarnings=default", "--outcomes", str(file), "-k", suite.select,
            *(["--replaced", name] if replaced else []), "--every", str(every), *suite.files,
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        ran = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        found = Result(**json.loads(file.read_text())) if file.exists() else None
    if found is None or not found.outcomes:
        raise RuntimeError(f"no test of {name} ran in {folder}:\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}")
    return found


def differences(theirs: Result, ours: Result) -> Iterator[tuple[str, str, str]]:
    """Each test that passes only where nothing is replaced, the reason, and what of `EXPECTED` that is, if any."""
    for test, outcome in ours.outcomes.items():
        if outcome == "failed" and theirs.outcomes.get(test) != "failed":
            yield test, ours.reasons[test], EXPECTED.get(test.rpartition("::")[2], "")


def row(name: str, theirs: Result, ours: Result) -> str:
    """A row of the table of docs/notes/drop_ins.md."""
    counts = [" / ".join(str(each.count(outcome)) for outcome in OUTCOMES) for each in (theirs, ours)]
    library = SUITES[name].library
    return f"| `{name}` | {library} {importlib.metadata.version(library)} | {counts[0]} | {counts[1]} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.drop_ins", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("folder", type=Path, help="what holds the tests of the library")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th test alone")
    given = parser.parse_args(arguments)
    if missing := [each for each in SUITES[given.suite].files if not (given.folder / each).is_file()]:
        parser.error(f"{given.folder} has no {', '.join(missing)}")
    theirs, ours = (run(given.suite, given.folder, replaced=each, every=given.every) for each in (False, True))
    print(row(given.suite, theirs, ours))
    found = list(differences(theirs, ours))
    for test, reason, expected in found:
        print(f"{test}\n  {expected or 'NOT EXPECTED'}: {' '.join(reason.split())[:300]}")
    print(f"{len(ours.reached)} of {len(ours.outcomes)} tests reached ours")
    return 1 if any(not expected for _, _, expected in found) or not ours.reached else 0


if __name__ == "__main__":
    sys.exit(main())
