// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "device/packed_tiles.h"

namespace paceline::cuda {

// DeviceMemory::pack on a stream.
void pack_rows(cudaStream_t stream, const PackedTensor& to, int64_t first, int64_t count,
               const std::byte* from);

}  // namespace paceline::cuda
