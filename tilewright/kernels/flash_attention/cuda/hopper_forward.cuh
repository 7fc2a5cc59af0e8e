// Forward attention for compute capability 9.0a around the collectives of CUTLASS's example 88.
//
// Computes O = softmax(scale * Q K^T) V and lse. A CTA owns `kTileQ` queries of one head, 64 for each of the 2 or 3
// consumer warpgroups, and iterates over the tiles of `kTileK` keys that these queries may see.
//
//   Q     [kTileQ, head_dim]              shared memory; each warpgroup's 64 rows later stage its O
//   K, V  [kStages, kTileK, head_dim]     shared memory, one ring for both
//   S     [64, kTileK] per warpgroup      fp32 registers; P is S converted in place
//   O     [64, head_dim] per warpgroup    fp32 registers, stored by TMA
//   lse   [batch, heads, q_length]        fp32, natural logarithm, -inf for a row that sees no key
//
// Roles. Warpgroup 0 keeps few registers (setmaxnreg) and one of its threads issues the TMA loads; each consumer
// warpgroup also stores its own O. The order barrier makes the consumers issue their first QK^T one after the other;
// after that their softmax and wgmma interleave freely. PV of a tile is still in flight when QK^T of the next is
// issued.
//
//   producer   Q0 K0 Q1 V0 (Q2) K1 V1 K2 V2 ...
//   WG 1       S0 | softmax 0 | O += P0 V0, S1 | softmax 1 | O += P1 V1, S2 | ... | store O, lse
//   WG 2          S0 | softmax 0 | O += P0 V0, S1 | softmax 1 | O += P1 V1, S2 | ... | store O, lse
#pragma once

#include "hopper_common.cuh"

#include "collective/fmha_collective_tma_warpspecialized.hpp"

namespace tilewright::attention::hopper {

// What a variant masks; each value includes those before it.
enum class Band {
  kFull,    // nothing: kv_length is a multiple of kTileK
  kRagged,  // keys beyond kv_length
  kUpper,   // keys above the band, as with a causal mask
  kWindow,  // keys below the band, as with a sliding window
};

// The `Fusion` interface of the collective. With a window, keys are counted from the CTA's first visible one: see
// `shift`.
template <Band kBand>
struct ForwardMask {
  static constexpr bool kUpper = kBand >= Band::kUpper;

  // The first key that a query of the tile may see. Counting from it puts the lower edge of a window into the first KV
  // tile, as far as the tile has no more queries than keys.
  template <class Tile>
  static CUTLASS_DEVICE int first_key(int q_tile, Tile const&, Shape7 const& shape) {
    if constexpr (kBand != Band::kWindow) return 0;
    return max(0, q_tile * int(get<0>(Tile{})) + get<5>(shape));
  }

  static CUTLASS_DEVICE Shape7 shift(Shape7 shape, int first_key) {
    if constexpr (kBand == Band::kWindow) {
      get<3>(shape) -= first_key;
      get<5>(shape) -= first_key;
      get<6>(shape) -= first_key;
    }
    return shape;
  }

  // The end of the keys that a query may see.
  static CUTLASS_DEVICE int keys_of(int query, Shape7 const& shape) {
    return kUpper ? min(get<3>(shape), query + get<6>(shape) + 1) : get<3>(shape);
  }

  // At least 1: the collective computes its first tile without asking, and the mask may then cover all of it.
  template <class Block, class Tile>
  CUTLASS_DEVICE int get_trip_count(Block const& block, Tile const& tile, Shape7 const& shape) const {
    const int last = min((int(get<0>(block)) + 1) * int(get<0>(tile)), get<2>(shape)) - 1;
    return max(1, ceil_div(keys_of(last, shape), int(get<1>(tile))));
  }

  // The number of tiles in the loop without a mask. The collective counts its first tile among them but masks it.
  template <class Block, class Tile>
  CUTLASS_DEVICE int get_unmasked_trip_count(Block const& block, Tile const& tile, Shape7 const& shape) const {
    if constexpr (kBand == Band::kFull) return 0;  // nothing to mask: the masked loop runs all tiles
    if constexpr (kBand == Band::kWindow && get<0>(Tile{}) > get<1>(Tile{})) return 0;
    return max(0, keys_of(int(get<0>(block)) * int(get<0>(tile)), shape) / int(get<1>(tile)));
  }

  template <class Block, class Tile>
  CUTLASS_DEVICE int get_masked_trip_count(Block const& block, Tile const& tile, Shape7 const& shape) const {
    return get_trip_count(block, tile, shape) - get_unmasked_trip_count(block, tile, shape);
  }

