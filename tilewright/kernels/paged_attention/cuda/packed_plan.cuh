// The order in which packed attention takes its work: sequences sorted by one block of threads, the longest first.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>

namespace tilewright::paged {

constexpr int kFar = 1 << 29;  // beyond every position, so that sums of three stay in 32 bits

// Tokens of one sequence, or of none. An item is a tile of a chunk, or the tokens that are decoded with a part of their
// keys, and a key head.
struct alignas(16) Segment {
  int sequence, token, count;  // the first token and how many there are
  int position;                // of the first token
  int length;                  // keys there are pages for
  int first_item, items;       // where its items begin, and how many each head has
  int slot;                    // of the first part's results, in units of key heads
};

// What the planning kernel leaves in the workspace. Chunks' segments are followed by those that are decoded.
struct Plan {
  int next[2];   // items of each queue that have been taken
  int items[2];  // how many there are
  int segments[2];
  int unused[2];
};

enum Queue { kChunks, kDecoded };

constexpr int kPlanThreads = 1024;
// Most SMs that work is shared out among: more than any device of this capability has.
constexpr int kMaxBlocks = 144;
constexpr int kMaxParts = 64, kMinPart = 8;  // of a decoded token's keys; blocks of these that one has at least

// What comes one behind the other in the workspace.
struct PlanMemory {
  int64_t arrived, partials, bytes;

  // A part has at least three quarters of a multiprocessor's share of the keys that are left (see `parts_of`). So there
  // are at most 4/3 · SMs times the sum of what each segment has of those that are left at its turn, a sum
  // that is at most 1 + the logarithm of how many blocks of keys there are.
  static PlanMemory of(int64_t sequences, int64_t kv_heads, int64_t capacity, int64_t block_keys,
                       int64_t partial_bytes) {
    const int64_t blocks = std::max<int64_t>(1, sequences * ((capacity + block_keys - 1) / block_keys));
    const int64_t bound = int64_t(std::ceil(4.0 / 3 * kMaxBlocks * (1 + std::log(double(blocks)))));
    const int64_t slots = std::min(bound, sequences * kv_heads * kMaxParts);
    PlanMemory m;
    m.arrived = int64_t(sizeof(Plan)) + 2 * (sequences + 2) * int64_t(sizeof(Segment));
    m.partials = (m.arrived + slots * int64_t(sizeof(int)) + 127) / 128 * 128;
    m.bytes = m.partials + slots * partial_bytes;
    return m;
  }
};

struct PlanSizes {
  int tokens, sequences, kv_heads, capacity;
  int most_decoded;  // tokens of a sequence whose rows are few
  int each;          // tokens of a tile of a chunk
  int blocks;        // that take an item each without asking
  int block_keys;    // in a block of keys of decoded tokens
  int left, right;   // how far a token sees beside itself
};

// How the block that plans is launched, and any beside it.
struct PlanLaunch {
  int threads;
  int lane_bits;  // lanes that share the comparisons of a segment with the others, as a power of two
  int64_t bytes;  // of shared memory

  static PlanLaunch of(int64_t sequences) {
    const int64_t segments = sequences + 2, padded = (segments + 3) / 4 * 4;
    int lane_bits = 0;
    while (lane_bits < 2 && segments << (lane_bits + 1) <= kPlanThreads) ++lane_bits;
    const int64_t threads = std::min<int64_t>(kPlanThreads, ((segments << lane_bits) + 31) / 32 * 32);
    return {int(threads), lane_bits, (4 * padded + 4 + kPlanThreads / 32 + 4) * int64_t(sizeof(int))};
  }
};

// Sums or greatest values of all elements up to each, of which none is negative. `of_warps` has room for one of each.
template <class Combine>
static __device__ void scan(int* values, int size, int* of_warps, const Combine& combine) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
#pragma unroll 1
  for (int base = 0, before = 0; base < size; base += int(blockDim.x)) {
    const int i = base + int(threadIdx.x);
    int value = i < size ? values[i] : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, value, distance);
      if (lane >= distance) value = combine(value, other);
    }
    if (lane == 31) of_warps[warp] = value;
    __syncthreads();
    int earlier = lane < warp ? of_warps[lane] : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      earlier = combine(earlier, __shfl_xor_sync(~0u, earlier, distance));
    }
    if (i < size) values[i] = combine(before, combine(earlier, value));
    __syncthreads();
    before = values[min(base + int(blockDim.x), size) - 1];
  }
}

// The keys that some of a segment's tokens see.
struct VisibleKeys {
  int low, high;

  static __device__ VisibleKeys of(int position, int count, int length, int left, int right) {
    const int low = min(max(position - left, 0), length), high = min(max(position + count + right, 0), length);
    return high <= low ? VisibleKeys{0, 0} : VisibleKeys{low, high};
  }
};

// How many parts a segment's keys are cut to, so that one is about a multiprocessor's share of what is `left`, this
// segment's with it (Polychronopoulos and Kuck, "Guided self-scheduling", 1987): large ones first, smaller ones to fill
// up what these leave. Where there are several segments for each multiprocessor anyway, a part may have as many shares,
// up to three. Of the last segment there are no more parts than SMs, or some would have two.
static __device__ int parts_of(int blocks, int left, int segments, const PlanSizes& p) {
  const float num_sms = float(min(p.blocks, kMaxBlocks)), heads = __fdividef(float(p.kv_heads), num_sms);
  const float shares = min(max(float(segments) * heads, 1.0f), 3.0f);
  const float most = max(float(kMinPart), shares * (float(left) * heads));
  const int limit = min(kMaxParts, int(__fdividef(num_sms, float(p.kv_heads))));
  const int parts = min(limit, int(__fdividef(float(blocks), most) + 0.5f));
  if (parts <= 1) return 1;
  const int each = (blocks + parts - 1) / parts;
  return (blocks + each - 1) / each;
}

