// Forward attention for compute capability 9.0a where a row of O is too wide for the registers of one warpgroup.
//
// Computes O = softmax(scale * Q K^T) V and lse. A CTA owns 64 queries of one head. Two consumer warpgroups split the
// head dim: each computes a partial S over its half, adds the other's partial S through shared memory, computes the
// same P (so both have all of m and l), and then its half of the columns of O. Two neighbouring CTAs form a cluster and
// iterate over the same KV tiles: each issues half of a TMA load, multicast to both, since loads of each CTA on its own
// would be bound by the L2 cache.
//
//   Q        [2 halves, 64, head_dim / 2]          shared memory, later the staging of O
//   K, V     [2 halves, kStages, 64, head_dim / 2] shared memory, one ring for each half
//   S        [64, 64], both halves added           fp32 registers; the partial sums pass through storage.logits
//   P        [64, 64] `weights`                    registers, the A operand of PV
//   O        [64, head_dim / 2] per warpgroup      fp32 registers
//   m, l     `row_max`, `total`                    registers, two rows per thread
//
// Warpgroups 0 and 1 compute, one thread of warpgroup 2 issues the TMA loads. PV of a tile runs beside QK^T of the next
// one and beside the exchange and softmax that follow it:
//
//   producer   Q K0 K1 V0 K2 V1 ...
//   WG 0, 1    S0 | exchange S0 | softmax 0 | S1, O += P0 V0 | exchange S1 | softmax 1 | S2, O += P1 V1 | ...
#pragma once

#include "hopper_common.cuh"

namespace tilewright::attention::hopper {

template <class Element, int kHeadDim>
struct HopperWideForward {
  static constexpr int kHalf = kHeadDim / 2;
  static constexpr int kQueries = 64, kKeys = 64;
  static constexpr int kCluster = 2, kStages = 2;
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kBothWarpgroups = 2 * kWarpgroup;

