// Forward attention for compute capability 5.0 and up, from the matmuls of CUTLASS's example 41.
//
// Computes O = softmax(scale * Q K^T + bias) V and lse. A CTA owns `kQueries` queries of one head and iterates over the
// visible keys, `kKeys` at a time: MM0 computes S = Q K^T, MM1 computes P V. O stays in registers if the value dim is
// at most `kKeys`; else it is accumulated, and rescaled in each step, in global memory.
//
//   S, P  `logits`      registers of MM0; P is the A operand of MM1 in shared memory (`si`)
//   O     `accumulated` registers of MM1, or `sums` in global memory
//   m     `mi`          shared memory, in units of log 2
//   l     `s_prime`     shared memory; after the last step what O is divided by
//         `out_rescale` shared memory: exp2(m_old - m_new) of the current step
//         `addition_storage` shared memory: row maxima, then row sums, of each column warp
//
//   step  QK^T | load V (if preloaded) | mask | m, rescale O | P, l | P to shared memory | PV | (store O)
#pragma once

#include "attention.cuh"
#include "kernel_forward.h"

namespace tilewright::attention {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks) cutlass_forward(const typename Kernel::Params p) {
  Kernel::block(p);
}

template <class Element, class Arch, bool kAligned, int kQueries, int kKeys, int kMaxDim, bool kDropout,
          bool kModified>  // logits may have a bias, a soft cap, or a mask by arrays
struct CutlassForward {
  using Library = AttentionKernel<Element, Arch, kAligned, kQueries, kKeys, kMaxDim, kDropout, kModified>;
  using MM0 = typename Library::MM0;
  using MM1 = typename Library::MM1;
  using Storage = typename Library::SharedStorage;
  using Logits = typename MM0::AccumLambdaIterator;
  using Rows = cutlass::Array<float, kQueries>;

  static constexpr int kThreads = Library::kNumThreads;
  static constexpr int kBlocks = Library::kMinBlocksPerSm;
  static constexpr bool kInRegisters = Library::kKeepOutputInRF;
  static constexpr bool kPreloadValues = Library::kPreloadV;
  static constexpr int kRowWarps = MM0::MmaCore::WarpCount::kN;  // column warps: warps that share a row of S

  struct Params : ForwardArrays<Element> {
    float* sums;  // fp32 accumulator of O, if O is kept in global memory
  };

  static Facts facts() {
    return {sizeof(Storage), kThreads, std::max<int64_t>(Library::kAlignmentQ, Library::kAlignmentK)};
  }

  static int64_t workspace(const Problem& problem) {
    if (!Library::kNeedsOutputAccumulatorBuffer) return 0;
    return problem.batch * problem.q_length * problem.heads * problem.value_dim * int64_t(sizeof(float));
  }

  static ffi::Error run(cudaStream_t stream, const Device&, const Problem& problem, const Arguments& arguments) {
    Params p;
    TILEWRIGHT_RETURN_IF_ERROR(read_forward<Element>(problem, arguments, &p));
    p.sums = static_cast<float*>(Library::kNeedsOutputAccumulatorBuffer ? arguments.workspace : (void*)p.out);
    const dim3 grid((problem.q_length + kQueries - 1) / kQueries, problem.heads, problem.batch);
    return launch<cutlass_forward<CutlassForward>>(grid, dim3(32, kThreads / 32), sizeof(Storage), stream, p);
  }

  struct TileCoord {
    int thread, warp, lane;
    int query_start, queries;  // of the CTA
    cutlass::MatrixCoord warp_tile;
  };

  // Turns a tile of Q K^T in registers into logits: scaled, with bias and soft cap, masked, in units of log 2.
  template <class Fragment>
  static __device__ void modify(const TileCoord& coord, const HeadScores& head, int key_start, int keys,
                                Fragment& logits) {
    auto offset = Logits::get_lane_offset(coord.lane, coord.warp, coord.warp_tile);
    const bool plain = !kModified || head.plain();
    if (plain) logits = cutlass::multiplies<Fragment>()(head.scores.scale * kLog2e, logits);
    const int key_end = key_start + keys, query_end = coord.query_start + coord.queries;
    const bool whole = keys == kKeys && head.all_visible(coord.query_start, query_end, key_start, key_end);
    if (plain && whole) return;
    Logits::iterateRows(
        offset, [](int) {},
        [&](int m, int n, int i) {
          const int query = coord.query_start + m, key = key_start + n;
          if (n >= keys) {
            logits[i] = -INFINITY;
          } else if (m < coord.queries) {  // rows beyond the end are not stored, and have no bias or segment to read
            if (!plain) logits[i] = head.logit(logits[i], query, key);
            bool is_visible;
            if constexpr (kModified) {
              is_visible = whole || head.visible(query, key);
            } else {
              is_visible = key - query >= head.scores.lowest && key - query <= head.scores.highest;
            }
            if (!is_visible) logits[i] = -INFINITY;
          }
        },
        [](int) {});
  }

