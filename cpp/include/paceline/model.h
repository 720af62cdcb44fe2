// SPDX-License-Identifier: Apache-2.0
#pragma once

// A model is data: a decoder description (JSON, see docs/model-format.md) and named weights. There
// are two ways to make one: `ModelBuilder::put` for each tensor, as the Python loader does, or
// `load_model_folder` for a folder written by `paceline convert`. Both give byte-equal weights.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/device.h>
#include <paceline/dtype.h>
#include <paceline/export.h>

namespace paceline {

// The weights of a model on a device. Executors share it, and only update_models changes its
// weights.
class Model;

struct ModelUpdate;
struct RankMemory;

// What each of several GPUs gets of a model.
enum class GpuShare : uint8_t {
  kPart,  // what its rank computes (docs/tensor-parallel.md): of a target, or of a drafter
  kCopy,  // all: of a drafter
};

// Collects the weights of a model by canonical name. Each value is converted and copied once.
// Not thread-safe.
class PACELINE_API ModelBuilder {
 public:
  // Allocates the weights.
  // config_json: the decoder description (docs/model-format.md).
  // weight_dtype: kFloat32 or kBFloat16, of plain matrices, and of the values that products in
  // another format multiply; norms and biases are always float32.
  // device: holds the weights; executors of the model run there.
  // Throws InvalidArgument naming the key of the description, Unsupported without that device,
  // OutOfMemory naming the size in MiB, and DeviceError when no thread can be started.
  ModelBuilder(std::string_view config_json, DType weight_dtype, Device device = Device::kCpu);
  // The same for engines whose ranks have a GPU each (tensor_parallel_size). Every GPU gets its
  // share of each tensor that is put, all of them at the same time. So host memory holds no more
  // than one tensor that is put from memory, and 64 MiB of pinned memory for each GPU.
  // gpus: different GPUs, from 0, of those that the process sees; 1 to 8. With one, engines run
  // there.
  // Throws also InvalidArgument for other numbers, and Unsupported where ranks cannot share the
  // model, where GPUs are not of one kind and where they cannot access the memory of each other.
  ModelBuilder(std::string_view config_json, DType weight_dtype, std::span<const int32_t> gpus,
               GpuShare share);
  ~ModelBuilder();
  ModelBuilder(ModelBuilder&&) noexcept;
  ModelBuilder& operator=(ModelBuilder&&) noexcept;

  // Copies one tensor. From a GPU to a model on that GPU, nothing passes through the host.
  // dtype: kFloat32, kBFloat16 or kFloat16 (which bfloat16 weights refuse); kInt32 or kInt64 for
  //   token ids; kUInt8 or kFloat8E4M3 for tensors of a format, as docs/model-format.md says.
  // shape: that of the canonical tensor, or of a matrix [groups, rows of each, columns].
  // strides: in elements; empty is row-major.
  // data: in memory of `source`, where it is complete and stays as it is until put returns; on the
  //   host at any alignment.
  // Throws InvalidArgument for an unknown name, a second put, and a wrong shape or dtype.
  void put(std::string_view name, DType dtype, std::span<const int64_t> shape,
           std::span<const int64_t> strides, const void* data, Device source = Device::kCpu);

  // The same for a row-major tensor that is read in pieces, for example from a file. `read` fills
  // `to` with the tensor's bytes from byte `first` on. Several threads call it at once. Of a matrix
  // that ranks share, each reads only the bytes of its rows. When `read` throws, put rethrows the
  // exception, and the tensor may be put again.
  using ReadBytes = std::function<void(int64_t first, std::span<std::byte> to)>;
  void put(std::string_view name, DType dtype, std::span<const int64_t> shape,
           const ReadBytes& read);

  // The names of the tensors that finish() still needs, sorted.
  [[nodiscard]] std::vector<std::string> missing() const;

  // Fills every weight that was not put: matrices and embeddings from a normal distribution with
  // standard deviation 0.02 (in fp8 and mxfp4: with elements near such values), norms with their
  // neutral value, biases with 0. The same seed gives the same weights on every device. For benches
  // ("load_format: dummy").
  void fill_dummy(uint64_t seed);

  // Returns the model and empties the builder. Throws InvalidArgument listing missing names.
  [[nodiscard]] std::shared_ptr<const Model> finish();

