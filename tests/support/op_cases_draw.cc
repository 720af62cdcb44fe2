// SPDX-License-Identifier: Apache-2.0
//
// Draws, alone and as a part of other ops. Draws that differ are compared by their keys, since two
// may nearly tie.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/philox.h"
#include "support/draw_arrays.h"
#include "support/op_cases.h"
#include "support/row_arrays.h"

namespace paceline::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int32_t kMinInt = std::numeric_limits<int32_t>::min();
constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr uint64_t kNoise = 300;  // purpose of its random stream

// The logits that a row draws from, by its identity.
struct DrawRow {
  int64_t id;
  uint64_t seed;
  int32_t position;
  float temperature;
  bool is_inert;
};

DrawRow draw_row_of(const DrawSpec& s, int64_t id, uint64_t seed) {
  Stream stream(seed, kNoise, static_cast<uint64_t>(id));
  const float by_turns[] = {0.0f, 0.3f, 1.0f, 2.0f};
  return {.id = id,
          .seed = stream.next(),
          .position = stream.below(1 << 20),
          .temperature = s.temperature < 0.0f ? by_turns[id % 4] : s.temperature,
          .is_inert = id % 17 == 9};
}

// The token of an id of row `row`, and the first token that the target does not have. Where rows
// have their own maps, these are rotations of one order, every other one reversed: an id is then
// another token in nearly every row, and ids do not ascend with tokens.
int32_t token_of(const DrawSpec& s, int64_t row, int32_t id) {
  if (!s.is_mapped) return id;
  int32_t place = id;
  if (s.has_row_maps) {
    place = static_cast<int32_t>((id + row * 7919) % s.vocab_limit);
    if (row % 2 == 1) place = s.vocab_limit - 1 - place;
  }
  return 2 * place + place / 3 % 2;
}
int32_t token_limit(const DrawSpec& s) { return 2 + 2 * s.vocab_limit / 10 * 9; }
int32_t draw_ahead(const DrawSpec& s) { return s.is_mapped ? 2 : 1; }
// The id of a drawn token of row `row`; negative tokens stay, and vocab_limit stands for a token
// without an id.
int32_t id_of(const DrawSpec& s, int64_t row, int32_t token) {
  if (!s.is_mapped || token < 0) return token;
  int32_t id = token / 2;  // its index
  if (s.has_row_maps) {
    if (row % 2 == 1) id = s.vocab_limit - 1 - id;
    const auto shift = static_cast<int32_t>(row * 7919 % s.vocab_limit);
    id = (id - shift + s.vocab_limit) % s.vocab_limit;
  }
  const bool is_id = token / 2 < s.vocab_limit && token_of(s, row, id) == token;
  return is_id ? id : s.vocab_limit;
}

int32_t salt_of(const DrawRow& row) { return row.position / 3; }

double gumbel_key(const DrawSpec& s, const DrawRow& row, float logit, int32_t id) {
  if (!(row.temperature > 0.0f)) return logit;
  const NoiseKey key{
      .seed = row.seed,
      .stream = s.has_own_noise ? NoiseStream::kDraft : NoiseStream::kTarget,
      .position = static_cast<uint32_t>(row.position + draw_ahead(s) + s.steps_ahead),
      .salt = s.has_own_noise ? static_cast<uint32_t>(salt_of(row)) : 0};
  const int32_t token = token_of(s, row.id, id);
  const uint32_t bits =
      philox(key, static_cast<uint32_t>(token) / 4)[static_cast<size_t>(token % 4)];
  return double{logit} / row.temperature -
         std::log(-std::log1p(-static_cast<double>(uniform_open(bits))));
}

// The error in the draw `got`, where the CPU drew `want`, or in its probability.
std::string judge_draw(const DrawSpec& s, const DrawRow& row, const float* logits, bool are_exact,
                       int32_t want, int32_t got, const float* probability,
                       int64_t* num_different) {
  const auto is_close = [](double a, double b) {
    const bool is_finite = std::isfinite(a) && std::isfinite(b);
    return is_finite && std::fabs(a - b) <= 1e-4 * std::max({1.0, std::fabs(a), std::fabs(b)});
  };
  if (got >= s.vocab_limit) return "drew what has no id, the CPU " + std::to_string(want);
  if (got >= 0 && !(logits[got] > -kInf)) {
    return "drew " + std::to_string(got) + ", whose logit is " + std::to_string(logits[got]);
  }
  if (got != want) {
    const std::string both = "drew " + std::to_string(got) + ", the CPU " + std::to_string(want);
    const bool may_tie = row.temperature > 0.0f || !are_exact;
    if (!may_tie || want < 0 || got < 0) return both;
    const double key = gumbel_key(s, row, logits[got], got);
    if (!is_close(key, gumbel_key(s, row, logits[want], want))) {
      return both + " whose key is " + std::to_string(gumbel_key(s, row, logits[want], want)) +
             " and not " + std::to_string(key);
    }
    ++*num_different;
  }
  if (probability == nullptr) return {};
  double expected = 0.0;
  if (got >= 0) {
    double highest = -std::numeric_limits<double>::infinity();
    double sum = 0.0;
    for (int32_t i = 0; i < s.vocab_limit; ++i) {
      if (!std::isnan(logits[i])) highest = std::max(highest, double{logits[i]});
    }
    for (int32_t i = 0; i < s.vocab_limit; ++i) {
      if (!std::isnan(logits[i])) sum += std::exp(logits[i] - highest);
    }
    expected = std::exp(logits[got] - highest) / sum;
  }
  if (std::fabs(*probability - expected) <= 1e-6 + 1e-4 * expected) return {};
  return "probability " + std::to_string(*probability) + " of token " + std::to_string(got) +
         ", expected " + std::to_string(expected);
}

