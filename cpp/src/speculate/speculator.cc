// SPDX-License-Identifier: Apache-2.0
#include "speculate/speculator.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "metadata/pass_rows.h"
#include "speculate/row_ops.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {
namespace {

bool is_gemma4_mtp(const DecoderConfig& draft) {
  return draft.drafter->kind == DrafterKind::kGemma4Mtp;
}

bool drafts_in_blocks(const DecoderConfig& draft) {
  return draft.drafter->kind == DrafterKind::kBlock;
}

std::string_view name_of(const DecoderConfig& draft) {
  if (!draft.drafter) return "draft_model";
  switch (draft.drafter->kind) {
    case DrafterKind::kEagle:
      return "eagle";
    case DrafterKind::kEagle3:
      return "eagle3";
    case DrafterKind::kMtp:
      return "mtp";
    case DrafterKind::kGemma4Mtp:
      return "gemma4_mtp";
    case DrafterKind::kBlock:
      break;
  }
  const BlockConfig& block = draft.drafter->block;
  if (block.selector.top > 0) return "dflash2";
  return block.markov == MarkovHead::kNone ? "dflash" : "dspark";
}

}  // namespace

ModelFreeOptions model_free_options(const SpeculativeOptions& options) {
  return {
      .ngram = {.min_tokens = options.prompt_lookup_min, .max_tokens = options.prompt_lookup_max},
      .drafts_on_host = options.drafter != nullptr};
}

std::optional<DraftMethod> draft_method(std::string_view name) {
  static constexpr std::array<DraftMethod, 10> kMethods = {
      {{"draft_model", DraftModelSpeculator::kTraits},
       {"eagle", EagleSpeculator::kTraits},
       {"eagle3", EagleSpeculator::kTraits},
       {"mtp", EagleSpeculator::kTraits},
       {"gemma4_mtp", Gemma4MtpSpeculator::kTraits},
       {"dflash", BlockSpeculator::kTraits},
       {"dflash2", BlockSpeculator::kTraits},
       {"dspark", BlockSpeculator::kTraits},
       {"ngram", NgramSpeculator::kTraits},
       {"custom", HostSpeculator::kTraits}}};
  const auto* const found = std::ranges::find(kMethods, name, &DraftMethod::name);
  return found == kMethods.end() ? std::nullopt : std::optional(*found);
}

DraftMethod draft_method(const DecoderConfig* draft, const ModelFreeOptions& model_free) {
  const bool looks_up = model_free.ngram.min_tokens > 0 || model_free.ngram.max_tokens > 0;
  const std::string_view name = draft != nullptr            ? name_of(*draft)
                                : model_free.drafts_on_host ? "custom"
                                : looks_up                  ? "ngram"
                                                            : "";
  return draft_method(name).value_or(DraftMethod{});
}

SourceMethods source_methods(const DecoderConfig* draft, const ModelFreeOptions& model_free) {
  constexpr std::string_view kLookup = "ngram";
  const std::string_view name = draft_method(draft, model_free).name;
  const bool looks_up = model_free.ngram.max_tokens > 0;
  return {name == kLookup ? "" : name, looks_up ? kLookup : ""};
}

SpecTraits traits_for(const DecoderConfig* draft, const ModelFreeOptions& model_free) {
  if (draft != nullptr) {
    if (!draft->drafter) return DraftModelSpeculator::kTraits;
    if (drafts_in_blocks(*draft)) return BlockSpeculator::kTraits;
    return is_gemma4_mtp(*draft) ? Gemma4MtpSpeculator::kTraits : EagleSpeculator::kTraits;
  }
  if (model_free.drafts_on_host) return HostSpeculator::kTraits;
  return model_free.ngram.max_tokens > 0 ? NgramSpeculator::kTraits : NoSpeculator::kTraits;
}

void check_drafter(const Model& draft, const Model& target) {
  if (draft.config.drafter) check_draft_head(draft, target);
}

Speculator make_speculator(std::shared_ptr<const Model> draft, const ModelFreeOptions& model_free,
                           DraftPosition draft_position, const Decoder& target,
                           const KvLayout& layout, std::byte* kv_pool, int32_t max_positions,
                           DeviceArena& arena) {
  if (draft != nullptr && draft->config.drafter && is_gemma4_mtp(draft->config)) {
    const int32_t rope_offset = draft_position == DraftPosition::kNext ? 1 : 0;
    return Gemma4MtpSpeculator{
        DraftHead(std::move(draft), target, layout, kv_pool, max_positions, arena, rope_offset)};
  }
  if (draft != nullptr && draft->config.drafter && drafts_in_blocks(draft->config)) {
    return BlockSpeculator{
        BlockDrafter(std::move(draft), target, layout, kv_pool, max_positions, arena)};
  }
  if (draft != nullptr && draft->config.drafter) {
    return EagleSpeculator{
        DraftHead(std::move(draft), target, layout, kv_pool, max_positions, arena)};
  }
  if (draft != nullptr) {
    return DraftModelSpeculator{
        Decoder(std::move(draft), layout, KvOwner::kDraft, kv_pool, max_positions, arena)};
  }
  if (model_free.drafts_on_host) return HostSpeculator{};
  const NgramOptions& ngram = model_free.ngram;
  if (ngram.max_tokens > 0) return NgramSpeculator{ngram.min_tokens, ngram.max_tokens};
  return NoSpeculator{};
}

