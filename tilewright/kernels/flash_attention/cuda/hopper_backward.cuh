// Backward attention for compute capability 9.0a around the collectives of CUTLASS's example 88.
//
// A CTA owns `kTileK` = 128 keys of one query head, 64 for each of two consumer warpgroups, and iterates over the tiles
// of `kTileQ` queries that may see them. The collective computes S and dP transposed, [keys, queries]:
//
//   S^T  = K Q^T            P^T  = exp2(scale * log2(e) * S^T - log2(e) * lse)
//   dP^T = V dO^T           dS^T = scale * P^T * (dP^T - delta)
//   dV += P^T dO            dK += dS^T Q             dQ += dS K
//
//   delta    rowsum(dO * O) - dlse, fp32 [batch, heads, q_length], made by prepare_rows
//   row_lse  lse, +inf for rows that see no key, where P must be 0; same shape
//   K, V     [128, head_dim]                  shared memory, loaded once; later the staging of dK and dV
//   Q, dO    [2 stages, kTileQ, head_dim]     shared memory ring
//   P, dS    [64, kTileQ] per warpgroup       P in registers, dS in shared memory
//   dK, dV   [64, head_dim] per warpgroup     fp32 registers
//   dQ       [2 stages, kTileQ, head_dim]     fp32 shared memory, reduce-added by TMA to an fp32 accumulator
//
// Three kernels: prepare_rows (delta, row_lse, zeros for the dQ accumulator), the main kernel, and round_sums (dQ
// accumulator to Element). CTAs add to dQ in any order, so dQ is not deterministic. With grouped heads dK and dV go
// through fp32 accumulators as well.
//
// Roles; one query tile is one step. The order barrier makes the two consumers compute P one after the other, so that
// exponentials of one run beside wgmmas of the other, and it tells WG 2 that dS of both is in shared memory: WG 2
// computes dQ for all 128 keys.
//
//   WG 0, warp 0   TMA loads: K0 Q V0 K1 dO V1 | next Q, dO | ...            (lse comes with Q, delta with dO)
//   WG 0, warp 1                               | TMA reduce-add of dQ | ...
//   WG 1           S, dP | P | dS, dV | dK     | S, dP | P | dS, dV | dK     | ... | store dK, dV
//   WG 2           S, dP |     P | dS, dV | dQ, dK | S, dP |   P | dS, dV | dQ, dK | ... | store dK, dV
#pragma once

#include "hopper_common.cuh"

#include "collective/fmha_collective_load.hpp"
#include "collective/fmha_collective_softmax.hpp"

// Two of the collective's loops over fragments lack an unroll pragma. nvcc 13.0 then keeps the fragment in local memory
// and spills and reloads all of it in every step. The macro below adds the pragma to every loop of this one header; all
// headers that it includes are included above.
#define for _Pragma("unroll") for
#include "collective/fmha_collective_bwd_tma_warpspecialized.hpp"
#undef for

namespace tilewright::attention::hopper {

// The `Fusion` interface of the collective: trip counts are in query tiles, coordinates are (key, query).
template <bool kMasked>  // false: all keys are visible, and kv_length is a multiple of kTileK
struct BackwardMask {
  // The shape with q_length reduced to the last query that may see a key of the tile.
  template <class Tile>
  static CUTLASS_DEVICE Shape7 cut(int k_tile, Tile const&, Shape7 shape) {
    if constexpr (kMasked) {
      get<2>(shape) = max(0, min(get<2>(shape), (k_tile + 1) * int(get<1>(Tile{})) - get<5>(shape)));
    }
    return shape;
  }

  // The collective calls this with CTA tiles in one place and warpgroup tiles in another; their query extents agree.
  template <class Block, class Tile>
  CUTLASS_DEVICE int get_trip_count(Block const&, Tile const& tile, Shape7 const& shape) const {
    return ceil_div(get<2>(shape), int(get<0>(tile)));
  }

  // Whether some query of a query tile may see some key of a KV tile.
  template <class Block, class Tile>
  CUTLASS_DEVICE bool is_contributing(Block const& block, Tile const& tile, Shape7 const& shape) const {
    if constexpr (!kMasked) return true;
    const int query = int(get<0>(block)) * int(get<0>(tile)), key = int(get<1>(block)) * int(get<1>(tile));
    const int last_query = query + int(get<0>(tile)) - 1, last_key = key + int(get<1>(tile)) - 1;
    return key - last_query <= get<6>(shape) && last_key - query >= get<5>(shape);
  }

