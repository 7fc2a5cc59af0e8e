// Forward attention for compute capability 8.0 and up, on cp.async, ldmatrix and mma.sync.
//
// Computes O = softmax(scale * Q K^T + bias) V and lse, with any mask, soft cap, sink and dropout of attention.cuh. A
// CTA owns `kQueries` queries of one head and iterates over the visible keys, `kKeys` at a time. Warps form a grid of
// kRowWarps x kColumnWarps: a row warp owns kRows queries, and the column warps of these rows split the columns of O.
// How they share QK^T:
//
//   kColumnWarps == 1  nothing is split; P goes from the accumulator of S to the A operand of PV in registers
//   kSharedKeys        by keys: column warps exchange row maxima, and P through shared memory
//   kSharedDim         by head dim (too few keys to split): column warps add their partial S through shared memory, and
//                      each then has all of P in registers
//
//   Q     [kQueries, kMaxDim]            shared memory; later the staging of O
//   K, V  [kStages, kKeys, kMaxDim]      shared memory
//   S, P  [kM][kN][4] `logits`           fp32 registers, the accumulator fragments of m16n8
//   O     [kM][kOut][4] `out`            fp32 registers
//   m, l  `Rows`: row_max, total         registers, two rows per lane and m16 tile; l is summed over lanes at the end
//
//   kStages 2   wait K0 V0 | load K1 V1 | S0 | softmax 0 | O += P0 V0 | wait K1 V1 | load K2 V2 | S1 | ...
//   kStages 1   wait K0    | load V0    | S0 | wait V0, load K1 | O += P0 V0 | wait K1 | load V1 | S1 | ...
//               (several column warps load K1 before they wait for V0, with softmax between)
#pragma once

#include "ampere_products.cuh"

namespace tilewright::attention {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks) ampere_forward(const typename Kernel::Params p) {
  Kernel::block(p);
}

template <class Element, int kQueries, int kKeys, int kMaxDim, int kRowWarps, int kColumnWarps,
          int kStages,     // 2: K and V of the next tile are loaded beside QK^T and PV; 1: see the timeline
          int kMinBlocks,  // CTAs per SM that __launch_bounds__ asks for
          bool kExact, bool kModified, bool kDropout>
struct AmpereForward {
  static constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
  static constexpr int kBlocks = kMinBlocks;
  static constexpr bool kShared = kColumnWarps > 1;                      // several column warps have the same rows
  static constexpr bool kRounds = ampere::kIsFloat<Element> && !kExact;  // Q is rounded to tf32 once, in shared memory
  static constexpr bool kSharedDim = kShared && kKeys < 8 * kColumnWarps, kSharedKeys = kShared && !kSharedDim;
  static constexpr int kRows = kQueries / kRowWarps, kWarpKeys = kSharedKeys ? kKeys / kColumnWarps : kKeys;
  static constexpr int kColumns = kMaxDim / kColumnWarps;
  static constexpr int kM = kRows / 16, kN = kWarpKeys / 8, kOut = kColumns / 8;
  static_assert(!kSharedDim || kColumns * int(sizeof(Element)) % 128 == 0);
  static_assert(kM * 16 * kRowWarps == kQueries && kN * 8 == kWarpKeys && kOut * 8 * kColumnWarps == kMaxDim);

  using Queries = ampere::Tile<Element, kQueries, kMaxDim, true>;
  using Keys = ampere::Tile<Element, kKeys, kMaxDim>;
  // P in shared memory; unused (minimal size) unless kSharedKeys.
  using Weights = ampere::Tile<Element, kQueries, kSharedKeys ? kKeys : 64 / int(sizeof(Element)), true>;
  static constexpr int kPartBytes = 16 * kM * kN * 32;  // bytes of one warp's partial S (kSharedDim)

  // Byte offsets in dynamic shared memory: Q, K stages, V stages, P or partial S, row maxima [kColumnWarps, kQueries].
  static constexpr int kKeysAt = Queries::kBytes, kValuesAt = kKeysAt + kStages * Keys::kBytes;
  static constexpr int kWeightsAt = kValuesAt + kStages * Keys::kBytes;
  static constexpr int kStatisticsAt =
      kWeightsAt + (kSharedKeys ? Weights::kBytes : kSharedDim ? kThreads / 32 * kPartBytes : 0);
  static constexpr int kSharedBytes = kStatisticsAt + (kSharedKeys ? kColumnWarps * kQueries * int(sizeof(float)) : 0);

  struct Params : ForwardArrays<Element> {
    ampere::Order order;
  };

  static Facts facts() { return {kSharedBytes, kThreads, ampere::kChunk / int(sizeof(Element))}; }

  static int64_t workspace(const Problem&) { return 0; }

