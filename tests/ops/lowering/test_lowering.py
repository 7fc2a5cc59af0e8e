"""Programs that share what a kernel was lowered to: they compute what they did, and pay once."""

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.ops.kernel.samples import FORMS, Config, Pair, Product, operands
from tilewright.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    find_labels_in_lowered,
    label,
    labels_to_configs,
    overlay_cache,
)
from tilewright.ops.lowering import lowering, mlir_modules
from tilewright.ops.tuning.workload import Workload
from tilewright.ops.utils.memory import clear_all

A, B = operands((4, 4), (4, 4))


class Counted(Pair):
    """A pair that may be kept on disk, whose ``run`` is its forward pass."""

    run_is_forward = True

    def lowering_packages(self, cfg: Config) -> tuple[str, ...]:
        return ("tilewright",)


class Calls(Kernel[Config, jax.Array]):
    """Calls the host while it runs."""

    def run(self, a, *, cfg):
        return jax.pure_callback(lambda x: np.asarray(x) + 1, jax.ShapeDtypeStruct(a.shape, a.dtype), a)

    def heuristic_cfg(self, inv):
        return Config()


class Prints(Kernel[Config, jax.Array]):
    """Has an effect."""

    said: ClassVar[list[float]] = []

    def run(self, a, *, cfg):
        jax.debug.callback(lambda x: self.said.append(float(x)), a.sum(), ordered=True)
        return a + 1

    def heuristic_cfg(self, inv):
        return Config()


@dataclasses.dataclass
class Counts:
    traced: int = 0
    lowered: int = 0


@contextlib.contextmanager
def counting(monkeypatch: Any = None) -> Iterator[Counts]:
    """Counts the stages that are traced and lowered inside."""
    counts, before, lower = Counts(), len(Product.traced), mlir_modules.lower

    def counted(*args: Any) -> Any:
        counts.lowered += 1
        return lower(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlir_modules, "lower", counted)
        yield counts
    counts.traced = len(Product.traced) - before


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process that has lowered nothing, on a machine that has lowered nothing."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    clear_all()
    yield
    clear_all()


@pytest.fixture
def executor() -> Executor:
    return Executor(ConfigSelectorChain())


def entries() -> int:
    return lowering._FILES.usage()[0]


def loss(executor: Executor, kernel: Any, a: Any, b: Any) -> Any:
    return jnp.sin(executor(kernel, a, b)).sum()


class TestASecondProgram:
    @pytest.mark.parametrize("form", FORMS)
    def test_traces_and_lowers_nothing(self, executor, form):
        kernel = form()
        for program in (partial(loss, executor, kernel), jax.grad(partial(loss, executor, kernel), (0, 1))):
            first = jax.jit(program)(A, B)
            with counting() as counts:
                second = jax.jit(lambda a, b: program(a, b))(A, B)  # noqa: B023
            assert counts == Counts(0, 0)
            jax.tree.map(np.testing.assert_array_equal, first, second)

    @pytest.mark.parametrize(
        "change", ["precision", "x64", "shape", "dtype", "static", "config", "kernel", "vmap", "cleared"]
    )
    def test_that_differs_does(self, executor, change):
        kernel = Pair()
        call = lambda a, b, **kwargs: jax.jit(lambda a, b: executor(kernel, a, b, **kwargs))(a, b)
        call(A, B)
        with counting() as counts:
            if change == "precision":
                with jax.default_matmul_precision("highest"):
                    call(A, B)
            elif change == "x64":
                with jax.enable_x64(True):
                    call(A, B)
            elif change == "shape":
                call(A[:2], B)
            elif change == "dtype":
                call(A.astype(jnp.bfloat16), B.astype(jnp.bfloat16))
            elif change == "static":
                call(A, B, scale=2.0)
            elif change == "config":
                call(A, B, cfg=Config(32))
            elif change == "kernel":
                kernel = Pair("tests.another")
                call(A, B)
            elif change == "vmap":
                jax.jit(jax.vmap(lambda a: executor(kernel, a, B)))(A[None])
            else:
                jax.clear_caches()
                call(A, B)
        assert counts.lowered == 1

    def test_a_user_label_is_no_other_program(self, executor):
        kernel = Pair()
        labelled = [label(f"layer {i}")(lambda a: executor(kernel, a, B)) for i in range(3)]
        with counting() as counts:
            lowered = jax.jit(lambda a: labelled[2](labelled[1](labelled[0](a)))).lower(A)
        assert counts.lowered == 1
        for found in (find_labels_in_lowered(lowered), find_labels_in_lowered(lowered.compile())):
            assert {f"layer {i}" for i in range(3)} <= set(found)

    def test_does_not_name_the_first(self, executor):
        kernel = Pair()

        def opening_caller(a: Any) -> Any:
            with jax.named_scope("opening_scope"):
                return executor(kernel, a, B)

        jax.jit(label("opening_label")(opening_caller)).lower(A).compile()
        with jax.named_scope("second_scope"):
            lowered = jax.jit(jax.named_scope("second_scope")(lambda a: executor(kernel, a, B))).lower(A)
        assert "second_scope" in lowered.as_text(debug_info=True)
        for text in (lowered.as_text(debug_info=True), lowered.compile().as_text()):
            assert "opening" not in text

    def test_what_a_process_keeps_is_bounded(self, executor, monkeypatch):
        monkeypatch.setattr(lowering._LOWERED, "_limit", 1)
        kernel = Pair()
        for scale in (1.0, 2.0):
            jax.jit(lambda a, scale=scale: executor(kernel, a, B, scale=scale))(A)
        with counting() as counts:
            jax.jit(lambda a: executor(kernel, a, B, scale=2.0) + 0)(A)
            jax.jit(lambda a: executor(kernel, a, B, scale=1.0) + 0)(A)
        assert counts.lowered == 1


