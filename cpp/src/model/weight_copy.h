// SPDX-License-Identifier: Apache-2.0
#pragma once

// Copies weights into their places, converting dtypes.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include <paceline/dtype.h>
#include <paceline/model.h>

#include "device/cpu_context.h"
#include "device/device_memory.h"
#include "model/weight_layout.h"

namespace paceline {

// A matrix as its owner has it; a vector is one row. Strides in elements. `data` may lie at any
// address, so it is only ever read by memcpy.
struct Source {
  const std::byte* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;
};

// Below so many elements, waking threads costs more than the copy.
inline constexpr int64_t kParallelElements = 1 << 16;

// Calls body(row) for every row, on several threads when there is enough to do.
template <class Body>
void for_rows(const CpuContext& ctx, int64_t rows, int64_t row_elements, const Body& body) {
  if (rows * row_elements < kParallelElements) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  ctx.for_ranges(rows, /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

// Token ids of either width, each a token of the vocabulary.
[[nodiscard]] std::vector<int32_t> read_tokens(std::string_view name, const Source& source,
                                               DType dtype, int32_t vocab_size);

// Converts a tensor into its place: at once in the host's memory, else by way of the staging
// buffer.
void place(const CpuContext& ctx, const Source& source, DType from, const Slot& slot,
           const DeviceBuffer& arena);

// The same of a row-major tensor that `read` gives in pieces, to several threads at once. Rethrows
// what `read` throws.
void place(const CpuContext& ctx, const ModelBuilder::ReadBytes& read, DType from, const Slot& slot,
           const DeviceBuffer& arena);

}  // namespace paceline
