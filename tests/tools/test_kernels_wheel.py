"""``make kernels-wheel``: which groups ship, and the wheel that pip installs."""

import base64
import contextlib
import csv
import dataclasses
import hashlib
import io
import itertools
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.conftest import A100, H100
from tests.support.fake_nvcc import sample_table
from tests.support.plain_variant import PlainVariant
from tilewright._version import __version__
from tilewright.errors import UnsupportedError
from tilewright.kernels import cuda_tables
from tilewright.kernels.cuda import BuildCache, CudaKernel, Predicate, VariantTable, build, groups_of, toolchain
from tilewright.kernels.cuda.requirements import AnyOf, Compare, DeviceField, Fact, Field, MultipleOf, Values
from tilewright.kernels.flash_attention.cuda import ampere_variants, selection
from tilewright.kernels.paged_attention.cuda import packed as cuda_packed
from tilewright.ops.utils.serialize import resolve
from tools.kernels_wheel.__main__ import chosen_groups, main, record_of
from tools.kernels_wheel.choosable import CAPABILITIES, CHAINS, choosable_groups, tabled_groups
from tools.kernels_wheel.reach import first_groups
from tools.kernels_wheel.wheel import platform_tag, write_wheel

ROOT = Path(__file__).parents[2]
DEVICES = {80: A100, 90: H100}

# A small world in which all problems can be tried.
BOUNDS = {"rows": (1, 24), "width": (1, 24), "flag": (0, 1)}
DEVICE = {"capability": 90, "shared_memory": 12, "multiprocessors": 4}


def plain_table(*requirements: tuple[Predicate, ...]) -> VariantTable:
    """A table of variants that ask for something, each in a group of its own."""
    variants = tuple(
        PlainVariant(f"v{number}", f"g{number}", sort_key=(number,), arch_range=(80, 100), requirements=asked)
        for number, asked in enumerate(requirements)
    )
    return VariantTable("plain", Path("plain.cuh"), tuple(BOUNDS), variants)


operators = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
sizes = st.sampled_from([Field("rows"), Field("width")])
numbers = st.integers(0, 26)
simple = st.one_of(
    st.builds(Compare, sizes, operators, numbers),
    st.builds(Compare, numbers, operators, sizes),
    st.builds(Compare, sizes, operators, sizes),
    st.builds(Compare, sizes, operators, st.just(DeviceField("shared_memory"))),
    st.builds(Compare, st.just(Field("flag")), st.just("=="), st.integers(0, 1)),
    st.builds(MultipleOf, sizes, st.integers(1, 6)),
    st.builds(MultipleOf, sizes, st.just(DeviceField("multiprocessors"))),
)
predicates = st.one_of(simple, st.builds(AnyOf, simple, simple))


@given(st.lists(st.lists(predicates, max_size=4).map(tuple), min_size=1, max_size=5))
def test_the_groups_found_are_those_of_all_problems(requirements):
    table = plain_table(*requirements)
    first = set()
    for values in itertools.product(*(range(low, high + 1) for low, high in BOUNDS.values())):
        asked = Values(dict(zip(BOUNDS, values, strict=True)), DEVICE)
        able = (each for each in table.variants if all(predicate.holds(asked) for predicate in each.requirements))
        if (variant := next(able, None)) is not None:
            first.add(variant.group)
    assert {group.name for group in first_groups([table], DEVICE, BOUNDS)} == first


def test_tables_that_are_asked_one_after_another():
    narrow = plain_table((Compare(Field("width"), "<=", 8),))
    wide = dataclasses.replace(plain_table((Compare(Field("width"), "<=", 4),), ()), name="wide")
    assert [str(group) for group in first_groups([narrow, wide], DEVICE, BOUNDS)] == [
        "plain g0 sm_90a",
        "wide g1 sm_90a",
    ]
    assert first_groups([narrow], {**DEVICE, "capability": 100}, BOUNDS) == []


def test_facts_are_taken_to_be_met():
    table = plain_table((Compare(Fact("shared_bytes"), "<=", DeviceField("shared_memory")),), ())
    assert [group.name for group in first_groups([table], DEVICE, BOUNDS)] == ["g0"]


def test_a_requirement_that_is_not_understood_is_an_error():
    with pytest.raises(NotImplementedError, match="rows must be a multiple of width"):
        first_groups([plain_table((MultipleOf(Field("rows"), Field("width")),))], DEVICE, BOUNDS)


