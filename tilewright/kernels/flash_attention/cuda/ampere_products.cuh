// Matmuls of tiles by mma.sync, the epilogue of S (mask, bias, soft cap), the writing of accumulators to tiles, and the
// tile schedule of a grid.
//
// `sums` are always accumulators [kM][kN][4] of m16n8 fragments, `left` is the A and `right` the B operand.
#pragma once

#include "ampere_tiles.cuh"

namespace tilewright::attention::ampere {

// sums[m][first + n] += more[m][n].
template <int kM, int kN, int kWide>
__device__ inline void add(float (&sums)[kM][kWide][4], int first, const float (&more)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][first + n][i] += more[m][n][i];
    }
  }
}

// Tensor cores truncate when they add to the accumulator. In exact float32 matmuls that is the largest error, so only
// kShortSteps k-steps are accumulated by MMAs before fp32 additions take over.
template <class Element, bool kExact>
constexpr bool kShortSums = kIsFloat<Element> && kExact;
constexpr int kShortSteps = 4;

// sums += left * right^T over kSteps k-steps; both tiles are [row, k]. A warp with few accumulators uses kChains copies
// of each, so that several MMAs are in flight.
template <bool kExact, int kSteps, class Left, class Right, int kM, int kN>
__device__ inline void multiply_rows(float (&sums)[kM][kN][4], const LaneView& left, const LaneView& right) {
  using Element = typename Left::Element;
  constexpr bool kShort = kShortSums<Element, kExact>;
  constexpr int kChains = kM * kN == 1 ? 4 : kM * kN == 2 ? 2 : 1;
  float parts[kChains][kM][kN][4];
#pragma unroll
  for (int chain = 0; chain < kChains; ++chain) clear(parts[chain]);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int chunk = 2 * step;
    float(&into)[kM][kN][4] = kShort || step % kChains != 0 ? parts[step % kChains] : sums;
    Operand<Element, kExact, 4> a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      read_matrices(a[m].words, Left::at(left, 16 * m, chunk));
      settle<Left::kRounded>(a[m]);
    }
#pragma unroll
    for (int n = 0; n + 1 < kN; n += 2) {
      uint32_t words[4];
      read_matrices(words, Right::at(right, 8 * n, chunk));
      Operand<Element, kExact, 2> b[2];
      b[0].words[0] = words[0];
      b[0].words[1] = words[1];
      b[1].words[0] = words[2];
      b[1].words[1] = words[3];
      settle<Right::kRounded>(b[0]);
      settle<Right::kRounded>(b[1]);
      multiply_all<Element, kExact>(into, n, a, b);
    }
    if constexpr (kN % 2 == 1) {
      Operand<Element, kExact, 2> b[1];
      read_matrices_2(b[0].words, Right::at(right, 8 * (kN - 1), chunk));
      settle<Right::kRounded>(b[0]);
      multiply_all<Element, kExact>(into, kN - 1, a, b);
    }
    if (kShort && step % (kChains * kShortSteps) >= kChains * (kShortSteps - 1)) {
      add(sums, 0, into);
      clear(into);
    }
  }
  if constexpr (kShort || kChains > 1) {
#pragma unroll
    for (int chain = kShort ? 0 : 1; chain < kChains; ++chain) add(sums, 0, parts[chain]);
  }
}

// The rows of an operand [k, n] that a k-step takes.
template <class Element>
constexpr int kStepRows = kIsFloat<Element> ? 8 : 16;

// The neighbouring n8 accumulators that one load of an operand [k, n] serves.
template <class Element>
constexpr int kTogether = kIsFloat<Element> ? 4 : 2;

// sums[m][first + i] += a[m] * right for one k-step and i < kTogether: rows from `row` on of right [k, n], and its n8
// column blocks n + i.
template <bool kExact, class Right, int kM, int kN>
__device__ inline void multiply_columns(float (&sums)[kM][kN][4], int first,
                                        const Operand<typename Right::Element, kExact, 4> (&a)[kM],
                                        const LaneView& right, int row, int n) {
  using Element = typename Right::Element;
  Operand<Element, kExact, 2> b[kTogether<Element>];
  if constexpr (kIsFloat<Element>) {
    // A lane loads columns 4g to 4g + 3 of two rows; column i of these goes to the i-th of four accumulators. So column
    // n of an accumulator is not column n of the tile: write_result undoes this permutation.
    const uint4 even = read_16(right.rows + row * Right::kPitch + n / 4 * 128 + right.twist);
    const uint4 odd = read_16(right.rows + (row + 1) * Right::kPitch + n / 4 * 128 + (right.twist ^ kChunk));
    b[0].words[0] = even.x;
    b[1].words[0] = even.y;
    b[2].words[0] = even.z;
    b[3].words[0] = even.w;
    b[0].words[1] = odd.x;
    b[1].words[1] = odd.y;
    b[2].words[1] = odd.z;
    b[3].words[1] = odd.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) settle<Right::kRounded>(b[i]);
  } else {
    uint32_t words[4];
    read_transposed(words, Right::at(right, row, n));
    b[0].words[0] = words[0];
    b[0].words[1] = words[1];
    b[1].words[0] = words[2];
    b[1].words[1] = words[3];
  }
  multiply_all<Element, kExact>(sums, first, a, b);
}

