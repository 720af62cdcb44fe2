// SPDX-License-Identifier: Apache-2.0
// The exchanges of ranks on GPUs: of columns, of the winners of draws, and of columns with the norm
// that follows. Where there are fewer GPUs than ranks, the ranks share the first one. Skipped
// without a GPU, unless PACELINE_REQUIRE_GPU=1.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "common/describe_device.h"
#include "common/device_scope.h"
#include "device/device_memory.h"
#include "ops/gather.h"
#include "support/cuda_fixture.h"
#include "support/drawn_rows.h"
#include "support/gpu.h"
#include "support/seed.h"

namespace paceline {
namespace {

using testing::check_cuda;
using testing::DrawnRows;
using testing::gpus_for;
using testing::seed_from_env;

class CudaGather : public testing::GpuTest {};

// A stream and memory of a rank's GPU.
class RankDevice {
 public:
  RankDevice(int32_t gpu, bool shares_gpu) : gpu_(gpu) {
    const cuda::DeviceScope scope(gpu_);
    cuda::describe_device(context_);
    if (shares_gpu) context_.has_early_starts = false;
    check_cuda(cudaStreamCreateWithFlags(&context_.stream, cudaStreamNonBlocking), "a stream");
    const int32_t zero = 0;
    zero_ = reinterpret_cast<const int32_t*>(upload(&zero, sizeof(zero)));
    const std::vector<std::byte> scratch(1 << 20);
    context_.workspace = upload(scratch.data(), std::ssize(scratch));
    context_.workspace_bytes = std::ssize(scratch);
    context_.num_counters = 1 << 10;
    context_.counters = reinterpret_cast<int32_t*>(upload(scratch.data(), 4 << 10));
  }
  ~RankDevice() {
    const cuda::DeviceScope scope(gpu_);
    cudaStreamSynchronize(context_.stream);
    cudaStreamDestroy(context_.stream);
  }
  RankDevice(const RankDevice&) = delete;
  RankDevice& operator=(const RankDevice&) = delete;