  template <class Logits, class Places>
  CUTLASS_DEVICE void before_softmax(Logits& logits, Places const& places, Shape7 const& shape) const {
    if constexpr (kMasked) {
      const auto first = places(0), last = places(size(logits) - 1);
      if (get<0>(last) < get<3>(shape) && get<0>(last) - get<1>(first) <= get<6>(shape) &&
          get<0>(first) - get<1>(last) >= get<5>(shape)) {
        return;  // every element of this thread is visible
      }
      // One unsigned comparison tests both edges: a distance below the lower edge wraps around to more than the width.
      const uint32_t width = uint32_t(get<6>(shape)) - uint32_t(get<5>(shape));  // at most 2^31
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(logits); ++i) {
        const auto coord = places(i);
        const int key = get<0>(coord);
        const uint32_t start = key < get<3>(shape) ? uint32_t(get<6>(shape) - key) : 0x80000001u;
        if (start + uint32_t(get<1>(coord)) > width) logits(i) = -INFINITY;
      }
    }
  }
};

// Index arithmetic for rows of [batch, length, heads], and the [batch, heads, length] order of fp32 arrays.
struct Rows {
  cutlass::FastDivmod heads, length;
  int stride;          // floats per head of delta and row_lse: a multiple of 4, for the 16 bytes of TMA
  int rows, head_dim;  // rows: batch * length * heads
};

// Computes delta = rowsum(dO * O) - dlse, copies lse with +inf for rows that see no key (the collective takes exp(S -
// lse), which must be 0 there), and zeroes the dQ accumulator.
template <class Element, int kLanes>  // threads per row, 8 elements each
__global__ void prepare_rows(Rows p, const Element* out, const Element* d_out, const float* lse, const float* d_lse,
                             float* delta, float* row_lse, float* d_query) {
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int row = int(thread / kLanes), column = int(thread % kLanes) * 8;
  const bool there = row < p.rows;  // no early return: the shuffles below need every lane
  int token, head, batch, query;
  p.heads(token, head, row);
  p.length(batch, query, token);
  const int64_t plane = int64_t(batch) * p.heads.divisor + head;
  const int64_t at = plane * p.length.divisor + query;
  float sum = 0;
  if (there && column < p.head_dim) {
    const int64_t from = int64_t(row) * p.head_dim + column;
    const uint4 out_bits = *reinterpret_cast<const uint4*>(out + from);
    const uint4 d_out_bits = *reinterpret_cast<const uint4*>(d_out + from);
    const Element *a = reinterpret_cast<const Element*>(&out_bits), *b = reinterpret_cast<const Element*>(&d_out_bits);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) sum += float(a[i]) * float(b[i]);
    float4* to = reinterpret_cast<float4*>(d_query + at * p.head_dim + column);
    to[0] = to[1] = make_float4(0, 0, 0, 0);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int lane = 1; lane < kLanes; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane, kLanes);
  if (!there || column != 0) return;
  const float value = lse[at];
  const bool sees = value != -INFINITY;
  row_lse[plane * p.stride + query] = sees ? value : INFINITY;
  delta[plane * p.stride + query] = !sees ? 0 : d_lse == nullptr ? sum : sum - d_lse[at];
}

// Converts an fp32 accumulator [batch, head, row, head_dim] to Element [batch, row, head, head_dim].
template <class Element, int kLanes>
__global__ void round_sums(Rows p, const float* sums, Element* to) {
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int row = int(thread / kLanes), column = int(thread % kLanes) * 8;
  if (row >= p.rows || column >= p.head_dim) return;
  int token, head, batch, coord;
  p.heads(token, head, row);
  p.length(batch, coord, token);
  const int64_t from = (int64_t(batch) * p.heads.divisor + head) * p.length.divisor + coord;
  const float4* source = reinterpret_cast<const float4*>(sums + from * p.head_dim + column);
  const float4 low = source[0], high = source[1];
  const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  alignas(16) Element rounded[8];
  convert<Element, 8>(values, rounded);
  *reinterpret_cast<uint4*>(to + int64_t(row) * p.head_dim + column) = *reinterpret_cast<const uint4*>(rounded);
}

template <class Element, int kTileQ, int kHeadDim, bool kMasked,
          bool kGrouped>  // GQA: query heads add dK and dV in fp32 as well
