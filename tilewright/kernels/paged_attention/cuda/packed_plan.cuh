// The order in which packed attention takes its work: sequences sorted by one block of threads, the longest first.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tilewright::paged {

constexpr int kFar = 1 << 29;  // beyond every position, so that sums of three stay in 32 bits

// Tokens of one sequence, or of none.
struct alignas(16) Segment {
  int sequence, token, count;  // the first token and how many there are
  int position;                // of the first token
  int length;                  // keys there are pages for
  int first_item, tiles;       // of those of chunks: where its items begin, and how many each head has
  int unused;
};

// What the planning kernel leaves in the workspace. Chunks' segments are followed by those that are decoded.
struct Plan {
  int next[2];   // items of each queue that have been taken
  int items[2];  // how many there are
  int segments[2];
  int unused[2];
};

enum Queue { kChunks, kDecoded };

inline int64_t plan_bytes(int64_t sequences) {
  return int64_t(sizeof(Plan)) + 2 * (sequences + 2) * int64_t(sizeof(Segment));
}

constexpr int kPlanThreads = 1024, kMaxSequences = 4096;

struct PlanSizes {
  int tokens, sequences, kv_heads, capacity;
  int most_decoded;  // tokens of a sequence whose rows are few
  int each;          // tokens of a tile of a chunk
  int blocks;        // that take an item each without asking
};

// How the block is launched.
struct PlanLaunch {
  int threads;
  int lane_bits;  // lanes that share the comparisons of a segment with the others, as a power of two
  int64_t bytes;  // of shared memory

  static PlanLaunch of(int64_t sequences) {
    const int64_t segments = sequences + 2, padded = (segments + 3) / 4 * 4;
    int lane_bits = 0;
    while (lane_bits < 2 && segments << (lane_bits + 1) <= kPlanThreads) ++lane_bits;
    const int64_t threads = std::min<int64_t>(kPlanThreads, ((segments << lane_bits) + 31) / 32 * 32);
    return {int(threads), lane_bits, (3 * padded + 4 + kPlanThreads / 32 + 4) * int64_t(sizeof(int))};
  }
};

// The greatest of all values up to each, of which none is negative. `of_warps` has room for one of each warp.
static __device__ void scan_greatest(int* values, int size, int* of_warps) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
#pragma unroll 1
  for (int base = 0, before = 0; base < size; base += int(blockDim.x)) {
    const int i = base + int(threadIdx.x);
    int value = i < size ? values[i] : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, value, distance);
      if (lane >= distance) value = max(value, other);
    }
    if (lane == 31) of_warps[warp] = value;
    __syncthreads();
    const int earlier = __reduce_max_sync(~0u, lane < warp ? of_warps[lane] : 0);
    if (i < size) values[i] = max(before, max(earlier, value));
    __syncthreads();
    before = values[min(base + int(blockDim.x), size) - 1];
  }
}

// By all threads of a block. Boundaries that do not rise are made to; tokens before and behind those of the sequences
// get segments without keys.
static __device__ void make_plan(const int* cum, const int* lengths, const PlanSizes& p, int lane_bits, int* memory,
                                 Plan* plan) {
  const int segments = p.sequences + 2, padded = (segments + 3) / 4 * 4;
  int* const keys = memory;            // of sorting: the length, and in the last bit which queue; none if negative
  int* const tiles = keys + padded;    // of chunks
  int* const bounds = tiles + padded;  // [segments + 1]
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
  scan_greatest(bounds, segments + 1, of_warps);
#pragma unroll 1
  for (int i = first; i < padded; i += threads) {
    const int count = i < segments ? bounds[i + 1] - bounds[i] : 0;
    const Queue queue = count <= p.most_decoded ? kDecoded : kChunks;
    keys[i] = count == 0 ? -1 : 2 * keys[i] + queue;
    tiles[i] = queue == kChunks ? (count + p.each - 1) / p.each : 0;
  }
  __syncthreads();
  const int lanes = 1 << lane_bits, lane = first & (lanes - 1);
#pragma unroll 1
  for (int base = 0; base < segments; base += threads >> lane_bits) {
    const int i = base + (first >> lane_bits), mine = i < segments ? keys[i] : -1;
    int rank = 0, earlier = 0;  // segments that come first, and tiles of these
    if (mine >= 0) {
#pragma unroll 1
      for (int j = 4 * lane; j < padded; j += 4 * lanes) {
        const int4 four_keys = *reinterpret_cast<const int4*>(keys + j);
        const int4 four_tiles = *reinterpret_cast<const int4*>(tiles + j);
        const int theirs[4] = {four_keys.x, four_keys.y, four_keys.z, four_keys.w};
        const int their_tiles[4] = {four_tiles.x, four_tiles.y, four_tiles.z, four_tiles.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          // Of equal ones that in front comes first; none does that is negative.
          const bool before = (((theirs[k] ^ mine) & 1) == 0) & (theirs[k] + int(j + k < i) > mine);
          rank += before;
          earlier += before ? their_tiles[k] : 0;
        }
      }
    }
#pragma unroll 1
    for (int distance = 1; distance < lanes; distance *= 2) {
      rank += __shfl_xor_sync(~0u, rank, distance);
      earlier += __shfl_xor_sync(~0u, earlier, distance);
    }
    if (mine < 0 || lane > 0) continue;
    const int queue = mine & 1, length = mine >> 1, count = bounds[i + 1] - bounds[i];
    Segment segment{};
    segment.sequence = min(max(i - 1, 0), p.sequences - 1);
    segment.token = bounds[i];
    segment.count = count;
    segment.position = length - count;
    segment.length = min(length, p.capacity);
    segment.first_item = earlier * p.kv_heads;
    segment.tiles = tiles[i];
    sorted[(queue == kChunks ? 0 : segments) + rank] = segment;
    atomicAdd(&items[queue], (queue == kChunks ? tiles[i] : 1) * p.kv_heads);
    atomicAdd(&counts[queue], 1);
  }
  __syncthreads();
  if (first < 2) {
    plan->next[first] = p.blocks;
    plan->items[first] = items[first];
    plan->segments[first] = counts[first];
  }
}

static __global__ void __launch_bounds__(kPlanThreads) plan_kernel(const int* cum, const int* lengths, PlanSizes p,
                                                                   int lane_bits, Plan* plan) {
  extern __shared__ __align__(16) int memory[];
  make_plan(cum, lengths, p, lane_bits, memory, plan);
}

}  // namespace tilewright::paged
