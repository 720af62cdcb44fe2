// SPDX-License-Identifier: Apache-2.0
#include "gemm/tensor_map.h"

#include <cuda_runtime.h>

#include <array>
#include <limits>

#include "base/check.h"
#include "common/status.h"

namespace paceline::cuda {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                           cudaEnableDefault, &found),
          "looking up cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) {
      throw DeviceError("the driver has no cuTensorMapEncodeTiled; it is older than CUDA 12.0");
    }
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

// Rank: the number of dimensions, the innermost first; pitch: bytes, without the innermost one.
template <size_t kRank>
CUtensorMap encode(CUtensorMapDataType type, const void* data,
                   const std::array<cuuint64_t, kRank>& extent,
                   const std::array<cuuint64_t, kRank - 1>& pitch,
                   const std::array<cuuint32_t, kRank>& box, CUtensorMapSwizzle swizzle) {
  CUtensorMap map;
  std::array<cuuint32_t, kRank> steps;
  steps.fill(1);
  const CUresult status =
      encode_tiled()(&map, type, kRank, const_cast<void*>(data), extent.data(), pitch.data(),
                     box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  PACELINE_CHECK(status == CUDA_SUCCESS, "tensor map of [", extent[1], ", ", extent[0], "] pitch ",
                 pitch[0], " at ", data, ": CUresult ", static_cast<int>(status));
  return map;
}

}  // namespace

CUtensorMap tensor_map(const void* data, int32_t rows, int32_t columns, int64_t stride,
                       int32_t box_rows) {
  constexpr cuuint32_t kBoxColumns = 64;
  return encode<2>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data,
                   {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)},
                   {static_cast<cuuint64_t>(stride) * 2},
                   {kBoxColumns, static_cast<cuuint32_t>(box_rows)}, CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap stage_map(const void* data, const StageBoxes<3>& boxes) {
  return encode<3>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, boxes.extent, boxes.pitch, boxes.box,
                   CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap stage_map(const void* data, const StageBoxes<4>& boxes) {
  return encode<4>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, boxes.extent, boxes.pitch, boxes.box,
                   CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap byte_map(const void* data, int32_t matrices, int64_t stride, int32_t rows,
                     int64_t row_bytes, int32_t box_rows, int32_t box_bytes) {
  return encode<3>(CU_TENSOR_MAP_DATA_TYPE_UINT8, data,
                   {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(rows),
                    static_cast<cuuint64_t>(matrices)},
                   {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(stride)},
                   {static_cast<cuuint32_t>(box_bytes), static_cast<cuuint32_t>(box_rows), 1},
                   box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap packed_map(const void* data, const StageBoxes<3>& boxes) {
  static_assert(kPackedWordBytes == sizeof(uint64_t));
  return encode<3>(CU_TENSOR_MAP_DATA_TYPE_UINT64, data, boxes.extent, boxes.pitch, boxes.box,
                   CU_TENSOR_MAP_SWIZZLE_NONE);
}

CUtensorMap paged_map(const void* data, int64_t block_bytes, int32_t block_size, int32_t heads,
                      int32_t head_dim, int32_t box_tokens) {
  constexpr cuuint32_t kBoxColumns = 64;
  constexpr cuuint64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
  const cuuint64_t head_bytes = static_cast<cuuint64_t>(head_dim) * 2;
  return encode<4>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data,
                   {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(heads),
                    static_cast<cuuint64_t>(block_size), kMaxBlocks},
                   {head_bytes, head_bytes * static_cast<cuuint64_t>(heads),
                    static_cast<cuuint64_t>(block_bytes)},
                   {kBoxColumns, 1, static_cast<cuuint32_t>(box_tokens), 1},
                   CU_TENSOR_MAP_SWIZZLE_128B);
}

int32_t paged_box_tokens(int32_t block_size, int32_t chunk) {
  if (block_size % chunk == 0) return chunk;
  return block_size % 8 == 0 && chunk % block_size == 0 ? block_size : 0;
}

}  // namespace paceline::cuda
