// Tiles in shared memory and the instructions on them, for compute capability 8.0 and up: cp.async, ldmatrix, mma.sync.
//
// A k-step of an MMA takes 32 bytes of every row: k = 16 for 16-bit types, k = 8 for float32 (tf32). In an accumulator
// [16, 8], lane 4g + t holds rows g and g + 8, columns 2t and 2t + 1. The tf32 A fragment wants columns t and t + 4
// instead. Float32 operands are therefore read with columns 2t and 2t + 1 in place of t and t + 4: the k order of both
// operands is permuted alike, and an accumulator serves as an A operand without shuffles.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.cuh"

namespace tilewright::attention::ampere {

template <class Element>
constexpr bool kIsFloat = std::is_same_v<Element, float>;

constexpr int kChunk = 16;           // bytes of a chunk: the unit of cp.async, ldmatrix rows and the swizzle
constexpr float kMinScale = 1e-30f;  // replaces a scale of 0: -inf * 0 is NaN for masked logits

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// cp.async of 16 bytes; if not `there`, writes zeros and reads nothing.
__device__ inline void copy_async(uint32_t target, const void* source, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(there ? 16 : 0)
               : "memory");
}

__device__ inline void copy_async_8(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(source) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's cp.async groups, except the last `kPending`.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A named barrier for `threads` threads of the CTA; barrier 0 is that of __syncthreads.
__device__ inline void sync_some(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ inline void read_matrices(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

__device__ inline void read_matrices_2(uint32_t (&out)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(address)
               : "memory");
}

__device__ inline void read_transposed(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

__device__ inline uint4 read_16(uint32_t address) {
  uint4 out;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "r"(address)
               : "memory");
  return out;
}

__device__ inline uint32_t read_4(uint32_t address) {
  uint32_t out;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out) : "r"(address) : "memory");
  return out;
}

__device__ inline float2 read_floats(uint32_t address) {
  float2 out;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(out.x), "=f"(out.y) : "r"(address) : "memory");
  return out;
}

__device__ inline float read_float(uint32_t address) { return __uint_as_float(read_4(address)); }

__device__ inline void write_16(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ inline void write_4(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ inline void write_float(uint32_t address, float value) { write_4(address, __float_as_uint(value)); }

__device__ inline void write_floats(uint32_t address, float2 value) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
}

// exp2 in one instruction; a subnormal result becomes 0.
__device__ inline float fast_exp2(float value) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
  return out;
}

// The tensor cores read the upper 19 bits of a float32 (tf32) and truncate the rest. Multiplying by kRounding first
// makes that truncation a rounding to one of the two tf32 neighbours: a tf32 value stays itself, the mean bias is zero
// (1 + ln 2 * 2^-11), and infinity and NaN stay. This is one instruction; cvt.rna.tf32 compiles to two or three.
constexpr float kRounding = 1.000338450f;
constexpr uint32_t kTf32Bits = 0xffffe000u;

// Packs two neighbours of a row into 32 bits, the first in the lower half.
template <class Element>
__device__ inline uint32_t pack(float first, float second) {
  uint32_t out;
  if constexpr (std::is_same_v<Element, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  }
  return out;
}

// The registers of one MMA operand. Float32 is rounded to tf32 or, with kExact, split into two tf32 numbers: value =
// words + rest.
template <class Element, bool kExact, int kCount>
struct Operand {
  uint32_t words[kCount];
};

template <int kCount>
struct Operand<float, true, kCount> {
  uint32_t words[kCount], rest[kCount];
};

// Rounds or splits what was loaded into `words`; kRounded says that it is tf32 already.
template <bool kRounded, class Element, bool kExact, int kCount>
__device__ inline void settle(Operand<Element, kExact, kCount>& operand) {
  if constexpr (kIsFloat<Element> && (kExact || !kRounded)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float value = __uint_as_float(operand.words[i]);
      operand.words[i] = __float_as_uint(value * kRounding);
      if constexpr (kExact) {
        operand.words[i] &= kTf32Bits;
        operand.rest[i] = __float_as_uint((value - __uint_as_float(operand.words[i])) * kRounding);
      }
    }
  }
}

