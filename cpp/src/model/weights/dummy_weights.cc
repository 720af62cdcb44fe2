// SPDX-License-Identifier: Apache-2.0
#include "model/weights/dummy_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/float_types.h"
#include "base/philox.h"
#include "model/weights/arena_target.h"
#include "model/weights/weight_copy.h"

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

// The scale of dummy fp8 weights: no power of two, as in checkpoints, and 448 times it is beyond
// all quantiles.
constexpr float kFp8Scale = 0.0002f;
constexpr float kExactFp8Scale = 0x1p-12f;  // 0.00024, where scales are powers of two
constexpr uint8_t kMxfp4Scale = 127 - 6;    // 2^-6: the elements are up to 6 * 2^-6 = 0.094
constexpr float kNvfp4Scale = 0x1p-6f;      // the same, so that elements are drawn alike

// The element of a format with this many magnitudes, below the sign bit, that is nearest to
// `value`.
[[nodiscard]] uint8_t nearest_element(float value, int num_magnitudes, float (*decode)(uint8_t)) {
  int nearest = 0;
  for (int i = 1; i < num_magnitudes; ++i) {
    const auto distance = [&](int bits) {
      return std::fabs(decode(static_cast<uint8_t>(bits)) - std::fabs(value));
    };
    if (distance(i) < distance(nearest)) nearest = i;
  }
  return static_cast<uint8_t>(std::signbit(value) ? nearest + num_magnitudes : nearest);
}

// A table of bytes of weights that are about as the quantiles.
[[nodiscard]] std::vector<uint8_t> fp8_quantiles(const std::vector<float>& quantiles) {
  std::vector<uint8_t> bytes(quantiles.size());
  std::transform(quantiles.begin(), quantiles.end(), bytes.begin(), [](float value) {
    constexpr int kMagnitudes = 0x7f;  // without NaN
    const uint8_t element = nearest_element(value / kFp8Scale, kMagnitudes, e4m3_to_float);
    return element < kMagnitudes ? element : static_cast<uint8_t>(element - kMagnitudes + 0x80);
  });
  return bytes;
}

// A byte has two elements, each of which depends on eight of the sixteen bits that select it.
[[nodiscard]] std::vector<uint8_t> mxfp4_quantiles(const std::vector<float>& quantiles) {
  std::vector<uint8_t> bytes(quantiles.size());
  const auto element = [&](size_t slice) {
    const float value = quantiles[slice * 256 + 128];
    return nearest_element(value / e8m0_to_float(kMxfp4Scale), /*num_magnitudes=*/8, e2m1_to_float);
  };
  std::array<uint8_t, 256> elements;
  for (size_t slice = 0; slice < elements.size(); ++slice) elements[slice] = element(slice);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(elements[i % 256] | elements[i / 256] << 4);
  }
  return bytes;
}

// The scale of dummy int4 weights: the codes are up to 8 * 2^-7 = 0.0625. It is a float16, as in
// most published checkpoints.
constexpr float kInt4Scale = 0x1p-7f;
constexpr uint16_t kInt4ScaleBits = (15 - 7) << 10;

[[nodiscard]] std::vector<uint8_t> int4_quantiles(const std::vector<float>& quantiles) {
  std::vector<uint8_t> bytes(quantiles.size());
  const auto code = [&](size_t slice) {
    const float steps = std::nearbyint(quantiles[slice * 256 + 128] / kInt4Scale);
    return static_cast<uint8_t>(std::clamp(static_cast<int>(steps) + kInt4Zero, 0, 15));
  };
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(code(i % 256) | code(i / 256) << 4);
  }
  return bytes;
}

constexpr int64_t kDrawnTogether = 8;  // elements of 128 random bits

