// SPDX-License-Identifier: Apache-2.0
//
// Fibers, blocks and launches.

#include "emulator.h"

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <numeric>
#include <sstream>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "machine.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace paceline::emulator {
namespace {

constexpr uint32_t kMaxThreads = 1024;  // of a block
constexpr uint32_t kMaxBlocks = 16;     // of a cluster
constexpr size_t kStackBytes = 128 << 10;
constexpr uint32_t kMaxTries = 100'000;  // of a thread that waits for a change of memory

uint32_t random_below(uint32_t n) {
  uint64_t& state = machine().random;
  state += 0x9E3779B97F4A7C15u;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return static_cast<uint32_t>(((z ^ (z >> 31)) >> 32) * n >> 32);
}

void end_thread(Thread& thread) {
  Machine& m = machine();
  Block& block = m.blocks[thread.block];
  thread.wait = Wait::kEnded;
  ++block.num_ended;
  --m.num_live;
  if (thread.has_arrived && thread.arrived_in == m.cluster_phase) --m.num_arrived;
  complete_cluster_phase();
  // Other lanes may have waited for this one.
  const uint32_t first = thread.number / kWarpSize * kWarpSize;
  for (uint32_t i = first; i < std::min(first + kWarpSize, m.num_threads); ++i) {
    if (block.threads[i].wait == Wait::kWarp) complete_collective(block.threads[i], false);
  }
}

void fiber_main() {
  Machine& m = machine();
  for (;;) {
    try {
      m.launch->run_thread();
    } catch (const std::exception& error) {
      m.error = error.what();
    }
    end_thread(*m.current);
    yield();
  }
}

void begin_fiber(Thread& thread) {
  if (thread.stack == nullptr) {
    void* const stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, 4096, PROT_NONE) != 0) throw std::bad_alloc();
    thread.stack = static_cast<std::byte*>(stack);
  }
  thread.has_context = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
  setcontext(&context);
}

// Runs a thread until it waits or ends.
void resume(Thread& thread) {
  Machine& m = machine();
  m.current = &thread;
  threadIdx = thread.index;
  if (_setjmp(m.scheduler) == 0) {
    if (thread.has_context) _longjmp(thread.at, 1);
    begin_fiber(thread);
  }
  m.current = nullptr;
}

// --- blocks --------------------------------------------------------------------------------------

std::string waiting_threads() {
  std::map<std::string, uint32_t> counts;
  Machine& m = machine();
  for (const Block& block : m.blocks) {
    for (uint32_t i = 0; i < m.num_threads; ++i) {
      const Thread& thread = block.threads[i];
      std::ostringstream what;
      switch (thread.wait) {
        case Wait::kNone:
          break;
        case Wait::kWarp:
          what << "wait for lanes " << std::hex << "0x" << thread.mask << " at "
               << text_of(thread.place);
          break;
        case Wait::kBlock:
          what << "wait for their block at " << text_of(thread.place);
          break;
        case Wait::kCluster:
          what << "wait for their cluster at " << text_of(thread.place);
          break;
        case Wait::kEnded:
          what << "have ended";
          break;
      }
      ++counts[what.str()];
    }
  }
  std::string text;
  for (const auto& [what, count] : counts) {
    text += (text.empty() ? "" : "; ") + std::to_string(count) + " threads " + what;
  }
  return text;
}

// The blocks of the cluster whose first block is `origin`.
void begin_cluster(const uint3& origin) {
  Machine& m = machine();
  const Index& cluster = m.launch->cluster;
  const Index& shape = m.launch->block;
  m.blocks.resize(cluster.volume());
  m.threads.resize(std::max<size_t>(m.threads.size(), cluster.volume() * m.num_threads));
  m.cluster_phase = m.num_arrived = 0;
  m.num_live = static_cast<uint32_t>(cluster.volume()) * m.num_threads;
  for (uint32_t b = 0; b < m.blocks.size(); ++b) {
    Block& block = m.blocks[b];
    block.index = {origin.x + b % cluster.x, origin.y + b / cluster.x % cluster.y,
                   origin.z + b / cluster.x / cluster.y};
    block.threads = m.threads.data() + size_t{b} * m.num_threads;
    block.num_ended = 0;
    block.runnable.resize(m.num_threads);
    std::iota(block.runnable.begin(), block.runnable.end(), 0u);
    for (Barrier& barrier : block.barriers) barrier = {};
    for (uint32_t i = 0; i < m.num_threads; ++i) {
      Thread& thread = block.threads[i];
      thread.index = {i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y};
      thread.number = i;
      thread.block = b;
      thread.wait = Wait::kNone;
      thread.has_arrived = false;
      thread.num_tries = 0;
      thread.copies.clear();
    }
  }
  m.predecessor_runs = true;
  if (m.options.predecessor_runs) m.options.predecessor_runs();
  fill_shared();
  if (m.blocks.size() == 1) return;
  for (Block& block : m.blocks) save_shared(block);
}