struct HopperBackward {
  static constexpr int kGroups = 2;
  static constexpr int kTileK = 64 * kGroups;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  static constexpr int kRowThreads = 256;
  static constexpr int kLanes = kHeadDim / 8;

  using Mask = BackwardMask<kMasked>;
  using TileShape = cute::Shape<Int<kTileQ>, Int<kTileK>, Int<kHeadDim>>;
  using Mainloop = cutlass::fmha::collective::FmhaBwdMainloopTmaWarpSpecialized<Element, float, TileShape, Mask>;
  using OuterPipeline = typename Mainloop::MainloopPipelineQ;  // K and V: loaded once
  using InnerPipeline = typename Mainloop::MainloopPipeline;   // Q with lse, dO with delta: one stage each
  using SumsPipeline = cutlass::PipelineAsync<2>;              // dQ: WG 2 writes, warp 1 of WG 0 reduce-adds
  using Order = cutlass::OrderedSequenceBarrier<2, kGroups>;

  using OutElement = cute::conditional_t<kGrouped, float, Element>;
  using OutOperation = cute::conditional_t<kGrouped, SM90_TMA_REDUCE_ADD, SM90_TMA_STORE>;
  using Tile = OutTile<kHeadDim>;
  using Layout = OutLayout<OutElement, kHeadDim>;
  using Tma = OutTma<OutOperation, OutElement, kHeadDim>;
  static constexpr int kOuterSize = 64 * kHeadDim;  // elements of K or V of one warpgroup
  static_assert(cosize_v<typename Mainloop::SmemLayoutK> == 2 * kGroups * kOuterSize);

  struct SharedStorage {
    typename Mainloop::SharedStorage tensors;
    alignas(16) typename OuterPipeline::SharedStorage outer;
    alignas(16) typename InnerPipeline::SharedStorage inner;
    alignas(16) typename SumsPipeline::SharedStorage sums;
    alignas(16) typename Order::SharedStorage order;
  };

  struct Params {
    typename Mainloop::Params mainloop;
    Tma d_key, d_value;
    Shape7 shape;
    cutlass::FastDivmod group;
    int kv_heads;
    TileOrder order;
  };

  // Offsets in the workspace, in floats; each part is padded to 64 floats.
  struct Places {
    int64_t delta, row_lse, d_query, d_key, d_value, end;

    explicit Places(const Problem& problem) {
      auto whole = [](int64_t size) { return (size + 63) / 64 * 64; };
      const int64_t heads = problem.batch * problem.heads;
      const int64_t keys = kGrouped ? problem.batch * problem.kv_heads * problem.kv_length * problem.head_dim : 0;
      delta = 0;
      row_lse = whole(heads * row_stride(problem));
      d_query = 2 * row_lse;
      d_key = d_query + whole(heads * problem.q_length * problem.head_dim);
      d_value = d_key + whole(keys);
      end = d_value + whole(keys);
    }
  };

  static int64_t row_stride(const Problem& problem) { return (problem.q_length + 3) / 4 * 4; }

  static Facts facts() { return {int64_t(sizeof(SharedStorage)), kThreads, kAlignment}; }

  static int64_t workspace(const Problem& problem) { return Places(problem).end * int64_t(sizeof(float)); }

