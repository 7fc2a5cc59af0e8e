"""The planning kernel of packed attention, by threads of the host: its order and its bounds, for any input."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

import tilewright
from tilewright.kernels.paged_attention.cuda.packed import MAX_SEQUENCES

CUDA = Path(tilewright.__file__).parent / "kernels/paged_attention/cuda"

type Ints = npt.NDArray[np.int32]

UNWRITTEN = -7

SEGMENT = np.dtype(
    [(name, np.int32) for name in ("sequence", "token", "count", "position", "length", "first_item", "items", "slot")]
)


class Sizes(NamedTuple):
    tokens: int
    sequences: int
    kv_heads: int
    capacity: int
    max_decoded: int
    each: int
    blocks: int
    block_keys: int = 64
    left: int = 1 << 29
    right: int = 0


class Call(NamedTuple):
    sizes: Sizes
    cum: Ints
    lengths: Ints


class Plan(NamedTuple):
    next: list[int]
    items: list[int]
    chunks: npt.NDArray[np.void]
    decoded: npt.NDArray[np.void]
    arrived: int


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    found: Path = tmp_path_factory.mktemp("plan") / "plan"
    source = Path(__file__).with_name("plan_on_host.cc")
    command = ["g++", "-std=c++20", "-O1", "-pthread", "-Wno-unknown-pragmas", f"-I{CUDA}", source, "-o", found]
    subprocess.run(command, check=True)
    return found


def plans(program: Path, calls: Sequence[Call]) -> list[Plan]:
    data = b"".join(np.asarray(part, np.int32).tobytes() for call in calls for part in call)
    out = np.frombuffer(subprocess.run([program], input=data, capture_output=True, check=True).stdout, np.int32)
    found = []
    for call in calls:
        segments = call.sizes.sequences + 2
        size, plan, out = out[0] // 4, out[1:], out[1 + out[0] // 4 :]
        head, rest, counters = plan[:8], plan[8 : 8 + 16 * segments].view(SEGMENT), plan[8 + 16 * segments : size]
        chunks, decoded = head[4:6]
        arrived = int((counters == 0).sum())
        found.append(Plan(list(head[:2]), list(head[2:4]), rest[:chunks], rest[segments : segments + decoded], arrived))
        assert (counters[:arrived] == 0).all()
        for unused in (rest[chunks:segments], rest[segments + decoded :], counters[arrived:]):
            assert (unused.view(np.int32) == UNWRITTEN).all()
    assert out.size == 0
    return found


def seen(sizes: Sizes, length: int, count: int) -> int:
    """Blocks of keys that some of the last ``count`` tokens see, at most so many that all are counted by 32 bits."""
    first, last = length - count - sizes.left, min(length + sizes.right, length, sizes.capacity) - 1
    blocks = last // sizes.block_keys - max(first, 0) // sizes.block_keys + 1
    return min(blocks, np.iinfo(np.int32).max // (sizes.sequences + 2)) if last >= max(first, 0) else 0


def cut(sizes: Sizes, blocks: int, left: int, segments: int) -> int:
    """Parts, each about a multiprocessor's share of what is left, or several if there are segments enough."""
    float32, processors = np.float32, min(sizes.blocks, 144)
    heads = float32(sizes.kv_heads) / float32(processors)
    shares = min(max(float32(segments) * heads, float32(1)), float32(3))
    most = max(float32(8), shares * (float32(left) * heads))
    parts = min(64, processors // sizes.kv_heads, int(float32(blocks) / most + float32(0.5)))
    return len(range(0, blocks, -(-blocks // parts))) if parts > 1 else 1


def expected(call: Call) -> Plan:
    """From what the sizes and the documentation say, sequence by sequence."""
    sizes = call.sizes
    queues: list[list[tuple[int, ...]]] = [[], []]
    before = 0
    ends = [*np.clip(call.cum, 0, sizes.tokens).tolist(), sizes.tokens]
    for i, end in enumerate(ends):
        count = max(end - before, 0)
        length = min(max(int(call.lengths[i - 1]), 0), 1 << 29) if 0 < i <= sizes.sequences else 0
        if count > 0:
            sequence = min(max(i - 1, 0), sizes.sequences - 1)
            queues[count <= sizes.max_decoded].append((-length, i, sequence, before, count))
        before = max(before, end)
    found: list[npt.NDArray[np.void]] = []
    items = []
    slot = 0
    for is_decoded, queue in enumerate(queues):
        rows, first = [], 0
        queue.sort()
        work = [seen(sizes, -negative, count) for negative, *_, count in queue] if is_decoded else []
        for rank, (negative, _, sequence, token, count) in enumerate(queue):
            parts = cut(sizes, work[rank], sum(work[rank:]), len(queue)) if is_decoded else -(-count // sizes.each)
            position, length = -negative - count, min(-negative, sizes.capacity)
            rows.append((sequence, token, count, position, length, first, parts, slot if is_decoded else 0))
            first += parts * sizes.kv_heads
            slot += parts if is_decoded and parts > 1 else 0
        found.append(np.array(rows, SEGMENT))
        items.append(first)
    return Plan([sizes.blocks] * 2, items, *found, slot * sizes.kv_heads)


def check(program: Path, calls: Sequence[Call]) -> None:
    for call, got in zip(calls, plans(program, calls), strict=True):
        want = expected(call)
        assert (got.next, got.items, got.arrived) == (want.next, want.items, want.arrived)
        np.testing.assert_array_equal(got.chunks, want.chunks)
        np.testing.assert_array_equal(got.decoded, want.decoded)


def some_call(random: np.random.Generator, sequences: int, longest: int = 8192, left: int = 1 << 29) -> Call:
    """As calls are: tokens of all sequences, some of them none, and behind the last one none or some."""
    counts = random.choice([0, 1, 1, 1, 2, 3, 40, 512], sequences)
    cum = np.concatenate([[random.choice([0, 3])], counts]).cumsum()
    sizes = Sizes(int(cum[-1] + random.choice([0, 1, 70])), sequences, 8, 8192, 2, 32, 132, left=left)
    return Call(sizes, cum.astype(np.int32), random.integers(0, longest + 1, sequences, np.int32))


# Around the sizes of warps and of vectors, one lane for a segment or several, and more segments than threads.
@pytest.mark.parametrize(
    "sequences",
    [1, 2, 3, 29, 30, 31, 62, 64, 126, 254, 255, 510, 511, 1022, 1023, 1100],
)
def test_the_order(program: Path, sequences: int):
    random = np.random.default_rng(sequences)
    calls = [some_call(random, sequences, **fields) for fields in ({}, {"longest": 2}, {"left": 1000})]
    check(program, calls)


def test_as_many_sequences_as_are_served(program: Path):
    check(program, [some_call(np.random.default_rng(0), MAX_SEQUENCES)])


def test_one_queue_is_empty_or_both(program: Path):
    sizes = Sizes(60, 30, 2, 100, 2, 16, 132)
    lengths = np.arange(30, dtype=np.int32) % 7
    cum = np.arange(31, dtype=np.int32)
    check(program, [Call(sizes._replace(tokens=30), cum, lengths), Call(sizes._replace(tokens=90), 3 * cum, lengths)])
    check(program, [Call(sizes._replace(tokens=0), 0 * cum, lengths), Call(sizes, 0 * cum, lengths)])


def test_boundaries_and_lengths_may_be_anything(program: Path):
    random = np.random.default_rng(7)
    limits = np.iinfo(np.int32)
    calls = []
    for sequences in (1, 5, 31, 64, 300, 1500):
        sizes = Sizes(9 * sequences, sequences, 4, 1 << 29, 8, 16, 132)
        near, far = (-20, sizes.tokens + 20), (limits.min, limits.max)
        for bounds, lengths in ((near, near), (near, far), (far, far)):
            cum = random.integers(*bounds, sequences + 1, np.int32, endpoint=True)
            if lengths == far:
                cum.sort()
            calls.append(Call(sizes, cum, random.integers(*lengths, sequences, np.int32, endpoint=True)))
    check(program, calls)


def test_few_long_ones_are_cut(program: Path):
    """So that as many items as there are multiprocessors have about the same share of the keys."""
    sizes = Sizes(1, 1, 8, 1 << 17, 2, 32, 132)
    call = Call(sizes, np.array([0, 1], np.int32), np.array([1 << 17], np.int32))
    whole, window = plans(program, [call, call._replace(sizes=sizes._replace(left=64 * 20))])
    assert (whole.items, whole.arrived) == ([0, 128], 128)
    assert (window.items, window.arrived) == ([0, 24], 24)


@pytest.mark.parametrize("ratio", [1.0, 0.995, 0.98, 0.9, 0.5])
def test_there_is_room_for_all_parts(program: Path, ratio: float):
    """Counters behind the room for them are found written by the program."""
    for sequences, kv_heads in ((2000, 1), (2000, 8), (130, 1)):  # of 130 the parts are the smallest
        lengths = np.maximum((1 << 29) * ratio ** np.arange(float(sequences)), 700).astype(np.int32)
        sizes = Sizes(sequences, sequences, kv_heads, 1 << 29, 2, 32, 160)
        check(program, [Call(sizes, np.arange(sequences + 1, dtype=np.int32), lengths)])
