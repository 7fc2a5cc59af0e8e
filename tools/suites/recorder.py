"""A plugin of pytest that writes what each test costs and reaches into the folder ``--measured``.

A test costs the processor time of its process and of those that it waits for; what it shares with others (a compiled
oracle, a fixture of a module) is counted with the first of them. It reaches a direction of a backend when that is
traced, and a transformation of JAX when an op is called under it.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.suites import recorded

TRACES = {
    "EvalTrace": "eager",
    "DynamicJaxprTrace": "jit",
    "BatchTrace": "vmap",
    "JVPTrace": "grad",
    "LinearizeTrace": "grad",
    "ShardMapTrace": "shard_map",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--measured", type=Path, help="the folder in which what tests cost and reach is written")
    parser.addoption("--unmeasured", action="store_true", help="runs the tests that have no record alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--unmeasured"):
        known = recorded()
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
        items[:] = [item for item in items if item.nodeid not in known]


def pytest_configure(config: pytest.Config) -> None:
    runs_tests = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)
    if runs_tests and config.getoption("--measured") is not None:
        config.pluginmanager.register(Recorder(config.getoption("--measured")))


class Recorder:
    """Writes a line of JSON for each test, a file for each process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("w")
        self._reached: set[tuple[str, str]] = set()
        self._called: set[tuple[str, str]] = set()
        self._skipped = False
        self._inside: list[str] = []
        self._watch()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._reached.clear()
        self._called.clear()
        self._skipped = False
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            line = {
                "test": item.nodeid,
                "seconds": round(sum(os.times()[:4]) - before, 3),
                "skipped": self._skipped,
                "reached": sorted(self._elements()),
            }
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._skipped |= report.skipped

    def pytest_sessionfinish(self) -> None:
        self._file.close()

    def _elements(self) -> Iterator[str]:
        """Each direction of a backend, alone and with each op and transformation that may have led to it."""
        for room, backend in self._reached:
            yield backend
            yield from (f"{backend} {call}" for folder, call in self._called if folder == room)

    def _watch(self) -> None:
        """Notes the calls of ops, and the directions of all backends that are imported from now on."""
        import jax

        from tilewright.kernels.op.backend import Backend
        from tilewright.ops.kernel.kernel import Kernel

        def subclassed(cls: type, **kwargs: Any) -> None:
            super(Backend, cls).__init_subclass__(**kwargs)  # type: ignore[misc]
            for direction in ("forward", "backward"):
                if direction in vars(cls) and not getattr(vars(cls)[direction], "__isabstractmethod__", False):
                    setattr(cls, direction, self._noting(vars(cls)[direction], direction))

        Backend.__init_subclass__ = classmethod(subclassed)  # type: ignore[assignment]
        call = Kernel.__call__

        @functools.wraps(call)
        def called(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            transforms = {*_transforms(), *self._inside}
            self._called.update((_room(type(kernel)), f"{kernel.name} {each}") for each in transforms)
            return call(kernel, *args, **kwargs)

        Kernel.__call__ = called  # type: ignore[method-assign, assignment]
        jax.lax.scan = self._entering(jax.lax.scan, "scan")
        for name in ("checkpoint", "remat"):
            setattr(jax, name, self._making(getattr(jax, name), "remat"))

    def _noting(self, method: Callable[..., Any], direction: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def noted(backend: Any, *args: Any, **kwargs: Any) -> Any:
            if type(backend).__name__ != "Declared":  # what a trace has in place of a backend
                self._reached.add((_room(type(backend)), f"{type(backend).__name__}.{direction}"))
            return method(backend, *args, **kwargs)

        return noted

    @contextlib.contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self._inside.append(name)
        try:
            yield
        finally:
            self._inside.pop()

    def _entering(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            with self._within(name):
                return function(*args, **kwargs)

        return entered

    def _making(self, transform: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(transform)
        def made(*args: Any, **kwargs: Any) -> Any:
            found = transform(*args, **kwargs)
            return self._entering(found, name) if callable(found) else found

        return made


def _room(cls: type) -> str:
    """The folder of an op's family: ``norms`` of ``tilewright.kernels.norms.triton.backend``."""
    parts = cls.__module__.split(".")
    return parts[2] if parts[:2] == ["tilewright", "kernels"] and len(parts) > 2 else cls.__module__


def _transforms() -> Iterator[str]:
    """The transformations that are traced here, by the names of JAX's traces."""
    from jax._src.core import trace_ctx

    trace: Any = trace_ctx.trace
    while trace is not None:
        yield TRACES.get(type(trace).__name__, type(trace).__name__)
        trace = getattr(trace, "parent_trace", None)
