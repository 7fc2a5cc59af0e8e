// Attention of packed queries over a paged KV cache for compute capability 9.0a. One call mixes sequences that prefill
// a chunk of tokens with sequences that decode a few tokens.
//
// Prefill is bound by the tensor cores and decode by HBM, so the grid has one persistent CTA for each SM, and each CTA
// works on one item of each kind at any time. It takes the next item of each kind from a queue in global memory (see
// packed_plan.cuh). A chunk item has up to 128 rows, which are up to 128 / group tokens times the `group` query heads
// that share a KV head. A decode item has at most 8 rows of one sequence, and all keys or, if those exceed the SM's
// share of the remaining keys, a part of them (split-KV).
//
//   warpgroup 0, setmaxnreg 32
//     warp 0    copy<kChunks>         TMA loads of Q, K and V for the chunk queue
//     warp 1    copy<kDecoded>        TMA loads of Q, K and V for the decode queue
//     warp 2    look_ahead<kChunks>   takes the next item, zeroes rows of V that no query sees
//     warp 3    look_ahead<kDecoded>  the same for the decode queue
//   warpgroup 1, setmaxnreg 64        decode: S^T = K Q^T, O^T += V^T P^T, P through shared memory
//   warpgroups 2, 3, setmaxnreg 208   prefill: S = Q K^T, O += P V for 64 rows each, P in registers
//
// The decode warpgroup computes transposed products because wgmma has M = 64 but N as small as 8: the item's rows are
// the N dimension. It has one wgmma group in flight at a time, which keeps its part of shared memory small.
//
// Timeline of a chunk item of four KV blocks. The next QK^T runs beside the PV of this block, and the two warpgroups
// ping-pong between wgmma and softmax (Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2):
//
//   warp 0   K0 Q K1 V0 K2 V1 K3 V2 V3 | next item ...
//   warp 2   next item, zeroes V0 and V3 after their TMA load if the item's keys begin or end inside them
//   WG 2     S0 | softmax 0 | S1, O += P0 V0 | softmax 1      | S2, O += P1 V1 | softmax 2      | ...
//   WG 3     S0 | softmax 0 |                | S1, O += P0 V0 | softmax 1      | S2, O += P1 V1 | ...
//
// Symbols (rows of an item are token-major: row r is token r / group, query head r % group of the KV head):
//
//   Q      [128 or 8, head_dim]   QueueStorage::query, shared memory
//   K, V   [128 or 64, head_dim]  QueueStorage::unit, a ring in shared memory; one unit holds K or V of one KV block
//   S      `logits`               fp32 registers of a warpgroup, not yet scaled
//   P      `probabilities`        registers (chunks) or SharedStorage::probabilities (decode), not yet divided by l
//   O      `out`                  fp32 registers, not yet divided by l
//   m, l   `row_max`, `row_sum`   m is the subtracted maximum, which may lag the true one (see kSlack)
//   lse    m * scale + log(l)     global memory, natural logarithm, -inf for a row that sees no key
//
// A plan kernel runs first: one of its CTAs sorts the sequences, longest first.
//
// Reading order:
//
//   packed_plan.cuh      the work queues, and how the plan is made
//   packed_prefetch.cuh  the plan kernel, which also prefetches the first keys
//   packed_math.cuh      single instructions and the running softmax
//   packed_storage.cuh   struct PackedHopper: tiles, items, shared memory with its mbarriers, parameters
//   packed_loads.cuh     warps 0 to 3: copy, look_ahead
//   packed_prefill.cuh   warpgroups 2 and 3: prefill
//   packed_decode.cuh    warpgroup 1: decode
//   packed_hopper.cuh    this file, the header of the variant table: the launch, and which warp has which role
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "packed_plan.cuh"
#include "packed_prefetch.cuh"
#include "packed_math.cuh"
#include "packed_storage.cuh"
#include "packed_loads.cuh"
#include "packed_prefill.cuh"
#include "packed_decode.cuh"

