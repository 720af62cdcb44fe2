// SPDX-License-Identifier: Apache-2.0
//
// Compares the CUDA ops, emulated on the CPU (tests/cuda/emulator), with the CPU ops on the op
// table, within the bounds of the table. A seed chooses the sample of each op's cases. Each case
// runs twice, on other machines, with other orders of blocks and threads and another content of
// shared memory, and must give the same bits. The test prints which ops it covers.
//
// PACELINE_SEED overrides the seed, PACELINE_TEST_LEVEL=3 runs all cases that can be emulated.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/emulator/emulator.h"
#include "cuda/emulator/guarded_memory.h"
#include "cuda/emulator/not_emulated.h"
#include "support/op_cases.h"
#include "support/op_cases_moe.h"
#include "support/op_comparison.h"
#include "support/op_specs.h"
#include "support/seed.h"
#include "support/weight_spec.h"

namespace paceline::testing {
namespace {

using emulator::GuardedMemory;

// For each op and kernel of the table runs the cheapest case that launches it and has rows, unless
// another op launches the kernel at a tenth of the cost. Then cases of each op, the
// first word of their names, run until their cost exceeds the first number: the kernel threads that
// they launch, or more where kernels loop over rows. They are taken in an order that depends on the
// seed, without those that cost more than the second number. Of paged attention those cases always
// run for which the two machines take other instances or merges.
constexpr int64_t kCostOfOp = 400'000;
constexpr int64_t kCostOfCase = 100'000;
constexpr int64_t kBytesOfCase = 8 << 20;  // of arrays, at most
constexpr int64_t kCostOfRow = 256;

// The cost of emulating a thread in ops with many collective calls or products.
int64_t cost_of_thread(const std::string& op) {
  static const std::map<std::string, int64_t> costs = {
      {"gemm", 2},      {"activated", 3}, {"normed", 3},     {"added", 3},     {"expert", 1},
      {"mixture", 2},   {"large", 6},     {"attention", 25}, {"truncate", 12}, {"compressed", 8},
      {"logprobs", 8},  {"index", 6},     {"append", 4},     {"choose", 4},    {"proposals", 4},
      {"recurrent", 8}, {"route", 3},     {"sort", 3},       {"adjust", 3},    {"list", 2}};
  const auto found = costs.find(op);
  return found == costs.end() ? 1 : found->second;
}

// Arrays on the "device", between guards.
class EmulatedArrays {
 public:
  explicit EmulatedArrays(const OpInstance& op) : op_(op) {
    for (const OpArray& array : op.arrays) {
      const std::vector<std::byte> bytes = initial_bytes(array, true);
      memory_.emplace_back(bytes.size());
      std::copy(bytes.begin(), bytes.end(), memory_.back().data());
    }
  }
  [[nodiscard]] Addresses addresses() const {
    std::vector<std::byte*> at;
    for (const GuardedMemory& memory : memory_) at.push_back(memory.data());
    return Addresses(std::move(at));
  }
  [[nodiscard]] ArrayBytes download() const {
    ArrayBytes all;
    for (const GuardedMemory& memory : memory_) {
      all.emplace_back(memory.data(), memory.data() + memory.size());
    }
    return all;
  }
  // Takes away what arrives late, and gives it back.
  void withhold() {
    withheld_.clear();
    for_each_late([&](std::byte* data, size_t num_bytes) {
      withheld_.emplace_back(data, data + num_bytes);
      std::fill_n(data, num_bytes, std::byte{0xff});  // NaN
    });
  }
  void deliver() {
    auto content = withheld_.begin();
    for_each_late([&](std::byte* data, size_t) { std::ranges::copy(*content++, data); });
  }
  // The first array that was written beyond its ends, or an empty string.
  [[nodiscard]] std::string broken_guard() const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (!memory_[i].are_guards_intact()) return op_.arrays[i].name;
    }
    return {};
  }

 private:
  template <class Function>
  void for_each_late(const Function& function) {
    for (size_t i = 0; i < memory_.size(); ++i) {
      const int64_t bytes = element_bytes(op_.arrays[i].cuda);
      for (const auto& [first, count] : op_.arrays[i].late) {
        function(memory_[i].data() + first * bytes, static_cast<size_t>(count * bytes));
      }
    }
  }

