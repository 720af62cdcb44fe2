// SPDX-License-Identifier: Apache-2.0
// Weights of ranks that have memory of their own: they are the rows of the whole model, however
// they arrive; each rank reads its own bytes only, through a buffer of a fixed size; updates.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>
#include <paceline/model.h>

#include "base/overloaded.h"
#include "model/weights/rank_model.h"
#include "model/weights/rank_threads.h"
#include "model/weights/split_model.h"
#include "model/weights/visit_weights.h"
#include "support/compressed_models.h"
#include "support/described_model.h"
#include "support/errors.h"
#include "support/format_tensors.h"
#include "support/raw_models.h"
#include "support/recurrent_models.h"
#include "support/seed.h"
#include "support/staged_memory.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using testing::format_tensors;
using testing::FormatTensors;
using ::testing::HasSubstr;
using testing::message_of;
using testing::StagedMemory;
using testing::TinyModel;
using testing::value_in_memory;

struct Layout {
  std::string name;
  Device device = Device::kCpu;
  std::vector<RankMemory> memories;
};

// Row-major weights in host memory, and packed ones behind staging buffers.
std::vector<Layout> layouts(int32_t num_ranks) {
  static StagedMemory staged;
  const auto count = static_cast<size_t>(num_ranks);
  std::vector<Layout> all(2);
  all[0] = {.name = "row-major", .memories = {count, RankMemory{.memory = &host_memory()}}};
  all[1] = {.name = "packed",
            .device = Device::kCuda,
            .memories = {count, RankMemory{.memory = &staged}}};
  return all;
}

bool can_share(const Model& whole, int32_t num_ranks) {
  try {
    check_ranks(whole, num_ranks);
    return true;
  } catch (const Unsupported&) {
    return false;
  }
}

void put_pieces(ModelBuilder& builder, const FormatTensors& tensors) {
  for (const auto& [name, t] : tensors) {
    builder.put(name, t.dtype, t.shape, [&](int64_t first, std::span<std::byte> to) {
      std::memcpy(to.data(), t.bytes.data() + first, to.size());
    });
  }
}

// Every element is followed by two others.
void put_strided(ModelBuilder& builder, const FormatTensors& tensors) {
  for (const auto& [name, t] : tensors) {
    const auto size = static_cast<size_t>(dtype_bytes(t.dtype));
    std::string apart(t.bytes.size() * 3, '\xff');
    for (size_t i = 0; i < t.bytes.size() / size; ++i) {
      std::memcpy(apart.data() + 3 * i * size, t.bytes.data() + i * size, size);
    }
    std::vector<int64_t> strides(t.shape.size());
    int64_t step = 3;
    for (size_t axis = t.shape.size(); axis-- > 0; step *= t.shape[axis]) strides[axis] = step;
    builder.put(name, t.dtype, t.shape, strides, apart.data());
  }
}

// The matrices of a model, in the order of its weights.
struct Matrices {
  Matrices(const DecoderConfig& config, const DecoderWeights& weights) {
    for_each_linear(
        config, weights,
        Overloaded{
            [&](const Linear& one, const LinearShape&) { linears.push_back(&one); },
            [&](const ExpertLinears& all, const LinearShape&) { mixtures.push_back(&all); }});
  }
  std::vector<const Linear*> linears;
  std::vector<const ExpertLinears*> mixtures;
};

std::vector<int32_t> row_numbers(const std::vector<LinearRange>& ranges, int32_t count) {
  std::vector<int32_t> rows;
  if (ranges.empty()) {
    for (int32_t row = 0; row < count; ++row) rows.push_back(row);
  }
  for (const LinearRange& range : ranges) {
    for (int32_t i = 0; i < range.count; ++i) rows.push_back(range.first + i);
  }
  return rows;
}

void expect_rows(const WeightMatrix& own, const WeightMatrix& view,
                 const std::vector<int32_t>& rows, int64_t bias_row, const float* own_bias,
                 const float* view_bias) {
  ASSERT_EQ(own.n, std::ssize(rows));
  if (view.data == nullptr) return;
  EXPECT_EQ(own.has_exact_scales, view.has_exact_scales);
  for (int32_t row = 0; row < own.n; ++row) {
    const int32_t from = rows[static_cast<size_t>(row)];
    const WeightMatrix expected = rows_of(view, {.first = from, .count = 1});
    for (int64_t col = 0; col < own.k; ++col) {
      ASSERT_EQ(value_in_memory(own, row, col), value_in_memory(expected, 0, col))
          << "row " << row << " of the rank, " << from << " of its view; column " << col;
    }
    if (view_bias != nullptr) {
      ASSERT_EQ(own_bias[row], view_bias[bias_row + from]);
    }
    if (own.has_order) {
      ASSERT_EQ(std::memcmp(own.order, view.order, static_cast<size_t>(own.k) * 4), 0);
    }
  }
}

