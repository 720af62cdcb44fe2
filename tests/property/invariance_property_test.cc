// SPDX-License-Identifier: Apache-2.0
// Row invariance: a row's logits and KV have the same bits in every way of computing it: alone or
// in a batch, in one prefill or chunks cut anywhere, in a verify window, with any block size, and
// after having been recomputed.

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "support/invariance.h"
#include "support/seed.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::by_chunks;
using testing::DirectOptions;
using testing::expect_same_bits;
using testing::expect_same_bits_on_every_path;
using testing::make_gemma4;
using testing::make_latent;
using testing::make_mixture;
using testing::random_tokens;
using testing::tiny_model;
using testing::TinyModel;
using testing::Trace;

TEST(RowInvariance, SameBitsOnEveryPath) {
  const uint64_t first_seed = testing::seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 28; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    TinyModel shape{.windows = {8, 0, 40}};
    shape.is_gemma = seed % 2 == 0;
    shape.has_bias = seed % 3 == 0;
    shape.has_sinks = seed % 4 < 2;
    shape.num_kv_heads = seed % 2 == 0 ? 1 : 4;
    std::mt19937_64 switches(seed);
    if (seed - first_seed >= 22) {
      make_latent(shape, switches);
    } else if (seed - first_seed >= 16) {
      make_mixture(shape, switches);
    } else if (seed - first_seed >= 10) {
      make_gemma4(shape, switches);
    }
    const DType dtype = seed % 3 == 0 ? DType::kBFloat16 : DType::kFloat32;
    const auto model = tiny_model(shape, seed, 0, 0, dtype);
    const auto length = static_cast<int32_t>(140 + random() % 40);  // across attention chunks
    const std::vector<int32_t> tokens = random_tokens(random, length, 64);

    const DirectOptions options;
    const Trace reference = expect_same_bits_on_every_path(model, tokens, options, {8}, random);
    expect_same_bits(by_chunks(model, tokens, {length - 129, 129}, options, 5, random), reference);
    expect_same_bits(by_chunks(model, tokens, std::vector<int32_t>(length, 1), options, 31, random),
                     reference);
  }
}

}  // namespace
}  // namespace paceline
