// SPDX-License-Identifier: Apache-2.0
// EAGLE, EAGLE-3 and prompt lookup: logits against the equations, alignment against oracles, KV
// after rejections, output equal to plain output, and refused configurations.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "cpp/equality_checks.h"
#include "executor/engine.h"
#include "model/kv_shapes.h"
#include "speculate/row_ops.h"
#include "support/acceptance.h"
#include "support/direct_runner.h"
#include "support/draft_head_checks.h"
#include "support/jobs.h"
#include "support/oracle.h"
#include "support/raw_models.h"
#include "support/reference_model.h"
#include "wire/batch_shape.h"
#include "wire/sequence_state.h"

namespace paceline {
namespace {

using testing::all_heads;
using testing::DirectRunner;
using testing::expect_equals_plain;
using testing::Job;
using testing::llama_of;
using testing::mix_sampling;
using testing::Oracle;
using testing::oracle_head;
using testing::oracle_target;
using testing::Outcome;
using testing::Pick;
using testing::random_jobs;
using testing::random_raw_head;
using testing::random_raw_model;
using testing::RawModel;
using testing::run;
using testing::seed_from_env;
using testing::small_engine_options;
using testing::Tally;
using testing::tiny_config_json;
using testing::TinyDraftHead;

TEST(DraftHead, LogitsOfEveryStepAreThoseOfTheEquations) {
  uint64_t seed = 1;
  for (const TinyDraftHead& shape : all_heads()) {
    SCOPED_TRACE("head " + std::to_string(seed));
    ++seed;
    const RawModel target = random_raw_model(
        tiny_config_json({.windows = {8, 0, 20}, .is_gemma = seed % 2 == 0}), seed);
    const RawModel head = random_raw_head(shape, seed + 100);
    const auto target_model = target.build();
    const auto head_model = head.build();
    const int32_t width = head.config.num_logits();
    const bool is_mtp = shape.kind == DrafterKind::kGemma4Mtp;
    for (const int32_t k : {1, 2, 4}) {
      const DraftPosition position = is_mtp && k != 2 ? DraftPosition::kNext : DraftPosition::kLast;
      DirectRunner direct(target_model, head_model,
                          {.max_seqs = 2, .num_draft_tokens = k, .draft_position = position});
      std::mt19937_64 random(seed);
      for (int32_t slot = 0; slot < 2; ++slot) {
        std::vector<int32_t> prompt(static_cast<size_t>(14 + 5 * slot));
        for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 64);
        direct.start(slot, prompt, 100);
      }
      // The last logits of an iteration are those of draft k.
      const auto check = [&](int32_t row, int32_t slot) {
        const SequenceState& s = direct.buffers().sequences;
        const int32_t known = s.known_len[slot];
        std::vector<int32_t> tokens(s.history + slot * s.history_stride,
                                    s.history + slot * s.history_stride + known);
        tokens.insert(tokens.end(), s.draft_tokens + slot * k, s.draft_tokens + (slot + 1) * k);
        ASSERT_EQ(s.draft_len[slot], k);
        const auto states = testing::reference::run_target(target, tokens);
        const auto num_first = static_cast<size_t>(known - 1);
        const auto num_steps = static_cast<size_t>(k) - 1;
        const auto expected =
            is_mtp ? testing::reference::run_mtp(head, target, states, tokens, num_first, num_steps,
                                                 position == DraftPosition::kNext ? 1 : 0)
                   : testing::reference::run_head(head, target, states, tokens, num_first,
                                                  num_first + num_steps);
        const float* logits = direct.buffers().logits + int64_t{row} * width;
        const int32_t* ids = direct.buffers().draft_output.tokens;  // of a head over clusters
        double error = 0;
        double scale = 0;
        for (int32_t i = 0; i < width; ++i) {
          const auto id = static_cast<size_t>(ids != nullptr ? ids[int64_t{row} * width + i] : i);
          error = std::max(error, std::abs(expected[id] - logits[i]));
          scale = std::max(scale, std::abs(expected[id]));
        }
        ASSERT_GT(scale, 0);
        ASSERT_LT(error, 2e-4 * scale) << "k " << k << " slot " << slot << " known " << known;
      };
      direct.plan(0, RowKind::kPrefillPartial, 0, 6);
      direct.plan(1, RowKind::kPrefillPartial, 0, 9);
      direct.run();
      direct.plan(0, RowKind::kPrefillPartial, 6, 3);
      direct.plan(1, RowKind::kPrefillFinal, 9, 10);
      direct.run();
      check(0, 1);
      direct.plan(1, RowKind::kDecode, 0, k + 1);
      direct.plan(0, RowKind::kPrefillFinal, 9, 5);
      direct.run();
      check(0, 1);
      check(1, 0);
      for (int i = 0; i < 3 && !HasFatalFailure(); ++i) {
        direct.plan(0, RowKind::kDecode, 0, k + 1);
        direct.plan(1, RowKind::kDecode, 0, k + 1);
        direct.run();
        check(0, 0);
        check(1, 1);
      }
      if (HasFatalFailure()) return;
    }
  }
}

std::vector<Oracle> all_oracles() {
  std::vector<Oracle> oracles;
  for (const bool reads_hidden : {false, true}) {
    oracles.push_back({.reads_hidden = reads_hidden});
    oracles.push_back({.kind = DrafterKind::kGemma4Mtp, .reads_hidden = reads_hidden});
    for (const bool norm_output : {false, true}) {
      oracles.push_back(
          {.kind = DrafterKind::kMtp, .reads_hidden = reads_hidden, .norm_output = norm_output});
    }
    for (const bool is_reduced : {false, true}) {
      for (size_t part = 0; part < 3; ++part) {
        oracles.push_back({.kind = DrafterKind::kEagle3,
                           .reads_hidden = reads_hidden,
                           .is_reduced = is_reduced,
                           .norm_before_residual = part == 1,
                           .norm_output = part == 2,
                           .aux_part = part});
      }
    }
  }
  return oracles;
}

TEST(DraftHead, OraclesAreAlwaysRight) {
  int64_t preemptions = 0;
  for (const Oracle& oracle : all_oracles()) {
    const RawModel raw = oracle_target(oracle.is_reduced);
    const auto target = raw.build();
    const auto head = oracle_head(oracle, raw).build();
    for (const double temperature : {0.0, 1.0}) {
      // A sampled token is not a function of the token before.
      if (temperature > 0 && oracle.reads_hidden) continue;
      uint64_t cell = 0;
      for (const int32_t k : {1, 3, 8, 16}) {
        std::mt19937_64 random(11 + cell);
        ExecutorOptions options = small_engine_options(k);
        options.prefill_chunk_size = cell % 2 == 0 ? 7 : 0;
        options.draft_driver = std::array{DraftDriver::kUnrolled, DraftDriver::kReplay,
                                          DraftDriver::kWhile, DraftDriver::kEager}[cell % 4];
        options.device_lateness = static_cast<int32_t>(cell % 3);
        options.block_size = 8;
        if (cell % 2 == 1) options.kv_cache_bytes = 600 << 10;  // forces preemption
        ++cell;
        Executor executor(target, head, options);
        int64_t drafted = 0;
        for (const Outcome& o : run(executor, random_jobs(random, 12, 64, temperature, 60, 60))) {
          EXPECT_EQ(o.counters.num_accepted_tokens, o.counters.num_draft_tokens)
              << "kind " << static_cast<int>(oracle.kind) << " hidden " << oracle.reads_hidden
              << " reduced " << oracle.is_reduced << " part " << oracle.aux_part << " k " << k
              << " T " << temperature;
          drafted += o.counters.num_draft_tokens;
        }
        EXPECT_GT(drafted, 0);
        EXPECT_EQ(executor.check_integrity(), "");
        preemptions += executor.stats().num_preemptions;
      }
    }
  }
  EXPECT_GT(preemptions, 20);
}

// The acceptance rate of an oracle's drafts after a change of its recorded programs.
double oracle_acceptance(const Oracle& oracle, double temperature,
                         const std::function<void(CpuRunner&, Program&)>& plant) {
  const RawModel raw = oracle_target(oracle.is_reduced);
  const auto target = raw.build();
  const auto head = oracle_head(oracle, raw).build();
  const KvLayout layout = plan_kv_layout(kv_layer_shapes(target->config),
                                         draft_kv_layer_shapes(head->config, target->config), 8,
                                         DType::kFloat32, 8 << 20);
  const BatchShape shape{.max_seqs = 8,
                         .max_verify_rows = 256,
                         .max_logit_rows = 256,
                         .num_draft_tokens = 4,
                         .first_rows = traits_for(&head->config, {}).first_rows};
  auto runner = std::make_unique<CpuRunner>(
      target, head, layout,
      CpuRunnerOptions{.runner = {.iteration = {.shape = shape, .max_model_len = 256}}});
  for (Program* const program : runner->programs()) plant(*runner, *program);
  Engine engine({.shape = shape,
                 .scheduler = {.max_num_seqs = 8,
                               .max_num_batched_tokens = 256,
                               .prefill_chunk_size = 256,
                               .max_score_rows = 16,
                               .num_draft_tokens = 4,
                               .max_in_flight = 2},
                 .max_model_len = 256,
                 .vocab_size = 64},
                layout, std::move(runner));
  return testing::acceptance_rate(engine, temperature);
}

TEST(DraftHead, PlantedOffByOnesGoRed) {
  const auto sound = [](CpuRunner&, Program&) {};
  // The hidden state of the next row.
  const auto shifts_hidden = [](CpuRunner& runner, Program& program) {
    const HiddenTaps& taps = runner.buffers().target_hidden;
    for (CopyRowsParams* p : program.params_of<CopyRowsParams>(copy_rows)) {
      if (p->x == taps.data) p->x = static_cast<const float*>(p->x) + p->x_stride;
    }
    for (GemmParams* p : program.params_of<GemmParams>(gemm)) {
      if (p->x == taps.data) p->x = static_cast<const float*>(p->x) + p->x_stride;
    }
  };
  // The row's own token instead of the one after it.
  const auto shifts_tokens = [](CpuRunner&, Program& program) {
    for (auto* p : program.params_of<AssembleFirstRowsParams>(assemble_first_rows)) {
      --p->sequences.history;
    }
  };
  // The noise of the token before.
  const auto shifts_noise = [](CpuRunner&, Program& program) {
    for (DrawParams* p : program.params_of<DrawParams>(draw)) p->draw_ahead = 1;
  };
  // Noise by row of the lm_head instead of by token.
  const auto drops_map = [](CpuRunner& runner, Program& program) {
    static std::vector<int32_t> rows(64);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
    for (DrawParams* p : program.params_of<DrawParams>(draw)) {
      if (p->tokens == runner.buffers().drawn) p->token_map = rows.data();
    }
  };
  // Every draft step reads the output of the first pass.
  const auto stops_feedback = [](CpuRunner& runner, Program& program) {
    static std::vector<float> stale(64 * 8, 0.0f);
    for (CopyRowsParams* p : program.params_of<CopyRowsParams>(copy_rows)) {
      if (p->x == runner.buffers().draft_output.feedback && p->y_stride == 128) p->x = stale.data();
    }
    for (RmsNormParams* p : program.params_of<RmsNormParams>(rms_norm)) {
      if (p->x == runner.buffers().draft_output.feedback && p->y_stride == 128) p->x = stale.data();
    }
  };
  // Positions advance although the drafter's are fixed.
  const auto moves_on = [](CpuRunner&, Program& program) {
    for (auto* p : program.params_of<AdvanceParams>(advance_draft_step)) {
      p->advances_positions = true;
    }
  };
  for (const auto kind :
       {DrafterKind::kEagle, DrafterKind::kEagle3, DrafterKind::kMtp, DrafterKind::kGemma4Mtp}) {
    const Oracle by_token{.kind = kind, .is_reduced = kind == DrafterKind::kEagle3};
    Oracle by_hidden = by_token;
    by_hidden.reads_hidden = true;
    EXPECT_EQ(oracle_acceptance(by_token, 0, sound), 1);
    EXPECT_EQ(oracle_acceptance(by_token, 1, sound), 1);
    EXPECT_EQ(oracle_acceptance(by_hidden, 0, sound), 1);
    EXPECT_LT(oracle_acceptance(by_hidden, 0, shifts_hidden), 0.9);
    EXPECT_LT(oracle_acceptance(by_token, 0, shifts_tokens), 0.9);
    EXPECT_LT(oracle_acceptance(by_token, 1, shifts_noise), 0.9);
    EXPECT_LT(oracle_acceptance(by_hidden, 0, stops_feedback), 0.9);
    if (kind == DrafterKind::kGemma4Mtp) {
      EXPECT_LT(oracle_acceptance(by_token, 1, moves_on), 0.9);
    }
    if (by_token.is_reduced) {
      EXPECT_LT(oracle_acceptance(by_token, 1, drops_map), 0.9);
    }
  }
}

TEST(DraftHead, DraftKvDoesNotDependOnRejectedOrMissedDrafts) {
  const uint64_t first_seed = seed_from_env(1);
  int64_t rejected = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 16 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    const std::vector<TinyDraftHead> heads = all_heads();
    const auto target =
        random_raw_model(tiny_config_json({.windows = {8, 0, 20}, .is_gemma = seed % 2 == 0}), seed)
            .build();
    const auto head = random_raw_head(heads[seed % heads.size()], seed + 1).build();
    for (const bool catches_up : {false, true}) {
      testing::check_draft_kv(target, head, seed, &rejected, catches_up);
    }
  }
  EXPECT_GT(rejected, 500);
}