// The matrices of a rank in memory of its own have the rows of rank_model, which points into the
// whole model.
void expect_rows_of_view(const Model& whole, const Model& own, const RankShare& share) {
  const auto view = rank_model(whole, share);
  const Matrices of_own(whole.config, own.weights);
  const Matrices of_view(whole.config, view->weights);
  ASSERT_EQ(of_own.linears.size(), of_view.linears.size());
  for (size_t i = 0; i < of_own.linears.size(); ++i) {
    const Linear& from = *of_view.linears[i];
    const Linear& to = *of_own.linears[i];
    expect_rows(to.weight, from.weight, row_numbers(from.rows, from.weight.n), 0, to.bias,
                from.bias);
  }
  for (size_t i = 0; i < of_own.mixtures.size(); ++i) {
    const ExpertLinears& from = *of_view.mixtures[i];
    const ExpertLinears& to = *of_own.mixtures[i];
    const std::vector<int32_t> rows = row_numbers(from.rows, from.weight.first.n);
    for (int64_t e = 0; e < from.weight.num_experts; ++e) {
      WeightMatrix matrix = from.weight.of(e);
      expect_rows(to.weight.of(e), matrix, rows, e * from.bias_stride,
                  to.bias == nullptr ? nullptr : to.bias + e * to.weight.first.n, from.bias);
    }
  }
}

// What follows from the values of scales.
void expect_same_facts(const Model& made, const Model& expected) {
  ASSERT_EQ(made.ranks.size(), expected.ranks.size());
  for (size_t rank = 0; rank < made.ranks.size(); ++rank) {
    const Matrices of_made(made.config, made.ranks[rank]->weights);
    const Matrices of_expected(made.config, expected.ranks[rank]->weights);
    for (size_t i = 0; i < of_made.linears.size(); ++i) {
      const WeightMatrix& matrix = of_made.linears[i]->weight;
      EXPECT_EQ(matrix.has_exact_scales, of_expected.linears[i]->weight.has_exact_scales);
      EXPECT_EQ(matrix.scale_dtype, of_expected.linears[i]->weight.scale_dtype);
    }
    for (size_t i = 0; i < of_made.mixtures.size(); ++i) {
      EXPECT_EQ(of_made.mixtures[i]->weight.first.scale_dtype,
                of_expected.mixtures[i]->weight.first.scale_dtype);
    }
  }
}

// A description, and its tensors or none: then it has dummy weights.
struct Case {
  std::string name;
  std::string json;
  FormatTensors tensors;
};

std::vector<Case> format_cases() {
  const std::string transposed =
      testing::mixture_config({{R"("gate_up": {"format": "mxfp4"}, "down": {"format": "mxfp4"}}},)",
                                R"("transposed": true}},)"}});
  const std::string shared_int4 =
      testing::int4_config({{R"("group": 160, "has_zeros": true,)", R"("group": 160,)"}});
  std::vector<Case> cases = {
      {"mixture", testing::mixture_config(), {}},   {"transposed", transposed, {}},
      {"int4", testing::int4_config(), {}},         {"int4 that ranks can share", shared_int4, {}},
      {"nvfp4", testing::nvfp4_config(), {}},       {"latent", testing::latent_config(), {}},
      {"deepseek", testing::deepseek_config(), {}}, {"tiny", testing::tiny_config(), {}},
      {"shared", testing::shared_config(), {}}};
  for (Case& one : cases) one.tensors = format_tensors(one.json, 3);
  cases.push_back({"exact scales", testing::mixture_config(), {}});
  cases.back().tensors = format_tensors(testing::mixture_config(), 3, DType::kBFloat16,
                                        DType::kFloat32, /*has_exact_scales=*/true);
  return cases;
}