// sums += left * right over kSteps k-steps; `read_left(step, a)` loads the A operands, right is a tile [k, n].
template <bool kExact, int kSteps, class Right, int kM, int kN, class ReadLeft>
__device__ inline void multiply_steps(float (&sums)[kM][kN][4], const LaneView& right, ReadLeft read_left) {
  using Element = typename Right::Element;
  constexpr int kGroup = kTogether<Element>;
  static_assert(kN % kGroup == 0);
  if constexpr (kShortSums<Element, kExact>) {
#pragma unroll
    for (int n = 0; n < kN; n += kGroup) {
      float part[kM][kGroup][4];
      clear(part);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        Operand<Element, kExact, 4> a[kM];
        read_left(step, a);
        multiply_columns<kExact, Right>(part, 0, a, right, step * kStepRows<Element>, n);
      }
      add(sums, n, part);
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Operand<Element, kExact, 4> a[kM];
      read_left(step, a);
#pragma unroll
      for (int n = 0; n < kN; n += kGroup) {
        multiply_columns<kExact, Right>(sums, n, a, right, step * kStepRows<Element>, n);
      }
    }
  }
}

// Converts accumulators [m, k] to the A operands of one k-step.
template <class Element, bool kExact, int kM, int kN>
__device__ inline void as_left(Operand<Element, kExact, 4> (&a)[kM], const float (&sums)[kM][kN][4], int step) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    if constexpr (kIsFloat<Element>) {
      const float(&c)[4] = sums[m][step];
      a[m].words[0] = __float_as_uint(c[0]);
      a[m].words[1] = __float_as_uint(c[2]);
      a[m].words[2] = __float_as_uint(c[1]);
      a[m].words[3] = __float_as_uint(c[3]);
    } else {
      const float(&c)[4] = sums[m][2 * step], (&d)[4] = sums[m][2 * step + 1];
      a[m].words[0] = pack<Element>(c[0], c[1]);
      a[m].words[1] = pack<Element>(c[2], c[3]);
      a[m].words[2] = pack<Element>(d[0], d[1]);
      a[m].words[3] = pack<Element>(d[2], d[3]);
    }
    settle<false>(a[m]);
  }
}

// sums += left * right; left [m, k] are accumulators in registers, right is a tile [k, n].
template <bool kExact, class Right, int kM, int kN, int kLeft>
__device__ inline void multiply_registers(float (&sums)[kM][kN][4], const float (&left)[kM][kLeft][4],
                                          const LaneView& right) {
  using Element = typename Right::Element;
  using Left = Operand<Element, kExact, 4>[kM];
  multiply_steps<kExact, kLeft * 8 / kStepRows<Element>, Right>(
      sums, right, [&](int step, Left& a) { as_left(a, left, step); });
}

// sums += left * right; left [m, k] is a tile written by `write_sums`, right a tile [k, n].
template <bool kExact, int kSteps, class Left, class Right, int kM, int kN>
__device__ inline void multiply_tile(float (&sums)[kM][kN][4], const LaneView& left, const LaneView& right) {
  using Operands = Operand<typename Right::Element, kExact, 4>[kM];
  multiply_steps<kExact, kSteps, Right>(sums, right, [&](int step, Operands& a) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      read_matrices(a[m].words, Left::at(left, 16 * m, 2 * step));
      settle<Left::kRounded>(a[m]);
    }
  });
}

// sums += left^T * right; left [k, m] is a tile written by `write_sums`, right a tile [k, n].
template <bool kExact, int kSteps, class Left, class Right, int kM, int kN>
__device__ inline void multiply_tile_transposed(float (&sums)[kM][kN][4], const LaneView& left,
                                                const LaneView& right) {
  using Element = typename Right::Element;
  using Operands = Operand<Element, kExact, 4>[kM];
  multiply_steps<kExact, kSteps, Right>(sums, right, [&](int step, Operands& a) {
    const int row = step * kStepRows<Element>;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if constexpr (kIsFloat<Element>) {
        const uint32_t even = left.rows + row * Left::kPitch, odd = even + Left::kPitch;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t coord = (uint32_t(4 * m + 2 * half) * kChunk) ^ left.twist;
          a[m].words[half] = read_4(even + coord);
          a[m].words[2 + half] = read_4(odd + (coord ^ kChunk));
        }
      } else {
        read_transposed(a[m].words, Left::at(left, row, 2 * m));
      }
      settle<Left::kRounded>(a[m]);
    }
  });
}

