// SPDX-License-Identifier: Apache-2.0
//
// Gumbel-max: the drawn id maximises key(id) = logit / T + g with g = -log(E), E = -log1p(-u), in
// double. Small u wins, and uniform_open is finest there. Two logarithms for each of 150,000 ids
// would dominate a draft step, so the kernel first prunes ids, without changing the result. The
// condition u < exp(...) is necessary:
//   key > best  <=>  E < exp(logit / T - best),  and u <= E always, hence u < exp(...)
// The kernel evaluates the right side in float, with a slack above all rounding errors, and
// evaluates only the remaining ids exactly. As u >= 2^-33, ids with logit / T < best - 33 log 2
// need no random number at all.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/philox.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/gather.h"
#include "ops/ops.h"

namespace paceline {
namespace {

constexpr int32_t kNoValidLogit = -2;
constexpr int32_t kInertRow = -1;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// The first id with the highest logit; kNoValidLogit if all are -inf or NaN.
struct ArgmaxKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const float* logits, int32_t n, int32_t* id) {
    using Register = typename RegisterOf<Lanes>::Type;
    using Ints = decltype(Register{} < Register{});
    constexpr int32_t kLanes = sizeof(Register) / sizeof(float);
    // Each lane keeps its first maximum; comparisons with NaN are false.
    Register best = broadcast<Register>(kNegInf);
    Ints best_start = Ints{} + kNoValidLogit;
    int32_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const Register value = load<Register>(logits + i);
      const Ints is_better = value > best;
      best = is_better ? value : best;
      best_start = is_better ? Ints{} + i : best_start;
    }
    float highest = kNegInf;
    int32_t first = kNoValidLogit;
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      const float value = best[lane];
      if (best_start[lane] < 0) continue;
      const int32_t candidate = best_start[lane] + lane;
      if (value > highest || (value == highest && candidate < first)) {
        highest = value;
        first = candidate;
      }
    }
    for (; i < n; ++i) {
      if (logits[i] > highest) {
        highest = logits[i];
        first = i;
      }
    }
    *id = first;
  }
};

double noise_of(uint32_t bits) {
  return -std::log(-std::log1p(-static_cast<double>(uniform_open(bits))));
}

double noise_of(const NoiseKey& key, int32_t token) {
  const auto words = philox(key, static_cast<uint32_t>(token) / 4);
  return noise_of(words[static_cast<size_t>(token % 4)]);
}

// The id with the highest key of some ids, the lowest of equals.
struct Winner {
  double key = 0;
  int32_t id = kNoValidLogit;  // negative: no id can be drawn

  // Whether it wins against another one.
  [[nodiscard]] bool beats(const Winner& other) const {
    if (id < 0 || other.id < 0) return id >= 0;
    return key > other.key || (key == other.key && id < other.id);
  }
};

struct Draw {
  const float* logits;
  LinearRange ids;
  double temperature;
  NoiseKey noise;
  int32_t highest;  // the id with the highest logit
  Winner winner;    // out
};

// Random numbers of as many counters as a register has lanes.
template <class Register>
struct Philox {
  static constexpr int32_t kLanes = sizeof(Register) / sizeof(uint32_t);
  using Words = typename Unsigned<Register>::Words;
  using Pairs = typename Unsigned<Register>::Pairs;

  // The 64-bit products of the lanes with one factor, as high and low halves. Even and odd lanes
  // are multiplied separately, each in 64-bit lanes.
  struct Products {
    Words high;
    Words low;
  };
  [[gnu::always_inline]] static Products multiply(const Words& lanes, uint32_t factor) {
    constexpr uint64_t kLow = 0xffffffffu;
    const Pairs pairs = reinterpret_cast<Pairs>(lanes);
    const Pairs even = (pairs & kLow) * uint64_t{factor};
    const Pairs odd = (pairs >> 32) * uint64_t{factor};
    return {.high = reinterpret_cast<Words>((even >> 32) | (odd & ~kLow)),
            .low = reinterpret_cast<Words>((even & kLow) | (odd << 32))};
  }

