// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/for_rows.h"
#include "ops/streams.h"

namespace paceline {
namespace {

// The sum over i of a[i] * b[i], in one fixed order of lanes.
[[gnu::always_inline]] inline float dot(const float* a, const float* b, int64_t n) {
  V16 sums[4] = {};  // hide the latency of the multiply-add
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int64_t part = 0; part < 4; ++part) {
      sums[part] += load(a + i + 16 * part) * load(b + i + 16 * part);
    }
  }
  for (; i + 16 <= n; i += 16) sums[0] += load(a + i) * load(b + i);
  if (i < n) {
    const auto count = static_cast<int32_t>(n - i);
    sums[1] += load_first(a + i, count) * load_first(b + i, count);
  }
  return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

[[nodiscard]] float sigmoid(float x) { return 1.0f / (1.0f + exp_one(-x)); }

// C of a row, from its logits [size, size], in place.
void balance(const MixStreamsParams& p, float* c) {
  const int32_t size = p.num_streams;
  const auto divide_by_sums = [&](int32_t stride, int32_t element_stride) {
    for (int32_t i = 0; i < size; ++i) {
      float sum = 0;
      for (int32_t j = 0; j < size; ++j) sum += c[i * stride + j * element_stride];
      for (int32_t j = 0; j < size; ++j) c[i * stride + j * element_stride] /= sum + p.eps;
    }
  };
  for (int32_t i = 0; i < size; ++i) {
    float* const row = c + int64_t{i} * size;
    const float best = *std::max_element(row, row + size);
    float sum = 0;
    for (int32_t j = 0; j < size; ++j) {
      row[j] = exp_one(row[j] - best);
      sum += row[j];
    }
    for (int32_t j = 0; j < size; ++j) row[j] = row[j] / sum + p.eps;
  }
  divide_by_sums(1, size);
  for (int32_t i = 1; i < p.sinkhorn_iterations; ++i) {
    divide_by_sums(size, 1);
    divide_by_sums(1, size);
  }
}

struct MixKernel {
  [[gnu::always_inline]] static void run(const MixStreamsParams* params, int64_t row) {
    const MixStreamsParams& p = *params;
    const int32_t size = p.num_streams;
    const int32_t width = mix_width(size, p.is_end);
    const int64_t n = int64_t{size} * p.hidden;
    const float* const x = p.x + row * n;
    float* const mix = p.mix + row * width;
    const float factor = 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + p.norm_eps);
    for (int32_t i = 0; i < width; ++i) {
      const float scale = p.scale[std::min(i / size, 2)];
      mix[i] = dot(x, p.weight + i * n, n) * factor * scale + p.base[i];
    }
    for (int32_t i = 0; i < size; ++i) mix[i] = sigmoid(mix[i]) + p.eps;
    if (p.is_end) return;
    for (int32_t i = size; i < 2 * size; ++i) mix[i] = 2.0f * sigmoid(mix[i]);
    balance(p, mix + int64_t{2} * size);
  }
};

// y = the sum over the streams s of pre[s] * x[s].
[[gnu::always_inline]] inline void sum_row(const float* x, const float* pre, int32_t num_streams,
                                           int64_t hidden, float* y) {
  for (int64_t i = 0; i < hidden; ++i) {
    float sum = pre[0] * x[i];
    for (int32_t s = 1; s < num_streams; ++s) sum = std::fma(pre[s], x[s * hidden + i], sum);
    y[i] = sum;
  }
}

struct SumKernel {
  [[gnu::always_inline]] static void run(const SumStreamsParams* params, int64_t row) {
    const SumStreamsParams& p = *params;
    sum_row(p.x + row * p.num_streams * p.hidden, p.mix + row * p.mix_stride, p.num_streams,
            p.hidden, p.y + row * p.hidden);
  }
};

struct ReadKernel {
  [[gnu::always_inline]] static void run(const ReadStreamsParams* params, int64_t row) {
    const ReadStreamsParams& p = *params;
    const int64_t hidden = p.hidden;
    float* const y = static_cast<float*>(p.y) + row * hidden;
    sum_row(p.x + row * p.num_streams * hidden, p.mix + row * p.mix_stride, p.num_streams, hidden,
            y);
    const float factor = 1.0f / std::sqrt(dot(y, y, hidden) / static_cast<float>(hidden) + p.eps);
    for (int64_t i = 0; i < hidden; ++i) y[i] = y[i] * factor * p.weight[i];
  }
};

struct WriteKernel {
  [[gnu::always_inline]] static void run(const WriteStreamsParams* params, int64_t row) {
    const WriteStreamsParams& p = *params;
    const int64_t hidden = p.hidden;
    const int32_t size = p.num_streams;
    const float* const x = static_cast<const float*>(p.x) + row * hidden;
    float* const y = p.y + row * size * hidden;
    const float* const post = p.mix + row * mix_width(size, /*is_end=*/false) + size;
    const float* const c = post + size;
    for (int64_t i = 0; i < hidden; ++i) {
      std::array<float, kMaxStreams> old;
      for (int32_t s = 0; s < size; ++s) old[static_cast<size_t>(s)] = y[s * hidden + i];
      for (int32_t j = 0; j < size; ++j) {
        float sum = post[j] * x[i];
        for (int32_t s = 0; s < size; ++s) {
          sum = std::fma(c[s * size + j], old[static_cast<size_t>(s)], sum);
        }
        y[j * hidden + i] = sum;
      }
    }
  }
};

