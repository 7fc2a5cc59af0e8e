// Attention of packed queries over pages for compute capability 9.0a, where chunks and decoded tokens come in one call.
//
// Chunks wait for the tensor cores, decoded tokens for memory. So a block, one for each multiprocessor, works on one of
// each at any time, and takes the next of each from a queue when it is done with one:
//
// - Two warpgroups have up to 128 rows of a chunk, 64 each: up to 128 / group tokens, each with all heads that share a
//   key head. The product QKᵀ of the next block of keys runs beside PV of this one (Shah et al., "FlashAttention-3",
//   2024, section 3.2).
// - One has the tokens of a sequence that has few, at most eight rows. It computes the transposed products, keys by
//   rows, with `mma`, whose least shape is eight columns where that of `wgmma` is 64 rows. Each of its warps has every
//   fourth piece of 16 keys and statistics of its own; they meet once for a sequence, to be added up.
// - The warps of the fourth copy and plan: one of each for each queue.
//
// Sequences are sorted before, in a launch of one block: the longest come first.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm80.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "tilewright/warpgroup.cuh"

namespace tilewright::paged {

using namespace cute;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kSlack = 8;    // how far, as a power of two, weights may be beyond 1
constexpr int kFar = 1 << 29;  // beyond every position, so that sums of three stay in 32 bits

// Tokens of one sequence, or of none.
struct Segment {
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
constexpr int kPlanEach = (kMaxSequences + 2 + kPlanThreads) / kPlanThreads;

// Sums or greatest values of all elements up to each.
template <class Combine>
__device__ void scan(int* values, int size, const Combine& combine) {
  for (int distance = 1; distance < size; distance *= 2) {
    int found[kPlanEach];
#pragma unroll
    for (int k = 0; k < kPlanEach; ++k) {
      const int i = int(threadIdx.x) + k * kPlanThreads;
      if (i < size) found[k] = i < distance ? values[i] : combine(values[i], values[i - distance]);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kPlanEach; ++k) {
      const int i = int(threadIdx.x) + k * kPlanThreads;
      if (i < size) values[i] = found[k];
    }
    __syncthreads();
  }
}

struct PlanSizes {
  int tokens, sequences, kv_heads, capacity;
  int most_decoded;  // tokens of a sequence whose rows are few
  int each;          // tokens of a tile of a chunk
  int blocks;        // that take an item each without asking
};

// One block. Boundaries that do not rise are made to; tokens before and behind those of the sequences get segments
// without keys.
static __global__ void __launch_bounds__(kPlanThreads) plan_kernel(const int* cum, const int* lengths, PlanSizes p,
                                                                   Plan* plan) {
  extern __shared__ int memory[];
  __shared__ int counts[2];
  const int segments = p.sequences + 2;
  int* const bounds = memory;                 // [segments + 1]
  int* const keys = bounds + segments + 1;    // of sorting: the length, and in the last bit which queue
  int* const tiles = keys + segments;         // of chunks, sorted
  int* const ranks = tiles + segments;
  Segment* const sorted = reinterpret_cast<Segment*>(plan + 1);
  const int first = int(threadIdx.x);
  auto tiles_of = [&](int i) { return (bounds[i + 1] - bounds[i] + p.each - 1) / p.each; };

  if (first < 2) counts[first] = 0;
  for (int i = first; i <= segments; i += kPlanThreads) {
    bounds[i] = i == 0 ? 0 : i == segments ? p.tokens : min(max(cum[i - 1], 0), p.tokens);
  }
  __syncthreads();
  scan(bounds, segments + 1, [](int a, int b) { return max(a, b); });
  for (int i = first; i < segments; i += kPlanThreads) {
    const int count = bounds[i + 1] - bounds[i];
    const bool owned = i > 0 && i <= p.sequences;
    const int length = owned ? min(max(lengths[i - 1], 0), kFar) : 0;
    keys[i] = count == 0 ? -1 : 2 * length + (count <= p.most_decoded ? kDecoded : kChunks);
  }
  __syncthreads();
  for (int i = first; i < segments; i += kPlanThreads) {
    const int mine = keys[i];
    if (mine < 0) continue;
    int rank = 0;
    for (int j = 0; j < segments; ++j) {
      const int other = keys[j];
      rank += other >= 0 && ((other ^ mine) & 1) == 0 && (other > mine || (other == mine && j < i));
    }
    ranks[i] = rank;
    if ((mine & 1) == kChunks) tiles[rank] = tiles_of(i);
    atomicAdd(&counts[mine & 1], 1);
  }
  __syncthreads();
  scan(tiles, counts[kChunks], [](int a, int b) { return a + b; });
  for (int i = first; i < segments; i += kPlanThreads) {
    if (keys[i] < 0) continue;
    const int queue = keys[i] & 1, length = keys[i] >> 1, count = bounds[i + 1] - bounds[i];
    Segment segment{};
    segment.sequence = min(max(i - 1, 0), p.sequences - 1);
    segment.token = bounds[i];
    segment.count = count;
    segment.position = length - count;
    segment.length = min(length, p.capacity);
    if (queue == kChunks) {
      segment.tiles = tiles_of(i);
      segment.first_item = (tiles[ranks[i]] - segment.tiles) * p.kv_heads;
    }
    sorted[(queue == kChunks ? 0 : segments) + ranks[i]] = segment;
  }
  if (first == 0) {
    plan->next[kChunks] = plan->next[kDecoded] = p.blocks;
    plan->items[kChunks] = counts[kChunks] == 0 ? 0 : tiles[counts[kChunks] - 1] * p.kv_heads;
    plan->items[kDecoded] = counts[kDecoded] * p.kv_heads;
    plan->segments[kChunks] = counts[kChunks];
    plan->segments[kDecoded] = counts[kDecoded];
  }
}

template <class Element>
CUTLASS_DEVICE uint32_t pack(float low, float high) {
  const float from[2] = {low, high};
  uint32_t packed;
  convert<Element, 2>(from, reinterpret_cast<Element*>(&packed));
  return packed;
}

// 2 to the power, without a way out for results too small to be normal.
CUTLASS_DEVICE float power_of_two(float exponent) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(exponent));
  return found;
}