  // bits[4 i + w] = word w of counter first_index + i.
  template <int32_t... kLane>
  [[gnu::always_inline]] static void run(const NoiseKey& key, uint32_t first_index, uint32_t* bits,
                                         std::integer_sequence<int32_t, kLane...> /*lanes*/) {
    Words c0 = Words{kLane...} + first_index;
    Words c1 = Words{} + key.position;
    Words c2 = Words{} + static_cast<uint32_t>(key.stream);
    Words c3 = Words{} + key.salt;
    uint32_t k0 = static_cast<uint32_t>(key.seed);
    uint32_t k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const Products p0 = multiply(c0, 0xD2511F53u);
      const Products p1 = multiply(c2, 0xCD9E8D57u);
      c0 = p1.high ^ c1 ^ k0;
      c1 = p1.low;
      c2 = p0.high ^ c3 ^ k1;
      c3 = p0.low;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    // Transposes the words: first pairs of words, then pairs of pairs, so that the four words of a
    // counter are adjacent.
    using Order = decltype(Register{} < Register{});
    constexpr Order kLow = {kLane / 2 + kLane % 2 * kLanes...};
    constexpr Order kHigh = {kLanes / 2 + kLane / 2 + kLane % 2 * kLanes...};
    constexpr Order kLowPairs = {kLane / 4 * 2 + kLane % 2 + kLane / 2 % 2 * kLanes...};
    constexpr Order kHighPairs = {kLanes / 2 + kLane / 4 * 2 + kLane % 2 +
                                  kLane / 2 % 2 * kLanes...};
    const Words low01 = __builtin_shuffle(c0, c1, kLow);
    const Words low23 = __builtin_shuffle(c2, c3, kLow);
    const Words high01 = __builtin_shuffle(c0, c1, kHigh);
    const Words high23 = __builtin_shuffle(c2, c3, kHigh);
    const Words words[4] = {__builtin_shuffle(low01, low23, kLowPairs),
                            __builtin_shuffle(low01, low23, kHighPairs),
                            __builtin_shuffle(high01, high23, kLowPairs),
                            __builtin_shuffle(high01, high23, kHighPairs)};
    std::memcpy(bits, words, sizeof(words));
  }
};

struct DrawKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(Draw* draw) {
    using Register = typename RegisterOf<Lanes>::Type;
    using Ints = decltype(Register{} < Register{});
    using Random = Philox<Register>;
    constexpr int32_t kLanes = Random::kLanes;
    constexpr int32_t kIds = 4 * kLanes;  // of a step: a counter has the noise of four
    const float* const logits = draw->logits;
    const NoiseKey noise = draw->noise;
    Winner best = {
        .key = logits[draw->highest] / draw->temperature + noise_of(noise, draw->highest),
        .id = draw->highest};
    const auto try_id = [&](int32_t id, double noise_of_id) {
      const Winner tried = {.key = logits[id] / draw->temperature + noise_of_id, .id = id};
      if (tried.beats(best)) best = tried;
    };
    const int32_t end = draw->ids.first + draw->ids.count;
    // The ids before the first one that begins a counter.
    int32_t first = draw->ids.first;
    for (; first < end && first % 4 != 0; ++first) {
      if (logits[first] > kNegInf) try_id(first, noise_of(noise, first));
    }
    const float inverse = static_cast<float>(1.0 / draw->temperature);
    // The slack exceeds the errors of the float evaluation: those of scaled (2 roundings) and best
    // (1), at most 2^-22 of their magnitudes, and those of the difference and of exp, far below
    // 1e-3.
    constexpr float kSlack = 1e-3f;
    constexpr float kRelativeSlack = 1e-6f;
    constexpr float kMaxNoise = 22.875f;  // > 33 log 2
    for (int32_t start = first; start < end; start += kIds) {
      // If the best key is infinite, the argmax wins: no key is higher, and it has the lowest id.
      if (best.key == std::numeric_limits<double>::infinity()) break;
      const int32_t count = std::min(end - start, kIds);
      const float best_float = static_cast<float>(best.key);
      const float slack = kSlack + kRelativeSlack * std::fabs(best_float);
      float limit[kIds];  // log of the bound that u must be below for the id to win
      Ints any = {};
      for (int32_t i = 0; i < kIds; i += kLanes) {
        Register value = broadcast<Register>(kNegInf);
        if (i + kLanes <= count) {
          value = load<Register>(logits + start + i);
        } else if (i < count) {
          value = load_first<Register>(logits + start + i, count - i);
        }
        const Register scaled = value * inverse;
        const Register magnitude = scaled > 0.0f ? scaled : -scaled;
        const Register bound = scaled - best_float + (slack + kRelativeSlack * magnitude);
        store(limit + i, bound);
        any |= bound > -kMaxNoise;
      }
      int32_t is_any = 0;
      for (int lane = 0; lane < kLanes; ++lane) is_any |= any[lane];
      if (is_any == 0) continue;
      uint32_t bits[kIds];
      Random::run(noise, static_cast<uint32_t>(start) / 4, bits,
                  std::make_integer_sequence<int32_t, kLanes>());
      for (int32_t i = 0; i < count; i += kLanes) {
        typename Random::Words raw;
        std::memcpy(&raw, bits + i, sizeof(raw));
        // u, up to rounding; the slack covers that too.
        const Register u = __builtin_convertvector(raw, Register) * 0x1p-32f;
        const Ints survives = u <= exp(load<Register>(limit + i));
        int32_t is_any_here = 0;
        for (int lane = 0; lane < kLanes; ++lane) is_any_here |= survives[lane];
        if (is_any_here == 0) continue;
        for (int32_t lane = 0; lane < std::min(kLanes, count - i); ++lane) {
          if (survives[lane] != 0) try_id(start + i + lane, noise_of(bits[i + lane]));
        }
      }
    }
    draw->winner = best;
  }
};

