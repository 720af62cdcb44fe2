// SPDX-License-Identifier: Apache-2.0
#include "support/op_comparison.h"

#include <gtest/gtest.h>
#include <paceline/version.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace paceline::testing {
namespace {

CpuContext cpu_context() {
  static const int num_threads = std::min(build_info().num_cores, 16);
  static ThreadPool threads(num_threads);
  return {.num_threads = num_threads, .threads = &threads};
}

bool same_element(int64_t element_size, const std::vector<std::byte>& a,
                  const std::vector<std::byte>& b, int64_t index) {
  const auto at = static_cast<size_t>(index * element_size);
  return std::memcmp(a.data() + at, b.data() + at, static_cast<size_t>(element_size)) == 0;
}

::testing::AssertionResult differs(const OpArray& array, int64_t index) {
  auto result = ::testing::AssertionFailure() << array.name << "[" << index << "]";
  if (array.row_length > 0) {
    result << " (row " << index / array.row_length << ", " << index % array.row_length << ")";
  }
  return result << ": ";
}

// Errors of a part of an array, and the magnitude of its expected values.
struct Sums {
  double error = 0;
  double reference = 0;
  int64_t count = 0;
  [[nodiscard]] double relative() const { return std::sqrt(error / reference); }
  [[nodiscard]] double rms() const {
    return count == 0 ? 0 : std::sqrt(reference / static_cast<double>(count));
  }
};

// What the CPU op did not write must be unchanged; the rest is compared, row by row where rows are
// long enough for the mean error to be meaningful. NaN never passes.
::testing::AssertionResult floats_agree(const OpArray& array, const BeforeAndAfter& cpu,
                                        const BeforeAndAfter& cuda, size_t which) {
  constexpr int64_t kMinRowElements = 64;
  const int64_t cpu_size = element_bytes(array.cpu);
  const int64_t cuda_size = element_bytes(array.cuda);
  const bool has_rows = array.row_length >= kMinRowElements;
  std::vector<Sums> rows(has_rows ? static_cast<size_t>(array.count / array.row_length) : 1);
  const auto row_of = [&](int64_t i) -> Sums& {
    return rows[has_rows ? static_cast<size_t>(i / array.row_length) : 0];
  };
  Sums all;
  std::vector<bool> is_written(static_cast<size_t>(array.count), false);
  // An op in place may give a number its old value in one rounding and a neighbour in another.
  const auto is_in_place = [&](int64_t i) {
    const double want = float_at(array.cpu, cpu.after[which].data(), i);
    const double got = float_at(array.cuda, cuda.after[which].data(), i);
    return array.role == Role::kInOut && array.compare == Compare::kNear &&
           std::fabs(got - want) <= array.rms_bound * std::fabs(want);
  };
  for (int64_t i = array.num_ignored; i < array.count; ++i) {
    if (same_element(cpu_size, cpu.before[which], cpu.after[which], i)) {
      if (!same_element(cuda_size, cuda.before[which], cuda.after[which], i) && !is_in_place(i)) {
        return differs(array, i) << "written, with "
                                 << float_at(array.cuda, cuda.after[which].data(), i)
                                 << ", though not an output";
      }
      continue;
    }
    const double want = float_at(array.cpu, cpu.after[which].data(), i);
    const double got = float_at(array.cuda, cuda.after[which].data(), i);
    if (std::isnan(got) || !std::isfinite(want) ||
        (array.compare == Compare::kExact && got != want)) {
      return differs(array, i) << got << ", the CPU has " << want;
    }
    is_written[static_cast<size_t>(i)] = true;
    for (Sums* const sums : {&row_of(i), &all}) {
      sums->error += (got - want) * (got - want);
      sums->reference += want * want;
      ++sums->count;
    }
  }
  if (array.compare == Compare::kExact) return ::testing::AssertionSuccess();
  for (int64_t i = array.num_ignored; i < array.count; ++i) {
    if (!is_written[static_cast<size_t>(i)]) continue;
    const double want = float_at(array.cpu, cpu.after[which].data(), i);
    const double got = float_at(array.cuda, cuda.after[which].data(), i);
    // An outlier that the mean hides: more than ten times the allowed mean error.
    const double bound = 10 * array.rms_bound * (std::fabs(want) + row_of(i).rms());
    if (!(std::fabs(got - want) <= bound)) {
      return differs(array, i) << got << ", the CPU has " << want << ", bound " << bound;
    }
  }
  for (size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].count > 0 && rows[row].error > 0 && !(rows[row].relative() <= array.rms_bound)) {
      return ::testing::AssertionFailure()
             << array.name << (has_rows ? " row " + std::to_string(row) : std::string())
             << ": relative RMS error " << rows[row].relative() << ", bound " << array.rms_bound;
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult arrays_agree(const OpArray& array, const BeforeAndAfter& cpu,
                                        const BeforeAndAfter& cuda, size_t which) {
  if (array.role == Role::kInput) {
    if (cuda.before[which] == cuda.after[which]) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "the input " << array.name << " was written";
  }
  if (array.compare == Compare::kByCase) return ::testing::AssertionSuccess();
  if (is_float(array.cpu)) return floats_agree(array, cpu, cuda, which);
  const int64_t size = element_bytes(array.cpu);
  for (int64_t i = 0; i < array.count; ++i) {
    if (same_element(size, cpu.after[which], cuda.after[which], i)) continue;
    int64_t want = 0;
    int64_t got = 0;
    std::memcpy(&want, cpu.after[which].data() + i * size, static_cast<size_t>(size));
    std::memcpy(&got, cuda.after[which].data() + i * size, static_cast<size_t>(size));
    const bool was_left = same_element(size, cuda.before[which], cuda.after[which], i);
    return differs(array, i) << got << (was_left ? " (left alone)" : "") << ", the CPU has "
                             << want;
  }
  return ::testing::AssertionSuccess();
}

}  // namespace

BeforeAndAfter run_on_cpu(const OpInstance& op) {
  BeforeAndAfter run;
  for (const OpArray& array : op.arrays) run.before.push_back(initial_bytes(array, false));
  run.after = run.before;
  std::vector<std::byte*> at;
  for (std::vector<std::byte>& bytes : run.after) at.push_back(bytes.data());
  CpuContext ctx = cpu_context();
  op.run_cpu(ctx, Addresses(std::move(at)));
  return run;
}

void expect_agreement(const OpInstance& op, const BeforeAndAfter& cpu, const BeforeAndAfter& cuda) {
  int32_t num_outputs = 0;
  for (size_t i = 0; i < op.arrays.size(); ++i) {
    EXPECT_TRUE(arrays_agree(op.arrays[i], cpu, cuda, i));
    const OpArray& array = op.arrays[i];
    if (array.role != Role::kInput && array.compare != Compare::kByCase) ++num_outputs;
  }
  if (op.check) {
    int64_t num_different = 0;
    EXPECT_EQ(op.check(cpu.after, cuda.after, &num_different), "");
    EXPECT_LE(num_different, std::max(1, op.num_compared / 1000));
    ++num_outputs;
  }
  EXPECT_GT(num_outputs, 0) << "nothing was compared with the CPU";
}

}  // namespace paceline::testing