// Every way of loading gives ranks the same bytes, which are those of the whole model.
TEST(RankWeights, EveryWayOfPuttingGivesTheRowsOfTheWholeModel) {
  std::set<std::string> shared;
  for (const Case& one : format_cases()) {
    SCOPED_TRACE(one.name);
    ModelBuilder builder(one.json, DType::kBFloat16);
    put_all(builder, one.tensors);
    const auto whole = builder.finish();
    for (const int32_t num_ranks : {1, 2, 3, 4}) {
      for (const GpuShare share : {GpuShare::kPart, GpuShare::kCopy}) {
        if (share == GpuShare::kPart && !can_share(*whole, num_ranks)) continue;
        for (const Layout& layout : layouts(num_ranks)) {
          SCOPED_TRACE(layout.name + ", " + std::to_string(num_ranks) + " ranks");
          const auto split = split_over(*whole, layout.device, layout.memories, share);
          const std::vector<std::byte> expected = model_weight_arena(*split);
          for (const auto put : {put_pieces, testing::put_all, put_strided}) {
            ModelBuilder ranked =
                builder_over(one.json, DType::kBFloat16, layout.device, layout.memories, share);
            put(ranked, one.tensors);
            const auto made = ranked.finish();
            EXPECT_EQ(model_weight_arena(*made), expected);
            expect_same_facts(*made, *split);
          }
          if (layout.device == Device::kCuda || share == GpuShare::kCopy) continue;
          if (num_ranks > 1) shared.insert(one.name);
          for (int32_t rank = 0; rank < num_ranks; ++rank) {
            SCOPED_TRACE("rank " + std::to_string(rank));
            expect_rows_of_view(*whole, *split->ranks[static_cast<size_t>(rank)],
                                {.rank = rank, .num_ranks = num_ranks});
          }
        }
      }
    }
  }
  // The others have three heads, or zero points in a mixture, and are copied only.
  EXPECT_THAT(shared,
              ::testing::ElementsAre("deepseek", "exact scales", "int4 that ranks can share",
                                     "latent", "mixture", "nvfp4", "transposed"));
}

std::vector<Case> family_cases(std::mt19937_64& random) {
  TinyModel plain = {.num_qo_heads = 12, .num_kv_heads = 6, .head_dim = 8, .windows = {8, 0}};
  plain.has_bias = true;
  plain.has_sinks = true;
  TinyModel mixture = plain;
  testing::make_mixture(mixture, random);
  TinyModel gemma = plain;
  testing::make_gemma4(gemma, random);
  return {{"plain", tiny_config_json(plain), {}},
          {"mixture", tiny_config_json(mixture), {}},
          {"gemma4", tiny_config_json(gemma), {}},
          {"recurrent", testing::recurrent_json({.layers = "rfg"}), {}},
          {"compressed", testing::compressed_json({}), {}},
          {"compressed formats",
           testing::compressed_json({.q_lora_rank = 64, .has_formats = true}),
           {}},
          {"int4", testing::int4_config(), {}},
          {"latent", testing::latent_config(), {}}};
}

// Puts what a model on the CPU has, tensor by tensor, where this is what its tensors would be.
// Returns whether that is so for all of them.
bool put_of(const Model& model, ModelBuilder& builder) {
  const WholeLayout layout(model.config, model.weights.dtype);
  for (const NamedWeight& named : layout.named_weights) {
    if (named.is_optional) continue;
    if (named.kind == WeightKind::kFp8Scales || named.kind == WeightKind::kInt4Scales ||
        named.kind == WeightKind::kTransposed) {
      return false;
    }
    const std::byte* const data = model.weights.arena.data() + named.offset;
    builder.put(named.name, named.dtype, named.dims(), [&](int64_t first, std::span<std::byte> to) {
      std::memcpy(to.data(), data + first, to.size());
    });
  }
  return true;
}