// Below this temperature logit / T may exceed the range of float, so ids are not pruned.
constexpr double kMinPrunedTemperature = 1e-4;

void draw_unpruned(Draw* draw) {
  for (int32_t id = draw->ids.first; id < draw->ids.first + draw->ids.count; ++id) {
    if (!(draw->logits[id] > kNegInf)) continue;
    const Winner tried = {.key = draw->logits[id] / draw->temperature + noise_of(draw->noise, id),
                          .id = id};
    if (tried.beats(draw->winner)) draw->winner = tried;
  }
}

// The drawn id (not its token) of a row with a token map. The mapped tokens are in no order, so
// this is a plain loop, which computes the noise only of ids that could still win.
Winner draw_mapped(const DrawParams& p, const float* logits, const int32_t* map, LinearRange ids,
                   double temperature, const NoiseKey& noise) {
  constexpr double kMaxNoise = 22.875;  // > 33 log 2
  Winner best;
  for (int32_t id = ids.first; id < ids.first + ids.count; ++id) {
    const int32_t token = map[id];
    if (token >= p.token_limit || !(logits[id] > kNegInf)) continue;
    Winner tried = {.key = logits[id], .id = id};
    if (temperature > 0) {
      tried.key /= temperature;
      if (best.id >= 0 && tried.key + kMaxNoise < best.key) continue;
      tried.key += noise_of(noise, token);
    }
    if (tried.beats(best)) best = tried;
  }
  return best;
}

// The row of logits from which row i draws; negative: none.
int32_t source_of(const DrawParams& p, int32_t i) {
  return p.logit_rows != nullptr ? p.logit_rows[i] : i;
}

// The token map of a row of logits, or null.
const int32_t* map_of(const DrawParams& p, int32_t source) {
  return p.token_map != nullptr ? p.token_map + source * p.token_map_stride : nullptr;
}

// The best of some ids of a row. If there is a token map, the caller looks up its token.
Winner draw_row(const DrawParams& p, int32_t i, int32_t source, LinearRange ids) {
  const int32_t row = p.row_index[i];
  const int32_t seq_slot = p.seq_slot[row];
  if (seq_slot < 0 || source < 0) return {.id = kInertRow};
  const float* const logits = p.logits + source * p.logits_stride;
  const float temperature = p.temperatures != nullptr ? p.temperatures[seq_slot] : 0.0f;
  const int32_t ahead = p.draw_ahead + (p.steps_ahead != nullptr ? *p.steps_ahead : 0);
  const NoiseKey noise = {
      .seed = p.seeds[seq_slot],
      .stream = p.stream,
      .position = static_cast<uint32_t>(p.positions[row] + ahead),
      .salt = p.salts != nullptr ? static_cast<uint32_t>(p.salts[seq_slot]) : 0};
  if (p.token_map != nullptr) {
    return draw_mapped(p, logits, map_of(p, source), ids, temperature, noise);
  }
  int32_t highest = kNoValidLogit;
  run_best_isa<ArgmaxKernel>(logits + ids.first, ids.count, &highest);
  if (highest == kNoValidLogit) return {};
  highest += ids.first;
  if (!(temperature > 0.0f)) return {.key = logits[highest], .id = highest};
  Draw draw = {.logits = logits,
               .ids = ids,
               .temperature = temperature,
               .noise = noise,
               .highest = highest,
               .winner = {}};
  // Logits beyond 1e30 would overflow at the temperatures that remain.
  if (temperature < kMinPrunedTemperature || std::fabs(logits[highest]) > 1e30f) {
    draw_unpruned(&draw);
  } else {
    run_best_isa<DrawKernel>(&draw);
  }
  return draw.winner;
}

