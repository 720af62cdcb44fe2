// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "base/float_types.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/for_rows.h"
#include "ops/recurrent.h"

namespace paceline {
namespace {

constexpr float kNormEps = 1e-6f;
constexpr float kLinearSoftplus = 20.0f;  // softplus(x) = x above

constexpr int32_t padded(int32_t size) { return (size + 15) / 16 * 16; }

float softplus(float x) { return x > kLinearSoftplus ? x : std::log1p(std::exp(x)); }

const float* input_row(const GatedDeltaParams& p, int32_t row) {
  return static_cast<const float*>(p.x) + row * p.x_stride;
}
const float* ba_row(const GatedDeltaParams& p, int32_t row) {
  return static_cast<const float*>(p.ba) + row * p.ba_stride;
}

int64_t element_bytes(const KvLayerView& records) { return dtype_bytes(records.dtype); }

std::byte* record_at(const GatedDeltaParams& p, int64_t slot) {
  const int64_t bytes = p.shape.record_width() * element_bytes(p.records);
  return p.records.base + slot / p.records.block_size * p.records.block_bytes + p.records.k_offset +
         slot % p.records.block_size * bytes;
}

float* entry_at(const GatedDeltaParams& p, int64_t block) {
  return reinterpret_cast<float*>(p.entries.base + block * p.entries.block_bytes +
                                  p.entries.k_offset);
}

void write_elements(const float* from, int32_t count, DType dtype, std::byte* to) {
  if (dtype == DType::kFloat32) {
    std::copy_n(from, count, reinterpret_cast<float*>(to));
  } else {
    std::transform(from, from + count, reinterpret_cast<uint16_t*>(to),
                   [](float value) { return float_to_bf16(value); });
  }
}

void write_record(const GatedDeltaParams& p, int32_t row) {
  const int64_t slot = p.record_slots[row];
  // The contents of the null block are never used, and rows would race on it.
  if (p.seq_slot[row] < 0 || slot < p.records.block_size) return;
  std::byte* const record = record_at(p, slot);
  const int32_t channels = p.shape.num_channels();
  write_elements(input_row(p, row), channels, p.records.dtype, record);
  write_elements(ba_row(p, row), 2 * p.shape.num_value_heads, p.records.dtype,
                 record + channels * element_bytes(p.records));
}

// The rows of one sequence in a pass: those from `begin` on are live, and the first of them is at
// position `start`.
struct SequenceRows {
  int32_t begin = 0;
  int32_t num_rows = 0;
  int32_t start = 0;
  int32_t seq_slot = 0;
};

SequenceRows live_rows(const GatedDeltaParams& p, int32_t sequence) {
  SequenceRows rows;
  rows.begin = p.row_indptr[sequence];
  const int32_t end = std::min(p.row_indptr[sequence + 1], *p.num_rows);
  while (rows.begin + rows.num_rows < end && p.seq_slot[rows.begin + rows.num_rows] >= 0) {
    ++rows.num_rows;
  }
  if (rows.num_rows == 0) return rows;
  rows.start = p.positions[rows.begin];
  rows.seq_slot = p.seq_slot[rows.begin];
  return rows;
}

// `count` elements of the inputs of the token at `position`, from element `first` of its record on,
// as its record has them: from the pass, or else from the records.
void read_inputs(const GatedDeltaParams& p, const SequenceRows& rows, int32_t position,
                 int32_t first, int32_t count, float* to) {
  if (position < 0) {
    std::fill_n(to, count, 0.0f);
    return;
  }
  const bool is_bf16 = p.records.dtype == DType::kBFloat16;
  if (position >= rows.start) {
    const int32_t row = rows.begin + position - rows.start;
    const int32_t channels = p.shape.num_channels();
    const float* const from =
        first < channels ? input_row(p, row) + first : ba_row(p, row) + (first - channels);
    std::transform(from, from + count, to,
                   [&](float x) { return is_bf16 ? bf16_to_float(float_to_bf16(x)) : x; });
    return;
  }
  const int32_t block_size = p.record_table.block_size;
  const int64_t block =
      p.record_table.blocks[rows.seq_slot * p.record_table.stride + position / block_size];
  const std::byte* const record = record_at(p, block * block_size + position % block_size);
  if (is_bf16) {
    const auto* const from = reinterpret_cast<const uint16_t*>(record) + first;
    std::transform(from, from + count, to, [](uint16_t x) { return bf16_to_float(x); });
  } else {
    std::copy_n(reinterpret_cast<const float*>(record) + first, count, to);
  }
}

// The channels that a value head reads, as parts of a record: q and k of its key head, and v.
struct Part {
  int32_t first;  // channel
  int32_t width;
};

constexpr int32_t kValuesPerStep = 4;  // values of S whose sums are made together

// One value head of one sequence.
struct Head {
  Part parts[3];
  int32_t key_stride;            // elements between the values of S
  int32_t num_values;            // of S: value_dim, padded to whole steps with zeros
  std::vector<float> state;      // S: [num_values, key_stride], padded with zeros
  std::vector<float> inputs;     // [taps, q | k | v] by position % taps
  std::vector<float> convolved;  // [q | k | v], each padded with zeros
  std::vector<float> conv;       // [taps, q | k | v]
  std::vector<float> output;     // [value_dim], padded with zeros
  int32_t offsets[3];            // of the parts in inputs, conv and convolved
  int32_t width;                 // of all parts
};

Head make_head(const GatedDeltaParams& p) {
  const RecurrentShape& s = p.shape;
  Head head = {.parts = {},
               .key_stride = padded(s.key_dim),
               .num_values = (s.value_dim + kValuesPerStep - 1) / kValuesPerStep * kValuesPerStep};
  head.offsets[0] = 0;
  head.offsets[1] = head.key_stride;
  head.offsets[2] = 2 * head.key_stride;
  head.width = 2 * head.key_stride + padded(s.value_dim);
  head.state.resize(static_cast<size_t>(head.num_values) * head.key_stride);
  head.inputs.resize(static_cast<size_t>(s.num_taps) * head.width);
  head.conv.resize(static_cast<size_t>(s.num_taps) * head.width);
  head.convolved.resize(static_cast<size_t>(head.width));
  head.output.resize(static_cast<size_t>(padded(s.value_dim)));
  return head;
}

// Makes it another value head, whose state is not read yet.
void set_head(const GatedDeltaParams& p, int32_t value_head, Head& head) {
  const RecurrentShape& s = p.shape;
  const int32_t key_head = value_head / (s.num_value_heads / s.num_key_heads);
  head.parts[0] = {key_head * s.key_dim, s.key_dim};
  head.parts[1] = {s.keys_width() + key_head * s.key_dim, s.key_dim};
  head.parts[2] = {2 * s.keys_width() + value_head * s.value_dim, s.value_dim};
  for (int32_t part = 0; part < 3; ++part) {
    const float* const from = p.conv + int64_t{head.parts[part].first} * s.num_taps;
    for (int32_t tap = 0; tap < s.num_taps; ++tap) {
      float* const to = head.conv.data() + tap * head.width + head.offsets[part];
      for (int32_t c = 0; c < head.parts[part].width; ++c) to[c] = from[c * s.num_taps + tap];
    }
  }
}

void take_inputs(const GatedDeltaParams& p, const SequenceRows& rows, int32_t position,
                 Head& head) {
  const int32_t taps = p.shape.num_taps;
  float* const to = head.inputs.data() + (position + taps) % taps * head.width;
  for (int32_t part = 0; part < 3; ++part) {
    read_inputs(p, rows, position, head.parts[part].first, head.parts[part].width,
                to + head.offsets[part]);
  }
}

// The inputs of a row, convolved; q and k with norms. Without the output of the row there is no q.
template <class Lanes, bool kHasOutput>
[[gnu::always_inline]] inline void convolve(const GatedDeltaParams& p, int32_t position,
                                            Head& head) {
  constexpr int32_t kFirstPart = kHasOutput ? 0 : 1;
  const int32_t taps = p.shape.num_taps;
  const float* inputs[kMaxConvTaps];
  for (int32_t tap = 0; tap < taps; ++tap) {
    inputs[tap] = head.inputs.data() + (position + 1 + tap) % taps * head.width;
  }
  for (int32_t c = head.offsets[kFirstPart]; c < head.width; c += 16) {
    Lanes sum = {};
    for (int32_t tap = 0; tap < taps; ++tap) {
      sum += load<Lanes>(head.conv.data() + tap * head.width + c) * load<Lanes>(inputs[tap] + c);
    }
    store(head.convolved.data() + c, sum / (1.0f + exp(-sum)));
  }
  for (int32_t part = kFirstPart; part < 2; ++part) {
    float* const x = head.convolved.data() + head.offsets[part];
    Lanes squares = {};
    for (int32_t c = 0; c < head.key_stride; c += 16)
      squares += load<Lanes>(x + c) * load<Lanes>(x + c);
    float factor = 1.0f / std::sqrt(sum_lanes(squares) + kNormEps);
    if (part == 0) factor /= std::sqrt(static_cast<float>(p.shape.key_dim));
    for (int32_t c = 0; c < head.key_stride; c += 16) store(x + c, load<Lanes>(x + c) * factor);
  }
}

// One row of the gated delta rule. A row that is replayed has no output.
template <class Lanes, bool kHasOutput>
[[gnu::always_inline]] inline void step(float beta, float decay, Head& head) {
  const float* const q = head.convolved.data();
  const float* const k = q + head.offsets[1];
  const float* const v = q + head.offsets[2];
  const int32_t stride = head.key_stride;
  for (int32_t j = 0; j < head.num_values; j += kValuesPerStep) {
    float* const s = head.state.data() + j * stride;
    Lanes read[kValuesPerStep] = {};
    for (int32_t c = 0; c < stride; c += 16) {
      const Lanes key = load<Lanes>(k + c);
      for (int32_t i = 0; i < kValuesPerStep; ++i) {
        const Lanes decayed = load<Lanes>(s + i * stride + c) * decay;
        store(s + i * stride + c, decayed);
        read[i] += decayed * key;
      }
    }
    const Sums4 sums = sum_lanes(read[0], read[1], read[2], read[3]);
    float correction[kValuesPerStep];
    for (int32_t i = 0; i < kValuesPerStep; ++i) correction[i] = beta * (v[j + i] - sums.sum[i]);
    Lanes out[kValuesPerStep] = {};
    for (int32_t c = 0; c < stride; c += 16) {
      const Lanes key = load<Lanes>(k + c);
      for (int32_t i = 0; i < kValuesPerStep; ++i) {
        const Lanes updated = load<Lanes>(s + i * stride + c) + key * correction[i];
        store(s + i * stride + c, updated);
        if constexpr (kHasOutput) out[i] += updated * load<Lanes>(q + c);
      }
    }
    if constexpr (kHasOutput) {
      const Sums4 outputs = sum_lanes(out[0], out[1], out[2], out[3]);
      std::copy_n(outputs.sum, kValuesPerStep, head.output.data() + j);
    }
  }
}

template <class Lanes>
[[gnu::always_inline]] inline void write_output(const GatedDeltaParams& p, int32_t value_head,
                                                int32_t row, const Head& head) {
  const int32_t width = p.shape.value_dim;
  const float* const z = input_row(p, row) + p.shape.num_channels() + int64_t{value_head} * width;
  float* const y = static_cast<float*>(p.y) + int64_t{row} * p.shape.values_width() +
                   int64_t{value_head} * width;
  Lanes squares = {};
  for (int32_t j = 0; j < width; j += 16) {
    squares += load<Lanes>(head.output.data() + j) * load<Lanes>(head.output.data() + j);
  }
  const float factor =
      1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(width) + p.norm_eps);
  for (int32_t j = 0; j < width; j += 16) {
    const Lanes gate = load_up_to<Lanes>(z + j, width - j);
    const Lanes value = load<Lanes>(head.output.data() + j) * factor *
                        load_up_to<Lanes>(p.norm + j, width - j) * (gate / (1.0f + exp(-gate)));
    store_up_to(y + j, value, width - j);
  }
}

void copy_state(const GatedDeltaParams& p, const Head& head, float* to) {
  for (int32_t j = 0; j < p.shape.value_dim; ++j) {
    std::copy_n(head.state.data() + j * head.key_stride, p.shape.key_dim, to + j * p.shape.key_dim);
  }
}

// The row at `position`, whose inputs are taken: S after it, and its output.
template <class Lanes, bool kHasOutput>
[[gnu::always_inline]] inline void run_row(const GatedDeltaParams& p, const SequenceRows& rows,
                                           int32_t position, int32_t value_head, float rate,
                                           Head& head) {
  const int32_t channels = p.shape.num_channels();
  float b = 0;
  float a = 0;
  read_inputs(p, rows, position, channels + value_head, 1, &b);
  read_inputs(p, rows, position, channels + p.shape.num_value_heads + value_head, 1, &a);
  convolve<Lanes, kHasOutput>(p, position, head);
  const float beta = 1.0f / (1.0f + std::exp(-b));
  step<Lanes, kHasOutput>(beta, std::exp(rate * softplus(a + p.dt_bias[value_head])), head);
}

struct HeadKernel {
  // The value heads of all sequences, head by head: tasks `begin` to `end`.
  template <class Lanes>
  [[gnu::always_inline]] static void run(const GatedDeltaParams* params, int64_t begin,
                                         int64_t end) {
    const GatedDeltaParams& p = *params;
    const int32_t num_seqs = *p.num_seqs;
    Head head = make_head(p);
    int32_t value_head = -1;
    for (int64_t task = begin; task < end; ++task) {
      if (const auto next = static_cast<int32_t>(task / num_seqs); next != value_head) {
        value_head = next;
        set_head(p, value_head, head);
      }
      run_sequence<Lanes>(p, static_cast<int32_t>(task % num_seqs), value_head, head);
    }
  }

