// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "model/description/decoder_config.h"

namespace paceline {

// Refuses a model whose weights would take more than 2^60 bytes in float32 (InvalidArgument). Each
// weight counts as float32, whatever its format, with the padding of packed ones. So sums of the
// sizes of regions, with their alignment, fit int64.
void check_weight_bytes(const DecoderConfig& config);

// Throws Unsupported where a GPU has no kernels for a layer.
void check_on_gpu(const DecoderConfig& config);

}  // namespace paceline
