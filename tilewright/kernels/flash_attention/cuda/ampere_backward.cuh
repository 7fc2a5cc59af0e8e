// Backward attention for compute capability 8.0 and up, on cp.async, ldmatrix and mma.sync.
//
//   S  = Q K^T                          P  = exp2(logit2 - lse2), in units of log 2
//   dP = dO V^T                         dS = P * (dP - delta) * d(soft cap)
//   dV += P^T dO      dK += dS^T Q      dQ += dS K
//
// The final stores multiply dQ and dK by scale, and dV by keep_scale (1 / keep probability).
//
// kKeysAndSums: a CTA owns kKeys keys of one KV head and iterates over the queries of all its query heads. dK and dV
// stay in registers. Each tile of dQ is added by atomics to an fp32 accumulator in global memory, in register order,
// and a last kernel converts that. CTAs add in any order, so dQ is not deterministic. The deterministic form runs two
// passes: kKeys without dQ, then kQueries, whose CTAs own queries, iterate over keys, and keep dQ in registers.
//
//   delta, lse2   `terms` [batch, heads, q_length]   float2, global memory; a tile of it in shared memory
//   Q, dO         [kQueryStages, kQueries, kMaxDim]  shared memory
//   K, V          [kKeyStages, kKeys, kMaxDim]       shared memory
//   S, P          `logits`                           registers, then the `weights` tile in shared memory
//   dP, dS        `d_logits`                         registers, then the `d_logits` tile in shared memory
//   dK, dV, dQ    accumulators split over all warps  registers (AmpereGrid)
//
// A step: wait for the tile | load the next (2 stages) | S, dP, P, dS | sync | dV, dK | load the next (1 stage) | dQ.
#pragma once

#include "ampere_products.cuh"

namespace tilewright::attention {

// The tiling of a pass: tile sizes, the grid of warps over S [queries, keys], all warps (as many as that grid has, or
// twice as many), the stages of the tiles that the CTA iterates over, and CTAs per SM.
template <int kQueryCount, int kKeyCount, int kQueryWarpCount, int kKeyWarpCount, int kWarpCount, int kStageCount,
          int kBlockCount>
struct AmpereWalk {
  static constexpr int kQueries = kQueryCount, kKeys = kKeyCount;
  static constexpr int kQueryWarps = kQueryWarpCount, kKeyWarps = kKeyWarpCount;
  static constexpr int kStages = kStageCount, kBlocks = kBlockCount;
  static constexpr int kWarps = kWarpCount, kThreads = 32 * kWarps;
  static_assert(kWarps == kQueryWarps * kKeyWarps || kWarps == 2 * kQueryWarps * kKeyWarps);
};

enum class AmperePass { kKeysAndSums, kKeys, kQueries };

template <class Element>
struct AmpereBackwardParams : BackwardArrays<Element> {
  const float2* terms;  // [batch, heads, q_length]: delta, and lse in units of log 2
  float* sums;          // the dQ accumulator, in register order
  ampere::Order order;
};

// How all warps split a gradient [kRowCount, kColumnCount]: 32 rows per warp, or 16 or 64 where that does not fit.
template <class Element, int kRowCount, int kColumnCount, int kWarps>
struct AmpereGrid {
  static constexpr bool fits(int rows) {
    if (kRowCount % rows != 0) return false;
    const int warps = kRowCount / rows;
    if (warps > kWarps || kWarps % warps != 0 || kColumnCount % (kWarps / warps) != 0) return false;
    const int columns = kColumnCount / (kWarps / warps), bytes = columns * int(sizeof(Element));
    return columns % (sizeof(Element) == 4 ? 32 : 16) == 0 && (bytes % 128 == 0 || (bytes & (bytes - 1)) == 0);
  }
  static constexpr int kRows = fits(32) ? 32 : fits(16) ? 16 : 64;
  static_assert(fits(kRows), "no way to share this gradient among the warps");
  static constexpr int kRowWarps = kRowCount / kRows, kColumnWarps = kWarps / kRowWarps;
  static constexpr int kColumns = kColumnCount / kColumnWarps;
  static constexpr int kM = kRows / 16, kN = kColumns / 8;
  using Sums = float[kM][kN][4];