class TestOneProgram:
    """A program with a call many times pays once."""

    @pytest.mark.parametrize("how", ["unrolled", "remat", "scan", "scan of remat", "cond", "while"])
    def test_pays_once(self, executor, how):
        kernel = Counted()

        def layer(a: Any) -> Any:
            return jnp.tanh(executor(kernel, a, B))

        def whole(a: Any) -> Any:
            if how == "unrolled":
                return layer(layer(layer(a))).sum()
            if how == "remat":
                return jax.checkpoint(lambda a: layer(jax.checkpoint(layer)(a)))(a).sum()
            if how == "cond":
                return jax.lax.cond(a.sum() > 0, layer, lambda a: layer(2 * a), a).sum()
            if how == "while":
                return jax.lax.fori_loop(0, 3, lambda _, a: layer(a), layer(a)).sum()
            body = jax.checkpoint(layer) if how == "scan of remat" else layer
            return jax.lax.scan(lambda a, _: (body(a), None), a, None, length=3)[0].sum()

        with counting() as counts:
            got = jax.jit(jax.value_and_grad(whole) if how != "while" else whole)(A)
        assert counts.lowered == (1 if how == "while" else 2)  # forward and backward
        assert counts.traced == counts.lowered
        executor = lambda kernel, a, b: a @ b
        want = jax.jit(jax.value_and_grad(whole) if how != "while" else whole)(A)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)

    def test_has_one_function_for_equal_calls(self, executor):
        kernel = Pair("tests.one_function")
        text = jax.jit(lambda a: executor(kernel, executor(kernel, a, B), B)).lower(A).as_text()
        assert text.count("func.func private @kernel.tests.one_function.run") == 1
        assert text.count("stablehlo.dot_general") == 1

    def test_names_of_a_module_do_not_meet_those_of_the_program(self, executor):
        """Both call helpers of one name, such as ``jnp.where`` and ``jnp.clip``."""

        class Helped(Product):
            def run(self, a, b, *, cfg, scale=1.0):
                return jnp.where(a > 0, jnp.clip(a, 0.1, 0.2), b)

        kernel = Helped("tests.helped")

        def program(a: Any) -> Any:
            a = jnp.where(a < 0.3, jnp.clip(a, -0.3, 0.3), a)
            a = executor(kernel, a, B) + executor(kernel, B, a)
            return jnp.where(a < 0.2, jnp.clip(a, -0.2, 0.2), a)

        def wanted(a: Any) -> Any:
            run = partial(kernel.run, cfg=Config())
            a = jnp.where(a < 0.3, jnp.clip(a, -0.3, 0.3), a)
            a = run(a, B) + run(B, a)
            return jnp.where(a < 0.2, jnp.clip(a, -0.2, 0.2), a)

        np.testing.assert_array_equal(jax.jit(program)(A), jax.jit(wanted)(A))

    def test_labels_are_found_and_say_the_config(self, executor):
        kernel = Counted("tests.labelled")
        for _ in range(2):
            lowered = jax.jit(jax.grad(partial(loss, executor, kernel))).lower(A, B)
            for found in (find_labels_in_lowered(lowered), find_labels_in_lowered(lowered.compile())):
                configs = labels_to_configs(found)
                assert sorted(cfg.block for cfg in configs.values()) == [32, 64]
            clear_all()  # the second time from the disk


