// SPDX-License-Identifier: Apache-2.0
// The CUDA backend below the engine: row invariance of whole forward passes, captured graphs
// against eager calls, and an iteration that neither allocates nor waits. Skipped without a GPU,
// unless PACELINE_REQUIRE_GPU=1.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <utility>

#include "common/device_calls.h"
#include "support/gpu.h"
#include "support/invariance.h"
#include "support/jobs.h"
#include "support/tiny_models.h"
#include "wire/batch_shape.h"
#include "wire/sequence_result.h"

namespace {

std::atomic<int64_t> num_host_allocations = 0;

}  // namespace

// After inlining the compiler pairs our operators with its own and warns.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

// Counts every allocation of the process, for NothingAllocatesAndNothingWaits.
void* operator new(std::size_t bytes) {
  ++num_host_allocations;
  if (void* data = std::malloc(bytes > 0 ? bytes : 1)) return data;
  throw std::bad_alloc();
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace paceline {
namespace {

using testing::by_chunks;
using testing::by_windows;
using testing::DirectOptions;
using testing::DirectRunner;
using testing::expect_same_bits;
using testing::make_gemma4;
using testing::make_mixture;
using testing::random_tokens;
using testing::same_logprobs;
using testing::seed_from_env;
using testing::tiny_model;
using testing::TinyModel;
using testing::Trace;

class Cuda : public testing::GpuTest {};

TinyModel small_shape(std::mt19937_64& random, bool is_mixture = false) {
  TinyModel shape{.hidden = 64, .head_dim = 64, .intermediate = 96, .windows = {8, 0, 200}};
  shape.is_gemma = random() % 2 == 0;
  shape.num_kv_heads = std::array{1, 2, 4}[random() % 3];
  shape.has_bias = random() % 3 == 0;
  if (random() % 3 == 0) shape.head_dim = 128;
  if (random() % 6 == 0) shape.head_dim = 256;
  if (is_mixture) {
    make_mixture(shape, random);
  } else if (random() % 3 == 0) {
    make_gemma4(shape, random);
  }
  return shape;
}

TEST_F(Cuda, SameBitsOnEveryPath) {
  const uint64_t first_seed = seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 12; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const DType dtype = seed % 4 == 0 ? DType::kFloat32 : DType::kBFloat16;
    const bool is_mixture = seed % 3 == 0;
    const auto model =
        tiny_model(small_shape(random, is_mixture), seed, 0, 0, dtype, Device::kCuda);
    const auto length = static_cast<int32_t>(260 + random() % 60);  // across attention chunks
    const std::vector<int32_t> tokens = random_tokens(random, length, 64);
    DirectOptions options;
    options.max_model_len = 512;
    const Trace reference = by_chunks(model, tokens, {length}, options, 0, random);

    std::vector<int32_t> chunks;
    for (int32_t left = length; left > 0;) {
      chunks.push_back(static_cast<int32_t>(1 + random() % std::min(left, 90)));
      left -= chunks.back();
    }
    expect_same_bits(by_chunks(model, tokens, chunks, options, 0, random), reference);
    expect_same_bits(by_chunks(model, tokens, {length - 129, 129}, options, 5, random), reference);
    for (const int32_t k : {0, 1, 3, 4, 16}) {
      expect_same_bits(by_windows(model, tokens, 30, k, options), reference);
    }
    options.block_size = 8;
    const Trace small = by_windows(model, tokens, 17, 3, options);
    ASSERT_EQ(small.logits, reference.logits);
    if (HasFailure()) return;
  }
}

// Two devices get the same random traffic, one captured, one eager. The rows of a mixture choose
// other experts in every iteration.
TEST_F(Cuda, GraphEqualsEager) {
  const uint64_t first_seed = seed_from_env(1);
  constexpr int32_t kSlots = 9;
  constexpr int32_t kMaxLen = 384;
  int64_t num_compared = 0;
  int64_t num_rated = 0;
  int64_t num_rerouted = 0;
  using Cell = std::pair<DraftDriver, bool>;
  for (const auto& [driver, is_mixture] : {Cell{DraftDriver::kUnrolled, false},
                                           {DraftDriver::kReplay, false},
                                           {DraftDriver::kWhile, false},
                                           {DraftDriver::kUnrolled, true},
                                           {DraftDriver::kWhile, true}}) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(driver);
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed) + (is_mixture ? " mixture" : ""));
    std::mt19937_64 random(seed);
    TinyModel shape = small_shape(random, is_mixture);
    if (is_mixture) shape.num_experts = 40;
    const auto target = tiny_model(shape, seed, 0, 0, DType::kBFloat16, Device::kCuda);
    const size_t num_layers = shape.windows.size();
    shape.windows = {40, 0};
    const auto draft = tiny_model(shape, seed, 0.02f, seed + 1, DType::kBFloat16, Device::kCuda);
    DirectOptions options;
    options.max_seqs = kSlots;
    options.max_verify_rows = 256;
    options.max_model_len = kMaxLen;
    options.num_draft_tokens = 1 + static_cast<int32_t>(random() % 5);
    options.pool_bytes = 64 << 20;
    options.max_logprobs = 7;
    options.driver = driver;
    DirectRunner captured(target, draft, options);
    options.driver = DraftDriver::kEager;
    DirectRunner eager(target, draft, options);
    const int32_t width = options.num_draft_tokens + 1;
    enum class State { kFree, kDecoding };
    std::vector<State> states(kSlots, State::kFree);
    int64_t last_hit = 0;
    for (int iteration = 0; iteration < 400; ++iteration) {
      std::vector<int32_t> batch;
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        if (states[slot] == State::kFree && random() % 8 == 0) {
          const std::vector<int32_t> prompt =
              random_tokens(random, static_cast<int32_t>(1 + random() % 20), 64);
          const auto limit = static_cast<int32_t>(prompt.size() + 1 + random() % 300);
          const double temperature = random() % 2 == 0 ? 0.0 : 0.9;
          const uint64_t noise = random();
          const int32_t num_logprobs = static_cast<int32_t>(noise % 9) - 1;
          const int32_t top_k = noise % 2 == 0 ? 5 : 0;
          for (DirectRunner* direct : {&captured, &eager}) {
            if (direct->has_sequence(slot)) direct->stop(slot);
            direct->start(slot, prompt, limit, temperature, noise);
            direct->sequence(slot).sampling.logprobs = num_logprobs;
            direct->sequence(slot).sampling.top_k = top_k;
            direct->plan(slot, RowKind::kPrefillFinal, 0, static_cast<int32_t>(prompt.size()));
          }
          states[slot] = State::kDecoding;
          batch.push_back(slot);
        } else if (states[slot] == State::kDecoding && random() % 10 != 0) {
          for (DirectRunner* direct : {&captured, &eager}) {
            direct->plan(slot, RowKind::kDecode, 0, width);
          }
          batch.push_back(slot);
        }
      }
      if (batch.empty()) continue;
      captured.run();
      eager.run();
      for (size_t i = 0; i < batch.size(); ++i) {
        const SequenceResult a = captured.result(static_cast<int32_t>(i));
        const SequenceResult b = eager.result(static_cast<int32_t>(i));
        ASSERT_EQ(std::memcmp(&a, &b, sizeof(a)), 0) << "row " << i << " iteration " << iteration;
        const std::vector<TokenLogprob> said = captured.logprobs_of_row(i);
        ASSERT_TRUE(same_logprobs({said}, {eager.logprobs_of_row(i)}))
            << "row " << i << " iteration " << iteration;
        num_rated += said.empty() ? 0 : 1;
        if (a.outcome != SequenceOutcome::kRunning) states[captured.slot_of_row(i)] = State::kFree;
        ++num_compared;
      }
      const ExpertCounts counts = captured.runner().experts(captured.last_batch().iteration)[0];
      const ExpertCounts of_eager = eager.runner().experts(eager.last_batch().iteration)[0];
      ASSERT_EQ(counts.layers, is_mixture ? static_cast<int64_t>(num_layers) : 0);
      ASSERT_EQ(counts.layers, of_eager.layers);
      ASSERT_EQ(counts.experts_hit, of_eager.experts_hit);
      num_rerouted += counts.experts_hit != last_hit ? 1 : 0;
      last_hit = counts.experts_hit;
      const IterationBuffers& ca = captured.buffers();
      const IterationBuffers& ea = eager.buffers();
      const int64_t num_drafts = int64_t{kSlots} * options.num_draft_tokens;
      ASSERT_EQ(captured.download(ca.sequences.known_len, kSlots),
                eager.download(ea.sequences.known_len, kSlots));
      ASSERT_EQ(captured.download(ca.sequences.draft_tokens, num_drafts),
                eager.download(ea.sequences.draft_tokens, num_drafts));
      ASSERT_EQ(captured.download(ca.sequences.draft_len, kSlots),
                eager.download(ea.sequences.draft_len, kSlots));
    }
    ASSERT_EQ(captured.pool_bytes(), eager.pool_bytes());
  }
  EXPECT_GT(num_compared, 5000);
  EXPECT_GT(num_rated, 1600);
  EXPECT_GT(num_rerouted, 400);  // of 800 iterations of mixtures
}