  int row, column;  // first row and column of this warp

  __device__ explicit AmpereGrid(int warp) : row(warp / kColumnWarps * kRows), column(warp % kColumnWarps * kColumns) {}
};

template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads, Pass::kBlocks)
    ampere_backward(const AmpereBackwardParams<typename Pass::Element> p) {
  Pass::block(p);
}

template <class Pass>
__global__ void __launch_bounds__(Pass::kThreads)
    ampere_backward_convert(const AmpereBackwardParams<typename Pass::Element> p) {
  Pass::convert_block(p);
}

template <class ElementType, int kMaxDim, class Tiling, AmperePass kPass, bool kExact, bool kModified, bool kDropout>
struct AmpereBackwardPass {
  using Element = ElementType;
  using Params = AmpereBackwardParams<Element>;
  static constexpr int kThreads = Tiling::kThreads, kBlocks = Tiling::kBlocks, kStages = Tiling::kStages;
  static constexpr int kQueries = Tiling::kQueries, kKeys = Tiling::kKeys;
  static constexpr bool kOwnsKeys = kPass != AmperePass::kQueries, kSums = kPass == AmperePass::kKeysAndSums;
  // kPaired: there are twice the warps that the grid over S has; one half computes S and the other dP. With float32
  // (kSharedDim) the warps of each half also split the head dim, each over the whole tile: more MMAs for what is
  // loaded, but partial sums must be added.
  static constexpr int kScoreWarps = Tiling::kQueryWarps * Tiling::kKeyWarps;
  static constexpr bool kPaired = kScoreWarps < Tiling::kWarps, kSharedDim = kPaired && ampere::kIsFloat<Element>;
  // Bytes of one S or dP tile as fp32 accumulators.
  static constexpr int kPartBytes = kQueries / 16 * (kKeys / 8) * 512;
  static constexpr int kWarpQueries = kQueries / Tiling::kQueryWarps, kWarpKeys = kKeys / Tiling::kKeyWarps;
  static constexpr int kM = kWarpQueries / 16, kN = kWarpKeys / 8;
  static constexpr bool kRounds = ampere::kIsFloat<Element> && !kExact;
  static constexpr int kStepsOfDim = kMaxDim * int(sizeof(Element)) / 32;

  // The tiles that the CTA owns are rounded to tf32 once, in shared memory; those it iterates over, on every read.
  using Queries = ampere::Tile<Element, kQueries, kMaxDim, !kOwnsKeys>;  // Q, dO
  using Keys = ampere::Tile<Element, kKeys, kMaxDim, kOwnsKeys>;         // K, V
  using Weights = ampere::Tile<Element, kQueries, kKeys, true>;          // P, dS
  using KeyGrid = AmpereGrid<Element, kKeys, kMaxDim, Tiling::kWarps>;
  using QueryGrid = AmpereGrid<Element, kQueries, kMaxDim, Tiling::kWarps>;

  // Byte offsets in dynamic shared memory: Q, dO, K, V, dS, P, terms, partial S and dP.
  static constexpr int kQueryStages = kOwnsKeys ? kStages : 1, kKeyStages = kOwnsKeys ? 1 : kStages;
  static constexpr int kDOutAt = kQueryStages * Queries::kBytes, kKeysAt = 2 * kDOutAt;
  static constexpr int kValuesAt = kKeysAt + kKeyStages * Keys::kBytes;
  static constexpr int kDLogitsAt = kValuesAt + kKeyStages * Keys::kBytes;
  static constexpr int kWeightsAt = kDLogitsAt + Weights::kBytes;
  static constexpr int kTermsAt =
      kDLogitsAt + std::max((kOwnsKeys ? 2 : 1) * Weights::kBytes, kPaired && !kSharedDim ? kPartBytes : 0);
  static constexpr int kPartsAt = kTermsAt + kQueryStages * kQueries * int(sizeof(float2));
  static constexpr int kSharedBytes = kPartsAt + (kSharedDim ? Tiling::kWarps * kPartBytes : 0);