// The identities of the rows of logits, from which row i draws.
std::vector<int64_t> source_ids(const DrawSpec& s, const Rows& rows) {
  std::vector<int64_t> ids = rows.ids;
  if (s.has_own_noise) std::reverse(ids.begin(), ids.end());
  return ids;
}

}  // namespace

void fill_draw_logits(const DrawSpec& s, int64_t id, uint64_t seed, float* to) {
  fill_logits(s.logits, s.vocab_limit, id, seed, to);
  std::fill_n(to + s.vocab_limit, s.padding, kInf);
}

DrawArrays add_draw(OpInstance& op, const DrawSpec& s, const Rows& rows, uint64_t seed) {
  DrawArrays draws{.spec = s, .rows = rows, .seed = seed};
  draws.num_rows = add_num_rows(op, rows);
  const int64_t stride = draws.stride();
  // Row i belongs to pass row 2 (max - 1 - i), and that to a slot in yet another order.
  const auto size = static_cast<size_t>(rows.max_rows);
  std::vector<int32_t> row_index(size);
  std::vector<int32_t> seq_slot(2 * size, -1);
  std::vector<int32_t> positions(2 * size, kMaxInt);
  std::vector<uint64_t> seeds(size + 1, 99);
  std::vector<float> temperatures(size + 1, kNan);
  std::vector<int32_t> salts(size + 1, 99);
  std::vector<int32_t> logit_rows(size, -1);
  std::vector<size_t> slot_of(size);
  std::iota(slot_of.begin(), slot_of.end(), size_t{1});
  std::rotate(slot_of.begin(), slot_of.begin() + static_cast<int64_t>(size / 3), slot_of.end());
  for (size_t i = 0; i < size; ++i) {
    const size_t pass_row = 2 * (size - 1 - i);
    row_index[i] = static_cast<int32_t>(pass_row);
    if (i >= rows.ids.size()) continue;
    const DrawRow row = draw_row_of(s, rows.ids[i], seed);
    seq_slot[pass_row] = row.is_inert ? -1 : static_cast<int32_t>(slot_of[i]);
    positions[pass_row] = row.is_inert ? 0 : row.position;
    seeds[slot_of[i]] = row.seed;
    temperatures[slot_of[i]] = row.temperature;
    salts[slot_of[i]] = salt_of(row);
    logit_rows[i] = static_cast<int32_t>(rows.ids.size() - 1 - i);
    op.num_compared += !row.is_inert && row.temperature > 0.0f;
  }
  draws.row_index = op.add(int_array("row_index", Role::kInput, row_index));
  draws.seq_slot = op.add(int_array("seq_slot", Role::kInput, seq_slot));
  draws.positions = op.add(int_array("positions", Role::kInput, positions));
  draws.seeds = op.add(int_array("seeds", Role::kInput, seeds));
  draws.temperatures = op.add(float_array(
      "temperatures", Element::kF32, Element::kF32, static_cast<int64_t>(temperatures.size()),
      [temperatures](float* to) { std::copy(temperatures.begin(), temperatures.end(), to); }));
  if (s.is_mapped) {
    // Logits that no row may read are lower than all limits allow; if read, they would win.
    const auto num_maps = s.has_row_maps ? size : 1;
    std::vector<int32_t> all(num_maps * static_cast<size_t>(stride), kMinInt);
    for (size_t i = 0; i < (s.has_row_maps ? rows.ids.size() : 1); ++i) {
      const int64_t row = s.has_row_maps ? source_ids(s, rows)[i] : 0;
      int32_t* const tokens_of_row = all.data() + static_cast<int64_t>(i) * stride;
      for (int32_t id = 0; id < s.vocab_limit; ++id) tokens_of_row[id] = token_of(s, row, id);
    }
    draws.token_map = op.add(int_array("token_map", Role::kInput, all));
  }
  const auto own = [&](const char* name, const std::vector<int32_t>& values) {
    return s.has_own_noise ? op.add(int_array(name, Role::kInput, values)) : kNoArray;
  };
  draws.salts = own("salts", salts);
  draws.logit_rows = own("logit_rows", logit_rows);
  draws.steps_ahead = s.steps_ahead > 0
                          ? op.add(int_array<int32_t>("steps_ahead", Role::kInput, {s.steps_ahead}))
                          : kNoArray;
  OpArray drawn = output_array("tokens", Element::kI32, Element::kI32, rows.max_rows, 1);
  drawn.compare = Compare::kByCase;
  draws.tokens = op.add(std::move(drawn));
  if (s.has_probabilities) {
    OpArray of_drawn =
        output_array("probabilities", Element::kF32, Element::kF32, rows.max_rows, 1);
    of_drawn.compare = Compare::kByCase;
    draws.probabilities = op.add(std::move(of_drawn));
  }
  return draws;
}