// Writes a warp's accumulators [m, n] to a tile as an operand of the next matmul, from (row, column) on. Float32
// columns 2t and 2t + 1 go to t and t + 4 (see ampere_tiles.cuh), rounded to tf32 unless kExact.
template <bool kExact, class Target, int kM, int kN>
__device__ inline void write_sums(const Target& target, const float (&sums)[kM][kN][4], int row, int column, int lane) {
  using Element = typename Target::Element;
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at_row = row + 16 * m + 8 * half + g;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float first = sums[m][n][2 * half], second = sums[m][n][2 * half + 1];
        if constexpr (kIsFloat<Element>) {
          constexpr float kTimes = kExact ? 1.0f : kRounding;
          write_float(target.at(at_row, column / 4 + 2 * n) + 4 * t, first * kTimes);
          write_float(target.at(at_row, column / 4 + 2 * n + 1) + 4 * t, second * kTimes);
        } else {
          write_4(target.at(at_row, column / 8 + n) + 4 * t, pack<Element>(first, second));
        }
      }
    }
  }
}

// Writes accumulators of `multiply_steps`, times `factor(m, half)`, to a tile in plain column order.
template <class Target, int kM, int kN, class Factor>
__device__ inline void write_result(const Target& target, const float (&sums)[kM][kN][4], int row, int column, int lane,
                                    Factor factor) {
  using Element = typename Target::Element;
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at_row = row + 16 * m + 8 * half + g;
      const float times = factor(m, half);
      if constexpr (kIsFloat<Element>) {
#pragma unroll
        for (int n = 0; n < kN; n += 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            write_16(target.at(at_row, column / 4 + 2 * n + 2 * t + e),
                     make_uint4(__float_as_uint(sums[m][n][2 * half + e] * times),
                                __float_as_uint(sums[m][n + 1][2 * half + e] * times),
                                __float_as_uint(sums[m][n + 2][2 * half + e] * times),
                                __float_as_uint(sums[m][n + 3][2 * half + e] * times)));
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          write_4(target.at(at_row, column / 8 + n) + 4 * t,
                  pack<Element>(sums[m][n][2 * half] * times, sums[m][n][2 * half + 1] * times));
        }
      }
    }
  }
}

// Turns a warp's Q K^T into logits, -inf where masked. If kModified they are scaled, in units of log 2; else they stay
// unscaled (see positive_multiplier). `query` and `key` are those of the lane's first element; bias and masks are not
// read beyond q_end and key_end. `whole`: the band and the lengths mask nothing in this tile.
template <bool kModified, int kM, int kN>
__device__ inline void to_logits(float (&products)[kM][kN][4], const HeadScores& head, int query, int key, int q_end,
                                 int key_end, bool whole) {
  if constexpr (kModified) {
    const bool plain = head.plain();
    const float multiplier = head.scores.scale * kLog2e;
    if (plain && whole) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) products[m][n][i] *= multiplier;
        }
      }
      return;
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at_query = query + 16 * m + 8 * (i / 2), at_key = key + 8 * n + i % 2;
          float& value = products[m][n][i];
          if (at_query < q_end && at_key < key_end) {
            value = plain ? value * multiplier : head.logit(value, at_query, at_key);
            if (!whole && !head.visible(at_query, at_key)) value = -INFINITY;
          } else {
            value = -INFINITY;
          }
        }
      }
    }
  } else {
    if (whole) return;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at_query = query + 16 * m + 8 * half;
        const int first_visible = head.scores.lowest + at_query - key;
        const int last_visible = min(head.scores.highest + at_query, key_end - 1) - key;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * n + e < first_visible || 8 * n + e > last_visible) products[m][n][2 * half + e] = -INFINITY;
          }
        }
      }
    }
  }
}

// Returns the non-negative factor from to_logits' results to units of log 2. A negative scale flips the signs of the
// logits instead, so that the row maximum can be taken before scaling and masked logits stay -inf.
template <bool kModified, int kM, int kN>
__device__ inline float positive_multiplier(const Scores& scores, float (&logits)[kM][kN][4]) {
  if constexpr (kModified) {
    return 1;
  } else {
    const float multiplier = scores.scale * kLog2e;
    if (multiplier < 0) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) logits[m][n][i] = logits[m][n][i] == -INFINITY ? -INFINITY : -logits[m][n][i];
        }
      }
    }
    return fabsf(multiplier);
  }
}

// The tile schedule. Heads are grouped in sections whose K and V (or Q and dO) fit the L2 cache; within a section the
// order is tile by tile, and all heads of the section for each tile.
struct Order {
  int32_t tiles, section, total;  // tiles of a head, heads of a section, heads of all batch elements

  __device__ int2 coord(int index) const {  // tile, head
    const int part = index / (section * tiles), rest = index - part * section * tiles;
    const int members = min(section, total - part * section);
    return make_int2(rest / members, part * section + rest % members);
  }
};

constexpr int64_t kSectionBytes = 16 << 20;  // bytes; a third of an H100's L2 cache, two fifths of an A100's

inline Order order_of(int64_t tiles, int64_t total, int64_t bytes_of_head) {
  const int64_t section = kSectionBytes / std::max<int64_t>(bytes_of_head, 1);
  return {int32_t(tiles), int32_t(std::min(std::max<int64_t>(section, 1), total)), int32_t(total)};
}

constexpr int64_t tiles_of(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

}  // namespace tilewright::attention::ampere
