// SPDX-License-Identifier: Apache-2.0
// An iteration with k' = 0 is one of plain decoding: it makes the op calls of an engine without a
// drafter, with the same params but for addresses.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "graph/iteration_ring.h"
#include "metadata/group_metadata.h"
#include "ops/fork.h"
#include "ops/ops.h"
#include "runner/cpu_runner.h"
#include "sample/accept.h"
#include "sample/logits.h"
#include "sample/logprobs.h"
#include "speculate/row_ops.h"
#include "support/direct_runner.h"
#include "support/draft_head_checks.h"
#include "support/raw_models.h"

namespace paceline {
namespace {

using testing::DirectRunner;
using testing::random_raw_head;
using testing::random_raw_model;
using testing::tiny_config_json;
using testing::TinyDraftHead;

// The graphs of decode iterations with k' = 0: without logit work, and with it. A runner captures
// first what keeps hidden states, then k' = 0, ...; each is a whole iteration and its draft steps,
// of which a graph has three parts.
struct PlainGraphs {
  Program* keeping;
  Program* plain;
  Program* full;
};
PlainGraphs plain_graphs(DirectRunner& direct) {
  const std::vector<Program*> all = dynamic_cast<CpuRunner&>(direct.runner()).programs();
  return {.keeping = all.at(0), .plain = all.at(12), .full = all.at(18)};
}

using Op = void (*)();
std::vector<Op> ops_of(const Program& program) {
  std::vector<Op> ops;
  for (const Program::Node& node : program.nodes()) ops.push_back(node.op);
  return ops;
}

template <class Params>
Op op(void (*function)(CpuContext&, const Params&)) {
  return reinterpret_cast<Op>(function);
}

// The bytes of an op's params that hold a value; what pads them may be anything.
using Mask = std::vector<std::byte>;
template <class Params>
std::pair<const Op, Mask> mask(void (*function)(CpuContext&, const Params&)) {
  Mask bytes(sizeof(Params), std::byte{0xff});
#if __has_builtin(__builtin_clear_padding)
  __builtin_clear_padding(reinterpret_cast<Params*>(bytes.data()));
#endif
  return {op(function), std::move(bytes)};
}

constexpr size_t kWord = sizeof(void*);
constexpr int32_t kDrafts = 5;

// Whether two words differ as far as the stride of the drafts of a sequence goes
// (SequenceState::num_draft_tokens), which is 0 without a drafter.
bool is_stride(const std::byte* expected, const std::byte* actual) {
  constexpr size_t kNumHalves = kWord / sizeof(int32_t);
  int32_t a[kNumHalves];
  int32_t b[kNumHalves];
  std::memcpy(a, expected, kWord);
  std::memcpy(b, actual, kWord);
  return a[0] == 0 && b[0] == kDrafts && std::equal(a + 1, a + kNumHalves, b + 1);
}

// `other` has the op calls of `plain`, whose params differ in addresses only: in the words in which
// `twin`, which was captured as `plain` was, differs from it.
void expect_same_calls(const Program& plain, const Program& twin, const Program& other) {
  ASSERT_EQ(ops_of(plain), ops_of(twin));
  ASSERT_EQ(ops_of(plain), ops_of(other));
  const std::map<Op, Mask> masks = {
      mask<AcceptParams>(accept),
      mask<ActivatedGemmParams>(activated_gemm),
      mask<AdjustLogitsParams>(adjust_logits),
      mask<AssembleVerifyRowsParams>(assemble_verify_rows),
      mask<BuildFullParams>(build_full),
      mask<BuildSlidingParams>(build_sliding),
      mask<CopyBlocksParams>(copy_blocks),
      mask<CountEmittedTokensParams>(count_emitted_tokens),
      mask<DrawParams>(draw),
      mask<EmbedParams>(embed),
      mask<ForkSequencesParams>(fork_sequences),
      mask<GatedActivationParams>(gated_activation),
      mask<GatherRowsParams>(gather_rows),
      mask<GemmParams>(gemm),
      mask<NormedGemmParams>(normed_gemm),
      mask<PagedAttentionParams>(paged_attention),
      mask<QkNormRopeAppendParams>(qk_norm_rope_append),
      mask<RmsNormParams>(rms_norm),
      mask<SaveRawLogitsParams>(save_raw_logits),
      mask<TokenLogprobsParams>(token_logprobs),
      mask<TruncateLogitsParams>(truncate_logits),
  };
  // These copy what the host stages, of which an engine with a drafter has room for more.
  const std::set<Op> staging = {op<BeginIterationParams>(begin_iteration),
                                op<EndIterationParams>(end_iteration)};
  for (size_t i = 0; i < plain.nodes().size(); ++i) {
    if (staging.contains(plain.nodes()[i].op)) continue;
    const std::span<const std::byte> expected = plain.params_of(plain.nodes()[i]);
    const std::span<const std::byte> of_twin = twin.params_of(twin.nodes()[i]);
    const std::span<const std::byte> actual = other.params_of(other.nodes()[i]);
    ASSERT_EQ(expected.size(), of_twin.size());
    ASSERT_EQ(expected.size(), actual.size());
    const auto found = masks.find(plain.nodes()[i].op);
    ASSERT_NE(found, masks.end()) << "op call " << i << " has no mask";
    for (size_t at = 0; at + kWord <= found->second.size(); at += kWord) {
      if (std::memcmp(&expected[at], &of_twin[at], kWord) != 0) continue;
      if (is_stride(&expected[at], &actual[at])) continue;
      const auto value = [&](const std::byte* from) {
        std::array<std::byte, kWord> bytes;
        for (size_t b = 0; b < kWord; ++b) bytes[b] = from[b] & found->second[at + b];
        return bytes;
      };
      ASSERT_EQ(value(&expected[at]), value(&actual[at]))
          << "op call " << i << " of " << plain.nodes().size() << ", byte " << at << " of "
          << expected.size() << " of its params";
    }
  }
}

struct Pair {
  std::string name;
  std::shared_ptr<const Model> target;
  std::shared_ptr<const Model> drafter;
};

std::vector<Pair> all_pairs() {
  std::vector<Pair> pairs;
  const auto target = random_raw_model(tiny_config_json({.windows = {8, 0, 20}}), 1).build();
  pairs.push_back({"a draft model", target,
                   random_raw_model(tiny_config_json({.windows = {0, 0}}), 2).build()});
  uint64_t seed = 1;
  std::vector<TinyDraftHead> heads = testing::all_heads();
  for (const TinyDraftHead& drafter : testing::all_block_drafters()) heads.push_back(drafter);
  for (const TinyDraftHead& head : heads) {
    ++seed;
    pairs.push_back(
        {"head " + std::to_string(seed), target, random_raw_head(head, seed + 100).build()});
  }
  return pairs;
}

TEST(PlainIteration, IsThatOfAnEngineWithoutADrafter) {
  for (const Pair& pair : all_pairs()) {
    for (const AcceptMethod method :
         {AcceptMethod::kCoupled, AcceptMethod::kStandard, AcceptMethod::kSynthetic}) {
      SCOPED_TRACE(pair.name + ", method " + std::to_string(static_cast<int32_t>(method)));
      DirectRunner plain(pair.target, nullptr, {});
      DirectRunner twin(pair.target, nullptr, {});
      DirectRunner drafting(pair.target, pair.drafter,
                            {.num_draft_tokens = kDrafts,
                             .rejection_sample_method = method,
                             .kept_hidden_tokens = 8});
      const PlainGraphs expected = plain_graphs(plain);
      const PlainGraphs of_twin = plain_graphs(twin);
      const PlainGraphs actual = plain_graphs(drafting);
      ASSERT_GT(expected.plain->num_nodes(), 0);
      ASSERT_GT(expected.full->num_nodes(), expected.plain->num_nodes());
      expect_same_calls(*expected.plain, *of_twin.plain, *actual.plain);
      expect_same_calls(*expected.full, *of_twin.full, *actual.full);
      if (HasFatalFailure()) return;
      // A graph that keeps hidden states for a draft head makes further calls.
      EXPECT_EQ(expected.keeping->num_nodes(), 0);
      if (actual.keeping->num_nodes() == 0) continue;
      EXPECT_GT(actual.keeping->num_nodes(), actual.plain->num_nodes());
      EXPECT_EQ(actual.keeping->params_of<KeepHiddenParams>(keep_hidden).size(), 1u);
    }
  }
}

}  // namespace
}  // namespace paceline
