// SPDX-License-Identifier: Apache-2.0
#pragma once

// One iteration as a sequence of op calls on fixed buffers:
//   verify forward -> logits -> draw -> accept | first draft pass | draft step x (k'-1)
// k' is how many drafts the iteration makes for the next one, at most k. With k' = 0 only verify
// runs. The three parts are functions over a context, so that an eager run and a captured graph
// make the same calls. Buffers are allocated once, at their largest size.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <paceline/config.h>

#include "device/device_arena.h"
#include "graph/rejection.h"
#include "metadata/group_metadata.h"
#include "metadata/pass_rows.h"
#include "model/forward/decoder.h"
#include "sample/logprobs.h"
#include "speculate/row_ops.h"
#include "speculate/speculator.h"
#include "wire/batch_shape.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {

// Buffers for logprobs; null if max_logprobs is 0.
struct LogprobBuffers {
  float* raw_logits = nullptr;      // [max_seqs * (k + 1), vocab] see SaveRawLogitsParams
  TokenLogprob* entries = nullptr;  // [max_logit_rows, 1 + max_logprobs] see TokenLogprobsParams
};
[[nodiscard]] LogprobBuffers allocate_logprobs(DeviceArena& arena, const BatchShape& shape,
                                               int32_t vocab_size);

// Rows of a pass whose output alone is read; see OutputRows. The verify pass and the drafter's
// first pass take turns.
struct OutputBuffers {
  PassRows rows{};                      // num_rows, num_seqs and row_indptr are the pass's choice
  std::vector<GroupMetadata> metadata;  // by GroupId
  void* qkv = nullptr;                  // [capacity, the widest qkv of a last layer]
  float* residual = nullptr;            // [capacity, the widest residual]
};

// The pass of a block drafter over its blocks.
struct BlockBuffers {
  PassRows rows{};
  int32_t* row_indptr = nullptr;        // [max_seqs + 1] that of `rows`
  std::vector<GroupMetadata> metadata;  // by GroupId
  int32_t* predicting_rows = nullptr;   // [max_seqs * k] see AssembleBlockRowsParams
  int32_t* num_predicting = nullptr;    // [1]
  // [max_seqs * (k + 1)] the newest token of each sequence, then the draws of each draft
  int32_t* tokens = nullptr;
  BlockHeadScratch heads{};
  float* conv_delta = nullptr;  // see Activations
};

// All device memory of an iteration except weights and rotary tables.
struct IterationBuffers {
  std::byte* kv_pool = nullptr;  // IterationRunner owns it and sets this pointer
  StagedInputs staged{};
  SequenceState sequences{};
  SamplingState sampling{};
  int32_t* current_draft_step = nullptr;  // [1] column that the running draft step writes
  DraftStop draft_stop{};

  PassRows verify_rows{};
  PassRows first_rows{};
  PassRows step_rows{};
  // By GroupId; entries of groups that a pass does not touch are empty.
  std::vector<GroupMetadata> verify_metadata;
  std::vector<GroupMetadata> first_metadata;
  std::vector<GroupMetadata> step_metadata;
  std::vector<BlockTable> block_tables;

  Activations activations{};
  OutputBuffers output{};
  float* gathered = nullptr;         // [max_logit_rows, hidden]
  float* logits = nullptr;           // [max_logit_rows, vocab]: the target's, later the drafter's
  int32_t* target_tokens = nullptr;  // [max_logit_rows] the target's draws
  int32_t* drawn = nullptr;          // [max_seqs] the drafter's draws
  // [the most of max_logit_rows, max_seqs and kMaxDraftTokens, + 1] 0, 1, 2, ...: in a draft step
  // each row is a sequence of its own and draws, and picked rows lie one after the other
  const int32_t* identity = nullptr;
  int32_t* first_last_row = nullptr;  // [max_seqs] the first-pass row that draws for a sequence
  HiddenTaps target_hidden{};         // rows of the verify pass, read by the drafter's first pass
  // [first rows] the row of target_hidden that each row of the first pass reads; null if it is
  // always row i for row i
  int32_t* hidden_rows = nullptr;
  KeptHidden kept_hidden{};         // in target_hidden
  void* gathered_hidden = nullptr;  // [first rows, width] the rows of hidden_rows, with kept_hidden
  DraftHeadOutput draft_output{};   // [max_seqs] rows: the drafter's newest output
  BlockBuffers blocks{};            // of a drafter that drafts in blocks, otherwise empty
  RejectionBuffers rejection{};     // for `standard` and `block` acceptance, otherwise empty
  SequenceResult* results = nullptr;  // [max_seqs]
  LogprobBuffers logprobs{};
};

