// SPDX-License-Identifier: Apache-2.0
// A library for LD_PRELOAD whose operator new fails on demand on one thread of an engine. Threads
// that libstdc++ starts are numbered in their order; those of Python are not touched.

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<int> num_threads{0};
std::atomic<int> failing_thread{-1};
std::atomic<long> countdown{0};
std::atomic<long> num_faults{0};
thread_local int thread_number = -1;

struct Start {
  void* (*body)(void*);
  void* argument;
  int number;
};

void* run(void* given) {
  const Start start = *static_cast<Start*>(given);
  std::free(given);
  thread_number = start.number;
  return start.body(start.argument);
}

void* allocate(size_t size) {
  if (thread_number >= 0 && thread_number == failing_thread && countdown.fetch_sub(1) == 1) {
    ++num_faults;
    throw std::bad_alloc();
  }
  void* const memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

extern "C" {

// The number of threads that libstdc++ has started.
int count_threads() { return num_threads; }

// From now on the n-th allocation of a thread fails, n >= 1. Returns the number of failures since
// the last call.
long fail_allocation(int thread, long n) {
  failing_thread = -1;
  countdown = n;
  failing_thread = thread;
  return num_faults.exchange(0);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                   void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  Dl_info caller = {};
  dladdr(__builtin_return_address(0), &caller);
  if (caller.dli_fname == nullptr || std::strstr(caller.dli_fname, "libstdc++") == nullptr) {
    return create(thread, attributes, body, argument);
  }
  auto* const start = static_cast<Start*>(std::malloc(sizeof(Start)));
  *start = {body, argument, num_threads.fetch_add(1)};
  return create(thread, attributes, run, start);
}
}

void* operator new(size_t size) { return allocate(size); }
void* operator new[](size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