  static ffi::Error run(cudaStream_t stream, const Device&, const Problem& problem, const Arguments& arguments) {
    const int64_t tiles = (problem.kv_length + kTileK - 1) / kTileK;
    const int64_t length = std::max(problem.q_length, problem.kv_length);
    TILEWRIGHT_RETURN_IF_ERROR(check_limits(problem, problem.batch * problem.heads * std::max(tiles, length)));
    Params p;
    TILEWRIGHT_RETURN_IF_ERROR(read_scale(arguments, &p.mainloop.scale_softmax));
    p.mainloop.scale_softmax_log2 = p.mainloop.scale_softmax * kLog2e;
    const Places places(problem);
    float* const workspace = static_cast<float*>(arguments.workspace);
    describe(problem, arguments, workspace, places, int(tiles), &p);

    Rows rows = rows_of(problem, problem.q_length, problem.heads);
    rows.stride = int(row_stride(problem));
    TILEWRIGHT_RETURN_IF_ERROR((launch<prepare_rows<Element, kLanes>>(
        row_blocks(rows), dim3(kRowThreads), 0, stream, rows, input<Element>(arguments, 3),
        input<Element>(arguments, 5), input<float>(arguments, 4), input<float>(arguments, 6),
        workspace + places.delta, workspace + places.row_lse, workspace + places.d_query)));
    if constexpr (kGrouped) {
      const int64_t bytes = (places.end - places.d_key) * int64_t(sizeof(float));
      TILEWRIGHT_RETURN_IF_ERROR(check(cudaMemsetAsync(workspace + places.d_key, 0, bytes, stream), "cudaMemsetAsync"));
    }
    TILEWRIGHT_RETURN_IF_ERROR(launch<run_kernel<HopperBackward>>(dim3(unsigned(p.order.total)), dim3(kThreads),
                                                                  sizeof(SharedStorage), stream, p));
    if constexpr (kGrouped) {
      const Rows keys = rows_of(problem, problem.kv_length, problem.kv_heads);
      TILEWRIGHT_RETURN_IF_ERROR(finish(stream, keys, workspace + places.d_key, output<Element>(arguments, 1)));
      TILEWRIGHT_RETURN_IF_ERROR(finish(stream, keys, workspace + places.d_value, output<Element>(arguments, 2)));
    }
    return finish(stream, rows, workspace + places.d_query, output<Element>(arguments, 0));
  }

  static Rows rows_of(const Problem& problem, int64_t length, int64_t heads) {
    Rows rows;
    rows.heads = cutlass::FastDivmod(int(heads));
    rows.length = cutlass::FastDivmod(int(length));
    rows.stride = 0;
    rows.rows = int(problem.batch * length * heads);
    rows.head_dim = int(problem.head_dim);
    return rows;
  }

  static dim3 row_blocks(const Rows& rows) {
    return dim3(unsigned((int64_t(rows.rows) * kLanes + kRowThreads - 1) / kRowThreads));
  }

  static ffi::Error finish(cudaStream_t stream, const Rows& rows, const float* sums, Element* to) {
    return launch<round_sums<Element, kLanes>>(row_blocks(rows), dim3(kRowThreads), 0, stream, rows, sums, to);
  }

  // Makes the TMA descriptors of all arrays, and the tile order.
  static void describe(const Problem& problem, const Arguments& arguments, float* workspace, const Places& places,
                       int tiles, Params* p) {
    using Bits = uint16_t;  // the collective's TMA descriptors are of uint16_t
    using Mma = typename Mainloop::CollectiveMmaNM;
    using Cluster = typename Mainloop::ClusterShape;
    const int batch = int(problem.batch), heads = int(problem.heads), kv_heads = int(problem.kv_heads);
    const int q_length = int(problem.q_length), kv_length = int(problem.kv_length), head_dim = int(problem.head_dim);
    auto tensor = [&](auto const* data, int length, int of_heads) {
      return make_tensor(data, make_layout(make_shape(length, head_dim, make_shape(batch, of_heads)),
                                           strides_of(length, of_heads, head_dim)));
    };
    auto inner = [&](size_t index) {
      return make_tma_copy_B_sm90(typename Mma::GmemTiledCopyB{},
                                  tensor(input<Bits>(arguments, index), q_length, heads),
                                  typename Mma::SmemLayoutB{}(_, _, _0{}), typename Mma::TileShape{}, Cluster{});
    };
    auto outer = [&](size_t index) {
      return make_tma_copy_A_sm90(typename Mma::GmemTiledCopyA{},
                                  tensor(input<Bits>(arguments, index), kv_length, kv_heads),
                                  typename Mma::SmemLayoutA{}(_, _, _0{}), typename Mma::TileShape{}, Cluster{});
    };
    p->mainloop.tma_load_q = inner(0);
    p->mainloop.tma_load_k = outer(1);
    p->mainloop.tma_load_v = outer(2);
    p->mainloop.tma_load_do = inner(5);

    const int64_t stride = row_stride(problem);
    auto of_rows = [&](const float* data) {
      const auto layout = make_layout(make_shape(q_length, batch, heads), make_stride(_1{}, heads * stride, stride));
      return make_tma_copy(SM90_TMA_LOAD{}, make_tensor(data, layout), typename Mainloop::SmemLayoutLSE{}(_, _0{}));
    };
    p->mainloop.tma_load_lse = of_rows(workspace + places.row_lse);
    p->mainloop.tma_load_odo = of_rows(workspace + places.delta);
    const int64_t plane = int64_t(q_length) * head_dim;
    p->mainloop.tma_red_dq = make_tma_copy(
        SM90_TMA_REDUCE_ADD{},
        make_tensor(static_cast<const float*>(workspace + places.d_query), make_shape(q_length, head_dim, batch, heads),
                    make_stride(int64_t(head_dim), _1{}, heads * plane, plane)),
        typename Mainloop::SmemLayoutDQ{}(_, _, _0{}));
    auto gradient = [&](size_t index, int64_t coord) {
      const OutElement* data;
      Strides strides = strides_of(kv_length, kv_heads, head_dim);
      if constexpr (kGrouped) {
        data = workspace + coord;
        const int64_t head = int64_t(kv_length) * head_dim;
        strides = {head_dim, _1{}, {kv_heads * head, head}};
      } else {
        data = output<Element>(arguments, index);
      }
      const auto layout = make_layout(make_shape(kv_length, head_dim, make_shape(batch, kv_heads)), strides);
      return make_tma_copy(OutOperation{}, make_tensor(data, layout), Layout{});
    };
    p->d_key = gradient(1, places.d_key);
    p->d_value = gradient(2, places.d_value);

    p->shape = shape_of(problem);
    p->group = cutlass::FastDivmod(heads / kv_heads);
    p->kv_heads = kv_heads;
    // With a causal mask the first keys are seen by the most queries, so the longest CTAs already come first.
    const int64_t bytes = int64_t(q_length) * head_dim * (2 * sizeof(Element) + sizeof(float));
    p->order = TileOrder::make(tiles, batch, heads, bytes, 1, false);
  }