def test_every_table_is_in_a_chain():
    assert {table.name for chain in CHAINS for table in chain} == set(cuda_tables())


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_ships_is_not_everything(capability):
    every = {g for name in cuda_tables().values() for g in groups_of(resolve(name), capability)}
    ships = set(choosable_groups(capability))
    assert ships < every
    # The tables before it have head dims to 512; but 163 KB, which is a block's at most on 8.0, are too few for some.
    others = [g for g in every - ships if g.table.name != "flash_attention_backward" or "_k65536" in g.name]
    assert all(g.table is ampere_variants.BACKWARD and g.name.startswith("f32_k512_") for g in others)
    assert bool(others) == (capability == 80)


def test_what_the_tuned_tables_name_ships():
    """By their text, as people read it."""
    variants = {v.name: v.group for chain in CHAINS for table in chain for v in table.variants}
    text = "".join(file.read_text() for file in (ROOT / "tilewright" / "tables").glob("*.json"))
    named = {variants[name] for name in re.findall(r'"variant": "(\w+)"', text)}
    assert named
    assert named == {group.name for group in tabled_groups()}
    assert tabled_groups() <= set(choosable_groups(90))


HEAD_DIMS = (20, 32, 64, 72, 96, 100, 128, 160, 192, 256, 320, 512, 640)

PLAIN = {
    "batch": 2, "q_length": 1024, "kv_length": 1024, "heads": 4, "kv_heads": 4, "bias": 0, "rows": 0, "mask": 0,
    "soft_cap": 0, "sinks": 0, "dropout": 0, "lowest": -(1 << 30), "highest": 1 << 30, "deterministic": 0, "exact": 0,
}  # fmt: skip

CALLS = (
    {}, {"highest": 0}, {"highest": 0, "lowest": -127}, {"kv_length": 1000}, {"q_length": 1000, "kv_heads": 2},
    {"bias": 1}, {"rows": 1}, {"mask": 1}, {"soft_cap": 1}, {"sinks": 1}, {"dropout": 1}, {"dropout": 1, "bias": 1},
    {"deterministic": 1}, {"exact": 1}, {"exact": 1, "bias": 1}, {"exact": 1, "dropout": 1}, {"batch": 1 << 17},
)  # fmt: skip


@pytest.fixture
def every_package_is_here(nvcc, monkeypatch):
    """The stand-in for nvcc, which needs no headers."""
    monkeypatch.setattr(toolchain, "missing", lambda *_: [])
    return nvcc


def compiled() -> set[tuple[str, ...]]:
    """Table, group and target of what is in the user's cache."""
    return {tuple(path.parent.name.split("-")[:3]) for path in BuildCache().path.glob("*/record.json")}


@pytest.mark.parametrize(
    ("direction", "capability"),
    [("forward", 80), ("forward", 90), ("backward", 80), ("backward", 90)],
)
def test_whatever_selection_compiles_for_attention_ships(direction, capability, every_package_is_here):
    """Real selection, which compiles what it needs to tell; by the stand-in, which takes no time."""
    for dtype, head_dim, further in itertools.product(range(3), HEAD_DIMS, CALLS):
        fields = PLAIN | {"head_dim": head_dim, "value_dim": head_dim, "dtype": dtype} | further
        with contextlib.suppress(UnsupportedError):
            selection.select(direction, fields, 4 if dtype == 0 else 2, DEVICES[capability])
    ships = {(g.table.name, g.name, f"sm_{g.target}") for g in choosable_groups(capability)}
    made = compiled()
    assert made == {each for each in ships if each[0] in {table.name for table in selection.TABLES[direction]}}


def test_whatever_selection_compiles_for_packed_attention_ships(every_package_is_here):
    kernel = CudaKernel(cuda_packed.TABLE)
    for dtype, head_dim in itertools.product(range(2), (64, 128)):
        fields = dict.fromkeys(cuda_packed.FIELDS, 64) | {"head_dim": head_dim, "dtype": dtype}
        assert kernel.select(fields, H100)[0] is not None
    ships = {g.name for g in choosable_groups(90) if g.table is cuda_packed.TABLE}
    assert {name for _, name, _ in compiled()} == ships