  // Sets masked elements of S to -inf; `places` maps an element to (query, key).
  template <class Logits, class Places>
  CUTLASS_DEVICE void before_softmax(Logits& logits, Places const& places, Shape7 const& shape) const {
    if constexpr (kBand != Band::kFull) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(logits); ++i) {
        const auto coord = places(i);
        const int query = get<0>(coord), key = get<1>(coord);
        bool visible = key < keys_of(query, shape);
        if constexpr (kBand == Band::kWindow) visible = visible && key >= query + get<5>(shape);
        if (!visible) logits(i) = -INFINITY;
      }
    }
  }
};

template <class Element, int kTileQ, int kTileK, int kHeadDim, int kStages, Band kBand>
struct HopperForward {
  using Tag = cutlass::fmha::kernel::Tag;
  template <Tag kTag, class Value>
  using Option = cutlass::fmha::kernel::Option<kTag, Value>;

  static constexpr int kGroups = kTileQ / 64;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;

  using Mask = ForwardMask<kBand>;
  using TileShape = cute::Shape<Int<kTileQ>, Int<kTileK>, Int<kHeadDim>>;
  using Mainloop = cutlass::fmha::collective::FmhaMainloopTmaWarpSpecialized<
      Element, float, float, TileShape, Strides, Strides, Strides, Mask, Option<Tag::kNumMmaWarpGroups, Int<kGroups>>,
      Option<Tag::kStagesKV, Int<kStages>>>;
  using QueryPipeline = typename Mainloop::MainloopPipelineQ;
  using KeyPipeline = typename Mainloop::MainloopPipeline;
  using Order = cutlass::OrderedSequenceBarrier<2, kGroups>;
  using Tile = OutTile<kHeadDim>;
  using Layout = OutLayout<Element, kHeadDim>;

  static constexpr int kOutSize = 64 * kHeadDim;
  static_assert(cosize_v<typename Mainloop::SmemLayoutQ> == kGroups * kOutSize);

  struct SharedStorage {
    typename Mainloop::SharedStorage tensors;
    alignas(16) typename QueryPipeline::SharedStorage queries;
    alignas(16) typename KeyPipeline::SharedStorage keys;
    alignas(16) typename Order::SharedStorage order;
  };

  struct Params {
    typename Mainloop::Params mainloop;
    OutTma<SM90_TMA_STORE, Element, kHeadDim> out;
    float* lse;
    Shape7 shape;
    cutlass::FastDivmod group;  // query heads per KV head
    TileOrder order;
  };

  static Facts facts() { return {int64_t(sizeof(SharedStorage)), kThreads, kAlignment}; }

  static int64_t workspace(const Problem&) { return 0; }

  static ffi::Error run(cudaStream_t stream, const Device&, const Problem& problem, const Arguments& arguments) {
    const int64_t tiles = (problem.q_length + kTileQ - 1) / kTileQ;
    TILEWRIGHT_RETURN_IF_ERROR(check_limits(problem, tiles * problem.batch * problem.heads));
    Params p;
    TILEWRIGHT_RETURN_IF_ERROR(read_scale(arguments, &p.mainloop.scale_softmax));
    p.mainloop.scale_softmax_log2 = p.mainloop.scale_softmax * kLog2e;
    p.mainloop.rp_dropout = 1;
    const int batch = int(problem.batch), heads = int(problem.heads), kv_heads = int(problem.kv_heads);
    const int q_length = int(problem.q_length), kv_length = int(problem.kv_length), head_dim = int(problem.head_dim);
    auto tensor = [&](auto const* data, int length, int of_heads) {
      return make_tensor(data, make_layout(make_shape(length, head_dim, make_shape(batch, of_heads)),
                                           strides_of(length, of_heads, head_dim)));
    };
    using Bits = uint16_t;  // the collective's TMA descriptors are of uint16_t
    using QK = typename Mainloop::CollectiveMmaQK;
    using PV = typename Mainloop::CollectiveMmaPV;
    const Tensor query = tensor(input<Bits>(arguments, 0), q_length, heads);
    const Tensor key = tensor(input<Bits>(arguments, 1), kv_length, kv_heads);
    const Tensor value = tensor(input<Bits>(arguments, 2), kv_length, kv_heads);
    const Tensor value_transposed = make_tensor(value.data(), select<1, 0, 2>(value.layout()));
    using Cluster = typename Mainloop::ClusterShape;
    p.mainloop.tma_load_q =
        make_tma_copy_A_sm90(typename QK::GmemTiledCopyA{}, query, typename QK::SmemLayoutA{}(_, _, _0{}),
                             typename QK::TileShape{}, Cluster{});
    p.mainloop.tma_load_k =
        make_tma_copy_B_sm90(typename QK::GmemTiledCopyB{}, key, typename QK::SmemLayoutB{}(_, _, _0{}),
                             typename QK::TileShape{}, Cluster{});
    p.mainloop.tma_load_v =
        make_tma_copy_B_sm90(typename PV::GmemTiledCopyB{}, value_transposed, typename PV::SmemLayoutB{}(_, _, _0{}),
                             typename PV::TileShape{}, Cluster{});
    const Element* const out = output<Element>(arguments, 0);
    p.out = make_tma_copy(SM90_TMA_STORE{}, tensor(out, q_length, heads), Layout{});
    p.lse = output<float>(arguments, 1);
    p.shape = shape_of(problem);
    p.group = cutlass::FastDivmod(heads / kv_heads);
    p.order = TileOrder::make(int(tiles), batch, heads, int64_t(kv_length) * head_dim * 2 * sizeof(Element),
                              heads / kv_heads, kBand == Band::kUpper);
    return launch<run_kernel<HopperForward>>(dim3(unsigned(p.order.total)), dim3(kThreads), sizeof(SharedStorage),
                                             stream, p);
  }

