// SPDX-License-Identifier: Apache-2.0
// What leaves a public function is an Error: for wrong arguments, for lack of memory at each
// allocation in turn, and for exceptions of others. Exceptions of a caller's own functions pass.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/device.h>
#include <paceline/dtype.h>
#include <paceline/error.h>
#include <paceline/executor.h>
#include <paceline/model.h>
#include <paceline/version.h>

#include "base/boundary.h"
#include "cpp/engine_options.h"
#include "device/host_bytes.h"
#include "support/described_model.h"
#include "support/errors.h"
#include "support/failing_allocations.h"
#include "support/safetensors_writer.h"
#include "support/tiny_models.h"

namespace paceline {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::Side;
using testing::small_engine_options;
using testing::tiny_config;
using testing::tiny_model;
using testing::TinyModel;

static_assert(std::is_base_of_v<std::exception, Error>);

TEST(Errors, EveryRefusalIsAnError) {
  const auto model = tiny_model(TinyModel{}, 3);
  ExecutorOptions options = small_engine_options(0);
  options.host_delay_max_us = 20'000;  // so that the request still runs when it is cancelled
  Executor executor(model, nullptr, options);
  const RequestId id =
      executor.add_request({.prompt = {1}, .sampling = {.max_tokens = 200}}).value();
  const auto builder = [] { return ModelBuilder(tiny_config(), DType::kFloat32); };
  const std::vector<int64_t> shape = {5, 6};
  const std::vector<std::function<void()>> refusals = {
      [] { (void)parse_dtype("int7"); },
      [] { (void)load_model_folder("/no/such/folder"); },
      [] { (void)load_model_folder(std::string("/nul\0l", 6)); },
      [] { (void)ModelBuilder("{", DType::kFloat32); },
      [&] { builder().put("nothing", DType::kFloat32, shape, {}, nullptr); },
      [&] { builder().put("nothing", DType::kFloat32, shape, ModelBuilder::ReadBytes()); },
      [&] { (void)builder().finish(); },
      [&] {
        ModelBuilder moved = builder();
        const ModelBuilder other = std::move(moved);
        (void)moved.missing();
      },
      [&] {
        ModelBuilder moved = builder();
        const ModelBuilder other = std::move(moved);
        moved.fill_dummy(0);
      },
      [&] { (void)Executor(nullptr, nullptr, options); },
      [&] { (void)Executor(model, nullptr, small_engine_options(3)); },
      [&] { (void)executor.add_request({}); },
      [&] { (void)executor.add_requests({{.prompt = {1}}, {.prompt = {-1}}}); },
      [&] { (void)executor.cancel(id, 7); },
      [&] { (void)executor.trace_iteration(0); },
  };
  for (size_t i = 0; i < refusals.size(); ++i) {
    EXPECT_THROW(refusals[i](), Error) << "refusal " << i;
  }
  if (!cuda_status().is_usable) {
    EXPECT_THROW((void)measure_cuda_read_bandwidth(), Error);
    EXPECT_THROW(ModelBuilder(tiny_config(), DType::kFloat32, Device::kCuda), Error);
  }
}

// Calls `call` until it succeeds, and fails its first allocation on this thread, then the second,
// and so on. `prepare` runs before each call and may allocate. Returns the number of failures.
int64_t fail_each_allocation(const std::function<void()>& prepare,
                             const std::function<void()>& call) {
  testing::is_test_thread = true;
  int64_t num_failures = 0;
  for (bool has_failed = true; has_failed; ++num_failures) {
    prepare();
    testing::fail_allocations(Side::kTest, num_failures);
    std::string seen;
    try {
      call();
      testing::fault_side = Side::kNone;
    } catch (const OutOfMemory& error) {
      testing::fault_side = Side::kNone;
      if (std::string(error.what()).find("out of memory") == std::string::npos) seen = error.what();
    } catch (const std::exception& error) {
      testing::fault_side = Side::kNone;
      seen = error.what();
    }
    EXPECT_EQ(seen, "") << "allocation " << num_failures;
    has_failed = testing::num_faults > 0 && !::testing::Test::HasFailure();
  }
  return num_failures - 1;
}

TEST(Errors, LackOfMemoryIsAnErrorAtEachAllocation) {
  const auto nothing = [] {};
  const auto model = tiny_model(TinyModel{}, 3);
  const ExecutorOptions options = small_engine_options(2);

  EXPECT_GT(fail_each_allocation(nothing, [] { (void)build_info(); }), 0);
  EXPECT_GT(fail_each_allocation(nothing, [] { (void)cuda_status(); }), 0);
  EXPECT_GT(fail_each_allocation(
                nothing, [&] { (void)default_kv_cache_size(*model, model.get(), options); }),
            1);

  const test::TemporaryFolder written;
  testing::write_tiny_folder(written, 0);
  const std::string path = written.path();
  EXPECT_GT(fail_each_allocation(nothing, [&] { (void)load_model_folder(path); }), 100);

  std::optional<ModelBuilder> builder;
  const std::string config = tiny_config();
  const auto build = [&] { builder.emplace(config, DType::kFloat32); };
  EXPECT_GT(fail_each_allocation(nothing, build), 50);
  EXPECT_GT(fail_each_allocation(build, [&] { (void)builder->missing(); }), 5);
  EXPECT_GT(fail_each_allocation(build, [&] { builder->fill_dummy(1); }), 0);
  const std::vector<int64_t> shape = {5, 6};
  const std::vector<float> values(30);
  EXPECT_EQ(
      fail_each_allocation(
          build, [&] { builder->put("embed.weight", DType::kFloat32, shape, {}, values.data()); }),
      0)
      << "nothing is allocated for a weight in host memory";
  const ModelBuilder::ReadBytes read = [](int64_t, std::span<std::byte>) {};
  EXPECT_GT(fail_each_allocation(
                build, [&] { builder->put("embed.weight", DType::kBFloat16, shape, read); }),
            0);
  EXPECT_GT(fail_each_allocation(nothing, [&] { (void)model_weight_arena(*model); }), 0);

  std::optional<Executor> executor;
  const auto start = [&] { executor.emplace(model, model, options); };
  EXPECT_GT(fail_each_allocation([&] { executor.reset(); }, start), 200);
  std::vector<Request> requests;
  EXPECT_GT(fail_each_allocation([&] { requests = {{.prompt = {1, 2}}}; },
                                 [&] { (void)executor->add_request(std::move(requests[0])); }),
            3);
  EXPECT_GT(fail_each_allocation([&] { requests = {{.prompt = {1, 2}}, {.prompt = {3}}}; },
                                 [&] { (void)executor->add_requests(std::move(requests)); }),
            6);
  EXPECT_GT(fail_each_allocation(nothing, [&] { (void)executor->memory_report(); }), 5);
  EXPECT_EQ(executor->check_integrity(), "");
  EXPECT_GT(fail_each_allocation(nothing, [&] { (void)executor->stats(); }), 0);
}

TEST(Errors, WeightsThatMemoryCannotHold) {
  constexpr int64_t kMib = int64_t{1} << 20;
  const auto message = [](int64_t bytes, const HostBytes& host) {
    return message_of<OutOfMemory>([&] { check_fits(bytes, "the weights of m", host); });
  };
  HostBytes host = {.available = 5 * kMib, .swap = 2 * kMib};
  check_fits(7 * kMib, "the weights of m", host);
  EXPECT_THAT(message(8 * kMib, host),
              HasSubstr("8 MiB for the weights of m, but this machine has 7 MiB"));
  host.group_limit = 6 * kMib;
  host.group_use = 6 * kMib;  // of cached files, maybe
  check_fits(6 * kMib, "the weights of m", host);
  EXPECT_THAT(message(7 * kMib, host),
              HasSubstr("but the control group of this process is limited to 6 MiB; free memory"));
  check_fits(int64_t{1} << 60, "the weights of m", {});  // nothing is known
  EXPECT_GT(host_bytes().available.value_or(0), 0);
  EXPECT_THAT(message(int64_t{1} << 60, host_bytes()), HasSubstr("MiB for the weights of m, but"));
}

TEST(Errors, ForeignExceptionsAreTranslated) {
  EXPECT_THAT(message_of<OutOfMemory>([] { at_boundary([] { throw std::bad_alloc(); }); }),
              HasSubstr("out of memory"));
  EXPECT_THAT(message_of<DeviceError>([] {
                at_boundary([] {
                  throw std::filesystem::filesystem_error(
                      "cannot look", "/some/where", std::make_error_code(std::errc::io_error));
                });
              }),
              HasSubstr("/some/where"));
  EXPECT_THAT(message_of<InternalError>([] { at_boundary([] { (void)std::string().at(1); }); }),
              HasSubstr("please report"));
  EXPECT_THAT(
      message_of<ModelFileError>([] { at_boundary([] { throw ModelFileError("a file"); }); }),
      HasSubstr("a file"));
  EXPECT_THROW(at_boundary([] { throw 7; }), int) << "no std::exception, so not the library's";
  EXPECT_EQ(at_boundary([] { return 7; }), 7);
}

TEST(Errors, ExceptionsOfTheCallersFunctionsPassUnchanged) {
  struct Own {
    int number;
  };
  ModelBuilder builder(tiny_config(), DType::kFloat32);
  const std::vector<int64_t> shape = {5, 6};
  int seen = 0;
  try {
    builder.put("embed.weight", DType::kFloat32, shape,
                [](int64_t, std::span<std::byte>) { throw Own{11}; });
  } catch (const Own& own) {
    seen = own.number;
  }
  EXPECT_EQ(seen, 11);
  EXPECT_THROW(builder.put("embed.weight", DType::kFloat32, shape,
                           [](int64_t, std::span<std::byte>) { throw std::bad_alloc(); }),
               std::bad_alloc);
  EXPECT_THROW(at_boundary([] { call_back([] { throw Own{12}; }); }), Own);
  EXPECT_EQ(at_boundary([] { return call_back([] { return 13; }); }), 13);
}

}  // namespace
}  // namespace paceline
