// SPDX-License-Identifier: Apache-2.0
#pragma once

// The part of cuda_runtime.h that kernels call.

// --- barriers and collective calls of a warp -----------------------------------------------------

inline void __syncthreads(
    const paceline::emulator::Place& place = paceline::emulator::Place::current()) {
  paceline::emulator::wait_for_block(0, 0, false, place);
}
inline int __syncthreads_or(
    int predicate, const paceline::emulator::Place& place = paceline::emulator::Place::current()) {
  return paceline::emulator::wait_for_block(0, 0, predicate != 0, place) != 0 ? 1 : 0;
}
inline int __syncthreads_count(
    int predicate, const paceline::emulator::Place& place = paceline::emulator::Place::current()) {
  return paceline::emulator::wait_for_block(0, 0, predicate != 0, place);
}

namespace paceline::emulator {

template <class T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <class T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}
template <class T>
T shuffle(Collective collective, uint32_t mask, T value, int argument, int width,
          const Place& place) {
  return from_word<T>(run_collective(collective, mask, to_word(value),
                                     static_cast<uint32_t>(argument), static_cast<uint32_t>(width),
                                     place));
}
inline uint32_t vote(Collective collective, uint32_t mask, uint64_t value, const Place& place) {
  return static_cast<uint32_t>(run_collective(collective, mask, value, 0, 32, place));
}

}  // namespace paceline::emulator

inline void __syncwarp(uint32_t mask = 0xffffffffu, const paceline::emulator::Place& place =
                                                        paceline::emulator::Place::current()) {
  paceline::emulator::vote(paceline::emulator::Collective::kSync, mask, 0, place);
}

#define PACELINE_SHUFFLE(name, collective)                                                      \
  template <class T>                                                                            \
  T name(uint32_t mask, T value, int argument, int width = 32,                                  \
         const paceline::emulator::Place& place = paceline::emulator::Place::current()) {       \
    return paceline::emulator::shuffle(paceline::emulator::Collective::collective, mask, value, \
                                       argument, width, place);                                 \
  }
PACELINE_SHUFFLE(__shfl_sync, kShuffle)
PACELINE_SHUFFLE(__shfl_up_sync, kShuffleUp)
PACELINE_SHUFFLE(__shfl_down_sync, kShuffleDown)
PACELINE_SHUFFLE(__shfl_xor_sync, kShuffleXor)
#undef PACELINE_SHUFFLE

#define PACELINE_VOTE(name, collective, Result)                                            \
  inline Result name(                                                                      \
      uint32_t mask, int predicate,                                                        \
      const paceline::emulator::Place& place = paceline::emulator::Place::current()) {     \
    return static_cast<Result>(paceline::emulator::vote(                                   \
        paceline::emulator::Collective::collective, mask, predicate != 0 ? 1 : 0, place)); \
  }
PACELINE_VOTE(__ballot_sync, kBallot, uint32_t)
PACELINE_VOTE(__any_sync, kAny, int)
PACELINE_VOTE(__all_sync, kAll, int)
#undef PACELINE_VOTE

template <class T>
uint32_t __match_any_sync(
    uint32_t mask, T value,
    const paceline::emulator::Place& place = paceline::emulator::Place::current()) {
  return paceline::emulator::vote(paceline::emulator::Collective::kMatchAny, mask,
                                  paceline::emulator::to_word(value), place);
}

#define PACELINE_REDUCE(name, T, collective)                                                     \
  inline T name(uint32_t mask, T value,                                                          \
                const paceline::emulator::Place& place = paceline::emulator::Place::current()) { \
    return static_cast<T>(paceline::emulator::vote(paceline::emulator::Collective::collective,   \
                                                   mask, static_cast<uint32_t>(value), place));  \
  }
PACELINE_REDUCE(__reduce_add_sync, uint32_t, kAdd)
PACELINE_REDUCE(__reduce_add_sync, int32_t, kAdd)
PACELINE_REDUCE(__reduce_min_sync, uint32_t, kMin)
PACELINE_REDUCE(__reduce_min_sync, int32_t, kMinSigned)
PACELINE_REDUCE(__reduce_max_sync, uint32_t, kMax)
PACELINE_REDUCE(__reduce_max_sync, int32_t, kMaxSigned)
PACELINE_REDUCE(__reduce_and_sync, uint32_t, kAnd)
PACELINE_REDUCE(__reduce_or_sync, uint32_t, kOr)
PACELINE_REDUCE(__reduce_xor_sync, uint32_t, kXor)
#undef PACELINE_REDUCE

// --- memory --------------------------------------------------------------------------------------

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

template <class T>
T atomicCAS(T* to, T expected, T value) {
  const T before = *to;
  if (before == expected) *to = value;
  return before;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
T __ldcv(const T* from) {
  return *from;
}

// Only one thread runs at a time.
template <class T>
T atomicAdd(T* to, T value) {
  return std::exchange(*to, *to + value);
}
inline uint32_t atomicInc(uint32_t* to, uint32_t most) {
  return std::exchange(*to, *to >= most ? 0 : *to + 1);
}
template <class T>
T atomicOr(T* to, T value) {
  return std::exchange(*to, *to | value);
}
template <class T>
T atomicAnd(T* to, T value) {
  return std::exchange(*to, *to & value);
}
template <class T>
T atomicMax(T* to, T value) {
  return std::exchange(*to, *to < value ? value : *to);
}
template <class T>
T atomicMin(T* to, T value) {
  return std::exchange(*to, value < *to ? value : *to);
}
template <class T>
T atomicExch(T* to, T value) {
  return std::exchange(*to, value);
}

// --- bits ----------------------------------------------------------------------------------------

inline float __uint_as_float(uint32_t bits) { return paceline::emulator::from_word<float>(bits); }
inline float __int_as_float(int32_t bits) { return __uint_as_float(static_cast<uint32_t>(bits)); }
inline uint32_t __float_as_uint(float value) {
  return static_cast<uint32_t>(paceline::emulator::to_word(value));
}
inline int32_t __float_as_int(float value) { return static_cast<int32_t>(__float_as_uint(value)); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __popc(uint32_t value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(value));
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((uint64_t{a} * b) >> 32);
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t select = selector >> (4 * i) & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (select & 7))) & 0xff;
    if ((select & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;  // the sign
    result |= byte << (8 * i);
  }
  return result;
}

// --- arithmetic ----------------------------------------------------------------------------------

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __logf(float a) { return std::log(a); }
inline float __expf(float a) { return std::exp(a); }
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }

inline int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }
inline int32_t max(int32_t a, int32_t b) { return a < b ? b : a; }
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a < b ? b : a; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }
inline uint64_t min(uint64_t a, uint64_t b) { return a < b ? a : b; }
inline uint64_t max(uint64_t a, uint64_t b) { return a < b ? b : a; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
