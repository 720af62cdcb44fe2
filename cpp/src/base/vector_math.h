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
using V8 = float __attribute__((vector_size(32)));
using V4 = float __attribute__((vector_size(16)));

// How memory holds the lanes of a vector: aligned only to an element.
template <class Vector>
struct InMemory;
template <>
struct InMemory<V16> {
  using Floats = float __attribute__((vector_size(64), aligned(4), may_alias));
  using Bf16s = uint16_t __attribute__((vector_size(32), aligned(2), may_alias));
};
template <>
struct InMemory<V8> {
  using Floats = float __attribute__((vector_size(32), aligned(4), may_alias));
  using Bf16s = uint16_t __attribute__((vector_size(16), aligned(2), may_alias));
};
template <>
struct InMemory<V4> {
  using Floats = float __attribute__((vector_size(16), aligned(4), may_alias));
  using Bf16s = uint16_t __attribute__((vector_size(8), aligned(2), may_alias));
};

// Unsigned integers in the register of a vector: one for each float, or one for each two.
template <class Vector>
struct Unsigned;
template <>
struct Unsigned<V16> {
  using Words = uint32_t __attribute__((vector_size(64)));
  using Pairs = uint64_t __attribute__((vector_size(64)));
};
template <>
struct Unsigned<V8> {
  using Words = uint32_t __attribute__((vector_size(32)));
  using Pairs = uint64_t __attribute__((vector_size(32)));
};
template <>
struct Unsigned<V4> {
  using Words = uint32_t __attribute__((vector_size(16)));
  using Pairs = uint64_t __attribute__((vector_size(16)));
};

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

// Sixteen lanes as two halves. GCC keeps a vector that is wider than a register in memory from one
// round of a loop to the next, which makes a sum of products several times slower. Halves as wide
// as a register stay in registers.
template <class Half>
struct Halves {
  Half low;
  Half high;
};

// Sixteen lanes in registers of one instruction set. Results have the same bits for all of them.
template <Isa kIsa>
struct LanesOf {
  using Type = V16;
};
template <>
struct LanesOf<Isa::kAvx2> {
  using Type = Halves<V8>;
};
template <>
struct LanesOf<Isa::kBaseline> {
  using Type = Halves<Halves<V4>>;
};

// One register of it, for kernels whose lanes are compared, shuffled or counted: 16, 8 or 4 floats.
template <class Lanes>
struct RegisterOf {
  using Type = Lanes;
};
template <class Half>
struct RegisterOf<Halves<Half>> : RegisterOf<Half> {};

// Kernel::run, with the lanes of the instruction set where it is a template over them.
template <class Kernel, Isa kIsa, class... Args>
[[gnu::always_inline]] inline void run_with_lanes(Args... args) {
  using Lanes = typename LanesOf<kIsa>::Type;
  if constexpr (requires { Kernel::template run<Lanes>(args...); }) {
    Kernel::template run<Lanes>(args...);
  } else {
    Kernel::run(args...);
  }
}

// Kernel::run compiled for one instruction set.
template <class Kernel, Isa kIsa>
struct Compiled;

template <class Kernel>
struct Compiled<Kernel, Isa::kAvx512> {
  template <class... Args>
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"), gnu::noinline]]
  static void run(Args... args) {
    run_with_lanes<Kernel, Isa::kAvx512>(args...);
  }
};

template <class Kernel>
struct Compiled<Kernel, Isa::kAvx2> {
  template <class... Args>
  [[gnu::target("avx2,fma"), gnu::noinline]] static void run(Args... args) {
    run_with_lanes<Kernel, Isa::kAvx2>(args...);
  }
};

