// SPDX-License-Identifier: Apache-2.0
//
// The op cases of recurrent layers.

#include "support/op_cases_recurrent.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

#include "base/float_types.h"
#include "support/row_values.h"
#include "support/store_arrays.h"

namespace paceline::testing {
namespace {

enum RecurrentPurpose : uint64_t { kInputs = 200, kGates, kRates, kStates, kPlaces, kConstants };

// What is small beside the sums of a long recurrence, and large beside an error in it.
constexpr double kOutputBound = 1e-5;
constexpr double kStateBound = 1e-5;
// Tensor cores round k, S and what is added to it to the 11 bits of TF32.
constexpr double kTf32StateBound = 1e-3;

// Where the sequences lie. Block 0 of both pools is the null block, and NaN.
struct Places {
  Places(const RecurrentSpec& s, const RecurrentBatch& batch, uint64_t seed) {
    int32_t longest = 1;
    lengths.resize(batch.sequences.size());
    for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = batch.sequences[i].num_known;
    std::vector<int32_t> first_entries(lengths.size(), std::numeric_limits<int32_t>::max());
    for (const auto& pass : batch.passes) {
      for (const RecurrentRows& rows : pass) {
        const auto i = static_cast<size_t>(rows.sequence);
        lengths[i] = std::max(lengths[i], rows.start + rows.num_rows);
        first_entries[i] = std::min(first_entries[i], rows.first_entry);
        longest = std::max(longest, lengths[i]);
      }
    }
    stride = longest / s.block_size + 3;
    Stream stream(seed, kPlaces);
    slots.resize(lengths.size() + 2);
    std::iota(slots.begin(), slots.end(), 0);
    shuffle(slots, stream);
    const auto count = slots.size() * static_cast<size_t>(stride);
    record_blocks.assign(count, 0);
    entry_blocks.assign(count, 0);
    for (size_t i = 0; i < lengths.size(); ++i) {
      const int32_t known = batch.sequences[i].num_known;
      const int32_t first_record = std::max(0, first_needed(s, known)) / s.block_size;
      for (int32_t b = first_record; b * s.block_size < lengths[i]; ++b) {
        record_blocks[at(i, b)] = 1 + num_records++;
      }
      const int32_t known_entry = known / s.block_size - 1;
      for (int32_t e = std::max(0, known_entry); (e + 1) * s.block_size <= lengths[i]; ++e) {
        if (e == known_entry || e >= first_entries[i]) entry_blocks[at(i, e)] = 1 + num_entries++;
      }
    }
    shuffle_blocks(record_blocks, num_records, stream);
    shuffle_blocks(entry_blocks, num_entries, stream);
  }
  // The first position whose inputs a row at `start` or a later one needs.
  [[nodiscard]] static int32_t first_needed(const RecurrentSpec& s, int32_t start) {
    return start / s.block_size * s.block_size - s.shape.num_taps + 1;
  }
  [[nodiscard]] size_t at(size_t sequence, int32_t block) const {
    return static_cast<size_t>(slots[sequence]) * static_cast<size_t>(stride) +
           static_cast<size_t>(block);
  }

  std::vector<int32_t> lengths;  // by sequence
  std::vector<int32_t> slots;
  std::vector<int32_t> record_blocks;
  std::vector<int32_t> entry_blocks;
  int32_t stride = 0;
  int32_t num_records = 0;
  int32_t num_entries = 0;

