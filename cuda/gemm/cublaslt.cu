// SPDX-License-Identifier: Apache-2.0
#include "gemm/cublaslt.h"

#include <cuda_bf16.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <vector>

#include "base/boundary.h"
#include "common/launch.cuh"
#include "device/device_memory.h"
#include "gemm/gemm_planner.h"

namespace paceline {
namespace {

constexpr const char* kLibraryName = "libcublasLt.so.13";

// Values of the library's enumerations.
constexpr int32_t kCompute32F = 68;
constexpr int32_t kDescTransA = 3;
constexpr int32_t kOperationTranspose = 1;
constexpr int32_t kPreferenceWorkspaceBytes = 1;
constexpr int32_t kPreferenceReductionMask = 3;
constexpr int32_t kConfigSplitK = 2;

void check_library(int32_t status, const char* what) {
  if (status != 0) throw DeviceError(concat("cuBLASLt: ", what, " returned status ", status));
}

}  // namespace

std::string& cublaslt_search_path() {
  static std::string path;
  return path;
}

void set_cublaslt_path(const std::string& path) {
  at_boundary([&] { cublaslt_search_path() = path; });
}

template <class Function>
void CublasLt::load(Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library_, name));
  if (function == nullptr) throw DeviceError(concat(path_, " has no function ", name));
}

