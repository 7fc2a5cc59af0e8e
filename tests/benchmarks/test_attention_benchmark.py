"""The attention benchmark end to end on small cases: what it writes, not how fast anything is."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention
from benchmarks.attention import OWN_CASES, SMOKE_CASES, Method, Operands, Oracle, forward_flops, main, rates
from benchmarks.attention_peers import DIRECTIONS, OURS, Call, Direction, JaxPeer, Peer, peers
from benchmarks.attention_report import table
from tilewright.kernels.flash_attention.cases import HOPPER_CASES

METHOD = Method(rounds=2, calls=2, device_time="wall", jobs=1)


def run(folder: Path, *extra: str) -> dict[str, Any]:
    out = folder / "attention.json"
    method = ["--rounds", "2", "--calls", "2", "--device-time", "wall", "--jobs", "2", "--pause", "0"]
    main([*method, "--out", str(out), *extra])
    return json.loads(out.read_text())


def run_smoke(chosen: list[Peer], *directions: Direction) -> list[dict[str, Any]]:
    (compiled,) = attention.compile_cases([SMOKE_CASES["smoke_causal"]], chosen, directions, jobs=2)
    return attention.run_case(compiled, METHOD)


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "smoke_causal,smoke_packed_window"
    found = run(tmp_path, "--cases", names, "--peers", "tilewright,xla,cudnn,tokamax", "--platform", "xla")
    assert [(cell["case"], cell["direction"]) for cell in found["cells"]] == [
        (name, direction) for name in names.split(",") for direction in ("forward", "backward")
    ]
    assert found["runs"][0]["versions"]["jax"] == jax.__version__
    assert found["runs"][0]["method"] == {
        "rounds": 2,
        "calls": 2,
        "device_time": "wall",
        "jobs": 2,
        "pause": 0.0,
    }
    assert found["runs"][0]["compilation_s"] > 0.0
    for cell in found["cells"]:
        ours = cell["implementations"][OURS]
        assert (ours["status"], ours["clock"]) == ("timed", "wall"), ours
        assert len(ours["wall_ms"]) == 2
        assert math.isclose(ours["tflops"], cell["flops"] / ours["median_ms"] / 1e9)
        assert cell["implementations"]["xla"]["status"] == "timed"
        assert cell["implementations"]["cudnn"]["status"] == "failed"
        assert "cuDNN" in cell["implementations"]["cudnn"]["message"]
    forward, backward = found["cells"][:2]
    assert backward["flops"] == 2.5 * forward["flops"]
    assert found["published"]["forward"].keys() == HOPPER_CASES.keys()
    assert (tmp_path / "attention.png").stat().st_size > 10_000
    assert "smoke_packed_window" in capsys.readouterr().out


def test_options_no_peer_has_and_cells_kept(tmp_path: Path) -> None:
    run(tmp_path, "--cases", "smoke_causal", "--peers", OURS, "--directions", "forward")
    found = run(tmp_path, "--cases", "smoke_bias_sinks", "--peers", f"{OURS},xla", "--keep")
    assert [(cell["case"], cell["direction"], cell["run"]) for cell in found["cells"]] == [
        ("smoke_causal", "forward", 0),
        ("smoke_bias_sinks", "forward", 1),
        ("smoke_bias_sinks", "backward", 1),
    ]
    for cell in found["cells"][1:]:
        assert cell["implementations"][OURS]["status"] == "timed"
        assert cell["implementations"]["xla"] == {"status": "cannot", "message": "has no sinks"}


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly(operands: Operands, floats: Any, extras: Any) -> jax.Array:
        right = jax.nn.dot_product_attention(**floats, is_causal=True, implementation="xla")
        # One head of the last batch element is off by a percent.
        return right.at[-1, :, -1].multiply(1.01)

    wrong: list[Peer] = [JaxPeer("nearly", nearly)]
    for cell in run_smoke(wrong, *DIRECTIONS):
        assert cell["implementations"]["nearly"]["status"] == "wrong"
        assert "(1, 1)" in cell["implementations"]["nearly"]["violations"][0]


@pytest.mark.parametrize("name", [*SMOKE_CASES, "d192_v128_4k", "dropout_4k"])
def test_shapes_are_those_of_the_case(name: str) -> None:
    case = dataclasses.replace((SMOKE_CASES | OWN_CASES)[name], q_length=8)
    args, kwargs = case.arguments()
    wanted = dict(zip(("query", "key", "value"), args, strict=True))
    wanted |= {name: kwargs[name] for name in ("bias", "softmax_aux") if name in kwargs}
    shapes = Operands.shapes(case)
    for found in (shapes, shapes.compile()()):
        assert {n: (x.shape, x.dtype) for n, x in found.floats.items()} == {
            n: (x.shape, x.dtype) for n, x in wanted.items()
        }
        assert ("boundaries" in found.extras) == case.packed
        assert found.cotangent.shape == (*args[0].shape[:-1], args[2].shape[-1])
        assert (found.dropout_seed is None) == ("dropout_seed" not in kwargs)


def test_nothing_runs_before_everything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    made = attention.run_case

    def run_case(compiled: attention.Compilation, method: Method) -> list[Any]:
        events.append(f"run {compiled.case.name}")
        return made(compiled, method)

    def tracing(operands: Operands, floats: Any, extras: Any) -> jax.Array:
        assert all(isinstance(x, jax.core.Tracer) for x in floats.values())
        events.append("trace")
        return jax.nn.dot_product_attention(**floats, is_causal=True, implementation="xla")

    monkeypatch.setattr(attention, "run_case", run_case)
    monkeypatch.setattr(attention, "peers", lambda platform: {"traced": JaxPeer("traced", tracing)})
    names = "smoke_causal,smoke_bias_sinks"
    run(tmp_path, "--cases", names, "--peers", "traced")
    # A forward call, and the forward half of the backward's; the second case has options that the peer lacks.
    assert events == ["trace", "trace", "run smoke_causal", "run smoke_bias_sinks"]
    events.clear()
    run(tmp_path, "--cases", names, "--peers", "traced", "--ahead", "1", "--seconds", "0")
    assert events == []


def test_what_fails_is_recorded_and_the_rest_is_measured() -> None:
    def raising(*_: Any) -> Any:
        raise ZeroDivisionError("no such option")

    def of_another_shape(operands: Operands, floats: Any, extras: Any) -> jax.Array:
        return jnp.zeros((2, 1))

    chosen: list[Peer] = [
        JaxPeer("raises", raising),
        JaxPeer("shapes", of_another_shape),
        peers(None)["xla"],
    ]
    (cell,) = run_smoke(chosen, "forward")
    found = cell["implementations"]
    assert found["raises"] == {"status": "failed", "message": "ZeroDivisionError: no such option"}
    assert found["shapes"]["status"] == "failed"
    assert found["xla"]["status"] == "timed"
    assert "failed" in table([cell])


def test_a_call_that_fails_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {name: Call(lambda: None, (), "jax") for name in ("first", "second", "third")}
    left = {"first": 99, "second": 3, "third": 0}

    def failing(call: Call, count: int) -> float:
        (name,) = [name for name, known in calls.items() if known is call]
        if left[name] == 0:
            raise MemoryError("out of memory")
        left[name] -= 1
        return 1.0

    monkeypatch.setattr(attention, "wall_ms", failing)
    found = {name: rates(1e9, samples) for name, samples in attention.measure(calls, METHOD).items()}
    assert found["first"]["status"] == "timed"
    assert found["second"] == found["third"] == {"status": "failed", "message": "MemoryError: out of memory"}


def test_device_time_of_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.mosaic.gpu import profiler

    method = Method(rounds=2, calls=3, device_time="cupti", jobs=1)
    call = {"": Call(jax.jit(jnp.sin), (jnp.ones(3),))}

    def measured(times: Any) -> Any:
        def measure(function: Any, *, aggregate: bool, iterations: int) -> Any:
            assert (aggregate, iterations) == (False, 3)
            return lambda *args: (function(*args), times)

        monkeypatch.setattr(profiler, "measure", measure)
        return rates(1e6, attention.measure(call, method)[""])

    said = measured([[("one", 0.25), ("two", each - 0.25)] for each in (1.0, 2.0, 6.0)])
    assert (said["clock"], said["median_ms"], said["tflops"]) == ("device", 2.0, 0.5e-3)
    none = measured(None)
    assert (none["clock"], none["status"]) == ("wall", "timed")
    assert "started no kernel" in none["device_error"]


def test_a_case_that_fails_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Oracle.compile

    def compile_oracle(oracle: Oracle, *args: Any) -> Any:
        if oracle.case.name == "smoke_causal":
            raise MemoryError("out of memory")
        return made(oracle, *args)

    monkeypatch.setattr(Oracle, "compile", compile_oracle)
    found = run(tmp_path, "--cases", "smoke_causal,smoke_bias_sinks", "--peers", OURS, "--directions", "forward")
    assert [cell["case"] for cell in found["cells"]] == ["smoke_bias_sinks"]
    assert found["runs"][0]["failed"] == {"smoke_causal": "MemoryError: out of memory"}


def test_a_plot_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib", None)
        run(tmp_path, "--cases", "smoke_causal", "--peers", OURS, "--directions", "forward")
    assert not (tmp_path / "attention.png").exists()
    before = (tmp_path / "attention.json").read_text()
    main(["--only-plot", "--out", str(tmp_path / "attention.json")])
    assert (tmp_path / "attention.png").stat().st_size > 5_000
    assert (tmp_path / "attention.json").read_text() == before


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("full_4k_d128", 4096**2),
        ("causal_4k_d128", 4096**2 / 2),
        ("window_16k", 1023 * 1024 / 2 + (16384 - 1023) * 1024),
        ("packed_8k", sum(n * n for n in np.diff(np.round(np.array([0, 0.11, 0.5, 0.76, 1]) * 8192))) / 2),
    ],
)
def test_flops_count_what_is_visible(name: str, pairs: float) -> None:
    case = (HOPPER_CASES | OWN_CASES)[name]
    ends = jnp.asarray(np.round(np.array([0, 0.11, 0.5, 0.76, 1]) * 8192), jnp.int32)
    extras = {"boundaries": ends} if case.packed else {}
    operands = Operands(case, {}, extras, None, jnp.zeros(()))
    assert forward_flops(operands) == 4.0 * case.batch * 16 * pairs * 128


def test_names_that_do_not_exist() -> None:
    with pytest.raises(SystemExit, match="no case or group 'nothing'"):
        main(["--cases", "nothing"])
    with pytest.raises(SystemExit, match="no directions 'forwards'"):
        main(["--cases", "smoke", "--directions", "forwards"])
    with pytest.raises(SystemExit, match="no peer 'nobody'"):
        main(["--cases", "smoke", "--peers", "nobody"])
