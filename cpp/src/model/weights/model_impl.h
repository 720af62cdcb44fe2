// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/model.h>

#include <memory>
#include <mutex>
#include <vector>

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
  // Of a model on GPUs that split_model chose: the model of each, which has its rank's part of the
  // weights, or a copy of them. Then `weights` has no memory.
  std::vector<std::shared_ptr<const Model>> ranks;
  GpuShare share = GpuShare::kCopy;  // what each of several GPUs has
  int32_t gpu = 0;                   // that holds the weights of a rank
  int32_t default_draft_tokens = 0;  // of a drafter: its folder's default k; 0: none is known
  mutable ModelUse use;
};

}  // namespace paceline