  // A copy of bytes on the GPU.
  std::byte* upload(const void* from, int64_t bytes) {
    buffers_.emplace_back(cuda_memory(gpu_), std::max<int64_t>(bytes, 1), "a test");
    if (bytes > 0) cuda_memory(gpu_).upload(buffers_.back().data(), from, bytes);
    return buffers_.back().data();
  }
  void gather(const GatherColumnsParams& p) { run(gather_columns, p); }
  // Waits for the exchanges, and fails their group after a while, which ends them.
  void synchronize(RankGroup& group) {
    const cuda::DeviceScope scope(gpu_);
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    while (cudaStreamQuery(context_.stream) == cudaErrorNotReady) {
      if (Clock::now() - begin > std::chrono::seconds(20)) {
        group.fail(0, std::make_exception_ptr(DeviceError("exchanges take longer than 20 s")));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    cuda::check(cudaStreamSynchronize(context_.stream), "an exchange");
  }
  template <class Params>
  void run(void (*op)(CudaContext&, const Params&), const Params& p) {
    const cuda::DeviceScope scope(gpu_);
    context_.run(op, p);
  }
  [[nodiscard]] DeviceMemory& memory() const { return cuda_memory(gpu_); }
  [[nodiscard]] const int32_t* zero() const { return zero_; }

 private:
  int32_t gpu_;
  const int32_t* zero_ = nullptr;
  CudaContext context_;
  std::vector<DeviceBuffer> buffers_;
};

std::unique_ptr<RankGroup> group_on(const std::vector<int32_t>& gpus, int64_t row_bytes) {
  connect_gpus(gpus);
  std::vector<DeviceMemory*> memories;
  for (const int32_t gpu : gpus) memories.push_back(&cuda_memory(gpu));
  return std::make_unique<RankGroup>(memories, row_bytes);
}

// Up to as many as there are GPUs, or 4. The blocks of more ranks would not run at once on one GPU.
int32_t random_num_ranks(std::mt19937_64& random) {
  const uint64_t most = std::max(4, std::min(cuda_status().num_gpus, kMaxRanks));
  return static_cast<int32_t>(2 + random() % (most - 1));
}

TEST_F(CudaGather, ExchangesGiveEveryRankAllColumns) {
  const uint64_t first_seed = seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 24; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const int32_t num_ranks = random_num_ranks(random);
    const std::vector<int32_t> gpus = gpus_for(num_ranks);
    const bool shares_gpu = gpus.back() == gpus.front();
    constexpr int32_t kMaxWidth = 40000;
    const auto group = group_on(gpus, int64_t{kMaxWidth} * num_ranks * 4);
    std::vector<std::unique_ptr<RankDevice>> devices;
    for (const int32_t gpu : gpus) {
      devices.push_back(std::make_unique<RankDevice>(gpu, shares_gpu));
    }
    struct Check {
      std::vector<GatherColumnsParams> params;  // by rank
      std::vector<std::byte> expected;
    };
    std::vector<Check> checks;
    for (int32_t i = 0; i < 12; ++i) {
      // Packets and segments, whole vectors and odd ones, fewer rows than there is room for.
      const DType dtype = random() % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
      const int32_t unit = random() % 2 == 0 ? 64 : 1;
      const int32_t widest = i % 3 == 0 ? kMaxWidth / unit : 600 / unit;
      RankColumns columns = {.num_ranks = num_ranks};
      for (int32_t rank = 0; rank < num_ranks; ++rank) {
        const auto r = static_cast<size_t>(rank);
        const auto width = static_cast<int32_t>(1 + random() % static_cast<uint64_t>(widest));
        columns.first[r + 1] = columns.first[r] + width * unit;
      }
      const auto max_rows = static_cast<int32_t>(1 + random() % (i % 3 == 0 ? 70 : 9));
      const auto num_rows = static_cast<int32_t>(random() % static_cast<uint64_t>(max_rows + 1));
      const bool is_in_place = random() % 2 == 0;
      const int64_t item = dtype_bytes(dtype);
      const int64_t row_bytes = columns.total() * item;
      std::vector<std::byte> whole(static_cast<size_t>(row_bytes * max_rows));
      for (std::byte& byte : whole) byte = static_cast<std::byte>(random());
      // Rows behind the last one stay as they are.
      std::vector<std::byte> expected(whole.size(), std::byte{0xff});
      std::copy_n(whole.begin(), row_bytes * num_rows, expected.begin());
      Check check = {.params = {}, .expected = std::move(expected)};
      for (int32_t rank = 0; rank < num_ranks; ++rank) {
        const LinearRange own = columns.of(rank);
        const int64_t own_bytes = own.count * item;
        std::vector<std::byte> y(whole.size(), std::byte{0xff});
        std::vector<std::byte> x(static_cast<size_t>(own_bytes * max_rows));
        for (int64_t row = 0; row < num_rows; ++row) {
          const auto from = whole.begin() + row * row_bytes + own.first * item;
          std::copy_n(from, own_bytes,
                      is_in_place ? y.begin() + row * row_bytes + own.first * item
                                  : x.begin() + row * own_bytes);
        }
        RankDevice& device = *devices[static_cast<size_t>(rank)];
        std::byte* const y_there = device.upload(y.data(), std::ssize(y));
        const std::byte* const x_there = device.upload(x.data(), std::ssize(x));
        const std::byte* const rows = device.upload(&num_rows, sizeof(num_rows));
        check.params.push_back({.num_rows = reinterpret_cast<const int32_t*>(rows),
                                .max_rows = max_rows,
                                .x = is_in_place ? y_there + own.first * item : x_there,
                                .x_stride = is_in_place ? columns.total() : own.count,
                                .columns = columns,
                                .y = y_there,
                                .dtype = dtype,
                                .ranks = {.group = group.get(), .rank = rank}});
      }
      checks.push_back(std::move(check));
    }
    // First without rows, since the driver may wait for the device when it loads a kernel.
    for (const bool has_rows : {false, true}) {
      for (const Check& check : checks) {
        for (size_t rank = 0; rank < devices.size(); ++rank) {
          GatherColumnsParams p = check.params[rank];
          if (!has_rows) p.num_rows = devices[rank]->zero();
          devices[rank]->gather(p);
        }
      }
      for (const auto& device : devices) device->synchronize(*group);
      ASSERT_EQ(group->failure(), "");
    }
    for (size_t i = 0; i < checks.size(); ++i) {
      for (size_t rank = 0; rank < devices.size(); ++rank) {
        std::vector<std::byte> got(checks[i].expected.size());
        const auto* const y = static_cast<const std::byte*>(checks[i].params[rank].y);
        devices[rank]->memory().download(got.data(), y, std::ssize(got));
        ASSERT_TRUE(got == checks[i].expected) << "exchange " << i << " on rank " << rank;
      }
    }
  }
}

// Rows of several blocks and launches. The draw from all logits is that of the first rank's GPU.
TEST_F(CudaGather, ADrawFromOwnIdsHasTheTokensOfADrawFromAll) {
  const uint64_t first_seed = seed_from_env(1);
  int64_t num_drawn = 0;
  for (uint64_t seed = first_seed; seed < first_seed + 24; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const int32_t num_ranks = random_num_ranks(random);
    const std::vector<int32_t> gpus = gpus_for(num_ranks);
    const auto group = group_on(gpus, 1 << 12);
    std::vector<std::unique_ptr<RankDevice>> devices;
    for (const int32_t gpu : gpus) {
      devices.push_back(std::make_unique<RankDevice>(gpu, gpus.back() == gpus.front()));
    }
    struct Check {
      DrawParams whole;
      std::vector<GatheredDrawParams> params;  // by rank
    };
    std::vector<Check> checks;
    for (int32_t i = 0; i < 12; ++i) {
      const DrawnRows rows(num_ranks, i % 3 == 0 ? 20000 : 300, i % 4 == 1 ? 300 : 9, random);
      const auto draw_on = [&](RankDevice& device, const std::vector<float>& logits) {
        const auto add = [&]<class T>(const std::vector<T>& values) {
          const auto bytes = std::ssize(values) * static_cast<int64_t>(sizeof(T));
          return reinterpret_cast<T*>(device.upload(values.data(), bytes));
        };
        const std::vector<int32_t> tokens(rows.row_index.size(), -7);
        return rows.params(add(logits), add(tokens), add);
      };
      Check check = {.whole = draw_on(*devices.front(), rows.logits), .params = {}};
      for (int32_t rank = 0; rank < num_ranks; ++rank) {
        check.params.push_back(
            {.draw = draw_on(*devices[static_cast<size_t>(rank)], rows.own_logits(rank)),
             .columns = rows.columns,
             .ranks = {.group = group.get(), .rank = rank}});
      }
      checks.push_back(std::move(check));
    }
    for (const Check& check : checks) devices.front()->run(draw, check.whole);
    devices.front()->synchronize(*group);
    // First without rows, since the driver may wait for the device when it loads a kernel.
    for (const bool has_rows : {false, true}) {
      for (const Check& check : checks) {
        for (size_t rank = 0; rank < devices.size(); ++rank) {
          GatheredDrawParams p = check.params[rank];
          if (!has_rows) p.draw.num_rows = devices[rank]->zero();
          devices[rank]->run(gathered_draw, p);
        }
      }
      for (const auto& device : devices) device->synchronize(*group);
      ASSERT_EQ(group->failure(), "");
    }
    const auto tokens_of = [](const RankDevice& device, const DrawParams& p) {
      std::vector<int32_t> tokens(static_cast<size_t>(p.max_rows));
      device.memory().download(reinterpret_cast<std::byte*>(tokens.data()),
                               reinterpret_cast<const std::byte*>(p.tokens), 4 * p.max_rows);
      return tokens;
    };
    for (size_t i = 0; i < checks.size(); ++i) {
      const std::vector<int32_t> expected = tokens_of(*devices.front(), checks[i].whole);
      num_drawn += std::ranges::count_if(expected, [](int32_t token) { return token >= 0; });
      for (size_t rank = 0; rank < devices.size(); ++rank) {
        EXPECT_EQ(tokens_of(*devices[rank], checks[i].params[rank].draw), expected)
            << "draw " << i << " on rank " << rank;
      }
    }
  }
  EXPECT_GT(num_drawn, 1000);
}

// The exchange of a branch's output and the norm behind it: in one kernel as in ops of their own.
// After a mixture, a row is the sum of its places.
TEST_F(CudaGather, ANormThatFollowsHasTheBitsOfAnOpOfItsOwn) {
  const uint64_t first_seed = seed_from_env(1);
  for (uint64_t seed = first_seed; seed < first_seed + 24; ++seed) {
    SCOPED_TRACE("PACELINE_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const int32_t num_ranks = random_num_ranks(random);
    const std::vector<int32_t> gpus = gpus_for(num_ranks);
    // Rows that one kernel norms and others: odd ones, long ones and many.
    const int32_t unit = random() % 4 == 0 ? 1 : 64;
    RankColumns columns = {.num_ranks = num_ranks};
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      const auto r = static_cast<size_t>(rank);
      const auto width = static_cast<int32_t>(1 + random() % (random() % 4 == 0 ? 40 : 16)) * unit;
      columns.first[r + 1] = columns.first[r] + width;
    }
    const int32_t hidden = columns.total();
    const DType dtype = random() % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
    const DType y_dtype = random() % 4 == 0 ? DType::kFloat32 : dtype;
    const int64_t item = dtype_bytes(dtype);
    const auto max_rows = static_cast<int32_t>(1 + random() % (random() % 4 == 0 ? 60 : 8));
    const int32_t num_rows = max_rows - static_cast<int32_t>(random() % 2);
    const auto floats = [&](int64_t count) {
      std::vector<float> values(static_cast<size_t>(count));
      for (float& value : values) value = static_cast<float>(random() % 1000) / 500 - 1;
      return values;
    };
    const int64_t count = int64_t{max_rows} * hidden;
    const std::vector<float> wide = floats(count);
    std::vector<std::byte> whole(static_cast<size_t>(count * item));
    for (int64_t i = 0; i < count; ++i) {
      const auto bits = std::bit_cast<uint32_t>(wide[static_cast<size_t>(i)]);
      // Little endian: the upper half is a bfloat16.
      std::memcpy(whole.data() + i * item, reinterpret_cast<const std::byte*>(&bits) + 4 - item,
                  static_cast<size_t>(item));
    }
    const std::vector<float> residual = floats(count);
    const std::vector<float> weight = floats(hidden);
    const float scale = 0.75f;
    // Places of rows, of the same elements as the rows, which are the bases of the sums.
    const bool has_places = random() % 2 == 0;
    constexpr int32_t kTopK = 6;
    std::vector<int32_t> expert_row(static_cast<size_t>(max_rows * kTopK));
    for (int32_t& row : expert_row) {
      row = static_cast<int32_t>(random() % static_cast<uint64_t>(max_rows));
    }
    const std::vector<float> place_weights = floats(std::ssize(expert_row));
    const bool has_x_weight = random() % 2 == 0;
    const bool has_scale = random() % 2 == 0;
    const bool has_norm = random() % 4 != 0;
    const auto group = group_on(gpus, int64_t{hidden} * 4);
    struct Rank {
      std::unique_ptr<RankDevice> device;
      GatheredNormParams params[2];  // joined, and of two ops
    };
    std::vector<Rank> ranks(gpus.size());
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      Rank& own = ranks[static_cast<size_t>(rank)];
      own.device = std::make_unique<RankDevice>(gpus[static_cast<size_t>(rank)],
                                                gpus.back() == gpus.front());
      RankDevice& device = *own.device;
      const auto upload = [&](const std::vector<float>& values) {
        return reinterpret_cast<float*>(device.upload(values.data(), std::ssize(values) * 4));
      };
      const auto* const rows = reinterpret_cast<const int32_t*>(device.upload(&num_rows, 4));
      const float* const weights = upload(weight);
      const auto* const scales = reinterpret_cast<const float*>(device.upload(&scale, 4));
      const LinearRange part = columns.of(rank);
      const std::byte* const of_places = device.upload(whole.data(), std::ssize(whole));
      const auto* const expert_rows = reinterpret_cast<const int32_t*>(
          device.upload(expert_row.data(), std::ssize(expert_row) * 4));
      const float* const of_place = upload(place_weights);
      for (GatheredNormParams& p : own.params) {
        std::vector<std::byte> partial(whole.size(), std::byte{0xff});
        for (int64_t row = 0; row < max_rows; ++row) {
          const int64_t at = (row * hidden + part.first) * item;
          std::copy_n(whole.begin() + at, part.count * item, partial.begin() + at);
        }
        std::byte* const y = device.upload(partial.data(), std::ssize(partial));
        p.gather = {.num_rows = rows,
                    .max_rows = max_rows,
                    .x = y + part.first * item,
                    .x_stride = hidden,
                    .columns = columns,
                    .y = y,
                    .dtype = dtype,
                    .ranks = {.group = group.get(), .rank = rank}};
        p.norm = {.num_rows = rows,
                  .max_rows = max_rows,
                  .x = y,
                  .x_stride = hidden,
                  .residual = upload(residual),
                  .weight = has_norm ? weights : nullptr,
                  .weight_offset = 1,
                  .eps = 1e-5f,
                  .y = upload(residual),
                  .y_stride = hidden,
                  .hidden = hidden,
                  .x_weight = has_x_weight ? weights : nullptr,
                  .residual_scale = has_scale ? scales : nullptr,
                  .x_dtype = dtype,
                  .y_dtype = y_dtype};
        if (!has_places) continue;
        p.places = CombineExpertsParams{.num_rows = rows,
                                        .max_rows = max_rows,
                                        .top_k = kTopK,
                                        .x = of_places + part.first * item,
                                        .expert_row = expert_rows,
                                        .weights = of_place,
                                        .y = y + part.first * item,
                                        .hidden = part.count,
                                        .dtype = dtype,
                                        .base = y + part.first * item,
                                        .stride = hidden};
      }
    }
    // First without rows, since the driver may wait for the device when it loads a kernel.
    for (const bool has_rows : {false, true}) {
      for (Rank& rank : ranks) {
        GatheredNormParams joined = rank.params[0];
        GatheredNormParams apart = rank.params[1];
        for (GatheredNormParams* const p : {&joined, &apart}) {
          if (has_rows) continue;
          p->gather.num_rows = rank.device->zero();
          p->norm.num_rows = rank.device->zero();
          if (has_places) p->places->num_rows = rank.device->zero();
        }
        rank.device->run(gathered_norm, joined);
        if (has_places) rank.device->run(combine_experts, *apart.places);
        rank.device->run(gather_columns, apart.gather);
        rank.device->run(rms_norm, apart.norm);
      }
      for (Rank& rank : ranks) rank.device->synchronize(*group);
      ASSERT_EQ(group->failure(), "");
    }
    const auto download = [&](const Rank& rank, const void* from) {
      std::vector<std::byte> got(static_cast<size_t>(count * 4));
      rank.device->memory().download(got.data(), static_cast<const std::byte*>(from),
                                     std::ssize(got));
      return got;
    };
    const auto of_two_ops = [](const Rank& rank) -> const RmsNormParams& {
      return rank.params[1].norm;
    };
    const std::vector<std::byte> sum = download(ranks[0], of_two_ops(ranks[0]).residual);
    const std::vector<std::byte> y = download(ranks[0], of_two_ops(ranks[0]).y);
    if (num_rows > 0) {
      EXPECT_NE(std::memcmp(sum.data(), residual.data(), sum.size()), 0);
    }
    for (const Rank& rank : ranks) {
      for (const GatheredNormParams& p : rank.params) {
        ASSERT_TRUE(download(rank, p.norm.residual) == sum);
        ASSERT_TRUE(download(rank, p.norm.y) == y);
      }
    }
  }
}

TEST_F(CudaGather, ARankThatDoesNotComeIsNamedAndAFailureEndsTheWait) {
  const std::vector<int32_t> gpus = gpus_for(2);
  const int32_t num_rows = 1;
  for (const int32_t width : {64, 1 << 18}) {  // in packets and in segments
    const auto group = group_on(gpus, int64_t{4} * width);
    RankDevice device(gpus.front(), /*shares_gpu=*/true);
    const RankShare share = {.rank = 0, .num_ranks = 2};
    const std::vector<float> row(static_cast<size_t>(width));
    device.gather({.num_rows = reinterpret_cast<const int32_t*>(device.upload(&num_rows, 4)),
                   .max_rows = 1,
                   .x = device.upload(row.data(), width * 2),
                   .x_stride = width / 2,
                   .columns = share.columns(width),
                   .y = device.upload(row.data(), width * 4),
                   .ranks = {.group = group.get(), .rank = 0}});
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    while (group->awaited().empty() && Clock::now() - begin < std::chrono::seconds(20)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(group->awaited(), "rank 1 of 2");
    group->fail(1, std::make_exception_ptr(DeviceError("a test")));
    device.synchronize(*group);
    EXPECT_EQ(group->failure(), "rank 1 of 2: a test");
  }
}

}  // namespace
}  // namespace paceline
