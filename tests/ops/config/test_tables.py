"""The tuned tables that ship with the package."""

import json
import logging

import jax.numpy as jnp
import pytest

from tests.ops.kernel.samples import Config, Product
from tilewright.ops import AutotuningResult, Candidate, ConfigSelectorChain, Executor, Invocation, TunedCall
from tilewright.ops.config.tables import add_to_table, load_tables, table_file

KERNEL = Product("tests.tables")
INV = Invocation(KERNEL, (jnp.ones((2, 3)), jnp.ones((3, 2))))


def text(cfg, device="cpu:test", key=INV.key):
    call = TunedCall(KERNEL.name, "forward", key, "shapes", (Candidate(cfg, (1.0,)),), 0)
    return AutotuningResult((call,), device=device).to_json()


def configs(device, folder):
    return {key: entry.ranked for key, entry in load_tables(device, folder).items()}


def test_tables_of_the_device_are_merged_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b.json").write_text(text(Config(2)))
    (tmp_path / "a.json").write_text(text(Config(1)))
    (tmp_path / "c.json").write_text(text(Config(3), device="gpu:other"))
    (tmp_path / "d.json").write_text(text(Config(4), key="another"))
    (tmp_path / "e.txt").write_text("no table")
    assert configs("cpu:test", tmp_path) == {INV.key: (Config(2),), "another": (Config(4),)}
    assert load_tables("cpu:none", tmp_path) == {}


def test_a_call_has_its_winner_first_and_then_what_was_right_by_its_time(tmp_path):
    """But the heuristic, here 32, comes before configs that are faster by no more than the noise."""
    times = {1: 3.0, 2: 2.0, 4: 2.5, 8: 2.6, 16: None, 32: 3.04}
    candidates = tuple(
        Candidate(
            Config(block), () if ms is None else (ms,), error="wrong" if block == 2 else "", heuristic=block == 32
        )
        for block, ms in times.items()
    )
    call = TunedCall(KERNEL.name, "forward", INV.key, "shapes", candidates, 3)  # within the noise of the third
    (tmp_path / "a.json").write_text(AutotuningResult((call,), device="cpu:test").to_json())
    assert configs("cpu:test", tmp_path) == {INV.key: (Config(8), Config(4), Config(32), Config(1))}


@pytest.mark.parametrize("damage", ["", "{}", "[]", "null", '{"schema": 99}', "{", "\x00", "more"])
def test_a_damaged_table_is_left_out_and_logged(tmp_path, caplog, damage):
    (tmp_path / "a.json").write_text(text(Config(1))[:-9] if damage == "more" else damage)
    (tmp_path / "b.json").write_text(text(Config(2)))
    with caplog.at_level(logging.WARNING):
        assert configs("cpu:test", tmp_path) == {INV.key: (Config(2),)}
    assert "a.json cannot be read" in caplog.text


def test_the_shipped_tables_can_be_read(caplog):
    load_tables("cpu:test")
    assert caplog.text == ""


def test_explain_tells_what_a_table_measured(tmp_path, capsys):
    (tmp_path / "a.json").write_text(text(Config(2), device=INV.device_fingerprint))
    executor = Executor(ConfigSelectorChain(tables=tmp_path))
    choice = executor.explain(KERNEL, *INV.args).forward
    assert (choice.step, choice.config, choice.time_ms) == ("shipped", Config(2), 1.0)
    assert "(shipped; 1.000 ms)" in capsys.readouterr().out


def test_a_tuning_stands_in_place_of_what_a_table_said_of_the_call(tmp_path):
    for cfg, key in ((Config(1), INV.key), (Config(2), "another"), (Config(3), INV.key)):
        add_to_table(tmp_path / "a.json", AutotuningResult.from_json(text(cfg, key=key)), f"tune {cfg.block}")
    assert configs("cpu:test", tmp_path) == {INV.key: (Config(3),), "another": (Config(2),)}
    with pytest.raises(ValueError, match=r"a\.json is of 'cpu:test', not of 'gpu:other'"):
        add_to_table(tmp_path / "a.json", AutotuningResult.from_json(text(Config(4), device="gpu:other")), "")