const Decoder* decoder_of(const Speculator& speculator) {
  if (const auto* draft = std::get_if<DraftModelSpeculator>(&speculator)) return &draft->decoder;
  if (const BlockDrafter* drafter = block_drafter_of(speculator)) return &drafter->decoder();
  const DraftHead* head = draft_head_of(speculator);
  return head != nullptr ? &head->decoder() : nullptr;
}

const BlockDrafter* block_drafter_of(const Speculator& speculator) {
  const auto* block = std::get_if<BlockSpeculator>(&speculator);
  return block != nullptr ? &block->drafter : nullptr;
}

const DraftHead* draft_head_of(const Speculator& speculator) {
  if (const auto* head = std::get_if<EagleSpeculator>(&speculator)) return &head->head;
  if (const auto* mtp = std::get_if<Gemma4MtpSpeculator>(&speculator)) return &mtp->head;
  return nullptr;
}

TokenMap token_map(const Speculator& speculator, const DraftHeadOutput& output) {
  if (const BlockDrafter* drafter = block_drafter_of(speculator)) {
    return {drafter->draft_to_target(), 0};
  }
  const DraftHead* head = draft_head_of(speculator);
  if (head == nullptr) return {};
  if (output.tokens != nullptr) return {output.tokens, head->config().num_logits()};
  return {head->draft_to_target(), 0};
}

template <class Ctx>
void draft_forward(Ctx& ctx, const Speculator& speculator, const PassRows& rows,
                   std::span<const GroupMetadata> groups, const Activations& activations,
                   const DraftHeadInput& input) {
  if (const auto* draft = std::get_if<DraftModelSpeculator>(&speculator)) {
    draft->decoder.forward(ctx, rows, groups, activations, /*taps=*/{}, input.output);
  } else if (const DraftHead* head = draft_head_of(speculator)) {
    head->forward(ctx, rows, groups, activations, input);
  }
}

template <class Ctx>
void draft_logits(Ctx& ctx, const Speculator& speculator, const int32_t* num_rows, int32_t max_rows,
                  const int32_t* row_index, const Activations& activations,
                  const DraftHeadOutput& output, LogitIds of_ids) {
  if (const auto* draft = std::get_if<DraftModelSpeculator>(&speculator)) {
    draft->decoder.logits(ctx, num_rows, max_rows, row_index, activations, output.feedback,
                          output.logits, of_ids);
  } else if (const DraftHead* head = draft_head_of(speculator)) {
    head->logits(ctx, num_rows, max_rows, row_index, activations, output, of_ids);
  }
}

template <class Ctx>
void propose(Ctx& ctx, const Speculator& speculator, const StagedInputs& inputs,
             const SequenceState& sequences, int32_t max_seqs) {
  const auto* ngram = std::get_if<NgramSpeculator>(&speculator);
  if (ngram == nullptr) return;
  ctx.run(propose_ngram, ProposeNgramParams{.inputs = inputs,
                                            .sequences = sequences,
                                            .max_seqs = max_seqs,
                                            .min_tokens = ngram->min_tokens,
                                            .max_tokens = ngram->max_tokens});
}

// Instantiates every template of this file for one context.
#define PACELINE_INSTANTIATE_SPECULATOR(Ctx)                                                     \
  template void draft_forward<Ctx>(Ctx&, const Speculator&, const PassRows&,                     \
                                   std::span<const GroupMetadata>, const Activations&,           \
                                   const DraftHeadInput&);                                       \
  template void draft_logits<Ctx>(Ctx&, const Speculator&, const int32_t*, int32_t,              \
                                  const int32_t*, const Activations&, const DraftHeadOutput&,    \
                                  LogitIds);                                                     \
  template void propose<Ctx>(Ctx&, const Speculator&, const StagedInputs&, const SequenceState&, \
                             int32_t);
PACELINE_INSTANTIATE_SPECULATOR(CpuContext)
#ifdef PACELINE_CUDA
PACELINE_INSTANTIATE_SPECULATOR(CudaContext)
#endif
#undef PACELINE_INSTANTIATE_SPECULATOR

}  // namespace paceline
