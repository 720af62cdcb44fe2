// SPDX-License-Identifier: Apache-2.0
// The whole engine on a GPU on models like DeepSeek-V4: every kind of layer, with the sizes that
// the fast kernels take and with others, in bfloat16 and in fp8 and mxfp4. Skipped without a GPU,
// unless PACELINE_REQUIRE_GPU=1.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include <paceline/executor.h>

#include "support/compressed_models.h"
#include "support/engine_checks.h"
#include "support/gpu.h"

namespace paceline {
namespace {

using testing::compressed_model;
using testing::CompressedModel;

class CudaCompressed : public testing::GpuTest {};

// Heads and index keys as DeepSeek-V4 has them; few are chosen, so that choices matter.
CompressedModel large_heads(bool has_formats) {
  return {.ratios = {0, 4, 128, 4},
          .hidden = 256,
          .num_qo_heads = 64,
          .head_dim = 512,
          .rope_head_dim = 64,
          .q_lora_rank = 128,
          .window = 128,
          .index_heads = 64,
          .index_dim = 128,
          .top_k = 24,
          .num_experts = 32,
          .has_formats = has_formats};
}

std::shared_ptr<const Model> on_gpu(const CompressedModel& shape, uint64_t seed) {
  return compressed_model(shape, seed, DType::kBFloat16, Device::kCuda);
}

ExecutorOptions options_of(int32_t k) { return testing::gpu_engine_options(k, 16, 512 << 20); }

TEST_F(CudaCompressed, SelfDraftAcceptsEverything) {
  const auto expect_of = [](const CompressedModel& shape, const std::vector<int32_t>& drafts) {
    testing::expect_self_draft_accepts_everything(on_gpu(shape, 7), drafts, 300, 200, options_of);
  };
  expect_of(large_heads(/*has_formats=*/false), {3});
  expect_of(large_heads(/*has_formats=*/true), {1, 16});
  expect_of({}, {16, 3});
}

TEST_F(CudaCompressed, DraftsChangeNothing) {
  const CompressedModel shape = large_heads(/*has_formats=*/true);
  CompressedModel layer = shape;
  layer.ratios = {0};
  layer.is_mtp_layer = true;
  testing::expect_drafts_change_nothing(on_gpu(shape, 3), {on_gpu(layer, 4), on_gpu(shape, 5)},
                                        {1, 3, 8, 16}, 400, 200, options_of);
}

// The smallest model for which this many iterations end in time under memcheck, which looks for
// what once crashed an engine: more than two MTP tokens with metadata that depends on positions.
TEST_F(CudaCompressed, AThousandIterationsOfFiveMtpTokens) {
  const auto layer = on_gpu({.ratios = {0}, .is_mtp_layer = true}, 4);
  testing::expect_a_thousand_iterations(on_gpu({.ratios = {0, 4, 128}}, 3), layer, 5, 20,
                                        options_of);
}

}  // namespace
}  // namespace paceline
