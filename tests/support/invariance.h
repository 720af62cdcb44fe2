// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ways of computing the same sequence, for comparisons of the bits they leave behind.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "support/direct_runner.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"

namespace paceline::testing {

// The logits and KV that one way of computing a sequence produced.
struct Trace {
  std::vector<std::vector<float>> logits;               // by position
  std::vector<std::vector<std::vector<std::byte>>> kv;  // by group, by position
};

inline std::vector<int32_t> random_tokens(std::mt19937_64& random, int32_t count, int32_t vocab) {
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % vocab);
  return tokens;
}

inline void collect_kv(const DirectRunner& direct, const KvLayout& layout, int32_t length,
                       Trace& trace) {
  for (GroupId g = 0; g < static_cast<GroupId>(layout.groups.size()); ++g) {
    auto& positions = trace.kv.emplace_back();
    for (int32_t p = 0; p < length; ++p) positions.push_back(direct.kv_of(0, g, p));
  }
}

// The tokens pushed through in the given chunks; `neighbours` other sequences are in the batch.
inline Trace by_chunks(const std::shared_ptr<const Model>& model,
                       const std::vector<int32_t>& tokens, const std::vector<int32_t>& chunks,
                       DirectOptions options, int32_t neighbours, std::mt19937_64& random) {
  options.max_seqs = neighbours + 1;
  options.max_verify_rows = 2048;
  options.pool_bytes = 64 << 20;
  DirectRunner direct(model, nullptr, options);
  const auto length = static_cast<int32_t>(tokens.size());
  direct.start(0, tokens, length, 0, 0, /*is_score=*/true);
  for (int32_t n = 1; n <= neighbours; ++n) {
    direct.start(n, random_tokens(random, length, 64), length, 0, 0, true);
  }
  Trace trace;
  int32_t start = 0;
  for (const int32_t chunk : chunks) {
    for (int32_t n = neighbours; n >= 0; --n) direct.plan(n, RowKind::kScore, start, chunk);
    direct.run();
    for (auto& row : direct.logits_of(0)) trace.logits.push_back(std::move(row));
    start += chunk;
  }
  collect_kv(direct, direct.layout(), length, trace);
  return trace;
}

// A prefill of the first part, then verify windows of width k+1 whose drafts are the true tokens.
// `prepare` may change the runner first.
inline Trace by_windows(const std::shared_ptr<const Model>& model,
                        const std::vector<int32_t>& tokens, int32_t first, int32_t k,
                        DirectOptions options,
                        const std::function<void(DirectRunner&)>& prepare = {}) {
  options.num_draft_tokens = k;
  DirectRunner direct(model, nullptr, options);
  if (prepare) prepare(direct);
  const auto length = static_cast<int32_t>(tokens.size());
  direct.start(0, {tokens.begin(), tokens.begin() + first}, length + 20, 0, 0);
  Trace trace;
  direct.plan(0, RowKind::kScore, 0, first);
  direct.run();
  for (auto& row : direct.logits_of(0)) trace.logits.push_back(std::move(row));
  // Position `first` is the newest known token of the first window.
  for (int32_t base = first; base < length; base += k + 1) {
    const int32_t drafts = std::min(k, length - base - 1);
    direct.set_known(0, {tokens.begin(), tokens.begin() + base + 1},
                     {tokens.begin() + base + 1, tokens.begin() + base + 1 + drafts});
    direct.plan(0, RowKind::kDecode, 0, k + 1);
    direct.run();
    const auto rows = direct.logits_of(0);
    for (int32_t r = 0; r <= drafts; ++r) trace.logits.push_back(rows[r]);
  }
  collect_kv(direct, direct.layout(), length, trace);
  return trace;
}

inline void expect_same_bits(const Trace& actual, const Trace& expected) {
  ASSERT_EQ(actual.logits.size(), expected.logits.size());
  for (size_t p = 0; p < expected.logits.size(); ++p) {
    ASSERT_EQ(std::memcmp(actual.logits[p].data(), expected.logits[p].data(),
                          expected.logits[p].size() * sizeof(float)),
              0)
        << "logits of position " << p;
  }
  ASSERT_EQ(actual.kv, expected.kv);
}

// Options for sequences of up to 640 tokens.
inline DirectOptions long_sequence_options() {
  DirectOptions options;
  options.max_model_len = 640;
  options.max_verify_rows = 640;
  options.pool_bytes = 64 << 20;
  return options;
}

// The tokens have the same bits in one chunk, in random ones beside other sequences, one by one, in
// verify windows of every width, and in blocks of other sizes. Returns the bits.
inline Trace expect_same_bits_on_every_path(const std::shared_ptr<const Model>& model,
                                            const std::vector<int32_t>& tokens,
                                            DirectOptions options,
                                            const std::vector<int32_t>& block_sizes,
                                            std::mt19937_64& random) {
  const auto length = static_cast<int32_t>(tokens.size());
  Trace reference = by_chunks(model, tokens, {length}, options, 0, random);
  std::vector<int32_t> chunks;
  for (int32_t left = length; left > 0;) {
    chunks.push_back(static_cast<int32_t>(1 + random() % std::min(left, 50)));
    left -= chunks.back();
  }
  expect_same_bits(by_chunks(model, tokens, chunks, options, 2, random), reference);
  expect_same_bits(
      by_chunks(model, tokens, std::vector<int32_t>(tokens.size(), 1), options, 0, random),
      reference);
  options.num_threads = 2;
  for (const int32_t k : {0, 1, 3, 16}) {
    expect_same_bits(by_windows(model, tokens, 30, k, options), reference);
  }
  // Other block sizes move the KV, so only the logits can be compared.
  for (const int32_t block_size : block_sizes) {
    options.block_size = block_size;
    const Trace other = by_windows(model, tokens, 17, 3, options);
    EXPECT_EQ(other.logits, reference.logits) << "block_size " << block_size;
  }
  return reference;
}

// The largest difference of two logits; 1 if a difference is not a number.
inline double largest_difference(const Trace& a, const Trace& b) {
  double largest = 0;
  for (size_t position = 0; position < a.logits.size(); ++position) {
    for (size_t i = 0; i < a.logits[position].size(); ++i) {
      const double difference = std::fabs(double{a.logits[position][i]} - b.logits[position][i]);
      largest = std::isnan(difference) ? 1 : std::max(largest, difference);
    }
  }
  return largest;
}

}  // namespace paceline::testing
