// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/check.h"
#include "base/vector_math.h"
#include "device/cpu_context.h"
#include "ops/block_conv.h"
#include "ops/for_rows.h"

namespace paceline {
namespace {

struct ConvolveRowKernel {
  // x: the row, behind those that its taps read.
  template <class Lanes>
  [[gnu::always_inline]] static void run(float* x, const float* base, const float* delta,
                                         int32_t num_taps, int32_t group, int32_t hidden) {
    const int32_t num_groups = hidden / group;
    for (int32_t g = 0; g < num_groups; ++g) {
      const int32_t end = (g + 1) * group;
      for (int32_t i = g * group; i < end; i += 16) {
        Lanes sum = {};
        for (int32_t t = 0; t < num_taps; ++t) {
          const Lanes weight = load_up_to<Lanes>(base + int64_t{t} * hidden + i, end - i) +
                               broadcast<Lanes>(delta[int64_t{t} * num_groups + g]);
          sum += load_up_to<Lanes>(x - int64_t{t} * hidden + i, end - i) * weight;
        }
        store_up_to(x + i, sum, end - i);
      }
    }
  }
};

}  // namespace

void check_convolution(const ConvolveBlocksParams& p) {
  PACELINE_CHECK(p.num_taps >= 1 && p.num_taps <= kMaxBlockConvTaps, p.num_taps,
                 " taps; allowed: 1 to ", kMaxBlockConvTaps);
  PACELINE_CHECK(p.group >= 1 && p.hidden % p.group == 0, "groups of ", p.group,
                 " elements do not divide rows of ", p.hidden);
}

void convolve_blocks(CpuContext& ctx, const ConvolveBlocksParams& p) {
  check_convolution(p);
  PACELINE_CHECK(p.dtype == DType::kFloat32, "the CPU computes in float32");
  const int32_t num_seqs = std::min(*p.num_seqs, p.max_seqs);
  const int64_t row_bytes = int64_t{p.hidden} * p.num_taps * 8;
  for_rows(ctx, num_seqs, row_bytes * p.max_rows_per_seq, [&](int32_t s) {
    const int32_t first = p.row_indptr[s];
    // From the last row on: a row that has been written is read no more.
    for (int32_t row = p.row_indptr[s + 1] - 1; row >= first; --row) {
      run_best_isa<ConvolveRowKernel>(static_cast<float*>(p.x) + int64_t{row} * p.hidden, p.base,
                                      p.delta + row * p.delta_stride,
                                      taps_of_row(p.num_taps, row - first), p.group, p.hidden);
    }
  });
}

}  // namespace paceline
