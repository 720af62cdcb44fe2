// SPDX-License-Identifier: Apache-2.0
#include "model/dummy_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/float_types.h"
#include "base/philox.h"
#include "model/weight_copy.h"

namespace paceline {
namespace {

constexpr float kDummyStd = 0.02f;
constexpr int64_t kQuantiles = 1 << 16;

// The middle of each of 2^16 equally likely slices of a normal distribution. A draw is then a look
// up by 16 random bits: no logarithm, no cosine, and a 27B model takes seconds.
[[nodiscard]] std::vector<float> normal_quantiles(float std) {
  std::vector<float> quantiles(kQuantiles);
  const double norm = 1 / std::sqrt(2 * std::acos(-1.0));
  double z = -4.5;  // left of the first
  for (int64_t i = 0; i < kQuantiles / 2; ++i) {
    const double p = (static_cast<double>(i) + 0.5) / kQuantiles;
    // Newton's method from the slice before: the distribution function is convex here, so that
    // every step after the first comes down to the root without passing it.
    for (int step = 0; step < 8; ++step) {
      z -= (0.5 * std::erfc(-z / std::sqrt(2.0)) - p) / (norm * std::exp(-z * z / 2));
    }
    quantiles[i] = static_cast<float>(z) * std;
    quantiles[kQuantiles - 1 - i] = -quantiles[i];
  }
  return quantiles;
}

// Elements are a function of (seed, salt, index) alone, so any split over threads gives the same.
template <class Value>
void draw(const CpuContext& ctx, const std::vector<Value>& quantiles, uint64_t seed, uint32_t salt,
          int64_t elements, std::byte* out) {
  constexpr int64_t kPerBlock = 8;  // 128 random bits
  const int64_t num_blocks = (elements + kPerBlock - 1) / kPerBlock;
  for_rows(ctx, num_blocks, kPerBlock, [&](int64_t block) {
    const NoiseKey key = {.seed = seed,
                          .stream = NoiseStream::kSynthetic,
                          .position = static_cast<uint32_t>(block >> 32),
                          .salt = salt};
    std::array<Value, kPerBlock> values;
    size_t at = 0;
    for (uint32_t word : philox(key, static_cast<uint32_t>(block))) {
      values[at++] = quantiles[word & 0xffffu];
      values[at++] = quantiles[word >> 16];
    }
    const int64_t begin = block * kPerBlock;
    std::memcpy(out + begin * static_cast<int64_t>(sizeof(Value)), values.data(),
                static_cast<size_t>(std::min(kPerBlock, elements - begin)) * sizeof(Value));
  });
}

void fill(float value, int64_t elements, std::byte* out, DeviceMemory& memory) {
  const std::vector<float> values(static_cast<size_t>(elements), value);
  memory.upload(out, values.data(), elements * static_cast<int64_t>(sizeof(value)));
}

}  // namespace

void fill_dummy_weights(const CpuContext& ctx, uint64_t seed,
                        std::vector<NamedWeight>& named_weights, const Model& model) {
  const std::vector<float> quantiles = normal_quantiles(kDummyStd);
  std::vector<uint16_t> bf16_quantiles(quantiles.size());
  std::transform(quantiles.begin(), quantiles.end(), bf16_quantiles.begin(), float_to_bf16);
  for (size_t i = 0; i < named_weights.size(); ++i) {
    NamedWeight& named = named_weights[i];
    if (named.is_filled || named.is_optional) continue;
    std::byte* out = model.weights.arena.data() + named.offset;
    DeviceMemory& memory = model.weights.arena.memory();
    const bool is_bf16 = named.dtype == DType::kBFloat16;
    const auto salt = static_cast<uint32_t>(i);
    switch (named.dummy) {
      case DummyKind::kNormal:
        if (!memory.is_host_memory()) {
          const void* table = is_bf16 ? static_cast<const void*>(bf16_quantiles.data())
                                      : static_cast<const void*>(quantiles.data());
          memory.fill_from_quantiles(out, named.elements(), named.dtype, seed, salt, table);
        } else if (is_bf16) {
          draw(ctx, bf16_quantiles, seed, salt, named.elements(), out);
        } else {
          draw(ctx, quantiles, seed, salt, named.elements(), out);
        }
        break;
      case DummyKind::kNeutralNorm:
        fill(1 - model.config.norm_weight_offset, named.elements(), out, memory);
        break;
      case DummyKind::kOne:
        fill(1, named.elements(), out, memory);
        break;
      case DummyKind::kZero:
        fill(0, named.elements(), out, memory);
        break;
      case DummyKind::kSpreadTokens: {
        std::vector<int32_t> tokens(static_cast<size_t>(named.elements()));
        for (size_t token = 0; token < tokens.size(); ++token) {
          tokens[token] = static_cast<int32_t>(static_cast<int64_t>(token) *
                                               model.config.vocab_size / named.elements());
        }
        memory.upload(out, tokens.data(), named.elements() * 4);
        break;
      }
    }
    named.is_filled = true;
  }
}

}  // namespace paceline