 private:
  static void shuffle_blocks(std::vector<int32_t>& blocks, int32_t count, Stream& stream) {
    std::vector<int32_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 1);
    shuffle(order, stream);
    for (int32_t& block : blocks) {
      if (block > 0) block = order[static_cast<size_t>(block) - 1];
    }
  }
};

// What a row of a pass is computed for.
struct RowName {
  int32_t sequence = -1;  // -1: inert
  int32_t position = 0;
  bool is_rejected = false;
};

// u, then b and a, of a token.
void fill_record(const RecurrentShape& shape, uint64_t seed, int64_t content, const RowName& name,
                 float* to) {
  const auto token = static_cast<uint64_t>(2 * name.position + (name.is_rejected ? 1 : 0));
  Stream(seed, kInputs, static_cast<uint64_t>(content), token).fill(to, shape.num_channels());
  Stream(seed, kRates, static_cast<uint64_t>(content), token)
      .fill(to + shape.num_channels(), 2 * shape.num_value_heads);
}

struct PassArrays {
  int32_t first_row = 0;
  int32_t first_seq = 0;  // of row_indptr
  int32_t max_rows = 0;
  int32_t max_seqs = 0;
  int32_t max_rows_per_seq = 0;
};

}  // namespace

OpInstance make_gated_delta(const RecurrentSpec& s, const RecurrentBatch& batch, uint64_t seed) {
  OpInstance op;
  const RecurrentShape shape = s.shape;
  const Element element = element_of(s.dtype);
  const Element stored = element_of(s.records);
  const auto places = std::make_shared<const Places>(s, batch, seed);
  const int64_t x_width = shape.num_channels() + shape.values_width();
  const int64_t x_stride = x_width + s.x_padding;
  const int64_t ba_stride = 2 * shape.num_value_heads + s.x_padding;

  std::vector<RowName> names;
  std::vector<PassArrays> passes;
  std::vector<int32_t> num_rows;
  std::vector<int32_t> num_seqs;
  std::vector<int32_t> indptr;
  std::vector<int32_t> positions;
  std::vector<int32_t> seq_slot;
  std::vector<int64_t> record_slots;
  std::vector<int64_t> entry_slots;
  for (const auto& pass : batch.passes) {
    PassArrays arrays = {.first_row = static_cast<int32_t>(names.size()),
                         .first_seq = static_cast<int32_t>(indptr.size()),
                         .max_rows_per_seq = std::max(s.max_rows_per_seq, 1)};
    indptr.push_back(0);
    const auto add_row = [&](const RowName& name, bool stores_nothing, int32_t first_entry) {
      names.push_back(name);
      const bool is_live = name.sequence >= 0;
      const auto sequence = static_cast<size_t>(std::max(name.sequence, 0));
      const int32_t block = name.position / s.block_size;
      const int32_t offset = name.position % s.block_size;
      const bool completes = offset == s.block_size - 1 && block >= first_entry;
      positions.push_back(is_live ? name.position : 1 << 20);
      seq_slot.push_back(is_live ? places->slots[sequence] : -1);
      const bool stores = is_live && !stores_nothing;
      record_slots.push_back(
          stores
              ? int64_t{places->record_blocks[places->at(sequence, block)]} * s.block_size + offset
              : offset);
      entry_slots.push_back(stores && completes ? places->entry_blocks[places->at(sequence, block)]
                                                : 0);
    };
    for (const RecurrentRows& rows : pass) {
      for (int32_t r = 0; r < rows.num_rows; ++r) {
        add_row({rows.sequence, rows.start + r, r >= rows.num_rows - rows.num_rejected},
                rows.stores_nothing, rows.first_entry);
      }
      for (int32_t r = 0; r < rows.num_inert; ++r) add_row({}, true, 0);
      indptr.push_back(static_cast<int32_t>(names.size()) - arrays.first_row);
      arrays.max_rows_per_seq = std::max(arrays.max_rows_per_seq, rows.num_rows + rows.num_inert);
    }
    const int32_t count = indptr.back();
    const int32_t extra_seqs = batch.extra_seqs.empty()
                                   ? s.extra_seqs
                                   : batch.extra_seqs[passes.size() % batch.extra_seqs.size()];
    num_rows.push_back(count);
    num_seqs.push_back(static_cast<int32_t>(pass.size()));
    op.num_rows += count;
    // Stale rows and sequences of an earlier, larger pass.
    for (int32_t r = 0; r < batch.extra_rows; ++r) {
      names.push_back({});
      positions.push_back(r);
      seq_slot.push_back(0);
      record_slots.push_back(s.block_size + r);
      entry_slots.push_back(1);
    }
    for (int32_t r = 0; r < extra_seqs; ++r) indptr.push_back(count + 1);
    arrays.max_rows = count + batch.extra_rows;
    arrays.max_seqs = static_cast<int32_t>(pass.size()) + extra_seqs;
    passes.push_back(arrays);
  }
  const auto all_rows = static_cast<int64_t>(names.size());
  // A content may be longer than the known tokens of another sequence with it.
  const auto content_of = [sequences = batch.sequences](const RowName& name) {
    return sequences[static_cast<size_t>(name.sequence)].content;
  };

  const Handle num_rows_at = op.add(int_array("num_rows", Role::kInput, num_rows));
  OpArray inputs = float_array("x", Element::kF32, element, all_rows * x_stride, [=](float* to) {
    std::fill_n(to, all_rows * x_stride, kNan);  // inert rows may hold anything
    std::vector<float> record(static_cast<size_t>(shape.record_width()));
    for (const RowName& name : names) {
      if (name.sequence >= 0) {
        fill_record(shape, seed, content_of(name), name, record.data());
        std::copy_n(record.data(), shape.num_channels(), to);
        Stream(seed, kGates, static_cast<uint64_t>(content_of(name)),
               static_cast<uint64_t>(2 * name.position + (name.is_rejected ? 1 : 0)))
            .fill(to + shape.num_channels(), shape.values_width());
      }
      to += x_stride;
    }
  });
  inputs.row_length = x_stride;
  const Handle x = op.add(std::move(inputs));
  OpArray rates = float_array("ba", Element::kF32, element, all_rows * ba_stride, [=](float* to) {
    std::fill_n(to, all_rows * ba_stride, kNan);
    std::vector<float> record(static_cast<size_t>(shape.record_width()));
    for (const RowName& name : names) {
      if (name.sequence >= 0) {
        fill_record(shape, seed, content_of(name), name, record.data());
        std::copy_n(record.data() + shape.num_channels(), 2 * shape.num_value_heads, to);
      }
      to += ba_stride;
    }
  });
  rates.row_length = ba_stride;
  const Handle ba = op.add(std::move(rates));
  const Handle positions_at = op.add(int_array("positions", Role::kInput, positions));
  const Handle slots_at = op.add(int_array("seq_slot", Role::kInput, seq_slot));
  const Handle record_slots_at = op.add(int_array("record_slots", Role::kInput, record_slots));
  const Handle entry_slots_at = op.add(int_array("entry_slots", Role::kInput, entry_slots));
  const Handle record_table =
      op.add(int_array("record_table", Role::kInput, places->record_blocks));
  const Handle entry_table = op.add(int_array("entry_table", Role::kInput, places->entry_blocks));

  const int64_t record_width = shape.record_width();
  const int64_t record_block = s.block_size * record_width + 2 * kGap;
  const int64_t record_count = (1 + places->num_records) * record_block;
  OpArray records = float_array("records", stored, stored, record_count, [=](float* to) {
    std::fill_n(to, record_count, kNan);
    for (size_t i = 0; i < batch.sequences.size(); ++i) {
      const auto& [content, known] = batch.sequences[i];
      for (int32_t t = std::max(0, Places::first_needed(s, known)); t < known; ++t) {
        const int64_t block = places->record_blocks[places->at(i, t / s.block_size)];
        float* const record = to + block * record_block + kGap + t % s.block_size * record_width;
        fill_record(shape, seed, content, {static_cast<int32_t>(i), t, false}, record);
        // As the rows that have left them had it.
        if (s.dtype != DType::kBFloat16) continue;
        for (int64_t c = 0; c < record_width; ++c) {
          record[c] = bf16_to_float(float_to_bf16(record[c]));
        }
      }
    }
  });
  records.role = Role::kInOut;
  records.compare = Compare::kExact;  // copies
  const Handle records_at = op.add(std::move(records));

  const int64_t state_width = shape.state_width();
  const int64_t entry_block = state_width + 2 * kGap;
  const int64_t entry_count = (1 + places->num_entries) * entry_block;
  OpArray entries =
      float_array("entries", Element::kF32, Element::kF32, entry_count, [=](float* to) {
        std::fill_n(to, entry_count, kNan);
        for (size_t i = 0; i < batch.sequences.size(); ++i) {
          const auto& [content, known] = batch.sequences[i];
          const int32_t entry = known / s.block_size - 1;
          if (entry < 0) continue;
          const int64_t block = places->entry_blocks[places->at(i, entry)];
          Stream(seed, kStates, static_cast<uint64_t>(content), static_cast<uint64_t>(entry))
              .fill(to + block * entry_block + kGap, state_width, 0.3f);
        }
      });
  entries.role = Role::kInOut;
  entries.rms_bound = s.dtype == DType::kBFloat16 && s.records == DType::kBFloat16 &&
                              shape.key_dim == 128 && shape.value_dim == 128
                          ? kTf32StateBound
                          : kStateBound;
  const Handle entries_at = op.add(std::move(entries));

  const auto constant = [&](const char* name, int64_t count, float offset, float scale) {
    const auto salt = static_cast<uint64_t>(op.arrays.size());
    return op.add(float_array(name, Element::kF32, Element::kF32, count, [=](float* to) {
      Stream(seed, kConstants, salt).fill(to, count, scale);
      for (int64_t i = 0; i < count; ++i) to[i] += offset;
    }));
  };
  const Handle conv = constant("conv", int64_t{shape.num_channels()} * shape.num_taps, 0, 0.5f);
  const Handle a_log = constant("a_log", shape.num_value_heads, -0.5f, 0.7f);
  const Handle dt_bias = constant("dt_bias", shape.num_value_heads, 0.0f, 1.0f);
  const Handle norm = constant("norm", shape.value_dim, 1.0f, 0.2f);
  const int64_t y_width = shape.values_width();
  OpArray out = output_array("y", Element::kF32, element, all_rows * y_width, y_width);
  if (s.dtype == DType::kFloat32) out.rms_bound = kOutputBound;
  const Handle y = op.add(std::move(out));
  const Handle num_seqs_at = op.add(int_array("num_seqs", Role::kInput, num_seqs));
  const Handle row_indptr = op.add(int_array("row_indptr", Role::kInput, indptr));

  const int64_t stride = places->stride;
  op.set_run([=](auto& ctx, const Addresses& at) {
    const int64_t bytes = element_bytes(stored);
    const int64_t own_bytes = std::is_same_v<std::decay_t<decltype(ctx)>, CpuContext>
                                  ? element_bytes(Element::kF32)
                                  : element_bytes(element);
    for (size_t i = 0; i < passes.size(); ++i) {
      const PassArrays& pass = passes[i];
      const int64_t row = pass.first_row;
      gated_delta(ctx, GatedDeltaParams{.num_rows = at.get<int32_t>(num_rows_at) + i,
                                        .max_rows = pass.max_rows,
                                        .x = at.raw(x) + row * x_stride * own_bytes,
                                        .x_stride = x_stride,
                                        .ba = at.raw(ba) + row * ba_stride * own_bytes,
                                        .ba_stride = ba_stride,
                                        .positions = at.get<int32_t>(positions_at) + row,
                                        .seq_slot = at.get<int32_t>(slots_at) + row,
                                        .record_slots = at.get<int64_t>(record_slots_at) + row,
                                        .record_table = {.blocks = at.get<int32_t>(record_table),
                                                         .stride = stride,
                                                         .block_size = s.block_size},
                                        .records = {.base = at.raw(records_at),
                                                    .block_bytes = record_block * bytes,
                                                    .k_offset = kGap * bytes,
                                                    .v_offset = kGap * bytes,
                                                    .block_size = s.block_size,
                                                    .dtype = s.records},
                                        .entry_slots = at.get<int64_t>(entry_slots_at) + row,
                                        .entry_table = {.blocks = at.get<int32_t>(entry_table),
                                                        .stride = stride,
                                                        .block_size = 1,
                                                        .tokens_per_entry = s.block_size},
                                        .entries = {.base = at.raw(entries_at),
                                                    .block_bytes = entry_block * 4,
                                                    .k_offset = kGap * 4,
                                                    .v_offset = kGap * 4,
                                                    .block_size = 1,
                                                    .dtype = DType::kFloat32},
                                        .conv = at.get<float>(conv),
                                        .a_log = at.get<float>(a_log),
                                        .dt_bias = at.get<float>(dt_bias),
                                        .norm = at.get<float>(norm),
                                        .norm_eps = 1e-6f,
                                        .y = at.raw(y) + row * y_width * own_bytes,
                                        .shape = shape,
                                        .dtype = activation_dtype(ctx, s.dtype),
                                        .num_seqs = at.get<int32_t>(num_seqs_at) + i,
                                        .row_indptr = at.get<int32_t>(row_indptr) + pass.first_seq,
                                        .max_seqs = pass.max_seqs,
                                        .max_rows_per_seq = pass.max_rows_per_seq});
    }
  });

  op.check = [=, sequences = batch.sequences](const ArrayBytes& cpu, const ArrayBytes& cuda,
                                              int64_t*) -> std::string {
    for (const ArrayBytes* const arrays : {&cpu, &cuda}) {
      const bool is_cuda = arrays == &cuda;
      const char* const backend = is_cuda ? "CUDA" : "CPU";
      const auto same = [&](Handle array, int64_t a, int64_t b, int64_t count, int64_t size) {
        const std::byte* const data = (*arrays)[static_cast<size_t>(array)].data();
        return std::memcmp(data + a * size, data + b * size, static_cast<size_t>(count * size)) ==
               0;
      };
      std::map<std::pair<int64_t, int32_t>, int64_t> rows;
      for (int64_t i = 0; i < all_rows; ++i) {
        const RowName& name = names[static_cast<size_t>(i)];
        if (name.sequence < 0 || name.is_rejected) continue;
        const auto [first, is_new] = rows.try_emplace({content_of(name), name.position}, i);
        const int64_t size = is_cuda ? element_bytes(element) : element_bytes(Element::kF32);
        if (!is_new && !same(y, first->second * y_width, i * y_width, y_width, size)) {
          return std::string(backend) + ": row " + std::to_string(i) + " at position " +
                 std::to_string(name.position) + " differs from row " +
                 std::to_string(first->second);
        }
      }
      std::map<std::pair<int64_t, int32_t>, int64_t> states;
      for (size_t i = 0; i < sequences.size(); ++i) {
        for (int32_t e = 0; (e + 1) * s.block_size <= places->lengths[i]; ++e) {
          const int64_t block = places->entry_blocks[places->at(i, e)];
          if (block == 0) continue;
          const auto [first, is_new] = states.try_emplace({sequences[i].content, e}, block);
          if (!is_new && !same(entries_at, first->second * entry_block + kGap,
                               block * entry_block + kGap, state_width, 4)) {
            return std::string(backend) + ": entry " + std::to_string(e) + " of sequence " +
                   std::to_string(i) + " differs from that of another one";
          }
        }
      }
    }
    return {};
  };
  return op;
}