  static ffi::Error run(cudaStream_t stream, const Device&, const Problem& problem, const Arguments& arguments) {
    Params p;
    TILEWRIGHT_RETURN_IF_ERROR(read_forward<Element>(problem, arguments, &p));
    if (p.scores.scale == 0) p.scores.scale = ampere::kMinScale;
    const int64_t tiles = ampere::tiles_of(problem.q_length, kQueries), heads = problem.batch * problem.heads;
    const int64_t bytes = problem.kv_length * (problem.head_dim + problem.value_dim) * int64_t(sizeof(Element));
    p.order = ampere::order_of(tiles, heads, bytes * problem.kv_heads / std::max<int64_t>(problem.heads, 1));
    return launch<ampere_forward<AmpereForward>>(dim3(tiles * heads), dim3(kThreads), kSharedBytes, stream, p);
  }

  static __device__ void block(const Params& p) {
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t base = ampere::shared_address(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row_warp = warp / kColumnWarps, column_warp = warp % kColumnWarps;
    const int row = row_warp * kRows, g = lane / 4, t = lane % 4;

    const int2 coord = p.order.coord(blockIdx.x);
    const int batch = coord.y / p.heads, head_index = coord.y % p.heads, kv_head = head_index / p.scores.group;
    const int q_start = (p.order.tiles - 1 - coord.x) * kQueries;  // with a causal mask the longest tiles run first
    const int q_end = min(q_start + kQueries, p.scores.q_length);
    const HeadScores head(p.scores, batch, head_index);
    const int2 range = head.keys_for(q_start, q_end, kKeys);
    const int q_stride = p.heads * p.head_dim, k_stride = p.kv_heads * p.head_dim, v_stride = p.kv_heads * p.value_dim;
    const int64_t first_query = int64_t(batch) * p.scores.q_length + q_start;
    const int64_t first_key = int64_t(batch) * p.scores.kv_length;
    const Element* keys = p.key + first_key * k_stride + kv_head * p.head_dim;
    const Element* values = p.value + first_key * v_stride + kv_head * p.value_dim;

    const Queries query_tile{base};
    auto key_tile = [&](int stage) { return Keys{base + kKeysAt + (kStages == 2 ? stage * Keys::kBytes : 0)}; };
    auto value_tile = [&](int stage) { return Keys{base + kValuesAt + (kStages == 2 ? stage * Keys::kBytes : 0)}; };
    auto copy_keys = [&](int start, int stage) {
      key_tile(stage).template copy<kThreads>(keys + int64_t(start) * k_stride, k_stride, range.y - start, p.head_dim);
    };
    auto copy_values = [&](int start, int stage) {
      value_tile(stage).template copy<kThreads>(values + int64_t(start) * v_stride, v_stride, range.y - start,
                                                p.value_dim);
    };

    query_tile.template copy<kThreads>(p.query + first_query * q_stride + head_index * p.head_dim, q_stride,
                                       q_end - q_start, p.head_dim);
    if (range.x < range.y) {
      copy_keys(range.x, 0);
      if constexpr (kStages == 2) copy_values(range.x, 0);
    }
    ampere::commit_copies();

    const LaneViews views{query_tile.left(row, lane), Weights{base + kWeightsAt}.left(row, lane)};
    Rows rows;
    rows.init();
    float out[kM][kOut][4];
    ampere::clear(out);
    int stage = 0;
    [[maybe_unused]] const int column_bytes = column_warp * kColumns * int(sizeof(Element));

    for (int k_start = range.x; k_start < range.y; k_start += kKeys) {
      const bool more = k_start + kKeys < range.y;
      ampere::wait_copies<0>();
      if (kRounds && k_start == range.x) query_tile.template round_copied<kThreads>();
      __syncthreads();  // this tile has arrived, and all warps have read the last one
      if constexpr (kStages == 2) {
        if (more) {
          copy_keys(k_start + kKeys, stage ^ 1);
          copy_values(k_start + kKeys, stage ^ 1);
        }
      } else {
        copy_values(k_start, 0);
      }
      ampere::commit_copies();

      float logits[kM][kN][4];
      ampere::clear(logits);
      if constexpr (kSharedDim) {
        ampere::multiply_rows<kExact, kColumns * int(sizeof(Element)) / 32, Queries, Keys>(
            logits, ampere::moved(views.query, column_bytes),
            ampere::moved(key_tile(stage).right(0, lane), column_bytes));
        add_parts(base + kWeightsAt, row_warp, column_warp, lane, logits);
        if constexpr (kStages == 1) {  // add_parts synchronized the CTA: all warps have read K
          if (more) copy_keys(k_start + kKeys, 0);
          ampere::commit_copies();
        }
      } else {
        ampere::multiply_rows<kExact, kMaxDim * int(sizeof(Element)) / 32, Queries, Keys>(
            logits, views.query, key_tile(stage).right(column_warp * kWarpKeys, lane));
      }
      if constexpr (kStages == 1 && !kShared) {
        ampere::wait_copies<0>();
        __syncthreads();  // the values are there, and the keys have been read
        if (more) copy_keys(k_start + kKeys, 0);
        ampere::commit_copies();
      }

      const int key = k_start + (kSharedKeys ? column_warp * kWarpKeys : 0) + 2 * t;
      const int key_end = min(k_start + kKeys, range.y);
      const bool whole = key_end == k_start + kKeys && head.all_visible(q_start, q_end, k_start, key_end);
      ampere::to_logits<kModified>(logits, head, q_start + row + g, key, q_end, key_end, whole);
      const float multiplier = ampere::positive_multiplier<kModified>(p.scores, logits);

      float row_max[kM][2];
      rows.local_row_max(logits, row_max);
      if constexpr (kSharedKeys) {
        exchange_row_max(base + kStatisticsAt, row + g, row_warp, column_warp, t, row_max);
        if constexpr (kStages == 1) {  // exchange_row_max synchronized the CTA: all warps have read K
          if (more) copy_keys(k_start + kKeys, 0);
          ampere::commit_copies();
        }
      }
      rows.rescale(row_max, multiplier, out);
      rows.exponentiate(logits, multiplier);
      if constexpr (kDropout) drop(head, q_start + row + g, key, logits);

      const ampere::LaneView value_view =
          value_tile(stage).template right_transposed<kColumns>(column_warp * kColumns, lane);
      if constexpr (kSharedKeys) {
        ampere::write_sums<kExact>(Weights{base + kWeightsAt}, logits, row, column_warp * kWarpKeys, lane);
        if constexpr (kStages == 1) {
          ampere::wait_copies<1>();
          __syncthreads();  // V has arrived
        } else {
          ampere::sync_some(1 + row_warp, 32 * kColumnWarps);
        }
        ampere::multiply_tile<kExact, kKeys * int(sizeof(Element)) / 32, Weights, Keys>(out, views.weights, value_view);
      } else {
        if constexpr (kSharedDim && kStages == 1) {
          ampere::wait_copies<1>();
          __syncthreads();  // V has arrived
        }
        ampere::multiply_registers<kExact, Keys>(out, logits, value_view);
      }
      stage ^= 1;
    }
    ampere::wait_copies<0>();
    finish(p, coord.y, q_start, q_end, base, row, column_warp, lane, rows, out);
  }

  struct LaneViews {
    ampere::LaneView query, weights;
  };

  // m and l of a lane's rows: row_max in the units of `logits`, total over the lane's own elements only.
  struct Rows {
    float row_max[kM][2], total[kM][2];

    __device__ void init() {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          row_max[m][half] = -INFINITY;
          total[m][half] = 0;
        }
      }
    }

