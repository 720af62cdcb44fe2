// SPDX-License-Identifier: Apache-2.0
#include "gemm/cublaslt.h"

#include <cuda_bf16.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <vector>

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

void set_cublaslt_path(const std::string& path) { cublaslt_search_path() = path; }

template <class Function>
void CublasLt::load(Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library_, name));
  if (function == nullptr) throw DeviceError(concat(path_, " has no function ", name));
}

CublasLt::CublasLt() {
  // A copy that the process has already comes first: two would each want their own workspace.
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

// Milliseconds of one call, the least of a few.
template <class Call>
float time_of(CudaContext& ctx, const Call& call) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cuda::check(cudaEventCreate(&begin), "cudaEventCreate");
  cuda::check(cudaEventCreate(&end), "cudaEventCreate");
  float best = 1e9f;
  for (int round = 0; round < 3; ++round) {
    cuda::check(cudaEventRecord(begin, ctx.stream), "cudaEventRecord");
    call();
    cuda::check(cudaEventRecord(end, ctx.stream), "cudaEventRecord");
    cuda::check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    best = std::min(best, ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return best;
}

}  // namespace

GemmPlanner::GemmPlanner(bool uses_library) {
  if (uses_library) library_ = std::make_unique<CublasLt>();
}

GemmPlanner::~GemmPlanner() { plans_.clear(); }

int32_t GemmPlanner::padded_rows(int32_t rows) {
  if (rows < kLibraryRows) return rows;
  const int32_t step = rows <= 1024 ? 256 : 512;
  return (rows + step - 1) / step * step;
}

void GemmPlanner::admit(CudaContext& ctx, int32_t rows, const void* weight, int32_t n, int32_t k,
                        DType y_dtype) {
  if (library_ == nullptr || rows < kLibraryRows || k % 8 != 0 || n % 8 != 0) return;
  const int32_t m = padded_rows(rows);
  auto [found, is_new] = plans_.try_emplace(Key{m, n, k, y_dtype}, nullptr);
  const int64_t y_bytes = int64_t{m} * n * dtype_bytes(y_dtype);
  constexpr int64_t kMaxTrialBytes = int64_t{1} << 29;
  if (!is_new || y_bytes > kMaxTrialBytes) return;
  const DeviceBuffer x(cuda_memory(), int64_t{m} * k * 2, "trial products");
  const DeviceBuffer ours(cuda_memory(), y_bytes, "trial products");
  const DeviceBuffer theirs(cuda_memory(), y_bytes, "trial products");
  const DeviceBuffer scalars(cuda_memory(), 256, "trial products");
  auto* const differences = reinterpret_cast<int32_t*>(scalars.data());
  auto* const num_rows = differences + 1;
  cuda::check(cudaMemcpyAsync(num_rows, &m, sizeof(m), cudaMemcpyHostToDevice, ctx.stream),
              "cudaMemcpyAsync");
  fill_kernel<<<1024, 256, 0, ctx.stream>>>(reinterpret_cast<__nv_bfloat16*>(x.data()),
                                            int64_t{m} * k);
  cuda::check(cudaGetLastError(), "trial products");
  const GemmParams params = {.num_rows = num_rows,
                             .max_rows = m,
                             .x = x.data(),
                             .x_stride = k,
                             .weight = weight,
                             .weight_dtype = DType::kBFloat16,
                             .bias = nullptr,
                             .y = ours.data(),
                             .y_stride = n,
                             .n = n,
                             .k = k,
                             .x_dtype = DType::kBFloat16,
                             .y_dtype = y_dtype};
  // No plan is stored for this shape yet, so this is our own kernel.
  float best = time_of(ctx, [&] { gemm(ctx, params); });

  auto plan = std::make_unique<Plan>(*library_);
  plan->weight = library_->make_layout(CUDA_R_16BF, k, n, k);
  plan->x = library_->make_layout(CUDA_R_16BF, k, m, k);
  plan->y = library_->make_layout(y_dtype == DType::kBFloat16 ? CUDA_R_16BF : CUDA_R_32F, n, m, n);
  std::array<CublasLt::Candidate, 6> candidates;
  const int32_t count =
      library_->candidates(plan->weight, plan->x, plan->y, static_cast<size_t>(ctx.workspace_bytes),
                           candidates.data(), static_cast<int32_t>(candidates.size()));
  const float one = 1;
  const float zero = 0;
  bool is_admitted = false;
  for (int32_t i = 0; i < count; ++i) {
    const CublasLt::Algorithm& algorithm = candidates[i].algorithm;
    const auto call = [&] {
      check_library(library_->matmul(library_->handle(), library_->product(), &one, weight,
                                     plan->weight, x.data(), plan->x, &zero, theirs.data(), plan->y,
                                     theirs.data(), plan->y, &algorithm, ctx.workspace,
                                     static_cast<size_t>(ctx.workspace_bytes), ctx.stream),
                    "cublasLtMatmul");
    };
    cuda::check(cudaMemsetAsync(theirs.data(), 0xff, static_cast<size_t>(y_bytes), ctx.stream),
                "cudaMemsetAsync");
    cuda::check(cudaMemsetAsync(differences, 0, sizeof(int32_t), ctx.stream), "cudaMemsetAsync");
    call();
    count_differences_kernel<<<1024, 256, 0, ctx.stream>>>(
        reinterpret_cast<const uint32_t*>(ours.data()),
        reinterpret_cast<const uint32_t*>(theirs.data()), y_bytes / 4, differences);
    int32_t num_differences = 0;
    cuda::check(cudaMemcpyAsync(&num_differences, differences, sizeof(int32_t),
                                cudaMemcpyDeviceToHost, ctx.stream),
                "cudaMemcpyAsync");
    cuda::check(cudaStreamSynchronize(ctx.stream), "trial products");
    if (num_differences != 0) continue;
    const float ms = time_of(ctx, call);
    if (ms >= best) continue;
    best = ms;
    plan->algorithm = algorithm;
    is_admitted = true;
  }
  cuda::check(cudaStreamSynchronize(ctx.stream), "trial products");
  if (is_admitted) found->second = std::move(plan);
}

bool GemmPlanner::run_library(CudaContext& ctx, const GemmParams& p) {
  if (library_ == nullptr || p.bias != nullptr || p.x_stride != p.k || p.y_stride != p.n) {
    return false;
  }
  const auto found = plans_.find(Key{padded_rows(p.max_rows), p.n, p.k, p.y_dtype});
  if (found == plans_.end() || found->second == nullptr) return false;
  const Plan& plan = *found->second;
  const float one = 1;
  const float zero = 0;
  check_library(
      library_->matmul(library_->handle(), library_->product(), &one, p.weight, plan.weight, p.x,
                       plan.x, &zero, p.y, plan.y, p.y, plan.y, &plan.algorithm, ctx.workspace,
                       static_cast<size_t>(ctx.workspace_bytes), ctx.stream),
      "cublasLtMatmul");
  if (ctx.trace != nullptr) {
    ctx.trace->label_next(concat("cublasLt gemm ", p.n, "x", p.k));
    ctx.trace->mark("cublasLt");
  }
  return true;
}

}  // namespace paceline
