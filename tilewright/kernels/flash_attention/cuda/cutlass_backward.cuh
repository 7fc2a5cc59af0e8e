// Backward attention for compute capability 5.0 and up from the matrix products of CUTLASS's example 41.
//
// A block owns `kKeys` keys of one head of keys and walks over the queries of all its query heads: dK and dV. What it
// adds to dQ goes to float32 sums in global memory, tile by tile in the order of the registers, in whatever order
// blocks come to it. The deterministic form leaves that out and has another pass, whose blocks own `kQueries` queries.
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
          bool kWhole>  // whether lengths are multiples of the blocks
struct CutlassBackward {
  using Library =
      AttentionBackwardKernel<Arch, Element, kAligned, kDropout, kPreload, kQueries, kKeys, kMaxDim, kWhole, false>;
  using QK = typename Library::MatmulQK;
  using GradV = typename Library::MatmulGradV;
  using DoV = typename Library::MatmulDOIVJ;
  using GradQ = typename Library::MatmulGradQ;
  using GradK = typename Library::MatmulGradK;
  using Tile = typename GradQ::AccumTileGmem;  // sums in global memory in the order of the registers
  static_assert(Tile::kElementsStored == kQueries * kKeys);

  static constexpr int kThreads = Library::kNumThreads;
  static constexpr int kBlocks = Library::kMinBlocksPerSm;
  static constexpr bool kInRegisters = Library::kOutputInRF;            // dK and dV
  static constexpr bool kQueriesInRegisters = kMaxDim <= kKeys;         // dQ of the deterministic form
  static constexpr bool kTransposes = GradK::DefaultMmaFromSmem::kIsTransposedA;
  static constexpr int kColumnsKV = GradK::ThreadblockShape::kN;        // of dK and dV at a time
  static constexpr int kColumnsQ = GradQ::ThreadblockShape::kN;

  struct Storage {
    typename Library::SharedStorage products;
    float lse2[kQueries];
  };

  struct Params : BackwardArrays<Element> {
    const float2* terms;  // [batch, heads, q_length]
    float *q_sums, *kv_sums;
    bool adds_up;         // whether blocks of keys add to dQ
  };

  static Facts facts() {
    return {sizeof(Storage), kThreads, kAligned ? Library::kOptimalAlignement : Library::kMinimumAlignment};
  }

  // Floats of each part of the workspace.
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

  // A block's threads, and the pointers of the head that it works on.
  struct Place {
    int thread, warp, lane, batch, head, kv_head;
    const Element *query, *key, *value, *d_out;
    const float2* terms;
    int32_t q_stride, k_stride, v_stride, o_stride;
  };

  static __device__ Place place_of(const Params& p) {
    Place place;
    place.thread = threadIdx.x;
    place.warp = warp_uniform(int(threadIdx.x / 32));
    place.lane = threadIdx.x % 32;
    place.batch = blockIdx.z;
    place.q_stride = p.heads * p.head_dim;
    place.k_stride = p.kv_heads * p.head_dim;
    place.v_stride = p.kv_heads * p.value_dim;
    place.o_stride = p.heads * p.value_dim;
    return place;
  }