  // Updates m in `mi`, sets `out_rescale` and rescales l in `s_prime`.
  template <class Fragment>
  static __device__ void update_row_max(const TileCoord& coord, const Fragment& logits, Storage& shared) {
    auto offset = Logits::get_lane_offset(coord.lane, coord.warp, coord.warp_tile);
    float row_max;
    Logits::iterateRows(
        offset, [&](int) { row_max = -INFINITY; }, [&](int, int, int i) { row_max = fmaxf(row_max, logits[i]); },
        [&](int m) {
          auto greater = [](float a, float b) { return fmaxf(a, b); };
          if (Logits::reduceSameRow(coord.lane, row_max, greater)) {
            shared.addition_storage[m + kQueries * coord.warp_tile.column()] = row_max;
          }
        });
    __syncthreads();
    if (coord.thread < kQueries) {
      const float before = shared.mi[coord.thread];
      float now = before;
#pragma unroll
      for (int i = 0; i < kRowWarps; ++i) now = fmaxf(now, shared.addition_storage[coord.thread + kQueries * i]);
      const float rescale = now == -INFINITY ? 1.0f : exp2f(before - now);
      shared.mi[coord.thread] = now;
      shared.out_rescale[coord.thread] = rescale;
      shared.s_prime[coord.thread] *= rescale;
    }
    __syncthreads();
  }

  // Turns S into P, not yet divided by l; the row sums of the tile go to `addition_storage`. Dropped elements count in
  // l.
  template <class Fragment>
  static __device__ void exponentiate(
      const TileCoord& coord, const HeadScores& head, int key_start, Fragment& logits, Storage& shared) {
    auto offset = Logits::get_lane_offset(coord.lane, coord.warp, coord.warp_tile);
    const bool drops = kDropout && head.drops();
    KeepColumns keep(drops ? head.dropout_key() : uint2{}, head.scores.keep_threshold);
    float row_max, total;
    Logits::iterateRows(
        offset,
        [&](int m) {
          row_max = shared.mi[m];
          if (row_max == -INFINITY) row_max = 0;  // no key so far: -inf - (-inf) is NaN
          total = 0;
        },
        [&](int m, int n, int i) {
          logits[i] = exp2f(logits[i] - row_max);
          total += logits[i];
          if (drops && !keep(coord.query_start + m, key_start + n, i % 2)) logits[i] = 0;
        },
        [&](int m) {
          if (Logits::reduceSameRow(coord.lane, total, [](float a, float b) { return a + b; })) {
            shared.addition_storage[m + kQueries * coord.warp_tile.column()] = total;
          }
        });
  }

  // Adds the row sums of a tile to l. After the last tile stores lse and leaves in `s_prime` what O is divided by.
  static __device__ void update_sums(const Params& p, const TileCoord& coord, float* lse, bool last, Storage& shared) {
    if (coord.thread >= kQueries) return;
    float total = shared.s_prime[coord.thread];
#pragma unroll
    for (int i = 0; i < kRowWarps; ++i) total += shared.addition_storage[coord.thread + kQueries * i];
    shared.s_prime[coord.thread] = last ? finish_row(p, coord, lse, total, shared) : total;
  }

  // Stores lse of a row; returns l / keep_scale, or 1 for a row that sees no key.
  static __device__ float finish_row(const Params& p, const TileCoord& coord, float* lse, float total,
                                     Storage& shared) {
    if (coord.thread < coord.queries) {
      lse[coord.thread] = total > 0 ? shared.mi[coord.thread] * kLn2 + logf(total) : -INFINITY;
    }
    return (total > 0 ? total : 1.0f) / (kDropout ? p.scores.keep_scale : 1.0f);
  }