// By all threads of a block. Boundaries that do not rise are made to; tokens before and behind those of the sequences
// get segments without keys.
static __device__ void make_plan(const int* cum, const int* lengths, const PlanSizes& p, int lane_bits, int* memory,
                                 Plan* plan, int* arrived) {
  const int segments = p.sequences + 2, padded = (segments + 3) / 4 * 4;
  int* const keys = memory;            // of sorting: the length, and in the last bit which queue; none if negative
  int* const work = keys + padded;     // tiles of a chunk, or blocks of keys
  int* const parts = work + padded;    // of decoded ones, in order; in the upper half of those that are cut
  int* const bounds = parts + padded;  // [segments + 1]
  int* const of_warps = bounds + padded + 4;
  int* const items = of_warps + kPlanThreads / 32;
  int* const counts = items + 2;
  Segment* const sorted = reinterpret_cast<Segment*>(plan + 1);
  const int first = int(threadIdx.x), threads = int(blockDim.x);

  // Loops are not unrolled: most calls go once through each, and wait for every instruction to be fetched.
  if (first < 2) items[first] = counts[first] = 0;
#pragma unroll 1
  for (int i = first; i < max(padded, segments + 1); i += threads) {
    const int length = 0 < i && i <= p.sequences ? lengths[i - 1] : 0;
    const int bound = 0 < i && i < segments ? cum[i - 1] : 0;
    if (i < padded) keys[i] = min(max(length, 0), kFar);
    if (i <= segments) bounds[i] = i == segments ? p.tokens : min(max(bound, 0), p.tokens);
  }
  __syncthreads();
  scan(bounds, segments + 1, of_warps, [](int a, int b) { return max(a, b); });
#pragma unroll 1
  for (int i = first; i < padded; i += threads) {
    const int count = i < segments ? bounds[i + 1] - bounds[i] : 0, length = keys[i];
    const Queue queue = count <= p.most_decoded ? kDecoded : kChunks;
    const VisibleKeys visible_keys = VisibleKeys::of(length - count, count, min(length, p.capacity), p.left, p.right);
    // At most so many that their sum is no overflow.
    const int ends = (visible_keys.high + p.block_keys - 1) / p.block_keys;
    const int blocks = min(ends - visible_keys.low / p.block_keys, INT_MAX / segments);
    keys[i] = count == 0 ? -1 : 2 * length + queue;
    if (count > 0) atomicAdd(&counts[queue], 1);
    work[i] = count == 0 ? 0 : queue == kChunks ? (count + p.each - 1) / p.each : blocks;
  }
  __syncthreads();
  const int lanes = 1 << lane_bits, lane = first & (lanes - 1);
#pragma unroll 1
  for (int base = 0; base < segments; base += threads >> lane_bits) {
    const int i = base + (first >> lane_bits), mine = i < segments ? keys[i] : -1;
    const Queue queue = Queue(mine & 1);
    int rank = 0, beside = 0;  // segments that come first; the work of these, or of decoded ones that of all others
    if (mine >= 0) {
#pragma unroll 1
      for (int j = 4 * lane; j < padded; j += 4 * lanes) {
        const int4 four_keys = *reinterpret_cast<const int4*>(keys + j);
        const int4 four_work = *reinterpret_cast<const int4*>(work + j);
        const int theirs[4] = {four_keys.x, four_keys.y, four_keys.z, four_keys.w};
        const int their_work[4] = {four_work.x, four_work.y, four_work.z, four_work.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          // Of equal ones that in front comes first; none does that is negative.
          const bool like = ((theirs[k] ^ mine) & 1) == 0, before = theirs[k] + int(j + k < i) > mine;
          rank += like & before;
          beside += like & (before == (queue == kChunks)) ? their_work[k] : 0;
        }
      }
    }
#pragma unroll 1
    for (int distance = 1; distance < lanes; distance *= 2) {
      rank += __shfl_xor_sync(~0u, rank, distance);
      beside += __shfl_xor_sync(~0u, beside, distance);
    }
    if (mine < 0 || lane > 0) continue;
    const int length = mine >> 1, count = bounds[i + 1] - bounds[i];
    Segment segment{};
    segment.sequence = min(max(i - 1, 0), p.sequences - 1);
    segment.token = bounds[i];
    segment.count = count;
    segment.position = length - count;
    segment.length = min(length, p.capacity);
    if (queue == kChunks) {
      segment.first_item = beside * p.kv_heads;
      segment.items = work[i];
    } else {
      segment.first_item = rank * p.kv_heads;
      segment.items = parts_of(work[i], beside, counts[kDecoded], p);
      parts[rank] = segment.items > 1 ? segment.items << 16 | segment.items : 1;
    }
    atomicAdd(&items[queue], segment.items * p.kv_heads);
    sorted[(queue == kChunks ? 0 : segments) + rank] = segment;
  }
  __syncthreads();
  if (first < 2) {
    plan->next[first] = p.blocks;
    plan->items[first] = items[first];
    plan->segments[first] = counts[first];
  }
  const int decoded = counts[kDecoded];
  if (items[kDecoded] == decoded * p.kv_heads) return;  // none is cut
  scan(parts, decoded, of_warps, [](int a, int b) { return a + b; });
#pragma unroll 1
  for (int rank = first + 1; rank < decoded; rank += threads) {
    sorted[segments + rank].first_item = (parts[rank - 1] & 0xffff) * p.kv_heads;
    sorted[segments + rank].slot = parts[rank - 1] >> 16;
  }
#pragma unroll 1
  for (int i = first; i < (parts[decoded - 1] >> 16) * p.kv_heads; i += threads) arrived[i] = 0;
}

}  // namespace tilewright::paged