  using Tile = OutTile<kHalf>;  // half of the head dim of 64 rows of Q, K, V or O
  using Layout = OutLayout<Element, kHalf>;
  using StagesLayout =
      decltype(tile_to_shape(Layout{}, cute::Shape<_64, Int<kHalf>, Int<kStages>>{}, Step<_1, _2, _3>{}));
  // The same shared memory read as V^T: head dims are the rows.
  using ValueLayout = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                             cute::Shape<Int<kHalf>, _64, Int<kStages>>{}, Step<_2, _1, _3>{}));
  static constexpr int kTileSize = 64 * kHalf;
  static_assert(cosize_v<Layout> == kTileSize && cosize_v<ValueLayout> == kStages * kTileSize);

  using MmaQK = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, cute::Shape<_64, _64, Int<kHalf>>, GMMA::Major::K,
                           GMMA::Major::K>()));
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, cute::Shape<_64, Int<kHalf>, _64>, GMMA::Major::K,
                           GMMA::Major::MN>()));

  using Row = decltype(make_tensor(static_cast<Element const*>(nullptr), repeat_like(Strides{}, int32_t(0)), Strides{}));
  using LoadQuery = decltype(make_tma_copy(SM90_TMA_LOAD{}, Row{}, Layout{}));
  using LoadShared = decltype(make_tma_copy(SM90_TMA_LOAD_MULTICAST{}, Row{}, Layout{}, Tile{}, Int<kCluster>{}));
  using Store = decltype(make_tma_copy(SM90_TMA_STORE{}, Row{}, Layout{}));

  static constexpr int kLogits = kQueries * kKeys / kWarpgroup;  // elements of S per thread
  static constexpr int kParts = kLogits / 4;                     // float4 of S per thread

  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  static constexpr int kWarps = kWarpgroup / 32;

  struct SharedStorage {                        // the first index is the half of the head dim, which is the warpgroup
    alignas(1024) Element query[2][kTileSize];  // later the staging of O
    alignas(1024) Element ring[2][kStages][kTileSize];
    float4 logits[2][kParts][kWarpgroup];                      // partial S, in register order
    typename Full::ValueType query_full[2], full[2][kStages];  // the producer arrives, with the bytes of the TMA loads
    typename Empty::ValueType empty[2][kStages];               // 4 warps of each CTA of the cluster arrive
  };

  struct Params {
    LoadQuery query;
    LoadShared key, value;
    Store out;
    float* lse;
    float scale;
    Shape7 shape;
    cutlass::FastDivmod group;  // query heads per KV head
    TileOrder order;            // schedules clusters, each of kCluster * 64 queries
  };

  static Facts facts() { return {int64_t(sizeof(SharedStorage)), kThreads, kAlignment}; }

  static int64_t workspace(const Problem&) { return 0; }

  static ffi::Error run(cudaStream_t stream, const Device&, const Problem& problem, const Arguments& arguments) {
    constexpr int kRows = kCluster * kQueries;
    const int64_t tiles = (problem.q_length + kRows - 1) / kRows;
    TILEWRIGHT_RETURN_IF_ERROR(check_limits(problem, kCluster * tiles * problem.batch * problem.heads));
    Params p;
    TILEWRIGHT_RETURN_IF_ERROR(read_scale(arguments, &p.scale));
    const int batch = int(problem.batch), heads = int(problem.heads), kv_heads = int(problem.kv_heads);
    const int q_length = int(problem.q_length), kv_length = int(problem.kv_length), head_dim = int(problem.head_dim);
    auto rows = [&](const Element* data, int length, int of_heads) {
      return make_tensor(data, make_layout(make_shape(length, head_dim, make_shape(batch, of_heads)),
                                           strides_of(length, of_heads, head_dim)));
    };
    p.query = make_tma_copy(SM90_TMA_LOAD{}, rows(input<Element>(arguments, 0), q_length, heads), Layout{});
    p.key = make_tma_copy(SM90_TMA_LOAD_MULTICAST{}, rows(input<Element>(arguments, 1), kv_length, kv_heads), Layout{},
                          Tile{}, Int<kCluster>{});
    p.value = make_tma_copy(SM90_TMA_LOAD_MULTICAST{}, rows(input<Element>(arguments, 2), kv_length, kv_heads),
                            Layout{}, Tile{}, Int<kCluster>{});
    p.out = make_tma_copy(SM90_TMA_STORE{}, rows(output<Element>(arguments, 0), q_length, heads), Layout{});
    p.lse = output<float>(arguments, 1);
    p.shape = shape_of(problem);
    p.group = cutlass::FastDivmod(heads / kv_heads);
    p.order = TileOrder::make(int(tiles), batch, heads, int64_t(kv_length) * head_dim * 2 * sizeof(Element),
                              heads / kv_heads, get<6>(p.shape) < kv_length);
    return launch_clusters<run_kernel<HopperWideForward>>(dim3(kCluster), dim3(unsigned(kCluster * p.order.total)),
                                                          dim3(kThreads), sizeof(SharedStorage), stream, p);
  }

  // The work of a CTA. Both CTAs of a cluster iterate over the same KV tiles [first, last), the union of what they
  // need.
  struct TileCoord {
    int row_tile, batch, head, first, last;
  };

  static CUTLASS_DEVICE TileCoord tile_coord_of(const Params& p) {
    const auto found = p.order(int(blockIdx.x) / kCluster);
    const int start = found.tile * kCluster * kQueries;
    const int end = min(start + kCluster * kQueries, get<2>(p.shape));
    const int first = max(0, start + get<5>(p.shape)) / kKeys;
    const int last = (min(get<3>(p.shape), end + get<6>(p.shape)) + kKeys - 1) / kKeys;
    // At least one tile; all of it is masked if no key is visible.
    return {found.tile * kCluster + int(blockIdx.x) % kCluster, found.batch, found.head, first, max(first + 1, last)};
  }

  CUTLASS_DEVICE void operator()(const Params& p, SharedStorage& storage) const {
#if defined(CUTLASS_ARCH_MMA_SM90A_ENABLED)
    const int group = cutlass::canonical_warp_group_idx();  // 0, 1: consumers, 2: producer
    const bool copies = cutlass::canonical_warp_idx_sync() == 2 * kWarps && cute::elect_one_sync();
    if (copies) {
      cute::prefetch_tma_descriptor(p.query.get_tma_descriptor());
      cute::prefetch_tma_descriptor(p.key.get_tma_descriptor());
      cute::prefetch_tma_descriptor(p.value.get_tma_descriptor());
      cute::prefetch_tma_descriptor(p.out.get_tma_descriptor());
      for (int half = 0; half < 2; ++half) {
        Full::init(&storage.query_full[half], 1);
        for (int stage = 0; stage < kStages; ++stage) {
          Full::init(&storage.full[half][stage], 1);
          Empty::init(&storage.empty[half][stage], kCluster * kWarps);
        }
      }
      cutlass::arch::fence_barrier_init();
    }
    cute::cluster_arrive();
    cute::cluster_wait();
    const TileCoord coord = tile_coord_of(p);
    if (group == 2) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (copies) copy(p, storage, coord);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      compute(p, storage, coord, group);
    }
    // The other CTA may still multicast into this CTA's shared memory, or arrive on its barriers: exit together.
    cute::cluster_arrive();
    cute::cluster_wait();
