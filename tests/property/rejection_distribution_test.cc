// SPDX-License-Identifier: Apache-2.0
//
// `standard` and `block` acceptance keep the target's distribution exactly. The rules that the ops
// use (sample/rejection_rules.h) are run on fractions, over all drafts and all outcomes of the
// acceptance tests, on small vocabularies whose distributions depend on the prefix. PACELINE_SEED
// overrides the seed; failures print it.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <vector>

#include "sample/rejection_rules.h"
#include "support/op_cases.h"
#include "support/rational.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

using Distribution = std::vector<Rational>;             // by token
using Prefix = std::vector<int32_t>;                    // tokens
using DistributionOf = std::map<Prefix, Distribution>;  // of the token after a prefix
using StopsAt = std::map<Prefix, bool>;

enum class Pair : uint8_t { kRandom, kEqual, kDisjoint, kTies, kCount };
enum class Drafts : uint8_t { kSampled, kTopTwo, kGreedy };

struct World {
  int32_t vocab;
  int32_t k;
  DistributionOf target;
  DistributionOf drafter;
  StopsAt stops;  // by what was drafted
};

// Random weights from 0 to 4, normalised; at least one is not 0.
Distribution random_distribution(Stream& stream, int32_t vocab, const std::vector<bool>& may_be) {
  std::vector<int64_t> weights(static_cast<size_t>(vocab));
  int64_t sum = 0;
  while (sum == 0) {
    for (size_t token = 0; token < weights.size(); ++token) {
      weights[token] = may_be[token] && !stream.one_in(3) ? stream.below(5) : 0;
    }
    sum = std::accumulate(weights.begin(), weights.end(), int64_t{0});
  }
  Distribution distribution;
  for (const int64_t weight : weights) distribution.emplace_back(weight, sum);
  return distribution;
}

void add_prefixes(Stream& stream, Pair pair, const Prefix& prefix, World& world) {
  const auto size = static_cast<size_t>(world.vocab);
  std::vector<bool> all(size, true);
  std::vector<bool> even(size);
  std::vector<bool> odd(size);
  for (size_t token = 0; token < size; ++token) {
    even[token] = token % 2 == 0;
    odd[token] = token % 2 == 1;
  }
  const bool is_disjoint = pair == Pair::kDisjoint;
  Distribution& target = world.target[prefix] =
      random_distribution(stream, world.vocab, is_disjoint ? even : all);
  Distribution& drafter = world.drafter[prefix] =
      random_distribution(stream, world.vocab, is_disjoint ? odd : all);
  if (pair == Pair::kEqual && !stream.one_in(4)) drafter = target;
  if (pair == Pair::kTies) {
    drafter.assign(size, Rational(1, world.vocab));
    if (stream.one_in(2)) target = drafter;
  }
  world.stops[prefix] = stream.one_in(3);
  if (static_cast<int32_t>(prefix.size()) == world.k) return;
  for (int32_t token = 0; token < world.vocab; ++token) {
    Prefix longer = prefix;
    longer.push_back(token);
    add_prefixes(stream, pair, longer, world);
  }
}

World random_world(uint64_t seed, Pair pair) {
  Stream stream(seed, 1, static_cast<uint64_t>(pair));
  World world{.vocab = 3 + stream.below(4), .k = 1 + stream.below(3)};
  // Larger worlds take long, so only some are tried, and worlds with three drafts stay small.
  if (world.k == 3 && !stream.one_in(16)) world.vocab = std::min(world.vocab, 4);
  add_prefixes(stream, pair, {}, world);
  return world;
}

// The distribution that drafts are sampled from: all of the drafter's, its two most likely tokens,
// or its most likely token alone. Among equal probabilities the lowest id comes first.
Distribution draft_distribution(const Distribution& drafter, Drafts drafts) {
  if (drafts == Drafts::kSampled) return drafter;
  std::vector<size_t> order(drafter.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return drafter[b] < drafter[a]; });
  const size_t count = drafts == Drafts::kTopTwo ? 2 : 1;
  Rational sum;
  for (size_t i = 0; i < count; ++i) sum += drafter[order[i]];
  Distribution distribution(drafter.size());
  for (size_t i = 0; i < count; ++i) distribution[order[i]] = drafter[order[i]] / sum;
  return distribution;
}

// Enumerates all outcomes of a series of acceptance tests, each once.
class Tries {
 public:
  void begin() {
    next_ = 0;
    weight_ = Rational(1);
  }
  bool succeeds(const Rational& probability) {
    if (next_ == outcomes_.size()) outcomes_.push_back(true);
    const bool outcome = outcomes_[next_++];
    weight_ = weight_ * (outcome ? probability : Rational(1) - probability);
    return outcome;
  }
  // False once all outcomes have been enumerated.
  bool advance() {
    outcomes_.resize(next_);
    while (!outcomes_.empty() && !outcomes_.back()) outcomes_.pop_back();
    if (outcomes_.empty()) return false;
    outcomes_.back() = false;
    return true;
  }
  [[nodiscard]] const Rational& weight() const { return weight_; }

