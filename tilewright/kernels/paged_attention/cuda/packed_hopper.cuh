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
//   warpgroups 2, 3, setmaxnreg 208   attend: S = Q K^T, O += P V for 64 rows each, P in registers
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
//   Q             [128 or 8, head_dim]  Side::query, shared memory
//   K, V          [128 or 64, head_dim] Side::unit, a ring in shared memory; one unit holds K or V of one KV block
//   S             `logits`              fp32 registers of a warpgroup, not yet scaled
//   P             `weights`             registers (chunks) or SharedStorage::weights (decode), not yet divided by l
//   O             `out`                 fp32 registers, not yet divided by l
//   m, l          `row_max`, `total`    m is the subtracted maximum, which may lag the true one (see kSlack)
//   lse           m * scale + log(l)    global memory, natural logarithm, -inf for a row that sees no key
//
// A plan kernel runs first: one of its CTAs sorts the sequences, longest first.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "packed_plan.cuh"
#include "tilewright/warpgroup.cuh"

namespace tilewright::paged {

using namespace cute;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kSlack = 8;  // m is raised only if P would exceed 2^8: rescaling O is rare

template <class Element>
// Two floats as a pair of 16-bit elements, `low` in the lower half.
CUTLASS_DEVICE uint32_t pack(float low, float high) {
  const float from[2] = {low, high};
  uint32_t packed;
  convert<Element, 2>(from, reinterpret_cast<Element*>(&packed));
  return packed;
}

// 2^exponent in one instruction; a subnormal result becomes 0.
CUTLASS_DEVICE float power_of_two(float exponent) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(exponent));
  return found;
}

// A mask of the lowest `count` bits, at most 32.
CUTLASS_DEVICE uint32_t first_bits(int count) {
  uint32_t found;
  asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(found) : "r"(count));
  return found;
}

CUTLASS_DEVICE float reciprocal(float number) {
  float found;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(number));
  return found;
}

// Transposes the 8 x 8 matrix of 16-bit elements that a warp holds.
CUTLASS_DEVICE uint32_t transposed(uint32_t part) {
  uint32_t found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(part));
  return found;
}

// True if `holds` for any thread of the calling warpgroup: a barrier with an OR reduction, on a named barrier that
// nothing else uses.
CUTLASS_DEVICE bool any_of_warpgroup(int barrier, bool holds) {
  int found;
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.s32 mine, %1, 0;\nbarrier.cta.red.or.pred.aligned any, %2, %3, mine;\n"
      "selp.s32 %0, 1, 0, any;\n}"
      : "=r"(found)
      : "r"(int(holds)), "r"(int(cutlass::arch::NamedBarrier::ReservedNamedBarrierCount) + barrier), "n"(kWarpgroup)
      : "memory");
  return found != 0;
}

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

template <class Element, int kHeadDim>
struct PackedHopper {
  static constexpr int kHalf = 64, kHalves = kHeadDim / kHalf;  // 64 columns are the 128 bytes of SWIZZLE_128B
  static constexpr int kRows = 128, kKeys = 128, kUnits = kHeadDim == 64 ? 8 : 4;
  // The decode ring holds 48 KB of K and V. More decode loads in flight delay the loads of chunks.
  static constexpr int kColumns = 8, kDecodedKeys = 64, kDecodedUnits = kHeadDim == 64 ? 6 : 3;
  static constexpr int kWeights = 4;  // buffers of P for decode; at most two are in use at a time
  static constexpr int kGroup = 8;    // rows of the swizzle atom, in which 16-byte chunks are permuted
  static constexpr int kThreads = 4 * kWarpgroup, kWarps = 4;
  static constexpr int kCopyRegisters = 32, kDecodeRegisters = 64, kChunkRegisters = 208;  // per thread, by setmaxnreg
  static_assert(kCopyRegisters + kDecodeRegisters + 2 * kChunkRegisters <= 512);
  enum NamedBarrier { kStep = 3, kVote, kPingPong };  // kStep, kVote: decode; kPingPong + {0, 1}: chunk warpgroups

