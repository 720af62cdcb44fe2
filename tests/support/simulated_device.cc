// SPDX-License-Identifier: Apache-2.0
#include "support/simulated_device.h"

#include <algorithm>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "support/kv_layers.h"

namespace paceline::testing {
namespace {

std::span<const TableWrite> table_writes(const Batch& batch) {
  return {batch.inputs.table_writes, static_cast<size_t>(batch.counts().num_table_writes)};
}

std::span<const BlockCopy> block_copies(const Batch& batch) {
  return {batch.inputs.block_copies, static_cast<size_t>(batch.counts().num_block_copies)};
}

constexpr int32_t kVocab = 50'000;

}  // namespace

SimulatedOutput::SimulatedOutput(const SimulatedRequest& request, int32_t sample)
    : segments_(request.segments),
      prompt_salt_(mix(request.salt)),
      salt_(mix(request.salt + static_cast<uint64_t>(sample) + 1)),
      acceptance_(request.acceptance),
      prompt_len_(request.prompt_len),
      limit_(request.limit()),
      max_drafts_(request.max_drafts),
      end_len_(limit_) {
  if (request.can_stop && !request.is_score) {
    end_len_ = prompt_len_ + 1 + static_cast<int32_t>(mix(salt_) % request.max_tokens);
  }
  // KV of another salt counts as KV of other tokens.
  uint64_t prefix = 1 + mix(static_cast<uint64_t>(request.cache_salt));
  for (int32_t p = 0; p <= limit_; ++p) {
    prefix = mix(prefix + static_cast<uint64_t>(token(p)));
    prefixes_.push_back((prefix | 2) & ~uint64_t{1});
  }
}

uint64_t SimulatedOutput::salt_at(int32_t position) const {
  if (position >= prompt_len_) return salt_;
  for (const SimulatedSegment& segment : segments_) {
    if (position < segment.end) return segment.salt;
  }
  return prompt_salt_;
}

int32_t SimulatedOutput::token(int32_t position) const {
  return static_cast<int32_t>(mix(salt_at(position) ^ static_cast<uint64_t>(position)) % kVocab);
}

int32_t SimulatedOutput::num_right(int32_t known_len, int32_t k) const {
  int32_t count = 0;
  while (count < k &&
         static_cast<int32_t>(mix(salt_ + 1000 * (known_len + count) + 7) % 100) < acceptance_) {
    ++count;
  }
  return count;
}

int32_t SimulatedOutput::num_drafted(int32_t known_len, int32_t k, bool may_be_none) const {
  const uint64_t random = mix(salt_ + 3000 * static_cast<uint64_t>(known_len) + 11);
  if (k == 0 || random % 4 != 0) return k;
  const int32_t fewest = may_be_none ? 0 : 1;
  return fewest + static_cast<int32_t>((random >> 8) % static_cast<uint64_t>(k - fewest + 1));
}

SimulatedDevice::SimulatedDevice(const SimulationScript& script, const KvLayout& layout)
    : script_(script),
      layout_(layout),
      k_(script.options.num_draft_tokens),
      slots_(static_cast<size_t>(script.options.max_num_seqs)) {
  for (Slot& slot : slots_) slot.tables.resize(layout.groups.size());
  for (size_t g = 0; g < layout.groups.size(); ++g) {
    const int64_t num_blocks = layout.pool_bytes / layout.groups[g].block_bytes;
    cells_.emplace_back(static_cast<size_t>(num_blocks * layout.groups[g].block_size), 0);
    readers_.emplace_back(cells_.back().size(), 0);
    generations_.emplace_back(static_cast<size_t>(num_blocks), 0);
  }
}

void SimulatedDevice::become_reusable(GroupId group, BlockId block) {
  ++generation(group, block);
  const int32_t block_size = layout_.groups[static_cast<size_t>(group)].block_size;
  std::fill_n(cells_[static_cast<size_t>(group)].begin() + int64_t{block} * block_size, block_size,
              0);
}

void SimulatedDevice::launch(const Batch& batch, std::vector<SimulatedOwner> owners) {
  Launched launched{.batch = &batch, .owners = std::move(owners)};
  std::set<std::tuple<GroupId, int32_t, int32_t>> written;
  for (const TableWrite& write : table_writes(batch)) {
    require(written.insert({write.group, write.seq_slot, write.index}).second, "iteration ",
            batch.iteration, " writes entry ", write.index, " of sequence slot ", write.seq_slot,
            " twice");
    launched.table_generations.push_back(generation(write.group, write.block));
  }
  for (const BlockCopy& copy : block_copies(batch)) {
    launched.copy_generations.push_back(generation(copy.group, copy.source));
    launched.copy_generations.push_back(generation(copy.group, copy.destination));
  }
  launched_.push_back(std::move(launched));
}

std::vector<SequenceResult> SimulatedDevice::execute() {
  const Launched launched = std::move(launched_.front());
  launched_.erase(launched_.begin());
  const StagedInputs& in = launched.batch->inputs;
  reset_slots(launched);
  write_tables(launched);
  fork_slots(launched);
  std::vector<SequenceResult> results;
  for (int32_t i = 0; i < in.counts->num_seqs; ++i) results.push_back(verify(in, i));
  if (launched.batch->keeps_hidden) {
    const bool is_graph = !launched.batch->needs_eager_run();
    require(!is_graph || launched.batch->num_drafts == 0, "no graph keeps states and drafts");
    for (int32_t i = 0; i < in.counts->num_seqs; ++i) keep(in, i, results[static_cast<size_t>(i)]);
  }
  for (int32_t i = 0; i < in.counts->num_seqs; ++i) draft(in, i, results[static_cast<size_t>(i)]);
  return results;
}

void SimulatedDevice::reset_slots(const Launched& launched) {
  const StagedInputs& in = launched.batch->inputs;
  const int32_t num_seqs = in.counts->num_seqs;
  for (int32_t i = 0; i < in.counts->num_resets; ++i) {
    const SequenceReset& reset = in.resets[i];
    require(in.reset_seq_slots[i] == reset.seq_slot, "the list of reset slots is another one's");
    const auto row = std::find(in.seq_slot, in.seq_slot + num_seqs, reset.seq_slot) - in.seq_slot;
    require(row < num_seqs, "sequence slot ", reset.seq_slot, " is reset, but no row has it");
    const SimulatedOwner& owner = launched.owners[static_cast<size_t>(row)];
    Slot& slot = slots_.at(static_cast<size_t>(reset.seq_slot));
    slot.owner = owner;
    slot.is_active = true;
    slot.known_len = 0;
    slot.draft_len = 0;
    slot.keeps.clear();
    slot.limit = reset.limit;
    require(slot.limit == owner.output->limit(), "the limit of a reset is ", slot.limit, ", not ",
            owner.output->limit());
    // The device keeps stale entries; without them a missing write cannot hide.
    for (std::vector<Entry>& table : slot.tables) table.clear();
  }
}

void SimulatedDevice::write_tables(const Launched& launched) {
  const std::span<const TableWrite> writes = table_writes(*launched.batch);
  for (size_t i = 0; i < writes.size(); ++i) {
    const TableWrite& write = writes[i];
    std::vector<Entry>& table = slots_.at(static_cast<size_t>(write.seq_slot)).tables[write.group];
    const auto index = static_cast<size_t>(write.index);
    if (table.size() <= index) table.resize(index + 1);
    table[index] = {.block = write.block, .generation = launched.table_generations[i]};
  }
}

void SimulatedDevice::fork_slots(const Launched& launched) {
  const StagedInputs& in = launched.batch->inputs;
  for (const SequenceFork& fork : std::span(in.forks, static_cast<size_t>(in.counts->num_forks))) {
    Slot& child = slots_.at(static_cast<size_t>(fork.seq_slot));
    if (fork.parent_seq_slot < 0) {
      for (int32_t p = 0; p < fork.num_tokens; ++p) {
        require(in.adopted_tokens[fork.first_token + p] == child.owner.output->token(p), "request ",
                child.owner.request, " adopts another token at position ", p);
      }
      continue;
    }
    const Slot& parent = slots_.at(static_cast<size_t>(fork.parent_seq_slot));
    require(parent.owner.request == child.owner.request, "a sample of request ",
            child.owner.request, " forks from request ", parent.owner.request);
    require(fork.num_tokens < child.owner.output->prompt_len(), "a fork takes over ",
            fork.num_tokens, " of ", child.owner.output->prompt_len(), " prompt tokens");
    for (size_t g = 0; g < layout_.groups.size(); ++g) {
      const KvGroup& group = layout_.groups[g];
      const auto num_whole =
          static_cast<size_t>(num_entries(group.kind, fork.num_tokens) / group.block_size);
      require(parent.tables[g].size() >= num_whole, "the parent has ", parent.tables[g].size(),
              " of ", num_whole, " blocks to share in group ", g);
      if (child.tables[g].size() < num_whole) child.tables[g].resize(num_whole);
      std::copy_n(parent.tables[g].begin(), num_whole, child.tables[g].begin());
    }
  }
  const std::span<const BlockCopy> copies = block_copies(*launched.batch);
  for (size_t i = 0; i < copies.size(); ++i) {
    const BlockCopy& copy = copies[i];
    require(launched.copy_generations[2 * i] == generation(copy.group, copy.source) &&
                launched.copy_generations[2 * i + 1] == generation(copy.group, copy.destination),
            "iteration ", launched.batch->iteration, " copies block ", copy.source, " to ",
            copy.destination, " of group ", copy.group, ", one of which has been given back");
    const int32_t block_size = layout_.groups[static_cast<size_t>(copy.group)].block_size;
    const auto cells = cells_[static_cast<size_t>(copy.group)].begin();
    std::copy_n(cells + int64_t{copy.source} * block_size, block_size,
                cells + int64_t{copy.destination} * block_size);
    const auto readers = readers_[static_cast<size_t>(copy.group)].begin();
    std::copy_n(readers + int64_t{copy.source} * block_size, block_size,
                readers + int64_t{copy.destination} * block_size);
  }
}

void SimulatedDevice::check_logit_rows(const StagedInputs& in, int32_t i) const {
  const auto kind = static_cast<RowKind>(in.kind[i]);
  const int32_t end = in.verify_indptr[i + 1];
  const int32_t num_rows = end - in.verify_indptr[i];
  const int32_t num_wanted = kind == RowKind::kPrefillPartial ? 0
                             : kind == RowKind::kPrefillFinal ? 1
                                                              : num_rows;
  require(in.logit_indptr[i + 1] - in.logit_indptr[i] == num_wanted, "row ", i, " has ",
          in.logit_indptr[i + 1] - in.logit_indptr[i], " rows of logits, not ", num_wanted);
  for (int32_t row = 0; row < num_wanted; ++row) {
    require(in.logit_rows[in.logit_indptr[i] + row] == end - num_wanted + row,
            "a row of logits of batch row ", i, " is another one's");
  }
}

SequenceResult SimulatedDevice::verify(const StagedInputs& in, int32_t i) {
  SequenceResult result;
  Slot& slot = slots_.at(static_cast<size_t>(in.seq_slot[i]));
  check_logit_rows(in, i);
  if (in.kind[i] != static_cast<int32_t>(RowKind::kDecode)) {
    prefill(slot, in, i, result);
    return result;
  }
  const int32_t num_rows = in.verify_indptr[i + 1] - in.verify_indptr[i];
  const int32_t most_rows = slot.owner.output->max_drafts() + 1;
  const bool may_be_shorter = script_.varies_drafts() || script_.options.may_miss_prompts;
  require(may_be_shorter ? num_rows <= most_rows : num_rows == most_rows, "a window has ", num_rows,
          " rows, not ", most_rows);
  const int32_t known_len = slot.known_len;
  int32_t num_live = 0;
  while (slot.is_active && num_live < num_rows && num_live <= slot.draft_len &&
         known_len + num_live < slot.limit) {
    ++num_live;
  }
  slot.draft_len = 0;
  if (num_live == 0) return result;
  const int32_t first = known_len - 1;
  const int32_t num_right = slot.owner.output->num_right(known_len, k_);
  write(slot, KvOwner::kTarget, first, first + num_live, first + num_right + 1);
  read(slot, KvOwner::kTarget, first, first + num_live, known_len);
  result.drafted_len = num_live - 1;
  emit(slot, std::min(num_right, num_live - 1) + 1, result);
  return result;
}

void SimulatedDevice::prefill(Slot& slot, const StagedInputs& in, int32_t i,
                              SequenceResult& result) {
  const SimulatedOutput& output = *slot.owner.output;
  const int32_t start = in.prefill_start[i];
  const int32_t begin = in.verify_indptr[i];
  const int32_t num_rows = in.verify_indptr[i + 1] - begin;
  require(slot.is_active, "a sequence that has ended is prefilled");
  require(num_rows > 0, "a chunk has no rows");
  for (int32_t row = 0; row < num_rows; ++row) {
    require(in.prefill_tokens[begin + row] == output.token(start + row), "position ", start + row,
            " is prefilled with another token");
  }
  write(slot, KvOwner::kTarget, start, start + num_rows, start + num_rows);
  read(slot, KvOwner::kTarget, start, start + num_rows, start + num_rows);
  slot.known_len = start + num_rows;
  slot.draft_len = 0;
  if (in.kind[i] == static_cast<int32_t>(RowKind::kPrefillFinal)) {
    emit(slot, 1, result);
  } else if (slot.known_len < output.prompt_len()) {
    require(in.next_token[i] == output.token(slot.known_len), "the token after a chunk is wrong");
  }
}

void SimulatedDevice::emit(Slot& slot, int32_t count, SequenceResult& result) {
  const SimulatedOutput& output = *slot.owner.output;
  const bool has_ended = slot.known_len + count >= output.end_len();
  if (has_ended) count = output.end_len() - slot.known_len;
  for (int32_t j = 0; j < count; ++j) result.tokens[j] = output.token(slot.known_len + j);
  slot.known_len += count;
  result.emitted_len = count;
  if (!has_ended) return;
  slot.is_active = false;
  result.outcome =
      output.end_len() == output.limit() ? SequenceOutcome::kLength : SequenceOutcome::kStop;
}

void SimulatedDevice::draft(const StagedInputs& in, int32_t i, const SequenceResult& result) {
  const auto kind = static_cast<RowKind>(in.kind[i]);
  if (k_ == 0 || kind == RowKind::kScore) return;
  Slot& slot = slots_.at(static_cast<size_t>(in.seq_slot[i]));
  const bool is_decode = kind == RowKind::kDecode;
  const int32_t num_rows = in.first_indptr[i + 1] - in.first_indptr[i];
  const int32_t start = in.prefill_start[i];
  const int32_t num_verified = in.verify_indptr[i + 1] - in.verify_indptr[i];
  const bool is_plain = in.counts->num_drafting == 0;
  slot.max_drafts = std::max(in.num_drafts[i], 0);
  require(slot.max_drafts <= slot.owner.output->max_drafts(), "a sequence has ", slot.max_drafts,
          " drafts, not ", slot.owner.output->max_drafts());
  const bool follows =
      script_.first_rows == FirstRows::kWindow && is_plain && in.counts->num_first_rows > 0;
  require(!is_plain || !is_decode || num_rows == (follows ? num_verified : 0),
          "a plain iteration has ", num_rows, " rows in the first draft pass");
  if (is_decode && ((is_plain && !follows) || in.num_drafts[i] == kLeftOut)) return;
  const bool is_final = kind == RowKind::kPrefillFinal;
  if (!is_decode && script_.options.may_miss_prompts &&
      (num_rows == 0 || in.num_drafts[i] == kLeftOut)) {
    // The target computes the chunk alone.
    const bool has_row = !is_plain && is_final;
    require(num_rows == (has_row ? 1 : 0) && slot.max_drafts == 0, "a chunk has ", num_rows,
            " rows in the first draft pass, of ", num_verified);
    return;
  }
  if (script_.first_rows != FirstRows::kNone && (slot.is_active || !is_decode)) {
    int32_t begin = start;
    int32_t end = start + num_verified;
    int32_t num_expected = num_verified;
    if (script_.first_rows == FirstRows::kNewest) {
      if (kind == RowKind::kPrefillFinal) ++end;
      if (is_decode) begin = slot.known_len - 2, end = slot.known_len;
      num_expected = end - begin;
      if (is_decode && script_.follows_windows) {
        begin = slot.known_len - std::max(2, result.emitted_len);
        num_expected = std::max(2, num_verified);
      }
    } else if (is_decode) {
      begin = slot.known_len - result.emitted_len - 1;
      end = slot.known_len - 1;
    }
    if (is_decode && start != kNoPart) {
      // A part of the tokens that the drafter has missed.
      begin = start;
      end = start + num_rows;
      num_expected = num_rows;
      require(num_rows > 0 && end < slot.known_len && slot.max_drafts == 0,
              "a part of the missed tokens ends at ", end, " of ", slot.known_len);
    } else if (is_decode && (script_.varies_drafts() || script_.options.may_miss_prompts)) {
      begin -= num_rows - num_expected;
      num_expected = std::max(num_rows, num_expected);
      require(begin >= 0 && (script_.options.may_miss_prompts ||
                             begin >= slot.owner.output->prompt_len() - 1),
              "the drafter goes back to position ", begin);
    }
    require(num_rows == num_expected, "batch row ", i, " has ", num_rows,
            " rows in the first draft pass, not ", num_expected);
    const int32_t window = is_decode ? slot.known_len - result.emitted_len - 1 : begin;
    const int32_t first =
        script_.first_rows == FirstRows::kWindow ? first_with_hidden(in, i, begin, window) : begin;
    write(slot, KvOwner::kDraft, begin, end, end, first);
    read(slot, KvOwner::kDraft, begin, end, end);
  }
  if (slot.is_active && kind != RowKind::kPrefillPartial) draft_steps(slot);
}

void SimulatedDevice::keep(const StagedInputs& in, int32_t i, const SequenceResult& result) {
  Slot& slot = slots_.at(static_cast<size_t>(in.seq_slot[i]));
  if (in.kind[i] != static_cast<int32_t>(RowKind::kDecode)) return;
  slot.keeps.resize(static_cast<size_t>(slot.known_len), false);
  for (int32_t r = 0; r < result.emitted_len; ++r) {
    slot.keeps[static_cast<size_t>(slot.known_len - result.emitted_len - 1 + r)] = true;
  }
}

int32_t SimulatedDevice::first_with_hidden(const StagedInputs& in, int32_t i, int32_t begin,
                                           int32_t window) {
  if (begin >= window) return begin;
  const Slot& slot = slots_.at(static_cast<size_t>(in.seq_slot[i]));
  // As many as the device has room for are kept, those of this iteration too.
  const int32_t num_kept = script_.options.max_exact_missed + 1;
  const int32_t first = std::max(window - in.num_kept[i], slot.known_len - 1 - num_kept);
  for (int32_t p = std::max(begin, first); p < window; ++p) {
    require(static_cast<size_t>(p) < slot.keeps.size() && slot.keeps[static_cast<size_t>(p)],
            "the hidden state of position ", p, " has not been kept");
  }
  return first;
}

void SimulatedDevice::draft_steps(Slot& slot) {
  const bool looks_up = script_.first_rows == FirstRows::kNone;
  const int32_t room = slot.limit - slot.known_len;
  const int32_t longest =
      std::min(slot.max_drafts, slot.owner.output->num_drafted(slot.known_len, k_, looks_up));
  slot.draft_len = std::min(room, longest);
  if (looks_up) return;
  // The first pass has drafted one token; every step writes the KV of one row and drafts another.
  const bool is_window = script_.first_rows == FirstRows::kWindow;
  // What the drafter has written itself is wrong where the first pass writes it again.
  const bool is_rewritten = is_window || script_.follows_windows;
  const int32_t num_right = is_rewritten ? 0 : slot.owner.output->num_right(slot.known_len, k_);
  const int32_t first = slot.known_len - (is_window ? 1 : 0);
  int32_t num_steps = 0;
  while (num_steps + 1 < longest && slot.known_len + num_steps + 1 < slot.limit) ++num_steps;
  if (num_steps == 0) return;
  for (int32_t position = first; position < first + num_steps; ++position) {
    write(slot, KvOwner::kDraft, position, position + 1, first + num_right);
    read(slot, KvOwner::kDraft, position, position + 1, first);
  }
}

void SimulatedDevice::write(Slot& slot, KvOwner owner, int32_t begin, int32_t end,
                            int32_t first_wrong, int32_t first_with_hidden) {
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (layout_.groups[g].owner != owner) continue;
    for (int32_t position = begin; position < end; ++position) {
      if (!completes_entry(layout_.groups[g].kind, position)) continue;
      if (hands_on(layout_.groups[g].kind) && has_null_block(slot, g, position)) continue;
      const size_t at = cell(slot, g, position, "writes");
      cells_[g][at] = content(slot, owner, position) | (position < first_wrong ? 1 : 0);
      readers_[g][at] = position < first_with_hidden ? slot.owner.request + 1 : 0;
    }
  }
}