def test_groups_are_chosen_by_name():
    named = chosen_groups(["sm_90a"], ["bf16_k128"], ["packed_attention_hopper"])
    assert [str(group) for group in named] == ["packed_attention_hopper bf16_k128 sm_90a"]
    assert {group.capability for group in chosen_groups([], [], [])} == {80, 90}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group", "nonesuch"], "nonesuch; there are"),
        (["--table", "nonesuch"], "nonesuch; there are"),
        (["--arch", "hopper"], "'hopper' is no CUDA architecture"),
        (["--arch", "80", "--table", "packed_attention_hopper"], "none that ships is called packed_attention_hopper"),
        (
            ["--arch", "90a", "--group", "bf16_k512", "--table", "packed_attention_hopper"],
            "no group that ships has all",
        ),
    ],
)
def test_what_does_not_ship_is_one_line(arguments, message, capsys):
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.fixture
def sample(every_package_is_here, tmp_path):
    """A table for the stand-in, whose two groups are built."""
    table = sample_table(tmp_path)
    built = build(groups_of(table, 90), cache=BuildCache(tmp_path / "builds"))
    return [(record_of(group, path, (13, 0)), path) for group, path in built.items()]


def test_a_wheel_is_what_pip_expects(sample, tmp_path):
    license_file = tmp_path / "LICENSE"
    license_file.write_text("free")
    wheel = write_wheel(tmp_path / "dist", sample, 13, "manylinux_2_34_x86_64", {"LICENSE": license_file})
    assert wheel.name == f"tilewright_kernels_cu13-{__version__}-py3-none-manylinux_2_34_x86_64.whl"
    info = f"tilewright_kernels_cu13-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        listed = list(csv.reader(io.StringIO(archive.read(f"{info}/RECORD").decode())))
        assert sorted(name for name, _, _ in listed) == sorted(archive.namelist())
        for name, digest, size in listed[:-1]:
            data = archive.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={found}", str(len(data)))
        folders = {Path(name).parent.name for name in archive.namelist() if name.endswith("library.so")}
        assert folders == {record.folder for record, _ in sample}
        assert all(name.startswith(("tilewright_kernels/cu13/", info)) for name in archive.namelist())
        assert f"Requires-Dist: tilewright=={__version__}" in archive.read(f"{info}/METADATA").decode()
    twine = pytest.importorskip("twine.commands.check")
    assert not twine.check([str(wheel)], strict=True)


def test_the_same_groups_give_the_same_bytes(sample, tmp_path):
    one, other = (
        write_wheel(tmp_path / name, some, 13, "linux_x86_64", {})
        for name, some in (("a", sample), ("b", sample[::-1]))
    )
    assert one.read_bytes() == other.read_bytes()


def test_a_group_that_fails_is_no_wheel_but_the_others_are_kept(every_package_is_here, tmp_path, capsys, monkeypatch):
    every_package_is_here.behave("bf16_k128", "fail")
    monkeypatch.setattr("tools.kernels_wheel.__main__.headers_version", lambda root: (13, 0))
    arguments = ["--table", "packed_attention_hopper", "--work", str(tmp_path / "work")]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "error: told to fail" in said
    assert "1 of 4 groups failed; those that were built are kept" in said
    assert not (tmp_path / "work" / "dist").exists()
    before = len(every_package_is_here.compilations())
    every_package_is_here.behave("bf16_k128")
    monkeypatch.setattr("tools.kernels_wheel.__main__.licenses", lambda groups: {})
    assert main(arguments) == 0
    assert len(every_package_is_here.compilations()) == before + 1
    assert "4 groups" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        (("GLIBC_2.2.5", "GLIBCXX_3.4"), "manylinux_2_17_x86_64"),
        (("GLIBC_2.34", "GLIBCXX_3.4.29"), "manylinux_2_34_x86_64"),
        (("GLIBC_2.14", "GLIBCXX_3.4.30"), "manylinux_2_35_x86_64"),
        (("GLIBC_2.99",), "linux_x86_64"),
        ((), "manylinux_2_17_x86_64"),
    ],
)
def test_the_platform_is_that_of_the_newest_symbol(symbols, tag, monkeypatch):
    said = "\n".join(f"  0x0010:   Name: {symbol}  Flags: none  Version: 3" for symbol in symbols)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=said))
    assert platform_tag([Path("library.so")], "x86_64") == tag