  // Floats of one tile of the dQ accumulator.
  static constexpr int64_t kTileSums = int64_t(kQueries) * kMaxDim;

  struct TileCoord {
    uint32_t base;
    int lane, warp, query_row, key_column;  // query_row, key_column: the warp's first in the tile of S

    __device__ TileCoord() {
      extern __shared__ __align__(128) unsigned char memory[];
      base = ampere::shared_address(memory);
      lane = threadIdx.x % 32;
      warp = threadIdx.x / 32;
      query_row = warp % kScoreWarps / Tiling::kKeyWarps * kWarpQueries;
      key_column = warp % Tiling::kKeyWarps * kWarpKeys;
    }
    __device__ Queries query(int stage) const { return {base + (kQueryStages == 2 ? stage * Queries::kBytes : 0)}; }
    __device__ Queries d_out(int stage) const {
      return {base + kDOutAt + (kQueryStages == 2 ? stage * Queries::kBytes : 0)};
    }
    __device__ Keys key(int stage) const { return {base + kKeysAt + (kKeyStages == 2 ? stage * Keys::kBytes : 0)}; }
    __device__ Keys value(int stage) const { return {base + kValuesAt + (kKeyStages == 2 ? stage * Keys::kBytes : 0)}; }
    __device__ Weights d_logits() const { return {base + kDLogitsAt}; }
    __device__ Weights weights() const { return {base + kWeightsAt}; }
    __device__ uint32_t terms(int stage) const {
      return base + kTermsAt + (kQueryStages == 2 ? stage * kQueries * int(sizeof(float2)) : 0);
    }
  };

  static __device__ void copy_queries(const Params& p, const TileCoord& coord, int batch, int head, int start,
                                      int stage) {
    const int q_stride = p.heads * p.head_dim, o_stride = p.heads * p.value_dim, rows = p.scores.q_length - start;
    const int64_t first = int64_t(batch) * p.scores.q_length + start;
    coord.query(stage).template copy<kThreads>(p.query + first * q_stride + head * p.head_dim, q_stride, rows,
                                               p.head_dim);
    coord.d_out(stage).template copy<kThreads>(p.d_out + first * o_stride + head * p.value_dim, o_stride, rows,
                                               p.value_dim);
    const float2* terms = p.terms + (int64_t(batch) * p.heads + head) * p.scores.q_length + start;
    for (int i = threadIdx.x; i < kQueries; i += kThreads) {
      const uint32_t target = coord.terms(stage) + i * int(sizeof(float2));
      if (i < rows) {
        ampere::copy_async_8(target, terms + i);
      } else {
        ampere::write_floats(target, make_float2(0, INFINITY));  // exp2(S - inf) = 0: rows beyond the end have P = 0
      }
    }
  }

  static __device__ void copy_keys(const Params& p, const TileCoord& coord, int batch, int kv_head, int start,
                                   int stage) {
    const int k_stride = p.kv_heads * p.head_dim, v_stride = p.kv_heads * p.value_dim;
    const int rows = p.scores.kv_length - start;
    const int64_t first = int64_t(batch) * p.scores.kv_length + start;
    coord.key(stage).template copy<kThreads>(p.key + first * k_stride + kv_head * p.head_dim, k_stride, rows,
                                             p.head_dim);
    coord.value(stage).template copy<kThreads>(p.value + first * v_stride + kv_head * p.value_dim, v_stride, rows,
                                               p.value_dim);
  }