def test_a_lookup_rebuilds_the_configs_of_its_own_call(tmp_path, monkeypatch, caplog):
    """Rebuilding loads the modules of all backends that were measured."""
    for name, key in (("a", "another"), ("b", INV.key)):
        (tmp_path / f"{name}.json").write_text(text(Config(2), key=key, device=INV.device_fingerprint))
    damaged = json.loads((tmp_path / "a.json").read_text())
    damaged["entries"].append("no entry")
    (tmp_path / "c.json").write_text(json.dumps(damaged))
    rebuilt = []
    read = TunedCall.of_json
    monkeypatch.setattr(TunedCall, "of_json", lambda payload, **more: rebuilt.append(payload["key"]) or read(payload))
    chain = ConfigSelectorChain(tables=tmp_path)
    for _ in range(2):
        assert chain.shipped(INV).winner.config == Config(2)
    assert rebuilt.count(INV.key) == 1
    other = Invocation(KERNEL, (jnp.ones((5, 3)), jnp.ones((3, 5))))
    count = len(rebuilt)
    assert chain.shipped(other) is None
    assert len(rebuilt) == count
    assert "c.json is read without a part" in caplog.text


class TestAPartThatCannotBeRead:
    """A field or class that this version does not have costs the candidate or the entry, not the table."""

    def document(self, *blocks, chosen=0):
        candidates = tuple(Candidate(Config(block), (float(block),)) for block in blocks)
        calls = [
            TunedCall(KERNEL.name, "forward", key, "shapes", candidates, chosen, source="known")
            for key in (INV.key, "b")
        ]
        return json.loads(AutotuningResult(tuple(calls), device="cpu:test").to_json())

    def read(self, folder, document):
        folder.mkdir(exist_ok=True)
        (folder / "a.json").write_text(json.dumps(document))
        return load_tables("cpu:test", folder)

    @pytest.mark.parametrize("what", ["field", "class", "value", "candidate"])
    def test_a_candidate(self, tmp_path, caplog, what):
        document = self.document(4, 1, 2, chosen=2)
        said = document["entries"][0]["candidates"][1]
        match what:
            case "field":
                said["config"]["fields"]["gone"] = 1
            case "class":
                said["config"]["$dataclass"] = "tests/gone.Config"
            case "value":
                said["samples_ms"] = ["fast"]
            case "candidate":
                said["gone"] = 1
        found = self.read(tmp_path, document)
        assert found[INV.key].ranked == (Config(2), Config(4))
        assert found[INV.key].source == "known"
        assert found["b"].ranked == (Config(2), Config(1), Config(4))
        assert "a.json is read without a part: " in caplog.text

    def test_the_winner_is_followed_by_the_fastest_of_the_others_of_unknown_source(self, tmp_path):
        document = self.document(4, 1, 2)
        document["entries"][0]["candidates"][0]["config"]["fields"]["gone"] = 1
        found = self.read(tmp_path, document)
        assert (found[INV.key].winner.config, found[INV.key].source) == (Config(1), "")
        assert found["b"].winner.config == Config(4)

    def test_an_entry(self, tmp_path, caplog):
        document = self.document(1)
        document["entries"][0]["gone"] = 1
        assert self.read(tmp_path, document).keys() == {"b"}
        document["entries"][1]["candidates"][0]["config"]["fields"]["gone"] = 1
        assert self.read(tmp_path / "another", document) == {}
        assert "none of its other candidates can win" in caplog.text

    def test_is_not_written_again(self, tmp_path):
        document = self.document(1, 2)
        document["entries"][0]["candidates"][0]["config"]["fields"]["gone"] = 1
        (tmp_path / "a.json").write_text(json.dumps(document))
        add_to_table(tmp_path / "a.json", AutotuningResult.from_json(text(Config(3), key="c")), "tune")
        assert "gone" not in (tmp_path / "a.json").read_text()
        assert configs("cpu:test", tmp_path) == {INV.key: (Config(2),), "b": (Config(1),), "c": (Config(3),)}

    def test_a_result_has_to_be_whole(self):
        document = self.document(1, 2)
        document["entries"][0]["candidates"][0]["config"]["fields"]["gone"] = 1
        with pytest.raises(ValueError, match="gone"):
            AutotuningResult.from_json(json.dumps(document))


def test_a_table_is_known_by_its_device(tmp_path):
    (tmp_path / "a.json").write_text(text(Config(1)))
    (tmp_path / "b.json").write_text(text(Config(1), device="gpu:Other 2:9.0"))
    assert table_file("cpu:test", tmp_path) == tmp_path / "a.json"
    assert table_file("gpu:Other 2:9.0", tmp_path) == tmp_path / "b.json"
    assert table_file("gpu:NVIDIA B200 (x):10.0", tmp_path) == tmp_path / "nvidia-b200-x.json"
