// The work queues of packed attention (packed_hopper.cuh). One CTA sorts the sequences, longest first, into two queues:
// chunks (prefill) and decoded tokens. For each queue the workspace holds sorted segments; an item is found from its
// number by a search for the last segment whose `first_item` is not greater.
//
// Workspace: Plan | Segment[sequences + 2] of chunks | Segment[sequences + 2] of decode | int arrived[slots] | padding
// to 128 bytes | Partial[slots].
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>

namespace tilewright::paged {

constexpr int kFar = 1 << 29;  // greater than any position, and small enough that sums of three fit 32 bits

// The query tokens of one sequence, or tokens that belong to none. Each segment has `items` items for each KV head:
// tiles of a chunk, or for decoded tokens the split-KV parts of their keys.
struct alignas(16) Segment {
  int sequence, token, count;  // the first token's index among all tokens, and their number
  int position;                // of the first token in its sequence
  int length;                  // keys, at most as many as the page table has room for
  int first_item, items;       // number of its first item, and items per KV head
  int slot;                    // split-KV parts of the earlier split segments, per KV head
};

// The head of the workspace; arrays of two are indexed by Queue. The segments of chunks and of decode follow.
struct Plan {
  int next[2];      // next item; CTAs take one more by atomicAdd
  int items[2];     // number of items
  int segments[2];  // number of segments
  int unused[2];
};

enum Queue { kChunks, kDecoded };

constexpr int kPlanThreads = 1024;
// Max SMs that the plan counts with: more than any device of compute capability 9.0 has.
constexpr int kMaxBlocks = 144;
constexpr int kMaxParts = 64, kMinPart = 8;  // max split-KV parts of a segment; min KV blocks of a part

// Byte offsets in the workspace.
struct PlanMemory {
  int64_t arrived, partials, bytes;

  // A part has at least 3/4 of an SM's share of the keys that are left when its segment is split (see `parts_of`). The
  // number of parts is therefore at most 4/3 * SMs * the sum, over segments, of the fraction of the remaining keys that
  // the segment has. That sum is at most 1 + log(number of KV blocks).
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
  int tokens, sequences, kv_heads, capacity;  // capacity: keys that a row of the page table holds
  int most_decoded;                           // max tokens of a segment that goes to the decode queue
  int each;                                   // max tokens of a chunk item
  int blocks;                                 // CTAs; CTA i starts with item i of each queue, without an atomic
  int block_keys;                             // keys of a KV block of decode items
  int left, right;                            // a query at position i sees keys [i - left, i + right]
};

// Launch shape of the plan kernel; its prefetching CTAs have the same.
struct PlanLaunch {
  int threads;
  int lane_bits;  // log2 of the lanes that share the comparisons of one segment
  int64_t bytes;  // shared memory

  static PlanLaunch of(int64_t sequences) {
    const int64_t segments = sequences + 2, padded = (segments + 3) / 4 * 4;
    int lane_bits = 0;
    while (lane_bits < 2 && segments << (lane_bits + 1) <= kPlanThreads) ++lane_bits;
    const int64_t threads = std::min<int64_t>(kPlanThreads, ((segments << lane_bits) + 31) / 32 * 32);
    return {int(threads), lane_bits, (4 * padded + 4 + kPlanThreads / 32 + 4) * int64_t(sizeof(int))};
  }
};

// Inclusive prefix sum or prefix maximum of non-negative values, in place, by all threads of a CTA. `of_warps` has room
// for one value per warp.
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

// The keys [low, high) that some token of a segment sees; `position` is that of the first of `count` tokens.
struct VisibleKeys {
  int low, high;

  static __device__ VisibleKeys of(int position, int count, int length, int left, int right) {
    const int low = min(max(position - left, 0), length), high = min(max(position + count + right, 0), length);
    return high <= low ? VisibleKeys{0, 0} : VisibleKeys{low, high};
  }
};

// The number of split-KV parts of a decode segment with `blocks` KV blocks, so that a part is about one SM's share of
// the `left` blocks, which include this segment (guided self-scheduling: Polychronopoulos and Kuck, 1987): large parts
// come first, and smaller ones fill the gaps these leave. With several segments per SM, a part may have as many shares,
// at most three. A segment never has more parts, over all KV heads, than there are SMs: some SM would have two.
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

// Makes the plan; called by all threads of one CTA. Decreasing entries of `cum` are raised to the maximum so far.
// Tokens before the first and behind the last sequence form segments without keys, so there are sequences + 2 segments.
static __device__ void make_plan(const int* cum, const int* lengths, const PlanSizes& p, int lane_bits, int* memory,
                                 Plan* plan, int* arrived) {
  const int segments = p.sequences + 2, padded = (segments + 3) / 4 * 4;
  int* const keys = memory;            // sort keys: 2 * length + queue, or -1 for no tokens
  int* const work = keys + padded;     // items of a chunk per KV head, or KV blocks of decoded tokens
  int* const parts = work + padded;    // parts of decode segments by rank; bits 16 and up: if split
  int* const bounds = parts + padded;  // [segments + 1] first tokens
  int* const of_warps = bounds + padded + 4;
  int* const items = of_warps + kPlanThreads / 32;
  int* const counts = items + 2;
  Segment* const sorted = reinterpret_cast<Segment*>(plan + 1);
  const int first = int(threadIdx.x), threads = int(blockDim.x);

  // Loops are not unrolled: most calls run each loop once, and the time is that of fetching the instructions.
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
    // Clamped so that the sum over all segments fits 32 bits.
    const int ends = (visible_keys.high + p.block_keys - 1) / p.block_keys;
    const int blocks = min(ends - visible_keys.low / p.block_keys, INT_MAX / segments);
    keys[i] = count == 0 ? -1 : 2 * length + queue;
    if (count > 0) atomicAdd(&counts[queue], 1);
    work[i] = count == 0 ? 0 : queue == kChunks ? (count + p.each - 1) / p.each : blocks;
  }
  __syncthreads();
  // Rank each segment by comparing it with all others of its queue, 2^lane_bits lanes for each segment.
  const int lanes = 1 << lane_bits, lane = first & (lanes - 1);
#pragma unroll 1
  for (int base = 0; base < segments; base += threads >> lane_bits) {
    const int i = base + (first >> lane_bits), mine = i < segments ? keys[i] : -1;
    const Queue queue = Queue(mine & 1);
    int rank = 0, beside = 0;  // segments in front; their work, or for decode that of the others
    // For chunks `beside` is the number of items in front; for decode the KV blocks of this segment and those behind.
    if (mine >= 0) {
#pragma unroll 1
      for (int j = 4 * lane; j < padded; j += 4 * lanes) {
        const int4 four_keys = *reinterpret_cast<const int4*>(keys + j);
        const int4 four_work = *reinterpret_cast<const int4*>(work + j);
        const int theirs[4] = {four_keys.x, four_keys.y, four_keys.z, four_keys.w};
        const int their_work[4] = {four_work.x, four_work.y, four_work.z, four_work.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          // Ties are broken by index. Negative keys (no tokens) are never in front.
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
  if (items[kDecoded] == decoded * p.kv_heads) return;  // no segment is split
  // Item numbers and slots of decode segments are prefix sums of their parts.
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
