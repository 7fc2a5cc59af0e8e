"""The executor outside of transformations: compile, explain, and what an eager call compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.kernel.samples import FORMS, A, B, Config, Pair, Product, watching
from tilewright.ops import ConfigSelectorChain, Executor, Invocation, PersistentCache, Tuner, policy_override
from tilewright.ops.lowering import programs


@pytest.fixture
def executor():
    return Executor(ConfigSelectorChain(tuner=Tuner(0, 1)))


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


class TestEagerCalls:
    def test_are_compiled_once_for_each_shape(self, executor):
        kernel = Product("tests.executor")
        for _ in range(3):
            with watching() as seen:
                for rows in (2, 3, 2):
                    close(executor(kernel, A[:rows], B), A[:rows] @ B)
        assert seen == []

    def test_accept_numpy_and_python_numbers(self, executor):
        class Scaled(Product):
            def run(self, a, b, *, cfg, scale=1.0):
                return a * b * scale

        kernel = Scaled("tests.executor.scaled")
        close(executor(kernel, np.ones(3, np.float32), 2.0, scale=np.float32(3)), np.full(3, 6.0))

    def test_the_least_recently_used_program_goes(self, executor, monkeypatch):
        monkeypatch.setattr(programs, "MAX_PROGRAMS", 2)
        kernel = Product("tests.executor")
        for scale, retraced in ((1.0, True), (2.0, True), (1.0, False), (3.0, True), (1.0, False), (2.0, True)):
            with watching() as seen:
                executor(kernel, A, B, scale=scale)
            assert bool(seen) == retraced

    def test_another_precision_is_another_program(self, executor):
        kernel = Product("tests.executor")
        executor(kernel, A, B)
        with jax.default_matmul_precision("highest"), watching() as seen:
            executor(kernel, A, B)
        assert seen

    def test_a_choice_that_is_confirmed_keeps_its_program(self, executor):
        kernel = Product("tests.executor")
        executor(kernel, A, B)
        executor.chooser.cache.put("another key", Config(1))
        executor.chooser.cache.put(Invocation(kernel, (A, B)).key, Config(64))
        with watching() as seen:
            executor(kernel, A, B)
        assert seen == []
        executor.chooser.cache.put(Invocation(kernel, (A, B)).key, Config(63))
        with watching() as seen:
            executor(kernel, A, B)
        assert Config(63) in [s.cfg for s in seen]

    def test_of_gradients_see_a_changed_choice(self, executor):
        pair = Pair("tests.executor.pair")
        gradient = jax.grad(lambda a: executor(pair, a, B).sum())
        gradient(A)
        executor.chooser.cache.put(Invocation(pair, (A, B)).backward().key, Config(5))
        with watching() as seen:
            close(gradient(A), jnp.ones((6, 4)) @ B.T)
        assert ("backward", Config(5)) in [(s.stage, s.cfg) for s in seen]


class TestCompile:
    @pytest.mark.parametrize("form", FORMS)
    def test_has_the_semantics_of_calling(self, form, executor):
        kernel = form("tests.executor.compile")
        compiled = executor.compile(kernel, A, jax.ShapeDtypeStruct(B.shape, B.dtype), scale=2.0)
        with watching() as seen:
            close(compiled(A, B), 2 * (A @ B))
        assert seen == []
        close(compiled(A[:2], B), 2 * (A[:2] @ B))
        close(jax.grad(lambda a: compiled(a, B).sum())(A), 2 * jnp.ones((6, 4)) @ B.T)
        close(jax.vmap(compiled, in_axes=(0, None))(jnp.stack([A, A]), B), 2 * jnp.stack([A @ B] * 2))
        close(jax.jit(compiled)(A, B, scale=3.0), 3 * (A @ B))


class TestExplain:
    def test_says_what_would_run_and_measures_nothing(self, executor, capsys):
        kernel = Pair("tests.executor.explain")
        with policy_override(autotune=True):
            said = executor.explain(kernel, A, B)
        assert said.config == Config(64)
        assert said.step.startswith("heuristic")
        assert "tuned" in said.step
        assert [c.direction for c in said.choices] == ["forward", "backward"]
        assert said.choices[1].config == Config(32)
        assert said.time_ms is None
        printed = capsys.readouterr().out
        assert printed.strip() == str(said)
        assert "not measured" in printed
        assert len(executor.chooser.cache) == 0

    @pytest.mark.parametrize("form", FORMS)
    def test_agrees_with_the_call(self, form, executor):
        kernel = form("tests.executor.agree")
        executor.chooser.cache.put(Invocation(kernel, (A, B)).key, Config(5))
        said = executor.explain(kernel, A, B, quiet=True)
        with watching() as seen:
            executor(kernel, A, B)
        assert said.config == seen[-1].cfg == Config(5)
        assert said.step == "memory"
        assert len(said.choices) == (1 if form is Product else 2)

    def test_names_measured_times_and_other_implementations(self, tmp_path, capsys):
        class Portfolio(Product):
            def rejection_reasons(self, inv, cfg, measured):
                return {"triton": ("no GPU", "no float8"), "xla": ()}

        kernel = Portfolio("tests.executor.portfolio")
        chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path), autotune=True, tuner=Tuner(0, 1))
        executor = Executor(chain)
        executor(kernel, A, B)
        said = executor.explain(kernel, A, B)
        assert said.time_ms > 0
        assert said.rejected["triton"] == ("no GPU", "no float8")
        out = capsys.readouterr().out
        assert "no GPU; no float8" in out
        assert " ms" in out

    def test_of_an_explicit_config(self, executor):
        said = executor.explain(Product("tests.executor"), A, B, cfg=Config(9), quiet=True)
        assert (said.config, said.step) == (Config(9), "explicit")
        assert executor.explain(Product("tests.executor"), jax.ShapeDtypeStruct((6, 5), A.dtype), B, quiet=True)


class TestChooseConfig:
    def test_of_arrays_structs_and_tracers(self, executor):
        kernel, chosen = Product("tests.executor"), []
        executor.chooser.cache.put(Invocation(kernel, (A, B)).key, Config(5))
        struct = jax.ShapeDtypeStruct((6, 5), jnp.float32)
        assert (
            executor.choose_config(kernel, A, B) == executor.choose_config(kernel, struct, np.asarray(B)) == Config(5)
        )
        jax.jit(lambda a: chosen.append(executor.choose_config(kernel, a, B)))(A)
        assert chosen == [Config(5)]
        assert executor.choose_config(kernel, A, B, cfg=Config(8)) == Config(8)