// The transposed 8 × 8 matrix of a warp.
CUTLASS_DEVICE uint32_t transposed(uint32_t part) {
  uint32_t found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(part));
  return found;
}

// Word j of lane i of four neighbouring lanes becomes word i of lane j.
CUTLASS_DEVICE void transpose_quad(uint32_t (&words)[4], int lane) {
  CUTLASS_PRAGMA_UNROLL
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = lane & step;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 2; ++k) {
      const int low = step == 1 ? 2 * k : k, high = low + step;
      const uint32_t other = __shfl_xor_sync(~0u, upper ? words[low] : words[high], step);
      (upper ? words[low] : words[high]) = other;
    }
  }
}

template <class Element>
CUTLASS_DEVICE void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (is_same_v<Element, cutlass::bfloat16_t>) {
    SM80_16x8x16_F32BF16BF16F32_TN::fma(sums[0], sums[1], sums[2], sums[3], a[0], a[1], a[2], a[3], b0, b1, sums[0],
                                        sums[1], sums[2], sums[3]);
  } else {
    SM80_16x8x16_F32F16F16F32_TN::fma(sums[0], sums[1], sums[2], sums[3], a[0], a[1], a[2], a[3], b0, b1, sums[0],
                                      sums[1], sums[2], sums[3]);
  }
}

template <class Element, int kHeadDim>
struct PackedHopper {
  static constexpr int kHalf = 64, kHalves = kHeadDim / kHalf;  // columns of 128 bytes, as the copy engine swizzles
  static constexpr int kRows = 128, kKeys = 128;
  static constexpr int kStages = kHeadDim == 64 ? 4 : 2;
  static constexpr int kPiece = 16, kColumns = 8;
  static constexpr int kGroup = 8;  // rows whose chunks of 16 bytes are swizzled
  static constexpr int kThreads = 4 * kWarpgroup, kWarps = 4;
  static constexpr int kSlots = 2 * kWarps;  // so that each is that of one warp, which no other one is ahead of
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kChunkPlaces = 3, kDecodedPlaces = 4;
  // Of a thread. With 192 two addresses of chunks are spilled; what decodes would be slower without the eight more.
  static constexpr int kCopyRegisters = 24, kDecodeRegisters = 104, kChunkRegisters = 192;
  static_assert(kCopyRegisters + kDecodeRegisters + 2 * kChunkRegisters <= 512);

