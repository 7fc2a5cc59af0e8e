"""The texts of programs: what decides a result is in them, names are not; and of one small op all that is compared."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from tilewright.kernels.paged_attention.xla import update_pages as xla
from tools import programs
from tools.program_text import program_text, triton_source, value_text, without_names
from tools.programs import differences, entries, main, sampled, text_path

ARRAY = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def text_of(function, *args):
    return program_text(jax.make_jaxpr(function)(*(args or (ARRAY,))))


def scaled(name: str, factor: float):
    """A function that calls a jitted one of some name."""

    def inner(x):
        return x * factor

    inner.__name__ = inner.__qualname__ = name
    return lambda x: jax.jit(inner)(x) + 1


def test_names_of_functions_are_not_in_the_text():
    assert text_of(scaled("first", 2.0)) == text_of(scaled("second", 2.0))
    assert "first" not in text_of(scaled("first", 2.0))


def test_constants_shapes_and_dtypes_are():
    assert text_of(scaled("first", 2.0)) != text_of(scaled("first", 3.0))
    others = [jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)]
    assert len({text_of(jnp.sin, each) for each in (ARRAY, *others)}) == 3


def test_values_of_arrays_that_are_constants_are():
    def added(values):
        return text_of(lambda x: x + np.array(values, np.float32))

    assert added([1.0] * 128) == added([1.0] * 128) != added([1.0] * 127 + [2.0])


def kernel_text(factor: float, block: int = 8, **renamed: str) -> str:
    def kernel(source, target):
        target[...] = source[...] * factor

    kernel.__name__ = renamed.get("name", "kernel")
    spec = pl.BlockSpec((block, 128), lambda i: (i, 0))
    call = pl.pallas_call(kernel, out_shape=ARRAY, grid=(8 // block,), in_specs=[spec], out_specs=spec, **renamed)
    return text_of(call)


def test_bodies_and_grids_of_pallas_kernels_are():
    assert kernel_text(2.0) == kernel_text(2.0, name="another")
    assert len({kernel_text(2.0), kernel_text(3.0), kernel_text(2.0, block=4)}) == 3


def test_what_an_equation_does_beside_its_operands_is():
    dots = [lambda x, p=p: jnp.dot(x, x.T, precision=p) for p in ("highest", "default")]
    assert text_of(dots[0]) != text_of(dots[1])


def test_places_and_modules_are_left_out_of_other_texts():
    said = f"<function scaled.<locals>.inner at 0x7f00> tilewright.kernels.masks.CausalMask {__file__}:12"
    assert without_names(said) == "<function> CausalMask <file>"


@dataclasses.dataclass
class Params:
    block: int
    kind: type = int


def test_values_are_written_by_what_they_hold():
    assert value_text(Params(8)) == "Params(block=8, kind=int)"
    assert value_text({"b": {2, 1}, "a": (None, "x", 0.1)}) == "{'a': (None, 'x', 0.1), 'b': {1, 2}}"
    assert value_text(np.float32(0.5)) == "float32(0.5)"


KERNELS = """
import triton
import triton.language as tl

SCALE = {scale}

@triton.jit
def {helper}(x):
    # {comment}
    return x * SCALE

@triton.jit
def {name}(pointer, BLOCK: tl.constexpr):
    \"\"\"{comment}\"\"\"
    at = pointer + tl.arange(0, BLOCK)
    tl.store(at, {helper}(tl.load(at)))