 private:
  friend void update_models(std::span<const ModelUpdate> updates);
  friend ModelBuilder builder_over(std::string_view config_json, DType weight_dtype, Device device,
                                   std::span<const RankMemory> memories, GpuShare share);
  struct Impl;
  explicit ModelBuilder(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// What each of `num_ranks` GPUs gets of a drafter with these values of tensor_parallel_size and
// SpeculativeOptions::draft_tensor_parallel_size: the one of which a draft step takes less time, if
// the latter is 0. Throws InvalidArgument where the latter is neither 0 nor 1 nor num_ranks, and
// Unsupported where it asks for parts of a drafter that ranks cannot share.
[[nodiscard]] PACELINE_API GpuShare drafter_share(const Model& drafter, int32_t num_ranks,
                                                  int32_t draft_tensor_parallel_size);
// The same for a drafter that is not loaded yet; the first arguments are as those of ModelBuilder.
[[nodiscard]] PACELINE_API GpuShare drafter_share(std::string_view config_json, DType weight_dtype,
                                                  int32_t num_ranks,
                                                  int32_t draft_tensor_parallel_size);

// Copies a model that is loaded to the CPU already to GPUs, for engines with as many ranks. A
// ModelBuilder for these GPUs needs less host memory. One GPU may be given, too.
// gpus: different GPUs, from 0, of those that the process sees; 1 to 8.
// Throws InvalidArgument for other numbers and for a model that is not on the CPU, Unsupported
// where ranks cannot share the model, where GPUs are not of one kind and where they cannot access
// the memory of each other, and OutOfMemory naming the size in MiB.
[[nodiscard]] PACELINE_API std::shared_ptr<const Model> split_model(
    const std::shared_ptr<const Model>& model, std::span<const int32_t> gpus, GpuShare share);

// One tensor for update_models; the members are as the arguments of ModelBuilder::put.
struct NamedTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  const void* data = nullptr;
  Device device = Device::kCpu;
};

// New weights of a model: each one once.
struct ModelUpdate {
  std::shared_ptr<const Model> model;
  std::vector<NamedTensor> tensors;
};

// Overwrites all weights of the models in place; addresses stay as they are, so captured graphs
// stay valid. While it runs, no executor may use the models (Executor::while_idle).
// Throws InvalidArgument as ModelBuilder::put and finish do, before it writes anything; also where
// one of model and tensors has the optional "draft_to_target" and the other has not, and where only
// one has fp8 scales of a matrix that are all powers of two, because captured graphs compute those
// products in another order. A DeviceError leaves the weights partly written.
PACELINE_API void update_models(std::span<const ModelUpdate> updates);

// Bytes of all weights; dtype of the matrices; rows of the embedding table; positions that the
// model was made for; the device that holds the weights.
[[nodiscard]] PACELINE_API int64_t model_weight_bytes(const Model& model);
[[nodiscard]] PACELINE_API DType model_weight_dtype(const Model& model);
[[nodiscard]] PACELINE_API int32_t model_vocab_size(const Model& model);
[[nodiscard]] PACELINE_API int32_t model_max_position(const Model& model);
[[nodiscard]] PACELINE_API Device model_device(const Model& model);
// A copy of the bytes of all weights, for equality tests.
[[nodiscard]] PACELINE_API std::vector<std::byte> model_weight_arena(const Model& model);

// Tells whether a file is still the one that was opened.
struct FileStamp {
  std::string path;
  int64_t bytes = 0;
  int64_t modified_ns = 0;  // when its contents changed last, which a program can set
  int64_t changed_ns = 0;   // when it changed last in any way, which no program can set
  uint64_t inode = 0;

  bool operator==(const FileStamp&) const = default;
};

// What receipts say of a target (receipt.h).
struct FolderOrigin {
  std::string directory;
  FileStamp weights;          // the file of the target's weights when it was opened
  std::string config_digest;  // SHA-256 of the canonical form of the target's description
};

// The content of a folder that `paceline convert` wrote: a target, optionally a drafter, and their
// defaults.
struct ModelFolder {
  std::shared_ptr<const Model> target;
  std::shared_ptr<const Model> draft;   // null without a drafter
  int32_t num_speculative_tokens = 0;   // default k, 1..16; 0 without a drafter
  std::vector<int32_t> stop_token_ids;  // the target's end-of-sequence ids
  FolderOrigin origin;
};

// Reads DIRECTORY/paceline.json and the safetensors files beside it onto a device. Throws
// ModelFileError naming file and key, and the exceptions of ModelBuilder.
[[nodiscard]] PACELINE_API ModelFolder load_model_folder(const std::string& directory,
                                                         Device device = Device::kCpu);
// The same onto several GPUs: to each its part of the target, and of the drafter what
// drafter_share() says. Each reads only the bytes that it gets.
[[nodiscard]] PACELINE_API ModelFolder load_model_folder(const std::string& directory,
                                                         std::span<const int32_t> gpus,
                                                         int32_t draft_tensor_parallel_size = 0);

}  // namespace paceline