 private:
  std::vector<bool> outcomes_;
  size_t next_ = 0;
  Rational weight_;
};

// One window: the distribution of the tokens that it emits.
class Window {
 public:
  Window(const World& world, AcceptMethod method, Drafts drafts, bool stops_early)
      : world_(world), method_(method), drafts_(drafts), stops_early_(stops_early) {
    (void)explore(Rational(1));
  }

  // Prefixes that the window emits, with their probabilities.
  [[nodiscard]] const std::map<Prefix, Rational>& emitted() const { return emitted_; }
  [[nodiscard]] const Rational& mean_kept() const { return mean_kept_; }

  // For accept_drafts.
  [[nodiscard]] Rational p(int32_t at) const { return target(at)[token(at)]; }
  [[nodiscard]] Rational q(int32_t at) const { return drafted(at)[token(at)]; }
  [[nodiscard]] Rational overlap(int32_t at, const Rational& share) const {
    const Distribution q = drafted(at);
    Rational sum;
    for (size_t id = 0; id < q.size(); ++id) {
      const Rational scaled = share * target(at)[id];
      sum += scaled < q[id] ? scaled : q[id];
    }
    return sum;
  }

 private:
  [[nodiscard]] size_t token(int32_t at) const {
    return static_cast<size_t>(path_[static_cast<size_t>(at)]);
  }
  [[nodiscard]] Prefix before(int32_t at) const { return {path_.begin(), path_.begin() + at}; }
  [[nodiscard]] const Distribution& target(int32_t at) const {
    return world_.target.at(before(at));
  }
  [[nodiscard]] Distribution drafted(int32_t at) const {
    return draft_distribution(world_.drafter.at(before(at)), drafts_);
  }

  // The probability of each number of accepted drafts, given that `path_` has been drafted; emits
  // what ends here. `weight`: the probability of `path_`.
  std::vector<Rational> explore(const Rational& weight) {
    const size_t length = path_.size();
    const bool is_last = length == static_cast<size_t>(world_.k) ||
                         (stops_early_ && length > 0 && world_.stops.at(path_));
    std::vector<Rational> kept(length + 1);
    if (is_last) {
      kept = judge();
    } else {
      const Distribution distribution = drafted(static_cast<int32_t>(length));
      for (size_t id = 0; id < distribution.size(); ++id) {
        if (distribution[id] == Rational(0)) continue;
        path_.push_back(static_cast<int32_t>(id));
        const std::vector<Rational> of_longer = explore(weight * distribution[id]);
        path_.pop_back();
        for (size_t count = 0; count <= length; ++count)
          kept[count] += distribution[id] * of_longer[count];
      }
    }
    emit(weight * kept[length], is_last);
    return kept;
  }

  // The same at the end of the drafts.
  std::vector<Rational> judge() {
    std::vector<Rational> kept(path_.size() + 1);
    Tries tries;
    do {
      tries.begin();
      const AcceptedDrafts<Rational> verdict = accept_drafts<Rational>(
          method_, static_cast<int32_t>(path_.size()), *this,
          [&](int32_t, const Rational& probability) { return tries.succeeds(probability); });
      kept[static_cast<size_t>(verdict.count)] += tries.weight();
      if (tries.weight() == Rational(0)) continue;
      // The number of accepted drafts depends on nothing else.
      const auto [at, is_new] = shares_.try_emplace(before(verdict.count), verdict.share);
      EXPECT_EQ(at->second, verdict.share);
    } while (tries.advance());
    return kept;
  }

  // With this probability the window emits `path_` and one more token.
  void emit(const Rational& probability, bool is_last) {
    if (probability == Rational(0)) return;
    mean_kept_ += probability * Rational(static_cast<int64_t>(path_.size()));
    const auto at = static_cast<int32_t>(path_.size());
    Distribution next = target(at);
    if (!is_last) {
      const Distribution q = drafted(at);
      Rational sum;
      for (size_t id = 0; id < next.size(); ++id) {
        next[id] = residual(shares_.at(path_), next[id], q[id]);
        sum += next[id];
      }
      ASSERT_FALSE(sum == Rational(0)) << "nothing is left to draw from";
      for (Rational& of : next) of = of / sum;
    }
    for (size_t id = 0; id < next.size(); ++id) {
      if (next[id] == Rational(0)) continue;
      Prefix longer = path_;
      longer.push_back(static_cast<int32_t>(id));
      emitted_[longer] += probability * next[id];
    }
  }

  const World& world_;
  AcceptMethod method_;
  Drafts drafts_;
  bool stops_early_;
  Prefix path_;  // drafted so far
  std::map<Prefix, Rational> shares_;
  std::map<Prefix, Rational> emitted_;
  Rational mean_kept_;
};

