// SPDX-License-Identifier: Apache-2.0
// RankedRunner: ranks that fail, hang, are launched side by side, or exchange what they should not.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "engine/engine.h"
#include "model/description/kv_shapes.h"
#include "model/weights/rank_model.h"
#include "ops/gather.h"
#include "runner/cpu_runner.h"
#include "runner/ranked_runner.h"
#include "support/errors.h"
#include "support/host_batch.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::tiny_model;

// Of an engine without drafts: 8 sequences of up to 256 tokens.
EngineOptions small_engine(const Model& model, double hang_timeout_s) {
  return {.shape = {.max_seqs = 8,
                    .max_verify_rows = 256,
                    .max_logit_rows = 256,
                    .first_rows = FirstRows::kNone},
          .scheduler = {.max_num_seqs = 8,
                        .max_num_batched_tokens = 256,
                        .prefill_chunk_size = 256,
                        .max_score_rows = 16,
                        .max_in_flight = 2},
          .max_model_len = 256,
          .vocab_size = model.config.vocab_size,
          .hang_timeout_s = hang_timeout_s};
}

// An engine whose ranks a test may change before they run.
struct RankedEngine {
  explicit RankedEngine(int32_t num_ranks, double hang_timeout_s,
                        const std::function<void(int32_t, CpuRunner&)>& plant)
      : model(tiny_model({.num_qo_heads = 4, .num_kv_heads = 4, .windows = {8, 0}}, 5)) {
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      parts.push_back(rank_model(*model, {.rank = rank, .num_ranks = num_ranks}));
    }
    layout = plan_kv_layout(kv_layer_shapes(parts[0]->config), {}, 8, DType::kFloat32, 8 << 20);
    const EngineOptions options = small_engine(*model, hang_timeout_s);
    const CpuRunnerOptions of_rank = {
        .runner = {.iteration = {.shape = options.shape, .max_model_len = 256}}};
    auto group = std::make_unique<RankGroup>(num_ranks, exchanged_width(parts[0]->config) * 4,
                                             hang_timeout_s);
    auto runner = std::make_unique<RankedRunner>(
        std::move(group), /*max_in_flight=*/2, [&](const RankHandle& ranks) {
          CpuRunnerOptions own = of_rank;
          own.runner.ranks = ranks;
          auto made = std::make_unique<CpuRunner>(parts[static_cast<size_t>(ranks.rank)], nullptr,
                                                  layout, own);
          plant(ranks.rank, *made);
          return made;
        });
    engine = std::make_unique<Engine>(options, layout, std::move(runner));
  }

  // Adds requests and polls until all have ended or the engine fails; returns its error.
  std::string error() {
    for (int32_t i = 0; i < 5; ++i) {
      Request request{.prompt = {1, 2, 3 + i}, .sampling = {.temperature = 0, .max_tokens = 20}};
      static_cast<void>(engine->add_request(std::move(request)));
    }
    return message_of<Error>([&] {
      for (int32_t left = 5; left > 0;) {
        for (const RequestEvent& event : engine->poll(20)) {
          left -= event.finish_reason != FinishReason::kNone ? 1 : 0;
        }
      }
    });
  }

  std::shared_ptr<const Model> model;
  std::vector<std::shared_ptr<const Model>> parts;
  KvLayout layout;
  std::unique_ptr<Engine> engine;
};

// Calls change(params) on every recorded exchange of one rank.
std::function<void(int32_t, CpuRunner&)> on_gathers(
    int32_t of_rank, const std::function<void(GatherColumnsParams&)>& change) {
  return [=](int32_t rank, CpuRunner& runner) {
    if (rank != of_rank) return;
    for (Program* const program : runner.programs()) {
      for (GatherColumnsParams* p : program->params_of(gather_columns)) change(*p);
    }
  };
}

int64_t num_threads_now() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