// Runs the threads of a block, whose shared memory is in place, until all of them wait or end. In a
// cluster, also until all that can run only poll: what they wait for may be another block's.
void run_block(Block& block) {
  Machine& m = machine();
  blockIdx = block.index;
  size_t num_polls = 0;  // in a row
  while (!block.runnable.empty() && m.error.empty()) {
    const auto at = random_below(static_cast<uint32_t>(block.runnable.size()));
    const uint32_t number = std::exchange(block.runnable[at], block.runnable.back());
    block.runnable.pop_back();
    Thread& thread = block.threads[number];
    thread.polls = false;
    resume(thread);
    num_polls = thread.polls ? num_polls + 1 : 0;
    if (m.blocks.size() > 1 && num_polls > 2 * block.runnable.size()) break;
  }
  if (m.error.empty() && !kept_to_dynamic_shared()) {
    m.error = "block " + text_of(block.index) + " wrote beyond the " +
              std::to_string(m.launch->dynamic_shared_bytes) +
              " bytes of dynamic shared memory that its launch asked for";
  }
}

void run_cluster() {
  Machine& m = machine();
  const bool is_alone = m.blocks.size() == 1;
  while (m.num_live > 0 && m.error.empty()) {
    std::vector<Block*> ready;
    for (Block& block : m.blocks) {
      if (!block.runnable.empty()) ready.push_back(&block);
    }
    if (ready.empty()) {
      m.error = "no thread can go on: " + waiting_threads();
      return;
    }
    Block& block = *ready[random_below(static_cast<uint32_t>(ready.size()))];
    if (!is_alone) restore_shared(block);
    run_block(block);
    if (!is_alone) save_shared(block);
  }
}

void report_fault(int, siginfo_t* info, void*) {
  Machine& m = machine();
  char text[300];
  if (m.current != nullptr) {
    std::snprintf(text, sizeof text,
                  "A kernel accessed the address %p, which is beyond an array: thread %u of block "
                  "(%u, %u, %u), seed %llu\n",
                  info->si_addr, m.current->number, blockIdx.x, blockIdx.y, blockIdx.z,
                  static_cast<unsigned long long>(m.options.seed));
  } else {
    std::snprintf(text, sizeof text, "The host accessed the address %p, which is not mapped\n",
                  info->si_addr);
  }
  std::fputs(text, stderr);
  std::fflush(nullptr);
  _exit(1);
}

void catch_faults() {
  static const bool is_done = [] {
    static std::byte stack[64 << 10];
    stack_t alternative = {};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = report_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    return true;
  }();
  (void)is_done;
}

std::string wrong_shape(const Launch& launch) {
  const auto is_multiple = [](const Index& grid, const Index& cluster) {
    return grid.x % cluster.x == 0 && grid.y % cluster.y == 0 && grid.z % cluster.z == 0;
  };
  std::ostringstream text;
  if (launch.block.volume() > kMaxThreads || launch.block.volume() == 0) {
    text << "a block has " << launch.block.volume() << " threads; it can have 1 to " << kMaxThreads;
  } else if (launch.cluster.volume() > kMaxBlocks) {
    text << "a cluster has " << launch.cluster.volume() << " blocks; it can have " << kMaxBlocks;
  } else if (!is_multiple(launch.grid, launch.cluster)) {
    text << "the grid is no multiple of the cluster";
  } else if (launch.grid.y > 65535 || launch.grid.z > 65535) {
    text << "the grid has " << launch.grid.y << " x " << launch.grid.z
         << " blocks in y and z; at most 65535 each";
  } else if (launch.dynamic_shared_bytes > machine().options.max_shared_bytes) {
    text << "a block asks for " << launch.dynamic_shared_bytes
         << " bytes of dynamic shared memory; it can have " << machine().options.max_shared_bytes;
  }
  return text.str();
}

}  // namespace