  // Computes S, P, dP and dS of a tile, and leaves dS and, if the CTA owns keys, P in shared memory. The caller must
  // synchronize before it reads them. Adds dS to the bias gradient.
  static __device__ void scores(const Params& p, const TileCoord& coord, const HeadScores& head, int q_start,
                                int k_start, int q_stage, int k_stage) {
    const int g = coord.lane / 4, t = coord.lane % 4;
    float logits[kM][kN][4], d_logits[kM][kN][4];
    auto multiply = [&](float (&products)[kM][kN][4], const Queries& queries, const Keys& keys) {
      ampere::multiply_rows<kExact, kStepsOfDim, Queries, Keys>(products, queries.left(coord.query_row, coord.lane),
                                                                keys.right(coord.key_column, coord.lane));
    };
    if constexpr (kSharedDim) {
      constexpr int kShares = Tiling::kWarps / 2, kPartColumns = kMaxDim / kShares;
      const uint32_t parts = coord.base + kPartsAt + coord.lane * 16;
      const int bytes = coord.warp % kShares * kPartColumns * int(sizeof(Element));
      const bool first = coord.warp < kShares;
      const Queries queries = first ? coord.query(q_stage) : coord.d_out(q_stage);
      const Keys keys = first ? coord.key(k_stage) : coord.value(k_stage);
      float products[kQueries / 16][kKeys / 8][4];
      ampere::clear(products);
      ampere::multiply_rows<kExact, kStepsOfDim / kShares, Queries, Keys>(
          products, ampere::moved(queries.left(0, coord.lane), bytes), ampere::moved(keys.right(0, coord.lane), bytes));
      ampere::write_words(parts + coord.warp * kPartBytes, products);
      __syncthreads();
      if (coord.warp >= kScoreWarps) return;
      ampere::clear(logits);
      ampere::clear(d_logits);
      static_assert(kM == 1);
      const uint32_t own = parts + (coord.query_row / 16 * (kKeys / 8) + coord.key_column / 8) * 512;
#pragma unroll
      for (int share = 0; share < kShares; ++share) {
        ampere::add_words(own + share * kPartBytes, logits);
        ampere::add_words(own + (kShares + share) * kPartBytes, d_logits);
      }
    } else if constexpr (kPaired) {
      const uint32_t part = coord.base + kDLogitsAt + (coord.warp % kScoreWarps * kM * kN * 32 + coord.lane) * 16;
      const int role = coord.warp / kScoreWarps;
      if (role == 0) {
        ampere::clear(logits);
        multiply(logits, coord.query(q_stage), coord.key(k_stage));
      } else if (role == 1) {
        ampere::clear(d_logits);
        multiply(d_logits, coord.d_out(q_stage), coord.value(k_stage));
        ampere::write_words(part, d_logits);
      }
      __syncthreads();
      if (role != 0) return;
      ampere::clear(d_logits);
      ampere::add_words(part, d_logits);
      ampere::sync_some(1, 32 * kScoreWarps);  // all have read dP, which dS overwrites
    } else {
      ampere::clear(logits);
      multiply(logits, coord.query(q_stage), coord.key(k_stage));
      ampere::clear(d_logits);
      multiply(d_logits, coord.d_out(q_stage), coord.value(k_stage));
    }

    const int query = q_start + coord.query_row + g, key = k_start + coord.key_column + 2 * t;
    const int q_end = min(q_start + kQueries, p.scores.q_length), k_end = min(k_start + kKeys, p.scores.kv_length);
    const bool whole = k_end == k_start + kKeys && head.all_visible(q_start, q_end, k_start, k_end);
    ampere::to_logits<kModified>(logits, head, query, key, q_end, k_end, whole);
    const float multiplier = ampere::positive_multiplier<kModified>(p.scores, logits);
    const bool capped = kModified && p.scores.soft_cap != 0;
    const bool stores_bias = kModified && kOwnsKeys && p.d_bias.data != nullptr;
    const uint2 dropout_key = kDropout ? head.dropout_key() : uint2{};
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * m + 8 * half;
        const float2 terms =
            ampere::read_floats(coord.terms(q_stage) + (coord.query_row + row + g) * int(sizeof(float2)));
        uint2 words[2];
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& weight = logits[m][n][2 * half + e];
            float& gradient = d_logits[m][n][2 * half + e];
            const float logit = weight;
            weight = ampere::fast_exp2(fmaf(logit, multiplier, -terms.y));
            const int column = key + 8 * n + e;
            // A call serves two columns: those of n and n + 1 if blocks of 16 are not cut between warps.
            if (kDropout && (kN % 2 || n % 2 == 0)) words[e] = random_words(dropout_key, query + row, column);
            const bool is_kept = !kDropout || kept(words[e], p.scores.keep_threshold, query + row, column);
            if constexpr (kDropout) gradient = is_kept ? gradient * p.scores.keep_scale : 0.0f;
            gradient = (gradient - terms.x) * weight;
            if constexpr (kModified) {
              if (capped && weight > 0) gradient *= head.cap_slope(logit);
              if (stores_bias && query + row < q_end && key + 8 * n + e < k_end) {
                p.d_bias.add(head.batch, head.head, query + row, key + 8 * n + e, gradient);
              }
            }
            if (!is_kept) weight = 0;
          }
        }
      }
    }
    if constexpr (kOwnsKeys) {
      ampere::write_sums<kExact>(coord.weights(), logits, coord.query_row, coord.key_column, coord.lane);
    }
    ampere::write_sums<kExact>(coord.d_logits(), d_logits, coord.query_row, coord.key_column, coord.lane);
  }

  static __device__ float* sums_of(const Params& p, int64_t head, int q_start) {
    return p.sums + (head * ampere::tiles_of(p.scores.q_length, kQueries) + q_start / kQueries) * kTileSums;
  }

  // Adds one tile of dQ to the accumulator: red.v4 adds four floats per instruction from 9.0 on, else one atomic each.
  static __device__ void add_sums(float* target, const typename QueryGrid::Sums& sums) {
#pragma unroll
    for (int m = 0; m < QueryGrid::kM; ++m) {
#pragma unroll
      for (int n = 0; n < QueryGrid::kN; ++n) {
        const float(&c)[4] = sums[m][n];
#if __CUDA_ARCH__ >= 900
        float* at = target + ((m * QueryGrid::kN + n) * kThreads + threadIdx.x) * 4;
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(c[0]), "f"(c[1]), "f"(c[2]),
                     "f"(c[3])
                     : "memory");
#else
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          atomicAdd(target + ((m * QueryGrid::kN + n) * 4 + i) * kThreads + threadIdx.x, c[i]);
        }
#endif
      }
    }
  }

  static __device__ void read_sums(const float* source, typename QueryGrid::Sums& sums) {
#pragma unroll
    for (int m = 0; m < QueryGrid::kM; ++m) {
#pragma unroll
      for (int n = 0; n < QueryGrid::kN; ++n) {
        float(&c)[4] = sums[m][n];
#if __CUDA_ARCH__ >= 900
        const float4 read =
            *reinterpret_cast<const float4*>(source + ((m * QueryGrid::kN + n) * kThreads + threadIdx.x) * 4);
        c[0] = read.x;
        c[1] = read.y;
        c[2] = read.z;
        c[3] = read.w;
#else
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = source[((m * QueryGrid::kN + n) * 4 + i) * kThreads + threadIdx.x];
#endif
      }
    }
  }

  static __device__ void block(const Params& p) {
    if constexpr (kOwnsKeys) {
      key_block(p);
    } else {
      query_block(p);
    }
  }

  static __device__ void key_block(const Params& p) {
    const TileCoord coord;
    const int2 owned = p.order.coord(blockIdx.x);
    const int batch = owned.y / p.kv_heads, kv_head = owned.y % p.kv_heads, group = p.scores.group;
    const int k_start = owned.x * kKeys, k_end = min(k_start + kKeys, p.scores.kv_length);
    const KeyGrid grid(coord.warp);
    const QueryGrid query_grid(coord.warp);
    typename KeyGrid::Sums d_key, d_value;
    ampere::clear(d_key);
    ampere::clear(d_value);

    // Iterates over the query heads of the group, and over the query tiles of each. A head whose queries see none of
    // these keys has an empty range and is skipped.
    int member = 0;
    int2 range = make_int2(0, 0);
    auto enter = [&] {  // moves on to the next head that sees some of these keys
      for (; member < group; ++member) {
        range = HeadScores(p.scores, batch, kv_head * group + member).queries_for(k_start, k_end, kQueries);
        if (range.x < range.y) break;
      }
    };
    enter();
    int q_start = range.x, stage = 0;
    [[maybe_unused]] bool first = true;
    copy_keys(p, coord, batch, kv_head, k_start, 0);
    if (member < group) copy_queries(p, coord, batch, kv_head * group + member, q_start, 0);
    ampere::commit_copies();

    while (member < group) {
      const int head_index = kv_head * group + member, start = q_start;
      q_start += kQueries;
      if (q_start >= range.y) {
        ++member;
        enter();
        q_start = range.x;
      }
      ampere::wait_copies<0>();
      if constexpr (kRounds) {
        if (first) {
          coord.key(0).template round_copied<kThreads>();
          coord.value(0).template round_copied<kThreads>();
        }
        first = false;
      }
      __syncthreads();  // this tile has arrived, and all warps have read the last one
      if constexpr (kStages == 2) {
        if (member < group) copy_queries(p, coord, batch, kv_head * group + member, q_start, stage ^ 1);
        ampere::commit_copies();
      }
      scores(p, coord, HeadScores(p.scores, batch, head_index), start, k_start, stage, 0);
      __syncthreads();
      ampere::multiply_tile_transposed<kExact, kQueries / ampere::kStepRows<Element>, Weights, Queries>(
          d_value, coord.weights().template left_transposed<KeyGrid::kRows>(grid.row, coord.lane),
          coord.d_out(stage).template right_transposed<KeyGrid::kColumns>(grid.column, coord.lane));
      ampere::multiply_tile_transposed<kExact, kQueries / ampere::kStepRows<Element>, Weights, Queries>(
          d_key, coord.d_logits().template left_transposed<KeyGrid::kRows>(grid.row, coord.lane),
          coord.query(stage).template right_transposed<KeyGrid::kColumns>(grid.column, coord.lane));
      if constexpr (kStages == 1) {
        __syncthreads();  // all warps have read Q and dO
        if (member < group) copy_queries(p, coord, batch, kv_head * group + member, q_start, 0);
        ampere::commit_copies();
      }
      if constexpr (kSums) {
        typename QueryGrid::Sums d_query;
        ampere::clear(d_query);
        ampere::multiply_tile<kExact, kKeys * int(sizeof(Element)) / 32, Weights, Keys>(
            d_query, coord.d_logits().left(query_grid.row, coord.lane),
            coord.key(0).template right_transposed<QueryGrid::kColumns>(query_grid.column, coord.lane));
        add_sums(sums_of(p, int64_t(batch) * p.heads + head_index, start), d_query);
      }
      stage ^= 1;
    }
    ampere::wait_copies<0>();
    __syncthreads();
    const int64_t row = (int64_t(batch) * p.scores.kv_length + k_start) * p.kv_heads + kv_head;
    const float value_scale = kDropout ? p.scores.keep_scale : 1.0f;
    ampere::write_result(coord.key(0), d_key, grid.row, grid.column, coord.lane,
                         [&](int, int) { return p.scores.scale; });
    ampere::write_result(coord.value(0), d_value, grid.row, grid.column, coord.lane,
                         [&](int, int) { return value_scale; });
    __syncthreads();
    coord.key(0).template store<kThreads>(p.d_key + row * p.head_dim, p.kv_heads * p.head_dim, k_end - k_start,
                                          p.head_dim);
    coord.value(0).template store<kThreads>(p.d_value + row * p.value_dim, p.kv_heads * p.value_dim, k_end - k_start,
                                            p.value_dim);
  }

  static __device__ void query_block(const Params& p) {
    const TileCoord coord;
    const int2 owned = p.order.coord(blockIdx.x);
    const int batch = owned.y / p.heads, head_index = owned.y % p.heads, kv_head = head_index / p.scores.group;
    const int q_start = (p.order.tiles - 1 - owned.x) * kQueries;
    const int q_end = min(q_start + kQueries, p.scores.q_length);
    const HeadScores head(p.scores, batch, head_index);
    const int2 range = head.keys_for(q_start, q_end, kKeys);
    const QueryGrid grid(coord.warp);
    typename QueryGrid::Sums d_query;
    ampere::clear(d_query);
    copy_queries(p, coord, batch, head_index, q_start, 0);
    if (range.x < range.y) copy_keys(p, coord, batch, kv_head, range.x, 0);
    ampere::commit_copies();
    int stage = 0;
    for (int k_start = range.x; k_start < range.y; k_start += kKeys) {
      const bool more = k_start + kKeys < range.y;
      ampere::wait_copies<0>();
      if constexpr (kRounds) {
        if (k_start == range.x) {
          coord.query(0).template round_copied<kThreads>();
          coord.d_out(0).template round_copied<kThreads>();
        }
      }
      __syncthreads();  // this tile has arrived, and all warps have read the last one
      if constexpr (kStages == 2) {
        if (more) copy_keys(p, coord, batch, kv_head, k_start + kKeys, stage ^ 1);
        ampere::commit_copies();
      }
      scores(p, coord, head, q_start, k_start, 0, stage);
      __syncthreads();
      ampere::multiply_tile<kExact, kKeys * int(sizeof(Element)) / 32, Weights, Keys>(
          d_query, coord.d_logits().left(grid.row, coord.lane),
          coord.key(stage).template right_transposed<QueryGrid::kColumns>(grid.column, coord.lane));
      if constexpr (kStages == 1) {
        __syncthreads();  // all warps have read K and V
        if (more) copy_keys(p, coord, batch, kv_head, k_start + kKeys, 0);
        ampere::commit_copies();
      }
      stage ^= 1;
    }
    ampere::wait_copies<0>();
    __syncthreads();
    store_query(p, coord, batch, head_index, q_start, d_query);
  }

  // Converts one tile of the dQ accumulator to Element.
  static __device__ void convert_block(const Params& p) {
    const TileCoord coord;
    const int tiles = int(ampere::tiles_of(p.scores.q_length, kQueries));
    const int head = blockIdx.x / tiles, q_start = blockIdx.x % tiles * kQueries;
    typename QueryGrid::Sums d_query;
    read_sums(sums_of(p, head, q_start), d_query);
    store_query(p, coord, head / p.heads, head % p.heads, q_start, d_query);
  }

  static __device__ void store_query(const Params& p, const TileCoord& coord, int batch, int head, int q_start,
                                     const typename QueryGrid::Sums& d_query) {
    const QueryGrid grid(coord.warp);
    ampere::write_result(coord.query(0), d_query, grid.row, grid.column, coord.lane,
                         [&](int, int) { return p.scores.scale; });
    __syncthreads();
    const int64_t first = (int64_t(batch) * p.scores.q_length + q_start) * p.heads + head;
    coord.query(0).template store<kThreads>(p.d_query + first * p.head_dim, p.heads * p.head_dim,
                                            min(kQueries, p.scores.q_length - q_start), p.head_dim);
  }
};