TEST(RankedRunner, AFailingRankEndsTheEngineWithOneError) {
  const int64_t threads_before = num_threads_now();
  for (const int32_t failing : {0, 1, 2}) {
    // Columns beyond the last one.
    const auto plant = [&](GatherColumnsParams& p) {
      p.columns.first[static_cast<size_t>(failing)] = p.columns.total() + 1;
    };
    RankedEngine ranked(4, /*hang_timeout_s=*/20, on_gathers(failing, plant));
    const std::string named = "rank " + std::to_string(failing) + " of 4: ";
    EXPECT_THAT(ranked.error(), AllOf(HasSubstr(named), HasSubstr("columns ")));
    // Every later call has the same error.
    EXPECT_THAT(message_of<Error>([&] { static_cast<void>(ranked.engine->poll(0)); }),
                HasSubstr(named));
  }
  RankedEngine sound(4, /*hang_timeout_s=*/0, [](int32_t, CpuRunner&) {});
  EXPECT_EQ(sound.error(), "");
  sound.engine.reset();
  EXPECT_EQ(num_threads_now(), threads_before);
}

TEST(RankedRunner, AHangingRankIsNamedWithinTheTimeout) {
  const int64_t threads_before = num_threads_now();
  for (const int32_t hanging : {0, 1}) {
    // It waits in a group of its own, whose other ranks do not come before its limit.
    RankGroup elsewhere(2, 1 << 12, /*timeout_s=*/1.5);
    const auto start = std::chrono::steady_clock::now();
    RankedEngine ranked(2, /*hang_timeout_s=*/0.3, on_gathers(hanging, [&](GatherColumnsParams& p) {
                          p.ranks.group = &elsewhere;
                        }));
    const std::string error = ranked.error();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    EXPECT_THAT(error, AllOf(HasSubstr("rank " + std::to_string(hanging) + " of 2"),
                             HasSubstr("hang_timeout_s is 0.3")));
    EXPECT_LT(waited.count(), 1.4);
    ranked.engine.reset();
  }
  EXPECT_EQ(num_threads_now(), threads_before);
}

// A rank that computes nothing.
class IdleRank : public Runner {
 public:
  explicit IdleRank(const RankHandle& ranks, const BatchShape& shape = {})
      : ranks_(ranks), memory_(shape) {}
  void bind(Batch& batch) override {
    batch.inputs = memory_->inputs;
    batch.capacity = memory_->capacity;
  }
  void wait(int64_t) override {}
  int64_t completed() override { return -1; }
  std::span<const SequenceResult> results(int64_t) override { return {}; }
  Timing timing(int64_t) override { return {}; }
  void poison(GroupId, BlockId) override {}
  std::map<std::string, int64_t, std::less<>> workspace_bytes() const override { return {}; }

 protected:
  void meet() const { ranks_.group->meet(ranks_.rank); }
  [[nodiscard]] int32_t rank() const { return ranks_.rank; }

 private:
  RankHandle ranks_;
  testing::HostBatch memory_;
};

// A rank that comes to one exchange in each iteration, or never.
class FakeRank final : public IdleRank {
 public:
  FakeRank(const RankHandle& ranks, bool comes) : IdleRank(ranks), comes_(comes) {}
  ~FakeRank() override {
    if (thread_.joinable()) thread_.join();
  }
  void launch(const Batch&) override {
    if (!comes_) return;
    thread_ = std::thread([this] { message_ = message_of<DeviceError>([this] { meet(); }); });
  }

 private:
  bool comes_;
  std::string message_;
  std::thread thread_;
};

TEST(RankedRunner, AnEngineEndsWhileARankIsInAnIterationThatAnotherHasNotBegun) {
  const auto start = std::chrono::steady_clock::now();
  {
    RankedRunner runner(std::make_unique<RankGroup>(2, 1 << 10, /*timeout_s=*/20),
                        /*max_in_flight=*/2, [](const RankHandle& ranks) {
                          return std::make_unique<FakeRank>(ranks, /*comes=*/ranks.rank == 0);
                        });
    Batch batch;
    runner.bind(batch);
    *batch.inputs.counts = {};
    runner.launch(batch);
  }
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
  EXPECT_LT(waited.count(), 10);
}

