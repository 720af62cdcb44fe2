// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule in bench_cuda_ops.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

#include "cuda/cuda_bench.cuh"
#include "support/op_cases_recurrent.h"

namespace paceline::testing {
namespace {

struct NamedHeads {
  const char* name;
  int32_t value_heads;
};
constexpr NamedHeads kModels[] = {
    {"qwen3.5-0.8b", 16}, {"qwen3.5-9b", 32}, {"qwen3.5-27b", 48}, {"qwen3.5-122b", 64}};

struct Load {
  int32_t num_seqs;
  int32_t rows;   // of each sequence
  int32_t start;  // of the first sequence; the others are spread over a block from there
};
// Windows after eight records to replay, in the mean; then prompts and chunks of them.
constexpr Load kLoads[] = {{1, 1, 136},  {1, 4, 136},  {1, 4, 128},  {4, 4, 134},
                           {16, 4, 128}, {64, 1, 128}, {64, 4, 128}, {1, 512, 0},
                           {1, 2048, 0}, {1, 8192, 0}, {8, 256, 0}};

double clock_of_device() {
  int khz = 0;
  check_cuda(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0), "clock");
  return 1e3 * khz;
}

}  // namespace

void bench_recurrent(Bench& bench) {
  bool has_header = false;
  const double clock = clock_of_device();
  for (const auto& [model, value_heads] : kModels) {
    const std::string name = std::string("recurrent/") + model;
    if (!bench.wants(name)) continue;
    if (!has_header) {
      std::printf(
          "\ngated delta rule, bfloat16, states from memory: us, TB/s of states read and written,\n"
          "and clocks a row of the longest sequence, replayed ones included, at %.2f GHz\n"
          "%-16s%6s%6s%8s%8s%10s%8s%10s\n",
          clock * 1e-9, "", "seqs", "rows", "start", "MB", "us", "TB/s", "clocks");
      has_header = true;
    }
    const RecurrentSpec spec = {.shape = {.num_key_heads = 16,
                                          .num_value_heads = value_heads,
                                          .key_dim = 128,
                                          .value_dim = 128,
                                          .num_taps = 4},
                                .extra_seqs = 0};
    for (const auto& [num_seqs, rows, start] : kLoads) {
      RecurrentBatch batch = {.passes = {{}}};
      int32_t most_rows = 0;
      int64_t num_states = 0;
      for (int32_t i = 0; i < num_seqs; ++i) {
        const int32_t first = start == 0 ? 0 : start + i % spec.block_size;
        const int32_t end = first + rows;
        // The last two states of a sequence are kept.
        const int32_t kept = std::max(end / spec.block_size - 2, 0);
        batch.sequences.push_back({i, first});
        batch.passes[0].push_back(
            {.sequence = i, .start = first, .num_rows = rows, .first_entry = kept});
        most_rows = std::max(most_rows, rows + first % spec.block_size);
        num_states += (first >= spec.block_size ? 1 : 0) + end / spec.block_size -
                      std::max(first / spec.block_size, kept);
      }
      const double bytes = 4.0 * static_cast<double>(num_states) * spec.shape.state_width();
      const double us = bench.cold_us(make_gated_delta(spec, batch, 1), "entries",
                                      std::max<int64_t>(static_cast<int64_t>(bytes), 1));
      const double rate = bytes / us * 1e-6;
      bench.record({name,
                    "seqs=" + std::to_string(num_seqs) + " rows=" + std::to_string(rows) +
                        " start=" + std::to_string(start),
                    us, rate, "TB/s"});
      std::printf("%-16s%6d%6d%8d%8.1f%10.1f%8.2f%10.0f\n", model, num_seqs, rows, start,
                  bytes * 1e-6, us, rate, us * 1e-6 * clock / most_rows);
      std::fflush(stdout);
    }
  }
}

}  // namespace paceline::testing