// Draws elements [first, first + count). They are a function of (seed, salt, index) alone, so any
// split over threads or ranks gives the same.
template <class Value>
void draw(const CpuContext& ctx, const std::vector<Value>& quantiles, uint64_t seed, uint32_t salt,
          int64_t first, int64_t count, std::byte* out) {
  constexpr int64_t kPerBlock = kDrawnTogether;
  const int64_t first_block = first / kPerBlock;
  const int64_t num_blocks = (first + count + kPerBlock - 1) / kPerBlock - first_block;
  for_rows(ctx, num_blocks, kPerBlock, [&](int64_t i) {
    const int64_t block = first_block + i;
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
    const int64_t begin = std::max(block * kPerBlock, first);
    const int64_t end = std::min((block + 1) * kPerBlock, first + count);
    std::memcpy(out + (begin - first) * static_cast<int64_t>(sizeof(Value)),
                values.data() + (begin - block * kPerBlock),
                static_cast<size_t>(end - begin) * sizeof(Value));
  });
}

template <class Value>
void fill(Value value, int64_t elements, std::byte* out, DeviceMemory& memory) {
  const std::vector<Value> values(static_cast<size_t>(elements), value);
  memory.upload(out, values.data(), elements * static_cast<int64_t>(sizeof(value)));
}

template <class IdOf>
void fill_ids(const NamedWeight& named, std::byte* out, DeviceMemory& memory, const IdOf& id_of) {
  std::vector<int32_t> ids(static_cast<size_t>(named.elements()));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>(id_of(static_cast<int64_t>(i)));
  }
  memory.upload(out, ids.data(), named.elements() * 4);
}

// Draws the elements of a weight from quantiles in its dtype; of a rank, its rows.
template <class Value>
void draw_weight(const CpuContext& ctx, const std::vector<Value>& quantiles, uint64_t seed,
                 uint32_t salt, const NamedWeight& named, const DeviceBuffer& arena,
                 const RankRows& rows) {
  const ArenaTarget target(named, arena);
  DeviceMemory& memory = arena.memory();
  const int64_t elements = named.elements();
  if (memory.is_host_memory()) {
    return for_elements(rows, elements, [&](int64_t from, int64_t to, int64_t count) {
      draw(ctx, quantiles, seed, salt, from, count, target.at(to));
    });
  }
  bool is_aligned = true;
  for_elements(rows, elements, [&](int64_t from, int64_t, int64_t) {
    is_aligned = is_aligned && from % kDrawnTogether == 0;
  });
  if (!is_aligned) {  // rows of an odd width, as no published model has them
    std::vector<Value> values(static_cast<size_t>(elements));
    for_elements(rows, elements, [&](int64_t from, int64_t to, int64_t count) {
      draw(ctx, quantiles, seed, salt, from, count,
           reinterpret_cast<std::byte*>(values.data() + to));
    });
    return copy_elements(ctx, reinterpret_cast<const std::byte*>(values.data()), named, arena);
  }
  const DeviceBuffer table(memory, std::ssize(quantiles) * dtype_bytes(named.dtype), "quantiles");
  memory.upload(table.data(), quantiles.data(), table.bytes());
  for_elements(rows, elements, [&](int64_t from, int64_t to, int64_t all) {
    const int64_t most = target.is_packed() ? target.elements_in(memory.scratch().size()) : all;
    for (int64_t first = 0; first < all; first += most) {
      const int64_t count = std::min(most, all - first);
      target.write(to + first, count, [&](std::byte* out) {
        memory.fill_from_quantiles(out, from + first, count, named.dtype, seed, salt, table.data());
      });
    }
  });
}

// Gives all elements of a weight, which may be packed, the same value.
template <class Value>
void fill_elements(const CpuContext& ctx, Value value, const NamedWeight& named,
                   const DeviceBuffer& arena) {
  const std::vector<Value> values(static_cast<size_t>(named.elements()), value);
  copy_elements(ctx, reinterpret_cast<const std::byte*>(values.data()), named, arena);
}

}  // namespace

