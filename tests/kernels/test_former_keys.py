"""Calls are still found under the keys of version 0.1, in which every option of a call stood.

`former_keys.json` was written by that version, from the small case of every op and the rows of its capability table.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import tilewright.kernels.linear_cross_entropy.kl
import tilewright.kernels.linear_cross_entropy.op  # noqa: F401 - a function has the name of the package elsewhere
from tilewright.kernels import OPS, kernel, linear_cross_entropy
from tilewright.ops import use_lock
from tilewright.ops.config.lockfile import Decision, Lock
from tilewright.ops.config.persistent import PersistentCache
from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.utils.fingerprint import toolchain_fingerprint

FORMER: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "former_keys.json").read_text())


def cases_of(op: str) -> dict[str, Any]:
    cases = kernel(op).cases
    brief = {name: dataclasses.replace(case, **cases.brief) for name, case in cases.options.items()}
    return {"small": cases.small, **brief}


def call_of(op: str, case: Any) -> Invocation[Any, Any]:
    args, kwargs = case.arguments()
    return prepared(kernel(op), args, kwargs, concrete=False)[0]


def on_any_cpu(key: str) -> dict[str, Any]:
    return json.loads(key) | {"device": "cpu"}


def test_every_op_of_that_version_is_there() -> None:
    assert FORMER.keys() <= OPS.keys()


@pytest.mark.parametrize("op", FORMER)
def test_calls_know_their_former_keys(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for losses in (linear_cross_entropy.op, linear_cross_entropy.kl):
        # The file is of a process with one device; these tests have eight.
        monkeypatch.setattr(losses, "may_be_distributed", lambda *arrays: False)
    for name, case in cases_of(op).items():
        if name in FORMER[op]:
            inv = call_of(op, case)
            assert [on_any_cpu(key) for key in inv.former_keys] == [json.loads(FORMER[op][name])], name
            assert inv.key not in inv.former_keys


@pytest.mark.parametrize("op", FORMER)
def test_options_at_their_defaults_are_in_no_key(op: str) -> None:
    inv = call_of(op, kernel(op).cases.small)
    inputs = inv.abstract_args[0]
    written = json.loads(inv.key)["kwargs"]
    at_default = {field.name for field in inputs.optional_fields()} - {*inputs.given(), *inputs.given("call")}
    assert not at_default & written.keys()
    assert "wanted" not in written


@pytest.mark.parametrize("op", FORMER)
def test_a_call_is_read_from_its_description(op: str) -> None:
    for case in cases_of(op).values():
        inv = call_of(op, case)
        args, kwargs = inv.kernel.described(inv.abstract_args, inv.abstract_kwargs)
        assert None not in args
        assert inv.kernel.of_described(args, kwargs) == (inv.abstract_args, {})


class TestWhatWasStored:
    """An entry on disk and a decision of a lock file under a former key decide the call."""

    def test_on_disk(self, tmp_path: Path) -> None:
        inv = call_of("rms_norm", kernel("rms_norm").cases.small)
        cache = PersistentCache(tmp_path)
        (former,) = inv.former_keys
        config = inv.kernel.heuristic_cfg(inv)
        cache.put(former, config, source=inv.kernel.source(config), metadata={"time_ms": 1.0, "complete": True})
        found = ConfigSelectorChain(persistent=cache).lookup(inv)
        assert (found.step, found.config, found.key) == ("disk", config, inv.key)
        assert ConfigSelectorChain(persistent=cache).measured_ms(inv, config) == 1.0

    def test_in_a_lock_file(self, tmp_path: Path) -> None:
        inv = call_of("layer_norm", kernel("layer_norm").cases.small)
        (former,) = inv.former_keys
        config = inv.kernel.heuristic_cfg(inv)
        decision = Decision.of(former, config, inv.kernel.source(config))
        lock = Lock(inv.device_fingerprint, toolchain_fingerprint(), (decision,))
        lock.save(tmp_path / "lock.json")
        with use_lock(tmp_path / "lock.json", miss="error"):
            found = ConfigSelectorChain().lookup(inv)
        assert (found.step, found.config) == ("lock", config)
