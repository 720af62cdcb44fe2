// SPDX-License-Identifier: Apache-2.0

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include <paceline/version.h>

#include "base/vector_math.h"
#include "device/thread_pool.h"

namespace paceline {
namespace {

constexpr int64_t kSteps = int64_t{1} << 20;

// Multiply-adds on kCount accumulators. Instruction sets need different numbers to hide the latency
// of one, and hold different numbers in registers, so several are tried.
template <int kCount>
struct MultiplyAddKernel {
  static constexpr double kOperations = 2.0 * 16 * kCount;
  template <class Lanes>
  [[gnu::always_inline]] static void run(int64_t steps, float* sum) {
    Lanes acc[kCount];
    for (int i = 0; i < kCount; ++i) acc[i] = broadcast<Lanes>(static_cast<float>(i));
    Lanes factor = broadcast<Lanes>(0.5f);
    asm volatile("" : "+m"(factor));
    for (int64_t step = 0; step < steps; ++step) {
      for (int i = 0; i < kCount; ++i) acc[i] = acc[i] * factor + factor;
    }
    for (int i = 1; i < kCount; ++i) acc[0] += acc[i];
    *sum = sum_lanes(acc[0]);
  }
};

#if defined(__x86_64__)
constexpr int kDots = 12;

// Products of pairs of bfloat16, as the GEMM of bfloat16 weights computes them.
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512"),
  gnu::noinline]]
void run_dots(int64_t steps, float* sum) {
  __m512 acc[kDots];
  for (int i = 0; i < kDots; ++i) acc[i] = _mm512_set1_ps(static_cast<float>(i));
  __m512i ones = _mm512_set1_epi16(0x3f80);
  asm volatile("" : "+v"(ones));
  const auto pairs = reinterpret_cast<__m512bh>(ones);
  for (int64_t step = 0; step < steps; ++step) {
    for (int i = 0; i < kDots; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], pairs, pairs);
  }
  V16 total = {};
  for (int i = 0; i < kDots; ++i) total += reinterpret_cast<V16>(acc[i]);
  *sum = sum_lanes(total);
}

[[nodiscard]] bool has_dots() {
  __builtin_cpu_init();
  return best_isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16") != 0;
}
#endif

// Operations per second of all threads together: the best of several passes.
template <class Run>
double best_rate(ThreadPool& threads, int32_t num_threads, double operations, Run run) {
  constexpr int kNumPasses = 5;
  double best_seconds = std::numeric_limits<double>::infinity();
  std::vector<float> sums(static_cast<size_t>(num_threads));
  for (int pass = 0; pass < kNumPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    threads.parallel_for(num_threads, [&](int64_t part) { run(&sums[part]); });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best_seconds = std::min(best_seconds, elapsed.count());
  }
  return operations * static_cast<double>(kSteps) * num_threads / best_seconds;
}

template <int kCount>
double multiply_add_rate(ThreadPool& threads, int32_t num_threads) {
  using Kernel = MultiplyAddKernel<kCount>;
  return best_rate(threads, num_threads, Kernel::kOperations,
                   [](float* sum) { run_best_isa<Kernel>(kSteps, sum); });
}

}  // namespace

double measure_arithmetic(int32_t num_threads, bool is_bfloat16) {
  if (num_threads <= 0) num_threads = build_info().num_cores;
  ThreadPool threads(num_threads);
  double rate = std::max({multiply_add_rate<2>(threads, num_threads),
                          multiply_add_rate<6>(threads, num_threads),
                          multiply_add_rate<12>(threads, num_threads)});
#if defined(__x86_64__)
  if (is_bfloat16 && has_dots()) {
    rate = std::max(rate, best_rate(threads, num_threads, 2.0 * 32 * kDots,
                                    [](float* sum) { run_dots(kSteps, sum); }));
  }
#endif
  return rate;
}

}  // namespace paceline
