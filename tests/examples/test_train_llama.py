"""The whole recipe of training: resumed runs, several devices, documents, and the program of the 1B model."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_llama
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from token_rows import Corpus, load_tokens

import tilewright
from tests.support.command_line import ROOT

MODEL = train_llama.Model(layers=2, d=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab=64)
SIZES = ["--length", "32", "--steps", "8", "--rate", "1e-2", "--log-every", "1", "--save-every", "3"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(train_llama.MODELS, "small", MODEL)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 5 to 50 tokens that count upwards, each of which a zero ends."""
    random = np.random.default_rng(0)
    documents = [np.append(start + np.arange(count) % 8, 0) for start, count in random.integers(5, 50, (600, 2))]
    file = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(file, np.concatenate(documents).astype(np.uint16))
    return file


def flags(data: Path, out: Path, *more: str) -> list[str]:
    return ["--data", str(data), "--out", str(out), *SIZES, *more]


def logged(out: Path, *names: str) -> np.ndarray:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return np.array([[line.get(name, np.nan) for name in names] for line in lines])


KILLED = """
import os
import pathlib
import signal
import time
import train_llama

read = train_llama.Corpus.read


def dies(corpus, first, *shape):
    if first == 4 * 6 and corpus.seed is not None:
        while not (pathlib.Path({out!r}) / "checkpoints" / "3").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return read(corpus, first, *shape)


train_llama.MODELS["small"] = train_llama.{model!r}
train_llama.Corpus.read = dies
train_llama.main({flags!r})
"""


def test_a_killed_run_resumes_exactly(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rows = ["--rows", "2", "--accumulate", "2", "--devices", "1"]
    train_llama.main(flags(data, whole, *rows))
    assert (whole / "training.png").read_bytes().startswith(b"\x89PNG")
    script = KILLED.format(out=str(killed), model=MODEL, flags=flags(data, killed, *rows))
    path = os.pathsep.join(map(str, (ROOT, ROOT / "examples")))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert len(logged(killed, "loss")) == 6
    train_llama.main(flags(data, killed, *rows))
    names = ("loss", "gradient_norm", "learning_rate", "validation")
    np.testing.assert_array_equal(logged(killed, *names), logged(whole, *names))
    losses = logged(whole, "loss")[:, 0]
    assert losses[-1] < losses[0] - 0.2
    assert "resumed from step 3" in capsys.readouterr().out
    # Checkpoints are those of steps 3, 6 and 8; a finished run is not trained again, and another model is refused.
    train_llama.main(flags(data, killed, *rows))
    assert "resumed from step 8" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="length=32 there, 16 here"):
        train_llama.main([*flags(data, killed, *rows), "--length", "16"])


def test_rows_may_be_split_over_devices_and_passes(data: Path, tmp_path: Path):
    splits = {
        "one": "--rows 8 --devices 1",
        "passes": "--rows 2 --accumulate 4 --devices 1",
        "devices": "--rows 2 --devices 4 --fsdp 2",
    }
    for name, each in splits.items():
        train_llama.main(flags(data, tmp_path / name, *each.split(), "--validation-rows", "8"))
    want = logged(tmp_path / "one", "loss", "gradient_norm")
    for name in splits:
        np.testing.assert_allclose(logged(tmp_path / name, "loss", "gradient_norm"), want, rtol=2e-5)


def program() -> train_llama.Program:
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), (AxisType.Auto,) * 2, devices=jax.devices()[:1])
    return train_llama.Program(MODEL, jnp.dtype("float32"), 0, mesh)


def test_documents_begin_anew():
    documents, positions = train_llama.packed(jnp.array([[5, 0, 7, 8, 0, 0, 9]]), end=0)
    assert documents.tolist() == [[0, 0, 1, 1, 1, 2, 3]]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 0]]


def test_the_loss_of_documents_is_that_of_each_alone():
    w = train_llama.parameters(jax.random.key(0), MODEL)
    first, second = [5, 6, 7, 0], [30, 31, 32, 33, 0]
    row = functools.partial(train_llama.loss, w, count=jnp.ones(()), program=program())
    together, pairs = row(jnp.array([[*first, *second, 9]]))
    alone = [row(jnp.array([[*each, 9]]))[0] for each in (first, second)]
    assert float(together) == pytest.approx(float(sum(alone)), rel=1e-5)
    assert pairs == 4 * 5 / 2 + 5 * 6 / 2
    # Of a token behind an end nothing is predicted, whatever it is.
    assert row(jnp.array([[*first, *second, 11]]))[0] == together


