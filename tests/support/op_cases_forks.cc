// SPDX-License-Identifier: Apache-2.0
//
// Builders of the ops of a fork: copies of blocks and of the state in sequence slots.

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "ops/fork.h"
#include "support/op_cases.h"
#include "support/sampling_handles.h"
#include "wire/blocks.h"

namespace paceline::testing {
namespace {

enum Purpose : uint64_t { kCopies = 300, kForks };

std::vector<int32_t> random_ints(Stream& stream, int64_t count, int32_t below) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  for (int32_t& value : values) value = stream.below(below);
  return values;
}

// Numbers 0, 1, ... in random order.
std::vector<int32_t> shuffled(Stream& stream, int32_t count) {
  std::vector<int32_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (int32_t i = count - 1; i > 0; --i) {
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(stream.below(i + 1))]);
  }
  return order;
}

struct CopyBlocksSpec {
  int32_t num_copies = 0;
  int32_t claimed = 0;  // the value of num_copies
  int32_t max_copies = 0;
  std::vector<int64_t> block_bytes;  // by group
};

OpInstance make_copy_blocks(const CopyBlocksSpec& s, uint64_t seed) {
  Stream stream(seed, kCopies);
  OpInstance op;
  op.num_rows = s.num_copies;
  const auto num_groups = static_cast<int32_t>(s.block_bytes.size());
  const int64_t slab = std::accumulate(s.block_bytes.begin(), s.block_bytes.end(), int64_t{1},
                                       [](int64_t a, int64_t b) { return std::lcm(a, b); });
  // A slab belongs to one group: the first half of them has sources, the second destinations.
  const int32_t num_listed = std::max(s.num_copies, s.max_copies);
  const int32_t half = std::max(num_listed, 1);
  const std::vector<int32_t> slabs = shuffled(stream, half);
  std::vector<int32_t> copies;
  for (int32_t i = 0; i < num_listed; ++i) {
    const int32_t group = stream.below(num_groups);
    const auto blocks = static_cast<int32_t>(slab / s.block_bytes[static_cast<size_t>(group)]);
    // Several copies may share a source, whichever group owns its slab.
    const int32_t source_slab = stream.below(half);
    const int32_t destination_slab = half + slabs[static_cast<size_t>(i)];
    copies.insert(copies.end(), {group, source_slab * blocks + stream.below(blocks),
                                 destination_slab * blocks + stream.below(blocks)});
  }
  copies.resize(std::max<size_t>(copies.size(), 3), 0);
  const Handle num = op.add(int_array<int32_t>("num_copies", Role::kInput, {s.claimed}));
  const Handle list = op.add(int_array("copies", Role::kInput, copies));
  const Handle pool =
      op.add(int_array("pool", Role::kInOut, random_ints(stream, 2 * half * slab / 4, 1 << 30)));
  op.set_run([=](auto& ctx, const Addresses& at) {
    CopyBlocksParams params{.num_copies = at.get<int32_t>(num),
                            .max_copies = s.max_copies,
                            .copies = at.get<BlockCopy>(list),
                            .pool = at.raw(pool),
                            .block_bytes = {}};
    std::copy(s.block_bytes.begin(), s.block_bytes.end(), params.block_bytes);
    copy_blocks(ctx, params);
  });
  return op;
}

struct ForkSpec {
  int32_t num_forks = 0;
  int32_t claimed = 0;  // the value of num_forks
  int32_t max_forks = 0;
  int32_t max_model_len = 0;
  int32_t vocab_size = 0;
  std::vector<int32_t> block_sizes;  // by group
};

