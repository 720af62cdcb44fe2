// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <paceline/version.h>

#include "base/aligned_buffer.h"
#include "base/boundary.h"
#include "base/vector_math.h"
#include "device/thread_pool.h"

namespace paceline {
namespace {

// Sums [begin, end), a multiple of 256 bytes, with enough loads in flight to saturate the memory.
struct SumKernel {
  template <class Lanes>
  [[gnu::always_inline]] static void run(const float* begin, const float* end, float* sum) {
    Lanes acc[4];
    for (Lanes& sums : acc) sums = broadcast<Lanes>(0.0f);
    for (; begin < end; begin += 64) {
      // Not past the end: a prefetch never faults, but one of an unmapped page takes 100 ns.
      const float* const ahead = end - begin > 2048 ? begin + 2048 : begin;
      for (int i = 0; i < 4; ++i) __builtin_prefetch(ahead + 16 * i, 0, 2);
      for (int i = 0; i < 4; ++i) acc[i] += load<Lanes>(begin + 16 * i);
    }
    *sum = sum_lanes(acc[0] + acc[1] + acc[2] + acc[3]);
  }
};

}  // namespace

double measure_read_bandwidth(int32_t num_threads, int64_t num_bytes) {
  constexpr int64_t kMaxBytes = int64_t{512} << 20;  // well beyond any last-level cache
  constexpr int64_t kMinPassBytes = int64_t{64} << 20;
  constexpr int kNumPasses = 5;
  if (num_threads <= 0) num_threads = build_info().num_cores;
  if (num_bytes <= 0 || num_bytes > kMaxBytes) num_bytes = kMaxBytes;
  const int64_t num_pieces = (num_bytes + 255) / 256;
  // Few bytes are read several times per pass, so that the start of the threads does not count.
  const int64_t num_repeats = std::max<int64_t>(1, kMinPassBytes / (num_pieces * 256));
  ThreadPool threads(num_threads);
  // The buffer is mapped as weights are, because smaller pages would lower the result.
  const AlignedBuffer buffer(num_pieces * 256, "the bandwidth measurement");
  auto* const floats = reinterpret_cast<float*>(buffer.data());
  double best_seconds = std::numeric_limits<double>::infinity();
  std::vector<float> sums(static_cast<size_t>(num_threads));
  float checksum = 0.0f;
  for (int pass = 0; pass <= kNumPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    threads.parallel_for(num_threads, [&](int64_t part) {
      float* const begin = floats + num_pieces * part / num_threads * 64;
      float* const end = floats + num_pieces * (part + 1) / num_threads * 64;
      if (pass == 0) {
        // The first write creates the pages.
        std::memset(begin, 0, static_cast<size_t>((end - begin) * 4));
        return;
      }
      for (int64_t repeat = 0; repeat < num_repeats; ++repeat) {
        run_best_isa<SumKernel>(static_cast<const float*>(begin), static_cast<const float*>(end),
                                &sums[part]);
        // The next repetition has to read again.
        asm volatile("" ::: "memory");
      }
    });
    for (const float sum : sums) checksum += sum;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (pass > 0) best_seconds = std::min(best_seconds, elapsed.count());
  }
  // The sum is 0. Its use keeps the compiler from removing the loads.
  return static_cast<double>(num_pieces * 256 * num_repeats) / best_seconds +
         static_cast<double>(checksum);
}

}  // namespace paceline