  const OpInstance& op_;
  std::vector<GuardedMemory> memory_;
  ArrayBytes withheld_;
};

// What an engine gives to ops on an H100, and on a GPU with few multiprocessors, the least shared
// memory and no clusters: both must give the same bits.
enum class Machine : uint8_t { kH100, kSmall };
constexpr int64_t kWorkspaceBytes = 2 << 20;
constexpr int32_t kNumCounters = 4096;
CudaContext context_of(const OpInstance& op, Machine machine, std::byte* workspace,
                       std::byte* counters) {
  const bool is_small = machine == Machine::kSmall;
  return {.num_sms = is_small ? 16 : 132,
          .block_shared_bytes = (is_small ? 99 : 227) << 10,
          .sm_shared_bytes = (is_small ? 100 : 228) << 10,
          .has_early_starts = !is_small,
          .is_portable = true,
          .has_clusters = !is_small,
          .workspace = workspace,
          .workspace_bytes = kWorkspaceBytes,
          .counters = reinterpret_cast<int32_t*>(counters),
          .num_counters = kNumCounters,
          .max_model_len = std::max(op.max_model_len, 1)};
}

ArrayBytes run_emulated(const OpInstance& op, Machine machine, const emulator::Options& options) {
  static const GuardedMemory workspace(kWorkspaceBytes);
  static const GuardedMemory counters(kNumCounters * sizeof(int32_t));
  // No op may depend on what another one left in the scratch memory.
  std::memset(workspace.data(), 0xff, workspace.size());
  std::memset(counters.data(), 0, counters.size());
  CudaContext ctx = context_of(op, machine, workspace.data(), counters.data());
  emulator::Options of_machine = options;
  of_machine.max_shared_bytes = static_cast<size_t>(ctx.block_shared_bytes);
  EmulatedArrays arrays(op);
  const bool has_late =
      std::ranges::any_of(op.arrays, [](const OpArray& array) { return !array.late.empty(); });
  if (has_late && ctx.has_early_starts) {
    of_machine.predecessor_runs = [&] { arrays.withhold(); };
    of_machine.predecessor_ends = [&] { arrays.deliver(); };
  }
  emulator::set_options(of_machine);
  op.run_cuda(ctx, arrays.addresses());
  emulator::set_options({});
  EXPECT_EQ(arrays.broken_guard(), "") << "written beyond its ends";
  EXPECT_TRUE(workspace.are_guards_intact()) << "written beyond the workspace";
  EXPECT_TRUE(counters.are_guards_intact()) << "written beyond the counters";
  const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
  EXPECT_TRUE(std::all_of(counters.data(), counters.data() + counters.size(), is_zero))
      << "counters are not back at zero";
  return arrays.download();
}

// -1e30 as a float, 1e30 as a comparable key. Kernels may ignore NaN.
constexpr uint64_t kFinitePattern = 0xf149f2caf149f2cau;

class OpEmulation : public ::testing::Test {
 public:
  explicit OpEmulation(OpCase op_case) : case_(std::move(op_case)) {}
  void TestBody() override {
    TRACE_SEED();
    const OpInstance op = case_.make(base_seed());
    BeforeAndAfter cuda;
    for (const OpArray& array : op.arrays) cuda.before.push_back(initial_bytes(array, true));
    cuda.after = run_emulated(op, Machine::kH100, {.seed = base_seed()});
    expect_agreement(op, run_on_cpu(op), cuda);
    const ArrayBytes again =
        run_emulated(op, Machine::kSmall, {.seed = base_seed() + 1, .pattern = kFinitePattern});
    for (size_t i = 0; i < op.arrays.size(); ++i) {
      const OpArray& array = op.arrays[i];
      const int64_t num_bytes =
          array.num_live < 0 ? cuda_bytes(array) : array.num_live * element_bytes(array.cuda);
      EXPECT_TRUE(std::equal(again[i].begin(), again[i].begin() + num_bytes, cuda.after[i].begin()))
          << op.arrays[i].name
          << " depends on the machine, the order of blocks or threads, or undefined shared memory";
    }
  }

 private:
  OpCase case_;
};

// --- int4 and nvfp4 ------------------------------------------------------------------------------