DrawParams DrawArrays::params(const Addresses& at, const float* logits) const {
  return {.num_rows = at.get<int32_t>(num_rows),
          .max_rows = rows.max_rows,
          .logits = logits,
          .logits_stride = stride(),
          .vocab_limit = spec.vocab_limit,
          .row_index = at.get<int32_t>(row_index),
          .seq_slot = at.get<int32_t>(seq_slot),
          .positions = at.get<int32_t>(positions),
          .seeds = at.get<uint64_t>(seeds),
          .temperatures = at.get<float>(temperatures),
          .tokens = at.get<int32_t>(tokens),
          .probabilities = at.get<float>(probabilities),
          .draw_ahead = draw_ahead(spec),
          .token_map = at.get<int32_t>(token_map),
          .token_limit = token_limit(spec),
          .token_map_stride = spec.has_row_maps ? stride() : 0,
          .steps_ahead = at.get<int32_t>(steps_ahead),
          .logit_rows = at.get<int32_t>(logit_rows),
          .stream = spec.has_own_noise ? NoiseStream::kDraft : NoiseStream::kTarget,
          .salts = at.get<int32_t>(salts)};
}

std::string judge_draws(const DrawArrays& draws,
                        const std::function<void(size_t row, float* to)>& logits_of, bool are_exact,
                        const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t* num_different) {
  const DrawSpec& s = draws.spec;
  const auto at = static_cast<size_t>(draws.tokens);
  const auto* const want = reinterpret_cast<const int32_t*>(cpu[at].data());
  const auto* const got = reinterpret_cast<const int32_t*>(cuda[at].data());
  const auto* const probability =
      draws.probabilities == kNoArray
          ? nullptr
          : reinterpret_cast<const float*>(cuda[static_cast<size_t>(draws.probabilities)].data());
  std::vector<float> logits(static_cast<size_t>(draws.stride()));
  for (size_t i = 0; i < draws.rows.ids.size(); ++i) {
    const int64_t row = draws.rows.ids[i];
    logits_of(i, logits.data());
    for (int32_t id = 0; s.is_mapped && id < s.vocab_limit; ++id) {
      if (token_of(s, row, id) >= token_limit(s)) logits[static_cast<size_t>(id)] = kNan;
    }
    const std::string wrong = judge_draw(
        s, draw_row_of(s, row, draws.seed), logits.data(), are_exact, id_of(s, row, want[i]),
        id_of(s, row, got[i]), probability == nullptr ? nullptr : probability + i, num_different);
    if (!wrong.empty()) return "row " + std::to_string(i) + ": " + wrong;
  }
  for (size_t i = draws.rows.ids.size(); i < static_cast<size_t>(draws.rows.max_rows); ++i) {
    if (got[i] != want[i]) return "wrote token " + std::to_string(i) + ", beyond num_rows";
    uint32_t bits = 0xffffffffu;
    if (probability != nullptr) std::memcpy(&bits, probability + i, 4);
    if (bits != 0xffffffffu) {
      return "wrote probability " + std::to_string(i) + ", beyond num_rows";
    }
  }
  return {};
}

OpInstance make_draw(const DrawSpec& s, const Rows& rows, uint64_t seed) {
  OpInstance op;
  const DrawArrays draws = add_draw(op, s, rows, seed);
  Rows sources = rows;
  sources.ids = source_ids(s, rows);
  const Handle logits =
      op.add(row_array("logits", Element::kF32, Element::kF32, sources, draws.stride(),
                       [=](int64_t id, float* to) { fill_draw_logits(s, id, seed, to); }));
  op.set_run(
      [=](auto& ctx, const Addresses& at) { draw(ctx, draws.params(at, at.get<float>(logits))); });
  op.check = [=](const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t* num_different) {
    const auto logits_of = [&](size_t row, float* to) {
      fill_draw_logits(s, rows.ids[row], seed, to);
    };
    return judge_draws(draws, logits_of, /*are_exact=*/true, cpu, cuda, num_different);
  };
  return op;
}

}  // namespace paceline::testing