class TestAFreshProcess:
    """It has what the disk has, and nothing else."""

    def test_traces_and_lowers_nothing(self, executor):
        kernel = Counted()
        step = lambda: jax.jit(jax.value_and_grad(partial(loss, executor, kernel), (0, 1)))
        with counting() as counts:
            first = step().lower(A, B)
        assert counts == Counts(2, 2)
        assert entries() == 4  # of each stage its results and its module
        clear_all()
        with counting() as counts:
            second = step().lower(A, B)
        assert counts == Counts(0, 0)
        assert second.as_text() == first.as_text()
        for got, want in zip(jax.tree.leaves(second.compile()(A, B)), jax.tree.leaves(step()(A, B)), strict=True):
            np.testing.assert_array_equal(got, want)

    def test_what_is_not_to_be_kept_is_not(self, executor):
        jax.jit(jax.grad(partial(loss, executor, Pair())))(A, B)
        assert entries() == 0

    def test_the_environment_switches_it_off(self, executor, monkeypatch):
        kernel = Counted()
        monkeypatch.setenv("TILEWRIGHT_LOWERED", "0")
        jax.jit(lambda a: executor(kernel, a, B))(A)
        assert entries() == 0
        monkeypatch.delenv("TILEWRIGHT_LOWERED")
        clear_all()
        jax.jit(lambda a: executor(kernel, a, B))(A)
        assert entries() == 2
        monkeypatch.setenv("TILEWRIGHT_LOWERED", "0")
        clear_all()
        with counting() as counts:
            jax.jit(lambda a: executor(kernel, a, B) + 0)(A)
        assert counts == Counts(1, 1)

    @pytest.mark.parametrize("damage", ["flipped", "no module", "another module", "another custom call"])
    def test_a_damaged_entry_is_lowered_again(self, executor, damage, caplog):
        kernel = Counted()
        call = lambda: jax.jit(lambda a: executor(kernel, a, B) + 0)(A)
        want = call()
        (path,) = (path for path in lowering._FILES.path.iterdir() if "-cpu-" in path.name)
        data = path.read_bytes()
        if damage == "flipped":
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        elif damage == "another custom call":
            assert lowering._FILES.put(_key_in(data), {"targets": ["os.system"]}, data.split(b"\n", 2)[2])
        else:  # with the right checksums: what is written by a bug of ours
            other = jax.jit(lambda x: x).lower(jnp.ones(3)).compiler_ir()
            module = b"no module" if damage == "no module" else mlir_modules.bytecode_of(other)
            assert lowering._FILES.put(_key_in(data), {"targets": []}, module)
        clear_all()
        with counting() as counts, caplog.at_level(logging.WARNING):
            got = call()
        assert counts.lowered == 1
        assert "is not used" in caplog.text
        np.testing.assert_array_equal(got, want)

    def test_a_folder_of_somebody_else_is_left_alone(self, executor, caplog):
        kernel = Counted()
        os.makedirs(lowering._FILES.path)
        lowering._FILES.path.chmod(0o777)
        np.testing.assert_allclose(jax.jit(lambda a: executor(kernel, a, B))(A), A @ B, rtol=1e-6)
        assert entries() == 0
        assert "its owner's alone" in caplog.text


def _key_in(data: bytes) -> Any:
    return json.loads(data.split(b"\n", 2)[1])["key"]