    // The maximum of m and this tile's S for each row, over the keys of this warp.
    __device__ void local_row_max(const float (&logits)[kM][kN][4], float (&now)[kM][2]) const {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float value = row_max[m][half];
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            value = fmaxf(value, fmaxf(logits[m][n][2 * half], logits[m][n][2 * half + 1]));
          }
          value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
          now[m][half] = fmaxf(value, __shfl_xor_sync(~0u, value, 2));
        }
      }
    }

    // Sets m to `now`, and multiplies l and O by exp2((m_old - m_new) * multiplier).
    __device__ void rescale(const float (&now)[kM][2], float multiplier, float (&out)[kM][kOut][4]) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // A row without a visible key so far has m = -inf on both sides, and -inf - (-inf) is NaN.
          const float shift = now[m][half] == -INFINITY ? 0 : now[m][half];
          const float factor = ampere::fast_exp2((row_max[m][half] - shift) * multiplier);
          row_max[m][half] = now[m][half];
          total[m][half] *= factor;
#pragma unroll
          for (int n = 0; n < kOut; ++n) {
            out[m][n][2 * half] *= factor;
            out[m][n][2 * half + 1] *= factor;
          }
        }
      }
    }

    // Turns S into P, not yet divided by l, and adds it to l.
    __device__ void exponentiate(float (&logits)[kM][kN][4], float multiplier) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float shift = row_max[m][half] == -INFINITY ? 0 : row_max[m][half] * multiplier;
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& value = logits[m][n][2 * half + e];
              value = ampere::fast_exp2(fmaf(value, multiplier, -shift));
              total[m][half] += value;
            }
          }
        }
      }
    }
  };

  // kSharedDim: adds the partial S of the column warps, in the same order in each of them, so all get the same bits.
  static __device__ void add_parts(uint32_t parts, int row_warp, int column_warp, int lane,
                                   float (&logits)[kM][kN][4]) {
    const uint32_t own = parts + row_warp * kColumnWarps * kPartBytes + lane * 16;
    ampere::write_words(own + column_warp * kPartBytes, logits);
    sync_rows(row_warp);
    ampere::clear(logits);
#pragma unroll
    for (int warp = 0; warp < kColumnWarps; ++warp) ampere::add_words(own + warp * kPartBytes, logits);
  }

  // kSharedKeys: the row maximum over all column warps, through shared memory.
  static __device__ void exchange_row_max(uint32_t statistics, int row, int row_warp, int column_warp, int t,
                                           float (&row_max)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row + 16 * m + 8 * half;
        if (t == 0) ampere::write_float(statistics + 4 * (column_warp * kQueries + at), row_max[m][half]);
      }
    }
    sync_rows(row_warp);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row + 16 * m + 8 * half;