  // Stores O of one tile through the epilogue of example 41: the first step (kFirst) does not read the accumulator, the
  // last one (kLast) normalizes and converts.
  template <bool kFirst, bool kLast>
  static __device__ void store(const TileCoord& coord, const Params& p, Element* out, float* sums, int column,
                               typename MM1::Mma::FragmentC const& accumulated, Storage& shared) {
    using Default = typename MM1::DefaultEpilogue;
    using Operation = typename MM1::DefaultConfig::EpilogueOutputOp;
    using Target = std::conditional_t<kLast, typename MM1::OutputTileIterator, typename MM1::OutputTileIteratorAccum>;
    using Source = typename MM1::OutputTileIteratorAccum;
    using Normalise = cutlass::epilogue::thread::MemoryEfficientAttentionNormalize<
        std::conditional_t<kLast, Element, float>, float, Operation::kCount, typename Operation::ElementAccumulator,
        float, kFirst, kLast, Rows>;
    using Epilogue = cutlass::epilogue::threadblock::EpiloguePipelined<
        typename Default::Shape, typename MM1::Mma::Operator, Default::kPartitionsK, Target,
        typename Default::AccumulatorFragmentIterator, typename Default::WarpTileIterator,
        typename Default::SharedLoadIterator, Normalise, typename Default::Padding, Default::kFragmentsPerIteration,
        true, Source>;
    const int32_t stride = p.heads * p.value_dim;
    const cutlass::MatrixCoord extent{coord.queries, p.value_dim}, origin{0, column};
    Source source(typename Source::Params{stride}, sums, extent, coord.thread, origin);
    Normalise normalise(shared.s_prime, shared.out_rescale);
    Epilogue epilogue(shared.epilogue_shared_storage(), coord.thread, coord.warp, coord.lane);
    if constexpr (kLast) {
      Target target(typename Target::Params{stride}, out, extent, coord.thread, origin);
      epilogue(normalise, target, accumulated, source);
    } else {
      epilogue(normalise, source, accumulated, source);
    }
  }

