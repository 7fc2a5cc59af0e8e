"""The attention benchmark end to end on small cases: what it writes, not how fast anything is."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention
from benchmarks.attention import OWN_CASES, SMOKE_CASES, Method, Operands, Oracle, forward_flops, main
from benchmarks.attention_peers import OURS, JaxPeer, Peer, peers
from tilewright.kernels.flash_attention.cases import HOPPER_CASES

METHOD = Method(rounds=2, calls=2, device_time="wall", jobs=1)


def run(folder: Path, *extra: str) -> dict[str, Any]:
    out = folder / "attention.json"
    main(["--rounds", "2", "--calls", "2", "--device-time", "wall", "--jobs", "1", "--out", str(out), *extra])
    return json.loads(out.read_text())


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "smoke_causal,smoke_packed_window"
    found = run(tmp_path, "--cases", names, "--peers", "tilewright,xla,cudnn,tokamax", "--platform", "xla")
    assert [(cell["case"], cell["direction"]) for cell in found["cells"]] == [
        (name, direction) for name in names.split(",") for direction in ("forward", "backward")
    ]
    assert found["runs"][0]["versions"]["jax"] == jax.__version__
    assert found["runs"][0]["method"] == {"rounds": 2, "calls": 2, "device_time": "wall", "jobs": 1}
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
    for cell in attention.run_case(SMOKE_CASES["smoke_causal"], wrong, attention.DIRECTIONS, METHOD):
        assert cell["implementations"]["nearly"]["status"] == "wrong"
        assert "(1, 1)" in cell["implementations"]["nearly"]["violations"][0]


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


def test_dropout_is_judged_where_the_oracle_counts_alike() -> None:
    case = OWN_CASES["dropout_4k"]
    assert Oracle(Operands(case, {}, {}, 0, jnp.zeros(()))).places == [(0, 0)]
    assert len(Oracle(Operands(OWN_CASES["d96_4k"], {}, {}, None, jnp.zeros(()))).places) == 2


def test_names_that_do_not_exist() -> None:
    with pytest.raises(SystemExit, match="no case or group 'nothing'"):
        main(["--cases", "nothing"])
    with pytest.raises(SystemExit, match="no peer 'nobody'"):
        main(["--cases", "smoke", "--peers", "nobody"])


def test_plot_of_every_panel(tmp_path: Path) -> None:
    """Synthetic rates: whether bars, marks and labels find their places."""
    draw = np.random.default_rng(0)
    cells = [
        {
            "case": name,
            "direction": direction,
            "implementations": {
                peer: {"status": "timed", "tflops": float(draw.uniform(80, 690))}
                if draw.random() < 0.8
                else {"status": "cannot"}
                for peer in peers(None)
            },
        }
        for name in [*HOPPER_CASES, *OWN_CASES]
        for direction in attention.DIRECTIONS
    ]
    attention.plot(cells, tmp_path / "plot.png", "Synthetic")
    assert (tmp_path / "plot.png").stat().st_size > 50_000
    assert len(attention.table(cells).splitlines()) == len(cells) + 2
