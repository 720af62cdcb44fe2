// SPDX-License-Identifier: Apache-2.0
// The system refuses a thread, as at a container's pids limit: whatever was being built says so and
// leaves no thread behind. This binary's pthread_create, which replaces the library's, refuses.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <string>
#include <thread>

#include <paceline/error.h>
#include <paceline/executor.h>

#include "cpp/engine_options.h"
#include "device/thread_pool.h"
#include "support/tiny_models.h"

namespace {

std::atomic<int> num_threads_left{-1};  // that may be started; -1: any number

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) noexcept {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (num_threads_left == 0) return EAGAIN;
  if (num_threads_left > 0) --num_threads_left;
  return create(thread, attributes, body, argument);
}

namespace paceline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::small_engine_options;
using testing::tiny_model;
using testing::TinyModel;

size_t num_running_threads() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    ++count;
  }
  return count;
}

// A thread that has been joined may be listed for a moment longer.
void expect_threads(size_t count) {
  for (int i = 0; i < 500 && num_running_threads() != count; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(num_running_threads(), count) << "a thread lives on";
}

// Of a process that has started one before: a sanitizer adds its own to the first.
size_t num_threads_at_rest() {
  std::thread([] {}).join();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  return num_running_threads();
}

// Calls `build` in a process that can start only num_allowed more threads. Returns the message of
// the DeviceError it throws, or "" if it throws none.
template <class Build>
std::string refusal(int num_allowed, Build build) {
  num_threads_left = num_allowed;
  std::string message;
  try {
    build();
  } catch (const DeviceError& error) {
    message = error.what();
  }
  num_threads_left = -1;
  return message;
}

TEST(OutOfThreads, ThreadPoolSaysHowManyThereAre) {
  const size_t num_before = num_threads_at_rest();
  for (const int num_allowed : {0, 1, 5}) {
    EXPECT_THAT(refusal(num_allowed, [] { const ThreadPool pool(8); }),
                AllOf(HasSubstr("threads"), HasSubstr("num_threads is 8"), HasSubstr("takes 7"),
                      HasSubstr(std::to_string(num_allowed) + " could be started"),
                      HasSubstr("lower num_threads")));
    expect_threads(num_before);
  }
  EXPECT_EQ(refusal(7, [] { const ThreadPool pool(8); }), "");
}

TEST(OutOfThreads, EveryThreadOfAnEngineMayBeMissing) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = small_engine_options(2);
  options.num_threads = 3;
  const size_t num_before = num_threads_at_rest();
  int num_allowed = 0;
  for (;; ++num_allowed) {
    const std::string message =
        refusal(num_allowed, [&] { const Executor executor(model, model, options); });
    expect_threads(num_before);
    if (message.empty()) break;
    EXPECT_THAT(message, AllOf(HasSubstr("cannot start the thread"), HasSubstr("num_threads")));
    ASSERT_LT(num_allowed, 10);
  }
  EXPECT_EQ(num_allowed, 4);  // two workers, the device's and the engine's
}

}  // namespace
}  // namespace paceline
