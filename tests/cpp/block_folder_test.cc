// SPDX-License-Identifier: Apache-2.0
// A folder with a block drafter, through the public header and the C interface: every draft of an
// oracle is right.

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <paceline/executor.h>
#include <paceline/model.h>

#include "support/block_oracle.h"
#include "support/c_api_fixture.h"
#include "support/safetensors_writer.h"

namespace paceline {
namespace {

using testing::kMaxModelLen;
using testing::RawModel;

class BlockFolder : public testing::CApi {
 protected:
  static constexpr int32_t kNumDrafts = 6;

  // Replaces the folder's models.
  void write(const RawModel& target, const RawModel& drafter) {
    const auto part = [&](const std::string& file, const RawModel& model) {
      std::vector<test::WrittenTensor> tensors;
      for (const auto& [name, tensor] : model.tensors) {
        tensors.push_back({name, "F32", tensor.shape, test::bytes_of(tensor.values)});
      }
      test::write_file(folder_.file(file), test::safetensors_bytes(tensors));
      return R"({"weights":")" + file + R"(","dtype":"float32","config":)" + model.json + "}";
    };
    test::write_file(folder_.file("paceline.json"),
                     R"({"format":"paceline-folder-1","stop_token_ids":[4],"target":)" +
                         part("target.safetensors", target) + R"(,"draft":)" +
                         part("draft.safetensors", drafter) + R"(,"num_speculative_tokens":)" +
                         std::to_string(kNumDrafts) + "}");
  }

  // The continuation of the prompt.
  [[nodiscard]] std::vector<int32_t> expected(int32_t count) const {
    std::vector<int32_t> tokens;
    int64_t token = prompt_.back();
    while (static_cast<int32_t>(tokens.size()) < count) {
      token = testing::oracle_next(/*is_reduced=*/true, token);
      tokens.push_back(static_cast<int32_t>(token));
    }
    return tokens;
  }
};

TEST_F(BlockFolder, DraftsInBothInterfaces) {
  const RawModel target = testing::block_oracle_target();
  for (const testing::BlockSource source :
       {testing::BlockSource::kContext, testing::BlockSource::kChain}) {
    const testing::TinyBlock block{.samples_from_anchor = true};
    write(target, testing::block_oracle({source, {20, 0}, block}, target));
    const ModelFolder folder = load_model_folder(folder_.path());
    ASSERT_NE(folder.draft, nullptr);
    EXPECT_EQ(folder.num_speculative_tokens, kNumDrafts);

    ExecutorOptions cpp_options;
    cpp_options.max_model_len = kMaxModelLen;
    cpp_options.speculative.num_speculative_tokens = folder.num_speculative_tokens;
    Executor executor(folder.target, folder.draft, cpp_options);
    Request request{.prompt = prompt_};
    request.sampling = {.temperature = 0, .max_tokens = 50};
    ASSERT_TRUE(executor.add_request(request).has_value());
    std::vector<int32_t> tokens;
    SpeculationCounters counters;
    for (bool is_over = false; !is_over;) {
      for (const RequestEvent& event : executor.poll(10'000)) {
        tokens.insert(tokens.end(), event.token_ids.begin(), event.token_ids.end());
        counters = event.counters;
        is_over = event.finish_reason != FinishReason::kNone;
      }
    }
    EXPECT_EQ(tokens, expected(50));
    EXPECT_EQ(counters.num_accepted_tokens, counters.num_draft_tokens);
    EXPECT_GT(counters.num_draft_tokens, 0);

    open();
    paceline_sampling given = sampling();
    given.temperature = 0;
    given.max_tokens = 50;
    const std::map<int32_t, Output> outputs = run(given);
    ASSERT_EQ(outputs.size(), 1u);
    const Output& output = outputs.begin()->second;
    EXPECT_EQ(output.tokens, expected(50));
    EXPECT_EQ(output.last.total_accepted_tokens, output.last.total_draft_tokens);
    EXPECT_GT(output.last.total_draft_tokens, 0);
    paceline_close(engine_);
    engine_ = nullptr;
  }
}

TEST_F(BlockFolder, MoreDraftsThanTheBlockAreAnError) {
  const RawModel target = testing::block_oracle_target();
  const testing::TinyBlock block{.size = 5, .samples_from_anchor = true};
  write(target, testing::block_oracle({testing::BlockSource::kNewest, {0}, block}, target));
  EXPECT_NE(open(options()), PACELINE_OK);
  const std::string message = paceline_last_error();
  EXPECT_NE(message.find("num_speculative_tokens is 6"), std::string::npos) << message;
  EXPECT_NE(message.find("allowed: 1 to 5"), std::string::npos) << message;
}

}  // namespace
}  // namespace paceline
