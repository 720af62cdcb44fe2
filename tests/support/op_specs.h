// SPDX-License-Identifier: Apache-2.0
#pragma once

// The shapes of op cases, and what makes an OpInstance of each.

#include <cstdint>
#include <vector>

#include <paceline/config.h>

#include "ops/ops.h"
#include "support/op_instance.h"
#include "support/weight_spec.h"

namespace paceline::testing {

struct GemmSpec {
  int32_t n = 0;
  int32_t k = 0;
  WeightSpec weight = {};  // x has its dtype
  DType y_dtype = DType::kBFloat16;
  bool has_bias = false;
  int32_t x_padding = 0;
  int32_t y_padding = 0;
  int32_t num_groups = 1;
};
struct EmbedSpec {
  int32_t hidden = 0;
  int32_t vocab_size = 0;
  DType dtype = DType::kBFloat16;
};
enum class NormKind : uint8_t {
  kPlain,
  kInPlace,
  kResidual,
  kResidualXWeight,
  kResidualOnly,
  kResidualXWeightOnly,
  kCopy,           // no weight: y is x
  kResidualCopy,   // with an x_weight, but y is the sum as it is
  kResidualScale,  // with an x_weight, the sum scaled before it is normalised
  kResidualScaleOnly
};
struct RmsNormSpec {
  int32_t hidden = 0;
  NormKind kind = NormKind::kPlain;
  DType x_dtype = DType::kBFloat16;
  DType y_dtype = DType::kBFloat16;
  int32_t x_padding = 0;
  int32_t y_padding = 0;
};
struct GatedSpec {
  int32_t intermediate = 0;
  Activation activation = Activation::kSilu;
  DType dtype = DType::kBFloat16;
  int32_t up_stride = 0;  // 0: up follows gate
  bool is_interleaved = false;
};
// gate and up, and the activation.
struct ActivatedGemmSpec {
  int32_t intermediate = 0;
  int32_t k = 0;
  Activation activation = Activation::kSilu;
  WeightSpec weight = {};  // x and y have its dtype
  bool has_bias = false;
  bool activates_alone = false;  // by an op of its own, after the product
};
// A norm, a product, and perhaps an activation.
struct NormedGemmSpec {
  int32_t n = 0;  // of y
  int32_t k = 0;
  bool has_activation = false;
  WeightSpec weight = {};  // the norm and y have its dtype
  bool has_bias = false;
  bool norms_alone = false;  // by an op of its own, before the product
};
// A product that is added to a residual.
struct AddedGemmSpec {
  int32_t n = 0;
  int32_t k = 0;
  WeightSpec weight = {};
  bool has_bias = false;
  bool adds_alone = false;  // by an op of its own, after the product
};
struct PerLayerSpec {
  int32_t num_layers = 0;
  int32_t size = 0;
  DType dtype = DType::kBFloat16;
  DType table_dtype = DType::kBFloat16;
};
struct RopeSpec {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_size = 16;
  DType dtype = DType::kBFloat16;  // of qkv and of the cache
  bool has_norms = true;
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
  bool has_v_norm = false;
  int32_t position_offset = 0;
  int32_t rope_head_dim = 0;  // 0: the whole head
  bool reads_early = false;   // as in QkNormRopeAppendParams
};
struct GatherSpec {
  int32_t hidden = 0;
};
struct CopySpec {
  int32_t width = 0;
  DType x_dtype = DType::kFloat32;
  DType y_dtype = DType::kBFloat16;
  int32_t x_padding = 0;
  int32_t y_padding = 0;
  bool has_index = false;
};
struct SoftCapSpec {
  int32_t n = 0;
  float cap = 30.0f;
  float scale = 1.0f;
};
enum class LogitKind : uint8_t {
  kPlain,
  kTies,
  kHoles,
  kPeaked,
  kInfinite,
  kTiny,
  kHalves,  // 21 logits whose softmax at temperature 1 / log 2 is 1/2, 1/4, ..., 2^-20, 2^-20
};
struct DrawSpec {
  int32_t vocab_limit = 0;
  int32_t padding = 0;       // logits_stride - vocab_limit; the padding is +inf
  float temperature = 0.0f;  // below 0: 0, 0.3, 1 and 2 in turn
  LogitKind logits = LogitKind::kPlain;
  bool has_probabilities = false;
  bool is_mapped = false;      // ids are rows of a draft vocabulary; some have no token
  bool has_row_maps = false;   // with is_mapped: each row has its own order of tokens
  int32_t steps_ahead = 0;     // 0: not given
  bool has_own_noise = false;  // its own stream and salts, and rows of logits in reverse order
};
// kTies has equal scores, among them -0 and 0.
struct SelectClustersSpec {
  int32_t num_clusters = 0;
  int32_t top = 0;
  LogitKind scores = LogitKind::kPlain;
};
// Every row is its own sequence, with a window of drafts before the row.
enum class AdjustKind : uint8_t {
  kMixed,      // all kinds in turn; some rows adjust nothing, some are inert
  kPenalties,  // of every row
  kNone
};
struct AdjustSpec {
  int32_t vocab_size = 0;
  int32_t padding = 0;  // logits_stride - vocab_size
  AdjustKind kind = AdjustKind::kMixed;
};
enum class TruncateKind : uint8_t {
  kMixed,
  kTopK,
  kTopP,
  kMinP,
  kTopKTopP,
  kNone,
  kReached,  // with kHalves: a top_p that sums of probabilities equal, or just miss
};
struct TruncateSpec {
  int32_t vocab_limit = 0;
  int32_t padding = 0;  // logits_stride - vocab_limit; the padding is +inf
  TruncateKind kind = TruncateKind::kMixed;
  LogitKind logits = LogitKind::kPlain;
  bool copies_logits = false;  // first, so that the op can be timed repeatedly
};
// Some rows want no logprobs or are inert; others want those of 0 to max_logprobs tokens.
struct LogprobSpec {
  int32_t vocab_size = 0;
  int32_t padding = 0;  // logits_stride - vocab_size; the padding is +inf
  LogitKind logits = LogitKind::kPlain;
  int32_t max_logprobs = 20;
  bool all_change = false;  // acceptance overwrites logits of all sequences
};
// Every row drafts for its own sequence; some rows are inert.
struct ProposalsSpec {
  int32_t vocab_limit = 0;
  int32_t padding = 0;  // logits_stride - vocab_limit; the padding is +inf
  int32_t per_draft = 0;
  int32_t draft_step = 0;  // 0: not given
  LogitKind logits = LogitKind::kPlain;
  bool is_mapped = false;     // ids are rows of a draft vocabulary; some have no token
  bool has_row_maps = false;  // with is_mapped: each row has its own map
  bool is_by_row = false;     // a list for each row, not for each draft of a sequence
};
struct SoftmaxSumsSpec {
  int32_t vocab_limit = 0;
  int32_t padding = 0;  // logits_stride - vocab_limit; the padding is +inf
  LogitKind logits = LogitKind::kPlain;
};
// Every row is a sequence with a window of drafts. Its softmax weights are computed first.
struct RejectSpec {
  int32_t vocab_size = 0;
  int32_t num_draft_tokens = 0;
  int32_t per_draft = 0;  // 0: drafts are greedy, with q = 1
  AcceptMethod method = AcceptMethod::kStandard;
  LogitKind logits = LogitKind::kPlain;
  bool has_unknown_ids = false;  // some drafts and proposals are beyond the vocabulary
};
struct ClusterLogitsSpec {
  int32_t hidden = 0;
  int32_t num_clusters = 0;
  int32_t cluster_size = 0;
  int32_t top = 0;
  DType x_dtype = DType::kBFloat16;
  DType weight_dtype = DType::kBFloat16;
};

[[nodiscard]] OpInstance make_gemm(const GemmSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_embed(const EmbedSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_rms_norm(const RmsNormSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_gated(const GatedSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_activated_gemm(const ActivatedGemmSpec& spec, const Rows& rows,
                                             uint64_t seed);
[[nodiscard]] OpInstance make_normed_gemm(const NormedGemmSpec& spec, const Rows& rows,
                                          uint64_t seed);
// The residual is called y.
[[nodiscard]] OpInstance make_added_gemm(const AddedGemmSpec& spec, const Rows& rows,
                                         uint64_t seed);
[[nodiscard]] OpInstance make_per_layer(const PerLayerSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_rope(const RopeSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_gather(const GatherSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_copy(const CopySpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_soft_cap(const SoftCapSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_draw(const DrawSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_adjust(const AdjustSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_truncate(const TruncateSpec& spec, const Rows& rows, uint64_t seed);
// A row is a sequence with a window of three rows; every other one has its raw logits saved.
[[nodiscard]] OpInstance make_emitted_logprobs(const LogprobSpec& spec, const Rows& rows,
                                               uint64_t seed);
// A row is one of a prompt.
[[nodiscard]] OpInstance make_prompt_logprobs(const LogprobSpec& spec, const Rows& rows,
                                              uint64_t seed);
[[nodiscard]] OpInstance make_save_raw_logits(const LogprobSpec& spec, const Rows& rows,
                                              uint64_t seed);
[[nodiscard]] OpInstance make_select_clusters(const SelectClustersSpec& spec, const Rows& rows,
                                              uint64_t seed);
[[nodiscard]] OpInstance make_proposals(const ProposalsSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_softmax_sums(const SoftmaxSumsSpec& spec, const Rows& rows,
                                           uint64_t seed);
[[nodiscard]] OpInstance make_reject(const RejectSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_cluster_logits(const ClusterLogitsSpec& spec, const Rows& rows,
                                             uint64_t seed);

struct AttentionSpec {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_size = 16;
  int32_t window = 0;  // 0: none
  float soft_cap = 0.0f;
  bool has_sinks = false;
  DType dtype = DType::kBFloat16;  // of qkv, and of the cache but for the last field
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
  bool has_bf16_cache = false;  // beside a qkv of float32
  // Latent attention: a value is this many of the first elements of its key; 0: keys and values are
  // two things. With kv_inputs kNone and one KV head.
  int32_t value_dim = 0;
  bool reads_early = false;  // as in PagedAttentionParams
};
// Rows at positions [length - num_rows, length) of sequence `id`, then inert ones.
struct AttentionSequence {
  int64_t id = 0;
  int32_t length = 0;
  int32_t num_rows = 0;
  int32_t num_inert = 0;
};
struct AttentionBatch {
  std::vector<AttentionSequence> sequences;
  int32_t extra_rows = 0;          // max_rows beyond the rows there are
  int32_t extra_seqs = 0;          // max_seqs beyond the sequences there are
  int32_t extra_rows_per_seq = 0;  // max_rows_per_seq beyond the longest
  int32_t max_model_len = 0;       // 0: the longest sequence
  // Multiprocessors that a GPU plans for; 0: those it has. On few of them, short prompts and few
  // heads are enough for the prefill kernel.
  int32_t num_sms = 0;
};
// y has one row for each row of the batch, in order.
[[nodiscard]] OpInstance make_attention(const AttentionSpec& spec, const AttentionBatch& batch,
                                        uint64_t seed);

// Ops on sequences and metadata; everything in them is compared exactly.
enum class StateOp : uint8_t {
  kAssembleVerifyRows,
  kAssembleFirstRows,
  kAccept,
  kAcceptSynthetic,
  kAcceptJudged,
  kBuildMetadata,
  kDraftSteps,
  kDraftBlocks,
  kProposeNgram,
  kCountTokens
};
// Whose rows kAssembleFirstRows and kDraftSteps make.
enum class DraftedBy : uint8_t {
  kModel,  // a draft model's: the newest tokens
  kHead,   // a draft head's: the rows of the verify pass
  kFixed,  // those of a draft head that stays at the last position with KV
};
struct StateSpec {
  int32_t max_seqs = 0;
  int32_t num_seqs = 0;
  int32_t num_draft_tokens = 0;
  int32_t block_size = 16;
  bool stops_early = false;  // of kDraftSteps
  DraftedBy drafted_by = DraftedBy::kModel;
  int32_t spread = 1;  // distance between the ids of the few tokens in use
};
[[nodiscard]] OpInstance make_state(StateOp op, const StateSpec& spec, uint64_t seed);

}  // namespace paceline::testing