  template <int kSize, int kDims, int kCount>
  using RowLayout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                           cute::Shape<Int<kSize>, Int<kDims>, Int<kCount>>{}));
  // K as groups of 8 keys with all their columns, so that one TMA copy brings a whole page.
  template <int kSize, int kCount>
  using KeyLayout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                           cute::Shape<Int<kSize>, Int<kHeadDim>, Int<kCount>>{}, Step<_2, _1, _3>{}));
  // The same shared memory read as V^T: head dims are the rows.
  template <int kSize, int kCount>
  using ValueLayout =
      decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                             cute::Shape<Int<kHeadDim>, Int<kSize>, Int<kCount>>{}, Step<_1, _2, _3>{}));
  using Warpgroups = cute::Layout<cute::Shape<_2, _1, _1>>;
  using MmaQK = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, cute::Shape<_64, Int<kKeys>, Int<kHeadDim>>, GMMA::Major::K,
                           GMMA::Major::K>(), Warpgroups{}));
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, cute::Shape<_64, Int<kHeadDim>, Int<kKeys>>, GMMA::Major::K,
                           GMMA::Major::MN>(), Warpgroups{}));
  using MmaKQ = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, cute::Shape<_64, Int<kColumns>, Int<kHeadDim>>, GMMA::Major::K,
                           GMMA::Major::K>()));
  using MmaVP = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, cute::Shape<_64, Int<kColumns>, Int<kDecodedKeys>>,
                           GMMA::Major::MN, GMMA::Major::K>()));
  static constexpr int kLogits = kKeys / 2;  // elements of S per thread
  static constexpr int kOut = kHeadDim / 2;  // elements of O per thread

  // Decode reads K and V once, which calls for EVICT_FIRST; measured, that hint made the loads slower.
  static constexpr uint64_t kHint = uint64_t(TMA::CacheHintSm90::EVICT_NORMAL);

  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;

  // A work item: a tile of a chunk, or the decode tokens of a sequence with all keys or a part of them, for one KV
  // head. Keys [low, high) are visible to some row, keys [all_low, all_high) to every row; all four are token positions
  // of the sequence.
  struct Item {
    int sequence, head, token, count, position, length;  // KV head; first token of `count`; its position; keys
    int low, high, all_low, all_high;
    int first, blocks;  // KV blocks [first, first + blocks); blocks < 0: the queue is empty
    int part, parts;    // split-KV of decode items: this part and the number of parts
    int slot;           // index of the first part's Partial; those of the other parts follow
  };

  // The KV blocks of an item that need masking or zeroed rows of V. Blocks are counted from the item's first one.
  struct Limits {
    int masked_before, masked_from;  // blocks before / from on: some row does not see all keys
    int cleared[2];                  // blocks with keys that no row sees; -1: none

    template <int kKeysOf>
    static CUTLASS_DEVICE Limits of(const Item& item) {
      const bool first = item.low % kKeysOf != 0, last = item.high % kKeysOf != 0;
      return {(item.all_low + kKeysOf - 1) / kKeysOf - item.first, item.all_high / kKeysOf - item.first,
              {first || (last && item.blocks == 1) ? 0 : -1, last && item.blocks > 1 ? item.blocks - 1 : -1}};
    }
    CUTLASS_DEVICE bool mask(int block) const { return block < masked_before || block >= masked_from; }
    CUTLASS_DEVICE bool clear(int block) const { return block == cleared[0] || block == cleared[1]; }
    CUTLASS_DEVICE int clears() const { return (cleared[0] >= 0) + (cleared[1] >= 0); }
  };

  // The shared memory of one queue. A unit is a ring slot that holds K or V of one KV block. Units are loaded in the
  // order of use: K0 V0 K1 V1 ..., or with kLate, where S of the next block is issued before PV, K0 K1 V0 K2 V1 ....
  template <int kRowsOf, int kQueriesOf, int kKeysOf, int kUnitsOf, int kReadersOf, bool kLateOf>
  struct Side {
    static constexpr int kRows = kRowsOf, kQueries = kQueriesOf, kKeys = kKeysOf, kUnits = kUnitsOf;
    static constexpr int kReaders = kReadersOf;   // warps that arrive on `empty` and `query_empty`
    static constexpr bool kLate = kLateOf;        // V of a block is loaded after K of the next block
    static constexpr int kPlaces = kQueries + 2;  // items: storing O, loaded, taken
    alignas(1024) Element query[kQueries][kRows * kHeadDim];
    alignas(1024) Element unit[kUnits][kKeys * kHeadDim];
    Item items[kPlaces];
    int present[kUnits];   // K units: bit i says that the i-th copied piece has a page
    volatile int loading;  // 1 until the copy warp has reached the end of the queue
    // query_full, full: the copy warp arrives with the transaction bytes. query_empty, empty: each of the kReaders
    // warps arrives. wanted: the copy warp asks look_ahead for the next item. ready: look_ahead has written that item.
    // to_clear: the copy warp has issued the load of a V unit with rows to zero. cleared: look_ahead has zeroed them.
    typename Full::ValueType query_full[kQueries], full[kUnits];
    typename Empty::ValueType query_empty[kQueries], empty[kUnits], wanted, ready;
    typename Empty::ValueType to_clear[kUnits], cleared[kUnits];  // slot, phase: of the count of zeroed units

    // `number` counts units since the kernel began; unit number % kUnits holds it, and the parity flips each round.
    static CUTLASS_DEVICE uint32_t phase_of(uint32_t number) { return number / kUnits % 2; }

    CUTLASS_DEVICE void wait(uint32_t number) { Full::wait(&full[number % kUnits], phase_of(number)); }

    CUTLASS_DEVICE void release(uint32_t number) {
      if (threadIdx.x % 32 == 0) Empty::arrive(&empty[number % kUnits]);
    }

    // Waits for a K unit and returns `present`.
    CUTLASS_DEVICE int wait_for_keys(uint32_t number) {
      wait(number);
      return present[number % kUnits];
    }

    // Waits until look_ahead has zeroed the rows of the number-th such V unit.
    CUTLASS_DEVICE void wait_cleared(uint32_t number) { Empty::wait(&cleared[number % kUnits], phase_of(number)); }

    CUTLASS_DEVICE void wait_for_query(int count) { Full::wait(&query_full[count % kQueries], count / kQueries % 2); }

    CUTLASS_DEVICE void release_query(int count) {
      if (threadIdx.x % 32 == 0) Empty::arrive(&query_empty[count % kQueries]);
    }

    CUTLASS_DEVICE void init() {
      loading = 1;
      for (int i = 0; i < kQueries; ++i) {
        Full::init(&query_full[i], 1);
        Empty::init(&query_empty[i], kReaders);
      }
      for (int i = 0; i < kUnits; ++i) {
        Full::init(&full[i], 1);
        Empty::init(&empty[i], kReaders);
        Empty::init(&to_clear[i], 1);
        Empty::init(&cleared[i], 1);
      }
      Empty::init(&wanted, 1);
      Empty::init(&ready, 1);
    }
  };
  using Chunks = Side<kRows, 1, kKeys, kUnits, 2 * kWarps, true>;
  using Decoded = Side<kColumns, 2, kDecodedKeys, kDecodedUnits, kWarps, false>;

  // The split-KV result of one part of the keys: O and l before normalisation, relative to the part's maximum m.
  struct Partial {
    float out[4 * kHalves][kWarpgroup];  // in register order: [element, thread]
    float row_max[kColumns], total[kColumns];
  };

  struct SharedStorage {
    Chunks chunks;
    Decoded decoded;
    alignas(1024) Element weights[kWeights][kColumns * kDecodedKeys];  // P of decode items
    alignas(128) uint4 results[2 * kWarps][64];  // staging of O, 16 rows of 64 bytes per warp
    float most[kWarps][kColumns], total[kWarps][kColumns];  // m and l of decode items, per warp
    int last;  // this CTA was the last to finish a part of its item
  };

  struct Params {
    CUtensorMap queries[2], key, value;  // TMA descriptors; Q has one for the box of each queue
    const int* table;                    // page table, [sequences, columns]
    Element* out;
    float* lse;
    Plan* plan;
    int* arrived;  // finished parts, at the slot of an item's first part
    Partial* partials;
    int sequences, heads, kv_heads, group, num_pages, columns;
    int page_bits;    // log2 of the page size in tokens
    int piece_bits;   // log2 of the keys of one TMA copy: min(page size, kDecodedKeys)
    int left, right;  // a query at position i sees keys [i - left, i + right]
    int each[2];      // max tokens of an item, by queue
    int inverse;      // x / group == x * inverse >> 16 for the rows x < 128 of an item
    float scale;
  };

  static Facts facts() { return {int64_t(sizeof(SharedStorage)), kThreads, 1}; }

  static int64_t workspace(const Problem& problem) { return memory_of(problem).bytes; }

  static PlanMemory memory_of(const Problem& problem) {
    return PlanMemory::of(problem.sequences, problem.kv_heads, problem.columns * problem.page_size, kDecodedKeys,
                          int64_t(sizeof(Partial)));
  }

  // A dimension of a TMA descriptor, innermost first: size and box in elements of that dimension, stride in elements of
  // the array.
  struct Extent {
    int64_t size, stride, box;
  };

  template <int kRank>
  static ffi::Error tensor_map(CUtensorMap* map, const void* data, const Extent (&extents)[kRank]) {
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

  static ffi::Error run(cudaStream_t stream, const Device& device, const Problem& problem, const Arguments& arguments) {
    Params p;
    TILEWRIGHT_RETURN_IF_ERROR(attribute<float>(arguments, "scale", &p.scale));
    const int64_t tokens = problem.tokens, heads = problem.heads, kv_heads = problem.kv_heads;
    const int64_t group = heads / kv_heads, page = problem.page_size, pages = problem.num_pages, dim = kHeadDim;
    p.each[kChunks] = int(kRows / group);
    p.each[kDecoded] = int(kColumns / group);
    const int64_t piece = std::min<int64_t>(page, kDecodedKeys);
    for (Queue queue : {kChunks, kDecoded}) {
      const Extent extents[] = {{dim, 1, kHalf}, {heads, dim, group}, {tokens, heads * dim, p.each[queue]}};
      TILEWRIGHT_RETURN_IF_ERROR(tensor_map(&p.queries[queue], input<Element>(arguments, 0), extents));
    }
    const int64_t row = kv_heads * dim;
    // The cache as [KV head, group of 8 rows, half, row, 64 columns], groups counted over all pages. TMA fills groups
    // behind the last page with zeros.
    const Extent extents[] = {{kHalf, 1, kHalf},
                              {kGroup, row, kGroup},
                              {kHalves, kHalf, kHalves},
                              {pages * (page / kGroup), kGroup * row, piece / kGroup},
                              {kv_heads, dim, 1}};
    TILEWRIGHT_RETURN_IF_ERROR(tensor_map(&p.key, input<Element>(arguments, 1), extents));
    TILEWRIGHT_RETURN_IF_ERROR(tensor_map(&p.value, input<Element>(arguments, 2), extents));
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
    p.page_bits = log2(page);
    p.piece_bits = log2(piece);
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

  static int log2(int64_t power) {
    int bits = 0;
    while (int64_t(1) << bits < power) ++bits;
    return bits;
  }

  CUTLASS_DEVICE void operator()(const Params& p, SharedStorage& s) const {
#if defined(CUTLASS_ARCH_MMA_SM90A_ENABLED)
    const int group = cutlass::canonical_warp_group_idx();  // 0: copy and look_ahead, 1: decode, 2 and 3: attend
    const int warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0 && cute::elect_one_sync()) {
      for (const CUtensorMap* map : {&p.queries[0], &p.queries[1], &p.key, &p.value}) {
        cute::prefetch_tma_descriptor(map);
      }
      s.chunks.init();
      s.decoded.init();
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
      attend(p, s, group - 2);
    }
#endif
  }

  // The look_ahead warp of a queue. It takes the next item when the copy warp arrives on `wanted`, and zeroes the rows
  // of V that no query sees: such memory may hold NaN, and 0 * NaN is NaN.
  template <Queue kQueue, class Side>
  static CUTLASS_DEVICE void look_ahead(const Params& p, Side& s) {
    const int lane = threadIdx.x % 32;
    const Segment* const sorted =
        reinterpret_cast<const Segment*>(p.plan + 1) + (kQueue == kChunks ? 0 : p.sequences + 2);
    uint32_t taken = 0, clears = 0;  // units of earlier items; V units zeroed so far
    int last_rows = Side::kKeys;     // visible rows in the last block of the previous item
    auto wait = [&](uint32_t unit) {
      // Wait first for `to_clear`, on which the copy warp arrives after it has issued this unit's load. Before that,
      // the parity of full[unit] may still be that of an earlier round.
      Empty::wait(&s.to_clear[clears % Side::kUnits], Side::phase_of(clears));
      s.wait(unit);
    };
    auto clear = [&](uint32_t unit, int from, int to) {
      // A warp zeroes four rows at a time: 8 lanes write the 128 bytes of a row's half, so swizzling does not matter.
      CUTLASS_PRAGMA_NO_UNROLL
      for (int row = from + lane / 8; row < to; row += 4) {
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < kHalves; ++half) {
          const int coord = ((row / kGroup * kHalves + half) * kGroup + row % kGroup) * kHalf + lane % 8 * 8;
          *reinterpret_cast<uint4*>(s.unit[unit % Side::kUnits] + coord) = make_uint4(0, 0, 0, 0);
        }
      }
    };
    // Zeroes up to the end of the last page with visible keys. TMA has already written zeros behind it.
    auto clear_behind = [&](uint32_t unit, int row) {
      clear(unit, row, min((((row - 1) >> p.page_bits) + 1) << p.page_bits, Side::kKeys));
    };
    // The async-proxy fence orders the zeros, written by the generic proxy, before the wgmma reads.
    auto cleared = [&] {
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (lane == 0) Empty::arrive(&s.cleared[clears % Side::kUnits]);
      ++clears;
    };
    for (int count = 0;; ++count) {
      int number = int(blockIdx.x);
      if (count > 0) {
        Empty::wait(&s.wanted, (count - 1) % 2);
        if (lane == 0) number = atomicAdd(&p.plan->next[kQueue], 1);
        number = __shfl_sync(~0u, number, 0);
      }
      Item item;
      item.blocks = -1;
      const int items = p.plan->items[kQueue];
      if (number < items) {
        // Find the last segment whose first item is <= number: directly if no segment is split, else by a 32-way search
        // over the sorted segments.
        int low = 0, size = p.plan->segments[kQueue];
        if (kQueue == kDecoded && items == size * p.kv_heads) {
          low = number / p.kv_heads;
          size = 1;
        }
        while (size > 1) {
          const int step = (size + 31) / 32, at = lane * step;
          const bool begun = at < size && sorted[low + at].first_item <= number;
          const int passed = (__popc(__ballot_sync(~0u, begun)) - 1) * step;
          low += passed;
          size = min(step, size - passed);
        }
        const Segment segment = sorted[low];
        // Tiles of a chunk that read the same keys are adjacent in the queue. The tile with the last tokens sees the
        // most keys and comes first.
        const int coord = number - segment.first_item;
        const int nth = kQueue == kChunks ? coord % segment.items : coord / p.kv_heads;
        const int offset = kQueue == kChunks ? (segment.items - 1 - nth) * p.each[kChunks] : 0;
        item.sequence = segment.sequence;
        item.head = kQueue == kChunks ? coord / segment.items : coord % p.kv_heads;
        item.token = segment.token + offset;
        item.count = min(segment.count - offset, p.each[kQueue]);
        item.position = segment.position + offset;
        item.length = segment.length;
        auto within = [&](int key) { return min(max(key, 0), segment.length); };
        const VisibleKeys visible_keys = VisibleKeys::of(item.position, item.count, item.length, p.left, p.right);
        item.low = visible_keys.low;
        item.high = visible_keys.high;
        item.all_low = within(item.position + item.count - (p.left + 1));
        item.all_high = within(item.position + p.right + 1);
        item.first = item.low / Side::kKeys;
        item.blocks = (item.high + Side::kKeys - 1) / Side::kKeys - item.first;
        if constexpr (kQueue == kDecoded) {
          item.part = nth;
          item.parts = segment.items;
          item.slot = segment.slot * p.kv_heads + item.head * segment.items;
          if (item.parts > 1) {
            const int each = (item.blocks + item.parts - 1) / item.parts;
            item.first += nth * each;
            item.blocks = min(item.blocks - nth * each, each);
            item.low = max(item.low, item.first * Side::kKeys);
            item.high = min(item.high, (item.first + item.blocks) * Side::kKeys);
          }
        }
      }
      if (lane == 0) {
        s.items[count % Side::kPlaces] = item;
        Empty::arrive(&s.ready);
      }
      if (last_rows < Side::kKeys) {
        wait(taken - 1);
        clear_behind(taken - 1, last_rows);
        cleared();
      }
      if (item.blocks < 0) return;
      const Limits limits = Limits::template of<Side::kKeys>(item);
      const int end = item.high - (item.first + item.blocks - 1) * Side::kKeys;
      if (limits.cleared[0] >= 0) {
        const uint32_t values = taken + (item.blocks == 1 || !Side::kLate ? 1 : 2);
        wait(values);
        clear(values, 0, item.low % Side::kKeys);
        if (item.blocks == 1) clear_behind(values, end);
        cleared();
      }
      last_rows = limits.cleared[1] >= 0 ? end : Side::kKeys;
      taken += 2 * item.blocks;
    }
  }

  // The page that holds a key of a sequence. Columns outside the table, and invalid entries, give num_pages: TMA fills
  // a page beyond the cache with zeros.
  static CUTLASS_DEVICE int page_of(const Params& p, int sequence, int key, int columns) {
    const int column = key >> p.page_bits;
    const int page = column < columns ? p.table[int64_t(sequence) * p.columns + column] : p.num_pages;
    return unsigned(page) < unsigned(p.num_pages) ? page : p.num_pages;
  }

  // The index, over all pages, of the group of 8 rows that holds a key of a page.
  static CUTLASS_DEVICE int group_of(const Params& p, int page, int key) {
    return (page << (p.page_bits - 3)) + (key & ((1 << p.page_bits) - 1)) / kGroup;
  }

  template <Queue kQueue, class Side>
  static CUTLASS_DEVICE void copy(const Params& p, Side& s) {  // one warp: TMA loads of a queue's items
    // The copy warp asks for the next item when this many KV blocks of the current one are left.
    constexpr int kAhead = 5;
    const int lane = threadIdx.x % 32, copies = Side::kKeys >> p.piece_bits;
    const int part = (lane & (copies - 1)) << p.piece_bits;
    uint32_t number = 0, clears = 0;  // units issued so far; V units to be zeroed so far
    for (int count = 0;; ++count) {
      Empty::wait(&s.ready, count % 2);
      const Item& item = s.items[count % Side::kPlaces];
      const Limits limits = Limits::template of<Side::kKeys>(item);
      const int blocks = item.blocks, first = item.first, sequence = item.sequence, head = item.head;
      // Do not load pages that no row sees.
      const int columns = min(p.columns, (item.high + (1 << p.page_bits) - 1) >> p.page_bits);
      auto tile_coord_of = [&](int block) { return (first + block) * Side::kKeys + part; };
      auto load = [&](const CUtensorMap& map, int block, int page) {
        const int unit = number % Side::kUnits;
        Empty::wait(&s.empty[unit], Side::phase_of(number) ^ 1);
        ++number;
        const uint32_t there = __ballot_sync(~0u, page < p.num_pages) & ((1 << copies) - 1);
        if (lane == 0) {
          s.present[unit] = there;
          Full::arrive_and_expect_tx(&s.full[unit], sizeof(s.unit[unit]));
        }
        __syncwarp();
        if (lane < copies) {
          SM90_TMA_LOAD_5D::copy(&map, &s.full[unit], kHint, s.unit[unit] + part * kHeadDim, 0, 0, 0,
                                 group_of(p, page, tile_coord_of(block)), head);
        }
      };
      auto load_values = [&](int block, int page) {
        load(p.value, block, page);
        if (!limits.clear(block)) return;
        if (lane == 0) Empty::arrive(&s.to_clear[clears % Side::kUnits]);
        ++clears;
      };
      int page = 0, page_after = 0;
      if (blocks > 0) {
        page = page_of(p, sequence, tile_coord_of(0), columns);
        page_after = page_of(p, sequence, tile_coord_of(1), columns);
        load(p.key, 0, page);
      }
      const int coord = count % Side::kQueries;
      Empty::wait(&s.query_empty[coord], (count / Side::kQueries + 1) % 2);
      if (lane == 0) {
        if (blocks > 0) {
          Full::arrive_and_expect_tx(&s.query_full[coord], p.each[kQueue] * p.group * kHeadDim * sizeof(Element));
          for (int i = 0; i < kHalves; ++i) {
            SM90_TMA_LOAD_3D::copy(&p.queries[kQueue], &s.query_full[coord], kHint,
                                   s.query[coord] + i * Side::kRows * kHalf, i * kHalf, head * p.group, item.token);
          }
        } else {
          Empty::arrive(&s.query_full[coord]);
        }
        if (0 <= blocks && blocks <= kAhead) Empty::arrive(&s.wanted);
      }
      if (blocks < 0) {
        if (lane == 0) s.loading = 0;
        return;
      }
      for (int block = 1; block < blocks; ++block) {
        const int page_before = page;
        page = page_after;
        page_after = page_of(p, sequence, tile_coord_of(block + 1), columns);
        if constexpr (Side::kLate) load(p.key, block, page);
        load_values(block - 1, page_before);
        if constexpr (!Side::kLate) load(p.key, block, page);
        if (block == blocks - kAhead && lane == 0) Empty::arrive(&s.wanted);
      }
      if (blocks > 0) load_values(blocks - 1, page);
    }
  }

  // m in units of `scale`, or 0 for a row that has seen no key, so that -inf - (-inf) does not occur.
  static CUTLASS_DEVICE float subtrahend(float row_max, float scale) {
    return row_max == -INFINITY ? 0.0f : row_max * scale;
  }

  // Sets m to `most` and returns the factor by which l and O of the row (decode: column) are rescaled.
  static CUTLASS_DEVICE float raise(float& row_max, float most, float scale2) {
    // Return exactly 1 if m is unchanged: the compiler may fuse the multiplication and the difference into one FMA,
    // whose single rounding can give another value.
    const float shrink = row_max == most ? 1.0f : power_of_two(row_max * scale2 - subtrahend(most, scale2));
    row_max = most;
    return shrink;
  }

  static CUTLASS_DEVICE float log_sum(float row_max, float total, float scale) {
    return total == 0 ? -INFINITY : subtrahend(row_max, scale) + logf(total);
  }

  // The token of an item's row: row r is token r / group, query head r % group.
  static CUTLASS_DEVICE int token_of(const Params& p, int row) { return (row * p.inverse) >> 16; }

  // The index of an item's first row in [tokens, heads]; row_of gives that of another row, `first` that of row 0.
  static CUTLASS_DEVICE int64_t first_row_of(const Params& p, const Item& item) {
    return int64_t(item.token) * p.heads + item.head * p.group;
  }

  static CUTLASS_DEVICE int64_t row_of(const Params& p, int64_t first, int row) {
    const int token = token_of(p, row);
    return first + token * p.heads + (row - token * p.group);
  }

  // Chunk items: two warpgroups, each with 64 of the 128 rows. `half` is 0 or 1.
  static CUTLASS_DEVICE void attend(const Params& p, SharedStorage& storage, int half) {
    Chunks& s = storage.chunks;
    const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
    const int first_row = half * 64 + 16 * warp + lane / 4;  // the thread's other row is 8 below
    // Token and offset in [tokens, heads] of the thread's two rows, relative to the item's first row.
    const int tokens[2] = {token_of(p, first_row), token_of(p, first_row + 8)};
    const int places[2] = {int(row_of(p, 0, first_row)), int(row_of(p, 0, first_row + 8))};
    // Staging of O: where stmatrix of this lane writes its 16-byte chunk, and where the lane reads a chunk of its row.
    // Chunks of a row are permuted against bank conflicts.
    uint4* const results = storage.results[kWarps * half + warp];
    const int stored = lane % 8 * 4 + (lane / 8 ^ lane % 8 / 2), loaded = lane / 4 * 4 + (lane % 4 ^ lane / 8);
    const float scale2 = p.scale * kLog2e, slack = kSlack / scale2;

    MmaQK mma_qk;
    MmaPV mma_pv;
    const auto qk = mma_qk.get_thread_slice(half * kWarpgroup);
    const auto pv = mma_pv.get_thread_slice(half * kWarpgroup);
    Tensor queries = qk.partition_fragment_A(make_tensor(make_smem_ptr(s.query[0]), RowLayout<kRows, kHeadDim, 1>{}));
    Tensor keys = qk.partition_fragment_B(make_tensor(make_smem_ptr(s.unit[0]), KeyLayout<kKeys, kUnits>{}));
    Tensor values = pv.partition_fragment_B(make_tensor(make_smem_ptr(s.unit[0]), ValueLayout<kKeys, kUnits>{}));
    Tensor logits = partition_fragment_C(mma_qk, cute::Shape<Int<kRows>, Int<kKeys>>{});
    Tensor out = partition_fragment_C(mma_pv, cute::Shape<Int<kRows>, Int<kHeadDim>>{});
    Tensor weights = make_tensor<Element>(partition_shape_A(mma_pv, cute::Shape<Int<kRows>, Int<kKeys>>{}));
    static_assert(decltype(size(logits))::value == kLogits && decltype(size(weights))::value == kLogits);
    static_assert(decltype(size(out))::value == kOut);
    mma_pv.accumulate_ = GMMA::ScaleOut::One;
    float row_max[2], subtracted[2], total[2], shrink[2];  // m, m * scale2, l and the rescale factor of two rows
    int limit[2];  // bits of m + slack as an int, or INT_MIN if that is negative
    const int all_present = (1 << (kKeys >> p.piece_bits)) - 1;
    uint32_t taken = 0, clears = 0;  // units consumed; zeroed V units consumed
    if (half == 1) cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, kPingPong);  // half 0 goes first

    for (int count = 0;; ++count) {
      s.wait_for_query(count);
      const Item& item = s.items[count % Chunks::kPlaces];
      const int blocks = item.blocks;
      if (blocks < 0) return;
      const Limits limits = Limits::template of<kKeys>(item);
      if (item.count * p.group <= 64 * half) {  // this warpgroup has no row: only release the units
        s.release_query(count);
        for (int unit = 0; unit < 2 * blocks; ++unit) {
          s.wait(taken + unit);
          s.release(taken + unit);
        }
        taken += 2 * blocks;
        clears += limits.clears();
        continue;
      }

      auto start_logits = [&](uint32_t number) {
        warpgroup_fence_operand(logits);
        warpgroup_arrive();
        mma_qk.accumulate_ = GMMA::ScaleOut::Zero;
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < size<2>(queries); ++k) {
          cute::gemm(mma_qk, queries(_, _, k, 0), keys(_, _, k, number % kUnits), logits);
          mma_qk.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
      };
      auto start_out = [&](int block, uint32_t number) {
        const int unit = number % kUnits;
        s.wait(number);
        if (limits.clear(block)) s.wait_cleared(clears++);
        warpgroup_fence_operand(weights);
        warpgroup_fence_operand(out);
        warpgroup_arrive();
        cute::gemm(mma_pv, weights, values(_, _, _, unit), out);
        warpgroup_commit_batch();
      };
      // Masks S of a block and turns S into P. Returns true if O must be rescaled by `shrink`. A small increase of the
      // maximum does not rescale, since P may exceed 1 (kSlack).
      auto softmax = [&](int block, int present, auto first) -> bool {
        if (limits.mask(block) || present != all_present) {
          const int start = (item.first + block) * kKeys;
          // One bit for each key of the thread, which holds two of every 8 neighbouring keys. The bits of missing pages
          // are 0.
          uint32_t there = ~0u;
          if (present != all_present) {
            const int bits = p.piece_bits - 2;
            CUTLASS_PRAGMA_NO_UNROLL
            for (int piece = 0; piece < kKeys >> p.piece_bits; ++piece) {
              if (((present >> piece) & 1) == 0) there &= ~(first_bits(1 << bits) << (piece << bits));
            }
          }
          auto bits_before = [&](int key) {
            const int behind = key - lane % 4 * 2;  // keys from the thread's first key on
            return first_bits(max((behind >> 3) * 2 + min(behind & 7, 2), 0));
          };
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 2; ++r) {
            const int position = item.position + tokens[r] - start;
            const int low = max(position - p.left, -start);
            const int high = min(position + p.right + 1, item.length - start);
            const uint32_t visible_keys = there & bits_before(high) & ~bits_before(low);
            CUTLASS_PRAGMA_UNROLL
            for (int k = 0; k < kLogits / 2; ++k) {
              if ((visible_keys & (1u << k)) == 0) logits(k / 2 * 4 + 2 * r + k % 2) = -INFINITY;
            }
          }
        }
        // Non-negative floats are ordered as their bits are, so __vimax3_s32 takes the maximum of three in one
        // instruction. Where m + slack is negative, limit is INT_MIN and the exact test below decides.
        bool beyond = false;
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < (first ? 0 : 2); ++r) {
          int most[2] = {INT_MIN, INT_MIN};
          CUTLASS_PRAGMA_UNROLL
          for (int i = 2 * r; i < kLogits; i += 4) {
            int& one = most[i / 4 % 2];
            one = __vimax3_s32(one, __float_as_int(logits(i)), __float_as_int(logits(i + 1)));
          }
          beyond = beyond || max(most[0], most[1]) > limit[r];
        }
        bool raised = false;
        if (first || __any_sync(~0u, beyond)) {  // the first block of an item has no m yet
          float most[2];
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 2; ++r) {
            most[r] = logits(2 * r);
            CUTLASS_PRAGMA_UNROLL
            for (int i = 2 * r; i < kLogits; i += 4) most[r] = fmaxf(most[r], fmaxf(logits(i), logits(i + 1)));
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
          }
          raised = __any_sync(~0u, most[0] > row_max[0] + slack || most[1] > row_max[1] + slack);
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 2; ++r) {
            // Decide for each row alone: padding rows must not change the result of others.
            const float now = most[r] > row_max[r] + slack ? most[r] : row_max[r];
            shrink[r] = raise(row_max[r], now, scale2);
            subtracted[r] = subtrahend(now, scale2);
            limit[r] = now + slack >= 0 ? __float_as_int(now + slack) : INT_MIN;
            total[r] *= shrink[r];
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 2 * r; i < kLogits; i += 4) {
            CUTLASS_PRAGMA_UNROLL
            for (int j = i; j < i + 2; ++j) {
              logits(j) = power_of_two(fmaf(logits(j), scale2, -subtracted[r]));
              total[r] += logits(j);
            }
          }
        }
        return raised;
      };
      auto narrow = [&] { convert<Element, kLogits>(logits.data(), weights.data()); };

      clear(out);
      row_max[0] = row_max[1] = -INFINITY;
      subtracted[0] = subtracted[1] = total[0] = total[1] = 0;
      limit[0] = limit[1] = INT_MIN;
      const bool both = item.count * p.group > 64;
      if (blocks == 0) {
        s.release_query(count);
      } else {
        int present = s.wait_for_keys(taken);
        start_logits(taken);
        warpgroup_wait<0>();
        warpgroup_fence_operand(logits);
        s.release(taken);
        if (blocks == 1) s.release_query(count);
        softmax(0, present, true_type{});
        narrow();
        CUTLASS_PRAGMA_NO_UNROLL
        for (int block = 1; block < blocks; ++block) {
          const uint32_t of_keys = ++taken, of_values = ++taken;
          present = s.wait_for_keys(of_keys);
          // Ping-pong: one warpgroup issues its wgmmas while the other computes its softmax. The other arrives on this
          // barrier once its S is complete.
          if (both) cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, uint32_t(kPingPong + half));
          start_logits(of_keys);
          start_out(block - 1, of_values);
          warpgroup_wait<1>();
          if (both) cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, uint32_t(kPingPong + 1 - half));
          warpgroup_fence_operand(logits);
          s.release(of_keys);
          if (block + 1 == blocks) s.release_query(count);
          const bool raised = softmax(block, present, false_type{});
          warpgroup_wait<0>();
          warpgroup_fence_operand(out);
          s.release(of_values);
          narrow();
          if (raised) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kOut; ++i) out(i) *= shrink[i / 2 % 2];
          }
        }
        start_out(blocks - 1, ++taken);
        warpgroup_wait<0>();
        warpgroup_fence_operand(out);
        s.release(taken);
        ++taken;
      }

      const int rows = item.count * p.group;
      const int64_t base = first_row_of(p, item);
      float weight[2];
      Element* to[2];
      CUTLASS_PRAGMA_UNROLL
      for (int distance = 1; distance <= 2; distance *= 2) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) total[r] += __shfl_xor_sync(~0u, total[r], distance);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        weight[r] = total[r] == 0 ? 0.0f : reciprocal(total[r]);
        to[r] = p.out + (base + places[r]) * kHeadDim + lane % 4 * 8;
      }
      // Store O through shared memory, so that a row gets 64 bytes per store: segments below 32 bytes were much slower.
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOut; i += 16) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          uint32_t words[4];
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < 4; ++k) {
            words[k] = pack<Element>(out(i + 4 * k + 2 * r) * weight[r], out(i + 4 * k + 2 * r + 1) * weight[r]);
          }
          SM90_U32x4_STSM_N::copy(words[0], words[1], words[2], words[3],
                                  reinterpret_cast<uint128_t&>(results[32 * r + stored]));
        }
        __syncwarp();
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const uint4 chunk = results[32 * r + loaded];
          if (first_row + 8 * r < rows) *reinterpret_cast<uint4*>(to[r] + 2 * i) = chunk;
        }
        __syncwarp();
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (lane % 4 != 0 || first_row + 8 * r >= rows) continue;
        p.lse[base + places[r]] = log_sum(row_max[r], total[r], p.scale);
      }
    }
  }

  // Stores the O, m and l that the decode warpgroup holds in registers as one split-KV part.
  template <class Out>
  static CUTLASS_DEVICE void store_part(Partial& part, const Out& out, const float (&row_max)[2],
                                        const float (&total)[2]) {
    const int thread = threadIdx.x % kWarpgroup;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4 * kHalves; ++i) part.out[i][thread] = out(i);
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < 2; ++c) {
      if (thread >= 4) continue;
      part.row_max[2 * thread + c] = row_max[c];
      part.total[2 * thread + c] = total[c];
    }
  }

  template <class Out>
  static CUTLASS_DEVICE void add_part(const Partial& part, Out& out, float (&row_max)[2], float (&total)[2],
                                      float scale2) {
    const int thread = threadIdx.x % kWarpgroup;
    float most[2], of_part[2], more[4 * kHalves];  // all loads are issued before the first use
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < 2; ++c) {
      most[c] = __ldcg(&part.row_max[thread % 4 * 2 + c]);
      of_part[c] = __ldcg(&part.total[thread % 4 * 2 + c]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4 * kHalves; ++i) more[i] = __ldcg(&part.out[i][thread]);
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < 2; ++c) {
      const float shrink = raise(row_max[c], fmaxf(row_max[c], most[c]), scale2);
      const float weight = raise(most[c], row_max[c], scale2);
      total[c] = total[c] * shrink + of_part[c] * weight;
      CUTLASS_PRAGMA_UNROLL
      for (int i = c; i < 4 * kHalves; i += 2) out(i) = out(i) * shrink + more[i] * weight;
    }
  }

  // Decode items: one warpgroup. An item's rows are the columns of S^T [64 keys, 8] and O^T [head_dim, 8].
  static CUTLASS_DEVICE void decode(const Params& p, SharedStorage& storage) {
    Decoded& s = storage.decoded;
    const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
    const int column = lane % 4 * 2;             // the thread also holds column + 1
    const int first_key = 16 * warp + lane / 4;  // key within the block; the thread also holds first_key + 8
    const float scale2 = p.scale * kLog2e, slack = kSlack / scale2;
    const int all_present = (1 << (kDecodedKeys >> p.piece_bits)) - 1;

    MmaKQ mma_kq;
    MmaVP mma_vp;
    const auto kq = mma_kq.get_thread_slice(0);
    const auto vp = mma_vp.get_thread_slice(0);
    Tensor keys = kq.partition_fragment_A(
        make_tensor(make_smem_ptr(s.unit[0]), KeyLayout<kDecodedKeys, kDecodedUnits>{}));
    Tensor values = vp.partition_fragment_A(
        make_tensor(make_smem_ptr(s.unit[0]), ValueLayout<kDecodedKeys, kDecodedUnits>{}));
    Tensor queries = kq.partition_fragment_B(
        make_tensor(make_smem_ptr(s.query[0]), RowLayout<kColumns, kHeadDim, Decoded::kQueries>{}));
    Tensor weights = vp.partition_fragment_B(
        make_tensor(make_smem_ptr(storage.weights[0]), RowLayout<kColumns, kDecodedKeys, kWeights>{}));
    Tensor logits = partition_fragment_C(mma_kq, cute::Shape<Int<kDecodedKeys>, Int<kColumns>>{});
    Tensor out = partition_fragment_C(mma_vp, cute::Shape<Int<kHeadDim>, Int<kColumns>>{});
    static_assert(decltype(size(logits))::value == 4 && decltype(size(out))::value == 4 * kHalves);
    mma_vp.accumulate_ = GMMA::ScaleOut::One;
    float row_max[2], total[2], shrink[2];
    uint32_t taken = 0, clears = 0;  // units consumed; zeroed V units consumed

    for (int count = 0;; ++count) {
      s.wait_for_query(count);
      const Item& item = s.items[count % Decoded::kPlaces];
      const int blocks = item.blocks;
      if (blocks < 0) return;
      const Limits limits = Limits::template of<kDecodedKeys>(item);
      const uint32_t earlier = taken / 2;  // KV blocks of earlier items
      // P is a ring: warps that lag may still have wgmmas that read P of the previous block.
      auto weights_of = [&](int block) { return (earlier + block) % kWeights; };

      auto start_logits = [&](uint32_t number) {
        const int unit = number % kDecodedUnits;
        warpgroup_fence_operand(logits);
        warpgroup_arrive();
        mma_kq.accumulate_ = GMMA::ScaleOut::Zero;
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < size<2>(keys); ++k) {
          cute::gemm(mma_kq, keys(_, _, k, unit), queries(_, _, k, count % Decoded::kQueries), logits);
          mma_kq.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
      };
      auto start_out = [&](int block, uint32_t number) {
        const int unit = number % kDecodedUnits;
        s.wait(number);
        if (limits.clear(block)) s.wait_cleared(clears++);
        warpgroup_fence_operand(out);
        warpgroup_arrive();
        cute::gemm(mma_vp, values(_, _, _, unit), weights(_, _, _, weights_of(block)), out);
        warpgroup_commit_batch();
      };
      // Turns S into P with the m of the earlier blocks and writes P to shared memory. Only the vote, after all threads
      // have written, tells whether some logit exceeds m + slack; m is then raised and P is written again.
      auto softmax = [&](int block, int present) -> bool {
        if (limits.mask(block) || present != all_present) {
          const int start = (item.first + block) * kDecodedKeys;
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < 2; ++c) {
            const int position = item.position + token_of(p, column + c) - start;
            const int low = max(position - p.left, -start);
            const int high = min(position + p.right + 1, item.length - start);
            CUTLASS_PRAGMA_UNROLL
            for (int r = 0; r < 2; ++r) {
              const int key = first_key + 8 * r;
              if (key < low || key >= high || ((present >> (key >> p.piece_bits)) & 1) == 0) {
                logits(2 * r + c) = -INFINITY;
              }
            }
          }
        }
        auto write = [&](float (&found)[4]) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 4; ++i) {
            found[i] = power_of_two(fmaf(logits(i), scale2, -subtrahend(row_max[i % 2], scale2)));
          }
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 2; ++r) {
            // After the transpose a lane holds two neighbouring keys of column lane / 4.
            const uint32_t word = transposed(pack<Element>(found[2 * r], found[2 * r + 1]));
            const int chunk = (2 * warp + r) ^ (lane / 4);
            Element* const row = storage.weights[weights_of(block)] + lane / 4 * kDecodedKeys;
            *reinterpret_cast<uint32_t*>(row + chunk * 8 + lane % 4 * 2) = word;
          }
          cutlass::arch::fence_view_async_shared();
        };
        float found[4], most[2];
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 2; ++c) most[c] = fmaxf(logits(c), logits(2 + c));
        write(found);
        const bool raised = any_of_warpgroup(kVote, most[0] > row_max[0] + slack || most[1] > row_max[1] + slack);
        if (raised) {
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < 2; ++c) {
            CUTLASS_PRAGMA_UNROLL
            for (int distance = 4; distance < 32; distance *= 2) {
              most[c] = fmaxf(most[c], __shfl_xor_sync(~0u, most[c], distance));
            }
            if (lane < 4) storage.most[warp][column + c] = most[c];
          }
          sync_warpgroup(kStep);
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < 2; ++c) {
            CUTLASS_PRAGMA_UNROLL
            for (int w = 0; w < kWarps; ++w) most[c] = fmaxf(most[c], storage.most[w][column + c]);
            shrink[c] = raise(row_max[c], most[c] > row_max[c] + slack ? most[c] : row_max[c], scale2);
            total[c] *= shrink[c];
          }
          write(found);
          sync_warpgroup(kStep);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) total[i % 2] += found[i];
        return raised;
      };

      clear(out);
      row_max[0] = row_max[1] = -INFINITY;
      total[0] = total[1] = 0;
      // Each unit is released as soon as it has been read. Overlapping the wgmmas of two blocks would hold units longer
      // and leave fewer loads in flight.
      if (blocks == 0) s.release_query(count);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int block = 0; block < blocks; ++block) {
        const int present = s.wait_for_keys(taken);
        start_logits(taken);
        warpgroup_wait<0>();
        warpgroup_fence_operand(logits);
        if (block + 1 == blocks) s.release_query(count);
        // Throttle the decode loads: K is released only after softmax, and while chunks still load, K of every other
        // block only when PV has been issued. With fewer decode loads in flight, the loads of chunks arrive sooner.
        const bool yielding = taken / 2 % 2 == 0 && storage.chunks.loading;
        const bool raised = softmax(block, present);
        if (!yielding) s.release(taken);
        if (raised) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 4 * kHalves; ++i) out(i) *= shrink[i % 2];
        }
        start_out(block, taken + 1);
        if (yielding) s.release(taken);
        ++taken;
        warpgroup_wait<0>();
        warpgroup_fence_operand(out);
        s.release(taken);
        ++taken;
      }
      if (blocks > 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 2; ++c) {
          CUTLASS_PRAGMA_UNROLL
          for (int distance = 4; distance < 32; distance *= 2) total[c] += __shfl_xor_sync(~0u, total[c], distance);
          if (lane < 4) storage.total[warp][column + c] = total[c];
        }
        // No barrier is needed after the reads: storage.total is next written after a barrier of the next item that has
        // keys.
        sync_warpgroup(kStep);
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 2; ++c) {
          total[c] = 0;
          CUTLASS_PRAGMA_UNROLL
          for (int w = 0; w < kWarps; ++w) total[c] += storage.total[w][column + c];
        }
      }

      if (item.parts > 1) {
        Partial* const all = p.partials + item.slot;
        store_part(all[item.part], out, row_max, total);
        __threadfence();
        sync_warpgroup(kStep);
        if (thread == 0) storage.last = atomicAdd(p.arrived + item.slot, 1) == item.parts - 1;
        sync_warpgroup(kStep);
        if (!storage.last) continue;
        // All parts have arrived. The last CTA combines them in a fixed order, so the result is deterministic.
        __threadfence();
        clear(out);
        row_max[0] = row_max[1] = -INFINITY;
        total[0] = total[1] = 0;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int part = 0; part < item.parts; ++part) add_part(all[part], out, row_max, total, scale2);
      }

      const int64_t base = first_row_of(p, item);
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < 2; ++c) {
        if (column + c >= item.count * p.group) continue;
        const int64_t to = row_of(p, base, column + c);
        if (thread < 4) p.lse[to] = log_sum(row_max[c], total[c], p.scale);
        const float weight = total[c] == 0 ? 0.0f : 1 / total[c];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2 * kHalves; ++i) {
          p.out[to * kHeadDim + i / 2 * kHalf + first_key + i % 2 * 8] = Element(out(2 * i + c) * weight);
        }
      }
    }
  }
};

}  // namespace tilewright::paged
