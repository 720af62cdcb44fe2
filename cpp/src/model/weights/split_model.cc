// SPDX-License-Identifier: Apache-2.0

// split_model: the weights of a model on the CPU, copied to the memory of several GPUs.

#include <paceline/model.h>

#include <algorithm>
#include <utility>

#include "base/boundary.h"
#include "base/check.h"
#include "base/overloaded.h"
#include "device/device_memory.h"
#include "model/weights/model_impl.h"
#include "model/weights/rank_model.h"
#include "model/weights/split_model.h"
#include "model/weights/visit_weights.h"
#include "model/weights/weight_limit.h"

namespace paceline {
namespace {

constexpr int64_t kColumns = 1 << 10;  // that a copy may be divided by

// A tensor in the arena of a whole model on the CPU, whose bytes begin at `data`. `own`: as a rank
// has it.
[[nodiscard]] SourceTensor arena_tensor(const NamedWeight& named, const RankTensor& own,
                                        const std::byte* data) {
  const int64_t elements = named.elements();
  int64_t cols = elements % kColumns == 0 ? kColumns : elements;
  if (own.named.packed) cols = own.named.packed->row_bytes / dtype_bytes(named.dtype);
  const int64_t rows = own.rows.num_matrices * own.rows.rows_each;
  if (!own.rows.is_whole && rows > 0) cols = elements / rows;
  return {.matrix = {.data = data,
                     .rows = elements / cols,
                     .cols = cols,
                     .row_stride = cols,
                     .col_stride = 1}};
}

void copy_tensor(const CpuContext& ctx, const NamedWeight& named, const RankTensor& own,
                 const DeviceBuffer& arena, const std::byte* data) {
  if (named.dtype == DType::kInt32) {
    return arena.memory().upload(arena.data() + own.named.offset, data,
                                 named.elements() * dtype_bytes(named.dtype));
  }
  if (named.kind == WeightKind::kFp8Scales) {
    return write_scales(
        own, arena,
        {reinterpret_cast<const float*>(data), static_cast<size_t>(named.arena_elements())});
  }
  write_rows(ctx, own, arena, arena_tensor(named, own, data), named.dtype, Device::kCpu);
}

// What the layout does not say, because it follows from the weights.
void copy_facts(const Model& whole, DecoderWeights& own) {
  std::vector<const WeightMatrix*> matrices;
  for_each_linear(
      whole.config, whole.weights,
      Overloaded{[&](const Linear& one, const LinearShape&) { matrices.push_back(&one.weight); },
                 [&](const ExpertLinears& all, const LinearShape&) {
                   matrices.push_back(&all.weight.first);
                 }});
  size_t next = 0;
  const auto copy = [&](WeightMatrix& matrix) {
    matrix.scale_dtype = matrices[next]->scale_dtype;
    matrix.has_exact_scales = matrices[next]->has_exact_scales;
    ++next;
  };
  for_each_linear(
      whole.config, own,
      Overloaded{[&](Linear& one, const LinearShape&) { copy(one.weight); },
                 [&](ExpertLinears& all, const LinearShape&) { copy(all.weight.first); }});
  if (whole.weights.head.draft_to_target == nullptr) own.head.draft_to_target = nullptr;
}

}  // namespace

std::shared_ptr<const Model> split_over(const Model& whole, Device device,
                                        std::span<const RankMemory> memories, GpuShare share) {
  WholeLayout layout(whole.config, whole.weights.dtype);
  if (device == Device::kCuda) check_on_gpu(whole.config);
  if (share == GpuShare::kPart) check_ranks(whole, static_cast<int32_t>(memories.size()));
  layout.model.default_draft_tokens = whole.default_draft_tokens;
  RankedWeights ranks(layout.model, device, memories, share);
  ranks.for_each_rank([&](size_t, const CpuContext& ctx, const std::vector<RankTensor>& tensors,
                          const DeviceBuffer& arena) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const NamedWeight& named = layout.named_weights[i];
      const std::byte* const data = whole.weights.arena.data() + named.offset;
      if (named.elements() > 0) copy_tensor(ctx, named, tensors[i], arena, data);
    }
  });
  ranks.finish();
  for (const auto& rank : ranks.models()) copy_facts(whole, rank->weights);
  return ranks.make_model(layout.model, device, share);
}

std::vector<RankMemory> memories_of(std::span<const int32_t> gpus) {
  connect_gpus(gpus);
  std::vector<RankMemory> memories;
  for (const int32_t gpu : gpus) memories.push_back({.memory = &cuda_memory(gpu), .gpu = gpu});
  return memories;
}

void check_gpus(std::span<const int32_t> gpus) {
  if (gpus.empty() || gpus.size() > size_t{kMaxRanks}) {
    throw InvalidArgument(concat("gpus has ", gpus.size(), " numbers; allowed: 1 to ", kMaxRanks));
  }
  for (size_t i = 0; i < gpus.size(); ++i) {
    if (std::find(gpus.begin(), gpus.begin() + static_cast<ptrdiff_t>(i), gpus[i]) ==
        gpus.begin() + static_cast<ptrdiff_t>(i)) {
      continue;
    }
    throw InvalidArgument(
        concat("gpus has ", gpus[i], " twice; allowed: a GPU of its own for each rank"));
  }
}

std::shared_ptr<const Model> split_over_gpus(const Model& whole, std::span<const int32_t> gpus,
                                             GpuShare share) {
  return split_over(whole, Device::kCuda, memories_of(gpus), share);
}

std::shared_ptr<const Model> split_model(const std::shared_ptr<const Model>& model,
                                         std::span<const int32_t> gpus, GpuShare share) {
  return at_boundary([&] {
    if (model == nullptr) throw InvalidArgument("model is null; give a model");
    if (model->device != Device::kCpu) {
      throw InvalidArgument(concat("the model ", model->config.name, " is on device ",
                                   device_name(model->device), "; allowed: a model on the CPU"));
    }
    check_gpus(gpus);
    return split_over_gpus(*model, gpus, share);
  });
}

}  // namespace paceline
