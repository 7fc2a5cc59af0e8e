// Backward attention for compute capability 5.0 and up, from the matmuls of CUTLASS's example 41.
//
//   S^T = K Q^T (QK)            P^T = exp2(logit2 - lse2), [keys, queries], to shared memory
//   dP  = dO V^T (DoV)          dS  = scale * P * (dP - delta) * d(soft cap), [queries, keys], to shared memory
//   dV += P^T dO (GradV)        dQ += dS K (GradQ)        dK += dS^T Q (GradK)
//   step: S, P | dV | dP, dS | dQ | dK; with kPreload the operands of the next matmul load during the current one
//
// Pass::kKeys: a CTA owns `kKeys` keys of one KV head and iterates over the queries of all its query heads. dK and dV
// stay in registers, or in `kv_sums`. Atomics add each tile of dQ to the fp32 accumulator `q_sums` in global memory, in
// any order, so dQ is not deterministic; a last kernel converts it. The deterministic form skips that and runs a second
// pass, Pass::kQueries, whose CTAs own `kQueries` queries and compute dQ.
#pragma once

#include "attention.cuh"
#include "kernel_backward.h"

namespace tilewright::attention {

enum class Pass { kKeys, kQueries };

template <class Kernel, Pass kPass>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks) cutlass_backward(const typename Kernel::Params p) {
  Kernel::template block<kPass>(p);
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    cutlass_backward_convert(const typename Kernel::Params p) {
  Kernel::convert_block(p);
}

template <class Element, class Arch, bool kAligned, bool kDropout, bool kPreload, int kQueries, int kKeys, int kMaxDim,
          bool kWhole>  // lengths are multiples of the tiles: no bounds checks
struct CutlassBackward {
  using Library =
      AttentionBackwardKernel<Arch, Element, kAligned, kDropout, kPreload, kQueries, kKeys, kMaxDim, kWhole, false>;
  using QK = typename Library::MatmulQK;
  using GradV = typename Library::MatmulGradV;
  using DoV = typename Library::MatmulDOIVJ;
  using GradQ = typename Library::MatmulGradQ;
  using GradK = typename Library::MatmulGradK;
  using Tile = typename GradQ::AccumTileGmem;  // an fp32 tile in global memory, in register order
  static_assert(Tile::kElementsStored == kQueries * kKeys);

  static constexpr int kThreads = Library::kNumThreads;
  static constexpr int kBlocks = Library::kMinBlocksPerSm;
  static constexpr bool kInRegisters = Library::kOutputInRF;                      // dK and dV stay in registers
  static constexpr bool kQueriesInRegisters = kMaxDim <= kKeys;                   // pass kQueries: dQ in registers
  static constexpr bool kTransposes = GradK::DefaultMmaFromSmem::kIsTransposedA;  // GradK transposes dS
  static constexpr int kColumnsKV = GradK::ThreadblockShape::kN;                  // columns of dK or dV per matmul
  static constexpr int kColumnsQ = GradQ::ThreadblockShape::kN;                   // columns of dQ per matmul

  struct Storage {
    typename Library::SharedStorage products;
    float lse2[kQueries];  // lse of the query tile in units of log 2
  };

  struct Params : BackwardArrays<Element> {
    const float2* terms;      // [batch, heads, q_length]: delta, and lse in units of log 2
    float *q_sums, *kv_sums;  // fp32 accumulators of dQ, and of dK and dV
    bool adds_up;             // pass kKeys adds to dQ: not deterministic
  };

  static Facts facts() {
    return {sizeof(Storage), kThreads, kAligned ? Library::kOptimalAlignement : Library::kMinimumAlignment};
  }

  // The parts of the workspace, in floats.
  struct Sizes {
    int64_t terms, q_sums, kv_sums;
  };

  static constexpr int64_t tiles(int64_t length, int64_t block) { return (length + block - 1) / block; }

  static Sizes sizes(const Problem& problem) {
    Sizes found;
    found.terms = (2 * problem.batch * problem.heads * problem.q_length + 3) / 4 * 4;
    const bool keeps = !problem.deterministic || !kQueriesInRegisters;
    found.q_sums = keeps ? problem.batch * problem.heads * tiles(problem.q_length, kQueries) *
                               tiles(problem.head_dim, kColumnsQ) * Tile::kElementsStored
                         : 0;
    found.kv_sums = kInRegisters ? 0
                                 : problem.batch * problem.kv_heads * tiles(problem.kv_length, kKeys) *
                                       (tiles(problem.head_dim, kColumnsKV) + tiles(problem.value_dim, kColumnsKV)) *
                                       Tile::kElementsStored;
    return found;
  }

  static int64_t workspace(const Problem& problem) {
    const Sizes parts = sizes(problem);
    return (parts.terms + parts.q_sums + parts.kv_sums) * int64_t(sizeof(float));
  }

  static ffi::Error run(cudaStream_t stream, const Device&, const Problem& problem, const Arguments& arguments) {
    Params p;
    TILEWRIGHT_RETURN_IF_ERROR(start_backward<Element>(problem, arguments, stream, &p));
    const Sizes parts = sizes(problem);
    float* workspace = static_cast<float*>(arguments.workspace);
    p.terms = reinterpret_cast<float2*>(workspace);
    p.q_sums = workspace + parts.terms;
    p.kv_sums = p.q_sums + parts.q_sums;
    TILEWRIGHT_RETURN_IF_ERROR(
        start_row_terms<Element>(problem, arguments, stream, reinterpret_cast<float2*>(workspace)));
    const dim3 by_keys(tiles(problem.kv_length, kKeys), problem.kv_heads, problem.batch);
    const dim3 by_queries(tiles(problem.q_length, kQueries), problem.heads, problem.batch);
    const dim3 threads(kThreads);
    constexpr int64_t kShared = sizeof(Storage);
    p.adds_up = !problem.deterministic;
    if (p.adds_up) {
      TILEWRIGHT_RETURN_IF_ERROR(
          check(cudaMemsetAsync(p.q_sums, 0, parts.q_sums * sizeof(float), stream), "clearing the sums of dQ"));
    }
    constexpr auto kKeyKernel = cutlass_backward<CutlassBackward, Pass::kKeys>;
    constexpr auto kQueryKernel = cutlass_backward<CutlassBackward, Pass::kQueries>;
    TILEWRIGHT_RETURN_IF_ERROR(launch<kKeyKernel>(by_keys, threads, kShared, stream, p));
    if (p.adds_up) return launch<cutlass_backward_convert<CutlassBackward>>(by_queries, threads, kShared, stream, p);
    return launch<kQueryKernel>(by_queries, threads, kShared, stream, p);
  }

  // A thread's indices, and the pointers and row strides of the head that its CTA works on.
  struct TileCoord {
    int thread, warp, lane, batch, head, kv_head;
    const Element *query, *key, *value, *d_out;
    const float2* terms;
    int32_t q_stride, k_stride, v_stride, o_stride;
  };

  static __device__ TileCoord tile_coord_of(const Params& p) {
    TileCoord coord;
    coord.thread = threadIdx.x;
    coord.warp = warp_uniform(int(threadIdx.x / 32));
    coord.lane = threadIdx.x % 32;
    coord.batch = blockIdx.z;
    coord.q_stride = p.heads * p.head_dim;
    coord.k_stride = p.kv_heads * p.head_dim;
    coord.v_stride = p.kv_heads * p.value_dim;
    coord.o_stride = p.heads * p.value_dim;
    return coord;
  }

  static __device__ void use_head(const Params& p, TileCoord& coord, int head) {
    coord.head = head;
    coord.kv_head = head / p.scores.group;
    const int64_t q_rows = int64_t(coord.batch) * p.scores.q_length;
    const int64_t kv_rows = int64_t(coord.batch) * p.scores.kv_length;
    coord.query = p.query + q_rows * coord.q_stride + head * p.head_dim;
    coord.key = p.key + kv_rows * coord.k_stride + coord.kv_head * p.head_dim;
    coord.value = p.value + kv_rows * coord.v_stride + coord.kv_head * p.value_dim;
    coord.d_out = p.d_out + q_rows * coord.o_stride + head * p.value_dim;
    coord.terms = p.terms + (int64_t(coord.batch) * p.heads + head) * p.scores.q_length;
  }

  static __device__ int clipped(int start, int length, int block) {
    return kWhole ? block : min(block, length - start);
  }

  template <class Mma>
  static __device__ cutlass::MatrixCoord tile_of_warp(int warp) {
    constexpr int kRows = Mma::Base::WarpCount::kM, kColumns = Mma::Base::WarpCount::kN;
    const int index = warp % (kRows * kColumns);
    return {index % kRows, index / kRows};
  }

  template <class Iterator>
  static __device__ Iterator operand(const Element* pointer, int32_t stride, int rows, int columns, int thread) {
    return Iterator({stride}, const_cast<Element*>(pointer), {rows, columns}, thread, cutlass::MatrixCoord{0, 0});
  }

  // Starts the loads for S of the next tile; K only if kLoadKeys.
  template <bool kLoadKeys>
  static __device__ void preload_logits(
      const Params& p, const TileCoord& coord, Storage& shared, int q_start, int k_start) {
    using Mma = typename QK::Mma;
    auto keys = operand<typename Mma::IteratorA>(coord.key + int64_t(k_start) * coord.k_stride, coord.k_stride,
                                                 p.scores.kv_length - k_start, p.head_dim, coord.thread);
    auto queries = operand<typename Mma::IteratorB>(coord.query + int64_t(q_start) * coord.q_stride, coord.q_stride,
                                                    p.head_dim, p.scores.q_length - q_start, coord.thread);
    Mma::template prologue<kLoadKeys, true>(shared.products.mm_qk_k(), shared.products.mm_qk_q(), keys, queries,
                                            coord.thread, p.head_dim);
  }

  // Converts an accumulator and stores it as rows of a gradient.
  template <class Product>
  static __device__ void store(const TileCoord& coord, typename Product::DefaultEpilogue::SharedStorage& shared,
                               typename Product::Mma::FragmentC const& fragment, Element* target, int32_t stride,
                               int rows, int columns) {
    using Default = typename Product::DefaultEpilogue;
    using Output = typename Product::DefaultOutputOp;
    using Convert = cutlass::epilogue::thread::LinearCombination<
        typename Output::ElementOutput, Output::kCount, typename Output::ElementAccumulator,
        typename Output::ElementCompute, cutlass::epilogue::thread::ScaleType::Nothing>;
    using Iterator = typename Product::OutputTileIterator;
    using Epilogue = cutlass::epilogue::threadblock::EpiloguePipelined<
        typename Default::Shape, typename Product::Mma::Operator, Default::kPartitionsK, Iterator,
        typename Default::AccumulatorFragmentIterator, typename Default::WarpTileIterator,
        typename Default::SharedLoadIterator, Convert, typename Default::Padding, Default::kFragmentsPerIteration,
        true>;
    Iterator iterator(typename Iterator::Params{stride}, target, {rows, columns}, coord.thread);
    Convert convert({1, 1});
    Epilogue epilogue(shared, coord.thread, coord.warp, coord.lane);
    epilogue(convert, iterator, fragment, iterator);
  }

  static __device__ Tile q_tile(const Params& p, const TileCoord& coord, int q_start, int column) {
    const int64_t columns = tiles(p.head_dim, kColumnsQ), rows = tiles(p.scores.q_length, kQueries);
    const int64_t tile = ((int64_t(coord.batch) * p.heads + coord.head) * rows + q_start / kQueries) * columns;
    return Tile{p.q_sums + (tile + column / kColumnsQ) * Tile::kElementsStored};
  }

  // The tile of the dV accumulator if `of_values`, else of the dK accumulator.
  static __device__ Tile kv_tile(const Params& p, const TileCoord& coord, int k_start, int column, bool of_values) {
    const int64_t columns_k = tiles(p.head_dim, kColumnsKV), columns = columns_k + tiles(p.value_dim, kColumnsKV);
    const int64_t rows = tiles(p.scores.kv_length, kKeys);
    const int64_t tile = ((int64_t(coord.batch) * p.kv_heads + coord.kv_head) * rows + k_start / kKeys) * columns;
    return Tile{p.kv_sums + (tile + (of_values ? columns_k : 0) + column / kColumnsKV) * Tile::kElementsStored};
  }

  struct KeyGradients {
    typename GradV::Mma::FragmentC value;
    typename GradK::Mma::FragmentC key;
  };

  struct QueryGradient {
    typename GradQ::Mma::FragmentC query;
  };

  template <Pass kPass>
  using Gradients = std::conditional_t<kPass == Pass::kQueries, QueryGradient, KeyGradients>;

  // One step. `started`: the accumulators in global memory hold earlier steps; `next` preloads the next S operands.
  template <Pass kPass, class Next>
  static __device__ void tile(const Params& p, TileCoord coord, Storage& storage, Gradients<kPass>& gradients,
                              int q_start, int k_start, bool started, Next next) {
    auto& shared = storage.products;
    const HeadScores head(p.scores, coord.batch, coord.head);
    const int queries = clipped(q_start, p.scores.q_length, kQueries);
    const int keys = clipped(k_start, p.scores.kv_length, kKeys);
    const Element* query = coord.query + int64_t(q_start) * coord.q_stride;
    const Element* key = coord.key + int64_t(k_start) * coord.k_stride;
    const Element* value = coord.value + int64_t(k_start) * coord.v_stride;
    const Element* d_out = coord.d_out + int64_t(q_start) * coord.o_stride;
    auto d_out_columns = [&](int column) {
      return operand<typename GradV::Mma::IteratorB>(d_out + column, coord.o_stride, queries, p.value_dim - column,
                                                     coord.thread);
    };
    auto key_columns = [&](int column) {
      return operand<typename GradQ::Mma::IteratorB>(key + column, coord.k_stride, keys, p.head_dim - column,
                                                     coord.thread);
    };
    auto query_columns = [&](int column) {
      return operand<typename GradK::Mma::IteratorB>(query + column, coord.q_stride, queries, p.head_dim - column,
                                                     coord.thread);
    };
    auto preload_grad_v = [&](int column) {
      auto iterator = d_out_columns(column);
      GradV::Mma::prologue(shared.mm_gradV(), iterator, coord.thread, queries);
    };
    auto preload_grad_q = [&](int column) {
      auto iterator = key_columns(column);
      GradQ::Mma::prologue(shared.mm_gradQ(), iterator, coord.thread, keys);
    };
    auto preload_grad_k = [&](int column) {
      auto iterator = query_columns(column);
      GradK::Mma::prologue(shared.mm_gradK(), iterator, coord.thread, queries);
    };
    auto d_out_rows = [&] {
      return operand<typename DoV::Mma::IteratorA>(d_out, coord.o_stride, queries, p.value_dim, coord.thread);
    };
    auto value_rows = [&] {
      return operand<typename DoV::Mma::IteratorB>(value, coord.v_stride, p.value_dim, keys, coord.thread);
    };

    if (coord.thread < kQueries) {
      const bool inside = coord.thread < queries;
      const float2 terms = inside ? coord.terms[q_start + coord.thread] : make_float2(0, INFINITY);
      shared.di()[coord.thread] = terms.x;
      storage.lse2[coord.thread] = terms.y;
    }
    constexpr int kDoVElements = DoV::Mma::FragmentC::kElements;
    uint32_t dropped[(kDoVElements + 31) / 32] = {};  // one bit per element of dP in this thread
    const cutlass::MatrixCoord dov_tile = tile_of_warp<typename DoV::Mma>(coord.warp);

    {  // P^T, [keys, queries], to shared memory
      using Mma = typename QK::Mma;
      using Logits = typename QK::AccumLambdaIterator;
      auto keys_iterator = operand<typename Mma::IteratorA>(key, coord.k_stride, keys, p.head_dim, coord.thread);
      auto queries_iterator =
          operand<typename Mma::IteratorB>(query, coord.q_stride, p.head_dim, queries, coord.thread);
      Mma product(shared.mm_qk_k(), shared.mm_qk_q(), coord.thread, coord.warp, coord.lane);
      typename Mma::FragmentC logits;
      logits.clear();
      product.set_prologue_done(kPreload);
      product.set_zero_outside_bounds(!kWhole);
      product((p.head_dim + Mma::Shape::kK - 1) / Mma::Shape::kK, logits, keys_iterator, queries_iterator, logits);
      const cutlass::MatrixCoord warp_tile = tile_of_warp<Mma>(coord.warp);
      auto offset = Logits::get_lane_offset(coord.lane, coord.warp, warp_tile);
      __syncthreads();  // delta and lse2 are in shared memory, and all warps have read Q and K
      if constexpr (kPreload) {
        if constexpr (kPass != Pass::kQueries) preload_grad_v(0);
        auto rows = d_out_rows();
        auto columns = value_rows();
        DoV::Mma::prologue(shared.mm_doivj(), rows, columns, coord.thread, p.value_dim);
      }
      const bool plain = head.plain();
      const bool whole = queries == kQueries && keys == kKeys &&
                         head.all_visible(q_start, q_start + queries, k_start, k_start + keys);
      const float multiplier = p.scores.scale * kLog2e;
      Logits::iterateRows(
          offset, [](int) {},
          [&](int m, int n, int i) {  // m is a key, n a query
            const bool inside = whole || (m < keys && n < queries);
            float logit = logits[i] * multiplier;
            if (!plain && inside) logit = head.logit(logits[i], q_start + n, k_start + m);
            const bool is_visible = whole || (inside && head.visible(q_start + n, k_start + m));
            logits[i] = is_visible ? exp2f(logit - storage.lse2[n]) : 0.0f;
          },
          [](int) {});
      QK::B2bGemm::accumToSmem(shared.attn_shared_storage(), logits, coord.lane, warp_tile);
      if constexpr (kDropout) {
        auto keep = shared.zij().accum_ref();
        const bool drops = head.drops();
        const uint2 dropout_key = drops ? head.dropout_key() : uint2{};
        Logits::iterateRows(
            offset, [](int) {},
            [&](int m, int n, int) {
              const uint2 words = random_words(dropout_key, q_start + n, k_start + m);
              const bool keeps = !drops || kept(words, p.scores.keep_threshold, q_start + n, k_start + m);
              keep.at({m, n}) = keeps ? Element(1.0f) : Element(0.0f);
            },
            [](int) {});
        __syncthreads();
        auto dov_offset = DoV::AccumLambdaIterator::get_lane_offset(coord.lane, coord.warp, dov_tile);
        DoV::AccumLambdaIterator::iterateRows(
            dov_offset, [](int) {},
            [&](int m, int n, int i) {  // m is a query, n a key
              if (keep.at({n, m}) == Element(0.0f)) dropped[i / 32] |= 1u << (i % 32);
            },
            [](int) {});
      }
      __syncthreads();
    }
    coord.warp = warp_uniform(coord.warp);  // recomputed instead of kept in a register across the matmul

    if constexpr (kPass != Pass::kQueries) {  // dV += P^T dO
      using Mma = typename GradV::Mma;
      const int columns = kMaxDim <= kColumnsKV ? 1 : p.value_dim;
      for (int column = 0; column < columns; column += kColumnsKV) {
        auto iterator = d_out_columns(column);
        Mma product(shared.attn_shared_storage().accum_ref(), shared.zij().accum_ref(),
                    shared.mm_gradV().operand_B_ref(), coord.thread, coord.warp, coord.lane);
        Tile sums = kv_tile(p, coord, k_start, column, true);
        if constexpr (!kInRegisters) {
          gradients.value.clear();
          if (started) sums.load(gradients.value, coord.thread);
        }
        product.set_prologue_done(kPreload);
        __syncthreads();
        product((queries + Mma::Shape::kK - 1) / Mma::Shape::kK, gradients.value, iterator, gradients.value);
        __syncthreads();
        if (kPreload && column + kColumnsKV < columns) preload_grad_v(column + kColumnsKV);
        if constexpr (!kInRegisters) sums.store(gradients.value, coord.thread);
      }
      __syncthreads();
    }

    {  // dP = dO V^T, dS = scale * P * (dP - delta), [queries, keys], to shared memory
      using Mma = typename DoV::Mma;
      using Logits = typename DoV::AccumLambdaIterator;
      auto rows = d_out_rows();
      auto columns = value_rows();
      Mma product(shared.mm_doivj(), coord.thread, coord.warp, coord.lane);
      typename Mma::FragmentC d_logits;
      d_logits.clear();
      product.set_prologue_done(kPreload);
      product.set_zero_outside_bounds(!kWhole);
      product((p.value_dim + Mma::Shape::kK - 1) / Mma::Shape::kK, d_logits, rows, columns, d_logits);
      __syncthreads();
      if constexpr (kPreload) {
        if (kPass == Pass::kQueries || p.adds_up) preload_grad_q(0);
        if constexpr (kPass != Pass::kQueries) preload_grad_k(0);
      }
      auto offset = Logits::get_lane_offset(coord.lane, coord.warp, dov_tile);
      auto probabilities = shared.attn_shared_storage().accum_ref();
      const bool capped = p.scores.soft_cap != 0;
      const bool stores_bias = p.d_bias.data != nullptr && kPass != Pass::kQueries;
      float term, lse2;
      Logits::iterateRows(
          offset,
          [&](int m) {
            term = shared.di()[m];
            lse2 = storage.lse2[m];
          },
          [&](int m, int n, int i) {
            float gradient = 0;
            if (kWhole || (m < queries && n < keys)) {
              const float probability = float(probabilities.at({n, m}));
              float d_probability = d_logits[i];
              if (kDropout) {
                d_probability = (dropped[i / 32] >> (i % 32)) & 1 ? 0.0f : d_probability * p.scores.keep_scale;
              }
              gradient = (d_probability - term) * probability;
              if (capped && probability > 0) gradient *= head.cap_slope(log2f(probability) + lse2);
              if (stores_bias) p.d_bias.add(coord.batch, coord.head, q_start + m, k_start + n, gradient);
            }
            d_logits[i] = gradient * p.scores.scale;
          },
          [](int) {});
      __syncthreads();
      if constexpr (!kTransposes && kPass != Pass::kQueries) {
        auto transposed = shared.tmpT_shared_storage().accum_ref();
        Logits::iterateRows(
            offset, [](int) {}, [&](int m, int n, int i) { transposed.at({n, m}) = Element(d_logits[i]); }, [](int) {});
      }
      DoV::B2bGemm::accumToSmem(shared.tmp_shared_storage(), d_logits, coord.lane, dov_tile);
      __syncthreads();
    }
    coord.warp = warp_uniform(coord.warp);

    if (kPass == Pass::kQueries || p.adds_up) {  // dQ += dS K
      using Mma = typename GradQ::Mma;
      const int columns = kMaxDim <= kColumnsQ ? 1 : p.head_dim;
      for (int column = 0; column < columns; column += kColumnsQ) {
        auto iterator = key_columns(column);
        Mma product(shared.tmp_shared_storage().accum_ref(), shared.mm_gradQ().operand_B_ref(), coord.thread,
                    coord.warp, coord.lane);
        product.set_prologue_done(kPreload);
        const int steps = (keys + Mma::Shape::kK - 1) / Mma::Shape::kK;
        Tile sums = q_tile(p, coord, q_start, column);
        if constexpr (kPass == Pass::kQueries) {
          if constexpr (!kQueriesInRegisters) {
            gradients.query.clear();
            if (started) sums.load(gradients.query, coord.thread);
          }
          __syncthreads();
          product(steps, gradients.query, iterator, gradients.query);
          if constexpr (!kQueriesInRegisters) sums.store(gradients.query, coord.thread);
        } else {
          typename Mma::FragmentC added;
          added.clear();
          __syncthreads();
          product(steps, added, iterator, added);
          sums.storeAtomicAdd(added, coord.thread);
        }
        __syncthreads();
        if (kPreload && column + kColumnsQ < columns) preload_grad_q(column + kColumnsQ);
      }
    }

    if constexpr (kPass != Pass::kQueries) {  // dK += dS^T Q
      using Mma = typename GradK::Mma;
      auto plain = [&](int) { return &shared.tmp_shared_storage(); };
      auto transposed = [&](int) { return &shared.tmpT_shared_storage(); };
      auto& left = *call_conditional<kTransposes, decltype(plain), decltype(transposed)>::apply(plain, transposed, 0);
      const int columns = kMaxDim <= kColumnsKV ? 1 : p.head_dim;
      for (int column = 0; column < columns; column += kColumnsKV) {
        auto iterator = query_columns(column);
        Mma product(left.accum_ref(), shared.mm_gradK().operand_B_ref(), coord.thread, coord.warp, coord.lane);
        Tile sums = kv_tile(p, coord, k_start, column, false);
        if constexpr (!kInRegisters) {
          gradients.key.clear();
          if (started) sums.load(gradients.key, coord.thread);
        }
        product.set_prologue_done(kPreload);
        __syncthreads();
        product((queries + Mma::Shape::kK - 1) / Mma::Shape::kK, gradients.key, iterator, gradients.key);
        __syncthreads();
        if (kPreload && column + kColumnsKV < columns) preload_grad_k(column + kColumnsKV);
        if constexpr (!kInRegisters) sums.store(gradients.key, coord.thread);
      }
    }
    if constexpr (kPreload) next();
    __syncthreads();
  }

  template <Pass kPass>
  static __device__ void block(const Params& p) {
    if constexpr (kPass == Pass::kQueries) {
      query_block(p);
    } else {
      key_block(p);
    }
  }

  static __device__ void key_block(const Params& p) {
    extern __shared__ __align__(128) char memory[];
    Storage& storage = *reinterpret_cast<Storage*>(memory);
    constexpr bool kReloadsKeys = !QK::Mma::kSmemContainsEntireMat;
    TileCoord coord = tile_coord_of(p);
    const int k_start = blockIdx.x * kKeys, kv_head = blockIdx.y, group = p.scores.group;
    const int keys = clipped(k_start, p.scores.kv_length, kKeys);
    KeyGradients gradients;
    gradients.value.clear();
    gradients.key.clear();
    bool started = false;
    // Iterates over the group's query heads and their query tiles, skipping heads whose queries see none of these keys.
    int member = 0;
    int2 range = make_int2(0, 0);
    auto enter = [&] {  // moves on to the next head that sees some of these keys
      for (; member < group; ++member) {
        const HeadScores head(p.scores, coord.batch, kv_head * group + member);
        range = head.queries_for(k_start, k_start + keys, kQueries);
        if (range.x < range.y) break;
      }
    };
    enter();
    if constexpr (kPreload) {
      if (member < group) {
        use_head(p, coord, kv_head * group + member);
        preload_logits<true>(p, coord, storage, range.x, k_start);
      }
    }
    int q_start = range.x;
    while (member < group) {
      use_head(p, coord, kv_head * group + member);
      const TileCoord current = coord;
      const int current_start = q_start;
      q_start += kQueries;
      if (q_start >= range.y) {
        ++member;
        enter();
        q_start = range.x;
      }
      tile<Pass::kKeys>(p, current, storage, gradients, current_start, k_start, started, [&] {
        if (member < group) {
          TileCoord following = current;
          use_head(p, following, kv_head * group + member);
          preload_logits<kReloadsKeys>(p, following, storage, q_start, k_start);
        }
      });
      started = true;
    }
    use_head(p, coord, kv_head * group);
    const int64_t row = int64_t(coord.batch) * p.scores.kv_length + k_start;
    Element* d_key = p.d_key + row * coord.k_stride + kv_head * p.head_dim;
    Element* d_value = p.d_value + row * coord.v_stride + kv_head * p.value_dim;
    auto& shared = storage.products;
    __syncthreads();
    for (int column = 0; column < (kMaxDim <= kColumnsKV ? 1 : p.value_dim); column += kColumnsKV) {
      if (!kInRegisters && started) kv_tile(p, coord, k_start, column, true).load(gradients.value, coord.thread);
      if constexpr (kDropout) {
        gradients.value = cutlass::multiplies<typename GradV::Mma::FragmentC>()(p.scores.keep_scale, gradients.value);
      }
      store<GradV>(coord, shared.gradV_epilogue_final(), gradients.value, d_value + column, coord.v_stride, keys,
                   p.value_dim - column);
      __syncthreads();
    }
    for (int column = 0; column < (kMaxDim <= kColumnsKV ? 1 : p.head_dim); column += kColumnsKV) {
      if (!kInRegisters && started) kv_tile(p, coord, k_start, column, false).load(gradients.key, coord.thread);
      store<GradK>(coord, shared.gradK_epilogue_final(), gradients.key, d_key + column, coord.k_stride, keys,
                   p.head_dim - column);
      __syncthreads();
    }
  }

  static __device__ void query_block(const Params& p) {
    extern __shared__ __align__(128) char memory[];
    Storage& storage = *reinterpret_cast<Storage*>(memory);
    TileCoord coord = tile_coord_of(p);
    use_head(p, coord, blockIdx.y);
    const int q_start = (gridDim.x - 1 - blockIdx.x) * kQueries;
    const int queries = clipped(q_start, p.scores.q_length, kQueries);
    const int2 range = HeadScores(p.scores, coord.batch, coord.head).keys_for(q_start, q_start + queries, kKeys);
    QueryGradient gradient;
    gradient.query.clear();
    if constexpr (kPreload) {
      if (range.x < range.y) preload_logits<true>(p, coord, storage, q_start, range.x);
    }
    for (int k_start = range.x; k_start < range.y; k_start += kKeys) {
      tile<Pass::kQueries>(p, coord, storage, gradient, q_start, k_start, k_start > range.x, [&] {
        if (k_start + kKeys < range.y) preload_logits<true>(p, coord, storage, q_start, k_start + kKeys);
      });
    }
    store_query(p, coord, storage, gradient, q_start, queries, !kQueriesInRegisters && range.x < range.y);
  }

  static __device__ void convert_block(const Params& p) {
    extern __shared__ __align__(128) char memory[];
    Storage& storage = *reinterpret_cast<Storage*>(memory);
    TileCoord coord = tile_coord_of(p);
    use_head(p, coord, blockIdx.y);
    const int q_start = blockIdx.x * kQueries;
    QueryGradient gradient;
    store_query(p, coord, storage, gradient, q_start, clipped(q_start, p.scores.q_length, kQueries), true);
  }

  static __device__ void store_query(const Params& p, const TileCoord& coord, Storage& storage, QueryGradient& gradient,
                                     int q_start, int queries, bool load) {
    const int64_t row = int64_t(coord.batch) * p.scores.q_length + q_start;
    Element* d_query = p.d_query + row * coord.q_stride + coord.head * p.head_dim;
    __syncthreads();
    for (int column = 0; column < (kMaxDim <= kColumnsQ ? 1 : p.head_dim); column += kColumnsQ) {
      if (load) q_tile(p, coord, q_start, column).load(gradient.query, coord.thread);
      store<GradQ>(coord, storage.products.gradQ_epilogue_lastIter(), gradient.query, d_query + column, coord.q_stride,
                   queries, p.head_dim - column);
      __syncthreads();
    }
  }
};

}  // namespace tilewright::attention