TEST_F(Cuda, NothingAllocatesAndNothingWaits) {
  std::mt19937_64 random(5);
  TinyModel shape{.hidden = 64, .head_dim = 64, .intermediate = 96, .windows = {8, 0}};
  const auto dense = tiny_model(shape, 3, 0, 0, DType::kBFloat16, Device::kCuda);
  make_mixture(shape, random);
  const auto mixture = tiny_model(shape, 3, 0, 0, DType::kBFloat16, Device::kCuda);
  using Cell = std::pair<DraftDriver, std::shared_ptr<const Model>>;
  for (const auto& [driver, model] : {Cell{DraftDriver::kUnrolled, dense},
                                      {DraftDriver::kReplay, dense},
                                      {DraftDriver::kWhile, dense},
                                      {DraftDriver::kUnrolled, mixture}}) {
    SCOPED_TRACE("driver " + std::to_string(static_cast<int>(driver)) +
                 (model == mixture ? " mixture" : ""));
    DirectOptions options;
    options.driver = driver;
    options.max_seqs = 5;
    options.max_model_len = 1024;
    options.num_draft_tokens = 3;
    options.pool_bytes = 64 << 20;
    options.max_logprobs = 20;
    DirectRunner direct(model, model, options);
    for (int32_t slot = 0; slot < 5; ++slot) {
      direct.start(slot, random_tokens(random, 12, 64), 1000);
      direct.sequence(slot).sampling.logprobs = 5 * slot - 1;
      direct.plan(slot, RowKind::kPrefillFinal, 0, 12);
    }
    direct.run();
    Runner& runner = direct.runner();
    const auto decode = [&] {
      for (int32_t slot = 0; slot < 5; ++slot) direct.plan(slot, RowKind::kDecode, 0, 4);
      direct.run();
    };
    for (int i = 0; i < 10; ++i) decode();
    // The same batch again and again, in every entry of the ring.
    const Batch first = direct.last_batch();
    std::vector<std::byte> staged;
    const auto bytes = static_cast<size_t>([&] {
      StagedInputs unplaced{};
      return place_inputs(first.capacity, InputSide::kRing, nullptr, unplaced);
    }());
    staged.resize(bytes);
    first.inputs.counts->num_resets = 0;
    first.inputs.counts->num_table_writes = 0;
    std::memcpy(staged.data(), first.inputs.counts, bytes);
    Batch batch = first;
    const auto launch_again = [&] {
      ++batch.iteration;
      runner.bind(batch);
      std::memcpy(static_cast<void*>(batch.inputs.counts), staged.data(), bytes);
      runner.launch(batch);
      runner.wait(batch.iteration);
    };
    size_t free_before = 0;
    size_t total = 0;
    ASSERT_EQ(cudaMemGetInfo(&free_before, &total), cudaSuccess);
    cuda::DeviceCalls& calls = cuda::device_calls();
    const int64_t allocations = calls.num_allocations;
    const int64_t synchronizations = calls.num_synchronizations;
    const int64_t host_allocations = num_host_allocations;
    for (int i = 0; i < 100; ++i) {
      launch_again();
    }
    EXPECT_EQ(num_host_allocations, host_allocations);
    EXPECT_EQ(calls.num_allocations, allocations);
    EXPECT_EQ(calls.num_synchronizations, synchronizations);
    size_t free_after = 0;
    ASSERT_EQ(cudaMemGetInfo(&free_after, &total), cudaSuccess);
    EXPECT_EQ(free_after, free_before);
  }
}

}  // namespace
}  // namespace paceline
