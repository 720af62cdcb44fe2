// SPDX-License-Identifier: Apache-2.0
// The thread pool does every part once, keeps loops apart and does not stall without workers.

#include "device/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace paceline {
namespace {

TEST(ThreadPool, DoesEveryPartOnce) {
  for (const int32_t num_threads : {1, 2, 3, 7}) {
    ThreadPool pool(num_threads);
    for (int64_t num_parts = 0; num_parts < 40; ++num_parts) {
      std::vector<std::atomic<int>> counts(static_cast<size_t>(num_parts));
      pool.parallel_for(num_parts, [&](int64_t part) { ++counts[part]; });
      for (const std::atomic<int>& count : counts) ASSERT_EQ(count, 1);
    }
  }
}

TEST(ThreadPool, LoopsNeverMix) {
  // A late worker must not claim a part of the next loop with the body of the last one.
  ThreadPool pool(4);
  for (int64_t round = 0; round < 20000; ++round) {
    const int64_t num_parts = 1 + round % 9;
    auto sum = std::make_unique<std::atomic<int64_t>>(0);
    pool.parallel_for(num_parts, [&, sum = sum.get()](int64_t part) {
      sum->fetch_add(round * 16 + part, std::memory_order_relaxed);
    });
    ASSERT_EQ(*sum, num_parts * round * 16 + num_parts * (num_parts - 1) / 2);
  }
}

TEST(ThreadPool, WakesFromSleep) {
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::atomic<int> count = 0;
    pool.parallel_for(64, [&](int64_t) { ++count; });
    ASSERT_EQ(count, 64);
  }
}

TEST(ThreadPool, UsesItsWorkers) {
  ThreadPool pool(2);
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> has_worked = false;
  // Parts that wait until another thread has done one.
  pool.parallel_for(2, [&](int64_t) {
    if (std::this_thread::get_id() != caller) has_worked = true;
    const auto start = std::chrono::steady_clock::now();
    while (!has_worked && std::chrono::steady_clock::now() - start < std::chrono::seconds(10)) {
      std::this_thread::yield();
    }
  });
  EXPECT_TRUE(has_worked);
}

}  // namespace
}  // namespace paceline