template <class Kernel>
struct Compiled<Kernel, Isa::kBaseline> {
  template <class... Args>
  [[gnu::noinline]] static void run(Args... args) {
    run_with_lanes<Kernel, Isa::kBaseline>(args...);
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

#define PACELINE_HALVES_OPERATOR(op)                                                       \
  template <class Half>                                                                    \
  [[gnu::always_inline]] inline Halves<Half> operator op(const Halves<Half>& a,            \
                                                         const Halves<Half>& b) {          \
    return {a.low op b.low, a.high op b.high};                                             \
  }                                                                                        \
  template <class Half>                                                                    \
  [[gnu::always_inline]] inline Halves<Half> operator op(const Halves<Half>& a, float b) { \
    return {a.low op b, a.high op b};                                                      \
  }                                                                                        \
  template <class Half>                                                                    \
  [[gnu::always_inline]] inline Halves<Half> operator op(float a, const Halves<Half>& b) { \
    return {a op b.low, a op b.high};                                                      \
  }
PACELINE_HALVES_OPERATOR(+)
PACELINE_HALVES_OPERATOR(-)
PACELINE_HALVES_OPERATOR(*)
PACELINE_HALVES_OPERATOR(/)
#undef PACELINE_HALVES_OPERATOR

template <class Half>
[[gnu::always_inline]] inline void operator+=(Halves<Half>& a, const Halves<Half>& b) {
  a.low += b.low;
  a.high += b.high;
}
template <class Half>
[[gnu::always_inline]] inline Halves<Half> operator-(const Halves<Half>& a) {
  return {-a.low, -a.high};
}

template <class L>
inline constexpr bool kIsHalves = false;
template <class Half>
inline constexpr bool kIsHalves<Halves<Half>> = true;

template <class L = V16>
[[gnu::always_inline]] inline L broadcast(float value) {
  if constexpr (kIsHalves<L>) {
    const auto half = broadcast<decltype(L::low)>(value);
    return {half, half};
  } else {
    return L{} + value;
  }
}

// Sixteen elements, float or bfloat16.
template <class L = V16, class T>
[[gnu::always_inline]] inline L load(const T* from) {
  if constexpr (kIsHalves<L>) {
    using Half = decltype(L::low);
    return {load<Half>(from), load<Half>(from + sizeof(Half) / sizeof(float))};
  } else if constexpr (sizeof(T) == sizeof(float)) {
    return *reinterpret_cast<const typename InMemory<L>::Floats*>(from);
  } else {
    // bfloat16 is the upper half of a float.
    using Bits = decltype(L{} < L{});
    const auto& bf16s = *reinterpret_cast<const typename InMemory<L>::Bf16s*>(from);
    return reinterpret_cast<L>(__builtin_convertvector(bf16s, Bits) << 16);
  }
}

template <class L>
[[gnu::always_inline]] inline void store(float* to, const L& value) {
  if constexpr (kIsHalves<L>) {
    store(to, value.low);
    store(to + sizeof(value.low) / sizeof(float), value.high);
  } else {
    *reinterpret_cast<typename InMemory<L>::Floats*>(to) = value;
  }
}

// Zeroes accumulators. An initialiser `= {}` would write them to memory where Lanes are halves.
template <class Lanes, int kRows, int kCols>
[[gnu::always_inline]] inline void clear(Lanes (&sums)[kRows][kCols]) {
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) sums[r][c] = broadcast<Lanes>(0.0f);
  }
}

// The first `count` (1..15) elements, followed by zeros; never reads past them.
template <class L = V16, class T>
[[gnu::always_inline]] inline L load_first(const T* from, int32_t count) {
  T padded[16] = {};
  if constexpr (kIsHalves<L>) {
    // Pieces of fixed sizes, where GCC would call memcpy.
    int32_t num_copied = 0;
    for (const int32_t size : {8, 4, 2, 1}) {
      if ((count & size) == 0) continue;
      std::memcpy(padded + num_copied, from + num_copied, static_cast<size_t>(size) * sizeof(T));
      num_copied += size;
    }
  } else {
    for (int32_t i = 0; i < count; ++i) padded[i] = from[i];
  }
  return load<L>(padded);
}

// Sixteen elements, of which `num_left` exist; the others are zero.
template <class L = V16, class T>
[[gnu::always_inline]] inline L load_up_to(const T* from, int32_t num_left) {
  return num_left >= 16 ? load<L>(from) : load_first<L>(from, num_left);
}

template <class L>
[[gnu::always_inline]] inline void store_first(float* to, const L& value, int32_t count) {
  float padded[16];
  store(padded, value);
  for (int32_t i = 0; i < count; ++i) to[i] = padded[i];
}

