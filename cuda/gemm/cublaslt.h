// SPDX-License-Identifier: Apache-2.0
#pragma once

// cuBLASLt, opened at run time: one binary serves machines with and without it, and it uses a copy
// that the process has already loaded (torch's). This declares only what we call, with the
// library's own values (CUDA 13; its ABI has kept them since CUDA 11).

#include <cuda_runtime.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace paceline {

class CublasLt {
 public:
  using Handle = struct cublasLtContext*;
  using MatmulDesc = void*;
  using Layout = void*;
  using Preference = void*;
  struct Algorithm {
    uint64_t data[8];
  };
  struct Candidate {  // cublasLtMatmulHeuristicResult_t
    Algorithm algorithm;
    size_t workspace_bytes;
    int32_t state;
    float waves;
    int32_t reserved[4];
  };

  // Throws DeviceError with the paths tried.
  CublasLt();
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  int32_t (*matmul)(Handle, MatmulDesc, const void* alpha, const void* a, Layout, const void* b,
                    Layout, const void* beta, const void* c, Layout, void* d, Layout,
                    const Algorithm*, void* workspace, size_t workspace_bytes,
                    cudaStream_t) = nullptr;

  [[nodiscard]] Handle handle() const { return handle_; }
  // y[rows, n] = x[rows, k] w[n, k]^T, all row-major: to the library, column-major, w^T x.
  [[nodiscard]] MatmulDesc product() const { return product_; }
  [[nodiscard]] Layout make_layout(cudaDataType_t type, int64_t rows, int64_t columns,
                                   int64_t stride) const;
  void destroy_layout(Layout layout) const noexcept;
  // Fills `into` with candidates without split-K, best first; returns their number.
  [[nodiscard]] int32_t candidates(Layout a, Layout b, Layout c, size_t workspace_bytes,
                                   Candidate* into, int32_t capacity) const;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  template <class Function>
  void load(Function& function, const char* name);

  void* library_ = nullptr;
  std::string path_;
  Handle handle_ = nullptr;
  MatmulDesc product_ = nullptr;
  int32_t (*create_)(Handle*) = nullptr;
  int32_t (*destroy_)(Handle) = nullptr;
  int32_t (*desc_create_)(MatmulDesc*, int32_t compute_type, int32_t scale_type) = nullptr;
  int32_t (*desc_set_)(MatmulDesc, int32_t attribute, const void*, size_t) = nullptr;
  int32_t (*desc_destroy_)(MatmulDesc) = nullptr;
  int32_t (*layout_create_)(Layout*, int32_t type, uint64_t rows, uint64_t columns,
                            int64_t stride) = nullptr;
  int32_t (*layout_destroy_)(Layout) = nullptr;
  int32_t (*preference_create_)(Preference*) = nullptr;
  int32_t (*preference_set_)(Preference, int32_t attribute, const void*, size_t) = nullptr;
  int32_t (*preference_destroy_)(Preference) = nullptr;
  int32_t (*heuristic_)(Handle, MatmulDesc, Layout a, Layout b, Layout c, Layout d, Preference,
                        int32_t wanted, Candidate*, int32_t* found) = nullptr;
  int32_t (*config_get_)(const Algorithm*, int32_t attribute, void*, size_t, size_t*) = nullptr;
};

// Set by set_cublaslt_path().
[[nodiscard]] std::string& cublaslt_search_path();

}  // namespace paceline