// A rank whose launch blocks until all ranks launch, as that of a GPU with a full queue does.
class BlockingRank final : public IdleRank {
 public:
  using IdleRank::IdleRank;
  void launch(const Batch&) override { meet(); }
  std::vector<KernelTime> launch_traced(const Batch& batch) override {
    if (batch.iteration == 1) throw OutOfMemory("the planted cause");
    meet();
    return {{.name = "rank " + std::to_string(rank())}};
  }
};

TEST(RankedRunner, RanksWithThreadsAreLaunchedAndTracedSideBySide) {
  const int64_t threads_before = num_threads_now();
  {
    RankedRunner runner(
        std::make_unique<RankGroup>(3, 1 << 10, /*timeout_s=*/20),
        /*max_in_flight=*/2,
        [](const RankHandle& ranks) { return std::make_unique<BlockingRank>(ranks); },
        /*has_threads=*/true);
    Batch batch;
    runner.bind(batch);
    *batch.inputs.counts = {};
    runner.launch(batch);
    runner.wait(0);
    const std::vector<KernelTime> times = runner.launch_traced(batch);
    ASSERT_EQ(times.size(), 1U);
    EXPECT_EQ(times[0].name, "rank 0");
    // A rank that fails ends the others.
    batch.iteration = 1;
    EXPECT_THAT(message_of<DeviceError>([&] { static_cast<void>(runner.launch_traced(batch)); }),
                HasSubstr("of 3: the planted cause"));
    EXPECT_THAT(message_of<DeviceError>([&] { runner.wait(1); }), HasSubstr("of 3: the planted"));
  }
  EXPECT_EQ(num_threads_now(), threads_before);
}