#endif
  }

  // The producer: one thread issues all TMA loads.
  static CUTLASS_DEVICE void copy(const Params& p, SharedStorage& storage, const TileCoord& coord) {
    const int q_length = get<2>(p.shape), kv_length = get<3>(p.shape), head_dim = get<4>(p.shape);
    const int batches = get<0>(p.shape), heads = get<1>(p.shape);
    int kv_head, unused;
    p.group(kv_head, unused, coord.head);
    auto tiles_of = [&](const auto& tma, int length, int of_heads, int head) {
      Tensor all = tma.get_tma_tensor(make_shape(length, head_dim, make_shape(batches, of_heads)));
      return local_tile(all(_, _, make_coord(coord.batch, head)), Tile{}, make_coord(_, _));  // (.., .., tile, half)
    };
    constexpr uint32_t kBytes = kTileSize * sizeof(Element);
    const auto queries = tiles_of(p.query, q_length, heads, coord.head);
    const auto query_slice = p.query.get_slice(_0{});
    for (int half = 0; half < 2; ++half) {
      Full::arrive_and_expect_tx(&storage.query_full[half], kBytes);
      Tensor to = make_tensor(make_smem_ptr(storage.query[half]), Layout{});
      cute::copy(p.query.with(storage.query_full[half]), query_slice.partition_S(queries(_, _, coord.row_tile, half)),
                 query_slice.partition_D(to));
    }

    const int kv_heads = heads / p.group.divisor;
    const auto keys = tiles_of(p.key, kv_length, kv_heads, kv_head);
    const auto values = tiles_of(p.value, kv_length, kv_heads, kv_head);
    const int rank = int(cute::block_rank_in_cluster());
    int count = 0;
    auto load = [&](const auto& tma, const auto& tiles, int tile) {
      // Each CTA loads its slice of the tile, multicast to both, so each `full` barrier receives the bytes of two
      // copies. `empty` counts the warps of both CTAs.
      const auto slice = tma.get_slice(rank);
      const int stage = count % kStages;
      for (int half = 0; half < 2; ++half) {
        Empty::wait(&storage.empty[half][stage], (count / kStages + 1) % 2);
        Full::arrive_and_expect_tx(&storage.full[half][stage], kBytes);
        Tensor to = make_tensor(make_smem_ptr(storage.ring[half][stage]), Layout{});
        cute::copy(tma.with(storage.full[half][stage], uint16_t((1 << kCluster) - 1)),
                   slice.partition_S(tiles(_, _, tile, half)), slice.partition_D(to));
      }
      ++count;
    };
    // Issue the loads in the order in which the consumers wait for them.
    load(p.key, keys, coord.first);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tile = coord.first + 1; tile < coord.last; ++tile) {
      load(p.key, keys, tile);
      load(p.value, values, tile - 1);
    }
    load(p.value, values, coord.last - 1);
  }

  // Named barriers of both consumer warpgroups (0 and 1 are those of each one). kWritten: both have written their
  // partial S. kRead + half: the other warpgroup has read the partial S of this half.
  static constexpr uint32_t kWritten = 2, kRead = 3;

  // A consumer warpgroup; `half` is its half of the head dim.
  static CUTLASS_DEVICE void compute(const Params& p, SharedStorage& storage, const TileCoord& coord, int half) {
    const int thread = threadIdx.x % kWarpgroup;
    const int warp = thread / 32, lane = thread % 32;
    const int first_row = coord.row_tile * kQueries + 16 * warp + lane / 4;  // the thread's other row is 8 below
    const float scale2 = p.scale * kLog2e;

    int count = 0;  // units of the ring consumed, K and V in the order of loading
    auto acquire = [&] { Full::wait(&storage.full[half][count % kStages], count / kStages % 2); };
    // Lane i of each warp arrives at CTA i of the cluster: a unit is free once both CTAs have read it.
    auto release = [&](int which) {
      Empty::arrive(&storage.empty[half][which % kStages], uint32_t(lane), lane < kCluster);
    };

    MmaQK mma_qk;
    MmaPV mma_pv;
    const auto qk = mma_qk.get_thread_slice(thread);
    const auto pv = mma_pv.get_thread_slice(thread);
    Tensor shared_q = make_tensor(make_smem_ptr(storage.query[half]), Layout{});
    Tensor shared_k = make_tensor(make_smem_ptr(storage.ring[half][0]), StagesLayout{});
    Tensor shared_v = make_tensor(make_smem_ptr(storage.ring[half][0]), ValueLayout{});
    Tensor queries = qk.partition_fragment_A(shared_q);
    Tensor keys = qk.partition_fragment_B(shared_k);
    Tensor values = pv.partition_fragment_B(shared_v);
    Tensor logits = partition_fragment_C(mma_qk, cute::Shape<_64, _64>{});
    Tensor out = partition_fragment_C(mma_pv, cute::Shape<_64, Int<kHalf>>{});
    Tensor weights = make_tensor<Element>(partition_shape_A(mma_pv, cute::Shape<_64, _64>{}));
    static_assert(decltype(size(logits))::value == kLogits && decltype(size(weights))::value == kLogits);
    clear(out);
    float row_max[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0}, shrink[2];

    // Issues the partial S = Q K^T of the next unit of the ring.
    auto start_logits = [&] {
      acquire();
      warpgroup_fence_operand(logits);
      warpgroup_arrive();
      mma_qk.accumulate_ = GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < size<2>(queries); ++k) {
        cute::gemm(mma_qk, queries(_, _, k), keys(_, _, k, count % kStages), logits);
        mma_qk.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      ++count;
    };
    // Issues O += P V of the next unit of the ring.
    auto start_out = [&] {
      acquire();
      warpgroup_fence_operand(weights);
      warpgroup_fence_operand(out);
      warpgroup_arrive();
      cute::gemm(mma_pv, weights, values(_, _, _, count % kStages), out);
      warpgroup_commit_batch();
      ++count;
    };

    // Adds the partial S of the other warpgroup, where the same thread holds the same elements. `again`: the buffer was
    // used before, so wait until the other warpgroup has read it.
    auto exchange = [&](bool again) {
      if (again) cutlass::arch::NamedBarrier::sync(kBothWarpgroups, kRead + half);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kParts; ++i) {
        storage.logits[half][i][thread] =
            make_float4(logits(4 * i), logits(4 * i + 1), logits(4 * i + 2), logits(4 * i + 3));
      }
      cutlass::arch::NamedBarrier::sync(kBothWarpgroups, kWritten);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kParts; ++i) {
        const float4 other = storage.logits[1 - half][i][thread];
        logits(4 * i) += other.x;
        logits(4 * i + 1) += other.y;
        logits(4 * i + 2) += other.z;
        logits(4 * i + 3) += other.w;
      }
    };
    // Tells the other warpgroup that its partial S has been read. Not called after the last exchange, where nobody
    // waits.
    auto say_read = [&] { cutlass::arch::NamedBarrier::arrive(kBothWarpgroups, kRead + 1 - half); };

    // Masks S and turns it into P; updates m and l, and sets the factor `shrink` by which O must be rescaled.
    auto softmax = [&](int tile) {
      const int start = tile * kKeys, row = coord.row_tile * kQueries;
      const int kv_length = get<3>(p.shape), lowest = get<5>(p.shape), highest = get<6>(p.shape);
      if (start + kKeys > kv_length || start + kKeys - 1 - row > highest || start - (row + kQueries - 1) < lowest) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLogits; ++i) {
          const int key = start + i / 4 * 8 + lane % 4 * 2 + i % 2, distance = key - (first_row + i / 2 % 2 * 8);
          if (key >= kv_length || distance < lowest || distance > highest) logits(i) = -INFINITY;
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        float most = row_max[r];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLogits; i += 4) most = fmaxf(most, fmaxf(logits(i + 2 * r), logits(i + 2 * r + 1)));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float subtracted = most == -INFINITY ? 0.0f : most * scale2;
        shrink[r] = exp2f(row_max[r] * scale2 - subtracted);
        row_max[r] = most;
        float sum = 0;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLogits; i += 4) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = i + 2 * r; j < i + 2 * r + 2; ++j) {
            logits(j) = exp2f(fmaf(logits(j), scale2, -subtracted));
            sum += logits(j);
          }
        }
        total[r] = total[r] * shrink[r] + sum;
      }
    };
    auto narrow = [&] { convert<Element, kLogits>(logits.data(), weights.data()); };
    auto shrink_out = [&] {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(out); ++i) out(i) *= shrink[i / 2 % 2];
    };

    Full::wait(&storage.query_full[half], 0);
    start_logits();
    warpgroup_wait<0>();
    warpgroup_fence_operand(logits);
    release(0);
    exchange(false);
    if (coord.first + 1 < coord.last) say_read();
    softmax(coord.first);
    narrow();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tile = coord.first + 1; tile < coord.last; ++tile) {
      start_logits();
      start_out();
      warpgroup_wait<1>();
      warpgroup_fence_operand(logits);
      release(count - 2);
      exchange(true);
      if (tile + 1 < coord.last) say_read();
      softmax(tile);
      warpgroup_wait<0>();
      warpgroup_fence_operand(out);
      release(count - 1);
      narrow();
      shrink_out();
    }
    start_out();
    warpgroup_wait<0>();
    warpgroup_fence_operand(out);

    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      total[r] += __shfl_xor_sync(~0u, total[r], 1);
      total[r] += __shfl_xor_sync(~0u, total[r], 2);
      const float subtracted = row_max[r] == -INFINITY ? 0.0f : row_max[r] * p.scale;
      const int query = first_row + 8 * r;
      if (half == 0 && lane % 4 == 0 && query < get<2>(p.shape)) {
        const int64_t head = int64_t(coord.batch) * get<1>(p.shape) + coord.head;
        p.lse[head * get<2>(p.shape) + query] = total[r] == 0 ? -INFINITY : subtracted + logf(total[r]);
      }
      shrink[r] = total[r] == 0 ? 0.0f : 1 / total[r];
    }
    shrink_out();
    stage_tile<Element, MmaPV>(out, shared_q, thread);
    sync_warpgroup(half);
    if (warp == 0 && cute::elect_one_sync()) {
      Tensor all = p.out.get_tma_tensor(
          make_shape(get<2>(p.shape), get<4>(p.shape), make_shape(get<0>(p.shape), get<1>(p.shape))));
      Tensor to = local_tile(all(_, _, make_coord(coord.batch, coord.head)), Tile{}, make_coord(coord.row_tile, half));
      const auto slice = p.out.get_slice(_0{});
      cute::copy(p.out, slice.partition_S(shared_q), slice.partition_D(to));
      tma_store_arrive();
      tma_store_wait<0>();
    }
  }
};

}  // namespace tilewright::attention::hopper