// Upper bounds of the rows of an iteration's passes. The host uses them for grids and padding. A
// captured graph has the bounds of its bucket.
struct IterationExtent {
  int32_t num_drafts = 0;  // k'
  int32_t num_seqs = 0;
  int32_t num_drafting = 0;
  int32_t num_verify_rows = 0;
  int32_t num_first_rows = 0;
  int32_t num_logit_rows = 0;
  int32_t num_prompt_rows = 0;
  int32_t verify_rows_per_seq = 0;  // most rows of one sequence
  int32_t logit_rows_per_seq = 0;   // those that draw, or are scored
  int32_t first_rows_per_seq = 0;
  int32_t num_forks = 0;
  int32_t num_block_copies = 0;
  bool gathers_hidden = false;  // see Batch
  bool keeps_hidden = false;    // see Batch
  // Whether sequences may use the logits pipeline (bias, penalties, bans, top-k, top-p, min-p) or
  // logprobs. If not, its ops are left out, since on a GPU an op takes time even without work.
  bool has_logit_work = true;
  bool returns_logits = false;  // see Batch
};

// full_extent bounds every iteration that the shape allows, decode_extent one with `num_seqs`
// decoding sequences and k' = num_drafts.
[[nodiscard]] IterationExtent full_extent(const BatchShape& shape);
[[nodiscard]] IterationExtent decode_extent(const BatchShape& shape, int32_t num_seqs,
                                            int32_t num_drafts, bool has_logit_work = true,
                                            bool keeps_hidden = false);

// `rows` with the bounds of one pass.
[[nodiscard]] inline PassRows with_extent(PassRows rows, int32_t num_rows, int32_t num_seqs,
                                          int32_t rows_per_seq) {
  rows.capacity = num_rows;
  rows.max_seqs = num_seqs;
  rows.max_rows_per_seq = rows_per_seq;
  return rows;
}

struct IterationOptions {
  BatchShape shape;
  int32_t max_model_len = 0;
  AcceptMethod rejection_sample_method = AcceptMethod::kCoupled;
  std::array<float, kMaxDraftTokens> synthetic_rates{};  // with kSynthetic
  bool samples_drafts = true;                            // see SpeculativeOptions
  int32_t draft_proposals = 0;
  double draft_stop_threshold = 0;  // see SpeculativeOptions
  ModelFreeOptions model_free;
  DraftPosition draft_position = DraftPosition::kLast;
  // Tokens of a sequence whose hidden states are kept for a drafter that has missed them. 0: the
  // drafter misses none.
  int32_t kept_hidden_tokens = 0;
  // Returns for how many rows activations and logits are allocated if `rows` are needed, since a
  // library may compute whole tiles of rows. Null: for `rows`.
  int32_t (*padded_rows)(int32_t rows) = nullptr;
};

[[nodiscard]] IterationBuffers allocate_iteration_buffers(DeviceArena& arena,
                                                          const IterationOptions& options,
                                                          const KvLayout& layout,
                                                          const DecoderConfig& target,
                                                          const DecoderConfig* draft,
                                                          DType activation_dtype = DType::kFloat32);

class Iteration {
 public:
  // References must outlive the object.
  Iteration(const IterationOptions& options, const KvLayout& layout, const Decoder& target,
            const Speculator& speculator, const IterationBuffers& buffers);

  // Runs first, in iterations with prefill rows only: makes forks and counts tokens for penalties.
  template <class Ctx>
  void begin_prefill(Ctx& ctx, const IterationExtent& extent) const;
  // Staged inputs -> results and new sequence state. Captures: only where nothing is recorded.
  template <class Ctx>
  void verify(Ctx& ctx, const IterationExtent& extent,
              std::span<const HiddenCapture> captures = {}) const;
  // Sequence state -> first draft of every drafting sequence, and the draft step's inputs.
  template <class Ctx>
  void first_draft_pass(Ctx& ctx, const IterationExtent& extent) const;
  // One draft token per row: forward, logits, draw, write column `current_draft_step`, advance.
  template <class Ctx>
  void draft_step(Ctx& ctx, const IterationExtent& extent) const;