OpInstance make_fork(const ForkSpec& s, uint64_t seed) {
  Stream stream(seed, kForks);
  OpInstance op;
  op.num_rows = s.num_forks;
  const int32_t num_listed = std::max({s.num_forks, s.max_forks, 1});
  const int32_t num_parents = std::max(num_listed / 3, 1);
  const int32_t num_slots = num_listed + num_parents;
  const std::vector<int32_t> slots = shuffled(stream, num_slots);  // the parents' come first
  std::vector<int32_t> forks;
  std::vector<int32_t> adopted;
  const int32_t edge = s.block_sizes.front();
  for (int32_t i = 0; i < num_listed; ++i) {
    const int32_t lengths[] = {0,
                               1,
                               edge - 1,
                               std::min(edge, s.max_model_len),
                               edge + 1,
                               s.max_model_len,
                               stream.below(s.max_model_len)};
    const int32_t num_tokens = std::clamp(lengths[stream.below(7)], 0, s.max_model_len);
    // Every third has no parent: its history comes from the host.
    const int32_t parent = slots[static_cast<size_t>(stream.below(num_parents))];
    const bool has_parent = i % 3 != 1;
    forks.insert(forks.end(),
                 {has_parent ? parent : -1, slots[static_cast<size_t>(num_parents + i)], num_tokens,
                  has_parent ? 0 : static_cast<int32_t>(adopted.size())});
    if (has_parent) continue;
    const std::vector<int32_t> tokens = random_ints(stream, num_tokens, s.vocab_size + 3);
    adopted.insert(adopted.end(), tokens.begin(), tokens.end());
  }
  if (adopted.empty()) adopted.push_back(0);
  SamplingArrays arrays(num_slots, s.vocab_size);
  for (int32_t slot = 0; slot < num_slots; ++slot) {
    if (!stream.one_in(3)) arrays.adjusts[static_cast<size_t>(slot)] = 1;
    // Bits of `seen` that are set stay set, as those of the last chunk.
    arrays.settle(slot, random_ints(stream, 2, s.vocab_size));
  }
  const Handle num = op.add(int_array<int32_t>("num_forks", Role::kInput, {s.claimed}));
  const Handle list = op.add(int_array("forks", Role::kInput, forks));
  const Handle tokens = op.add(int_array("adopted_tokens", Role::kInput, adopted));
  // Some ids are outside the vocabulary: they enter the history, not `seen`.
  const Handle history = op.add(
      int_array("history", Role::kInOut,
                random_ints(stream, int64_t{num_slots} * s.max_model_len, s.vocab_size + 3)));
  const SamplingHandles sampling(op, arrays, Role::kInOut);
  std::vector<Handle> tables;
  for (const int32_t block_size : s.block_sizes) {
    const int64_t stride = (s.max_model_len + block_size - 1) / block_size;
    tables.push_back(
        op.add(int_array("table", Role::kInOut, random_ints(stream, num_slots * stride, 1 << 20))));
  }
  op.set_run([=](auto& ctx, const Addresses& at) {
    ForkSequencesParams params{.num_forks = at.get<int32_t>(num),
                               .max_forks = s.max_forks,
                               .forks = at.get<SequenceFork>(list),
                               .adopted_tokens = at.get<int32_t>(tokens),
                               .sequences = {},
                               .sampling = sampling.at(at),
                               .tables = {},
                               .num_tables = static_cast<int32_t>(tables.size())};
    params.sequences.history = at.get<int32_t>(history);
    params.sequences.history_stride = s.max_model_len;
    for (size_t g = 0; g < tables.size(); ++g) {
      params.tables[g] = {.blocks = at.get<int32_t>(tables[g]),
                          .stride = (s.max_model_len + s.block_sizes[g] - 1) / s.block_sizes[g],
                          .block_size = s.block_sizes[g]};
    }
    fork_sequences(ctx, params);
  });
  return op;
}

}  // namespace

std::vector<OpCase> fork_op_cases() {
  std::vector<OpCase> cases;
  const auto name_of = [](const char* op, int32_t count, int32_t claimed, int32_t most) {
    return std::string(op) + "_" + std::to_string(count) + "_claimed" + std::to_string(claimed) +
           "of" + std::to_string(most);
  };
  const struct {
    int32_t count, claimed, most;
  } sizes[] = {{0, 0, 0}, {0, 0, 5},    {1, 1, 1},      {3, 2, 3},
               {4, 9, 4}, {40, 40, 64}, {300, 300, 300}};
  for (const auto& [count, claimed, most] : sizes) {
    const std::vector<std::vector<int64_t>> layouts = {
        {64}, {4096, 64, 192}, {1088, 128, 64, 576, 192, 320}};
    for (const std::vector<int64_t>& block_bytes : layouts) {
      const CopyBlocksSpec spec = {count, claimed, most, block_bytes};
      cases.push_back({name_of("copy_blocks", count, claimed, most) + "_groups" +
                           std::to_string(block_bytes.size()),
                       [spec](uint64_t seed) { return make_copy_blocks(spec, seed); }});
    }
    for (const int32_t vocab_size : {30, 1000}) {
      const ForkSpec spec = {count, claimed, most, 300, vocab_size, {16, 1, 24}};
      cases.push_back(
          {name_of("fork_sequences", count, claimed, most) + "_v" + std::to_string(vocab_size),
           [spec](uint64_t seed) { return make_fork(spec, seed); }});
    }
  }
  const CopyBlocksSpec large_blocks = {6, 6, 6, {1 << 20, 1 << 16}};
  cases.push_back(
      {"copy_blocks_large", [=](uint64_t seed) { return make_copy_blocks(large_blocks, seed); }});
  const ForkSpec long_prompts = {5, 5, 8, 40000, 5000, {16, 256}};
  cases.push_back(
      {"fork_sequences_long", [=](uint64_t seed) { return make_fork(long_prompts, seed); }});
  return cases;
}

}  // namespace paceline::testing