  template <class Lanes>
  [[gnu::always_inline]] static void run_sequence(const GatedDeltaParams& p, int32_t sequence,
                                                  int32_t value_head, Head& head) {
    const SequenceRows rows = live_rows(p, sequence);
    const int32_t end = std::min(p.row_indptr[sequence + 1], *p.num_rows);
    const int32_t width = p.shape.value_dim;
    for (int32_t row = rows.begin + rows.num_rows; row < end; ++row) {
      std::fill_n(static_cast<float*>(p.y) + int64_t{row} * p.shape.values_width() +
                      int64_t{value_head} * width,
                  width, 0.0f);
    }
    if (rows.num_rows == 0) return;

    const int32_t block_tokens = p.entry_table.tokens_per_entry;
    const int32_t block = rows.start / block_tokens;
    const int64_t offset = int64_t{value_head} * width * p.shape.key_dim;
    // The padding too: what it multiplies in a row of NaN is NaN in the state of that sequence.
    std::fill(head.state.begin(), head.state.end(), 0.0f);
    if (block > 0) {
      const int64_t entry = p.entry_table.blocks[rows.seq_slot * p.entry_table.stride + block - 1];
      const float* const from = entry_at(p, entry) + offset;
      for (int32_t j = 0; j < width; ++j) {
        std::copy_n(from + j * p.shape.key_dim, p.shape.key_dim,
                    head.state.data() + j * head.key_stride);
      }
    }
    const int32_t first = block * block_tokens;
    for (int32_t position = first - p.shape.num_taps + 1; position < first; ++position) {
      take_inputs(p, rows, position, head);
    }
    const float rate = -std::exp(p.a_log[value_head]);
    for (int32_t position = first; position < rows.start; ++position) {
      take_inputs(p, rows, position, head);
      run_row<Lanes, /*kHasOutput=*/false>(p, rows, position, value_head, rate, head);
    }
    for (int32_t position = rows.start; position < rows.start + rows.num_rows; ++position) {
      take_inputs(p, rows, position, head);
      run_row<Lanes, /*kHasOutput=*/true>(p, rows, position, value_head, rate, head);
      const int32_t row = rows.begin + position - rows.start;
      write_output<Lanes>(p, value_head, row, head);
      if (const int64_t entry = p.entry_slots[row]; entry > 0) {
        copy_state(p, head, entry_at(p, entry) + offset);
      }
    }
  }
};

void check(const GatedDeltaParams& p) {
  const RecurrentShape& s = p.shape;
  PACELINE_CHECK(s.num_taps >= 2 && s.num_taps <= kMaxConvTaps, s.num_taps, " taps");
  PACELINE_CHECK(s.num_key_heads > 0 && s.num_value_heads % s.num_key_heads == 0, s.num_value_heads,
                 " value heads for ", s.num_key_heads, " key heads");
  PACELINE_CHECK(s.key_dim > 0 && s.key_dim <= kMaxRecurrentHeadDim && s.value_dim > 0 &&
                     s.value_dim <= kMaxRecurrentHeadDim,
                 "heads of ", s.key_dim, " and ", s.value_dim, " elements");
  PACELINE_CHECK(p.entry_table.block_size == 1 &&
                     p.entry_table.tokens_per_entry >= s.num_taps - 1 &&
                     p.entry_table.tokens_per_entry == p.record_table.block_size,
                 "a state for ", p.entry_table.tokens_per_entry, " tokens");
  PACELINE_CHECK(p.records.dtype == DType::kFloat32 || p.records.dtype == DType::kBFloat16,
                 "KV caches are float32 or bfloat16");
}

}  // namespace

void gated_delta(CpuContext& ctx, const GatedDeltaParams& p) {
  check(p);
  const int32_t num_rows = *p.num_rows;
  const int32_t heads = p.shape.num_value_heads;
  const int64_t record_bytes = p.shape.record_width() * element_bytes(p.records);
  for_rows(ctx, num_rows, record_bytes, [&](int32_t row) { write_record(p, row); });
  const int32_t num_tasks = *p.num_seqs * heads;
  const auto run = [&](int64_t begin, int64_t end) { run_best_isa<HeadKernel>(&p, begin, end); };
  if (ctx.num_threads == 1 || num_tasks < 2) return run(0, num_tasks);
  ctx.for_ranges(num_tasks, /*pieces_per_thread=*/2, run);
}

}  // namespace paceline
