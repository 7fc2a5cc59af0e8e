// Products of tiles by mma.sync, what becomes of them, and the order in which blocks take their work.
#pragma once

#include "ampere_tiles.cuh"

namespace tilewright::attention::ampere {

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

// Matrix units cut off what they add a product to instead of rounding it. In exact products that is the largest error,
// so they add few steps up before ordinary additions take over.
template <class Element, bool kExact>
constexpr bool kShortSums = kIsFloat<Element> && kExact;
constexpr int kShortSteps = 4;

// sums += left · rightᵀ over `kSteps` steps of both tiles' rows. Where a warp has few sums, several products in flight
// need several of each.
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

// Rows of a product's operand [k, n] that a step takes.
template <class Element>
constexpr int kStepRows = kIsFloat<Element> ? 8 : 16;

// Sums of neighbouring columns that one lane's reads of an operand [k, n] serve.
template <class Element>
constexpr int kTogether = kIsFloat<Element> ? 4 : 2;

// sums[m][first ...] += a[m] · right over one step, whose rows of `right` [k, n] start at `row`, and over the columns
// of sums n ... n + kTogether.
template <bool kExact, class Right, int kM, int kN>
__device__ inline void multiply_columns(float (&sums)[kM][kN][4], int first,
                                        const Operand<typename Right::Element, kExact, 4> (&a)[kM],
                                        const LaneView& right, int row, int n) {
  using Element = typename Right::Element;
  Operand<Element, kExact, 2> b[kTogether<Element>];
  if constexpr (kIsFloat<Element>) {
    // One lane reads columns 4g to 4g + 3 of two rows: column i of four is that of the i-th of four sums.
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

// sums += left · right over `kSteps` steps; `read_left(step, a)` makes the left operands, right is a tile [k, n].
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

// Sums [m, k] as left operands of the step `step` over k.
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

// sums += left · right; left [m, k] are sums in registers, right [k, n] a tile.
template <bool kExact, class Right, int kM, int kN, int kLeft>
__device__ inline void multiply_registers(float (&sums)[kM][kN][4], const float (&left)[kM][kLeft][4],
                                          const LaneView& right) {
  using Element = typename Right::Element;
  using Left = Operand<Element, kExact, 4>[kM];
  multiply_steps<kExact, kLeft * 8 / kStepRows<Element>, Right>(
      sums, right, [&](int step, Left& a) { as_left(a, left, step); });
}

// The same with left [m, k] in a tile that `write_sums` wrote.
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

// sums += leftᵀ · right; left [k, m] is a tile that `write_sums` wrote.
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

// Writes a warp's sums [m, n] as elements, the first at (row, column); float32 columns 2t and 2t + 1 to t and t + 4,
// and rounded unless products are exact.
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

// Writes what `multiply_steps` summed as elements in their own columns, times `factor(m, half)`.
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

// Products of queries and keys that a warp holds become logits, those of unseen keys -inf. They are in units of log 2
// where `kModified`, and otherwise still products. `query` and `key` are those of the lane's first element; nothing
// beyond `q_end` and `key_end` is read.
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

// What turns `to_logits`' results into units of log 2, never negative, so that the greatest product is the greatest
// logit and what is masked stays -inf: a negative scale changes the products' signs instead.
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

// What one block works on. Blocks are numbered so that heads come in sections whose keys and values (or queries) the L2
// cache holds; within a section all heads' tiles of one place come before those of the next.
struct Order {
  int32_t tiles, section, total;  // tiles of a head, heads of a section, heads of all batch elements

  __device__ int2 coord(int index) const {  // tile, head
    const int part = index / (section * tiles), rest = index - part * section * tiles;
    const int members = min(section, total - part * section);
    return make_int2(rest / members, part * section + rest % members);
  }
};

constexpr int64_t kSectionBytes = 16 << 20;  // a third of the L2 cache of an H100, two fifths of an A100's

inline Order order_of(int64_t tiles, int64_t total, int64_t bytes_of_head) {
  const int64_t section = kSectionBytes / std::max<int64_t>(bytes_of_head, 1);
  return {int32_t(tiles), int32_t(std::min(std::max<int64_t>(section, 1), total)), int32_t(total)};
}

constexpr int64_t tiles_of(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

}  // namespace tilewright::attention::ampere
