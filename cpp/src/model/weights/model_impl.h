// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/model.h>

#include <mutex>

#include "model/description/decoder_config.h"
#include "model/weights/weights.h"

namespace paceline {

// The users of a model's weights. Executors read them all the time; an update excludes them.
struct ModelUse {
  std::mutex mutex;
  int32_t num_executors = 0;
  bool is_updating = false;
};

// The definition of the opaque Model of the public headers.
class Model {
 public:
  DecoderConfig config;
  Device device = Device::kCpu;  // device that holds the weights
  DecoderWeights weights;
  int32_t default_draft_tokens = 0;  // of a drafter: its folder's default k; 0: none is known
  mutable ModelUse use;
};

}  // namespace paceline