namespace tilewright::paged {

// A dimension of a TMA descriptor, innermost first: size and box in elements of that dimension, stride in elements of
// the array.
struct Extent {
  int64_t size, stride, box;
};

// Encodes a TMA descriptor with the 128-byte swizzle; what is out of bounds is read as zeros.
template <class Element, int kRank>
ffi::Error tensor_map(CUtensorMap* map, const void* data, const Extent (&extents)[kRank]) {
  cuuint64_t sizes[kRank], strides[kRank];
  cuuint32_t box[kRank], ones[kRank];
  for (int i = 0; i < kRank; ++i) {
    sizes[i] = cuuint64_t(extents[i].size);
    strides[i] = cuuint64_t(extents[i].stride) * sizeof(Element);
    box[i] = cuuint32_t(extents[i].box);
    ones[i] = 1;
  }
  const auto type = is_same_v<Element, cutlass::bfloat16_t> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
      map, type, kRank, const_cast<void*>(data), sizes, strides + 1, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return ffi::Error::Success();
  return ffi::Error::Internal("the copy engine cannot address an array: CUDA driver error " +
                              std::to_string(int(result)));
}

inline int log2_of(int64_t power) {
  int bits = 0;
  while (int64_t(1) << bits < power) ++bits;
  return bits;
}

// Launches the plan kernel, and after it, in the same stream, the persistent kernel.
template <class Element, int kHeadDim>
ffi::Error PackedHopper<Element, kHeadDim>::run(cudaStream_t stream, const Device& device, const Problem& problem,
                                                const Arguments& arguments) {
  Params p;
  TILEWRIGHT_RETURN_IF_ERROR(attribute<float>(arguments, "scale", &p.scale));
  const int64_t tokens = problem.tokens, heads = problem.heads, kv_heads = problem.kv_heads;
  const int64_t group = heads / kv_heads, page = problem.page_size, pages = problem.num_pages, dim = kHeadDim;
  p.each[kChunks] = int(kRows / group);
  p.each[kDecoded] = int(kColumns / group);
  const int64_t piece = std::min<int64_t>(page, kDecodedKeys);
  for (Queue queue : {kChunks, kDecoded}) {
    const Extent extents[] = {{dim, 1, kHalf}, {heads, dim, group}, {tokens, heads * dim, p.each[queue]}};
    TILEWRIGHT_RETURN_IF_ERROR(tensor_map<Element>(&p.queries[queue], input<Element>(arguments, 0), extents));
  }
  const int64_t row = kv_heads * dim;
  // The cache as [KV head, group of 8 rows, half, row, 64 columns], groups counted over all pages. TMA fills groups
  // behind the last page with zeros.
  const Extent extents[] = {{kHalf, 1, kHalf},
                            {kGroup, row, kGroup},
                            {kHalves, kHalf, kHalves},
                            {pages * (page / kGroup), kGroup * row, piece / kGroup},
                            {kv_heads, dim, 1}};
  TILEWRIGHT_RETURN_IF_ERROR(tensor_map<Element>(&p.key, input<Element>(arguments, 1), extents));
  TILEWRIGHT_RETURN_IF_ERROR(tensor_map<Element>(&p.value, input<Element>(arguments, 2), extents));
  p.table = input<int>(arguments, 3);
  p.out = output<Element>(arguments, 0);
  p.lse = output<float>(arguments, 1);
  p.plan = static_cast<Plan*>(arguments.workspace);
  p.sequences = int(problem.sequences);
  p.heads = int(heads);
  p.kv_heads = int(kv_heads);
  p.group = int(group);
  p.num_pages = int(pages);
  p.columns = int(problem.columns);
  p.page_bits = log2_of(page);
  p.piece_bits = log2_of(piece);
  p.left = int(std::min<int64_t>(problem.left, kFar));
  p.right = int(std::min<int64_t>(problem.right, kFar));
  p.inverse = int((65536 + group - 1) / group);

  const int blocks = int(device.multiprocessors);
  const int capacity = int(std::min<int64_t>(problem.columns * page, kFar));
  const PlanMemory memory = memory_of(problem);
  p.arrived = reinterpret_cast<int*>(static_cast<char*>(arguments.workspace) + memory.arrived);
  p.partials = reinterpret_cast<Partial*>(static_cast<char*>(arguments.workspace) + memory.partials);
  const PlanSizes sizes{int(tokens),      p.sequences, p.kv_heads,   capacity, p.each[kDecoded],
                        p.each[kChunks],  blocks,      kDecodedKeys, p.left,   p.right};
  const PlanLaunch plan = PlanLaunch::of(problem.sequences);
  const Pages arrays{reinterpret_cast<const char*>(input<Element>(arguments, 1)),
                     reinterpret_cast<const char*>(input<Element>(arguments, 2)),
                     p.table,
                     p.columns,
                     p.num_pages,
                     p.page_bits,
                     int(row * int64_t(sizeof(Element)))};
  // Each prefetching CTA compares its sequence with all others; above 1024 sequences that takes longer than the
  // prefetch saves.
  const unsigned fetching = p.sequences <= 1024 ? unsigned(p.sequences) : 0;
  TILEWRIGHT_RETURN_IF_ERROR(launch<plan_kernel>(dim3(1 + fetching), dim3(unsigned(plan.threads)), plan.bytes, stream,
                                                 input<int>(arguments, 5), input<int>(arguments, 4), sizes,
                                                 plan.lane_bits, p.plan, p.arrived, arrays));
  return launch<run_kernel<PackedHopper>>(dim3(unsigned(blocks)), dim3(kThreads), sizeof(SharedStorage), stream, p);
}

// The persistent kernel: one thread initializes the mbarriers, then each warp runs its role until its queue is empty.
template <class Element, int kHeadDim>
CUTLASS_DEVICE void PackedHopper<Element, kHeadDim>::operator()(const Params& p, SharedStorage& s) const {
#if defined(CUTLASS_ARCH_MMA_SM90A_ENABLED)
  const int group = cutlass::canonical_warp_group_idx();  // 0: copy and look_ahead, 1: decode, 2 and 3: prefill
  const int warp = cutlass::canonical_warp_idx_sync();
  if (warp == 0 && cute::elect_one_sync()) {
    for (const CUtensorMap* map : {&p.queries[0], &p.queries[1], &p.key, &p.value}) {
      cute::prefetch_tma_descriptor(map);
    }
    s.chunks.init();
    s.decoded.init();
    // TMA must see the initialized mbarriers, hence this fence; __syncthreads serves the other threads.
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kCopyRegisters>();
    switch (warp) {
      case 0: copy<kChunks>(p, s.chunks); break;
      case 1: copy<kDecoded>(p, s.decoded); break;
      case 2: look_ahead<kChunks>(p, s.chunks); break;
      default: look_ahead<kDecoded>(p, s.decoded);
    }
  } else if (group == 1) {
    cutlass::arch::warpgroup_reg_dealloc<kDecodeRegisters>();
    decode(p, s);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kChunkRegisters>();
    prefill(p, s, group - 2);
  }
#endif
}

}  // namespace tilewright::paged