// Of two such ranks the second hangs: its launch does not return before it is let go.
class HangingRank final : public IdleRank {
 public:
  HangingRank(const RankHandle& ranks, const BatchShape& shape, std::atomic<bool>& is_let_go)
      : IdleRank(ranks, shape), is_let_go_(is_let_go) {}
  void launch(const Batch&) override {
    while (rank() == 1 && !is_let_go_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void wait(int64_t) override { throw DeviceError("it was let go"); }  // without results

 private:
  std::atomic<bool>& is_let_go_;
};

TEST(RankedRunner, AThreadThatHangsInALaunchEndsTheEngineWithinTheTimeout) {
  const int64_t threads_before = num_threads_now();
  std::atomic<bool> is_let_go = false;
  const auto model = tiny_model({.windows = {0}}, 5);
  const EngineOptions options = small_engine(*model, /*hang_timeout_s=*/0.3);
  const KvLayout layout =
      plan_kv_layout(kv_layer_shapes(model->config), {}, 8, DType::kFloat32, 8 << 20);
  {
    Engine engine(options, layout,
                  std::make_unique<RankedRunner>(
                      std::make_unique<RankGroup>(2, 1 << 10, options.hang_timeout_s),
                      /*max_in_flight=*/2,
                      [&](const RankHandle& ranks) {
                        return std::make_unique<HangingRank>(ranks, options.shape, is_let_go);
                      },
                      /*has_threads=*/true));
    static_cast<void>(engine.add_request(
        {.prompt = {1, 2, 3}, .sampling = {.temperature = 0, .max_tokens = 20}}));
    const auto start = std::chrono::steady_clock::now();
    const std::string error = message_of<Error>([&] {
      while (std::chrono::steady_clock::now() - start < std::chrono::seconds(10)) {
        static_cast<void>(engine.poll(20));
      }
    });
    EXPECT_THAT(error, HasSubstr("hang_timeout_s"));
    is_let_go = true;
  }
  EXPECT_EQ(num_threads_now(), threads_before);
}

// The logits of other ranks are exchanged where more than a draw reads them, and only there.
TEST(RankedRunner, PlainRowsExchangeTheirWinnersAndOthersTheirLogits) {
  int64_t num_winners = 0;
  int64_t num_logits = 0;
  const RankedEngine ranked(2, /*hang_timeout_s=*/0, [&](int32_t, CpuRunner& runner) {
    for (Program* const program : runner.programs()) {
      if (program->num_nodes() == 0) continue;
      const auto of_winners = program->params_of(gathered_draw);
      const auto of_logits = program->params_of(draw);
      const auto winners = std::ssize(of_winners);
      int64_t logits = 0;
      for (const GatherColumnsParams* p : program->params_of(gather_columns)) {
        logits += !of_logits.empty() && p->y == of_logits.front()->logits ? 1 : 0;
      }
      EXPECT_EQ(winners + logits, 1);
      EXPECT_EQ(winners + std::ssize(of_logits), 1);
      num_winners += winners;
      num_logits += logits;
    }
  });
  // As many captured programs are for batches that process logits as for others.
  EXPECT_GT(num_winners, 0);
  EXPECT_EQ(num_winners, num_logits);
}

TEST(RankedRunner, PlantedFaultsGoRed) {
  const auto tokens_of = [](const std::function<void(int32_t, CpuRunner&)>& plant) {
    RankedEngine ranked(2, /*hang_timeout_s=*/0, plant);
    static_cast<void>(ranked.engine->add_request(
        {.prompt = {1, 2, 3}, .sampling = {.temperature = 1, .seed = 3, .max_tokens = 30}}));
    std::vector<int32_t> tokens;
    for (bool has_ended = false; !has_ended;) {
      for (const RequestEvent& event : ranked.engine->poll(20)) {
        tokens.insert(tokens.end(), event.token_ids.begin(), event.token_ids.end());
        has_ended = event.finish_reason != FinishReason::kNone;
      }
    }
    return tokens;
  };
  const auto nothing = [](int32_t, CpuRunner&) {};
  const std::vector<int32_t> expected = tokens_of(nothing);
  EXPECT_EQ(tokens_of(nothing), expected);
  // Both ranks take the columns of rank 1 to begin one too early.
  const auto shift = [](int32_t, CpuRunner& runner) {
    for (Program* const program : runner.programs()) {
      for (GatherColumnsParams* p : program->params_of(gather_columns)) --p->columns.first[1];
      for (GatheredNormParams* p : program->params_of(gathered_norm)) --p->gather.columns.first[1];
    }
  };
  EXPECT_NE(tokens_of(shift), expected);
  // Only where a norm follows.
  const auto shift_normed = [](int32_t, CpuRunner& runner) {
    for (Program* const program : runner.programs()) {
      for (GatheredNormParams* p : program->params_of(gathered_norm)) --p->gather.columns.first[1];
    }
  };
  EXPECT_NE(tokens_of(shift_normed), expected);
  // Both ranks take the first id of rank 1 for one of rank 0, and do not draw it.
  const auto shift_ids = [](int32_t, CpuRunner& runner) {
    for (Program* const program : runner.programs()) {
      for (GatheredDrawParams* p : program->params_of(gathered_draw)) {
        p->draw.vocab_limit = p->columns.first[1];
      }
    }
  };
  EXPECT_NE(tokens_of(shift_ids), expected);
  // A rank that draws other tokens than the rest is seen at once.
  const auto differ = [](int32_t rank, CpuRunner& runner) {
    for (Program* const program : runner.programs()) {
      for (GatheredDrawParams* p : program->params_of(gathered_draw)) p->draw.tokens += rank;
    }
  };
  EXPECT_THAT(message_of<Error>([&] { static_cast<void>(tokens_of(differ)); }),
              HasSubstr("ranks 0 and 1 of 2 have drawn different tokens"));
}

}  // namespace
}  // namespace paceline