  CUTLASS_DEVICE void operator()(const Params& p, SharedStorage& storage) const {
#if defined(CUTLASS_ARCH_MMA_SM90A_ENABLED)
    const int group = cutlass::canonical_warp_group_idx();  // 0: producer and dQ reduction, 1 and 2: consumers
    const int warp = cutlass::canonical_warp_idx_sync();
    const bool elected = cute::elect_one_sync();
    const bool copies = warp == 0, reduces = warp == 1;

    // Barriers: each K and V tile is released by one consumer; Q and dO by both; a dQ buffer is committed by both
    // consumers (WG 2 fills it) and released by the 32 threads of the reducing warp.
    if (copies && elected) Mainloop::prefetch_tma_descriptors(p.mainloop);
    typename OuterPipeline::Params outer_params;
    outer_params.transaction_bytes = Mainloop::kOuterLoadBytes;
    outer_params.num_consumers = kWarpgroup;
    outer_params.is_leader = elected && copies;
    outer_params.role = group > 0 ? OuterPipeline::ThreadCategory::Consumer : OuterPipeline::ThreadCategory::Producer;
    typename InnerPipeline::Params inner_params;
    inner_params.transaction_bytes = Mainloop::kInnerLoadBytes;
    inner_params.num_consumers = kGroups * kWarpgroup;
    inner_params.is_leader = elected && copies;
    inner_params.role = group > 0 ? InnerPipeline::ThreadCategory::Consumer : InnerPipeline::ThreadCategory::Producer;
    typename SumsPipeline::Params sums_params;
    sums_params.producer_arv_count = kGroups * kWarpgroup;
    sums_params.consumer_arv_count = cutlass::NumThreadsPerWarp;
    sums_params.role = group > 0 ? SumsPipeline::ThreadCategory::Producer : SumsPipeline::ThreadCategory::Consumer;
    typename Order::Params order_params;
    order_params.group_id = group - 1;
    order_params.group_size = kWarpgroup;

    OuterPipeline outer(storage.outer, outer_params, cute::Shape<_1, _1, _1>{});
    InnerPipeline inner(storage.inner, inner_params, cute::Shape<_1, _1, _1>{});
    SumsPipeline sums(storage.sums, sums_params);
    Order order(storage.order, order_params);
    __syncthreads();

    const auto coord = p.order(blockIdx.x);
    const Shape7 shape = Mask::cut(coord.tile, TileShape{}, p.shape);
    const auto block = make_coord(_0{}, coord.tile, make_coord(coord.batch, coord.head));
    int kv_head, unused;
    p.group(kv_head, unused, coord.head);

    if (group == 0) {
      cutlass::arch::warpgroup_reg_dealloc<Registers<kGroups>::kCopying>();
      const int first = first_tile(block, shape), end = Mask{}.get_trip_count(block, TileShape{}, shape);
      if (copies && elected) copy(p, storage, outer, inner, shape, block, kv_head, first, end);
      if (reduces) add_sums(p, storage, sums, shape, block, first, end);
    } else {
      cutlass::arch::warpgroup_reg_alloc<Registers<kGroups>::kComputing>();
      const int rank = group - 1;
      typename Mainloop::PipelineState inner_state;
      typename Mainloop::PipelineStateQ outer_state;
      outer_state.advance(rank * Mainloop::kOuterLoads);
      auto sums_state = cutlass::make_producer_start_state<SumsPipeline>();
      const auto rows = make_coord(_0{}, coord.tile * kGroups + rank, make_coord(coord.batch, coord.head));
      auto result = Mainloop{}.compute(block, rows, p.mainloop, shape, inner, inner_state, outer, outer_state, sums,
                                       sums_state, storage.tensors, order);
      store(p, storage, get<0>(result), get<1>(result), rank, get<1>(rows), coord.batch, kv_head);
    }
#endif
  }