// The output of an instance.
std::vector<std::byte> y_of(const OpInstance& op) {
  return run_emulated(op, Machine::kSmall,
                      {.seed = base_seed()})[static_cast<size_t>(op.find("y"))];
}

// Compares products of weights with those of the plain weights that they stand for.
template <class Spec>
void expect_plain_bits(OpInstance (*make)(const Spec&, const Rows&, uint64_t), const Spec& spec,
                       const std::string& what) {
  for (const int32_t num_rows : {1, 3, 17}) {
    const Rows rows = first_rows(num_rows, num_rows + 2);
    Spec plain = spec;
    plain.weight.is_dequantized = true;
    EXPECT_TRUE(y_of(make(spec, rows, base_seed())) == y_of(make(plain, rows, base_seed())))
        << what << ", " << num_rows << " rows";
  }
}

// The same for the experts of the table's mixtures, in bfloat16.
void expect_plain_bits_of_experts(WeightFormat format) {
  int32_t num_tried = 0;
  for (const ExpertGemmCase& c : expert_gemm_cases()) {
    const WeightSpec& weight = c.spec.weight;
    const bool is_tried =
        weight.format == format && weight.dtype == DType::kBFloat16 && weight.is_exact();
    if (!is_tried) continue;
    expect_plain_bits(make_expert_gemm, c.spec, c.name);
    ++num_tried;
  }
  EXPECT_GT(num_tried, 10);
}

TEST(Int4Emulation, HasTheBitsOfThePlainWeights) {
  TRACE_SEED();
  expect_plain_bits_of_experts(WeightFormat::kInt4);
  for (const int32_t scale_cols : {0, 32, 64, 96, 128}) {
    for (const DType scale_dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (const bool has_zeros : {false, true}) {
        const GemmSpec spec = {.n = 130,
                               .k = 384,
                               .weight = {.format = WeightFormat::kInt4,
                                          .scale_cols = scale_cols,
                                          .scale_dtype = scale_dtype,
                                          .has_zeros = has_zeros}};
        expect_plain_bits(make_gemm, spec, weight_suffix(spec.weight));
      }
    }
  }
}

TEST(Nvfp4Emulation, HasTheBitsOfThePlainWeights) {
  TRACE_SEED();
  expect_plain_bits_of_experts(WeightFormat::kNvfp4);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const WeightSpec weight = {.dtype = dtype, .format = WeightFormat::kNvfp4};
    for (const int32_t k : {32, 64, 96, 384, 1312}) {
      const GemmSpec spec = {.n = 130, .k = k, .weight = weight, .y_dtype = dtype};
      expect_plain_bits(make_gemm, spec, weight_suffix(weight) + ", k " + std::to_string(k));
    }
    // A launch for both groups, and one for each.
    for (const int32_t rows : {128, 48}) {
      const GemmSpec spec = {
          .n = 2 * rows, .k = 96, .weight = weight, .y_dtype = dtype, .num_groups = 2};
      expect_plain_bits(make_gemm, spec,
                        weight_suffix(weight) + ", groups of " + std::to_string(rows));
    }
  }
}

struct Sized {
  OpCase op_case;
  int64_t cost = 0;
  int64_t bytes = 0;  // of arrays
  std::set<const void*> kernels;
  // Whether the case is one without rows, where kernels end at once.
  [[nodiscard]] bool is_empty() const {
    return op_case.name.ends_with("_none") || op_case.name.find("_rows0of") != std::string::npos;
  }
  [[nodiscard]] bool is_always_run() const {
    return op_case.name.ends_with("_one_cluster") || op_case.name.ends_with("_two_blocks") ||
           op_case.name.ends_with("_many_seqs");
  }
  [[nodiscard]] bool is_small() const { return cost <= kCostOfCase && bytes <= kBytesOfCase; }
};
// What the emulator can run of the table, by op.
struct Plan {
  std::map<std::string, std::vector<Sized>> ops;
  std::map<const void*, int64_t> least_costs;  // of a case that launches the kernel
  std::set<std::string> not_emulated;
};