CublasLt::CublasLt() {
  // Prefer the copy that the process has already loaded: two copies would each use a workspace.
  path_ = kLibraryName;
  library_ = dlopen(kLibraryName, RTLD_LAZY | RTLD_NOLOAD);
  std::vector<std::string> tried;
  const auto attempt = [&](const std::string& path) {
    if (library_ != nullptr || path.empty()) return;
    library_ = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (library_ != nullptr) {
      path_ = path;
    } else {
      tried.push_back(path);
    }
  };
  const std::string& given = cublaslt_search_path();
  if (!given.empty()) {
    attempt(given.ends_with(".13") ? given : given + "/" + kLibraryName);
  }
  attempt(kLibraryName);
  if (const char* const home = std::getenv("CUDA_HOME")) {
    attempt(std::string(home) + "/lib64/" + kLibraryName);
  }
  attempt(std::string("/usr/local/cuda/lib64/") + kLibraryName);
  if (library_ == nullptr) {
    std::string list;
    for (const std::string& path : tried) list += (list.empty() ? "" : ", ") + path;
    throw DeviceError(concat("cuBLASLt was not found; tried ", list,
                             "; install it (pip install nvidia-cublas) or name its folder with "
                             "set_cublaslt_path or PACELINE_CUBLASLT"));
  }
  load(create_, "cublasLtCreate");
  load(destroy_, "cublasLtDestroy");
  load(matmul, "cublasLtMatmul");
  load(desc_create_, "cublasLtMatmulDescCreate");
  load(desc_set_, "cublasLtMatmulDescSetAttribute");
  load(desc_destroy_, "cublasLtMatmulDescDestroy");
  load(layout_create_, "cublasLtMatrixLayoutCreate");
  load(layout_destroy_, "cublasLtMatrixLayoutDestroy");
  load(preference_create_, "cublasLtMatmulPreferenceCreate");
  load(preference_set_, "cublasLtMatmulPreferenceSetAttribute");
  load(preference_destroy_, "cublasLtMatmulPreferenceDestroy");
  load(heuristic_, "cublasLtMatmulAlgoGetHeuristic");
  load(config_get_, "cublasLtMatmulAlgoConfigGetAttribute");
  check_library(create_(&handle_), "cublasLtCreate");
  check_library(desc_create_(&product_, kCompute32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  check_library(desc_set_(product_, kDescTransA, &kOperationTranspose, sizeof(int32_t)),
                "cublasLtMatmulDescSetAttribute");
}

CublasLt::~CublasLt() {
  if (product_ != nullptr) desc_destroy_(product_);
  if (handle_ != nullptr) destroy_(handle_);
  // The library stays open: others in the process may use it.
}

CublasLt::Layout CublasLt::make_layout(cudaDataType_t type, int64_t rows, int64_t columns,
                                       int64_t stride) const {
  Layout layout = nullptr;
  check_library(layout_create_(&layout, type, static_cast<uint64_t>(rows),
                               static_cast<uint64_t>(columns), stride),
                "cublasLtMatrixLayoutCreate");
  return layout;
}

void CublasLt::destroy_layout(Layout layout) const noexcept {
  if (layout != nullptr) layout_destroy_(layout);
}

int32_t CublasLt::candidates(Layout a, Layout b, Layout c, size_t workspace_bytes, Candidate* into,
                             int32_t capacity) const {
  Preference preference = nullptr;
  check_library(preference_create_(&preference), "cublasLtMatmulPreferenceCreate");
  const uint64_t workspace = workspace_bytes;
  const uint32_t no_reduction = 0;
  preference_set_(preference, kPreferenceWorkspaceBytes, &workspace, sizeof(workspace));
  preference_set_(preference, kPreferenceReductionMask, &no_reduction, sizeof(no_reduction));
  int32_t found = 0;
  const int32_t status =
      heuristic_(handle_, product_, a, b, c, c, preference, capacity, into, &found);
  preference_destroy_(preference);
  if (status != 0) return 0;
  const auto splits = [&](const Candidate& candidate) {
    int32_t num_splits = 0;
    size_t written = 0;
    config_get_(&candidate.algorithm, kConfigSplitK, &num_splits, sizeof(num_splits), &written);
    return candidate.state != 0 || num_splits > 1;
  };
  return static_cast<int32_t>(std::remove_if(into, into + found, splits) - into);
}

// --- GemmPlanner -----------------------------------------------------------------------------

struct GemmPlanner::Plan {
  explicit Plan(const CublasLt& owner) : library(owner) {}
  ~Plan() {
    library.destroy_layout(weight);
    library.destroy_layout(x);
    library.destroy_layout(y);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  void run(CudaContext& ctx, const CublasLt::Algorithm& with, const void* w, const void* from,
           void* to) const {
    const float one = 1;
    const float zero = 0;
    check_library(library.matmul(library.handle(), library.product(), &one, w, weight, from, x,
                                 &zero, to, y, to, y, &with, ctx.workspace,
                                 static_cast<size_t>(ctx.workspace_bytes), ctx.stream),
                  "cublasLtMatmul");
  }

  const CublasLt& library;
  CublasLt::Layout weight = nullptr;
  CublasLt::Layout x = nullptr;
  CublasLt::Layout y = nullptr;
  CublasLt::Algorithm algorithm{};
};

namespace {

__global__ void fill_kernel(__nv_bfloat16* x, int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    uint32_t bits = static_cast<uint32_t>(i) * 2654435761u + 12345u;
    bits ^= bits >> 15;
    bits *= 2246822519u;
    bits ^= bits >> 13;
    x[i] = __float2bfloat16_rn(static_cast<float>(bits & 0xffffu) / 32768.0f - 1.0f);
  }
}

__global__ void count_differences_kernel(const uint32_t* a, const uint32_t* b, int64_t count,
                                         int32_t* differences) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  int32_t mine = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    mine += a[i] != b[i] ? 1 : 0;
  }
  if (mine != 0) atomicAdd(differences, mine);
}

// Stands for the small kernel between two products of a model: it fills the machine, and it writes
// the rows that the next product reads. Our products overlap with it; the library's do not. `zero`
// is 0, which the compiler does not know.
__global__ void __launch_bounds__(256) between_kernel(uint4* x, int64_t count, uint32_t zero) {
  cuda::let_successor_start();
  cuda::wait_for_predecessor();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  uint4 eight = x[i];
  eight.x ^= zero;
  x[i] = eight;
}

class Event {
 public:
  Event() { cuda::check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(CudaContext& ctx) const {
    cuda::check(cudaEventRecord(event_, ctx.stream), "cudaEventRecord");
  }
  [[nodiscard]] float milliseconds_since(const Event& begin) const {
    cuda::check(cudaEventSynchronize(event_), "cudaEventSynchronize");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, begin.event_, event_), "cudaEventElapsedTime");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// The library's first step of rows. Up to 96 rows the reading of weights bounds both kernels, and
// the library is faster only for products so long that a launch without overlap does not matter.
constexpr int32_t kFirstStep = 64;
constexpr int32_t kLastShortStep = 96;
constexpr int64_t kLongProductBytes = int64_t{1} << 29;

// How often kernels are timed again whose first times are not far apart, by this factor.
constexpr int kMoreRounds = 4;
constexpr float kFarApart = 1.15f;

// Our own kernel computes only the rows that exist. Where the library would compute a third more,
// it is seldom faster.
bool is_for_library(int32_t rows, int32_t step) { return 4 * rows > 3 * step; }

}  // namespace

GemmPlanner::GemmPlanner(bool uses_library) {
  if (uses_library) library_ = std::make_unique<CublasLt>();
}

GemmPlanner::~GemmPlanner() { plans_.clear(); }

int32_t GemmPlanner::padded_rows(int32_t rows) {
  if (!is_for_library(rows, kFirstStep)) return rows;
  const int32_t step = rows <= 128 ? 32 : rows <= 1024 ? 256 : 512;
  return (rows + step - 1) / step * step;
}

// The buffers that the trial products of one shape share.
struct GemmPlanner::Trial {
  Trial(CudaContext& ctx, int32_t max_rows, std::span<const void* const> all_weights,
        int32_t columns, int32_t depth, DType y)
      : weights(all_weights),
        n(columns),
        k(depth),
        y_dtype(y),
        memory(cuda_memory(cuda::current_device())),
        x(memory, int64_t{max_rows} * depth * 2, "trial products"),
        ours(memory, y_bytes(max_rows), "trial products"),
        theirs(memory, y_bytes(max_rows), "trial products"),
        scalars(memory, 256, "trial products") {
    fill_kernel<<<1024, 256, 0, ctx.stream>>>(reinterpret_cast<__nv_bfloat16*>(x.data()),
                                              int64_t{max_rows} * k);
    cuda::check(cudaGetLastError(), "trial products");
  }

  [[nodiscard]] int64_t y_bytes(int32_t rows) const {
    return int64_t{rows} * n * dtype_bytes(y_dtype);
  }
  [[nodiscard]] int32_t* differences() const { return reinterpret_cast<int32_t*>(scalars.data()); }
  [[nodiscard]] int32_t* num_rows() const { return differences() + 1; }

  // The number of words in which `ours` and `theirs` differ.
  [[nodiscard]] int32_t count_differences(CudaContext& ctx, int32_t rows) const {
    cuda::check(cudaMemsetAsync(differences(), 0, sizeof(int32_t), ctx.stream), "cudaMemsetAsync");
    count_differences_kernel<<<1024, 256, 0, ctx.stream>>>(
        reinterpret_cast<const uint32_t*>(ours.data()),
        reinterpret_cast<const uint32_t*>(theirs.data()), y_bytes(rows) / 4, differences());
    int32_t count = 0;
    cuda::check(
        cudaMemcpyAsync(&count, differences(), sizeof(count), cudaMemcpyDeviceToHost, ctx.stream),
        "cudaMemcpyAsync");
    cuda::check(cudaStreamSynchronize(ctx.stream), "trial products");
    return count;
  }

  // Milliseconds of a few products in a model's order: one layer after the other, so that no
  // weights are in the cache, with small kernels in between. `call(weight)` enqueues one product.
  template <class Call>
  float time_of(CudaContext& ctx, int32_t rows, const Call& call) const {
    const double us = std::max(2.0 * n * k / 4e6, 2.0 * n * k * rows / 600e6);  // about
    const int32_t launches = std::clamp(static_cast<int32_t>(200 / us), 1, 8);
    // Evicts the data of the previous trial, and is long enough for the host to run ahead.
    constexpr int64_t kFlushBytes = int64_t{128} << 20;
    const auto* const flushed = reinterpret_cast<const uint32_t*>(ctx.workspace);
    count_differences_kernel<<<1024, 256, 0, ctx.stream>>>(
        flushed, flushed, std::min(ctx.workspace_bytes, kFlushBytes) / 4, differences());
    begin_.record(ctx);
    for (int32_t i = 0; i < launches; ++i) {
      call(weights[static_cast<size_t>(i) % weights.size()]);
      const int64_t vectors = int64_t{rows} * k / 8;
      cuda::launch(ctx, "between", &between_kernel,
                   dim3(static_cast<uint32_t>((vectors + 255) / 256)), dim3(256), 0,
                   reinterpret_cast<uint4*>(x.data()), vectors, 0u);
    }
    end_.record(ctx);
    return end_.milliseconds_since(begin_);
  }

  std::span<const void* const> weights;
  int32_t n;
  int32_t k;
  DType y_dtype;
  DeviceMemory& memory;
  DeviceBuffer x;
  DeviceBuffer ours;
  DeviceBuffer theirs;
  DeviceBuffer scalars;

 private:
  Event begin_;
  Event end_;
};

void GemmPlanner::admit(CudaContext& ctx, int32_t max_rows, std::span<const void* const> weights,
                        int32_t n, int32_t k, DType y_dtype) {
  if (library_ == nullptr || k % 8 != 0 || n % 8 != 0) return;
  constexpr int64_t kMaxTrialBytes = int64_t{1} << 29;
  std::vector<int32_t> steps;
  for (int32_t step = kFirstStep; is_for_library(max_rows, step); step = padded_rows(step + 1)) {
    if (int64_t{step} * n * dtype_bytes(y_dtype) > kMaxTrialBytes) break;
    if (step <= kLastShortStep && int64_t{n} * k * 2 < kLongProductBytes) continue;
    if (!plans_.contains(Key{step, n, k, y_dtype})) steps.push_back(step);
  }
  if (steps.empty()) return;
  const Trial trial(ctx, steps.back(), weights, n, k, y_dtype);
  for (const int32_t step : steps) {
    std::unique_ptr<Plan> plan = best_plan(ctx, trial, step);
    plans_.emplace(Key{step, n, k, y_dtype}, std::move(plan));
  }
  cuda::check(cudaStreamSynchronize(ctx.stream), "trial products");
}

std::unique_ptr<GemmPlanner::Plan> GemmPlanner::best_plan(CudaContext& ctx, const Trial& trial,
                                                          int32_t rows) {
  const int32_t n = trial.n;
  const int32_t k = trial.k;
  cuda::check(
      cudaMemcpyAsync(trial.num_rows(), &rows, sizeof(rows), cudaMemcpyHostToDevice, ctx.stream),
      "cudaMemcpyAsync");
  // No plan is stored for this shape yet, so gemm() runs our own kernel.
  const auto ours = [&](const void* weight) {
    gemm(ctx, {.num_rows = trial.num_rows(),
               .max_rows = rows,
               .x = trial.x.data(),
               .x_stride = k,
               .weight = plain_matrix(weight, n, k, DType::kBFloat16),
               .bias = nullptr,
               .y = trial.ours.data(),
               .y_stride = n,
               .x_dtype = DType::kBFloat16,
               .y_dtype = trial.y_dtype});
  };
  const void* const first_weight = trial.weights.front();
  ours(first_weight);  // the outputs to compare with
  float our_ms = trial.time_of(ctx, rows, ours);
  ours(first_weight);

  auto plan = std::make_unique<Plan>(*library_);
  plan->weight = library_->make_layout(CUDA_R_16BF, k, n, k);
  plan->x = library_->make_layout(CUDA_R_16BF, k, rows, k);
  plan->y = library_->make_layout(trial.y_dtype == DType::kBFloat16 ? CUDA_R_16BF : CUDA_R_32F, n,
                                  rows, n);
  std::array<CublasLt::Candidate, 6> candidates;
  const int32_t count =
      library_->candidates(plan->weight, plan->x, plan->y, static_cast<size_t>(ctx.workspace_bytes),
                           candidates.data(), static_cast<int32_t>(candidates.size()));
  const auto with = [&](const CublasLt::Algorithm& algorithm) {
    return [&](const void* weight) {
      plan->run(ctx, algorithm, weight, trial.x.data(), trial.theirs.data());
    };
  };
  float their_ms = std::numeric_limits<float>::infinity();
  for (int32_t i = 0; i < count; ++i) {
    const CublasLt::Algorithm& algorithm = candidates[i].algorithm;
    cuda::check(cudaMemsetAsync(trial.theirs.data(), 0xff, static_cast<size_t>(trial.y_bytes(rows)),
                                ctx.stream),
                "cudaMemsetAsync");
    with(algorithm)(first_weight);
    if (trial.count_differences(ctx, rows) != 0) continue;
    const float ms = trial.time_of(ctx, rows, with(algorithm));
    if (ms >= their_ms) continue;
    their_ms = ms;
    plan->algorithm = algorithm;
  }
  // One time of each decides only between kernels that are far apart. Others are timed by turns, so
  // that a change of the clock concerns both.
  for (int round = 0;
       round < kMoreRounds && std::max(our_ms, their_ms) < kFarApart * std::min(our_ms, their_ms);
       ++round) {
    our_ms = std::min(our_ms, trial.time_of(ctx, rows, ours));
    their_ms = std::min(their_ms, trial.time_of(ctx, rows, with(plan->algorithm)));
  }
  return their_ms < our_ms ? std::move(plan) : nullptr;
}

auto GemmPlanner::plan_of(const GemmParams& p) const -> const Plan* {
  if (library_ == nullptr || p.weight.format != WeightFormat::kPlain || p.bias != nullptr ||
      p.x_stride != p.weight.k || p.y_stride != p.weight.n) {
    return nullptr;
  }
  const int32_t padded = padded_rows(p.max_rows);
  if (!is_for_library(p.max_rows, padded)) return nullptr;
  const auto found = plans_.find(Key{padded, p.weight.n, p.weight.k, p.y_dtype});
  return found == plans_.end() ? nullptr : found->second.get();
}

bool GemmPlanner::run_library(CudaContext& ctx, const GemmParams& p) {
  const Plan* const plan = plan_of(p);
  if (plan == nullptr) return false;
  plan->run(ctx, plan->algorithm, p.weight.data, p.x, p.y);
  // What draws from logits needs L1.
  ctx.starts_idle = p.y_dtype == DType::kBFloat16;
  if (ctx.trace != nullptr) {
    ctx.trace->label_next(concat("cublasLt gemm ", p.weight.n, "x", p.weight.k));
    ctx.trace->mark("cublasLt");
  }
  return true;
}

}  // namespace paceline
