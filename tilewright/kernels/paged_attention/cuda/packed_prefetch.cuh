// The plan kernel of packed attention: CTA 0 makes the plan (packed_plan.cuh), and the others prefetch the first keys
// into the L2 cache meanwhile. Read after packed_plan.cuh and before packed_math.cuh (packed_hopper.cuh has the
// overview).
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

#include "packed_plan.cuh"

namespace tilewright::paged {

// The paged KV cache as bytes: `table` is [sequences, columns], a page has 2^page_bits tokens, and a token has
// row_bytes bytes for all KV heads.
struct Pages {
  const char *key, *value;
  const int* table;
  int columns, num_pages, page_bits, row_bytes;
};

// Prefetches the first 128 visible tokens of K and V of a sequence to the L2 cache if one of its items is in the first
// wave. Called by one warp per sequence. HBM is otherwise idle while the plan is made; prefetching more would make the
// plan kernel end later.
CUTLASS_DEVICE void fetch_first(const int* cum, const int* lengths, const PlanSizes& p, const Pages& pages,
                                int sequence) {
  constexpr int kTokens = 64;
  const int lane = threadIdx.x % 32, count = cum[sequence + 1] - cum[sequence];
  const int length = min(max(lengths[sequence], 0), kFar);
  if (count <= 0) return;
  const bool decoded = count <= p.most_decoded;
  int before = 0;  // items of one KV head that the queue holds before those of this sequence
  for (int i = lane; i < p.sequences; i += 32) {
    const int theirs = cum[i + 1] - cum[i];
    if (theirs > 0 && (theirs <= p.most_decoded) == decoded && lengths[i] > length) {
      before += decoded ? 1 : (theirs + p.each - 1) / p.each;
    }
  }
  if (__reduce_add_sync(~0u, before) * p.kv_heads >= p.blocks) return;
  const VisibleKeys visible_keys = VisibleKeys::of(length - count, count, min(length, p.capacity), p.left, p.right);
  const int piece = min(1 << pages.page_bits, kTokens);
  for (int i = lane; i < 2 * kTokens / piece; i += 32) {
    const int token = visible_keys.low / kTokens * kTokens + i / 2 * piece;
    if (token >= visible_keys.high) return;
    const int page = pages.table[int64_t(sequence) * pages.columns + (token >> pages.page_bits)];
    if (unsigned(page) >= unsigned(pages.num_pages)) continue;
    const int64_t row = (int64_t(page) << pages.page_bits) + (token & ((1 << pages.page_bits) - 1));
    const char* const from = (i % 2 == 0 ? pages.key : pages.value) + row * pages.row_bytes;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(piece * pages.row_bytes) : "memory");
  }
}

static __global__ void __launch_bounds__(kPlanThreads) plan_kernel(const int* cum, const int* lengths, PlanSizes p,
                                                                   int lane_bits, Plan* plan, int* arrived,
                                                                   Pages pages) {
  extern __shared__ __align__(16) int memory[];
  if (blockIdx.x == 0) {
    make_plan(cum, lengths, p, lane_bits, memory, plan, arrived);
  } else if (threadIdx.x < 32) {
    fetch_first(cum, lengths, p, pages, int(blockIdx.x) - 1);
  }
}

}  // namespace tilewright::paged