#pragma unroll
        for (int warp = 0; warp < kColumnWarps; ++warp) {
          row_max[m][half] = fmaxf(row_max[m][half], ampere::read_float(statistics + 4 * (warp * kQueries + at)));
        }
      }
    }
  }

  // Synchronizes the column warps of the same rows by a named barrier. With one stage it synchronizes the CTA, because
  // K is overwritten next.
  static __device__ void sync_rows(int row_warp) {
    if constexpr (kStages == 1) {
      __syncthreads();
    } else {
      ampere::sync_some(1 + row_warp, 32 * kColumnWarps);
    }
  }

  // Zeroes the dropped elements of P; l keeps them.
  static __device__ void drop(const HeadScores& head, int query, int key, float (&weights)[kM][kN][4]) {
    const uint2 dropout_key = head.dropout_key();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint2 words[2];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = query + 16 * m + 8 * (i / 2), column = key + 8 * n + i % 2;
          // A call serves both rows, and two columns: those of n and n + 1 if blocks of 16 are not cut between warps.
          if (i < 2 && (kN % 2 || n % 2 == 0)) words[i] = random_words(dropout_key, row, column);
          if (!kept(words[i % 2], head.scores.keep_threshold, row, column)) weights[m][n][i] = 0;
        }
      }
    }
  }

  // Sums l over lanes and column warps, adds the sink, and stores O and lse.
  static __device__ void finish(const Params& p, int head, int q_start, int q_end, uint32_t base, int row,
                                int column_warp, int lane, Rows& rows, float (&out)[kM][kOut][4]) {
    const int g = lane / 4, t = lane % 4;
    const float multiplier = kModified ? 1 : fabsf(p.scores.scale * kLog2e);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& total = rows.total[m][half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
      }
    }
    __syncthreads();  // all warps have read Q and the row maxima, whose memory is reused here
    if constexpr (kSharedKeys) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = column_warp * kQueries + row + 16 * m + 8 * half + g;
          if (t == 0) ampere::write_float(base + kStatisticsAt + 4 * at, rows.total[m][half]);
        }
      }
      __syncthreads();
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = row + 16 * m + 8 * half + g;
          rows.total[m][half] = 0;
#pragma unroll
          for (int warp = 0; warp < kColumnWarps; ++warp) {
            rows.total[m][half] += ampere::read_float(base + kStatisticsAt + 4 * (warp * kQueries + at));
          }
        }
      }
    }
    const float sink = p.sinks != nullptr ? p.sinks[head % p.heads] * kLog2e : -INFINITY;
    float factor[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float own = rows.row_max[m][half] * multiplier;  // -inf for a row that sees no key
        const float row_max = fmaxf(own, sink);
        const float shift = row_max == -INFINITY ? 0 : row_max;
        const float share = ampere::fast_exp2(own - shift);
        const float total = rows.total[m][half] * share + ampere::fast_exp2(sink - shift);
        factor[m][half] = total > 0 ? share / total * (kDropout ? p.scores.keep_scale : 1.0f) : 0.0f;
        const int query = q_start + row + 16 * m + 8 * half + g;
        if (column_warp == 0 && t == 0 && query < q_end) {
          p.lse[int64_t(head) * p.scores.q_length + query] = total > 0 ? (shift + log2f(total)) * kLn2 : -INFINITY;
        }
      }
    }
    const Queries target{base};
    ampere::write_result(target, out, row, column_warp * kColumns, lane,
                         [&](int m, int half) { return factor[m][half]; });
    __syncthreads();
    const int64_t first = (int64_t(head / p.heads) * p.scores.q_length + q_start) * p.heads + head % p.heads;
    target.template store<kThreads>(p.out + first * p.value_dim, p.heads * p.value_dim, q_end - q_start, p.value_dim);
  }
};

}  // namespace tilewright::attention