template <class Element, int kMaxDim, class KeyWalk, class QueryWalk, bool kExact, bool kModified, bool kDropout>
struct AmpereBackward {
  template <class Tiling, AmperePass kPass>
  using Pass = AmpereBackwardPass<Element, kMaxDim, Tiling, kPass, kExact, kModified, kDropout>;
  using Adding = Pass<KeyWalk, AmperePass::kKeysAndSums>;
  using ByKeys = Pass<KeyWalk, AmperePass::kKeys>;
  using ByQueries = Pass<QueryWalk, AmperePass::kQueries>;

  static Facts facts() {
    return {std::max(ByKeys::kSharedBytes, ByQueries::kSharedBytes), std::max(KeyWalk::kThreads, QueryWalk::kThreads),
            ampere::kChunk / int(sizeof(Element))};
  }

  // Floats of delta and lse2, padded so that the dQ accumulator behind them is aligned.
  static int64_t terms(const Problem& problem) {
    return (2 * problem.batch * problem.heads * problem.q_length + 63) / 64 * 64;
  }

  // Floats of the dQ accumulator.
  static int64_t sums(const Problem& problem) {
    if (problem.deterministic) return 0;
    return problem.batch * problem.heads * ampere::tiles_of(problem.q_length, KeyWalk::kQueries) * Adding::kTileSums;
  }