// Each rank draws its own elements of dummy weights, also where rows have an odd width. The tensors
// of every family give the same when they are read.
TEST(RankWeights, DummyWeightsAreThoseOfTheWholeModel) {
  const uint64_t seed = testing::seed_from_env(1);
  SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::vector<Case> cases = family_cases(random);
  cases.push_back({"odd", testing::tiny_config(), {}});
  int32_t num_shared = 0;
  int32_t num_read = 0;
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      ModelBuilder builder(one.json, dtype);
      builder.fill_dummy(seed);
      const auto whole = builder.finish();
      for (const int32_t num_ranks : {2, 3, 4}) {
        const bool is_shared = can_share(*whole, num_ranks);
        num_shared += is_shared && num_ranks > 1 ? 1 : 0;
        const GpuShare share = is_shared ? GpuShare::kPart : GpuShare::kCopy;
        for (const Layout& layout : layouts(num_ranks)) {
          SCOPED_TRACE(layout.name + ", " + std::to_string(num_ranks) + " ranks");
          ModelBuilder ranked =
              builder_over(one.json, dtype, layout.device, layout.memories, share);
          ranked.fill_dummy(seed);
          const auto split = split_over(*whole, layout.device, layout.memories, share);
          EXPECT_EQ(model_weight_arena(*ranked.finish()), model_weight_arena(*split));
          ModelBuilder read = builder_over(one.json, dtype, layout.device, layout.memories, share);
          if (!put_of(*whole, read)) continue;
          EXPECT_EQ(model_weight_arena(*read.finish()), model_weight_arena(*split));
          num_read += is_shared ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GE(num_shared, 12);
  EXPECT_GE(num_read, 24);
}

// What is read of each tensor is what the ranks have of it, and it goes to the staging buffer of a
// rank at once, so that host memory does not grow with the model.
TEST(RankWeights, EachRankReadsItsOwnBytesThroughABoundedBuffer) {
  for (const Case& one : format_cases()) {
    SCOPED_TRACE(one.name);
    WholeLayout whole(parse_decoder_config(one.json), DType::kBFloat16);
    for (const int32_t num_ranks : {1, 2, 4}) {
      if (!can_share(whole.model, num_ranks)) continue;
      SCOPED_TRACE(std::to_string(num_ranks) + " ranks");
      StagedMemory memory;
      const std::vector<RankMemory> memories(static_cast<size_t>(num_ranks), {.memory = &memory});
      std::vector<int64_t> expected(whole.named_weights.size());
      std::mutex mutex;
      RankedWeights(whole.model, Device::kCuda, memories, GpuShare::kPart)
          .for_each_rank([&](size_t, const CpuContext&, const std::vector<RankTensor>& tensors,
                             const DeviceBuffer&) {
            const std::scoped_lock lock(mutex);
            for (size_t i = 0; i < tensors.size(); ++i) expected[i] += tensors[i].named.elements();
          });
      ModelBuilder builder =
          builder_over(one.json, DType::kBFloat16, Device::kCuda, memories, GpuShare::kPart);
      int64_t num_streamed = 0;
      for (size_t i = 0; i < whole.named_weights.size(); ++i) {
        const NamedWeight& named = whole.named_weights[i];
        SCOPED_TRACE(named.name);
        const testing::FormatTensor& t = one.tensors.at(named.name);
        std::atomic<int64_t> read{0};
        std::atomic<int64_t> outside{0};  // of the staging buffer
        builder.put(named.name, t.dtype, t.shape, [&](int64_t first, std::span<std::byte> to) {
          std::memcpy(to.data(), t.bytes.data() + first, to.size());
          read += std::ssize(to);
          if (!StagedMemory::is_staged(to)) outside += std::ssize(to);
        });
        const bool is_streamed =
            named.kind == WeightKind::kNumbers || named.kind == WeightKind::kCodes ||
            named.kind == WeightKind::kInt4Codes || named.kind == WeightKind::kMxfp4Scales ||
            named.kind == WeightKind::kTransposed;
        if (!is_streamed || named.needs_finite) {  // its values are checked, so it is read once
          EXPECT_EQ(read, std::ssize(t.bytes));
          continue;
        }
        EXPECT_EQ(read, expected[i] * dtype_bytes(t.dtype));
        num_streamed += read;
        if (t.dtype == named.dtype && named.kind != WeightKind::kTransposed) {
          EXPECT_EQ(outside, 0);
        }
      }
      static_cast<void>(builder.finish());
      EXPECT_EQ(memory.num_staging_buffers(), num_ranks);
      if (one.name == "mixture") {
        EXPECT_GT(num_streamed, num_ranks * 8 * int64_t{StagedMemory::kStagingBytes});
      }
    }
  }
}

TEST(RankWeights, UpdatesReachEveryRank) {
  int32_t num_updated = 0;
  for (const Case& one : format_cases()) {
    SCOPED_TRACE(one.name);
    const FormatTensors other = format_tensors(one.json, 4, DType::kBFloat16, DType::kFloat32,
                                               /*has_exact_scales=*/one.name == "exact scales");
    for (const int32_t num_ranks : {1, 2, 4}) {
      for (const Layout& layout : layouts(num_ranks)) {
        SCOPED_TRACE(layout.name + ", " + std::to_string(num_ranks) + " ranks");
        const WholeLayout whole(parse_decoder_config(one.json), DType::kBFloat16);
        const bool is_shared = can_share(whole.model, num_ranks);
        const GpuShare share = is_shared ? GpuShare::kPart : GpuShare::kCopy;
        const auto made = [&](const FormatTensors& tensors) {
          ModelBuilder builder =
              builder_over(one.json, DType::kBFloat16, layout.device, layout.memories, share);
          put_all(builder, tensors);
          return builder.finish();
        };
        const auto model = made(one.tensors);
        const auto expected = made(other);
        const std::vector<std::byte> before = model_weight_arena(*model);
        const std::vector<NamedTensor> named = testing::named_tensors(other);
        const std::vector<NamedTensor> incomplete(named.begin() + 1, named.end());
        const ModelUpdate wrong = {.model = model, .tensors = incomplete};
        EXPECT_THAT(message_of<InvalidArgument>([&] { update_models({&wrong, 1}); }),
                    HasSubstr("are missing"));
        EXPECT_EQ(model_weight_arena(*model), before);
        const ModelUpdate update = {.model = model, .tensors = named};
        update_models({&update, 1});
        EXPECT_EQ(model_weight_arena(*model), model_weight_arena(*expected));
        EXPECT_NE(model_weight_arena(*model), before);
        num_updated += is_shared && num_ranks > 1 ? 1 : 0;
      }
    }
  }
  EXPECT_GE(num_updated, 8);
}

TEST(RankWeights, AReaderThatFailsEndsPutAndTheTensorMayBePutAgain) {
  const std::string json = testing::latent_config();
  const FormatTensors tensors = format_tensors(json, 3);
  const Layout layout = layouts(2)[1];
  ModelBuilder builder =
      builder_over(json, DType::kBFloat16, layout.device, layout.memories, GpuShare::kPart);
  const auto& [name, t] = *tensors.find("lm_head.weight");
  const auto put = [&] {
    builder.put(name, t.dtype, t.shape,
                [](int64_t, std::span<std::byte>) { throw ModelFileError("the file is gone"); });
  };
  EXPECT_THAT(message_of<ModelFileError>(put), HasSubstr("the file is gone"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { static_cast<void>(builder.finish()); }),
              HasSubstr("are missing"));
  put_pieces(builder, tensors);
  ModelBuilder other =
      builder_over(json, DType::kBFloat16, layout.device, layout.memories, GpuShare::kPart);
  put_all(other, tensors);
  EXPECT_EQ(model_weight_arena(*builder.finish()), model_weight_arena(*other.finish()));
}

TEST(RankWeights, RefusesGpusThatCannotBeRanks) {
  const auto refused = [](const std::vector<int32_t>& gpus) {
    return message_of<InvalidArgument>(
        [&] { ModelBuilder(testing::latent_config(), DType::kBFloat16, gpus, GpuShare::kPart); });
  };
  EXPECT_THAT(refused({}), HasSubstr("gpus has 0 numbers; allowed: 1 to 8"));
  EXPECT_THAT(refused({3, 1, 3}), HasSubstr("gpus has 3 twice"));
  const Layout layout = layouts(4)[0];
  EXPECT_THAT(message_of<Unsupported>([&] {
                static_cast<void>(builder_over(testing::latent_config(), DType::kBFloat16,
                                               layout.device, layout.memories, GpuShare::kPart));
              }),
              HasSubstr("allowed for this model: 1, 2, 3"));
}

TEST(RankThreads, RunOnEveryRankAndRethrowTheFirstFailure) {
  RankThreads threads(3);
  std::vector<std::thread::id> ids(3);
  threads.run([&](size_t rank, const CpuContext&) { ids[rank] = std::this_thread::get_id(); });
  EXPECT_NE(ids[0], ids[1]);
  EXPECT_NE(ids[1], ids[2]);
  const auto failing = [&](size_t rank, const CpuContext&) {
    EXPECT_EQ(ids[rank], std::this_thread::get_id());
    if (rank > 0) throw InvalidArgument("rank " + std::to_string(rank));
  };
  EXPECT_EQ(message_of<InvalidArgument>([&] { threads.run(failing); }), "rank 1");
  std::atomic<int32_t> num_calls{0};
  threads.run([&](size_t, const CpuContext&) { ++num_calls; });
  EXPECT_EQ(num_calls, 3);
}

}  // namespace
}  // namespace paceline