void SimulatedDevice::read(const Slot& slot, KvOwner owner, int32_t begin, int32_t end,
                           int32_t first_draft) const {
  for (size_t g = 0; g < layout_.groups.size(); ++g) {
    if (layout_.groups[g].owner != owner) continue;
    const auto [from, to] = read_positions(layout_.groups[g].kind, begin, end);
    for (int32_t position = from; position < to; ++position) {
      if (!completes_entry(layout_.groups[g].kind, position)) continue;
      const size_t at = cell(slot, g, position, "reads");
      const uint64_t found = cells_[g][at];
      require(readers_[g][at] == 0 || readers_[g][at] == slot.owner.request + 1, "request ",
              slot.owner.request, " reads position ", position, " of group ", g, ", which request ",
              readers_[g][at] - 1, " has written without hidden states");
      require((found | 1) == (content(slot, owner, position) | 1), "request ", slot.owner.request,
              ", sample ", slot.owner.sample, ": position ", position, " of group ", g,
              found == 0 ? " has never been written" : " holds the KV of another token");
      require(position >= first_draft || (found & 1) != 0, "request ", slot.owner.request,
              ", sample ", slot.owner.sample, ": position ", position, " of group ", g,
              " holds the KV of a rejected draft");
    }
  }
}

bool SimulatedDevice::has_null_block(const Slot& slot, size_t group, int32_t position) const {
  const int32_t entry = num_entries(layout_.groups[group].kind, position);
  const auto index = static_cast<size_t>(entry / layout_.groups[group].block_size);
  const std::vector<Entry>& table = slot.tables[group];
  return index < table.size() && table[index].block == kNullBlock;
}

size_t SimulatedDevice::cell(const Slot& slot, size_t group, int32_t position,
                             const char* verb) const {
  const std::vector<Entry>& table = slot.tables[group];
  const int32_t block_size = layout_.groups[group].block_size;
  const int32_t entry = num_entries(layout_.groups[group].kind, position);
  const auto index = static_cast<size_t>(entry / block_size);
  const auto where = [&](const char* what) {
    return concat("request ", slot.owner.request, ", sample ", slot.owner.sample, " ", verb,
                  " position ", position, " of group ", group, ", ", what);
  };
  if (index >= table.size() || table[index].block == kNullBlock) {
    throw SimulationViolation(where("for which it has no block"));
  }
  const auto block = static_cast<size_t>(table[index].block);
  if (generations_[group][block] != table[index].generation) {
    throw SimulationViolation(where("whose block has been given back"));
  }
  return block * static_cast<size_t>(block_size) + static_cast<size_t>(entry % block_size);
}

uint64_t SimulatedDevice::content(const Slot& slot, KvOwner owner, int32_t position) const {
  const int32_t lookahead = owner == KvOwner::kDraft ? script_.options.kv_lookahead : 0;
  return slot.owner.output->prefix(position + lookahead);
}

}  // namespace paceline::testing