TEST(DraftHead, EveryDriverLeavesTheSameBits) {
  for (size_t which = 0; which < all_heads().size(); ++which) {
    SCOPED_TRACE("head " + std::to_string(which));
    const RawModel raw =
        random_raw_model(tiny_config_json({.windows = {8, 0, 20}, .is_gemma = false}), which);
    for (const AcceptMethod method :
         {AcceptMethod::kCoupled, AcceptMethod::kStandard, AcceptMethod::kBlock}) {
      testing::check_drivers(raw.build(), random_raw_head(all_heads()[which], which).build(), which,
                             method);
    }
  }
}

TEST(DraftHead, SpeculativeEqualsPlain) {
  const uint64_t first_seed = seed_from_env(1);
  Tally tally;
  for (uint64_t seed = first_seed; seed < first_seed + 48; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Pick pick{random};
    const std::vector<TinyDraftHead> heads = all_heads();
    const auto which = static_cast<size_t>(seed % (heads.size() + 3));
    const bool is_ngram = which >= heads.size();
    const bool is_gemma = random() % 2 == 0;
    // Oracles in some cases, since random draft heads are rarely right.
    const bool is_oracle = !is_ngram && random() % 2 == 0;
    const Oracle oracle{.kind = pick(DrafterKind::kEagle, DrafterKind::kEagle3, DrafterKind::kMtp,
                                     DrafterKind::kGemma4Mtp)};
    const RawModel raw =
        is_oracle ? oracle_target(false)
                  : random_raw_model(
                        tiny_config_json({.windows = {8, 0, 20}, .is_gemma = is_gemma}), seed);
    const auto target = raw.build();
    std::shared_ptr<const Model> head;
    if (is_oracle) {
      head = oracle_head(oracle, raw).build();
    } else if (!is_ngram) {
      head = random_raw_head(heads[which], seed + 1).build();
    }
    const double temperature = pick(0.0, 0.7, 1.0);
    std::vector<Job> jobs = random_jobs(random, pick(1, 7, 24), 64, temperature, 60, 60);
    if (random() % 2 == 0) mix_sampling(jobs, random, 64);

    const auto choose = [&](ExecutorOptions& options) {
      if (head != nullptr && head->config.drafter->kind == DrafterKind::kGemma4Mtp) {
        options.speculative.draft_position = pick(DraftPosition::kLast, DraftPosition::kNext);
      }
      if (is_ngram) {
        options.speculative.ngram_min = pick(1, 2);
        options.speculative.ngram_max = pick(2, 4);
      }
    };
    expect_equals_plain({.target = target,
                         .drafter = head,
                         .jobs = jobs,
                         .temperature = temperature,
                         .small_pool_bytes = (is_oracle ? 600 : 260) << 10,
                         .choose = choose},
                        random, seed, tally);
  }
  tally.expect_all();
}

