// SPDX-License-Identifier: Apache-2.0

// What a Model says of itself.

#include <paceline/model.h>

#include "base/boundary.h"
#include "device/device_memory.h"
#include "model/weights/model_impl.h"

namespace paceline {

int64_t model_weight_bytes(const Model& model) {
  int64_t bytes = model.weights.arena.bytes();
  for (const auto& rank : model.ranks) bytes += rank->weights.arena.bytes();
  return bytes;
}

DType model_weight_dtype(const Model& model) { return model.weights.dtype; }

int32_t model_vocab_size(const Model& model) { return model.config.vocab_size; }

int32_t model_max_position(const Model& model) { return model.config.max_position; }

Device model_device(const Model& model) { return model.device; }

std::vector<std::byte> model_weight_arena(const Model& model) {
  return at_boundary([&] {
    std::vector<std::byte> bytes(static_cast<size_t>(model_weight_bytes(model)));
    std::byte* to = bytes.data();
    const auto download = [&](const DeviceBuffer& arena) {
      arena.memory().download(to, arena.data(), arena.bytes());
      to += arena.bytes();
    };
    if (model.ranks.empty()) download(model.weights.arena);
    for (const auto& rank : model.ranks) download(rank->weights.arena);
    return bytes;
  });
}

}  // namespace paceline