Machine& machine() {
  static Machine instance;
  return instance;
}

std::string text_of(const Place& place) {
  std::string file = place.file_name();
  const size_t at = file.rfind("/cuda/");
  if (at != std::string::npos) file = file.substr(at + 1);
  return file + ":" + std::to_string(place.line());
}
std::string text_of(const uint3& index) {
  std::ostringstream text;
  text << "(" << index.x << ", " << index.y << ", " << index.z << ")";
  return text.str();
}
std::string text_of(const Thread& thread) {
  return "thread " + std::to_string(thread.number) + " of block " +
         text_of(machine().blocks[thread.block].index);
}
bool is_same(const Place& a, const Place& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         std::strcmp(a.file_name(), b.file_name()) == 0;
}

void yield() {
  Machine& m = machine();
  if (_setjmp(m.current->at) == 0) _longjmp(m.scheduler, 1);
}

void wake(Thread& thread) {
  thread.wait = Wait::kNone;
  machine().blocks[thread.block].runnable.push_back(thread.number);
}

size_t max_shared_bytes() { return machine().options.max_shared_bytes; }

void set_options(const Options& options) {
  machine().options = options;
  machine().random = options.seed;
}

Counts take_counts() { return std::exchange(machine().counts, {}); }

void set_cluster(const void* kernel, const Index& cluster) { machine().clusters[kernel] = cluster; }

std::string run(const Launch& asked) {
  Machine& m = machine();
  Launch launch = asked;
  const auto stated = m.clusters.find(launch.kernel);
  if (stated != m.clusters.end()) launch.cluster = stated->second;
  if (std::string error = wrong_shape(launch); !error.empty()) return error;
  m.counts.kernels.insert(launch.kernel);
  m.counts.threads += static_cast<int64_t>(launch.grid.volume() * launch.block.volume());
  if (!m.options.runs) return {};
  catch_faults();
  m.launch = &launch;
  m.num_threads = static_cast<uint32_t>(launch.block.volume());
  m.error.clear();
  gridDim = {launch.grid.x, launch.grid.y, launch.grid.z};
  blockDim = {launch.block.x, launch.block.y, launch.block.z};
  const Index clusters = {launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y,
                          launch.grid.z / launch.cluster.z};
  std::vector<uint32_t> order(clusters.volume());
  std::iota(order.begin(), order.end(), 0u);
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[random_below(static_cast<uint32_t>(i))]);
  }
  for (const uint32_t at : order) {
    begin_cluster({at % clusters.x * launch.cluster.x,
                   at / clusters.x % clusters.y * launch.cluster.y,
                   at / clusters.x / clusters.y * launch.cluster.z});
    run_cluster();
    if (m.error.empty()) continue;
    // Unfinished fibers start again in the next launch.
    for (Thread& thread : m.threads) thread.has_context = false;
    return m.error + " (seed " + std::to_string(m.options.seed) + ")";
  }
  return {};
}

void let_others_run(const Place& place) {
  Thread& self = *machine().current;
  if (++self.num_tries > kMaxTries) {
    fail("waits at " + text_of(place) + " for a change of memory that does not come");
  }
  self.polls = true;
  wake(self);
  yield();
}

void wait_for_predecessor() {
  Machine& m = machine();
  if (!m.options.predecessor_ends) return;
  make_copies(*m.current, m.current->num_groups + 1);
  if (std::exchange(m.predecessor_runs, false)) m.options.predecessor_ends();
}

void fail(std::string message) {
  Machine& m = machine();
  m.error = text_of(*m.current) + " " + message;
  _longjmp(m.scheduler, 1);
}

}  // namespace paceline::emulator
