// SPDX-License-Identifier: Apache-2.0
#include "model/layers/parallel/config.h"

#include <array>

#include "model/description/config_reading.h"

namespace paceline {

ParallelMlp read_parallel(const Json& json, const DecoderConfig& config) {
  constexpr std::array<std::string_view, 2> kKeys = {"dense", "mixture"};
  json.check_keys(kKeys);
  const Json mixture = json.at("mixture");
  // The norms read one residual stream, and the dense MLP runs between norm and experts.
  if (config.streams.count > 1) mixture.refuse("no such key with streams");
  if (mixture.find("shared")) mixture.at("shared").refuse("no such key beside a dense MLP");
  return {.dense = read_dense(json.at("dense"), config.hidden),
          .mixture = read_mixture(mixture, config.hidden)};
}

}  // namespace paceline