def test_weights_decay_but_norms_do_not():
    optimizer, _ = train_llama.optimizer_and_schedule(steps=10, rate=0.1)
    w, moments = train_llama.initial_state(jax.random.key(0), MODEL, optimizer)
    nothing = jax.tree.map(jnp.zeros_like, w)
    _, moments = optimizer.update(nothing, moments, w)  # the warm-up starts at 0
    updates, _ = optimizer.update(nothing, moments, w)
    moved = {jax.tree_util.keystr(path): bool(jnp.any(x)) for path, x in jax.tree_util.tree_leaves_with_path(updates)}
    assert {name for name, each in moved.items() if not each} == {name for name in moved if "norm" in name}


def test_an_epoch_reads_every_row_once_in_an_order_of_its_own():
    corpus = Corpus(np.arange(41), length=4, vocab=64, seed=3, least=1)
    epochs = corpus.read(0, 2, corpus.rows)
    assert sorted(epochs[0, :, 0]) == sorted(epochs[1, :, 0]) == list(range(0, 40, 4))
    assert epochs[0, :, 0].tolist() != epochs[1, :, 0].tolist()
    assert (np.diff(epochs) == 1).all()
    np.testing.assert_array_equal(corpus.read(7, 2, 3).reshape(6, -1), epochs.reshape(20, -1)[7:13])


def test_token_files_stay_on_disk(tmp_path: Path):
    for vocab, dtype in ((65536, np.uint16), (65537, np.uint32)):
        np.arange(200, dtype=dtype).tofile(tmp_path / "tokens.bin")
        train, validation = load_tokens(tmp_path / "tokens.bin", vocab)
        assert isinstance(train.base, np.memmap)
        assert (train.tolist(), validation.tolist()) == (list(range(190)), list(range(190, 200)))


def test_wrong_data_is_one_line(data: Path, tmp_path: Path):
    np.save(tmp_path / "floats.npy", np.ones(9))
    np.save(tmp_path / "large.npy", np.full(9000, MODEL.vocab))
    (tmp_path / "tokens.txt").touch()
    cases = {
        "absent.npy": "there is none at .*absent.npy",
        "tokens.txt": "must be a .npy or .bin file",
        "floats.npy": "float64 of",
        "large.npy": "64 to 64 are not all below",
    }
    for name, said in cases.items():
        with pytest.raises(SystemExit, match=said):
            train_llama.main(flags(tmp_path / name, tmp_path / "out", "--devices", "1"))
    with pytest.raises(SystemExit, match="too few for a step of 4000 rows of 32"):
        train_llama.main(flags(data, tmp_path / "out", "--devices", "1", "--rows", "4000"))


def test_the_1b_model_runs_on_kernels_for_hopper():
    key = jax.random.key(0)
    with tilewright.target_device("NVIDIA H100 80GB HBM3", count=2) as target:
        mesh = target.make_mesh((1, 2), ("data", "fsdp"), (AxisType.Auto,) * 2)
        program = train_llama.Program(train_llama.MODELS["1b"], jnp.dtype("bfloat16"), 0, mesh)
        optimizer, _ = train_llama.optimizer_and_schedule(100, 3e-4)
        state = jax.eval_shape(lambda key: train_llama.initial_state(key, program.model, optimizer), key)
        batch = jax.ShapeDtypeStruct((1, 4, 8193), jnp.int32, sharding=NamedSharding(mesh, P(None, *program.rows.spec)))
        update = functools.partial(train_llama.step, program=program, optimizer=optimizer)
        calls = tilewright.explain(update, train_llama.split(state, mesh), batch)
    assert sum(leaf.size for leaf in jax.tree.leaves(state[0])) == 1_235_814_400
    ran = {(call.op, call.direction): call.config.backend for call in calls}
    for op in ("flash_attention", "glu", "linear_cross_entropy"):
        assert ran[op, "forward"] == "hopper", ran
    assert ran["flash_attention", "backward"] == ran["glu", "backward"] == "hopper", ran
    assert all(
        (call.times, call.split[:20]) == (16, "query into [2, 1, 1,") for call in calls if call.op == "flash_attention"
    )
    assert all(call.gathered for call in calls if call.op in ("glu", "linear_cross_entropy"))  # split parameters
