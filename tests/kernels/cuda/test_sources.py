"""The generator: golden files, and what a table refuses."""

import dataclasses
import os
from pathlib import Path

import pytest

from tests.support.fake_nvcc import sample_table
from tests.support.plain_variant import PlainVariant
from tilewright.kernels.cuda import Compare, Field, VariantTable, generate

GOLDEN = Path(__file__).with_name("golden")


def test_the_sources_are_those_of_the_golden_files(tmp_path):
    made = generate(sample_table(tmp_path))
    if os.environ.get("TILEWRIGHT_WRITE_GOLDEN"):
        for name, text in made.items():
            (GOLDEN / name).write_text(text)
    assert sorted(made) == sorted(path.name for path in GOLDEN.iterdir())
    for name, text in made.items():
        assert text == (GOLDEN / name).read_text(), name


def test_the_order_in_which_variants_are_given_does_not_matter(tmp_path):
    table = sample_table(tmp_path)
    turned = dataclasses.replace(table, variants=table.variants[::-1])
    assert generate(turned) == generate(table)
    assert [variant.name for variant in turned.variants] == ["small_fast", "large_fast", "small_slow", "large_slow"]
    assert turned.groups == ("fast", "slow")


def test_sources_name_no_place_on_this_machine(tmp_path):
    for text in generate(sample_table(tmp_path)).values():
        assert str(tmp_path) not in text
        assert str(Path(__file__).parents[3]) not in text


def test_groups_and_variants_for_an_architecture(tmp_path):
    table = sample_table(tmp_path)
    assert table.groups_for(90) == ("fast", "slow")
    assert table.groups_for(80) == ("slow",)
    assert table.groups_for(60) == table.groups_for(100) == ()  # a range ends before its end
    assert [variant.name for variant in table.for_capability(80)] == ["small_slow", "large_slow"]
    assert list(table.for_capability(100)) == []
    with pytest.raises(ValueError, match="no group 'nonesuch'"):
        table.in_group("nonesuch")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "not-a-name"}, "identifier"),
        ({"fields": ()}, "at least one field"),
        ({"fields": ("rows", "rows")}, "two fields"),
        ({"fields": ("rows", "width", "long")}, "'long'"),
        ({"memory_per_job": 0}, "memory_per_job"),
        ({"variants": (PlainVariant(), PlainVariant())}, "two variants"),
        ({"variants": (PlainVariant("a b"),)}, "identifier"),
        ({"variants": (PlainVariant(group="a/b"),)}, "identifier"),
        ({"variants": (PlainVariant(arch_range=(90, 90)),)}, "no architecture"),
        ({"variants": (PlainVariant(requirements=(Compare(Field("depth"), "<", 3),)),)}, "depth"),
    ],
)
def test_what_is_no_table_is_refused(change, message, tmp_path):
    table = sample_table(tmp_path)
    fields = {field.name: getattr(table, field.name) for field in dataclasses.fields(VariantTable)}
    with pytest.raises(ValueError, match=message):
        VariantTable(**fields | change)