TEST(Ngram, CyclesAreFoundAndMissesDraftNothing) {
  const auto target = oracle_target(false).build();  // greedy: f is a permutation, so it cycles
  ExecutorOptions options = small_engine_options(4);
  options.speculative.ngram_min = 2;
  options.speculative.ngram_max = 4;
  Executor executor(target, nullptr, options);
  const std::vector<Job> jobs = {
      {.prompt = {1}, .sampling = {.temperature = 0, .max_tokens = 200}}};
  const Outcome outcome = run(executor, jobs).front();
  std::vector<int32_t> tokens = {1};
  while (tokens.size() < 201) {
    tokens.push_back(static_cast<int32_t>(testing::oracle_next(false, tokens.back())));
  }
  EXPECT_EQ(outcome.tokens, std::vector<int32_t>(tokens.begin() + 1, tokens.end()));
  // During the first cycle no token has occurred before; then every draft is right.
  EXPECT_EQ(outcome.counters.num_accepted_tokens, outcome.counters.num_draft_tokens);
  const auto period =
      static_cast<int64_t>(std::find(tokens.begin() + 1, tokens.end(), 1) - tokens.begin());
  EXPECT_GT(outcome.counters.num_accepted_tokens, (200 - period - 4) * 3 / 5);
  EXPECT_LE(outcome.counters.num_accepted_tokens, 200 - period);
  EXPECT_EQ(executor.check_integrity(), "");
}