  static int64_t workspace(const Problem& problem) {
    return (terms(problem) + sums(problem)) * int64_t(sizeof(float));
  }

  static ffi::Error run(cudaStream_t stream, const Device&, const Problem& problem, const Arguments& arguments) {
    AmpereBackwardParams<Element> p;
    TILEWRIGHT_RETURN_IF_ERROR(start_backward<Element>(problem, arguments, stream, &p));
    float2* delta = static_cast<float2*>(arguments.workspace);
    p.terms = delta;
    p.sums = static_cast<float*>(arguments.workspace) + terms(problem);
    TILEWRIGHT_RETURN_IF_ERROR(start_row_terms<Element>(problem, arguments, stream, delta));

    const int64_t q_heads = problem.batch * problem.heads, kv_heads = problem.batch * problem.kv_heads;
    const int64_t bytes = (problem.head_dim + problem.value_dim) * int64_t(sizeof(Element));
    const int64_t key_tiles = ampere::tiles_of(problem.kv_length, KeyWalk::kKeys);
    p.order = ampere::order_of(key_tiles, kv_heads, bytes * problem.q_length * p.scores.group);
    const dim3 key_blocks(key_tiles * kv_heads), key_threads(KeyWalk::kThreads);
    if (!problem.deterministic) {
      TILEWRIGHT_RETURN_IF_ERROR(
          check(cudaMemsetAsync(p.sums, 0, sums(problem) * sizeof(float), stream), "clearing the sums of dQ"));
      TILEWRIGHT_RETURN_IF_ERROR(
          launch<ampere_backward<Adding>>(key_blocks, key_threads, Adding::kSharedBytes, stream, p));
      const dim3 tiles(q_heads * ampere::tiles_of(problem.q_length, KeyWalk::kQueries));
      return launch<ampere_backward_convert<Adding>>(tiles, key_threads, Adding::Queries::kBytes, stream, p);
    }
    TILEWRIGHT_RETURN_IF_ERROR(
        launch<ampere_backward<ByKeys>>(key_blocks, key_threads, ByKeys::kSharedBytes, stream, p));
    const int64_t query_tiles = ampere::tiles_of(problem.q_length, QueryWalk::kQueries);
    p.order = ampere::order_of(query_tiles, q_heads, bytes * problem.kv_length * problem.kv_heads /
                                                         std::max<int64_t>(problem.heads, 1));
    return launch<ampere_backward<ByQueries>>(dim3(query_tiles * q_heads), dim3(QueryWalk::kThreads),
                                              ByQueries::kSharedBytes, stream, p);
  }
};

}  // namespace tilewright::attention
