// SPDX-License-Identifier: Apache-2.0
// The checks can fail: they see faults that are planted in recorded programs and in the pool. Each
// test first shows that the sound engine passes the check which the fault then breaks.

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <set>

#include "engine/engine.h"
#include "model/description/kv_shapes.h"
#include "runner/cpu_runner.h"
#include "speculate/row_ops.h"
#include "support/acceptance.h"
#include "support/compressed_models.h"
#include "support/tiny_models.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

using testing::tiny_model;
using testing::TinyModel;

struct SelfDraft {
  explicit SelfDraft(int32_t k, int32_t lateness = 0, std::vector<int32_t> windows = {8, 0, 24},
                     int32_t kv_lora_rank = 0)
      : SelfDraft(
            tiny_model(TinyModel{.windows = std::move(windows), .kv_lora_rank = kv_lora_rank}, 5),
            k, lateness) {}

  SelfDraft(std::shared_ptr<const Model> of_model, int32_t k, int32_t lateness = 0)
      : model(std::move(of_model)) {
    layout = plan_kv_layout(kv_layer_shapes(model->config), kv_layer_shapes(model->config), 8,
                            DType::kFloat32, 8 << 20);
    const int32_t max_in_flight = std::max(2, lateness + 1);
    engine_options = {.shape = {.max_seqs = 8,
                                .max_verify_rows = 256,
                                .max_logit_rows = 256,
                                .num_draft_tokens = k,
                                .first_rows = FirstRows::kNewest},
                      .scheduler = {.max_num_seqs = 8,
                                    .max_num_batched_tokens = 256,
                                    .prefill_chunk_size = 256,
                                    .max_score_rows = 16,
                                    .num_draft_tokens = k,
                                    .max_in_flight = max_in_flight},
                      .max_model_len = 256,
                      .vocab_size = model->config.vocab_size};
    runner_options = {.runner = {.iteration = {.shape = engine_options.shape, .max_model_len = 256},
                                 .max_in_flight = max_in_flight},
                      .lateness = lateness};
  }

  std::unique_ptr<CpuRunner> runner() const {
    return std::make_unique<CpuRunner>(model, model, layout, runner_options);
  }

  std::shared_ptr<const Model> model;
  KvLayout layout;
  EngineOptions engine_options;
  CpuRunnerOptions runner_options;
};

// The acceptance rate of a model that drafts for itself: 1 unless something is stale.
double self_draft_acceptance(const SelfDraft& setup, const std::function<void(Program&)>& plant) {
  auto runner = setup.runner();
  for (Program* const program : runner->programs()) plant(*program);
  Engine engine(setup.engine_options, setup.layout, std::move(runner));
  return testing::acceptance_rate(engine, /*temperature=*/1.0);
}

void sound(Program&) {}

TEST(PlantedFault, SkippedAdvanceOfOneGroup) {
  // The last group is a sliding one and then a latent one.
  for (const SelfDraft& setup : {SelfDraft(6), SelfDraft(6, 0, {8, 24, 0}, 24)}) {
    EXPECT_EQ(self_draft_acceptance(setup, sound), 1.0);
    EXPECT_LT(
        self_draft_acceptance(setup,
                              [](Program& program) {
                                for (AdvanceParams* p : program.params_of(advance_draft_step)) {
                                  --p->num_groups;
                                }
                              }),
        1.0);
  }
}

TEST(PlantedFault, SkippedAdvanceOfAnyGroupOfCompressedAttention) {
  // Windows, and the tails and the entries of both kinds of compressors.
  const SelfDraft setup(testing::compressed_model({.ratios = {0, 4, 16}}, 5), 6);
  const std::vector<KvGroup>& groups = setup.layout.groups;
  ASSERT_EQ(groups.size(), 2 * 5u);
  EXPECT_EQ(self_draft_acceptance(setup, sound), 1.0);
  for (int32_t skipped = 0; skipped < 5; ++skipped) {
    EXPECT_LT(
        self_draft_acceptance(setup,
                              [&](Program& program) {
                                for (AdvanceParams* p : program.params_of(advance_draft_step)) {
                                  p->groups[skipped] = p->groups[--p->num_groups];
                                }
                              }),
        1.0)
        << kv_kind_name(groups[static_cast<size_t>(5 + skipped)].kind);
  }
}

// An entry that becomes visible one token early or late in draft steps alone.
TEST(PlantedFault, EntriesThatDraftStepsSeeTooEarlyOrTooLate) {
  const SelfDraft setup(testing::compressed_model({.ratios = {4, 16}}, 5), 6);
  for (const int32_t ratio : {3, 5}) {
    EXPECT_LT(
        self_draft_acceptance(setup,
                              [&](Program& program) {
                                for (AdvanceParams* p : program.params_of(advance_draft_step)) {
                                  for (AdvanceGroup& group : p->groups) {
                                    if (group.table.tokens_per_entry != 4) continue;
                                    group.table.tokens_per_entry = ratio;
                                  }
                                }
                              }),
        1.0);
  }
}

