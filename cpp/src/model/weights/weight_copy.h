// SPDX-License-Identifier: Apache-2.0
#pragma once

// Copies weights into the arena and converts their dtypes.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include <paceline/dtype.h>
#include <paceline/model.h>

#include "device/cpu_context.h"
#include "device/device_memory.h"
#include "model/weights/weight_layout.h"

namespace paceline {

// With fewer elements, waking threads costs more than the copy.
inline constexpr int64_t kParallelElements = 1 << 16;

// Calls body(row) for every row, on several threads where that pays.
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

// A tensor as one matrix or, where it has one for each expert and they are transposed, as several.
struct SourceTensor {
  SourceMatrix matrix;  // the first; its rows are those of the arena
  int64_t num_matrices = 1;
  int64_t matrix_stride = 0;  // elements from one to the next
};

// The ids in the tensor `source` of a weight of the kind kIds, int32 or int64. Throws
// InvalidArgument unless each is an expert or a token of the vocabulary, and occurs once in its
// row.
[[nodiscard]] std::vector<int32_t> read_ids(const NamedWeight& named, const SourceMatrix& source,
                                            DType dtype, int32_t vocab_size);

// Converts a tensor into the arena: directly where that is host memory, otherwise through the
// staging buffer.
void copy_weight(const CpuContext& ctx, const SourceTensor& source, DType from,
                 const NamedWeight& named, const DeviceBuffer& arena);

// Converts rows of a tensor to its elements in the arena from `first` on.
void copy_rows(const CpuContext& ctx, const SourceMatrix& source, DType from,
               const NamedWeight& named, const DeviceBuffer& arena, int64_t first);

// The same as copy_weight for a row-major tensor that `read` gives in pieces, to several threads at
// once. Rethrows what `read` throws.
void copy_weight(const CpuContext& ctx, const ModelBuilder::ReadBytes& read, DType from,
                 const NamedWeight& named, const DeviceBuffer& arena);

// Copies a row-major tensor in host memory, whose elements are those of the arena.
void copy_elements(const CpuContext& ctx, const std::byte* elements, const NamedWeight& named,
                   const DeviceBuffer& arena);

// Converts a tensor in the memory of a GPU into the arena. Where the arena is there too, nothing
// passes through the host.
void copy_device_weight(const CpuContext& ctx, const SourceTensor& source, DType from,
                        const NamedWeight& named, const DeviceBuffer& arena);

// Copies a matrix out of the memory of a GPU; its strides stay as they are. `source.data` of the
// result points into `bytes`.
[[nodiscard]] SourceMatrix download_matrix(const SourceMatrix& source, DType dtype,
                                           std::vector<std::byte>& bytes);

}  // namespace paceline