// Calls all ops, with kernels that do nothing.
Plan make_plan() {
  Plan plan;
  // Addresses that nothing touches.
  const auto address = [](size_t i) {
    return reinterpret_cast<std::byte*>((uintptr_t{1} << 40) * (i + 1));
  };
  for (const OpCase& c : op_cases()) {
    const OpInstance op = c.make(base_seed());
    std::vector<std::byte*> at;
    int64_t num_bytes = 0;
    for (const OpArray& array : op.arrays) {
      at.push_back(address(at.size()));
      num_bytes += cuda_bytes(array);
    }
    std::byte* const workspace = address(at.size());
    std::byte* const counters = address(at.size() + 1);
    const Addresses addresses(std::move(at));
    (void)emulator::take_counts();
    try {
      // Kernels ask once for their shared memory, so the machine with less of it comes first.
      for (const Machine machine : {Machine::kSmall, Machine::kH100}) {
        CudaContext ctx = context_of(op, machine, workspace, counters);
        emulator::set_options(
            {.runs = false, .max_shared_bytes = static_cast<size_t>(ctx.block_shared_bytes)});
        op.run_cuda(ctx, addresses);
      }
    } catch (const emulator::NotEmulated& error) {
      plan.not_emulated.insert(error.what());
      continue;
    }
    const std::string name = c.name.substr(0, c.name.find('_'));
    emulator::Counts counts = emulator::take_counts();
    const int64_t num_threads = std::max(counts.threads / 2, op.num_rows * kCostOfRow);
    const int64_t cost = num_threads * cost_of_thread(name);
    const Sized& sized =
        plan.ops[name].emplace_back(Sized{c, cost, num_bytes, std::move(counts.kernels)});
    if (sized.is_empty()) continue;
    for (const void* kernel : sized.kernels) {
      int64_t& least = plan.least_costs.try_emplace(kernel, cost).first->second;
      least = std::min(least, cost);
    }
  }
  return plan;
}

// The cases of one op that run.
std::vector<OpCase> chosen_cases(const Plan& plan, std::vector<Sized> cases) {
  std::vector<OpCase> chosen;
  std::set<const void*> reached;
  int64_t cost = 0;
  const auto choose = [&](const Sized& c) {
    cost += c.cost;
    chosen.push_back(c.op_case);
    if (!c.is_empty()) reached.insert(c.kernels.begin(), c.kernels.end());
  };
  std::stable_sort(cases.begin(), cases.end(),
                   [](const Sized& a, const Sized& b) { return a.cost < b.cost; });
  std::vector<Sized> others;
  for (Sized& c : cases) {
    const auto is_needed = [&](const void* kernel) {
      return !reached.contains(kernel) && c.cost <= 10 * plan.least_costs.at(kernel);
    };
    if (c.is_always_run() ||
        (!c.is_empty() && std::any_of(c.kernels.begin(), c.kernels.end(), is_needed))) {
      choose(c);
    } else {
      others.push_back(std::move(c));
    }
  }
  Stream stream(base_seed(), 2000);
  shuffle(others, stream);
  for (const Sized& c : others) {
    if (test_level() >= 3 || (c.is_small() && cost <= kCostOfOp)) choose(c);
  }
  return chosen;
}

void register_cases(const Plan& plan) {
  std::set<const void*> kernels;
  std::printf("Emulated cases of each op, of those in the table:\n");
  for (const auto& [name, cases] : plan.ops) {
    const std::vector<OpCase> chosen = chosen_cases(plan, cases);
    std::printf("  %s %zu of %zu\n", name.c_str(), chosen.size(), cases.size());
    for (const Sized& c : cases) kernels.insert(c.kernels.begin(), c.kernels.end());
    for (const OpCase& c : chosen) {
      ::testing::RegisterTest("OpEmulation", c.name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                              [c]() -> ::testing::Test* { return new OpEmulation(c); });
    }
  }
  std::printf("They launch all %zu kernels of these ops in the table.\n", kernels.size());
  std::printf("Ops without emulation:");
  for (const std::string& op : plan.not_emulated) std::printf(" %s", op.c_str());
  std::printf("\n");
}

}  // namespace
}  // namespace paceline::testing

int main(int argc, char** argv) {
  using namespace paceline::testing;
  ::testing::InitGoogleTest(&argc, argv);
  register_cases(make_plan());
  return RUN_ALL_TESTS();
}