struct NormKernel {
  [[gnu::always_inline]] static void run(const NormStreamsParams* params, int64_t row) {
    const NormStreamsParams& p = *params;
    const int64_t hidden = p.hidden;
    const int64_t width = p.num_streams * hidden;
    const int64_t from = p.row_index != nullptr ? p.row_index[row] : row;
    for (int32_t s = 0; s < p.num_streams; ++s) {
      const float* const x = static_cast<const float*>(p.x) + from * width + s * hidden;
      float* const y = static_cast<float*>(p.y) + row * width + s * hidden;
      const float factor = 1.0f / std::sqrt(dot(x, x, hidden) / static_cast<float>(hidden) + p.eps);
      for (int64_t i = 0; i < hidden; ++i) y[i] = x[i] * factor * p.weight[i];
    }
  }
};

void check_streams(int32_t num_streams) {
  PACELINE_CHECK(num_streams >= 1 && num_streams <= kMaxStreams, num_streams, " streams");
}

}  // namespace

void spread_streams(CpuContext& ctx, const SpreadStreamsParams& p) {
  check_streams(p.num_streams);
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  const int64_t hidden = p.hidden;
  for_rows(ctx, num_rows, hidden * 4 * (1 + p.num_streams), [&](int32_t row) {
    const float* const x = p.x + row * hidden;
    for (int32_t s = 0; s < p.num_streams; ++s) {
      float* const y = p.y + (int64_t{row} * p.num_streams + s) * hidden;
      for (int64_t i = 0; i < hidden; ++i) y[i] = p.adds ? y[i] + x[i] : x[i];
    }
  });
}

void mix_streams(CpuContext& ctx, const MixStreamsParams& p) {
  check_streams(p.num_streams);
  PACELINE_CHECK(p.is_end || p.sinkhorn_iterations >= 1, "no iteration");
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  const int64_t bytes = int64_t{4} * p.num_streams * p.hidden * mix_width(p.num_streams, p.is_end);
  for_rows(ctx, num_rows, bytes, [&](int32_t row) { run_best_isa<MixKernel>(&p, int64_t{row}); });
}

void read_streams(CpuContext& ctx, const ReadStreamsParams& p) {
  check_streams(p.num_streams);
  PACELINE_CHECK(p.y_dtype == DType::kFloat32, "the CPU computes in float32");
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  for_rows(ctx, num_rows, int64_t{4} * p.hidden * (p.num_streams + 3),
           [&](int32_t row) { run_best_isa<ReadKernel>(&p, int64_t{row}); });
}

void sum_streams(CpuContext& ctx, const SumStreamsParams& p) {
  check_streams(p.num_streams);
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  for_rows(ctx, num_rows, int64_t{4} * p.hidden * (p.num_streams + 1),
           [&](int32_t row) { run_best_isa<SumKernel>(&p, int64_t{row}); });
}

void write_streams(CpuContext& ctx, const WriteStreamsParams& p) {
  check_streams(p.num_streams);
  PACELINE_CHECK(p.x_dtype == DType::kFloat32, "the CPU computes in float32");
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  for_rows(ctx, num_rows, int64_t{8} * p.hidden * p.num_streams,
           [&](int32_t row) { run_best_isa<WriteKernel>(&p, int64_t{row}); });
}

void check_join(const JoinStreamsParams& p) {
  const MixStreamsParams& mix = p.mix;
  const ReadStreamsParams& read = p.read;
  PACELINE_CHECK(read.x == mix.x && read.mix == mix.mix && read.num_streams == mix.num_streams &&
                     read.hidden == mix.hidden && read.max_rows == mix.max_rows &&
                     read.mix_stride == mix_width(mix.num_streams, mix.is_end),
                 "streams are read by another mix");
  if (!p.write) return;
  const WriteStreamsParams& write = *p.write;
  PACELINE_CHECK(write.y == mix.x && write.mix == mix.mix && !mix.is_end &&
                     write.num_streams == mix.num_streams && write.hidden == mix.hidden &&
                     write.max_rows == mix.max_rows,
                 "a branch joins other streams");
}

void join_streams(CpuContext& ctx, const JoinStreamsParams& p) {
  check_join(p);
  if (p.write) write_streams(ctx, *p.write);
  mix_streams(ctx, p.mix);
  read_streams(ctx, p.read);
}

void norm_streams(CpuContext& ctx, const NormStreamsParams& p) {
  check_streams(p.num_streams);
  PACELINE_CHECK(p.x_dtype == DType::kFloat32 && p.y_dtype == DType::kFloat32,
                 "the CPU computes in float32");
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  *p.num_stream_rows = num_rows * p.num_streams;
  for_rows(ctx, num_rows, int64_t{8} * p.hidden * p.num_streams,
           [&](int32_t row) { run_best_isa<NormKernel>(&p, int64_t{row}); });
}

void mean_streams(CpuContext& ctx, const MeanStreamsParams& p) {
  check_streams(p.num_streams);
  PACELINE_CHECK(p.y_dtype == DType::kFloat32, "the CPU computes in float32");
  const int32_t num_rows = std::min(*p.num_rows, p.max_rows);
  const int64_t hidden = p.hidden;
  for_rows(ctx, num_rows, int64_t{4} * hidden * (p.num_streams + 1), [&](int32_t row) {
    const float* const x = p.x + row * p.num_streams * hidden;
    float* const y = static_cast<float*>(p.y) + row * p.y_stride;
    for (int64_t i = 0; i < hidden; ++i) {
      float sum = x[i];
      for (int32_t s = 1; s < p.num_streams; ++s) sum += x[s * hidden + i];
      y[i] = sum / static_cast<float>(p.num_streams);
    }
  });
}

}  // namespace paceline