// The probability of id `drawn`: softmax at temperature 1 over the ids that may be drawn.
float probability_of(const DrawParams& p, const float* logits, const int32_t* map, int32_t drawn) {
  const auto may_be_drawn = [&](int32_t id) {
    return logits[id] > kNegInf && (map == nullptr || map[id] < p.token_limit);
  };
  float highest = kNegInf;
  for (int32_t id = 0; id < p.vocab_limit; ++id) {
    if (may_be_drawn(id)) highest = std::max(highest, logits[id]);
  }
  double sum = 0.0;
  for (int32_t id = 0; id < p.vocab_limit; ++id) {
    if (may_be_drawn(id)) sum += std::exp(double{logits[id]} - highest);
  }
  return static_cast<float>(std::exp(double{logits[drawn]} - highest) / sum);
}

// The token of a drawn id of the row of logits `source`.
int32_t token_of(const DrawParams& p, int32_t source, int32_t drawn) {
  return p.token_map != nullptr && drawn >= 0 ? map_of(p, source)[drawn] : drawn;
}

void draw_into(const DrawParams& p, int32_t i) {
  const int32_t source = source_of(p, i);
  const int32_t drawn = draw_row(p, i, source, {.first = 0, .count = p.vocab_limit}).id;
  p.tokens[i] = token_of(p, source, drawn);
  if (p.probabilities == nullptr) return;
  p.probabilities[i] =
      drawn < 0 ? 0.0f
                : probability_of(p, p.logits + source * p.logits_stride, map_of(p, source), drawn);
}

// Calls draw(i) for the rows, on several threads if that is worth it.
template <class DrawOne>
void for_drawn_rows(CpuContext& ctx, int32_t num_rows, int32_t num_ids, const DrawOne& draw) {
  constexpr int64_t kMinParallelIds = 8 << 10;
  if (ctx.num_threads == 1 || int64_t{num_rows} * num_ids < kMinParallelIds) {
    for (int32_t i = 0; i < num_rows; ++i) draw(i);
    return;
  }
  ctx.for_ranges(num_rows, /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) draw(static_cast<int32_t>(i));
  });
}

}  // namespace

void draw(CpuContext& ctx, const DrawParams& p) {
  for_drawn_rows(ctx, std::min(*p.num_rows, p.max_rows), p.vocab_limit,
                 [&](int32_t i) { draw_into(p, i); });
}

void check_gathered(const GatheredDrawParams& p) {
  PACELINE_CHECK(p.ranks.group != nullptr && p.columns.num_ranks == p.ranks.group->num_ranks(),
                 p.columns.num_ranks, " ranks share the ids of a draw");
  PACELINE_CHECK(p.draw.probabilities == nullptr && p.draw.logit_rows == nullptr,
                 "the draw reads the logits of all ids");
  PACELINE_CHECK(p.draw.vocab_limit <= p.columns.total(), "ranks have ", p.columns.total(), " of ",
                 p.draw.vocab_limit, " ids");
}

void gathered_draw(CpuContext& ctx, const GatheredDrawParams& p) {
  check_gathered(p);
  const DrawParams& d = p.draw;
  RankGroup& group = *p.ranks.group;
  const int32_t num_ranks = group.num_ranks();
  const int32_t num_rows = std::min(*d.num_rows, d.max_rows);
  const LinearRange ids = p.own_ids();
  const int64_t row_bytes = int64_t{sizeof(Winner)} * num_ranks;
  const auto rows_a_step = static_cast<int32_t>(
      std::min<int64_t>(group.place_bytes() / row_bytes, std::max(num_rows, 1)));
  for (int32_t first = 0; first < num_rows; first += rows_a_step) {
    const int32_t count = std::min(rows_a_step, num_rows - first);
    auto* const winners = reinterpret_cast<Winner*>(group.place(p.ranks.rank));
    for_drawn_rows(ctx, count, ids.count, [&](int32_t i) {
      winners[i * num_ranks + p.ranks.rank] = draw_row(d, first + i, first + i, ids);
    });
    group.meet(p.ranks.rank);
    for (int32_t i = 0; i < count; ++i) {
      Winner best = winners[i * num_ranks];
      for (int32_t rank = 1; rank < num_ranks; ++rank) {
        const Winner& other = winners[i * num_ranks + rank];
        if (other.beats(best)) best = other;
      }
      d.tokens[first + i] = token_of(d, first + i, best.id);
    }
  }
}

}  // namespace paceline