TEST(PlantedFault, SwappedBlockTables) {
  const SelfDraft setup(6);
  EXPECT_LT(self_draft_acceptance(setup,
                                  [](Program& program) {
                                    for (AdvanceParams* p : program.params_of(advance_draft_step)) {
                                      std::swap(p->groups[0].table, p->groups[1].table);
                                    }
                                  }),
            1.0);
}

TEST(PlantedFault, BakedStepIndex) {
  const SelfDraft setup(6);
  static int32_t baked = 1;
  EXPECT_LT(self_draft_acceptance(setup,
                                  [](Program& program) {
                                    for (StoreDraftParams* p : program.params_of(store_draft)) {
                                      p->current_draft_step = &baked;
                                    }
                                  }),
            1.0);
}

// Forwards every call and records which blocks each launched iteration may touch. Models with
// full attention only: their tables never shrink while a sequence runs.
class WatchingRunner final : public Runner {
 public:
  explicit WatchingRunner(std::unique_ptr<CpuRunner> inner) : inner_(std::move(inner)) {}

  void bind(Batch& batch) override { inner_->bind(batch); }
  void launch(const Batch& batch) override {
    const StagedInputs& inputs = batch.inputs;
    for (int32_t i = 0; i < inputs.counts->num_resets; ++i) {
      tables_.erase(inputs.resets[i].seq_slot);
    }
    for (int32_t i = 0; i < inputs.counts->num_table_writes; ++i) {
      const TableWrite& write = inputs.table_writes[i];
      tables_[write.seq_slot].insert({write.group, write.block});
    }
    auto& touched = touched_[batch.iteration];
    for (int32_t i = 0; i < inputs.counts->num_seqs; ++i) {
      const auto& blocks = tables_[inputs.seq_slot[i]];
      touched.insert(blocks.begin(), blocks.end());
    }
    inner_->launch(batch);
    if (after_launch) after_launch(batch.iteration);
  }
  void wait(int64_t iteration) override {
    inner_->wait(iteration);
    touched_.erase(touched_.begin(), touched_.upper_bound(iteration));
  }
  int64_t completed() override { return inner_->completed(); }
  std::span<const SequenceResult> results(int64_t iteration) override {
    return inner_->results(iteration);
  }
  Timing timing(int64_t iteration) override { return inner_->timing(iteration); }
  void poison(GroupId group, BlockId block) override {
    for (const auto& [iteration, blocks] : touched_) {
      if (blocks.contains({group, block})) ++num_violations;
    }
  }
  std::map<std::string, int64_t, std::less<>> workspace_bytes() const override {
    return inner_->workspace_bytes();
  }

  std::function<void(int64_t)> after_launch;
  int64_t num_violations = 0;  // blocks that became reusable while a launched iteration uses them

 private:
  std::unique_ptr<CpuRunner> inner_;
  std::map<int32_t, std::set<std::pair<GroupId, BlockId>>> tables_;   // by sequence slot
  std::map<int64_t, std::set<std::pair<GroupId, BlockId>>> touched_;  // by iteration
};

int64_t early_releases(bool plants_fault) {
  SelfDraft setup(3, /*lateness=*/2, {0, 0});
  setup.engine_options.poisons_freed_blocks = true;
  auto owned = std::make_unique<WatchingRunner>(setup.runner());
  WatchingRunner& watching = *owned;
  Engine engine(setup.engine_options, setup.layout, std::move(owned));
  if (plants_fault) {
    watching.after_launch = [&](int64_t iteration) { engine.pool().complete(iteration); };
  }
  std::mt19937_64 random(9);
  for (int round = 0; round < 20; ++round) {
    std::vector<RequestId> ids;
    for (int i = 0; i < 8; ++i) {
      Request request;
      for (uint64_t t = 0; t < 1 + random() % 30; ++t) request.prompt.push_back(random() % 64);
      request.sampling = {.temperature = 1.0, .seed = random(), .max_tokens = 100};
      ids.push_back(engine.add_request(std::move(request)).value());
    }
    int64_t polls = 3;
    while (polls-- > 0) (void)engine.poll(2);
    for (const RequestId id : ids) engine.cancel(id);
  }
  EXPECT_EQ(engine.check_integrity(), "");
  return watching.num_violations;
}

TEST(PlantedFault, QuarantineReleasedEarly) {
  EXPECT_EQ(early_releases(/*plants_fault=*/false), 0);
  EXPECT_GT(early_releases(/*plants_fault=*/true), 0);
}

}  // namespace
}  // namespace paceline