  static __device__ void block(const Params& p) {
    extern __shared__ __align__(128) char memory[];
    Storage& shared = *reinterpret_cast<Storage*>(memory);
    TileCoord coord;
    coord.lane = threadIdx.x;
    coord.warp = warp_uniform(int(threadIdx.y));
    coord.thread = threadIdx.x + 32 * threadIdx.y;
    coord.query_start = (gridDim.x - 1 - blockIdx.x) * kQueries;  // with a causal mask the longest tiles run first
    coord.queries = min(kQueries, p.scores.q_length - coord.query_start);
    coord.warp_tile = {coord.warp % MM0::Mma::WarpCount::kM, coord.warp / MM0::Mma::WarpCount::kM};
    const int head_index = blockIdx.y, batch = blockIdx.z;
    const HeadScores head(p.scores, batch, head_index);
    const int32_t q_stride = p.heads * p.head_dim, k_stride = p.kv_heads * p.head_dim;
    const int32_t v_stride = p.kv_heads * p.value_dim, kv_head = head_index / p.scores.group;
    const int64_t first_row = int64_t(batch) * p.scores.q_length + coord.query_start;
    const Element* query = p.query + first_row * q_stride + head_index * p.head_dim;
    const Element* all_keys = p.key + int64_t(batch) * p.scores.kv_length * k_stride + kv_head * p.head_dim;
    const Element* all_values = p.value + int64_t(batch) * p.scores.kv_length * v_stride + kv_head * p.value_dim;
    const int64_t out_offset = (first_row * p.heads + head_index) * p.value_dim;
    float* lse = p.lse + (int64_t(batch) * p.heads + head_index) * p.scores.q_length + coord.query_start;
    const int2 range = head.keys_for(coord.query_start, coord.query_start + coord.queries, kKeys);

    if (coord.thread < kQueries) {
      const bool sink = p.sinks != nullptr;
      shared.mi[coord.thread] = sink ? p.sinks[head_index] * kLog2e : -INFINITY;
      shared.s_prime[coord.thread] = sink ? 1.0f : 0.0f;
      shared.out_rescale[coord.thread] = 1.0f;
    }
    typename MM1::Mma::FragmentC accumulated;
    accumulated.clear();

    for (int key_start = range.x; key_start < range.y; key_start += kKeys) {
      const int keys = min(kKeys, range.y - key_start);
      const bool first = key_start == range.x, last = key_start + kKeys >= range.y;
      const Element* value = all_values + int64_t(key_start) * v_stride;
      auto values = [&](int column) {
        return typename MM1::Mma::IteratorB(
            typename MM1::IteratorB::Params{typename MM1::LayoutB(v_stride)}, const_cast<Element*>(value),
            {keys, p.value_dim}, coord.thread, cutlass::MatrixCoord{0, column});
      };
      auto preload_values = [&](int column) {
        auto iterator = values(column);
        MM1::Mma::prologue(shared.after_mm0.mm1, iterator, coord.thread, keys);
      };
      __syncthreads();  // m and l are initialized, and all warps have read the last tile
      typename MM0::IteratorA queries(
          typename MM0::IteratorA::Params(typename MM0::MmaCore::LayoutA(q_stride)), const_cast<Element*>(query),
          {coord.queries, p.head_dim}, coord.thread, cutlass::MatrixCoord{0, 0});
      typename MM0::IteratorB keys_iterator(
          typename MM0::IteratorB::Params(typename MM0::MmaCore::LayoutB(k_stride)),
          const_cast<Element*>(all_keys + int64_t(key_start) * k_stride), {p.head_dim, keys}, coord.thread,
          cutlass::MatrixCoord{0, 0});
      typename MM0::Mma::FragmentC logits;
      logits.clear();
      {
        typename MM0::Mma product(shared.mm0, coord.thread, coord.warp, coord.lane);
        const int steps = (p.head_dim + MM0::Mma::Shape::kK - 1) / MM0::Mma::Shape::kK;
        product(steps, logits, queries, keys_iterator, logits);
      }
      __syncthreads();  // the shared memory of MM0 is reused for P and V
      if constexpr (kPreloadValues) {
        preload_values(0);
      } else {
        MM1::Mma::drain_cp_asyncs();
      }
      modify(coord, head, key_start, keys, logits);
      update_row_max(coord, logits, shared);
      if (kInRegisters && !first) {
        auto offset = Logits::get_lane_offset(coord.lane, coord.warp, coord.warp_tile);
        float rescale;
        Logits::iterateRows(
            offset, [&](int m) { rescale = shared.out_rescale[m]; },
            [&](int, int, int i) { accumulated[i] *= rescale; }, [](int) {});
      }
      exponentiate(coord, head, key_start, logits, shared);
      MM0::B2bGemm::accumToSmem(shared.after_mm0.si, logits, coord.lane, coord.warp_tile);
      __syncthreads();
      update_sums(p, coord, lse, last, shared);

      const int columns = kInRegisters ? 1 : (p.value_dim + MM1::ThreadblockShape::kN - 1) / MM1::ThreadblockShape::kN;
      for (int block_column = 0; block_column < columns; ++block_column) {
        const int column = block_column * MM1::Mma::Shape::kN;
        if (!kPreloadValues) __syncthreads();  // the epilogue of the last store used the same shared memory
        auto iterator = values(column);
        typename MM1::Mma product(shared.after_mm0.si.accum_ref(), shared.after_mm0.mm1.operand_B_ref(), coord.thread,
                                  coord.warp, coord.lane);
        product.set_prologue_done(kPreloadValues);
        if (!kInRegisters) accumulated.clear();
        const int steps = (keys + MM1::Mma::Shape::kK - 1) / MM1::Mma::Shape::kK;
        product(steps, accumulated, iterator, accumulated);
        __syncthreads();
        if (kPreloadValues && block_column + 1 < columns) preload_values(column + MM1::Mma::Shape::kN);
        if constexpr (!kInRegisters) {
          MM1::Mma::drain_cp_asyncs();
          Element* out = p.out + out_offset;
          float* sums = p.sums + out_offset;
          if (first && last) {
            store<true, true>(coord, p, out, sums, column, accumulated, shared);
          } else if (first) {
            store<true, false>(coord, p, out, sums, column, accumulated, shared);
          } else if (last) {
            store<false, true>(coord, p, out, sums, column, accumulated, shared);
          } else {
            store<false, false>(coord, p, out, sums, column, accumulated, shared);
          }
          __syncthreads();
        }
      }
      __syncthreads();
    }

    if (range.x >= range.y) {  // no key is visible: O is 0
      if (coord.thread < kQueries) {
        shared.s_prime[coord.thread] = finish_row(p, coord, lse, shared.s_prime[coord.thread], shared);
      }
      if constexpr (!kInRegisters) {
        for (int row = coord.warp; row < coord.queries; row += kThreads / 32) {
          Element* out = p.out + out_offset + int64_t(row) * p.heads * p.value_dim;
          for (int column = coord.lane; column < p.value_dim; column += 32) out[column] = Element(0);
        }
      }
      __syncthreads();
    }
    if constexpr (kInRegisters) {
      MM1::Mma::drain_cp_asyncs();
      store<true, true>(coord, p, p.out + out_offset, p.sums + out_offset, 0, accumulated, shared);
    }
  }
};

}  // namespace tilewright::attention