// The distribution of sequences of k + 1 tokens: what a window has emitted is continued by sampling
// from the target.
void extend(const World& world, const Prefix& prefix, const Rational& probability,
            std::map<Prefix, Rational>& distribution) {
  if (static_cast<int32_t>(prefix.size()) == world.k + 1) {
    distribution[prefix] += probability;
    return;
  }
  const Distribution& next = world.target.at(prefix);
  for (size_t id = 0; id < next.size(); ++id) {
    if (next[id] == Rational(0)) continue;
    Prefix longer = prefix;
    longer.push_back(static_cast<int32_t>(id));
    extend(world, longer, probability * next[id], distribution);
  }
}

TEST(RejectionDistribution, IsTheTargetsExactly) {
  TRACE_SEED();
  constexpr int32_t kWorldsOfAPair = 150;
  int32_t num_better = 0;  // where block accepts more than standard
  for (int32_t pair = 0; pair < static_cast<int32_t>(Pair::kCount); ++pair) {
    for (uint64_t i = 0; i < kWorldsOfAPair; ++i) {
      const World world = random_world(base_seed() + i, static_cast<Pair>(pair));
      std::map<Prefix, Rational> plain;
      extend(world, {}, Rational(1), plain);
      for (const Drafts drafts : {Drafts::kSampled, Drafts::kTopTwo, Drafts::kGreedy}) {
        for (const bool stops_early : {false, true}) {
          std::array<Rational, 2> kept;
          for (const AcceptMethod method : {AcceptMethod::kStandard, AcceptMethod::kBlock}) {
            SCOPED_TRACE(::testing::Message()
                         << "pair " << pair << ", world " << i << ", vocabulary " << world.vocab
                         << ", k " << world.k << ", drafts " << static_cast<int>(drafts)
                         << (stops_early ? ", stops" : "")
                         << (method == AcceptMethod::kBlock ? ", block" : ", standard"));
            const Window window(world, method, drafts, stops_early);
            std::map<Prefix, Rational> distribution;
            for (const auto& [prefix, probability] : window.emitted()) {
              extend(world, prefix, probability, distribution);
            }
            ASSERT_EQ(distribution, plain);
            kept[method == AcceptMethod::kBlock ? 1 : 0] = window.mean_kept();
          }
          EXPECT_FALSE(kept[1] < kept[0])
              << "block accepts " << kept[1] << ", standard " << kept[0];
          num_better += kept[0] < kept[1] ? 1 : 0;
        }
      }
    }
  }
  // Otherwise the two methods would be the same.
  EXPECT_GT(num_better, 100);
}

TEST(RejectionDistribution, EqualDistributionsAcceptEveryDraft) {
  for (const AcceptMethod method : {AcceptMethod::kStandard, AcceptMethod::kBlock}) {
    World world = random_world(base_seed(), Pair::kRandom);
    world.drafter = world.target;
    const Window window(world, method, Drafts::kSampled, /*stops_early=*/false);
    EXPECT_EQ(window.mean_kept(), Rational(world.k));
  }
}

// Probabilities by hand: p = (1/2, 1/2), q = (3/4, 1/4), twice over.
TEST(RejectionDistribution, ProbabilitiesByHand) {
  const auto half = Rational(1, 2);
  EXPECT_EQ(acceptance_probability(half, Rational(3, 4)), Rational(2, 3));
  EXPECT_EQ(acceptance_probability(half, Rational(1, 4)), Rational(1));
  EXPECT_EQ(acceptance_probability(Rational(0), Rational(1, 4)), Rational(0));
  // The target excludes this token, and q is so small that it has been rounded to 0.
  EXPECT_EQ(acceptance_probability(Rational(0), Rational(0)), Rational(0));
  EXPECT_EQ(next_share(Rational(1), Rational(0), Rational(0)), Rational(0));
  EXPECT_EQ(next_share(Rational(2, 3), half, Rational(1, 4)), Rational(1));
  EXPECT_EQ(next_share(Rational(2, 3), half, Rational(3, 4)), Rational(4, 9));
  // The residual of 2/3 (1/2, 1/2) - (3/4, 1/4) sums to 1/12; the overlap is 1/3 + 1/4.
  EXPECT_EQ(block_acceptance_probability(Rational(2, 3), Rational(7, 12)), Rational(1, 5));
  EXPECT_EQ(block_acceptance_probability(Rational(1), Rational(1)), Rational(1));
  EXPECT_EQ(block_acceptance_probability(half, half), Rational(0));
  EXPECT_EQ(residual(Rational(2, 3), half, Rational(1, 4)), Rational(1, 12));
  EXPECT_EQ(residual(Rational(2, 3), half, Rational(3, 4)), Rational(0));
}

}  // namespace
}  // namespace paceline::testing