  static __device__ void use_head(const Params& p, Place& place, int head) {
    place.head = head;
    place.kv_head = head / p.scores.group;
    const int64_t q_rows = int64_t(place.batch) * p.scores.q_length;
    const int64_t kv_rows = int64_t(place.batch) * p.scores.kv_length;
    place.query = p.query + q_rows * place.q_stride + head * p.head_dim;
    place.key = p.key + kv_rows * place.k_stride + place.kv_head * p.head_dim;
    place.value = p.value + kv_rows * place.v_stride + place.kv_head * p.value_dim;
    place.d_out = p.d_out + q_rows * place.o_stride + head * p.value_dim;
    place.terms = p.terms + (int64_t(place.batch) * p.heads + head) * p.scores.q_length;
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

  template <bool kLoadKeys>
  static __device__ void preload_logits(
      const Params& p, const Place& place, Storage& shared, int q_start, int k_start) {
    using Mma = typename QK::Mma;
    auto keys = operand<typename Mma::IteratorA>(place.key + int64_t(k_start) * place.k_stride, place.k_stride,
                                                 p.scores.kv_length - k_start, p.head_dim, place.thread);
    auto queries = operand<typename Mma::IteratorB>(place.query + int64_t(q_start) * place.q_stride, place.q_stride,
                                                    p.head_dim, p.scores.q_length - q_start, place.thread);
    Mma::template prologue<kLoadKeys, true>(shared.products.mm_qk_k(), shared.products.mm_qk_q(), keys, queries,
                                            place.thread, p.head_dim);
  }

  // Writes a fragment as rows of a gradient.
  template <class Product>
  static __device__ void store(const Place& place, typename Product::DefaultEpilogue::SharedStorage& shared,
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
    Iterator iterator(typename Iterator::Params{stride}, target, {rows, columns}, place.thread);
    Convert convert({1, 1});
    Epilogue epilogue(shared, place.thread, place.warp, place.lane);
    epilogue(convert, iterator, fragment, iterator);
  }

  static __device__ Tile q_tile(const Params& p, const Place& place, int q_start, int column) {
    const int64_t columns = tiles(p.head_dim, kColumnsQ), rows = tiles(p.scores.q_length, kQueries);
    const int64_t tile = ((int64_t(place.batch) * p.heads + place.head) * rows + q_start / kQueries) * columns;
    return Tile{p.q_sums + (tile + column / kColumnsQ) * Tile::kElementsStored};
  }

  // Sums of dV where `of_values`, else of dK.
  static __device__ Tile kv_tile(const Params& p, const Place& place, int k_start, int column, bool of_values) {
    const int64_t columns_k = tiles(p.head_dim, kColumnsKV), columns = columns_k + tiles(p.value_dim, kColumnsKV);
    const int64_t rows = tiles(p.scores.kv_length, kKeys);
    const int64_t tile = ((int64_t(place.batch) * p.kv_heads + place.kv_head) * rows + k_start / kKeys) * columns;
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

  // One tile of logits: `started` says whether sums in global memory hold anything yet; `next` preloads the next tile.
  template <Pass kPass, class Next>
  static __device__ void tile(const Params& p, Place place, Storage& storage, Gradients<kPass>& gradients, int q_start,
                              int k_start, bool started, Next next) {
    auto& shared = storage.products;
    const HeadScores head(p.scores, place.batch, place.head);
    const int queries = clipped(q_start, p.scores.q_length, kQueries);
    const int keys = clipped(k_start, p.scores.kv_length, kKeys);
    const Element* query = place.query + int64_t(q_start) * place.q_stride;
    const Element* key = place.key + int64_t(k_start) * place.k_stride;
    const Element* value = place.value + int64_t(k_start) * place.v_stride;
    const Element* d_out = place.d_out + int64_t(q_start) * place.o_stride;
    auto d_out_columns = [&](int column) {
      return operand<typename GradV::Mma::IteratorB>(d_out + column, place.o_stride, queries, p.value_dim - column,
                                                     place.thread);
    };
    auto key_columns = [&](int column) {
      return operand<typename GradQ::Mma::IteratorB>(key + column, place.k_stride, keys, p.head_dim - column,
                                                     place.thread);
    };
    auto query_columns = [&](int column) {
      return operand<typename GradK::Mma::IteratorB>(query + column, place.q_stride, queries, p.head_dim - column,
                                                     place.thread);
    };
    auto preload_grad_v = [&](int column) {
      auto iterator = d_out_columns(column);
      GradV::Mma::prologue(shared.mm_gradV(), iterator, place.thread, queries);
    };
    auto preload_grad_q = [&](int column) {
      auto iterator = key_columns(column);
      GradQ::Mma::prologue(shared.mm_gradQ(), iterator, place.thread, keys);
    };
    auto preload_grad_k = [&](int column) {
      auto iterator = query_columns(column);
      GradK::Mma::prologue(shared.mm_gradK(), iterator, place.thread, queries);
    };
    auto d_out_rows = [&] {
      return operand<typename DoV::Mma::IteratorA>(d_out, place.o_stride, queries, p.value_dim, place.thread);
    };
    auto value_rows = [&] {
      return operand<typename DoV::Mma::IteratorB>(value, place.v_stride, p.value_dim, keys, place.thread);
    };

    if (place.thread < kQueries) {
      const bool inside = place.thread < queries;
      const float2 terms = inside ? place.terms[q_start + place.thread] : make_float2(0, INFINITY);
      shared.di()[place.thread] = terms.x;
      storage.lse2[place.thread] = terms.y;
    }
    constexpr int kDoVElements = DoV::Mma::FragmentC::kElements;
    uint32_t dropped[(kDoVElements + 31) / 32] = {};  // bits of the elements of dP
    const cutlass::MatrixCoord dov_tile = tile_of_warp<typename DoV::Mma>(place.warp);

    {  // Probabilities, [keys, queries], to shared memory.
      using Mma = typename QK::Mma;
      using Logits = typename QK::AccumLambdaIterator;
      auto keys_iterator = operand<typename Mma::IteratorA>(key, place.k_stride, keys, p.head_dim, place.thread);
      auto queries_iterator =
          operand<typename Mma::IteratorB>(query, place.q_stride, p.head_dim, queries, place.thread);
      Mma product(shared.mm_qk_k(), shared.mm_qk_q(), place.thread, place.warp, place.lane);
      typename Mma::FragmentC logits;
      logits.clear();
      product.set_prologue_done(kPreload);
      product.set_zero_outside_bounds(!kWhole);
      product((p.head_dim + Mma::Shape::kK - 1) / Mma::Shape::kK, logits, keys_iterator, queries_iterator, logits);
      const cutlass::MatrixCoord warp_tile = tile_of_warp<Mma>(place.warp);
      auto offset = Logits::get_lane_offset(place.lane, place.warp, warp_tile);
      __syncthreads();  // the row terms are there, and the operands have been read
      if constexpr (kPreload) {
        if constexpr (kPass != Pass::kQueries) preload_grad_v(0);
        auto rows = d_out_rows();
        auto columns = value_rows();
        DoV::Mma::prologue(shared.mm_doivj(), rows, columns, place.thread, p.value_dim);
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
            const bool seen = whole || (inside && head.visible(q_start + n, k_start + m));
            logits[i] = seen ? exp2f(logit - storage.lse2[n]) : 0.0f;
          },
          [](int) {});
      QK::B2bGemm::accumToSmem(shared.attn_shared_storage(), logits, place.lane, warp_tile);
      if constexpr (kDropout) {
        auto keep = shared.zij().accum_ref();
        const bool drops = head.drops();
        const uint2 dropout_key = drops ? head.dropout_key() : uint2{};
        const uint32_t threshold = p.scores.keep_threshold;
        Logits::iterateRows(
            offset, [](int) {},
            [&](int m, int n, int) {
              const bool keeps = !drops || kept(dropout_key, threshold, q_start + n, k_start + m);
              keep.at({m, n}) = keeps ? Element(1.0f) : Element(0.0f);
            },
            [](int) {});
        __syncthreads();
        auto dov_offset = DoV::AccumLambdaIterator::get_lane_offset(place.lane, place.warp, dov_tile);
        DoV::AccumLambdaIterator::iterateRows(
            dov_offset, [](int) {},
            [&](int m, int n, int i) {  // m is a query, n a key
              if (keep.at({n, m}) == Element(0.0f)) dropped[i / 32] |= 1u << (i % 32);
            },
            [](int) {});
      }
      __syncthreads();
    }
    place.warp = warp_uniform(place.warp);  // computed anew, not carried in registers over the products

    if constexpr (kPass != Pass::kQueries) {  // dV += probabilities · dO
      using Mma = typename GradV::Mma;
      const int columns = kMaxDim <= kColumnsKV ? 1 : p.value_dim;
      for (int column = 0; column < columns; column += kColumnsKV) {
        auto iterator = d_out_columns(column);
        Mma product(shared.attn_shared_storage().accum_ref(), shared.zij().accum_ref(),
                    shared.mm_gradV().operand_B_ref(), place.thread, place.warp, place.lane);
        Tile sums = kv_tile(p, place, k_start, column, true);
        if constexpr (!kInRegisters) {
          gradients.value.clear();
          if (started) sums.load(gradients.value, place.thread);
        }
        product.set_prologue_done(kPreload);
        __syncthreads();
        product((queries + Mma::Shape::kK - 1) / Mma::Shape::kK, gradients.value, iterator, gradients.value);
        __syncthreads();
        if (kPreload && column + kColumnsKV < columns) preload_grad_v(column + kColumnsKV);
        if constexpr (!kInRegisters) sums.store(gradients.value, place.thread);
      }
      __syncthreads();
    }

    {  // dS = probabilities · (dO · Vᵀ - terms), [queries, keys], to shared memory.
      using Mma = typename DoV::Mma;
      using Logits = typename DoV::AccumLambdaIterator;
      auto rows = d_out_rows();
      auto columns = value_rows();
      Mma product(shared.mm_doivj(), place.thread, place.warp, place.lane);
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
      auto offset = Logits::get_lane_offset(place.lane, place.warp, dov_tile);
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
              if (stores_bias) p.d_bias.add(place.batch, place.head, q_start + m, k_start + n, gradient);
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
      DoV::B2bGemm::accumToSmem(shared.tmp_shared_storage(), d_logits, place.lane, dov_tile);
      __syncthreads();
    }
    place.warp = warp_uniform(place.warp);

    if (kPass == Pass::kQueries || p.adds_up) {  // dQ += dS · K
      using Mma = typename GradQ::Mma;
      const int columns = kMaxDim <= kColumnsQ ? 1 : p.head_dim;
      for (int column = 0; column < columns; column += kColumnsQ) {
        auto iterator = key_columns(column);
        Mma product(shared.tmp_shared_storage().accum_ref(), shared.mm_gradQ().operand_B_ref(), place.thread,
                    place.warp, place.lane);
        product.set_prologue_done(kPreload);
        const int steps = (keys + Mma::Shape::kK - 1) / Mma::Shape::kK;
        Tile sums = q_tile(p, place, q_start, column);
        if constexpr (kPass == Pass::kQueries) {
          if constexpr (!kQueriesInRegisters) {
            gradients.query.clear();
            if (started) sums.load(gradients.query, place.thread);
          }
          __syncthreads();
          product(steps, gradients.query, iterator, gradients.query);
          if constexpr (!kQueriesInRegisters) sums.store(gradients.query, place.thread);
        } else {
          typename Mma::FragmentC added;
          added.clear();
          __syncthreads();
          product(steps, added, iterator, added);
          sums.storeAtomicAdd(added, place.thread);
        }
        __syncthreads();
        if (kPreload && column + kColumnsQ < columns) preload_grad_q(column + kColumnsQ);
      }
    }

    if constexpr (kPass != Pass::kQueries) {  // dK += dSᵀ · Q
      using Mma = typename GradK::Mma;
      auto plain = [&](int) { return &shared.tmp_shared_storage(); };
      auto transposed = [&](int) { return &shared.tmpT_shared_storage(); };
      auto& left = *call_conditional<kTransposes, decltype(plain), decltype(transposed)>::apply(plain, transposed, 0);
      const int columns = kMaxDim <= kColumnsKV ? 1 : p.head_dim;
      for (int column = 0; column < columns; column += kColumnsKV) {
        auto iterator = query_columns(column);
        Mma product(left.accum_ref(), shared.mm_gradK().operand_B_ref(), place.thread, place.warp, place.lane);
        Tile sums = kv_tile(p, place, k_start, column, false);
        if constexpr (!kInRegisters) {
          gradients.key.clear();
          if (started) sums.load(gradients.key, place.thread);
        }
        product.set_prologue_done(kPreload);
        __syncthreads();
        product((queries + Mma::Shape::kK - 1) / Mma::Shape::kK, gradients.key, iterator, gradients.key);
        __syncthreads();
        if (kPreload && column + kColumnsKV < columns) preload_grad_k(column + kColumnsKV);
        if constexpr (!kInRegisters) sums.store(gradients.key, place.thread);
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
    Place place = place_of(p);
    const int k_start = blockIdx.x * kKeys, kv_head = blockIdx.y, group = p.scores.group;
    const int keys = clipped(k_start, p.scores.kv_length, kKeys);
    KeyGradients gradients;
    gradients.value.clear();
    gradients.key.clear();
    bool started = false;
    // The walk over the queries of a group's heads; a head that sees nothing of these keys has an empty range.
    int member = 0;
    int2 range = make_int2(0, 0);
    auto enter = [&] {  // the next head that sees any of these keys
      for (; member < group; ++member) {
        const HeadScores head(p.scores, place.batch, kv_head * group + member);
        range = head.queries_for(k_start, k_start + keys, kQueries);
        if (range.x < range.y) break;
      }
    };
    enter();
    if constexpr (kPreload) {
      if (member < group) {
        use_head(p, place, kv_head * group + member);
        preload_logits<true>(p, place, storage, range.x, k_start);
      }
    }
    int q_start = range.x;
    while (member < group) {
      use_head(p, place, kv_head * group + member);
      const Place current = place;
      const int current_start = q_start;
      q_start += kQueries;
      if (q_start >= range.y) {
        ++member;
        enter();
        q_start = range.x;
      }
      tile<Pass::kKeys>(p, current, storage, gradients, current_start, k_start, started, [&] {
        if (member < group) {
          Place following = current;
          use_head(p, following, kv_head * group + member);
          preload_logits<kReloadsKeys>(p, following, storage, q_start, k_start);
        }
      });
      started = true;
    }
    use_head(p, place, kv_head * group);
    const int64_t row = int64_t(place.batch) * p.scores.kv_length + k_start;
    Element* d_key = p.d_key + row * place.k_stride + kv_head * p.head_dim;
    Element* d_value = p.d_value + row * place.v_stride + kv_head * p.value_dim;
    auto& shared = storage.products;
    __syncthreads();
    for (int column = 0; column < (kMaxDim <= kColumnsKV ? 1 : p.value_dim); column += kColumnsKV) {
      if (!kInRegisters && started) kv_tile(p, place, k_start, column, true).load(gradients.value, place.thread);
      if constexpr (kDropout) {
        gradients.value = cutlass::multiplies<typename GradV::Mma::FragmentC>()(p.scores.keep_scale, gradients.value);
      }
      store<GradV>(place, shared.gradV_epilogue_final(), gradients.value, d_value + column, place.v_stride, keys,
                   p.value_dim - column);
      __syncthreads();
    }
    for (int column = 0; column < (kMaxDim <= kColumnsKV ? 1 : p.head_dim); column += kColumnsKV) {
      if (!kInRegisters && started) kv_tile(p, place, k_start, column, false).load(gradients.key, place.thread);
      store<GradK>(place, shared.gradK_epilogue_final(), gradients.key, d_key + column, place.k_stride, keys,
                   p.head_dim - column);
      __syncthreads();
    }
  }

  static __device__ void query_block(const Params& p) {
    extern __shared__ __align__(128) char memory[];
    Storage& storage = *reinterpret_cast<Storage*>(memory);
    Place place = place_of(p);
    use_head(p, place, blockIdx.y);
    const int q_start = (gridDim.x - 1 - blockIdx.x) * kQueries;
    const int queries = clipped(q_start, p.scores.q_length, kQueries);
    const int2 range = HeadScores(p.scores, place.batch, place.head).keys_for(q_start, q_start + queries, kKeys);
    QueryGradient gradient;
    gradient.query.clear();
    if constexpr (kPreload) {
      if (range.x < range.y) preload_logits<true>(p, place, storage, q_start, range.x);
    }
    for (int k_start = range.x; k_start < range.y; k_start += kKeys) {
      tile<Pass::kQueries>(p, place, storage, gradient, q_start, k_start, k_start > range.x, [&] {
        if (k_start + kKeys < range.y) preload_logits<true>(p, place, storage, q_start, k_start + kKeys);
      });
    }
    store_query(p, place, storage, gradient, q_start, queries, !kQueriesInRegisters && range.x < range.y);
  }

  static __device__ void convert_block(const Params& p) {
    extern __shared__ __align__(128) char memory[];
    Storage& storage = *reinterpret_cast<Storage*>(memory);
    Place place = place_of(p);
    use_head(p, place, blockIdx.y);
    const int q_start = blockIdx.x * kQueries;
    QueryGradient gradient;
    store_query(p, place, storage, gradient, q_start, clipped(q_start, p.scores.q_length, kQueries), true);
  }

  static __device__ void store_query(const Params& p, const Place& place, Storage& storage, QueryGradient& gradient,
                                     int q_start, int queries, bool load) {
    const int64_t row = int64_t(place.batch) * p.scores.q_length + q_start;
    Element* d_query = p.d_query + row * place.q_stride + place.head * p.head_dim;
    __syncthreads();
    for (int column = 0; column < (kMaxDim <= kColumnsQ ? 1 : p.head_dim); column += kColumnsQ) {
      if (load) q_tile(p, place, q_start, column).load(gradient.query, place.thread);
      store<GradQ>(place, storage.products.gradQ_epilogue_lastIter(), gradient.query, d_query + column, place.q_stride,
                   queries, p.head_dim - column);
      __syncthreads();
    }
  }
};

}  // namespace tilewright::attention
