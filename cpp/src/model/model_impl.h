// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/model.h>

#include "model/decoder_config.h"
#include "model/weights.h"

namespace paceline {

// The definition of the opaque Model of the public headers.
class Model {
 public:
  DecoderConfig config;
  Device device = Device::kCpu;  // device that holds the weights
  DecoderWeights weights;
  int32_t default_draft_tokens = 0;  // of a drafter: its folder's default k; 0: none is known
};

}  // namespace paceline