// c += a * b: m16n8k16 for 16-bit types, m16n8k8 for tf32, with fp32 accumulation.
template <class Element>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kIsFloat<Element>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else if constexpr (std::is_same_v<Element, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// sums[m][first + n] += left[m] * right[n]. With kExact, the two small cross terms (3xTF32 without rest * rest) are
// added first.
template <class Element, bool kExact, int kM, int kN, int kRight>
__device__ inline void multiply_all(float (&sums)[kM][kN][4], int first, const Operand<Element, kExact, 4> (&left)[kM],
                                    const Operand<Element, kExact, 2> (&right)[kRight]) {
  if constexpr (kIsFloat<Element> && kExact) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kRight; ++n) multiply_add<Element>(sums[m][first + n], left[m].rest, right[n].words);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kRight; ++n) multiply_add<Element>(sums[m][first + n], left[m].words, right[n].rest);
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kRight; ++n) multiply_add<Element>(sums[m][first + n], left[m].words, right[n].words);
  }
}

template <int kM, int kN>
__device__ inline void clear(float (&sums)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0;
    }
  }
}

// Writes a lane's accumulators, 16 bytes each and 512 bytes apart, so that the 32 lanes of a warp write contiguously.
template <int kM, int kN>
__device__ inline void write_words(uint32_t address, const float (&sums)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float(&c)[4] = sums[m][n];
      write_16(address + (m * kN + n) * 512, make_uint4(__float_as_uint(c[0]), __float_as_uint(c[1]),
                                                        __float_as_uint(c[2]), __float_as_uint(c[3])));
    }
  }
}

// Adds accumulators that write_words wrote.
template <int kM, int kN>
__device__ inline void add_words(uint32_t address, float (&sums)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint4 words = read_16(address + (m * kN + n) * 512);
      sums[m][n][0] += __uint_as_float(words.x);
      sums[m][n][1] += __uint_as_float(words.y);
      sums[m][n][2] += __uint_as_float(words.z);
      sums[m][n][3] += __uint_as_float(words.w);
    }
  }
}

// Where a lane reads a tile: `rows` is the address of its row; XOR with `twist` swizzles the byte offset of an even
// chunk.
struct LaneView {
  uint32_t rows, twist;
};

// The view of columns `bytes` further on, a multiple of 128 (the period of the swizzle).
__device__ inline LaneView moved(const LaneView& view, int bytes) { return {view.rows + bytes, view.twist}; }

// A tile in shared memory, kRows x kColumns elements. Chunks of 16 bytes are swizzled: XORed with the row, so that the
// same chunk of 8 neighbouring rows, and neighbouring chunks of every other row, fall into different banks. kIsRounded:
// float32 elements are tf32 already, so MMAs that are not exact take them as they are.
template <class ElementType, int kRowCount, int kColumnCount, bool kIsRounded = false>
struct Tile {
  using Element = ElementType;
  static constexpr bool kRounded = kIsRounded;
  static constexpr int kRows = kRowCount, kColumns = kColumnCount;
  static constexpr int kPitch = kColumns * int(sizeof(Element));   // bytes of a row
  static constexpr int kChunks = kPitch / kChunk;                  // chunks of a row
  static constexpr int kPerChunk = kChunk / int(sizeof(Element));  // elements of a chunk
  static constexpr int kBytes = kRows * kPitch;
  static_assert(kPitch % 64 == 0);

  uint32_t address;  // in shared memory, of the first row

  static __device__ int swizzle(int row) { return kChunks % 8 == 0 ? row & 7 : (row >> 1) & 3; }

  // The shared-memory address of a chunk.
  __device__ uint32_t at(int row, int chunk) const {
    return address + row * kPitch + ((chunk ^ swizzle(row)) * kChunk);
  }

  // The view of a lane whose row is `first` (a multiple of 8) + `row`, and which reads the even or the `odd` one of two
  // neighbouring chunks. `columns` is the first of kPart columns that the view covers.
  template <int kPart = kColumns>
  __device__ LaneView view(int first, int row, int odd, int columns = 0) const {
    constexpr int kPartChunks = kPart * int(sizeof(Element)) / kChunk;
    static_assert(kPart == kColumns || kPartChunks % 8 == 0 || (kPartChunks & (kPartChunks - 1)) == 0);
    LaneView view{address + (first + row) * kPitch, uint32_t(odd ^ swizzle(row)) * kChunk};
    const int bytes = columns * int(sizeof(Element));
    if constexpr (kPartChunks % 8 == 0) {
      view.rows += bytes;
    } else {
      view.twist ^= bytes;
    }
    return view;
  }

