"""Predicates: what they mean, how they explain themselves, and that C++ agrees."""

import random
import shutil
import subprocess

import pytest

from tilewright.kernels.cuda import AnyOf, Compare, DeviceField, Fact, Field, MultipleOf, Values
from tilewright.kernels.cuda.requirements import DEVICE_FIELDS, FACT_FIELDS, one_of, without_smaller_bounds

FIELDS = ("rows", "width")
VALUES = Values(
    {"rows": 7, "width": 80},
    {"capability": 90, "shared_memory": 232448, "multiprocessors": 132},
    {"shared_bytes": 1024, "threads": 128, "alignment": 8},
)


@pytest.mark.parametrize(
    ("predicate", "reason"),
    [
        (Compare(Field("width"), "<=", 64), "width must be at most 64, got width=80"),
        (Compare(Field("rows"), "==", 0), "rows must be equal to 0, got rows=7"),
        (MultipleOf(Field("rows"), Fact("alignment")), "rows must be a multiple of alignment, got rows=7, alignment=8"),
        (MultipleOf(Field("rows"), 4), "rows must be a multiple of 4, got rows=7"),
        (
            Compare(DeviceField("shared_memory"), "<", Fact("shared_bytes")),
            "shared_memory must be less than shared_bytes, got shared_memory=232448, shared_bytes=1024",
        ),
        (
            AnyOf(Compare(Field("rows"), ">", 7), Compare(Field("width"), "!=", 80)),
            "rows must be more than 7, or width must be other than 80, got rows=7, width=80",
        ),
        (
            one_of(DeviceField("capability"), (86, 89)),
            "capability must be equal to 86, or capability must be equal to 89, got capability=90",
        ),
    ],
)
def test_a_reason_names_the_offending_values(predicate, reason):
    assert not predicate.holds(VALUES)
    assert predicate.reason(VALUES) == reason


def test_which_predicates_need_facts():
    assert Compare(Field("rows"), "<", Fact("threads")).needs_facts
    assert AnyOf(Compare(Field("rows"), "<", 3), MultipleOf(Field("rows"), Fact("alignment"))).needs_facts
    assert not Compare(Field("rows"), "<", DeviceField("capability")).needs_facts


def test_nothing_is_a_multiple_of_what_is_not_positive():
    for of in (0, -4):
        assert not MultipleOf(Field("rows"), of).holds(Values({"rows": 8}, {}))
    assert MultipleOf(Field("rows"), 4).holds(Values({"rows": -8}, {}))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Field("2x"),
        lambda: DeviceField("name"),
        lambda: Fact("registers"),
        lambda: Compare(1, "<", 2),
        lambda: Compare(Field("rows"), "=", 2),
        lambda: Compare(Field("rows"), "<", 1 << 63),
        lambda: AnyOf(),
    ],
)
def test_what_is_no_predicate_is_refused(wrong):
    with pytest.raises(ValueError):
        wrong()


def random_operand(draw):
    kind = draw.randrange(4)
    if kind == 0:
        return Field(draw.choice(FIELDS))
    if kind == 1:
        return DeviceField(draw.choice(DEVICE_FIELDS))
    if kind == 2:
        return Fact(draw.choice(FACT_FIELDS))
    return draw.choice([0, 1, -1, 2, 3, 7, 8, -8, 64, 80, 1 << 30, -(1 << 30), (1 << 62) + 1])


def random_predicate(draw, depth=0):
    kind = draw.randrange(3 if depth < 2 else 2)
    if kind == 2:
        return AnyOf(*(random_predicate(draw, depth + 1) for _ in range(draw.randint(1, 3))))
    left = Field(draw.choice(FIELDS))  # two numbers alone are no predicate
    other = random_operand(draw)
    if kind == 1:
        return MultipleOf(left, other) if draw.random() < 0.7 or isinstance(other, int) else MultipleOf(other, left)
    return Compare(left, draw.choice(["<", "<=", ">", ">=", "==", "!="]), other)


def random_values(draw):
    def number():
        return draw.choice([0, 1, 2, 3, 7, 8, 64, 80, -8, draw.randint(-100, 100), draw.randint(-(1 << 62), 1 << 62)])

    return Values(*({name: number() for name in names} for names in (FIELDS, DEVICE_FIELDS, FACT_FIELDS)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler: there is no g++ on PATH")
def test_cpp_agrees_with_python(tmp_path):
    draw = random.Random(0)
    predicates = [random_predicate(draw) for _ in range(300)]
    values = [random_values(draw) for _ in range(60)]

    def struct(name, fields):
        return f"struct {name} {{ {' '.join(f'int64_t {field};' for field in fields)} }};"

    def literal(value):
        return "{{{}}}".format(
            ", ".join(
                "{" + ", ".join(f"{n}" for n in group.values()) + "}"
                for group in (value.problem, value.device, value.facts)
            )
        )

    functions = "\n".join(f"[](const All& all) -> bool {{ USE return {each.cpp()}; }}," for each in predicates)
    source = tmp_path / "agree.cpp"
    source.write_text(f"""
#include <cstdint>
#include <cstdio>
{struct("Problem", FIELDS)} {struct("Device", DEVICE_FIELDS)} {struct("Facts", FACT_FIELDS)}
struct All {{ Problem problem; Device device; Facts facts; }};
#define USE [[maybe_unused]] auto& problem = all.problem; [[maybe_unused]] auto& device = all.device; \\
  [[maybe_unused]] auto& facts = all.facts;
bool (*const functions[])(const All&) = {{ {functions} }};
const All values[] = {{ {", ".join(map(literal, values))} }};
int main() {{
  for (auto function : functions) {{
    for (auto& value : values) std::putchar(function(value) ? '1' : '0');
    std::putchar('\\n');
  }}
}}
""")
    program = tmp_path / "agree"
    subprocess.run(["g++", "-std=c++17", "-O0", source, "-o", program], check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    wanted = ["".join(str(int(each.holds(value))) for value in values) for each in predicates]
    assert said == wanted
    assert {"0", "1"} == set("".join(wanted))


def test_of_several_upper_bounds_the_largest_is_the_reason():
    small, large, other = (Compare(Field(name), "<=", size) for name, size in (("w", 64), ("w", 256), ("h", 8)))
    odd, computed = MultipleOf(Field("w"), 8), Compare(Field("w"), "<=", DeviceField("shared_memory"))
    assert without_smaller_bounds([small, odd, other, large, computed]) == [odd, other, large, computed]