  // Prompt lookup in front of a model: after its draft steps, the tokens that followed the same
  // tokens earlier take the place of its drafts, where there are any. num_drafting: at least the
  // number of drafting sequences.
  template <class Ctx>
  void look_up(Ctx& ctx, int32_t num_drafting) const;

  // Draft steps after the first pass: k' - 1, or 0 if no drafter with passes is used.
  [[nodiscard]] int32_t num_draft_steps(int32_t num_drafts) const;

 private:
  [[nodiscard]] bool has_draft_passes() const;
  // Writes the rows `row_index` of a pass to the rows of `output`, with the metadata of the groups
  // that `owner` reads.
  template <class Ctx>
  [[nodiscard]] OutputRows pick_rows(Ctx& ctx, const PassRows& pass, const PassRows& output,
                                     const int32_t* row_index, KvOwner owner) const;
  // Copies to each fork what it needs of its parent. Runs after the counts are cleared.
  template <class Ctx>
  void fork(Ctx& ctx, const IterationExtent& extent) const;
  // The ids whose logits the verify pass, or the drafter, needs: where ranks share the LM head, a
  // rank needs those of others only if more than a draw reads them.
  [[nodiscard]] LogitIds target_ids(const IterationExtent& extent) const;
  // `probabilities`: those of the drafts, or null.
  [[nodiscard]] LogitIds draft_ids(const IterationExtent& extent, const float* probabilities) const;
  // Draws from the logits of `ids`, which are those of the decoder's LM head.
  template <class Ctx>
  void draw_ids(Ctx& ctx, const DrawParams& params, const Decoder& decoder, LogitIds ids) const;
  // Applies the parameters of the sequences to the target's logits.
  template <class Ctx>
  void process_logits(Ctx& ctx, const IterationExtent& extent, const PassRows& rows) const;
  // The two ops of logprobs: save_logits runs before the logits change, compute_logprobs after
  // acceptance. Both do nothing if max_logprobs is 0.
  template <class Ctx>
  void save_logits(Ctx& ctx, const IterationExtent& extent) const;
  template <class Ctx>
  void compute_logprobs(Ctx& ctx, const IterationExtent& extent) const;
  // Keeps the hidden states of the verify pass, if the drafter may need them later.
  template <class Ctx>
  void keep_hidden_states(Ctx& ctx, const IterationExtent& extent) const;
  // Whether the drafter's passes read KV of `group`.
  [[nodiscard]] bool is_drafted_from(size_t group) const;
  // Rows of a pass of the drafter that draw one draft each.
  struct DraftDraws {
    const int32_t* num_rows;  // [1]
    int32_t max_rows;
    const int32_t* row_index;  // [max_rows] rows of `rows`
    const PassRows& rows;
    float* logits;         // [max_rows, num_logits]
    int32_t* tokens;       // [max_rows]
    float* probabilities;  // [max_rows], or null
    int32_t draw_ahead;
    // [1] drafts of the window so far; null: 0. With adds_steps the drawn token's position is as
    // many higher.
    const int32_t* steps;
    bool adds_steps;
    LogitIds ids = LogitIds::kAll;  // whose logits are there
    // [max_rows, num_candidates] the tokens of the logits, of drafts that are chosen from a few
    // candidates; null: the logits are those of the drafter's vocabulary.
    const int32_t* candidates = nullptr;
    int32_t num_candidates = 0;
  };
  // The draw of these rows by the noise of the predicted tokens.
  [[nodiscard]] DrawParams draw_params(const DraftDraws& draws) const;
  template <class Ctx>
  void draw_drafts(Ctx& ctx, const IterationExtent& extent, const DraftDraws& draws) const;
  // The pass over blocks: all drafts of the drafting sequences.
  template <class Ctx>
  void draft_blocks(Ctx& ctx, const IterationExtent& extent, const BlockDrafter& drafter) const;
  // The drafts of a block drafter with a selector, whose `draws` are those of all drafts.
  template <class Ctx>
  void choose_drafts(Ctx& ctx, const IterationExtent& extent, const BlockDrafter& drafter,
                     const AllDrafts& drafts, const DraftDraws& draws) const;

  IterationOptions options_;
  const KvLayout& layout_;
  const Decoder& target_;
  const Speculator& speculator_;
  const IterationBuffers& buffers_;
};

}  // namespace paceline
