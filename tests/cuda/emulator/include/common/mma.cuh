// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for cuda/common/mma.cuh: what its wrappers of PTX instructions do.

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace paceline::cuda {

inline uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }

inline void prefetch_to_l2(const void*) {}

template <class T>
void keep_in_register(T& /*value*/) {}

// The bytes arrive with cp_async_wait and not before, so that a missing wait gives wrong results.
inline void cp_async_16(uint32_t to, const void* from, bool is_live) {
  emulator::copy_later(emulator::shared_pointer(to, 16), is_live ? from : nullptr, 16);
}
inline void cp_async_commit() { emulator::end_copy_group(); }
template <int kPending>
inline void cp_async_wait() {
  emulator::wait_for_copies(kPending);
}

inline void store_global_16(float* to, float x, float y, float z, float w) {
  *reinterpret_cast<float4*>(to) = {x, y, z, w};
}

inline uint4 load_shared_16(uint32_t from) {
  uint4 words;
  std::memcpy(&words, emulator::shared_pointer(from, 16), 16);
  return words;
}
inline uint2 load_shared_8(uint32_t from) {
  uint2 words;
  std::memcpy(&words, emulator::shared_pointer(from, 8), 8);
  return words;
}
inline uint32_t load_shared_4(uint32_t from) {
  uint32_t word;
  std::memcpy(&word, emulator::shared_pointer(from, 4), 4);
  return word;
}
inline void store_shared_16(uint32_t to, const uint32_t (&words)[4]) {
  std::memcpy(emulator::shared_pointer(to, 16), words, 16);
}

struct MatrixLoad {
  const uint16_t* row;  // of 8 elements
  uint32_t* to;         // [4]
};
template <bool kIsTransposed>
void load_matrices(emulator::LaneArguments& lanes) {
  const auto load = [&](uint32_t lane) -> const MatrixLoad& {
    return *static_cast<const MatrixLoad*>(lanes[lane]);
  };
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t matrix = 0; matrix < 4; ++matrix) {
      uint32_t pair = 0;
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t at = lane % 4 * 2 + i;
        const uint32_t row = kIsTransposed ? at : lane / 4;
        const uint32_t column = kIsTransposed ? lane / 4 : at;
        pair |= uint32_t{load(matrix * 8 + row).row[column]} << (16 * i);
      }
      load(lane).to[matrix] = pair;
    }
  }
}
inline void ldmatrix_x4(uint32_t (&to)[4], uint32_t from,
                        const emulator::Place& place = emulator::Place::current()) {
  MatrixLoad load = {static_cast<const uint16_t*>(emulator::shared_pointer(from, 16)), to};
  emulator::compute_together(&load, load_matrices<false>, place);
}
inline void ldmatrix_x4_transposed(uint32_t (&to)[4], uint32_t from,
                                   const emulator::Place& place = emulator::Place::current()) {
  MatrixLoad load = {static_cast<const uint16_t*>(emulator::shared_pointer(from, 16)), to};
  emulator::compute_together(&load, load_matrices<true>, place);
}

struct Product {
  float* d;           // [4]
  const uint32_t* a;  // [4]
  uint32_t b[2];
};
// The sums are in double precision; the order and rounding of a tensor core are not known.
inline void multiply(emulator::LaneArguments& lanes) {
  const auto value = [](uint32_t pair, uint32_t i) {
    return __uint_as_float(i == 0 ? pair << 16 : pair & 0xffff0000u);
  };
  float a[16][16];
  float b[16][8];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const auto& product = *static_cast<const Product*>(lanes[lane]);
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t k = lane % 4 * 2 + i;
      for (uint32_t part = 0; part < 4; ++part) {
        a[lane / 4 + part % 2 * 8][k + part / 2 * 8] = value(product.a[part], i);
      }
      for (uint32_t part = 0; part < 2; ++part)
        b[k + part * 8][lane / 4] = value(product.b[part], i);
    }
  }
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const auto& product = *static_cast<const Product*>(lanes[lane]);
    for (uint32_t i = 0; i < 4; ++i) {
      double sum = product.d[i];
      for (uint32_t k = 0; k < 16; ++k) {
        sum += double{a[lane / 4 + i / 2 * 8][k]} * double{b[k][lane % 4 * 2 + i % 2]};
      }
      product.d[i] = static_cast<float>(sum);
    }
  }
}
inline void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                        const emulator::Place& place = emulator::Place::current()) {
  Product product = {d, a, {b0, b1}};
  emulator::compute_together(&product, multiply, place);
}

constexpr float kBeforeTf32Cut = 1.0f + 0.72f / 2048.0f;
struct Tf32Operand {
  float values[4];
};
inline float before_tf32_cut(float x) { return x * kBeforeTf32Cut; }
struct Tf32Product {
  float* d;        // [4]
  const float* a;  // [4]
  float b[2];
};
inline void multiply_tf32(emulator::LaneArguments& lanes) {
  // A tensor core ignores what TF32 does not have.
  const auto value = [](float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); };
  float a[16][8];
  float b[8][8];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const auto& product = *static_cast<const Tf32Product*>(lanes[lane]);
    for (uint32_t part = 0; part < 4; ++part) {
      a[lane / 4 + part % 2 * 8][lane % 4 + part / 2 * 4] = value(product.a[part]);
    }
    for (uint32_t part = 0; part < 2; ++part) {
      b[lane % 4 + part * 4][lane / 4] = value(product.b[part]);
    }
  }
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const auto& product = *static_cast<const Tf32Product*>(lanes[lane]);
    for (uint32_t i = 0; i < 4; ++i) {
      double sum = product.d[i];
      for (uint32_t k = 0; k < 8; ++k) {
        sum += double{a[lane / 4 + i / 2 * 8][k]} * double{b[k][lane % 4 * 2 + i % 2]};
      }
      product.d[i] = static_cast<float>(sum);
    }
  }
}
inline void mma_16x8x8(const Tf32Operand& a, float b0, float b1, float (&d)[4],
                       const emulator::Place& place = emulator::Place::current()) {
  Tf32Product product = {d, a.values, {b0, b1}};
  emulator::compute_together(&product, multiply_tf32, place);
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }

#define PACELINE_HAS_CLUSTERS 1
#define PACELINE_CLUSTER_DIMS(blocks)

inline void cluster_arrive() { emulator::arrive_in_cluster(); }
inline void cluster_wait(const emulator::Place& place = emulator::Place::current()) {
  emulator::wait_for_cluster(place);
}
inline void cluster_barrier(const emulator::Place& place = emulator::Place::current()) {
  cluster_arrive();
  cluster_wait(place);
}

template <class T>
inline void store_to_cluster(T* to, int32_t rank, const T& value) {
  *static_cast<T*>(emulator::shared_of_block(to, rank)) = value;
}
template <class T>
inline const T* in_cluster(const T* of, int32_t rank) {
  return static_cast<const T*>(emulator::shared_of_block(of, rank));
}

}  // namespace paceline::cuda