"""


@pytest.fixture
def triton_kernel(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(tmp_path)

    def made(module: str, name: str = "kernel", helper: str = "helper", scale: float = 2.0, comment: str = "words"):
        text = KERNELS.format(name=name, helper=helper, scale=scale, comment=comment)
        (tmp_path / f"{module}.py").write_text(text)
        return getattr(importlib.import_module(module), name)

    return made


def test_triton_kernels_are_their_source_without_names_and_comments(triton_kernel):
    first = triton_source(triton_kernel("programs_first"))
    assert first == triton_source(triton_kernel("programs_second", name="other", helper="part", comment="more words"))
    assert first != triton_source(triton_kernel("programs_third", scale=3.0))


def test_of_many_configs_some_that_are_spread_over_them():
    assert sampled(range(100), 4) == [0, 33, 66, 99]
    assert sampled(range(3), 4) == [0, 1, 2]
    assert sampled(range(3), 1) == [0]


def of_update_pages() -> dict[str, str]:
    return {entry.key: entry.value for entry in entries("update_pages", ["CPU"], features=False)}


def test_an_op_has_its_choices_and_programs_and_no_modules():
    found = of_update_pages()
    assert found["update_pages/batch_8/CPU/forward/heuristic"] == "xla()"
    assert found["update_pages/batch_8/CPU/forward/chosen"] == "heuristic: xla()"
    assert found["update_pages/batch_8/CPU/forward/supported"] == "xla"
    assert re.fullmatch(r"1 configs [0-9a-f]{16}", found["update_pages/batch_8/CPU/forward/space"])
    assert re.fullmatch(r"[0-9a-f]{16}", found["update_pages/batch_8/CPU/forward/xla()"])
    assert not [said for said in (*found, *found.values()) if "tilewright" in said or "cannot" in said]


def test_a_changed_program_shows_and_nothing_else(monkeypatch):
    before = of_update_pages()
    write = xla.write_pages

    def writes_twice(inputs):
        return jax.tree.map(lambda pages: pages * 1, write(inputs))

    monkeypatch.setattr(xla, "write_pages", writes_twice)
    lines = differences(before, of_update_pages())
    assert [line.partition(" -> ")[0].rpartition(":")[0] for line in lines] == [
        f"different: update_pages/{case}/CPU/forward/xla()" for case in ("batch_8", "batch_8_int8", "long", "window")
    ]
    monkeypatch.undo()
    assert of_update_pages() == before


def test_a_program_that_raises_is_compared_by_that(monkeypatch):
    def fails(inputs):
        raise NotImplementedError

    monkeypatch.setattr(xla, "write_pages", fails)
    assert "cannot: NotImplementedError" in of_update_pages().values()


def test_calls_on_devices_that_are_not_here_have_gradients_and_outside_kernels():
    known = programs.framework()
    with programs.stubs(known):
        call = next(call for call in programs.feature_calls(known, "flash_attention", "H100"))
        with programs.on_device(known, "H100", call) as mesh:
            named = dict(programs.invocations_of(known, call, "H100", mesh))
            assert list(named) == [f"flash_attention/causal_short/H100/{way}" for way in ("forward", "backward")]
            for name, inv in named.items():
                traced = programs.Traced(known, inv, call)
                texts = {
                    choice.backend: program_text(traced.program(choice))
                    for choice in sampled(list(inv.kernel.config_space(inv)), 1)
                }
                assert texts.keys() == {"hopper", "cuda", "cudnn", "fa4", "xla", "triton"}, name
                assert "table='flash_attention_ampere_" in texts["cuda"]
                assert "classes['forward'](" in texts["fa4"] or "classes['backward'](" in texts["fa4"]
                assert "kernel#" in texts["triton"]


@pytest.fixture
def computed(monkeypatch):
    def says(**found: str):
        monkeypatch.setattr(programs, "all_entries", lambda ops, jobs, dump=None: found)

    return says


def test_compare_says_what_is_not_the_same(computed, tmp_path, capsys):
    file = tmp_path / "programs.json"
    computed(**{"mla_decode/a": "1", "mla_decode/b": "1", "update_pages/c": "1"})
    assert main(["write", str(file)]) == 0
    assert json.loads(file.read_text())["mla_decode/a"] == "1"
    assert main(["compare", str(file)]) == 0
    computed(**{"mla_decode/a": "2", "mla_decode/d": "1"})
    capsys.readouterr()
    assert main(["compare", str(file), "--only", "mla_decode"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "missing: mla_decode/b",
        "new: mla_decode/d",
        "different: mla_decode/a: 1 -> 2",
        "2 entries, 3 not the same",
    ]


def test_a_new_field_with_its_default_is_no_difference(computed, tmp_path, capsys):
    file = tmp_path / "programs.json"
    computed(
        **{"mla_decode/heuristic": "pallas(a=1)", "mla_decode/pallas(a=1), all mapped": "1", "mla_decode/x()": "1"}
    )
    assert main(["write", str(file)]) == 0
    computed(
        **{
            "mla_decode/heuristic": "pallas(a=1, order=up)",
            "mla_decode/pallas(a=1, order=up), all mapped": "1",
            "mla_decode/x(order=up)": "1",
            "mla_decode/pallas(a=1, order=upwards)": "2",
        }
    )
    capsys.readouterr()
    assert main(["compare", str(file), "--only", "mla_decode", "--new-field", "order=up"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "new: mla_decode/pallas(a=1, order=upwards)",
        "4 entries, 1 not the same",
    ]


def test_the_place_of_a_key_is_a_file_of_its_own():
    keys = [f"flash_attention/a b/H100/backward/triton({'x=1, ' * n})" for n in (1, 2, 60, 61)]
    places = [text_path(key) for key in keys]
    assert len(set(places)) == 4
    assert all(len(place.name) < 255 and " " not in str(place) for place in places)


def test_two_processes_write_the_same(tmp_path):
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for seed, file in enumerate(files):
        command = [sys.executable, "-m", "tools.programs", "op", "update_pages", "--into", str(file)]
        given = programs.environment() | {"PYTHONHASHSEED": str(seed)}
        subprocess.run(command, check=True, env=given, cwd=programs.ROOT)
    assert files[0].read_text() == files[1].read_text()