void fill_dummy_weights(const CpuContext& ctx, uint64_t seed, const DecoderConfig& config,
                        std::vector<NamedWeight>& named_weights, const DeviceBuffer& arena,
                        std::span<const RankRows> rows) {
  const std::vector<float> quantiles = normal_quantiles(kDummyStd);
  std::vector<uint16_t> bf16_quantiles(quantiles.size());
  std::transform(quantiles.begin(), quantiles.end(), bf16_quantiles.begin(), float_to_bf16);
  // Tables of bytes, made for the first weight that needs one.
  std::vector<uint8_t> fp8_bytes;
  std::vector<uint8_t> mxfp4_bytes;
  std::vector<uint8_t> int4_bytes;
  const RankRows whole;
  const auto fill_matrix = [&](NamedWeight& named, uint32_t salt, std::byte* out) {
    const auto draw_from = [&](const auto& table) {
      draw_weight(ctx, table, seed, salt, named, arena, rows.empty() ? whole : rows[salt]);
    };
    switch (named.kind) {
      case WeightKind::kIds:
        PACELINE_CHECK(false, "ids are no matrix");
      case WeightKind::kNumbers:
      case WeightKind::kTransposed:
        return named.dtype == DType::kBFloat16 ? draw_from(bf16_quantiles) : draw_from(quantiles);
      case WeightKind::kInt4Codes:
        if (int4_bytes.empty()) int4_bytes = int4_quantiles(quantiles);
        return draw_from(int4_bytes);
      case WeightKind::kCodes:
        if (named.dtype == DType::kUInt8) {
          if (mxfp4_bytes.empty()) mxfp4_bytes = mxfp4_quantiles(quantiles);
          return draw_from(mxfp4_bytes);
        }
        if (fp8_bytes.empty()) fp8_bytes = fp8_quantiles(quantiles);
        return draw_from(fp8_bytes);
      case WeightKind::kMxfp4Scales:
        return fill_elements(ctx, kMxfp4Scale, named, arena);
      case WeightKind::kNvfp4Scales:
        return fill_elements(ctx, kNvfp4Scale, named, arena);
      case WeightKind::kFp8Scales:
        named.has_exact_scales = named.needs_exact_scales;
        return fill(named.needs_exact_scales ? kExactFp8Scale : kFp8Scale, named.arena_elements(),
                    out, arena.memory());
      case WeightKind::kInt4Scales:
        named.scale_dtype = DType::kFloat16;
        return fill_elements(ctx, kInt4ScaleBits, named, arena);
      case WeightKind::kInt4Zeros:
        return fill_elements(ctx, static_cast<uint8_t>(kInt4Zero), named, arena);
      case WeightKind::kInt4Order:
        return fill_ids(named, out, arena.memory(),
                        [&](int64_t index) { return index % named.dims().back(); });
    }
  };
  for (size_t i = 0; i < named_weights.size(); ++i) {
    NamedWeight& named = named_weights[i];
    if (named.is_filled || named.is_optional) continue;
    std::byte* out = arena.data() + named.offset;
    DeviceMemory& memory = arena.memory();
    const auto salt = static_cast<uint32_t>(i);
    switch (named.dummy) {
      case DummyKind::kNormal:
        fill_matrix(named, salt, out);
        break;
      case DummyKind::kNeutralNorm:
        fill(1.0f - config.norm_weight_offset, named.elements(), out, memory);
        break;
      case DummyKind::kOne:
        fill(1.0f, named.elements(), out, memory);
        break;
      case DummyKind::kZero:
        fill(0.0f, named.elements(), out, memory);
        break;
      case DummyKind::kSpreadIds:
        fill_ids(named, out, memory,
                 [&](int64_t index) { return index * config.vocab_size / named.elements(); });
        break;
      case DummyKind::kCycledIds:
        fill_ids(named, out, memory, [&](int64_t index) { return index % named.num_experts; });
        break;
    }
    named.is_filled = true;
  }
}

}  // namespace paceline