  static __device__ uint32_t at(const LaneView& view, int row, int chunk) {
    return view.rows + row * kPitch + ((chunk * kChunk) ^ view.twist);
  }

  // Views for operands whose rows are those of the MMA: left [m, k], right [n, k].
  __device__ LaneView left(int first, int lane) const { return view(first, lane & 15, lane >> 4); }
  __device__ LaneView right(int first, int lane) const {
    return view(first, (lane & 7) | ((lane >> 1) & 8), (lane >> 3) & 1);
  }

  // Views for operands that lie transposed, [k, m] and [k, n]: kPart columns from `columns` on.
  template <int kPart>
  __device__ LaneView left_transposed(int columns, int lane) const {
    if constexpr (kIsFloat<Element>) {
      // Columns are in the order of `write_sums`: 2t and 2t + 1 at t and t + 4.
      static_assert(kChunks % 8 == 0);
      const int g = lane >> 2, t = lane & 3;
      LaneView view = this->template view<kPart>(0, 2 * t, g & 1, columns);
      view.rows += (g >> 1) * 4;
      return view;
    } else {
      return view<kPart>(0, (lane & 7) | ((lane >> 1) & 8), (lane >> 3) & 1, columns);
    }
  }
  template <int kPart>
  __device__ LaneView right_transposed(int columns, int lane) const {
    if constexpr (kIsFloat<Element>) {
      static_assert(kChunks % 8 == 0 && kPart % 32 == 0);
      return view<kPart>(0, 2 * (lane & 3), lane >> 2, columns);
    } else {
      return view<kPart>(0, lane & 15, lane >> 4, columns);
    }
  }

  // Issues cp.async for up to `rows` rows of `columns` elements; the rest of the tile becomes zeros. `stride` is in
  // elements.
  template <int kThreads>
  __device__ void copy(const Element* source, int stride, int rows, int columns) const {
    const int thread = threadIdx.x;
    if constexpr (kThreads % kChunks == 0 && kRows % (kThreads / kChunks) == 0) {
      constexpr int kStep = kThreads / kChunks;
      const int chunk = thread % kChunks, first = thread / kChunks;
      const bool inside = chunk * kPerChunk < columns;
      const Element* from = source + int64_t(first) * stride + chunk * kPerChunk;
#pragma unroll
      for (int i = 0; i < kRows / kStep; ++i) {
        const int row = first + i * kStep;
        copy_async(at(row, chunk), from + int64_t(i * kStep) * stride, inside && row < rows);
      }
    } else {
#pragma unroll
      for (int i = 0; i < (kRows * kChunks + kThreads - 1) / kThreads; ++i) {
        const int index = thread + i * kThreads, row = index / kChunks, chunk = index % kChunks;
        if (row < kRows) {
          copy_async(at(row, chunk), source + int64_t(row) * stride + chunk * kPerChunk,
                     row < rows && chunk * kPerChunk < columns);
        }
      }
    }
  }

  // Rounds to tf32, in place, what this thread loaded by `copy`, instead of at each of many reads. Each thread must
  // have waited for its own copies.
  template <int kThreads>
  __device__ void round_copied() const {
    const int thread = threadIdx.x;
#pragma unroll 4
    for (int i = 0; i < (kRows * kChunks + kThreads - 1) / kThreads; ++i) {
      const int index = thread + i * kThreads, row = index / kChunks, chunk = index % kChunks;
      if (kRows * kChunks % kThreads != 0 && row >= kRows) break;
      const uint4 value = read_16(at(row, chunk));
      write_16(at(row, chunk), make_uint4(rounded(value.x), rounded(value.y), rounded(value.z), rounded(value.w)));
    }
  }

  static __device__ uint32_t rounded(uint32_t value) { return __float_as_uint(__uint_as_float(value) * kRounding); }

  // Writes the tile to global memory, after all threads have filled it and passed a barrier.
  template <int kThreads>
  __device__ void store(Element* target, int stride, int rows, int columns) const {
#pragma unroll 4
    for (int index = threadIdx.x; index < kRows * kChunks; index += kThreads) {
      const int row = index / kChunks, chunk = index % kChunks;
      if (row < rows && chunk * kPerChunk < columns) {
        *reinterpret_cast<uint4*>(target + int64_t(row) * stride + chunk * kPerChunk) = read_16(at(row, chunk));
      }
    }
  }
};

}  // namespace tilewright::attention::ampere
