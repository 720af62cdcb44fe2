// SPDX-License-Identifier: Apache-2.0
#pragma once

// One layer's KV pool for tests of ops, whose every unwritten byte is NaN, and its elements.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <paceline/dtype.h>

#include "base/float_types.h"
#include "ops/ops.h"

namespace paceline::testing {

inline float element(DType dtype, const std::byte* from, int64_t index) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, from + 4 * index, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from + 2 * index, 2);
  return bf16_to_float(bits);
}

inline void set_element(DType dtype, std::byte* to, int64_t index, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to + 4 * index, &value, 4);
  } else {
    const uint16_t bits = float_to_bf16(value);
    std::memcpy(to + 2 * index, &bits, 2);
  }
}

struct Pool {
  std::vector<std::byte> bytes;
  KvLayerView view;
  int32_t num_kv_heads;
  int32_t head_dim;

  Pool(DType dtype, int32_t block_size, int32_t num_blocks, int32_t kv_heads, int32_t dim)
      : num_kv_heads(kv_heads), head_dim(dim) {
    const int64_t part = int64_t{block_size} * kv_heads * dim * dtype_bytes(dtype);
    // A gap before, between and after K and V: other layers' bytes.
    const int64_t block_bytes = 2 * part + 3 * 64;
    bytes.assign(static_cast<size_t>(num_blocks * block_bytes), std::byte{0xff});
    view = {.base = bytes.data(),
            .block_bytes = block_bytes,
            .k_offset = 64,
            .v_offset = 128 + part,
            .block_size = block_size,
            .dtype = dtype};
  }

  std::byte* token(int64_t slot, bool is_value) {
    const int64_t token_bytes = int64_t{num_kv_heads} * head_dim * dtype_bytes(view.dtype);
    return view.base + slot / view.block_size * view.block_bytes +
           (is_value ? view.v_offset : view.k_offset) + slot % view.block_size * token_bytes;
  }
};

}  // namespace paceline::testing