template <class L>
[[gnu::always_inline]] inline void store_up_to(float* to, const L& value, int32_t num_left) {
  if (num_left >= 16) {
    store(to, value);
  } else {
    store_first(to, value, num_left);
  }
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

[[gnu::always_inline]] inline Sums4 sum_lanes(const V8& a, const V8& b, const V8& c, const V8& d) {
  using V8i = int32_t __attribute__((vector_size(32)));
  constexpr V8i kLow4 = {0, 1, 2, 3, 8, 9, 10, 11};
  constexpr V8i kHigh4 = {4, 5, 6, 7, 12, 13, 14, 15};
  constexpr V8i kSwap2 = {2, 3, 0, 1, 6, 7, 4, 5};
  constexpr V8i kSwap1 = {1, 0, 3, 2, 5, 4, 7, 6};
  V8 ab = __builtin_shuffle(a, b, kLow4) + __builtin_shuffle(a, b, kHigh4);
  V8 cd = __builtin_shuffle(c, d, kLow4) + __builtin_shuffle(c, d, kHigh4);
  ab += __builtin_shuffle(ab, kSwap2);
  cd += __builtin_shuffle(cd, kSwap2);
  ab += __builtin_shuffle(ab, kSwap1);
  cd += __builtin_shuffle(cd, kSwap1);
  return {ab[0], ab[4], cd[0], cd[4]};
}
[[gnu::always_inline]] inline Sums4 sum_lanes(const V4& a, const V4& b, const V4& c, const V4& d) {
  const auto sum = [](const V4& of)
                       __attribute__((always_inline)) { return (of[0] + of[2]) + (of[1] + of[3]); };
  return {sum(a), sum(b), sum(c), sum(d)};
}
template <class Half>
[[gnu::always_inline]] inline Sums4 sum_lanes(const Halves<Half>& a, const Halves<Half>& b,
                                              const Halves<Half>& c, const Halves<Half>& d) {
  return sum_lanes(a.low + a.high, b.low + b.high, c.low + c.high, d.low + d.high);
}

template <class L>
[[gnu::always_inline]] inline float sum_lanes(const L& a) {
  return sum_lanes(a, a, a, a).sum[0];
}

// The second operand where the first is above, or below, it; a NaN of the first stays.
template <class L>
[[gnu::always_inline]] inline L at_most(const L& a, const L& b) {
  if constexpr (kIsHalves<L>) {
    return {at_most(a.low, b.low), at_most(a.high, b.high)};
  } else {
    return a > b ? b : a;
  }
}
template <class L>
[[gnu::always_inline]] inline L at_least(const L& a, const L& b) {
  if constexpr (kIsHalves<L>) {
    return {at_least(a.low, b.low), at_least(a.high, b.high)};
  } else {
    return a < b ? b : a;
  }
}

template <class L>
[[gnu::always_inline]] inline L max(const L& a, const L& b) {
  if constexpr (kIsHalves<L>) {
    return {max(a.low, b.low), max(a.high, b.high)};
  } else {
    return a > b ? a : b;
  }
}

template <class L>
[[gnu::always_inline]] inline float max_lanes(const L& a) {
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
template <class L>
[[gnu::always_inline]] inline L exp(const L& value) {
  if constexpr (kIsHalves<L>) {
    return {exp(value.low), exp(value.high)};
  } else {
    using Ints = decltype(value < value);
    const L low = broadcast<L>(-104.0f);
    const L high = broadcast<L>(89.0f);
    L x = value < low ? low : value;
    x = x > high ? high : x;
    const float kRound = 0x1.8p23f;  // adding it rounds x to an integer in the low mantissa bits
    const L shifted = x * 1.44269504f + kRound;
    const L n = shifted - kRound;
    L r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    L p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const Ints exponent =
        reinterpret_cast<Ints>(shifted) - 0x4b400000;  // n, from the mantissa bits
    const Ints half = exponent >> 1;
    const L scale0 = reinterpret_cast<L>((half + 127) << 23);
    const L scale1 = reinterpret_cast<L>((exponent - half + 127) << 23);
    return p * scale0 * scale1;
  }
}

// exp of one value, with the same bits as in a vector.
[[gnu::always_inline]] inline float exp_one(float x) { return exp(broadcast<V4>(x))[0]; }

// tanh(x) within 2 ulp: Cephes' tanhf, an odd polynomial below 0.625, 1 - 2 / (exp(2x) + 1) above.
template <class L>
[[gnu::always_inline]] inline L tanh(const L& x) {
  if constexpr (kIsHalves<L>) {
    return {tanh(x.low), tanh(x.high)};
  } else {
    using Ints = decltype(x < x);
    const L magnitude =
        reinterpret_cast<L>(reinterpret_cast<Ints>(x) & std::numeric_limits<int32_t>::max());
    L large = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
    const Ints sign = reinterpret_cast<Ints>(x) & std::numeric_limits<int32_t>::min();
    large = reinterpret_cast<L>(reinterpret_cast<Ints>(large) | sign);
    const L z = x * x;
    L p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const L small = p * z * x + x;
    return magnitude < 0.625f ? small : large;
  }
}

}  // namespace paceline
