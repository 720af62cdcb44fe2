// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sixteen-lane float vectors for the CPU ops, the few functions they need, and the dispatch over
// instruction sets. Everything is always_inline and plain GCC vector code: it is compiled for the
// instruction set of the function into which it is inlined. A kernel is a struct with a static
// always_inline `run`; `run_best_isa<Kernel>(args...)` runs the copy that was compiled for this
// machine.
//
// This is not a math library: the functions are accurate to about 2 ulp over finite ranges, as each
// one states.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// Functions that return vectors wider than the baseline's registers are always inlined. Vectors are
// passed by reference, because a by-value parameter causes a note that no pragma silences. The
// diagnostic stays disabled: the files that include this header use such functions too.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace paceline {

using V16 = float __attribute__((vector_size(64)));
using V16i = int32_t __attribute__((vector_size(64)));
using V16u = uint32_t __attribute__((vector_size(64)));

// The same vectors, aligned only to an element.
using V16Any = float __attribute__((vector_size(64), aligned(4), may_alias));
using H16Any = uint16_t __attribute__((vector_size(32), aligned(2), may_alias));

enum class Isa : uint8_t { kBaseline, kAvx2, kAvx512 };

[[nodiscard]] inline Isa best_isa() {
  static const Isa isa = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return Isa::kAvx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
    return Isa::kBaseline;
  }();
  return isa;
}

// Kernel::run compiled for one instruction set.
template <class Kernel, Isa kIsa>
struct Compiled;

template <class Kernel>
struct Compiled<Kernel, Isa::kAvx512> {
  template <class... Args>
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"), gnu::noinline]]
  static void run(Args... args) {
    Kernel::run(args...);
  }
};

template <class Kernel>
struct Compiled<Kernel, Isa::kAvx2> {
  template <class... Args>
  [[gnu::target("avx2,fma"), gnu::noinline]] static void run(Args... args) {
    Kernel::run(args...);
  }
};

template <class Kernel>
struct Compiled<Kernel, Isa::kBaseline> {
  template <class... Args>
  [[gnu::noinline]] static void run(Args... args) {
    Kernel::run(args...);
  }
};

template <class Kernel, class... Args>
inline void run_best_isa(Args... args) {
  switch (best_isa()) {
    case Isa::kAvx512:
      return Compiled<Kernel, Isa::kAvx512>::run(args...);
    case Isa::kAvx2:
      return Compiled<Kernel, Isa::kAvx2>::run(args...);
    case Isa::kBaseline:
      return Compiled<Kernel, Isa::kBaseline>::run(args...);
  }
}

[[gnu::always_inline]] inline V16 broadcast(float value) { return V16{} + value; }

[[gnu::always_inline]] inline V16 load(const float* from) {
  return *reinterpret_cast<const V16Any*>(from);
}

// bfloat16 is the upper half of a float.
[[gnu::always_inline]] inline V16 load(const uint16_t* from) {
  const V16u bits = __builtin_convertvector(*reinterpret_cast<const H16Any*>(from), V16u);
  return reinterpret_cast<V16>(bits << 16);
}

[[gnu::always_inline]] inline void store(float* to, const V16& value) {
  *reinterpret_cast<V16Any*>(to) = value;
}

// The first `count` (1..15) elements, followed by zeros; never reads past them.
template <class T>
[[gnu::always_inline]] inline V16 load_first(const T* from, int32_t count) {
  T padded[16] = {};
  for (int32_t i = 0; i < count; ++i) padded[i] = from[i];
  return load(padded);
}

// Sixteen elements, of which `num_left` exist; the others are zero.
template <class T>
[[gnu::always_inline]] inline V16 load_up_to(const T* from, int32_t num_left) {
  return num_left >= 16 ? load(from) : load_first(from, num_left);
}

[[gnu::always_inline]] inline void store_first(float* to, const V16& value, int32_t count) {
  float padded[16];
  store(padded, value);
  for (int32_t i = 0; i < count; ++i) to[i] = padded[i];
}

// Four sums over lanes at once. The tree is fixed: l + (l ^ 8), then ^ 4, ^ 2, ^ 1. Float addition
// commutes, so a sum has the same bits at any of the four positions.
struct Sums4 {
  float sum[4];
};
[[gnu::always_inline]] inline Sums4 sum_lanes(const V16& a, const V16& b, const V16& c,
                                              const V16& d) {
  constexpr V16i kLow8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  constexpr V16i kHigh8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
  constexpr V16i kLow4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  constexpr V16i kHigh4 = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
  constexpr V16i kSwap2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
  constexpr V16i kSwap1 = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
  const V16 ab = __builtin_shuffle(a, b, kLow8) + __builtin_shuffle(a, b, kHigh8);
  const V16 cd = __builtin_shuffle(c, d, kLow8) + __builtin_shuffle(c, d, kHigh8);
  V16 all = __builtin_shuffle(ab, cd, kLow4) + __builtin_shuffle(ab, cd, kHigh4);
  all += __builtin_shuffle(all, kSwap2);
  all += __builtin_shuffle(all, kSwap1);
  return {all[0], all[4], all[8], all[12]};
}

[[gnu::always_inline]] inline float sum_lanes(const V16& a) { return sum_lanes(a, a, a, a).sum[0]; }

[[gnu::always_inline]] inline V16 max(const V16& a, const V16& b) { return a > b ? a : b; }

[[gnu::always_inline]] inline float max_lanes(const V16& a) {
  float lanes[16];
  store(lanes, a);
  float best = lanes[0];
  for (int i = 1; i < 16; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

// exp(x) within 2 ulp for every float: subnormal results are correct, -inf gives 0, overflow gives
// inf, NaN stays NaN. Cody-Waite reduction and the degree-5 polynomial of Cephes' expf (S. Moshier,
// netlib.org/cephes). 2^n is applied as two factors, so that n may exceed the range of the
// exponent.
[[gnu::always_inline]] inline V16 exp(const V16& value) {
  const V16 low = broadcast(-104.0f);
  const V16 high = broadcast(89.0f);
  V16 x = value < low ? low : value;
  x = x > high ? high : x;
  const float kRound = 0x1.8p23f;  // adding it rounds x to an integer in the low mantissa bits
  const V16 shifted = x * 1.44269504f + kRound;
  const V16 n = shifted - kRound;
  V16 r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  V16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const V16i exponent = reinterpret_cast<V16i>(shifted) - 0x4b400000;  // n, from the mantissa bits
  const V16i half = exponent >> 1;
  const V16 scale0 = reinterpret_cast<V16>((half + 127) << 23);
  const V16 scale1 = reinterpret_cast<V16>((exponent - half + 127) << 23);
  return p * scale0 * scale1;
}

// exp of one value, with the same bits as in a vector.
[[gnu::always_inline]] inline float exp_one(float x) { return exp(broadcast(x))[0]; }

// tanh(x) within 2 ulp: Cephes' tanhf, an odd polynomial below 0.625, 1 - 2 / (exp(2x) + 1) above.
[[gnu::always_inline]] inline V16 tanh(const V16& x) {
  const V16 magnitude =
      reinterpret_cast<V16>(reinterpret_cast<V16i>(x) & std::numeric_limits<int32_t>::max());
  V16 large = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
  const V16i sign = reinterpret_cast<V16i>(x) & std::numeric_limits<int32_t>::min();
  large = reinterpret_cast<V16>(reinterpret_cast<V16i>(large) | sign);
  const V16 z = x * x;
  V16 p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const V16 small = p * z * x + x;
  return magnitude < 0.625f ? small : large;
}

}  // namespace paceline