TEST(DraftHead, MismatchesAreRefusedWithBothValues) {
  const auto target =
      random_raw_model(tiny_config_json({.windows = {8, 0, 20}, .is_gemma = false}), 1).build();
  const auto message = [&](const std::function<void()>& body) -> std::string {
    try {
      body();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  const auto refusal = [&](const TinyDraftHead& head) {
    return message([&] {
      Executor executor(target, random_raw_head(head, 2).build(), small_engine_options(3));
    });
  };
  const auto expect = [](const std::string& text, std::initializer_list<const char*> parts) {
    for (const char* part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' lacks " << part;
    }
  };
  constexpr auto kEagle3 = DrafterKind::kEagle3;
  EXPECT_EQ(refusal({.kind = kEagle3}), "");
  expect(refusal({.kind = kEagle3, .target_hidden = 48}), {"48", "32"});
  expect(refusal({.kind = kEagle3, .aux_layers = {0, 1, 3}}), {"layer 3", "3 layers", "0 to 2"});
  TinyDraftHead head{.kind = kEagle3, .owns_embedding = true, .owns_lm_head = true};
  head.decoder.vocab_size = head.draft_vocab_size = 80;
  expect(refusal(head), {"80", "64"});
  head = {.kind = kEagle3, .owns_lm_head = true, .draft_vocab_size = 40};
  head.decoder.hidden = 16;
  expect(refusal(head), {"embedding table", "16", "32"});
  expect(message([&] {
           Executor executor(target, random_raw_head({.kind = kEagle3}, 2).build(DType::kBFloat16),
                             small_engine_options(3));
         }),
         {"bfloat16", "float32", "load both with the same dtype"});
  expect(message([&] {
           Executor executor(
               random_raw_head({.owns_embedding = true, .owns_lm_head = true}, 2).build(), nullptr,
               small_engine_options(0));
         }),
         {"is a draft head"});
  // Layers that find no KV to read.
  constexpr auto kGemma4Mtp = DrafterKind::kGemma4Mtp;
  EXPECT_EQ(refusal({.decoder = llama_of({20, 0}), .kind = kGemma4Mtp}), "");
  expect(refusal({.decoder = llama_of({0}), .kind = kGemma4Mtp, .target_hidden = 48}),
         {"48", "32"});
  expect(refusal({.decoder = llama_of({20, 12}), .kind = kGemma4Mtp}),
         {"layer 1 of the drafter", "'sliding'", "layer 2 has window 20", "12"});
  TinyDraftHead reader{.decoder = llama_of({0}), .kind = kGemma4Mtp};
  reader.decoder.head_dim = 32;
  expect(refusal(reader), {"layer 0 of the drafter", "'full'", "layer 1 has head_dim 16", "32"});
  expect(message([&] {
           const auto slides =
               random_raw_model(tiny_config_json({.windows = {20}, .is_gemma = false}), 1).build();
           Executor executor(
               slides,
               random_raw_head({.decoder = llama_of({20, 0}), .kind = kGemma4Mtp}, 2).build(),
               small_engine_options(3));
         }),
         {"layer 1 of the drafter", "'full'", "no layer of that kind with KV of its own"});
  expect(message([&] {
           ExecutorOptions options = small_engine_options(3);
           options.speculative.draft_position = DraftPosition::kNext;
           Executor executor(target, random_raw_head({.kind = kEagle3}, 2).build(), options);
         }),
         {"draft_position", "'next'", "'last'"});
  expect(
      refusal(
          {.decoder = llama_of({0}), .kind = kGemma4Mtp, .num_centroids = 7, .top_centroids = 1}),
      {"count", "7", "divisors of draft_vocab_size, 64"});
  expect(refusal({.decoder = llama_of({0}), .kind = kGemma4Mtp, .owns_embedding = true}),
         {"owns_embedding", "gemma4_mtp"});
  // Configs that contradict themselves.
  expect(refusal({.target_hidden = 48}), {"target_hidden_size", "48", "32"});
  expect(refusal({.norm_output = true}), {"norm_output", "eagle"});
  constexpr auto kMtp = DrafterKind::kMtp;
  EXPECT_EQ(refusal({.kind = kMtp, .fc_norm = true, .norm_output = true}), "");
  expect(refusal({.kind = kMtp}), {"fc_norm is false", "true where kind is 'mtp'"});
  expect(refusal({.kind = kMtp, .target_hidden = 48, .fc_norm = true}),
         {"target_hidden_size", "48", "32", "'mtp'"});
  expect(refusal({.kind = kMtp, .norm_before_fc = true, .fc_norm = true}),
         {"norm_before_fc", "false where kind is 'mtp'"});
  expect(refusal({.kind = kEagle3, .draft_vocab_size = 40}), {"draft_vocab_size", "40", "64"});
  expect(refusal({.kind = kEagle3, .aux_layers = {2, 1}}), {"aux_layers", "ascending"});
  // Tokens of the map.
  RawModel raw =
      random_raw_head({.kind = kEagle3, .owns_lm_head = true, .draft_vocab_size = 40}, 2);
  raw.draft_to_target[7] = 64;
  expect(message([&] { (void)raw.build(); }), {"draft_to_target", "[7] is 64", "0 to 63"});
  raw.draft_to_target[7] = 63;
  ModelBuilder builder(raw.json, DType::kFloat32);
  std::vector<int32_t> ids(40);
  std::iota(ids.begin(), ids.end(), 24);
  const std::vector<float> values(40);
  const auto put = [&](const char* name, DType dtype, std::vector<int64_t> dims, const void* data) {
    return message([&] { builder.put(name, dtype, dims, {}, data); });
  };
  expect(put("draft_to_target", DType::kFloat32, {40}, values.data()), {"float32", "int32, int64"});
  expect(put("fc.weight", DType::kInt32, {32, 96}, ids.data()), {"fc.weight", "int32", "bfloat16"});
  EXPECT_EQ(put("draft_to_target", DType::kInt32, {40}, ids.data()), "");
  raw.draft_to_target.assign(ids.begin(), ids.end());
  raw.draft_to_target[39] = 24;
  expect(message([&] { (void)raw.build(); }), {"draft_to_target", "[0] and [39] are both 24"});
  raw.draft_to_target.clear();
  expect(message([&] { (void)raw.build(); }), {"missing", "draft_to_target"});
  // Prompt lookup.
  const auto ngram = [&](int32_t min, int32_t max, bool has_head) {
    ExecutorOptions options = small_engine_options(3);
    options.speculative.ngram_min = min;
    options.speculative.ngram_max = max;
    return message([&] {
      Executor executor(target, has_head ? random_raw_head({}, 2).build() : nullptr, options);
    });
  };
  EXPECT_EQ(ngram(1, 3, false), "");
  expect(ngram(4, 3, false), {"ngram_min is 4", "1 to 3"});
  expect(ngram(0, 3, false), {"ngram_min is 0"});
  expect(ngram(1, 300, false), {"ngram_max is 300", "256"});
  expect(ngram(1, 3, true), {"one of them"});
}

TEST(DraftHead, AWholeVocabularyNeedsNoMap) {
  // Without a map row i is token i; with the identity map the model drafts the same.
  const RawModel raw = oracle_target(false);
  const auto target = raw.build();
  RawModel head = oracle_head({.kind = DrafterKind::kEagle3}, raw);
  TinyDraftHead shape{.kind = DrafterKind::kEagle3, .target_hidden = 64, .owns_lm_head = true};
  shape.decoder = testing::oracle_decoder({1});
  head.json = head_config_json(shape);
  head.config = parse_decoder_config(head.json);
  head.tensors["lm_head.weight"] = raw.at("lm_head.weight");
  for (const bool has_map : {false, true}) {
    if (has_map) head.draft_to_target = testing::oracle_tokens(false);
    const auto model = head.build();
    EXPECT_EQ(model->weights.head.draft_to_target != nullptr, has_map);
    std::mt19937_64 random(4);
    Executor executor(target, model, small_engine_options(5));
    for (const Outcome& o : run(executor, random_jobs(random, 8, 64, 1.0))) {
      EXPECT_EQ(o.counters.num_accepted_tokens, o.counters.num_draft_tokens);
    }
  }
}

}  // namespace
}  // namespace paceline
