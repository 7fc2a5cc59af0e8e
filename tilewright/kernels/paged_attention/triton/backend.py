"""Attention over a cache in Triton, on NVIDIA GPUs: split over keys where queries are too few to fill the card."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import InferenceImplementation, Platform
from tilewright.kernels.op.footprint import max_shared_bytes
from tilewright.kernels.paged_attention.inputs import PagedInputs, PagedProblem
from tilewright.kernels.paged_attention.results import Results, empty_forward, run_with_sequential_vmap
from tilewright.kernels.paged_attention.token_layout import boundaries, packed_tiles, packed_tokens
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams

LARGEST_DIM = 512
"""Elements of a key or value in one MMA; a latent may have 64 more, in a second."""

PROGRAMS_PER_CORE = 8
"""Programs per SM, from which the number of splits follows: two or three run at once, and several rounds of them even
out that some end earlier."""

ENOUGH_PER_CORE = 3.5
"""Programs per SM from which keys are not split: combining costs more than waiting for the last of them."""

MIN_BLOCKS = 4
"""Steps that a split should have, for its partial results are written and read again."""

MAX_SPLITS = 256

LARGEST_SHARED_BYTES = 227 << 10
"""Shared memory of a CTA where the device's own limit is not known."""


class TritonPagedAttention(InferenceImplementation[PagedInputs, PagedProblem, Results, FwdParams]):
    """Serves float16, bfloat16 and float32, with any cache; float32 is multiplied without tensor cores.

    Its params are ``q_blocksize``, ``kv_blocksize``, ``num_key_splits`` and those of the launch.
    """

    platform: ClassVar[Platform] = Platform.TRITON
    late_import: ClassVar[str] = "triton"
    forward_params: ClassVar[type] = FwdParams

    def forward_reasons(self, problem: PagedProblem, device: Device) -> list[str]:
        why = unavailable(device)
        if problem.dtype.name not in ("float16", "bfloat16", "float32"):
            why.append(f"queries must be float16, bfloat16 or float32, not {problem.dtype}")
        if problem.kv_dtype.name == "float8_e4m3fn" and device.capability is not None and device.capability < (8, 9):
            why.append(f"float8_e4m3fn needs compute capability 8.9, this device has {device.capability}")
        main, rest = _dims(problem.head_dim, problem.value_dim, problem.options.latent_dim is not None)
        if max(main, problem.value_dim) > LARGEST_DIM or rest > 128:
            why.append(f"{problem.head_dim=} and {problem.value_dim=} must be at most {LARGEST_DIM}")
        if problem.dtype.itemsize > 2 and max(problem.head_dim, problem.value_dim) > 256:
            why.append(f"in float32 {problem.head_dim=} and {problem.value_dim=} must be at most 256")
        return why

    def heuristic(self, problem: PagedProblem, device: Device, direction: Direction) -> FwdParams:
        """The config by a sweep on an H200 (benchmarks/results/nvidia-h200/serving_sweep.json)."""
        wide = power_of_two(max(problem.head_dim, problem.value_dim)) > 256
        block_g = min(power_of_two(problem.groups), 64)
        rows = 1
        if problem.longest_q > 1:
            mean = problem.tokens / max(problem.sequences, 1)
            rows = max((128 if mean >= 128 and not wide else 64) // block_g, 1)
        block_m = max(rows * block_g, MIN_DOT)
        narrow = problem.dtype.itemsize <= 2
        half = _half(problem)
        # Converted elements take registers of their own: 64 rows and four warps then spill.
        if wide or block_m >= (64 if half else 128):
            warps = 8
        else:
            warps = 2 if half or (problem.paged and problem.page_size < 16 and block_m < 64) else 4
        # One buffer is enough where many programs share an SM, and leaves room for them.
        stages = 2 if wide or not narrow or (block_m < 64 and not half) else 3

        def params(block_n: int, warps: int = warps) -> FwdParams:
            return FwdParams(
                q_blocksize=min(rows, power_of_two(max(problem.longest_q, 1))),
                kv_blocksize=block_n,
                num_key_splits=_splits(problem, device, rows, block_n, warps),
                num_warps=warps,
                num_stages=stages,
            )

        # Where keys take few instructions, a warp with a page a step needs no other warp, and waits for no page number.
        if half and not wide and block_m < 64 and problem.page_size == 16 and problem.scales_constant_per_head:
            return params(16, 1)
        # A latent of 512 fits with 64 keys too, but some versions of Triton then spill (3.9; 3.6 does not).
        sizes = (64, 32, 16) if narrow and not wide else (32, 16)
        fits = (size for size in sizes if not self.config_reasons(problem, device, direction, params(size)))
        return params(next(fits, MIN_DOT))

    def candidates(self, problem: PagedProblem, device: Device, direction: Direction) -> Iterable[FwdParams]:
        best = self.heuristic(problem, device, direction)
        splits = best.num_key_splits or 1
        made = []
        for block_n in (16, 32, 64, 128):
            for warps, stages in ((1, 3), (2, 2), (2, 3), (4, 2), (4, 3), (4, 4), (8, 2), (8, 3)):
                if (block_n == 16) != (warps == 1 and problem.longest_q == 1):
                    continue  # one warp needs no other to reduce a row of few keys, and more have little to do
                for number in (splits, max(splits // 2, 1), min(2 * splits, MAX_SPLITS)):
                    made.append(
                        FwdParams(
                            q_blocksize=best.q_blocksize, kv_blocksize=block_n, num_key_splits=number,
                            num_warps=warps, num_stages=stages,
                        )
                    )  # fmt: skip
        fits = (params for params in made if not self.config_reasons(problem, device, direction, params))
        return [params for params in dict.fromkeys(fits) if params != best]

    def config_reasons(
        self, problem: PagedProblem, device: Device, direction: Direction, params: FwdParams
    ) -> list[str]:
        """MMAs need sides of 16, the stages of the pipeline must fit shared memory, and O registers."""
        block_n, why = params.kv_blocksize or 64, []
        for name, size in (("q_blocksize", params.q_blocksize or 1), ("kv_blocksize", block_n)):
            if size != power_of_two(size):
                why.append(f"{name}={size} must be a power of two")
        if block_n < MIN_DOT:
            why.append(f"kv_blocksize={block_n} must be at least {MIN_DOT}")
        main, rest = _dims(problem.head_dim, problem.value_dim, problem.options.latent_dim is not None)
        elements = power_of_two(main) + (power_of_two(rest) if rest else 0)
        elements += 0 if problem.options.latent_dim is not None else power_of_two(problem.value_dim)
        block_m = max((params.q_blocksize or 1) * min(power_of_two(problem.groups), 64), MIN_DOT)
        stored = block_n * elements * problem.kv_dtype.itemsize * (params.num_stages or 1)
        converted = problem.kv_dtype != problem.dtype and not _half(problem)
        # Besides the stages: operands of MMAs that are made in registers, that is converted keys and values, and Q and
        # P.
        held = (block_n * elements if converted else 0) + block_m * (power_of_two(main) + block_n)
        most = max_shared_bytes(device, LARGEST_SHARED_BYTES)
        if stored + held * problem.dtype.itemsize > most:
            why.append(f"{params.num_stages} stages of {block_n} keys do not fit into {most} bytes of shared memory")
        # 128 registers of each thread for O, half of those that it may have.
        if block_m * power_of_two(problem.value_dim) > 128 * 32 * (params.num_warps or 4):
            why.append(f"{block_m} rows of {problem.value_dim} do not fit into registers of {params.num_warps} warps")
        return why

    def forward(self, inputs: PagedInputs, params: FwdParams) -> Results:
        """``(out, lse)``; lse is float32."""
        if inputs.is_empty:
            return empty_forward(inputs)
        return run_with_sequential_vmap(lambda inputs: _run(inputs, params), inputs)


def _run(inputs: PagedInputs, params: FwdParams) -> Results:
    from tilewright.kernels.paged_attention.triton import kernels as triton_kernels

    problem, options = PagedProblem.of(inputs), inputs.options
    tokens, heads, value_dim = problem.tokens, problem.heads, problem.value_dim
    block_g, block_q = min(power_of_two(problem.groups), 64), params.q_blocksize or 1
    splits = params.num_key_splits or 1
    absent = jnp.zeros((0,), jnp.int32)
    per_sequence = 1
    tiles, owned = absent, None
    if options.q_length is None:
        cum = boundaries(inputs.cum_q_lens, tokens)
        plan, _ = packed_tiles(cum, inputs.kv_lengths, tokens, block_q)
        tiles, count = jnp.concatenate([plan.sequence, plan.token, plan.rows, plan.position]), plan.rows.shape[0]
        owned = packed_tokens(cum, tokens, problem.sequences, None).owned
    else:
        per_sequence = -(-options.q_length // block_q)
        count = problem.sequences * per_sequence
    float_absent = jnp.zeros((0,), jnp.float32)
    sinks = float_absent if inputs.softmax_aux is None else inputs.softmax_aux
    arrays = [
        inputs.query,
        inputs.key,
        inputs.key if inputs.value is None else inputs.value,
        absent if inputs.page_table is None else inputs.page_table,
        inputs.kv_lengths,
        absent if inputs.kv_starts is None else inputs.kv_starts,
        tiles,
        float_absent if inputs.key_scale is None else inputs.key_scale,
        float_absent if inputs.value_scale is None else inputs.value_scale,
        float_absent if inputs.alibi_slopes is None else inputs.alibi_slopes,
        sinks,
    ]
    constants = _constants(inputs, problem, params, block_g, per_sequence)
    part = (splits,) if splits > 1 else ()
    results = [
        jax.ShapeDtypeStruct((tokens, heads, *part, value_dim), jnp.float32 if part else problem.dtype),
        jax.ShapeDtypeStruct((tokens, heads, *part), jnp.float32),
    ]
    group_blocks = -(-problem.groups // block_g)
    out, lse = launch(
        triton_kernels.attend,
        arrays,
        results,
        grid=[problem.kv_heads * group_blocks * count * splits],
        scalars={"num_pages": problem.num_pages, "num_tiles": count},
        constants=constants,
        num_warps=params.num_warps or 4,
        num_stages=params.num_stages or 2,
    )
    if part:
        block_v = power_of_two(value_dim)
        out, lse = launch(
            triton_kernels.combine,
            [out, lse, sinks],
            [
                jax.ShapeDtypeStruct((tokens, heads, value_dim), problem.dtype),
                jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
            ],
            grid=[tokens, heads],
            constants={
                "heads": heads, "value_dim": value_dim, "splits": splits, "block_s": power_of_two(splits, 1),
                "block_v": block_v, **_sink_sizes(problem),
            },
            num_warps=8 if power_of_two(splits) * block_v > 8192 else 4,
        )  # fmt: skip
    if owned is None:
        return out, lse
    # Tokens of no sequence were not written.
    nothing, nothing_lse = empty_forward(inputs)
    return jnp.where(owned[:, None, None], out, nothing), jnp.where(owned[:, None], lse, nothing_lse)


def _constants(
    inputs: PagedInputs, problem: PagedProblem, params: FwdParams, block_g: int, tiles: int
) -> dict[str, Any]:
    """The constants of `kernels.attend`; ``tiles`` are those of a sequence, where queries are not packed."""
    options, block_q, half = inputs.options, params.q_blocksize or 1, _half(problem)
    main, rest = _dims(problem.head_dim, problem.value_dim, options.latent_dim is not None)
    # In pairs the columns are split over two MMAs, each of which needs MIN_DOT of them.
    min_dim = MIN_DOT * (2 if half else 1)
    return {
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "page_size": problem.page_size,
        "columns": 1 if inputs.page_table is None else inputs.page_table.shape[1],
        "capacity": problem.capacity,
        "q_length": options.q_length or 1,
        "tiles_per_sequence": tiles,
        "paged": problem.paged,
        "packed": problem.packed,
        "latent": inputs.value is None,
        "has_starts": problem.starts,
        "has_key_scale": inputs.key_scale is not None,
        "has_value_scale": inputs.value_scale is not None,
        **_strides("key_scale", inputs.key_scale),
        **_strides("value_scale", inputs.value_scale),
        "has_slopes": problem.alibi,
        **_sink_sizes(problem),
        "softmax_scale": options.softmax_scale,
        "soft_cap": options.logits_soft_cap or 1.0,
        "has_soft_cap": options.logits_soft_cap is not None,
        "left": options.left or 0,
        "has_left": options.left is not None,
        "right": options.right or 0,
        "has_right": options.right is not None,
        "splits": params.num_key_splits or 1,
        "block_q": block_q,
        "block_g": block_g,
        "block_m": max(block_q * block_g, MIN_DOT),
        "block_n": params.kv_blocksize or 64,
        "block_d": power_of_two(main, min_dim),
        "block_r": power_of_two(rest, min_dim) if rest else 0,
        "block_v": power_of_two(problem.value_dim, min_dim),
        "tile_dim": main,
        "exact": problem.dtype.itemsize > 2,
        "stages": params.num_stages or 2,
        "half": half,
    }


def _dims(head_dim: int, value_dim: int, latent: bool) -> tuple[int, int]:
    """Elements of a key in the first MMA, and in the second."""
    return (value_dim, head_dim - value_dim) if latent else (head_dim, 0)


def _sink_sizes(problem: PagedProblem) -> dict[str, int]:
    return {"num_sinks": problem.sinks, "block_sinks": power_of_two(max(problem.sinks, 1))}


def _strides(name: str, scale: jax.Array | None) -> dict[str, int]:
    """Strides of a scale for page, row and head; 0 where it is broadcast."""
    if scale is None:
        return {f"{name}_{axis}": 0 for axis in ("page", "row", "head")}
    pages, rows, heads = scale.shape
    return {
        f"{name}_page": rows * heads if pages > 1 else 0,
        f"{name}_row": heads if rows > 1 else 0,
        f"{name}_head": 1 if heads > 1 else 0,
    }


def _half(problem: PagedProblem) -> bool:
    """True where stored elements have one byte, and are multiplied in float16 as pairs."""
    in_pairs = problem.head_dim % 2 == problem.value_dim % 2 == 0
    return problem.kv_dtype.itemsize == 1 and problem.dtype.itemsize == 2 and in_pairs


def _splits(problem: PagedProblem, device: Device, block_q: int, block_n: int, warps: int) -> int:
    """Splits of the keys so that few long sequences fill the device, only by shapes; lengths are not read."""
    tiles = problem.sequences * -(-problem.longest_q // block_q)
    if problem.packed:
        # How tokens are spread is not known: at least a tile for each sequence, at least whole tiles of all tokens.
        tiles = max(problem.sequences, -(-problem.tokens // block_q))
    programs = tiles * problem.kv_heads * -(-problem.groups // min(power_of_two(problem.groups), 64))
    cores = max(device.cores, 1)
    # A program of one warp counts half.
    enough = programs * min(warps, 2) >= 2 * ENOUGH_PER_CORE * cores
    wanted = 1 if enough else PROGRAMS_PER_CORE * cores // max(programs, 1)
    blocks = -(-problem.visible // block_n)
    return max(min(wanted, blocks // MIN_BLOCKS, MAX_SPLITS), 1)