  using QueryLayout =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, cute::Shape<Int<kRows>, Int<kHeadDim>>{}));
  // Groups of eight keys, each with all its columns, so that a copy brings whole pages.
  using KeyLayout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                           cute::Shape<Int<kKeys>, Int<kHeadDim>, Int<kStages>>{}, Step<_2, _1, _3>{}));
  // The same memory with the head dims as rows.
  using ValueLayout =
      decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                             cute::Shape<Int<kHeadDim>, Int<kKeys>, Int<kStages>>{}, Step<_1, _2, _3>{}));
  static constexpr int kTileSize = kKeys * kHeadDim, kPieceSize = kPiece * kHeadDim;
  static_assert(cosize_v<KeyLayout> == kStages * kTileSize && cosize_v<ValueLayout> == kStages * kTileSize);
  using Warpgroups = cute::Layout<cute::Shape<_2, _1, _1>>;
  using MmaQK = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, cute::Shape<_64, Int<kKeys>, Int<kHeadDim>>, GMMA::Major::K,
                           GMMA::Major::K>(), Warpgroups{}));
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, cute::Shape<_64, Int<kHeadDim>, Int<kKeys>>, GMMA::Major::K,
                           GMMA::Major::MN>(), Warpgroups{}));
  static constexpr int kLogits = kKeys / 2;  // of each thread
  static constexpr int kOut = kHeadDim / 2;

  // Keys and values of decoded tokens are read once, but to say so made reading them slower.
  static constexpr uint64_t kHint = uint64_t(TMA::CacheHintSm90::EVICT_NORMAL);

  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;

  // A tile of a chunk, or the tokens of a sequence, and a key head. Some row sees keys from `low` on and before `high`,
  // every row those from `all_low` on and before `all_high`.
  struct Item {
    int sequence, head, token, count, position, length;
    int low, high, all_low, all_high;
    int first, blocks;  // of keys, or pieces; no item is left if negative
  };

  // What a warp found of a sequence, as its lanes have it; it takes the slot of the warp's last piece.
  struct Partial {
    float4 out[kSteps][32], statistics[32];
  };
  static_assert(sizeof(Partial) <= 2 * kPieceSize * sizeof(Element));

  struct SharedStorage {
    alignas(1024) Element query[kRows * kHeadDim];
    alignas(1024) Element keys[kStages * kTileSize];
    alignas(1024) Element values[kStages * kTileSize];
    alignas(1024) Element pieces[kSlots][2][kPieceSize];  // of keys and of values
    Item chunks[kChunkPlaces], decoded[kDecodedPlaces];
    int present[kStages];  // a bit for each page of a block of keys
    int piece_present[kSlots];
    typename Full::ValueType query_full, key_full[kStages], value_full[kStages], piece_full[kSlots];
    typename Empty::ValueType query_empty, key_empty[kStages], value_empty[kStages], piece_empty[kSlots];
    typename Empty::ValueType wanted[2], chunk_ready, decoded_ready[kDecodedPlaces], decoded_read[kDecodedPlaces];
  };

  struct Params {
    CUtensorMap query, key, value, key_piece, value_piece;
    const Element* queries;
    const int* table;
    Element* out;
    float* lse;
    Plan* plan;
    int sequences, heads, kv_heads, group, num_pages, columns;
    int page_bits;   // of tokens in a page
    int copies;      // pages of a block of keys
    int piece_bits;  // of keys that a copy brings
    int left, right, each;
    int inverse;  // x / group is x · inverse >> 16 for few x
    float scale;
  };

  static Facts facts() { return {int64_t(sizeof(SharedStorage)), kThreads, 1}; }

  static int64_t workspace(const Problem& problem) { return plan_bytes(problem.sequences); }

  // A dimension of an array, the innermost first, and how much of it a copy brings; strides in elements.
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
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return ffi::Error::Success();
    return ffi::Error::Internal("the copy engine cannot address an array: CUDA driver error " +
                                std::to_string(int(result)));
  }

  static ffi::Error run(cudaStream_t stream, const Device& device, const Problem& problem, const Arguments& arguments) {
    Params p;
    TILEWRIGHT_RETURN_IF_ERROR(attribute<float>(arguments, "scale", &p.scale));
    const int64_t tokens = problem.tokens, heads = problem.heads, kv_heads = problem.kv_heads;
    const int64_t group = heads / kv_heads, page = problem.page_size, pages = problem.num_pages, dim = kHeadDim;
    p.each = int(kRows / group);
    const int64_t piece = std::min<int64_t>(page, kKeys);
    const Element *query = input<Element>(arguments, 0), *key = input<Element>(arguments, 1),
                  *value = input<Element>(arguments, 2);
    const Extent of_query[] = {{dim, 1, kHalf}, {heads, dim, group}, {tokens, heads * dim, p.each}};
    TILEWRIGHT_RETURN_IF_ERROR(tensor_map(&p.query, query, of_query));
    const int64_t row = kv_heads * dim;
    // [8 rows, columns] of all groups of rows of all pages; what lies behind the last page is filled with zeros.
    const int64_t groups = pages * (page / kGroup);
    auto extents = [&](int64_t rows, Extent (&found)[5]) {
      const Extent each[] = {{kHalf, 1, kHalf},
                             {kGroup, row, kGroup},
                             {kHalves, kHalf, kHalves},
                             {groups, kGroup * row, rows / kGroup},
                             {kv_heads, dim, 1}};
      std::copy(each, each + 5, found);
    };
    Extent of_block[5], of_piece[5];
    extents(piece, of_block);
    extents(kPiece, of_piece);
    TILEWRIGHT_RETURN_IF_ERROR(tensor_map(&p.key, key, of_block));
    TILEWRIGHT_RETURN_IF_ERROR(tensor_map(&p.value, value, of_block));
    TILEWRIGHT_RETURN_IF_ERROR(tensor_map(&p.key_piece, key, of_piece));
    TILEWRIGHT_RETURN_IF_ERROR(tensor_map(&p.value_piece, value, of_piece));
    p.queries = query;
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
    p.copies = int(kKeys / piece);
    p.piece_bits = log2(piece);
    p.left = int(std::min<int64_t>(problem.left, kFar));
    p.right = int(std::min<int64_t>(problem.right, kFar));
    p.inverse = int((65536 + group - 1) / group);

    const int blocks = int(device.multiprocessors);
    const int capacity = int(std::min<int64_t>(problem.columns * page, kFar));
    const PlanSizes sizes{int(tokens), p.sequences, p.kv_heads, capacity, int(kColumns / group), p.each, blocks};
    const int64_t bytes = (4 * (problem.sequences + 2) + 1) * int64_t(sizeof(int));
    TILEWRIGHT_RETURN_IF_ERROR(launch<plan_kernel>(dim3(1), dim3(kPlanThreads), bytes, stream,
                                                   input<int>(arguments, 5), input<int>(arguments, 4), sizes, p.plan));
    return launch<run_kernel<PackedHopper>>(dim3(unsigned(blocks)), dim3(kThreads), sizeof(SharedStorage), stream, p);
  }

  static int log2(int64_t power) {
    int bits = 0;
    while (int64_t(1) << bits < power) ++bits;
    return bits;
  }

  CUTLASS_DEVICE void operator()(const Params& p, SharedStorage& s) const {
#if defined(CUTLASS_ARCH_MMA_SM90A_ENABLED)
    const int group = cutlass::canonical_warp_group_idx();  // 0 copies, 1 decodes, the others have a chunk
    const int warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0 && cute::elect_one_sync()) {
      for (const CUtensorMap* map : {&p.query, &p.key, &p.value, &p.key_piece, &p.value_piece}) {
        cute::prefetch_tma_descriptor(map);
      }
      Full::init(&s.query_full, 1);
      Empty::init(&s.query_empty, 2 * kWarps);
      for (int i = 0; i < kStages; ++i) {
        Full::init(&s.key_full[i], 1);
        Full::init(&s.value_full[i], 1);
        Empty::init(&s.key_empty[i], 2 * kWarps);
        Empty::init(&s.value_empty[i], 2 * kWarps);
      }
      for (int i = 0; i < kSlots; ++i) {
        Full::init(&s.piece_full[i], 1);
        Empty::init(&s.piece_empty[i], 1);
      }
      for (int i = 0; i < kDecodedPlaces; ++i) {
        Empty::init(&s.decoded_ready[i], 1);
        Empty::init(&s.decoded_read[i], kWarps);
      }
      for (int i = 0; i < 2; ++i) Empty::init(&s.wanted[i], 1);
      Empty::init(&s.chunk_ready, 1);
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if (group == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kCopyRegisters>();
      switch (warp) {
        case 0: copy_chunks(p, s); break;
        case 1: copy_decoded(p, s); break;
        case 2: look_ahead<kChunks>(p, s); break;
        default: look_ahead<kDecoded>(p, s);
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

  // Takes items from a queue, each when the warp that copies says that it will soon want it.
  template <Queue kQueue>
  static CUTLASS_DEVICE void look_ahead(const Params& p, SharedStorage& s) {
    const int lane = threadIdx.x % 32;
    const int items = p.plan->items[kQueue], segments = p.plan->segments[kQueue];
    const Segment* const sorted =
        reinterpret_cast<const Segment*>(p.plan + 1) + (kQueue == kChunks ? 0 : p.sequences + 2);
    for (int count = 0;; ++count) {
      int number = int(blockIdx.x);
      if (count > 0) {
        Empty::wait(&s.wanted[kQueue], (count - 1) % 2);
        if (lane == 0) number = atomicAdd(&p.plan->next[kQueue], 1);
        number = __shfl_sync(~0u, number, 0);
      }
      Item item;
      item.blocks = -1;
      if (number < items) {
        int low;
        if constexpr (kQueue == kDecoded) {
          low = number / p.kv_heads;
        } else {
          low = 0;
          for (int high = segments; high - low > 1;) {
            const int middle = (low + high) / 2;
            (sorted[middle].first_item <= number ? low : high) = middle;
          }
        }
        const Segment segment = sorted[low];
        int offset = 0, each = segment.count;
        if constexpr (kQueue == kDecoded) {
          item.head = number % p.kv_heads;
        } else {
          // The last tokens see most.
          const int within = number - segment.first_item;
          item.head = within / segment.tiles;
          offset = (segment.tiles - 1 - within % segment.tiles) * p.each;
          each = p.each;
        }
        item.sequence = segment.sequence;
        item.token = segment.token + offset;
        item.count = min(segment.count - offset, each);
        item.position = segment.position + offset;
        item.length = segment.length;
        auto within = [&](int key) { return min(max(key, 0), segment.length); };
        item.low = within(item.position - p.left);
        item.high = within(item.position + item.count + p.right);
        item.all_low = within(item.position + item.count - (p.left + 1));
        item.all_high = within(item.position + p.right + 1);
        if (item.high <= item.low) item.low = item.high = 0;
        constexpr int kBlock = kQueue == kChunks ? kKeys : kPiece;
        item.first = item.low / kBlock;
        item.blocks = item.high == 0 ? 0 : (item.high + kBlock - 1) / kBlock - item.first;
      }
      if constexpr (kQueue == kChunks) {
        if (lane == 0) {
          s.chunks[count % kChunkPlaces] = item;
          Empty::arrive(&s.chunk_ready);
        }
      } else {
        const int place = count % kDecodedPlaces;
        Empty::wait(&s.decoded_read[place], (count / kDecodedPlaces + 1) % 2);
        if (lane == 0) {
          s.decoded[place] = item;
          Empty::arrive(&s.decoded_ready[place]);
        }
      }
      if (item.blocks < 0) return;
    }
  }

  // The page of a sequence that holds a key, or one that is none, of which the copy engine makes zeros.
  static CUTLASS_DEVICE int page_of(const Params& p, int sequence, int key) {
    const int column = key >> p.page_bits;
    const int page = column < p.columns ? p.table[int64_t(sequence) * p.columns + column] : p.num_pages;
    return unsigned(page) < unsigned(p.num_pages) ? page : p.num_pages;
  }

  // Of all groups of rows the one with a key of a page.
  static CUTLASS_DEVICE int group_of(const Params& p, int page, int key) {
    return (page << (p.page_bits - 3)) + (key & ((1 << p.page_bits) - 1)) / kGroup;
  }

  static CUTLASS_DEVICE void copy_chunks(const Params& p, SharedStorage& s) {
    // Blocks of keys before the end of an item at which the next one is looked for.
    constexpr int kAhead = 5;
    const int lane = threadIdx.x % 32;
    const bool copies = lane < p.copies;
    const int part = lane & (p.copies - 1), offset = (part << p.piece_bits) * kHeadDim;
    uint32_t loaded = 0;  // of earlier items
    for (int count = 0;; ++count) {
      Empty::wait(&s.chunk_ready, count % 2);
      const Item& item = s.chunks[count % kChunkPlaces];
      const int blocks = item.blocks, first = item.first, sequence = item.sequence, head = item.head;
      auto place_of = [&](int block) { return ((first + block) << 7) + (part << p.piece_bits); };
      auto load = [&](const CUtensorMap& map, auto* full, auto* empty, Element* to, int block, int page, bool says) {
        const uint32_t number = loaded + block;
        const int stage = number % kStages;
        Empty::wait(&empty[stage], (number / kStages + 1) % 2);
        const uint32_t there = __ballot_sync(~0u, page < p.num_pages) & ((1 << p.copies) - 1);
        if (lane == 0) {
          if (says) s.present[stage] = there;
          Full::arrive_and_expect_tx(&full[stage], kTileSize * sizeof(Element));
        }
        __syncwarp();
        if (copies) {
          SM90_TMA_LOAD_5D::copy(&map, &full[stage], kHint, to + stage * kTileSize + offset, 0, 0, 0,
                                 group_of(p, page, place_of(block)), head);
        }
      };
      auto load_keys = [&](int block, int page) {
        load(p.key, s.key_full, s.key_empty, s.keys, block, page, true);
      };
      auto load_values = [&](int block, int page) {
        load(p.value, s.value_full, s.value_empty, s.values, block, page, false);
      };
      int page = 0, page_after = 0;
      if (blocks > 0) {
        page = page_of(p, sequence, place_of(0));
        page_after = page_of(p, sequence, place_of(1));
        load_keys(0, page);
      }
      Empty::wait(&s.query_empty, (count + 1) % 2);
      if (lane == 0) {
        if (blocks > 0) {
          Full::arrive_and_expect_tx(&s.query_full, p.each * p.group * kHeadDim * sizeof(Element));
          for (int i = 0; i < kHalves; ++i) {
            SM90_TMA_LOAD_3D::copy(&p.query, &s.query_full, kHint, s.query + i * kRows * kHalf, i * kHalf,
                                   head * p.group, item.token);
          }
        } else {
          Empty::arrive(&s.query_full);
        }
        if (0 <= blocks && blocks <= kAhead) Empty::arrive(&s.wanted[kChunks]);
      }
      if (blocks < 0) return;
      for (int block = 1; block < blocks; ++block) {
        const int page_before = page;
        page = page_after;
        page_after = page_of(p, sequence, place_of(block + 1));
        // In the order in which they are waited for.
        load_keys(block, page);
        load_values(block - 1, page_before);
        if (block == blocks - kAhead && lane == 0) Empty::arrive(&s.wanted[kChunks]);
      }
      if (blocks > 0) load_values(blocks - 1, page);
      loaded += blocks;
    }
  }

  static CUTLASS_DEVICE void copy_decoded(const Params& p, SharedStorage& s) {
    constexpr int kAhead = 24;
    const int lane = threadIdx.x % 32;
    uint32_t loaded = 0;
    for (int count = 0;; ++count) {
      const int place = count % kDecodedPlaces;
      Empty::wait(&s.decoded_ready[place], count / kDecodedPlaces % 2);
      const Item& item = s.decoded[place];
      const int pieces = item.blocks, first = item.first, sequence = item.sequence, head = item.head;
      if (pieces < 0) return;
      if (pieces <= kAhead && lane == 0) Empty::arrive(&s.wanted[kDecoded]);
      int page_after = page_of(p, sequence, (first + lane) * kPiece);
      for (int begin = 0; begin < pieces; begin += 32) {
        const int pages = page_after;
        page_after = page_of(p, sequence, (first + begin + 32 + lane) * kPiece);
        const int end = min(begin + 32, pieces);
        for (int piece = begin; piece < end; ++piece) {
          const int page = __shfl_sync(~0u, pages, piece - begin);
          const uint32_t number = loaded + piece;
          const int slot = number % kSlots;
          Empty::wait(&s.piece_empty[slot], (number / kSlots + 1) % 2);
          if (lane == 0) {
            const bool there = page < p.num_pages;
            s.piece_present[slot] = there;
            if (there) {
              const int group = group_of(p, page, (first + piece) * kPiece);
              auto load = [&](const CUtensorMap& map, Element* to) {
                SM90_TMA_LOAD_5D::copy(&map, &s.piece_full[slot], kHint, to, 0, 0, 0, group, head);
              };
              Full::arrive_and_expect_tx(&s.piece_full[slot], 2 * kPieceSize * sizeof(Element));
              load(p.key_piece, s.pieces[slot][0]);
              load(p.value_piece, s.pieces[slot][1]);
            } else {
              Empty::arrive(&s.piece_full[slot]);
            }
            if (piece == pieces - kAhead - 1) Empty::arrive(&s.wanted[kDecoded]);
          }
          __syncwarp();
        }
      }
      loaded += pieces;
    }
  }

  // What is subtracted from logits in the units of `scale`: the greatest one, if any is seen.
  static CUTLASS_DEVICE float subtrahend(float greatest, float scale) {
    return greatest == -INFINITY ? 0.0f : greatest * scale;
  }

  // What earlier sums of a row or column are multiplied with when another logit becomes the greatest.
  static CUTLASS_DEVICE float raise(float& greatest, float most, float scale2, float* subtracted) {
    *subtracted = subtrahend(most, scale2);
    // Exactly 1 where nothing changes, which a product and a difference in one rounding are not.
    const float shrink = greatest == most ? 1.0f : power_of_two(greatest * scale2 - *subtracted);
    greatest = most;
    return shrink;
  }

  static CUTLASS_DEVICE float log_sum(float greatest, float total, float scale) {
    return total == 0 ? -INFINITY : subtrahend(greatest, scale) + logf(total);
  }

  // Row r of an item is that of token r / group and head r % group.
  static CUTLASS_DEVICE int token_of(const Params& p, int row) { return (row * p.inverse) >> 16; }

  // Where an item's first row lies among those of all tokens and heads, and where another one of it does.
  static CUTLASS_DEVICE int64_t first_row_of(const Params& p, const Item& item) {
    return int64_t(item.token) * p.heads + item.head * p.group;
  }

  static CUTLASS_DEVICE int64_t row_of(const Params& p, int64_t first, int row) {
    const int token = token_of(p, row);
    return first + token * p.heads + (row - token * p.group);
  }

  // Half of a row of a tile of keys or values: groups of eight rows have all their columns side by side.
  template <class Number>
  static CUTLASS_DEVICE Number* half_row(Number* tile, int row, int half) {
    return tile + ((row / kGroup * kHalves + half) * kGroup + row % kGroup) * kHalf;
  }

  static CUTLASS_DEVICE void clear_half_row(Element* values, int row, int half) {
    uint4* const chunks = reinterpret_cast<uint4*>(half_row(values, row, half));
    for (int i = 0; i < 8; ++i) chunks[i] = make_uint4(0, 0, 0, 0);
  }

  // Two warpgroups, each with half of the rows.
  static CUTLASS_DEVICE void attend(const Params& p, SharedStorage& s, int half) {
    const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
    const int first_row = half * 64 + 16 * warp + lane / 4;  // the thread's other row is 8 below
    const float scale2 = p.scale * kLog2e, slack = kSlack / scale2;

    MmaQK mma_qk;
    MmaPV mma_pv;
    const auto qk = mma_qk.get_thread_slice(half * kWarpgroup + thread);
    const auto pv = mma_pv.get_thread_slice(half * kWarpgroup + thread);
    Tensor queries = qk.partition_fragment_A(make_tensor(make_smem_ptr(s.query), QueryLayout{}));
    Tensor keys = qk.partition_fragment_B(make_tensor(make_smem_ptr(s.keys), KeyLayout{}));
    Tensor values = pv.partition_fragment_B(make_tensor(make_smem_ptr(s.values), ValueLayout{}));
    Tensor logits = partition_fragment_C(mma_qk, cute::Shape<Int<kRows>, Int<kKeys>>{});
    Tensor out = partition_fragment_C(mma_pv, cute::Shape<Int<kRows>, Int<kHeadDim>>{});
    Tensor weights = make_tensor<Element>(partition_shape_A(mma_pv, cute::Shape<Int<kRows>, Int<kKeys>>{}));
    static_assert(decltype(size(logits))::value == kLogits && decltype(size(weights))::value == kLogits);
    static_assert(decltype(size(out))::value == kOut);
    mma_pv.accumulate_ = GMMA::ScaleOut::One;
    float greatest[2], total[2], shrink[2];
    uint32_t taken = 0;  // blocks of earlier items

    auto release = [&](auto* empty) {
      if (lane == 0) Empty::arrive(empty);
    };

    for (int count = 0;; ++count) {
      Full::wait(&s.query_full, count % 2);
      const Item& item = s.chunks[count % kChunkPlaces];
      const int blocks = item.blocks;
      if (blocks < 0) return;
      auto stage_of = [&](int block) { return (taken + block) % kStages; };
      auto phase_of = [&](int block) { return (taken + block) / kStages % 2; };
      if (item.count * p.group <= 64 * half) {  // no row is this warpgroup's
        release(&s.query_empty);
        for (int block = 0; block < blocks; ++block) {
          Full::wait(&s.key_full[stage_of(block)], phase_of(block));
          release(&s.key_empty[stage_of(block)]);
          Full::wait(&s.value_full[stage_of(block)], phase_of(block));
          release(&s.value_empty[stage_of(block)]);
        }
        taken += blocks;
        continue;
      }

      auto start_logits = [&](int block) {
        Full::wait(&s.key_full[stage_of(block)], phase_of(block));
        warpgroup_fence_operand(logits);
        warpgroup_arrive();
        mma_qk.accumulate_ = GMMA::ScaleOut::Zero;
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < size<2>(queries); ++k) {
          cute::gemm(mma_qk, queries(_, _, k), keys(_, _, k, stage_of(block)), logits);
          mma_qk.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
      };
      auto start_out = [&](int block) {
        const int stage = stage_of(block), start = (item.first + block) * kKeys;
        Full::wait(&s.value_full[stage], phase_of(block));
        if (start < item.low || start + kKeys > item.high) {
          // Values that no row sees may be anything, and 0 · NaN is NaN. Both warpgroups write the same zeros.
          const int key = start + thread;
          if (key < item.low || key >= item.high) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kHalves; ++i) {
              clear_half_row(s.values + stage * kTileSize, thread, i);
            }
          }
          cutlass::arch::fence_view_async_shared();
          sync_warpgroup(1 + half);
        }
        warpgroup_fence_operand(weights);
        warpgroup_fence_operand(out);
        warpgroup_arrive();
        cute::gemm(mma_pv, weights, values(_, _, _, stage), out);
        warpgroup_commit_batch();
      };
      // Masks a block's logits and turns them into weights. Returns whether sums so far are to be multiplied with
      // `shrink`: not for a little, since weights may as well be beyond 1.
      auto softmax = [&](int block, int present) -> bool {
        const int start = (item.first + block) * kKeys;
        if (start < item.all_low || start + kKeys > item.all_high || present != (1 << p.copies) - 1) {
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 2; ++r) {
            const int position = item.position + token_of(p, first_row + 8 * r) - start;
            const int low = max(position - p.left, -start);
            const int high = min(position + p.right + 1, item.length - start);
            CUTLASS_PRAGMA_UNROLL
            for (int i = 2 * r; i < kLogits; i += 4) {
              CUTLASS_PRAGMA_UNROLL
              for (int j = i; j < i + 2; ++j) {
                const int key = j / 4 * 8 + lane % 4 * 2 + j % 2;
                if (key < low || key >= high || ((present >> (key >> p.piece_bits)) & 1) == 0) logits(j) = -INFINITY;
              }
            }
          }
        }
        float most[2];
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          most[r] = logits(2 * r);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 2 * r; i < kLogits; i += 4) most[r] = fmaxf(most[r], fmaxf(logits(i), logits(i + 1)));
          most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
          most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
        }
        const bool raised = __any_sync(~0u, most[0] > greatest[0] + slack || most[1] > greatest[1] + slack);
        if (raised) {
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 2; ++r) {
            // Each row for itself: rows that are no token's must not change what others get.
            const float now = most[r] > greatest[r] + slack ? most[r] : greatest[r];
            float subtracted;
            shrink[r] = raise(greatest[r], now, scale2, &subtracted);
            total[r] *= shrink[r];
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const float subtracted = subtrahend(greatest[r], scale2);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 2 * r; i < kLogits; i += 4) {
            CUTLASS_PRAGMA_UNROLL
            for (int j = i; j < i + 2; ++j) {
              logits(j) = power_of_two(fmaf(logits(j), scale2, -subtracted));
              total[r] += logits(j);
            }
          }
        }
        return raised;
      };
      auto narrow = [&] { convert<Element, kLogits>(logits.data(), weights.data()); };
      auto shrink_out = [&] {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kOut; ++i) out(i) *= shrink[i / 2 % 2];
      };

      clear(out);
      greatest[0] = greatest[1] = -INFINITY;
      total[0] = total[1] = 0;
      if (blocks > 0) {
        start_logits(0);
        warpgroup_wait<0>();
        warpgroup_fence_operand(logits);
        int present = s.present[stage_of(0)];
        release(&s.key_empty[stage_of(0)]);
        softmax(0, present);
        narrow();
        CUTLASS_PRAGMA_NO_UNROLL
        for (int block = 1; block < blocks; ++block) {
          start_logits(block);
          start_out(block - 1);
          warpgroup_wait<1>();
          warpgroup_fence_operand(logits);
          present = s.present[stage_of(block)];
          release(&s.key_empty[stage_of(block)]);
          const bool raised = softmax(block, present);
          warpgroup_wait<0>();
          warpgroup_fence_operand(out);
          release(&s.value_empty[stage_of(block - 1)]);
          narrow();
          if (raised) shrink_out();
        }
        release(&s.query_empty);
        start_out(blocks - 1);
        warpgroup_wait<0>();
        warpgroup_fence_operand(out);
        release(&s.value_empty[stage_of(blocks - 1)]);
        taken += blocks;
      } else {
        release(&s.query_empty);
      }

      const int rows = item.count * p.group;
      const int64_t base = first_row_of(p, item);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + 8 * r;
        const int64_t to = row_of(p, base, row);
        total[r] += __shfl_xor_sync(~0u, total[r], 1);
        total[r] += __shfl_xor_sync(~0u, total[r], 2);
        if (lane % 4 == 0 && row < rows) p.lse[to] = log_sum(greatest[r], total[r], p.scale);
        const float weight = total[r] == 0 ? 0.0f : 1 / total[r];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kOut; i += 16) {
          uint32_t words[4];
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < 4; ++k) {
            words[k] = pack<Element>(out(i + 4 * k + 2 * r) * weight, out(i + 4 * k + 2 * r + 1) * weight);
          }
          transpose_quad(words, lane);
          if (row < rows) {
            uint4* const chunk = reinterpret_cast<uint4*>(p.out + to * kHeadDim + i * 2 + lane % 4 * 8);
            *chunk = make_uint4(words[0], words[1], words[2], words[3]);
          }
        }
      }
    }
  }

  // Columns of the transposed products are an item's rows.
  static CUTLASS_DEVICE void decode(const Params& p, SharedStorage& s) {
    const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
    const int column = lane % 4 * 2;  // the thread's other column is the next one
    const float scale2 = p.scale * kLog2e, slack = kSlack / scale2;
    // Where the lane's row of 16 bytes of an operand begins: as it lies for keys, and transposed for values.
    const int key_row = lane % 16, key_chunk = lane / 16;
    const int value_row = lane % 8 + lane / 16 * 8, value_chunk = lane / 8 % 2;
    uint32_t taken = 0;
    for (int count = 0;; ++count) {
      const int place = count % kDecodedPlaces;
      Empty::wait(&s.decoded_ready[place], count / kDecodedPlaces % 2);
      const Item& item = s.decoded[place];
      const int pieces = item.blocks, columns = item.count * p.group;
      if (pieces < 0) return;
      const int64_t base = first_row_of(p, item);

      uint32_t query[kSteps][2];
      {
        const bool there = lane / 4 < columns;
        const Element* const row = p.queries + row_of(p, base, lane / 4) * kHeadDim;
        const uint32_t* const from = reinterpret_cast<const uint32_t*>(row) + lane % 4;
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < kSteps; ++k) {
          query[k][0] = there ? from[8 * k] : 0;
          query[k][1] = there ? from[8 * k + 4] : 0;
        }
      }
      float out[kSteps][4] = {}, greatest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};

      // Pieces are dealt to warps over all items; the warp with the first one of this item has rank 0.
      const int rank = int((warp - taken) % kWarps);
      auto slot_of_last = [&](int which) {
        return int((taken + pieces - 1 - (pieces - 1 - which) % kWarps) % kSlots);
      };
      CUTLASS_PRAGMA_NO_UNROLL
      for (int piece = rank; piece < pieces; piece += kWarps) {
        const uint32_t number = taken + piece;
        const int slot = number % kSlots, start = (item.first + piece) * kPiece;
        Full::wait(&s.piece_full[slot], number / kSlots % 2);
        if (s.piece_present[slot]) {
          Element* const keys = s.pieces[slot][0];
          Element* const values = s.pieces[slot][1];
          // Chunks of 16 bytes are swizzled in groups of eight rows.
          auto chunk_of = [](const Element* tile, int row, int chunk) -> const uint128_t& {
            const Element* const half = half_row(tile, row, chunk / 8);
            return *reinterpret_cast<const uint128_t*>(half + ((chunk % 8) ^ (row % kGroup)) * 8);
          };
          if (start < item.low || start + kPiece > item.high) {
            // Values that no row sees may be anything, and 0 · NaN is NaN.
            const int row = lane % 16, key = start + row;
            if (key < item.low || key >= item.high) {
              for (int i = lane / 16; i < kHalves; i += 2) clear_half_row(values, row, i);
            }
            __syncwarp();
            cutlass::arch::fence_view_async_shared();
          }
          float logits[4] = {}, more[4] = {};  // two chains of products
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < kSteps; ++k) {
            uint32_t a[4];
            SM75_U32x4_LDSM_N::copy(chunk_of(keys, key_row, 2 * k + key_chunk), a[0], a[1], a[2], a[3]);
            multiply<Element>(k % 2 == 0 ? logits : more, a, query[k][0], query[k][1]);
          }
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 4; ++i) logits[i] += more[i];
          if (start < item.all_low || start + kPiece > item.all_high) {
            CUTLASS_PRAGMA_UNROLL
            for (int c = 0; c < 2; ++c) {
              const int position = item.position + token_of(p, column + c);
              const int low = max(position - p.left, 0), high = min(position + p.right + 1, item.length);
              CUTLASS_PRAGMA_UNROLL
              for (int r = 0; r < 2; ++r) {
                const int key = start + lane / 4 + 8 * r;
                if (key < low || key >= high) logits[2 * r + c] = -INFINITY;
              }
            }
          }
          float shrink[2];
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < 2; ++c) {
            float most = fmaxf(logits[c], logits[2 + c]);
            CUTLASS_PRAGMA_UNROLL
            for (int distance = 4; distance < 32; distance *= 2) {
              most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
            }
            float subtracted;
            most = most > greatest[c] + slack ? most : greatest[c];
            shrink[c] = raise(greatest[c], most, scale2, &subtracted);
            CUTLASS_PRAGMA_UNROLL
            for (int r = 0; r < 2; ++r) logits[2 * r + c] = power_of_two(fmaf(logits[2 * r + c], scale2, -subtracted));
            total[c] = total[c] * shrink[c] + logits[c] + logits[2 + c];
          }
          const uint32_t upper = transposed(pack<Element>(logits[0], logits[1]));
          const uint32_t lower = transposed(pack<Element>(logits[2], logits[3]));
          if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
            CUTLASS_PRAGMA_UNROLL
            for (int k = 0; k < kSteps; ++k) {
              CUTLASS_PRAGMA_UNROLL
              for (int i = 0; i < 4; ++i) out[k][i] *= shrink[i % 2];
            }
          }
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < kSteps; ++k) {
            uint32_t a[4];
            SM75_U16x8_LDSM_T::copy(chunk_of(values, value_row, 2 * k + value_chunk), a[0], a[1], a[2], a[3]);
            multiply<Element>(out[k], a, upper, lower);
          }
        }
        // Behind the products, which wait for what is loaded for them: loads under way do not hold back an arrival.
        __syncwarp();
        if (lane == 0 && piece + kWarps < pieces) Empty::arrive(&s.piece_empty[slot]);
      }

      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < 2; ++c) {
        CUTLASS_PRAGMA_UNROLL
        for (int distance = 4; distance < 32; distance *= 2) total[c] += __shfl_xor_sync(~0u, total[c], distance);
      }
      auto partial_of = [&](int which) -> Partial& {
        return *reinterpret_cast<Partial*>(s.pieces[slot_of_last(which)][0]);
      };
      if (0 < rank && rank < pieces) {
        Partial& mine = partial_of(rank);
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < kSteps; ++k) mine.out[k][lane] = make_float4(out[k][0], out[k][1], out[k][2], out[k][3]);
        mine.statistics[lane] = make_float4(greatest[0], greatest[1], total[0], total[1]);
        cutlass::arch::fence_view_async_shared();
      }
      sync_warpgroup(3);
      for (int which = 1; rank == 0 && which < min(kWarps, pieces); ++which) {
        const Partial& partial = partial_of(which);
        const float4 other = partial.statistics[lane];
        float mine[2], its[2];
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 2; ++c) {
          float old = c == 0 ? other.x : other.y;
          const float most = fmaxf(greatest[c], old);
          float subtracted;
          mine[c] = raise(greatest[c], most, scale2, &subtracted);
          its[c] = raise(old, most, scale2, &subtracted);
          total[c] = total[c] * mine[c] + (c == 0 ? other.z : other.w) * its[c];
        }
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < kSteps; ++k) {
          const float4 more = partial.out[k][lane];
          out[k][0] = out[k][0] * mine[0] + more.x * its[0];
          out[k][1] = out[k][1] * mine[1] + more.y * its[1];
          out[k][2] = out[k][2] * mine[0] + more.z * its[0];
          out[k][3] = out[k][3] * mine[1] + more.w * its[1];
        }
      }
      sync_warpgroup(3);
      if (lane == 0 && rank < pieces) Empty::arrive(&s.piece_empty[slot_of_last(rank)]);
      taken += pieces;
      if (rank == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 2; ++c) {
          if (column + c >= columns) continue;
          const int64_t to = row_of(p, base, column + c);
          if (lane / 4 == 0) p.lse[to] = log_sum(greatest[c], total[c], p.scale);
          const float weight = total[c] == 0 ? 0.0f : 1 / total[c];
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < kSteps; ++k) {
            CUTLASS_PRAGMA_UNROLL
            for (int r = 0; r < 2; ++r) {
              p.out[to * kHeadDim + 16 * k + lane / 4 + 8 * r] = Element(out[k][2 * r + c] * weight);
            }
          }
        }
      }
      __syncwarp();
      if (lane == 0) Empty::arrive(&s.decoded_read[place]);
    }
  }
};

}  // namespace tilewright::paged