namespace {

enum class Windows : uint8_t { kSome, kAll };

std::string name_of(const RecurrentSpec& s) {
  const RecurrentShape& h = s.shape;
  return "recurrent_" + std::to_string(h.num_key_heads) + "x" + std::to_string(h.num_value_heads) +
         "_d" + std::to_string(h.key_dim) + "x" + std::to_string(h.value_dim) + "_t" +
         std::to_string(h.num_taps) + "_b" + std::to_string(s.block_size) +
         (s.dtype == DType::kFloat32 ? "_f32" : "_bf16") +
         (s.records == s.dtype           ? ""
          : s.records == DType::kFloat32 ? "_records_f32"
                                         : "_records_bf16") +
         (s.x_padding % 8 != 0 ? "_odd" : "") +
         (s.extra_seqs != 2 ? "_of" + std::to_string(s.extra_seqs) : "");
}

void add_batches(std::vector<OpCase>& cases, const RecurrentSpec& s, Windows windows_in) {
  const int32_t c = s.block_size;
  const auto add = [&](const char* batch_name, const RecurrentBatch& batch) {
    cases.push_back({name_of(s) + "_" + batch_name,
                     [s, batch](uint64_t seed) { return make_gated_delta(s, batch, seed); }});
  };
  // Windows of one to five rows at every place around multiples of the block, inert sequences and
  // inert rows between them, and rows whose stores are over.
  RecurrentBatch windows = {.passes = {{}}, .extra_rows = 3};
  const auto add_window = [&](int32_t start, int32_t num_rows, int32_t num_inert, bool is_last) {
    const auto sequence = static_cast<int32_t>(windows.sequences.size());
    windows.sequences.push_back({sequence, start});
    windows.passes[0].push_back({.sequence = sequence,
                                 .start = start,
                                 .num_rows = num_rows,
                                 .num_inert = num_inert,
                                 .stores_nothing = is_last});
  };
  const int32_t starts[] = {0, 1, 2, 3, c - 2, c - 1, c, c + 1, c + 2, 2 * c - 1, 2 * c, 3 * c - 3};
  for (int32_t i = 0; i < 12; ++i) {
    if (starts[i] >= 0 && (windows_in == Windows::kAll || i % 3 == 2)) {
      add_window(starts[i], 1 + i % 5, i % 4 == 1 ? 2 : 0, i % 5 == 4);
    }
    if (i % 5 == 2) add_window(7, 0, i == 2 ? 3 : 0, false);
  }
  add("windows", windows);
  // Chunks of prompts: from the start, to the end of a block, and into the middle of others.
  add("chunks", {.sequences = {{0, 0}, {1, c}, {2, 2 * c + 1}, {3, 0}},
                 .passes = {{{.sequence = 0, .start = 0, .num_rows = 2 * c + 5},
                             {.sequence = 1, .start = c, .num_rows = c, .num_inert = 1},
                             {.sequence = 3, .start = 0, .num_rows = 1},
                             {.sequence = 2, .start = 2 * c + 1, .num_rows = 19}}},
                 .extra_rows = 2});
}

// A prompt in one pass, in chunks, and in windows whose last rows are rejected: the bits of rows
// and entries must be equal. The bound on the sequences of a pass changes from pass to pass.
void add_cuts(std::vector<OpCase>& cases, const RecurrentSpec& s) {
  const int32_t c = s.block_size;
  const int32_t length = 2 * c + 3;
  const int32_t chunk = c + 2;
  RecurrentBatch cuts = {.sequences = {{9, 0}, {9, 0}, {9, 0}}, .extra_seqs = {2, 0, 5}};
  cuts.passes.push_back({{.sequence = 0, .start = 0, .num_rows = length},
                         {.sequence = 1, .start = 0, .num_rows = chunk}});
  cuts.passes.push_back({});
  cuts.passes.push_back({{.sequence = 1, .start = chunk, .num_rows = length - chunk}});
  for (int32_t at = 0, step = 0; at < length; ++step) {
    const int32_t accepted = std::min(1 + step % 3, length - at);
    const int32_t rejected = step % 4;
    cuts.passes.push_back({{.sequence = 2,
                            .start = at,
                            .num_rows = accepted + rejected,
                            .num_inert = step % 2,
                            .num_rejected = rejected}});
    at += accepted;
  }
  // An op of its own for the emulation, so that some of these cases always run.
  cases.push_back({"cuts_of_" + name_of(s),
                   [s, cuts](uint64_t seed) { return make_gated_delta(s, cuts, seed); }});
}

}  // namespace