  CUTLASS_DEVICE void operator()(const Params& p, SharedStorage& storage) const {
#if defined(CUTLASS_ARCH_MMA_SM90A_ENABLED)
    const int group = cutlass::canonical_warp_group_idx();  // 0: producer, 1 to kGroups: consumers
    const int warp = cutlass::canonical_warp_idx_sync();
    const bool elected = cute::elect_one_sync();
    const bool copies = warp == 0 && elected;

    // Barriers: K and V are released by all consumers, each Q tile by the one warpgroup that reads it.
    if (copies) {
      Mainloop::prefetch_tma_descriptors(p.mainloop);
      cute::prefetch_tma_descriptor(p.out.get_tma_descriptor());
    }
    typename QueryPipeline::Params query_params;
    query_params.transaction_bytes = Mainloop::kOuterLoadBytes;
    query_params.num_consumers = kWarpgroup;
    query_params.is_leader = copies;
    query_params.role = group > 0 ? QueryPipeline::ThreadCategory::Consumer : QueryPipeline::ThreadCategory::Producer;
    typename KeyPipeline::Params key_params;
    key_params.transaction_bytes = Mainloop::kInnerLoadBytes;
    key_params.num_consumers = kGroups * kWarpgroup;
    key_params.is_leader = copies;
    key_params.role = group > 0 ? KeyPipeline::ThreadCategory::Consumer : KeyPipeline::ThreadCategory::Producer;
    typename Order::Params order_params;
    order_params.group_id = group - 1;
    order_params.group_size = kWarpgroup;

    QueryPipeline queries(storage.queries, query_params, cute::Shape<_1, _1, _1>{});
    KeyPipeline keys(storage.keys, key_params, cute::Shape<_1, _1, _1>{});
    Order order(storage.order, order_params);
    __syncthreads();

    if (group == 0) {
      cutlass::arch::warpgroup_reg_dealloc<Registers<kGroups>::kCopying>();
      if (copies) copy(p, storage, queries, keys);
    } else {
      cutlass::arch::warpgroup_reg_alloc<Registers<kGroups>::kComputing>();
      compute(p, storage, queries, keys, order, group - 1);
    }
#endif
  }

  // A loader whose KV tiles start at `key` instead of 0.
  template <class State, class Unit>
  static CUTLASS_DEVICE auto from_key(const State& state, int key, const Unit& unit) {
    if constexpr (kBand == Band::kWindow) {
      const auto& tiles = get<0>(state);
      return cute::make_tuple(make_tensor(tiles.data() + key * unit, tiles.layout()), get<1>(state));
    } else {
      return state;
    }
  }

