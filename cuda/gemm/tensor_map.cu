// SPDX-License-Identifier: Apache-2.0
#include "gemm/tensor_map.h"

#include <cuda_runtime.h>

#include <array>

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

}  // namespace

CUtensorMap tensor_map(const void* data, int32_t rows, int32_t columns, int64_t stride,
                       int32_t box_rows) {
  constexpr cuuint32_t kBoxColumns = 64;
  CUtensorMap map;
  const std::array<cuuint64_t, 2> extent = {static_cast<cuuint64_t>(columns),
                                            static_cast<cuuint64_t>(rows)};
  const std::array<cuuint64_t, 1> pitch = {static_cast<cuuint64_t>(stride) * 2};
  const std::array<cuuint32_t, 2> box = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  const std::array<cuuint32_t, 2> steps = {1, 1};
  const CUresult status =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data),
                     extent.data(), pitch.data(), box.data(), steps.data(),
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  PACELINE_CHECK(status == CUDA_SUCCESS, "tensor map of [", rows, ", ", columns, "] stride ",
                 stride, " at ", data, ": CUresult ", static_cast<int>(status));
  return map;
}

}  // namespace paceline::cuda