class TestTransforms:
    """What the disk gives is what the process would have made, under every transformation."""

    @pytest.fixture
    def kernel(self) -> Counted:
        return Counted("tests.transformed")

    @pytest.mark.parametrize(
        "transform", ["vmap", "vmap of grad", "grad of vmap", "jacrev", "remat", "scan", "jit in jit"]
    )
    def test_from_the_disk(self, executor, kernel, transform):
        reference = lambda a, b: jnp.sin(a @ b).sum()
        stacked = jnp.stack([A, 2 * A, 3 * A])

        def made(f: Any) -> Any:
            return {
                "vmap": lambda: jax.vmap(f, (0, None))(stacked, B),
                "vmap of grad": lambda: jax.vmap(jax.grad(f), (0, None))(stacked, B),
                "grad of vmap": lambda: jax.grad(lambda s: jax.vmap(f, (0, None))(s, B).sum())(stacked),
                "jacrev": lambda: jax.jacrev(lambda a: f(a, B) * jnp.ones(2))(A),
                "remat": lambda: jax.grad(jax.checkpoint(f))(A, B),
                "scan": lambda: jax.grad(lambda a: jax.lax.scan(lambda c, x: (c + f(x, B), None), 0.0, a)[0])(stacked),
                "jit in jit": lambda: jax.jit(jax.grad(jax.jit(f)))(A, B),
            }[transform]

        want = jax.jit(made(reference))()
        for lowers in (True, False):
            with counting() as counts:
                got = jax.jit(made(partial(loss, executor, kernel)))()
            assert bool(counts.lowered) == bool(counts.traced) == lowers
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
            clear_all()

    def test_in_a_shard_map(self, executor, kernel):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec("d")

        def program(f: Any) -> Any:
            part = jax.shard_map(f, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
            return jax.jit(jax.value_and_grad(lambda a, b: jnp.sin(part(a, b)).sum(), (0, 1)))

        want = program(lambda a, b: a @ b)(A, B)
        for lowers in (True, False):
            with counting() as counts:
                got = program(lambda a, b: executor(kernel, a, b))(A, B)
            assert bool(counts.lowered) == bool(counts.traced) == lowers
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
            clear_all()

    def test_types_that_are_split_are_lowered_in_place(self, executor, kernel):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh), counting() as counts:
            split = jax.device_put(A, NamedSharding(mesh, PartitionSpec("d")))
            got = jax.jit(lambda a: executor(kernel, a, jnp.asarray(B)))(split)
        assert counts.lowered == 0
        np.testing.assert_allclose(got, A @ B, rtol=1e-6)

    @pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")])
    def test_export(self, executor, kernel, platforms):
        for _ in range(2):
            exported = jax.export.export(jax.jit(lambda a: executor(kernel, a, B)), platforms=platforms)(A)
            again = jax.export.deserialize(exported.serialize())
            np.testing.assert_allclose(again.call(A), A @ B, rtol=1e-6)
            clear_all()

    def test_export_with_symbolic_sizes_is_lowered_in_place(self, executor, kernel):
        (size,) = jax.export.symbolic_shape("n")
        with counting() as counts:
            exported = jax.export.export(jax.jit(lambda a: executor(kernel, a, B)))(
                jax.ShapeDtypeStruct((size, 4), A.dtype)
            )
        assert counts.lowered == 0
        assert entries() == 0
        np.testing.assert_allclose(exported.call(A[:3]), A[:3] @ B, rtol=1e-6)

    def test_what_calls_the_host_is_lowered_in_place(self, executor):
        kernel = Calls("tests.calls")
        for _ in range(2):
            np.testing.assert_array_equal(jax.jit(lambda a: executor(kernel, a))(A), A + 1)
            assert all(lowered.bytecode is None for lowered in lowering._LOWERED._values.values())

    def test_effects_happen(self, executor):
        kernel = Prints("tests.prints")
        Prints.said.clear()
        for _ in range(2):
            jax.block_until_ready(jax.jit(lambda a: executor(kernel, a))(A))
            jax.effects_barrier()
        np.testing.assert_allclose(Prints.said, [float(A.sum())] * 2, rtol=1e-6)

    def test_a_kernel_that_calls_another_follows_its_choice(self, executor):
        inner = Counted("tests.inner")

        class Outer(Product):
            def run(self, a, b, *, cfg, scale=1.0):
                return 2 * executor(inner, a, b)

            def lowering_packages(self, cfg):
                return ("tilewright",)

        outer = Outer("tests.outer")
        blocks = []
        for block in (64, 16, 64):
            cache = ConfigCache()
            cache.put(Invocation(inner, (A, B)).key, Config(block))
            with overlay_cache(cache):
                lowered = jax.jit(lambda a: executor(outer, a, B)).lower(A)
            configs = labels_to_configs(find_labels_in_lowered(lowered))
            blocks.append(next(cfg.block for label, cfg in configs.items() if "inner" in label))
        assert blocks == [64, 16, 64]
        assert not [path for path in lowering._FILES.path.iterdir() if "outer" in path.name]

    def test_overrides_change_no_key(self, executor, kernel):
        jax.jit(lambda a: executor(kernel, a, B))(A)
        with overlay_cache(ConfigCache()), counting() as counts:
            jax.jit(lambda a: executor(kernel, a, B) + 0)(A)
            assert counts.lowered == 0
            clear_all()
            jax.jit(lambda a: executor(kernel, a, B) + 0)(A)
        assert counts == Counts(0, 0)

    def test_random_keys_are_operands(self, executor):
        class Draws(Product):
            def run(self, key, *, cfg):
                return jax.random.normal(key, (3,))

            def lowering_packages(self, cfg):
                return ("tilewright",)

        kernel = Draws("tests.draws")
        for _ in range(2):
            got = jax.jit(lambda key: executor(kernel, key))(jax.random.key(3))
            np.testing.assert_array_equal(got, jax.random.normal(jax.random.key(3), (3,)))
            clear_all()


def test_what_a_tuning_lowered_serves_the_users_program(executor):
    kernel, cfg = Counted("tests.tuned"), Config(16)
    inv = Invocation(kernel, (A, B))
    for direction in (inv, inv.backward()):
        Workload(direction, executor.chooser).compile(cfg)
    with counting() as counts:
        jax.jit(jax.value_and_grad(lambda a, b: executor(kernel, a, b, cfg=cfg).sum(), (0, 1)))(A, B)
    assert counts == Counts(0, 0)