  // The producer: one thread issues all TMA loads.
  static CUTLASS_DEVICE void copy(const Params& p, SharedStorage& storage, QueryPipeline& queries, KeyPipeline& keys) {
    auto& tensors = storage.tensors;
    typename Mainloop::LoadQ load_q{p.mainloop.tma_load_q, queries, tensors.smem_q};
    typename Mainloop::LoadK load_k{p.mainloop.tma_load_k, keys, tensors.smem_k};
    typename Mainloop::LoadV load_v{p.mainloop.tma_load_v, keys, tensors.smem_v};
    auto query_state = cutlass::make_producer_start_state<QueryPipeline>();
    auto key_state = cutlass::make_producer_start_state<KeyPipeline>();
    const auto shape = make_shape(get<3>(p.shape), get<4>(p.shape), make_shape(get<0>(p.shape), get<1>(p.shape)));
    const auto key_unit = stride<0>(p.mainloop.tma_load_k.get_tma_tensor(shape).layout());
    const auto value_unit = stride<1>(p.mainloop.tma_load_v.get_tma_tensor(select<1, 0, 2>(shape)).layout());

    const auto coord = p.order(blockIdx.x);
    int kv_head, unused;
    p.group(kv_head, unused, coord.head);
    const auto q_block = make_coord(coord.tile, _0{}, make_coord(coord.batch, coord.head));
    const auto kv_block = make_coord(coord.tile, _0{}, make_coord(coord.batch, kv_head));
    const int first_key = Mask::first_key(coord.tile, TileShape{}, p.shape);
    const int tiles = Mask{}.get_trip_count(q_block, TileShape{}, Mask::shift(p.shape, first_key));

    using QK = typename Mainloop::TileShapeQK;
    auto q = load_q.init_state(_0{}, p.shape, QK{}, q_block, kGroups);
    auto k = from_key(load_k.init_state(_0{}, p.shape, QK{}, kv_block, tiles), first_key, key_unit);
    auto v = from_key(load_v.init_state(_0{}, p.shape, typename Mainloop::TileShapePV{}, kv_block, tiles), first_key,
                      value_unit);
    auto q_tile = cute::make_coord_iterator(Int<kGroups>{});
    auto k_tile = cute::make_coord_iterator(tiles);
    int one, left = 2 * tiles;
    auto query = [&] { load_q.step(q_tile, q, query_state, 1, one = 1); };
    auto key = [&] { load_k.template step<false>(k_tile, k, key_state, 1, left); };
    auto value = [&] { load_v.template step<true>(k_tile, v, key_state, 1, left); };

    // Issue the loads in the order in which the consumers wait for them.
    query();
    key();
    query();
    value();
    CUTLASS_PRAGMA_UNROLL
    for (int group = 2; group < kGroups; ++group) query();
    CUTLASS_PRAGMA_NO_UNROLL
    while (left > 0) {
      key();
      value();
    }
  }

  // A consumer warpgroup: 64 queries of the CTA's tile.
  static CUTLASS_DEVICE void compute(const Params& p, SharedStorage& storage, QueryPipeline& queries, KeyPipeline& keys,
                                     Order& order, int group) {
    typename Mainloop::PipelineState key_state;
    typename Mainloop::PipelineStateQ query_state;
    query_state.advance(group);
    int no_reducer = 0;
    const auto coord = p.order(blockIdx.x);
    const auto head = make_coord(coord.batch, coord.head);
    const auto block = make_coord(coord.tile, _0{}, head);
    const auto rows = make_coord(coord.tile * kGroups + group, _0{}, head);
    const int first_key = Mask::first_key(coord.tile, TileShape{}, p.shape);
    auto result = Mainloop{}.compute(block, rows, p.mainloop, Mask::shift(p.shape, first_key), keys, key_state,
                                     queries, query_state, no_reducer, no_reducer, storage.tensors, order);
    store(p, get<0>(result), get<1>(result), storage, group, get<0>(rows), coord);
  }

  // Stores lse, and O through the shared memory of the warpgroup's own Q.
  template <class Out, class Lse>
  static CUTLASS_DEVICE void store(const Params& p, const Out& out, const Lse& lse, SharedStorage& storage, int group,
                                   int row_tile, const TileOrder::TileCoord& coord) {
    using Mma = typename Mainloop::TiledMmaPV;
    const int thread = threadIdx.x % kWarpgroup;
    const int q_length = get<2>(p.shape), heads = get<1>(p.shape);

    Tensor places = Mma{}.get_thread_slice(thread).partition_C(make_identity_tensor(Tile{}));
    Tensor rows = make_tensor(places.data(), cutlass::fmha::collective::layout_acc_mn(Mma{}, places.layout()));
    Tensor outs = make_tensor(out.data(), cutlass::fmha::collective::layout_acc_mn(Mma{}, out.layout()));
    if (get<1>(rows(0, 0)) == 0) {
      float* to = p.lse + (int64_t(coord.batch) * heads + coord.head) * q_length;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size<0>(rows); ++i) {
        const int query = row_tile * 64 + get<0>(rows(i, 0));
        // The collective returns +inf for a row that sees no key, whose O is 0, and for a row of NaN: O - inf is -inf
        // for the one and NaN for the other.
        if (query < q_length) to[query] = lse(i) == INFINITY ? outs(i, 0) - INFINITY : lse(i);
      }
    }

    Tensor staged = make_tensor(make_smem_ptr(storage.tensors.smem_q.data() + group * kOutSize), Layout{});
    sync_warpgroup(group);  // no warp of this warpgroup reads Q any more
    stage_tile<Element, Mma>(out, staged, thread);
    sync_warpgroup(group);
    if (thread / 32 == 0 && cute::elect_one_sync()) {
      send_tile(p.out, staged, Tile{}, q_length, get<4>(p.shape), get<0>(p.shape), heads, row_tile, coord.batch,
                coord.head);
      tma_store_wait<0>();
    }
  }
};

}  // namespace tilewright::attention::hopper