std::vector<OpCase> recurrent_op_cases() {
  std::vector<OpCase> cases;
  constexpr DType kB = DType::kBFloat16;
  constexpr DType kF = DType::kFloat32;
  // {key heads, value heads, key_dim, value_dim, taps}: few heads of Qwen3.5, and sizes that
  // differ.
  const RecurrentShape few = {1, 2, 128, 128, 4};
  const RecurrentShape usual = {2, 4, 128, 128, 4};
  // The same heads with other numbers of value heads for a key head.
  const RecurrentShape single = {2, 2, 128, 128, 4};
  const RecurrentShape triple = {1, 3, 128, 128, 4};
  const RecurrentShape most = {2, 8, 128, 128, 4};
  const RecurrentShape many = {1, 5, 128, 128, 4};
  const RecurrentShape tiny = {2, 6, 16, 24, 4};
  const RecurrentShape odd = {1, 3, 33, 70, 2};
  const RecurrentShape largest = {1, 1, 256, 256, 8};
  for (const DType dtype : {kB, kF}) {
    for (const RecurrentShape& shape : {few, usual, single, triple, most, many}) {
      add_batches(cases, {.shape = shape, .dtype = dtype, .records = dtype},
                  shape == usual || shape == triple ? Windows::kAll : Windows::kSome);
    }
    add_batches(cases, {.shape = few, .dtype = dtype, .records = dtype, .x_padding = 3},
                Windows::kSome);
    add_batches(cases, {.shape = tiny, .block_size = 8, .dtype = dtype, .records = dtype},
                Windows::kAll);
    add_batches(cases, {.shape = odd, .block_size = 3, .dtype = dtype, .records = dtype},
                Windows::kAll);
    add_batches(cases, {.shape = largest, .dtype = dtype, .records = dtype}, Windows::kSome);
  }
  for (const auto& [dtype, records] : {std::pair{kB, kF}, {kF, kB}}) {
    add_batches(cases, {.shape = tiny, .dtype = dtype, .records = records}, Windows::kAll);
    add_batches(cases, {.shape = few, .block_size = 24, .dtype = dtype, .records = records},
                Windows::kSome);
    add_batches(cases, {.shape = largest, .block_size = 9, .dtype = dtype, .records = records},
                Windows::kSome);
  }
  const RecurrentSpec prompts = {.shape = usual, .max_rows_per_seq = 2048};
  cases.push_back({"recurrent_prompts", [prompts](uint64_t seed) {
                     return make_gated_delta(
                         prompts,
                         {.sequences = {{0, 0}, {1, 70}, {2, 15}},
                          .passes = {{{.sequence = 0, .num_rows = 300, .first_entry = 17},
                                      {.sequence = 1, .start = 70, .num_rows = 4},
                                      {.sequence = 2, .start = 15, .num_rows = 120}}}},
                         seed);
                   }});
  for (const DType dtype : {kB, kF}) {
    for (const RecurrentShape& shape : {single, few, triple, most}) {
      add_cuts(cases, {.shape = shape, .dtype = dtype, .records = dtype});
    }
    add_cuts(cases, {.shape = tiny, .block_size = 8, .dtype = dtype, .records = dtype});
    add_cuts(cases, {.shape = odd, .block_size = 3, .dtype = dtype, .records = dtype});
  }
  add_cuts(cases, {.shape = tiny, .dtype = kF, .records = kB});
  add_cuts(cases, {.shape = largest, .block_size = 7, .dtype = kB, .records = kF});
  return cases;
}

}  // namespace paceline::testing
