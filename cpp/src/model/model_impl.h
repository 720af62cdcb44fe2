// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/model.h>

#include "model/decoder_config.h"
#include "model/weights.h"

namespace paceline {

// What the public, opaque Model is.
class Model {
 public:
  DecoderConfig config;
  Device device = Device::kCpu;  // where the weights lie
  DecoderWeights weights;
};

}  // namespace paceline