  // The first query tile that may see a key of the CTA's KV tile, or the trip count if there is none.
  template <class Block>
  static CUTLASS_DEVICE int first_tile(const Block& block, const Shape7& shape) {
    int tile = 0;
    const int end = Mask{}.get_trip_count(block, TileShape{}, shape);
    while (tile < end && !Mask{}.is_contributing(make_coord(tile, get<1>(block)), TileShape{}, shape)) ++tile;
    return tile;
  }

  // The producer: one thread issues all TMA loads.
  template <class Block>
  static CUTLASS_DEVICE void copy(const Params& p, SharedStorage& storage, OuterPipeline& outer, InnerPipeline& inner,
                                  const Shape7& shape, const Block& block, int kv_head, int first, int end) {
    using Products = typename Mainloop::TileShapeNM;
    auto& tensors = storage.tensors;
    typename Mainloop::LoadK load_k{p.mainloop.tma_load_k, outer, tensors.smem_k};
    typename Mainloop::LoadV load_v{p.mainloop.tma_load_v, outer, tensors.smem_v};
    typename Mainloop::LoadQ load_q{p.mainloop.tma_load_q, inner, tensors.smem_q};
    typename Mainloop::LoadDO load_do{p.mainloop.tma_load_do, inner, tensors.smem_do};
    typename Mainloop::LoadLSE load_lse{p.mainloop.tma_load_lse, inner, tensors.smem_lse};
    typename Mainloop::LoadODO load_odo{p.mainloop.tma_load_odo, inner, tensors.smem_sumOdO};
    const auto kv_block = make_coord(_0{}, get<1>(block), make_coord(get<2, 0>(block), kv_head));
    auto k = load_k.init_state(_0{}, shape, Products{}, kv_block, kGroups);
    auto v = load_v.init_state(_0{}, shape, Products{}, kv_block, kGroups);
    auto q = load_q.init_state(_0{}, shape, Products{}, block, 0);
    auto d_out = load_do.init_state(_0{}, shape, Products{}, block, 0);
    auto lse = load_lse.init_state(_0{}, shape, Products{}, block, 0);
    auto odo = load_odo.init_state(_0{}, shape, Products{}, block, 0);
    auto outer_state = cutlass::make_producer_start_state<OuterPipeline>();
    auto inner_state = cutlass::make_producer_start_state<InnerPipeline>();

    auto q_tile = cute::make_coord_iterator(end);
    for (int skipped = 0; skipped < first; ++skipped) ++q_tile;
    auto k_tile = cute::make_coord_iterator(Int<kGroups>{});
    int one;
    auto key = [&] { load_k.template step<false>(k_tile, k, outer_state, 1, one = 1); };
    auto value = [&] { load_v.template step<true>(k_tile, v, outer_state, 1, one = 1); };
    auto query = [&] {  // lse arrives on the same barrier
      load_q.template step<false, false, true>(q_tile, q, inner_state, 1, one = 1);
      load_lse.template step<false, true, false>(q_tile, lse, inner_state, 1, one = 1);
    };
    auto d_output = [&] {  // delta arrives on the same barrier
      load_do.template step<false, false, true>(q_tile, d_out, inner_state, 1, one = 1);
      load_odo.template step<true, true, false>(q_tile, odo, inner_state, 1, one = 1);
    };

    key();
    if (first < end) query();
    value();
    key();
    if (first < end) d_output();
    value();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tile = first + 1; tile < end; ++tile) {
      // All tiles between `first` and the last one that `cut` leaves contribute.
      query();
      d_output();
    }
  }

  // The reducing warp: adds each dQ tile to the accumulator by TMA reduce-add. The collective's own loop releases a
  // buffer when the next tile has arrived, while TMA may still be reading it. With many CTAs adding at a time, as with
  // grouped heads, the tile after that overwrote the buffer (CUTLASS 4.2).
  template <class Block>
  static CUTLASS_DEVICE void add_sums(const Params& p, SharedStorage& storage, SumsPipeline& sums, const Shape7& shape,
                                      const Block& block, int first, int end) {
    const bool sends = cute::elect_one_sync();
    const auto& tma = p.mainloop.tma_red_dq;
    const auto slice = tma.get_slice(_0{});
    Tensor staged = make_tensor(make_smem_ptr(storage.tensors.smem_dq.data()), typename Mainloop::SmemLayoutDQ{});
    Tensor tiles = local_tile(tma.get_tma_tensor(select<2, 4, 0, 1>(shape)), typename Mainloop::TileShapeMD{},
                              make_coord(_, _, _), Step<_1, _1, Underscore>{});
    Tensor from = slice.partition_S(staged);
    Tensor to = slice.partition_D(tiles(_, _, _, _0{}, get<2, 0>(block), get<2, 1>(block)));
    cutlass::PipelineState<2> state;
    for (int tile = first; tile < end; ++tile) {
      sums.consumer_wait(state);
      if (sends) {
        cute::copy(tma, from(_, _, _, state.index()), to(_, _, _, tile));
        tma_store_arrive();
        tma_store_wait<0>();  // TMA has read the buffer
      }
      sums.consumer_release(state);
      ++state;
    }
  }

  // Stores dK and dV of a warpgroup's 64 keys through the shared memory of its K and V. Nothing reads that any more:
  // the collective has waited for the last dQ, for which WG 2 reads K of both warpgroups.
  template <class Sums>
  static CUTLASS_DEVICE void store(const Params& p, SharedStorage& storage, const Sums& d_key, const Sums& d_value,
                                   int rank, int tile, int batch, int kv_head) {
    using Mma = typename Mainloop::TiledMmaND;
    const int thread = threadIdx.x % kWarpgroup;
    const bool sends = thread / 32 == 0 && cute::elect_one_sync();
    Element* const own = storage.tensors.smem_k.data() + rank * Mainloop::kOuterLoads * kOuterSize;
    auto send = [&](const Tma& tma, const auto& staged) {
      send_tile(tma, staged, Tile{}, get<3>(p.shape), get<4>(p.shape), get<0>(p.shape), p.kv_heads, tile, batch,
                kv_head);
    };
    sync_warpgroup(rank);
    // fp32 fills the memory of both K and V, so dK and dV take turns.
    if constexpr (kGrouped) {
      Tensor staged = make_tensor(make_smem_ptr(reinterpret_cast<float*>(own)), Layout{});
      stage_sums<Mma>(d_key, staged, thread);
      sync_warpgroup(rank);
      if (sends) {
        send(p.d_key, staged);
        tma_store_wait<0>();
      }
      sync_warpgroup(rank);
      stage_sums<Mma>(d_value, staged, thread);
      sync_warpgroup(rank);
      if (sends) send(p.d_value, staged);
    } else {
      Tensor keys = make_tensor(make_smem_ptr(own), Layout{});
      Tensor values = make_tensor(make_smem_ptr(own + kOuterSize), Layout{});
      stage_tile<Element, Mma>(d_key, keys, thread);
      stage_tile<Element, Mma>(d_value, values, thread);
      sync_warpgroup(rank);
      if (sends) {
        send(p.d_key, keys);
        send(p.d_value, values);
      }
    }
    if (sends) tma_store_wait<0>();
  }

  // Writes an fp32 accumulator to shared memory, without conversion.
  template <class TiledMma, class Fragment, class Shared>
  static CUTLASS_DEVICE void stage_sums(const Fragment& fragment, Shared& shared, int thread) {
    Tensor to = recast<uint64_t>(TiledMma{}.get_thread_slice(thread).partition_C(shared));
    Tensor from = recast<uint64_t const>(fragment);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(from); ++i) to(i) = from(i);
    cutlass::arch::fence_view_async_shared();
  }
};

}  // namespace tilewright::attention::hopper
