// SPDX-License-Identifier: Apache-2.0
//
// The table of op cases.

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/op_case_table.h"
#include "support/op_cases.h"
#include "support/op_cases_candidates.h"
#include "support/op_cases_compressed.h"
#include "support/op_cases_latent.h"
#include "support/op_cases_markov.h"
#include "support/op_cases_moe.h"
#include "support/op_cases_recurrent.h"
#include "support/op_cases_streams.h"
#include "support/op_weights.h"

namespace paceline::testing {
namespace {

void add_gemms(TableBuilder& table) {
  const auto add = [&](const GemmSpec& s, bool is_invariance_case) {
    table.add("gemm_n" + std::to_string(s.n) + "_k" + std::to_string(s.k) +
                  weight_suffix(s.weight) + "_to" + dtype_suffix(s.y_dtype) +
                  (s.has_bias ? "_bias" : "") + (s.x_padding + s.y_padding > 0 ? "_strided" : "") +
                  (s.num_groups > 1 ? "_groups" + std::to_string(s.num_groups) : ""),
              make_gemm, s, is_invariance_case);
  };
  constexpr DType kB = DType::kBFloat16;
  constexpr DType kF = DType::kFloat32;
  add({1, 8, {kB}, kB}, false);
  add({1, 4096, {kB}, kF}, false);
  add({7, 64, {kB}, kB, true, 8, 3}, false);
  add({33, 72, {kB}, kF, true, 0, 1}, false);
  add({97, 72, {kB}, kB}, true);
  add({100, 40, {kB}, kB, false, 4096, 5000}, false);
  add({130, 136, {kB}, kB, true}, false);
  add({200, 192, {kB}, kB, true, 8, 1}, true);
  add({256, 256, {kB}, kF}, false);
  add({600, 200, {kB}, kB, true}, false);
  add({1000, 640, {kB}, kB, true}, false);
  add({1536, 640, {kB}, kB}, true);
  add({2048, 2048, {kB}, kB}, false);
  add({512, 4096, {kB}, kB}, true);
  add({512, 4096, {kB}, kF, true}, true);
  add({4096, 512, {kB}, kB, true}, true);
  add({4096, 512, {kB}, kF}, true);
  add({4096, 2568, {kB}, kB}, true);
  add({4096, 2568, {kB}, kF}, true);
  add({1, 1, {kF}, kF, false, 3}, false);
  add({37, 33, {kF}, kF, true, 3, 5}, true);
  add({64, 64, {kF}, kF}, false);
  add({300, 100, {kF}, kF}, true);
  add({130, 1000, {kF}, kF, true, 4096, 7}, false);
  add({512, 2048, {kF}, kF}, true);

  // Weights with scales: ragged shapes, then those of GPT-OSS (2880 is no multiple of 128), of
  // Qwen3-8B in nvfp4 and in fp8 with scales for tiles, and of Llama-3-8B with scales for rows.
  constexpr WeightFormat kFp8 = WeightFormat::kFp8;
  constexpr WeightSpec kMxfp4 = {kB, WeightFormat::kMxfp4};
  constexpr WeightSpec kNvfp4 = {kB, WeightFormat::kNvfp4};
  constexpr WeightSpec kRows = {kB, kFp8, 1};
  constexpr WeightSpec kTiles = {kB, kFp8, 128, 128};
  constexpr WeightSpec kJoined = {kB, kFp8, 32, 128};
  constexpr WeightSpec kPowersOfTwo = {kB, kFp8, 64, 128, /*has_exact_scales=*/true};
  for (const WeightSpec& weight : {kMxfp4, kNvfp4, kRows, kTiles, kJoined, kPowersOfTwo}) {
    add({7, 64, weight, kB, true, 8, 3}, false);
    add({33, 96, weight, kF, true, 0, 1}, false);
    add({130, 288, weight, kB}, true);
    add({320, 2880, weight, kB, true}, true);
  }
  add({5760, 2880, kMxfp4, kB, true}, false);
  add({6144, 4096, kNvfp4, kB}, false);
  add({512, 12288, kNvfp4, kB}, true);
  add({24576, 512, kNvfp4, kB, true}, false);
  add({37, 96, {kF, WeightFormat::kNvfp4}, kF, true, 3, 5}, true);
  add({6144, 4096, kTiles, kB}, false);
  add({512, 12288, kTiles, kB}, true);
  add({6144, 4096, kRows, kB}, false);
  add({512, 14336, kRows, kB}, true);
  add({4096, 4096, kPowersOfTwo, kF}, false);

  // int4: as GPTQ, AWQ and W4A16 have it. Groups that end inside a packed tile, and orders.
  constexpr WeightFormat kInt4 = WeightFormat::kInt4;
  constexpr WeightSpec kSymmetric = {.dtype = kB, .format = kInt4, .scale_cols = 128};
  constexpr WeightSpec kZeros = {.dtype = kB,
                                 .format = kInt4,
                                 .scale_cols = 64,
                                 .scale_dtype = DType::kFloat16,
                                 .has_zeros = true};
  constexpr WeightSpec kNarrow = {
      .dtype = kB, .format = kInt4, .scale_cols = 32, .has_zeros = true};
  constexpr WeightSpec kOrdered = {.dtype = kB,
                                   .format = kInt4,
                                   .scale_cols = 32,
                                   .scale_dtype = DType::kFloat16,
                                   .has_zeros = true,
                                   .has_order = true};
  constexpr WeightSpec kInt4F32 = {.dtype = kF,
                                   .format = kInt4,
                                   .scale_cols = 32,
                                   .scale_dtype = DType::kFloat16,
                                   .has_zeros = true,
                                   .has_order = true};
  for (const WeightSpec& weight : {kSymmetric, kZeros, kNarrow, kOrdered}) {
    add({7, 64, weight, kB, true, 8, 3}, false);
    add({33, 96, weight, kF, true, 0, 1}, false);
    add({130, 384, weight, kB}, true);
    add({320, 2880, weight, kB, true}, true);
    add({512, 12288, weight, kB}, true);
  }
  add({6144, 4096, kSymmetric, kB}, false);
  add({4096, 4096, kZeros, kF}, false);
  add({24576, 512, kZeros, kB, true}, false);
  add({37, 96, kInt4F32, kF, true, 3, 5}, true);

  // Groups: a launch for all of them, where they are packed and of whole tiles, or one for each.
  const auto add_groups = [&](int32_t num_groups, int32_t rows, int32_t k, const WeightSpec& weight,
                              DType y_dtype) {
    add({.n = num_groups * rows,
         .k = k,
         .weight = weight,
         .y_dtype = y_dtype,
         .has_bias = rows != 1024,
         .x_padding = rows == 1024 ? 0 : 8,
         .num_groups = num_groups},
        rows >= 128);
  };
  constexpr WeightSpec kExactTiles = {kB, kFp8, 128, 128, /*has_exact_scales=*/true};
  for (const WeightSpec& weight : {WeightSpec{kB}, WeightSpec{kF}, kMxfp4, kNvfp4, kRows, kTiles,
                                   kExactTiles, kNarrow, kOrdered}) {
    add_groups(3, 128, 288, weight, weight.dtype);
    add_groups(2, weight.scale_rows == 128 ? 256 : 48, 64, weight, kF);
  }
  add_groups(8, 1024, 4096, kExactTiles, kB);  // DeepSeek-V4's
}

void add_activated_gemms(TableBuilder& table) {
  const auto add = [&](const ActivatedGemmSpec& s, bool is_invariance_case) {
    table.add("activated_gemm_i" + std::to_string(s.intermediate) + "_k" + std::to_string(s.k) +
                  weight_suffix(s.weight) + (s.has_bias ? "_bias" : ""),
              make_activated_gemm, s, is_invariance_case);
  };
  constexpr DType kB = DType::kBFloat16;
  // The last tile is not full, or a few columns remain. Only multiples of 8 without a bias are one
  // kernel on a GPU.
  add({8, 64, Activation::kSilu, {kB}}, false);
  add({33, 72, Activation::kSilu, {kB}}, false);
  add({600, 136, Activation::kGeluTanh, {kB}}, true);
  add({1000, 640, Activation::kSwigluOai, {kB}, /*has_bias=*/true}, false);
  add({1536, 640, Activation::kClampedSilu, {kB}}, true);
  add({6144, 512, Activation::kSilu, {kB}}, true);
  add({4264, 192, Activation::kSilu, {kB}}, true);
  add({100, 64, Activation::kSilu, {DType::kFloat32}}, false);
  add({320, 288, Activation::kSilu, {kB, WeightFormat::kFp8, 128, 128}}, false);
  add({320, 288, Activation::kSilu, {kB, WeightFormat::kNvfp4}}, false);
}

void add_normed_gemms(TableBuilder& table) {
  const auto add = [&](const NormedGemmSpec& s, bool is_invariance_case) {
    table.add("normed_gemm_n" + std::to_string(s.n) + "_k" + std::to_string(s.k) +
                  (s.has_activation ? "_activated" : "") + weight_suffix(s.weight) +
                  (s.has_bias ? "_bias" : ""),
              make_normed_gemm, s, is_invariance_case);
  };
  constexpr DType kB = DType::kBFloat16;
  // A single row, with one or two vectors a lane, is normed in the product's launch, if the shape
  // allows it.
  add({72, 128, false, {kB}, /*has_bias=*/true}, true);
  add({40, 136, false, {kB}}, false);
  add({6144, 512, false, {kB}}, true);
  add({640, 4096, false, {kB}}, false);
  add({136, 640, true, {kB}}, true);
  add({33, 128, true, {kB}}, false);
  add({96, 5120, true, {kB}}, false);
  add({100, 64, false, {DType::kFloat32}}, false);
  add({320, 256, true, {kB, WeightFormat::kFp8, 128, 128}}, false);
  add({320, 256, true, {kB, WeightFormat::kNvfp4}}, false);
}

void add_added_gemms(TableBuilder& table) {
  const auto add = [&](const AddedGemmSpec& s, bool is_invariance_case) {
    table.add("added_gemm_n" + std::to_string(s.n) + "_k" + std::to_string(s.k) +
                  weight_suffix(s.weight) + (s.has_bias ? "_bias" : ""),
              make_added_gemm, s, is_invariance_case);
  };
  constexpr DType kB = DType::kBFloat16;
  // Thin tiles of several widths, the last of which are not full, and whole ones.
  add({8, 64, {kB}}, false);
  add({33, 64, {kB}}, false);
  add({2888, 136, {kB}, /*has_bias=*/true}, true);
  add({4096, 256, {kB}}, true);
  add({4008, 192, {kB}}, true);
  add({12288, 128, {kB}}, true);
  add({100, 64, {DType::kFloat32}}, false);
  add({320, 288, {kB, WeightFormat::kMxfp4}}, false);
  add({320, 288, {kB, WeightFormat::kNvfp4}}, false);
}

void add_element_ops(TableBuilder& table) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const std::string suffix = dtype_suffix(dtype);
    for (const int32_t hidden : {1, 33, 640, 5376}) {
      table.add("embed_h" + std::to_string(hidden) + suffix, make_embed,
                EmbedSpec{hidden, 211, dtype}, hidden == 640);
    }
    for (const int32_t intermediate : {1, 33, 250, 2048, 21504}) {
      for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
        const bool is_silu = activation == Activation::kSilu;
        table.add("gated_" + std::string(is_silu ? "silu_" : "gelu_") +
                      std::to_string(intermediate) + suffix,
                  make_gated, GatedSpec{intermediate, activation, dtype}, intermediate == 2048);
      }
    }
    // Experts': clamped, or with gates and ups that alternate.
    for (const int32_t intermediate : {1, 33, 250, 2880}) {
      for (const auto& [activation, name] : {std::pair{Activation::kSilu, "silu_"},
                                             {Activation::kGeluTanh, "gelu_"},
                                             {Activation::kSwigluOai, "swiglu_oai_"},
                                             {Activation::kClampedSilu, "clamped_silu_"}}) {
        const bool has_limit =
            activation == Activation::kSwigluOai || activation == Activation::kClampedSilu;
        for (const bool is_interleaved : {false, true}) {
          if (!has_limit && !is_interleaved) continue;
          table.add("gated_" + std::string(name) + (is_interleaved ? "interleaved_" : "") +
                        std::to_string(intermediate) + suffix,
                    make_gated, GatedSpec{intermediate, activation, dtype, 0, is_interleaved},
                    intermediate >= 250);
        }
      }
    }
    // Output gates.
    for (const int32_t width : {1, 33, 250, 4096}) {
      table.add("gated_sigmoid_up_" + std::to_string(width) + suffix, make_gated,
                GatedSpec{width, Activation::kSigmoid, dtype, width}, width >= 250);
    }
    // Per-layer inputs: the gate and one layer's part of them.
    for (const auto& [size, stride] : {std::pair{256, 256 * 35}, {256, 256}, {33, 35 * 33}}) {
      table.add("gated_gelu_up_" + std::to_string(size) + "_of" + std::to_string(stride) + suffix,
                make_gated, GatedSpec{size, Activation::kGeluTanh, dtype, stride}, stride == 8960);
    }
    for (const auto& [layers, size] : {std::pair{1, 1}, {3, 33}, {9, 8}, {35, 256}, {42, 256}}) {
      for (const DType table_dtype : {DType::kFloat32, DType::kBFloat16}) {
        table.add("per_layer_" + std::to_string(layers) + "x" + std::to_string(size) + suffix +
                      "_table" + dtype_suffix(table_dtype),
                  make_per_layer, PerLayerSpec{layers, size, dtype, table_dtype}, layers == 35);
      }
    }
  }
  for (const int32_t hidden : {1, 37, 640, 4096, 5376}) {
    table.add("gather_h" + std::to_string(hidden), make_gather, GatherSpec{hidden}, hidden == 640);
  }
  for (const int32_t width : {1, 37, 640, 4096}) {
    for (const auto& [x, y] : {std::pair{DType::kFloat32, DType::kFloat32},
                               {DType::kFloat32, DType::kBFloat16},
                               {DType::kBFloat16, DType::kBFloat16}}) {
      for (const bool has_index : {false, true}) {
        const int32_t padding = width % 8 == 0 ? 8 : 3;
        table.add("copy_w" + std::to_string(width) + (has_index ? "_index" : "") + dtype_suffix(x) +
                      dtype_suffix(y),
                  make_copy, CopySpec{width, x, y, padding, 2 * padding, has_index}, width == 640);
      }
    }
  }
  for (const int32_t n : {1, 1003, 32000}) {
    table.add("soft_cap_n" + std::to_string(n), make_soft_cap, SoftCapSpec{n, 30.0f}, n == 1003);
    table.add("soft_cap_scaled_n" + std::to_string(n), make_soft_cap, SoftCapSpec{n, 7.0f, 0.25f});
    table.add("scale_logits_n" + std::to_string(n), make_soft_cap, SoftCapSpec{n, 0.0f, 0.25f});
  }
}

void add_norms(TableBuilder& table) {
  const struct {
    NormKind kind;
    const char* name;
  } kinds[] = {{NormKind::kPlain, "plain"},
               {NormKind::kInPlace, "in_place"},
               {NormKind::kResidual, "residual"},
               {NormKind::kResidualXWeight, "x_weight"},
               {NormKind::kResidualOnly, "residual_only"},
               {NormKind::kResidualXWeightOnly, "x_weight_only"},
               {NormKind::kCopy, "copy"},
               {NormKind::kResidualCopy, "residual_copy"},
               {NormKind::kResidualScale, "scale"},
               {NormKind::kResidualScaleOnly, "scale_only"}};
  for (const auto& [kind, name] : kinds) {
    for (const int32_t hidden : {1, 33, 100, 640, 4096, 5376}) {
      for (const auto& [x, y] : {std::pair{DType::kFloat32, DType::kFloat32},
                                 {DType::kBFloat16, DType::kBFloat16},
                                 {DType::kFloat32, DType::kBFloat16}}) {
        // Where two dtypes meet it is a norm, or a copy, of the residual stream itself.
        if (x != y && kind != NormKind::kPlain && kind != NormKind::kCopy) continue;
        const bool is_padded = hidden == 100;
        table.add("rms_norm_" + std::string(name) + "_h" + std::to_string(hidden) +
                      dtype_suffix(x) + "_to" + dtype_suffix(y),
                  make_rms_norm,
                  RmsNormSpec{hidden, kind, x, y, is_padded ? 3 : 0, is_padded ? 1 : 0},
                  hidden == 640 || hidden == 4096);
      }
    }
  }
  // More than one element a thread where a row does not stay in registers: it is too long, as three
  // layers' hidden states side by side are, which EAGLE-3 norms in place, or no whole vectors.
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const std::string suffix = dtype_suffix(dtype) + "_to" + dtype_suffix(dtype);
    table.add("rms_norm_plain_h12288" + suffix, make_rms_norm,
              RmsNormSpec{12288, NormKind::kPlain, dtype, dtype});
    table.add("rms_norm_in_place_h12288" + suffix, make_rms_norm,
              RmsNormSpec{12288, NormKind::kInPlace, dtype, dtype});
    table.add("rms_norm_scale_h1003" + suffix, make_rms_norm,
              RmsNormSpec{1003, NormKind::kResidualScale, dtype, dtype},
              /*is_invariance_case=*/true);
  }
}

void add_ropes(TableBuilder& table) {
  const auto add = [&](const RopeSpec& s, bool is_invariance_case = false) {
    table.add("rope_" + std::to_string(s.num_qo_heads) + "x" + std::to_string(s.num_kv_heads) +
                  "_d" + std::to_string(s.head_dim) + "_b" + std::to_string(s.block_size) +
                  (s.has_norms ? "_norm" : "") + (s.has_v_norm ? "_vnorm" : "") +
                  (s.kv_inputs == KvInputs::kKeys   ? "_keys"
                   : s.kv_inputs == KvInputs::kNone ? "_q"
                                                    : "") +
                  (s.position_offset != 0 ? "_ahead" + std::to_string(s.position_offset) : "") +
                  (s.rope_head_dim != 0 ? "_first" + std::to_string(s.rope_head_dim) : "") +
                  (s.reads_early ? "_early" : "") + dtype_suffix(s.dtype),
              make_rope, s, is_invariance_case);
  };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool has_norms : {false, true}) {
      add({4, 2, 64, 16, dtype, has_norms});
      add({32, 8, 128, 16, dtype, has_norms});
      add({4, 1, 256, 24, dtype, has_norms});
      add({4, 2, 128, 1, dtype, has_norms}, true);
    }
    add({8, 1, 512, 256, dtype, true});
    add({3, 3, 16, 5, dtype, true});
    // Gemma 4: v normalised, v made of k, and q alone.
    add({8, 1, 256, 16, dtype, true, KvInputs::kKeysAndValues, true});
    add({4, 2, 512, 16, dtype, true, KvInputs::kKeys, true});
    add({4, 2, 34, 5, dtype, true, KvInputs::kKeys, true});
    add({4, 2, 128, 1, dtype, true, KvInputs::kKeys, true}, true);
    add({8, 1, 512, 16, dtype, true, KvInputs::kNone});
    add({4, 2, 34, 5, dtype, true, KvInputs::kNone});
    add({4, 2, 128, 1, dtype, true, KvInputs::kNone}, true);
    for (RopeSpec s : {RopeSpec{32, 8, 128, 16, dtype}, RopeSpec{4, 2, 34, 5, dtype}}) {
      s.reads_early = true;
      add(s);
    }
    // The context of a block drafter has keys and values alone.
    add({0, 8, 128, 16, dtype, true});
    add({0, 1, 512, 16, dtype, true, KvInputs::kKeys, true});
    add({0, 2, 34, 5, dtype, true, KvInputs::kKeys, true});
    add({0, 2, 128, 1, dtype, true, KvInputs::kKeysAndValues, true}, true);
    // Gemma 4 MTP may stand one position past its last key. The offset is that of k as well.
    add({4, 1, 256, 16, dtype, true, KvInputs::kNone, false, 1});
    add({4, 2, 34, 5, dtype, true, KvInputs::kNone, false, 1});
    add({4, 2, 128, 1, dtype, false, KvInputs::kNone, false, 1}, true);
    add({4, 2, 128, 1, dtype, true, KvInputs::kKeysAndValues, false, 1}, true);
    // Heads above 256 of any other size: one that lanes do not share evenly, and the largest.
    add({4, 2, 322, 1, dtype, true, KvInputs::kKeysAndValues, true}, true);
    add({2, 1, 1024, 16, dtype, true});
    // Partial rotation: pairs in different lanes, in one lane, and in a head of an odd size.
    const auto add_partial = [&](int32_t head_dim, int32_t rotated, bool is_invariance_case) {
      add({4, 2, head_dim, 16, dtype, true, KvInputs::kKeysAndValues, false, 0, rotated},
          is_invariance_case);
    };
    add_partial(256, 64, true);
    add_partial(128, 64, false);
    add_partial(64, 2, false);
    add_partial(512, 256, false);
    add_partial(32, 8, false);
    add_partial(34, 22, true);
    add_partial(322, 160, false);
  }
}

void add_clusters(TableBuilder& table) {
  // {clusters, top}
  for (const auto& [count, top] : {std::pair{1, 1},
                                   {3, 2},
                                   {16, 1},
                                   {16, 5},
                                   {16, 16},
                                   {255, 7},
                                   {256, 32},
                                   {257, 257},
                                   {300, 299},
                                   {2048, 1},
                                   {2048, 32},
                                   {2048, 2048}}) {
    for (const auto& [kind, suffix] : std::span(kAllLogits).first<4>()) {
      const bool is_invariance_case = count == 16 || count == 300 || top == 32;
      table.add("clusters_select_n" + std::to_string(count) + "_top" + std::to_string(top) + suffix,
                make_select_clusters, SelectClustersSpec{count, top, kind}, is_invariance_case);
    }
  }
  const auto add = [&](const ClusterLogitsSpec& s, bool is_invariance_case = false) {
    table.add("clusters_logits_h" + std::to_string(s.hidden) + "_n" +
                  std::to_string(s.num_clusters) + "x" + std::to_string(s.cluster_size) + "_top" +
                  std::to_string(s.top) + dtype_suffix(s.x_dtype) +
                  (s.weight_dtype != s.x_dtype ? "_weight" + dtype_suffix(s.weight_dtype) : ""),
              make_cluster_logits, s, is_invariance_case);
  };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    add({1, 40, 1, 40, dtype, dtype});
    add({32, 16, 4, 5, dtype, dtype}, true);
    add({32, 50, 1, 7, dtype, dtype});
    add({33, 16, 4, 16, dtype, dtype}, true);
    add({40, 3, 33, 1, dtype, dtype});
    add({256, 64, 1, 64, dtype, dtype});
    add({256, 24, 128, 8, dtype, dtype}, true);
    add({999, 16, 4, 9, dtype, dtype});
    add({1000, 16, 4, 9, dtype, dtype});
    add({1024, 16, 4, 3, dtype, dtype});
    add({1024, 8, 128, 2, dtype, dtype}, true);
  }
  add({256, 16, 4, 5, DType::kFloat32, DType::kBFloat16}, true);
}

struct NamedRows {
  const char* name;
  int32_t num_rows;
  int32_t max_rows;
};
constexpr NamedRows kBatches[] = {{"0of4", 0, 4},       {"1of1", 1, 1},     {"3of8", 3, 8},
                                  {"16of16", 16, 16},   {"17of64", 17, 64}, {"70of130", 70, 130},
                                  {"12claimed9", 12, 9}};
constexpr NamedRows kManyRows = {"300of512", 300, 512};
// For products, which have tiles of their own for 17 to 32 rows.
constexpr NamedRows kTileRows = {"25of32", 25, 32};

}  // namespace

const std::vector<RowWiseCase>& row_wise_cases() {
  static const std::vector<RowWiseCase> cases = [] {
    TableBuilder table;
    add_gemms(table);
    add_activated_gemms(table);
    add_normed_gemms(table);
    add_added_gemms(table);
    add_element_ops(table);
    add_norms(table);
    add_ropes(table);
    add_sampling_ops(table);
    add_clusters(table);
    for (auto* const of_rooms :
         {moe_row_wise_cases, latent_row_wise_cases, compressed_row_wise_cases,
          markov_row_wise_cases, streams_row_wise_cases, candidate_row_wise_cases}) {
      for (RowWiseCase& c : of_rooms()) table.cases.push_back(std::move(c));
    }
    return table.cases;
  }();
  return cases;
}

const std::vector<OpCase>& op_cases() {
  static const std::vector<OpCase> cases = [] {
    std::vector<OpCase> all;
    for (const RowWiseCase& c : row_wise_cases()) {
      const auto add = [&](const NamedRows& batch) {
        all.push_back({c.name + "_rows" + batch.name, [make = c.make, batch](uint64_t seed) {
                         return make(first_rows(batch.num_rows, batch.max_rows), seed);
                       }});
      };
      const bool is_huge = c.name.ends_with("_v151936") || c.name.ends_with("_v262144");
      for (const NamedRows& batch : kBatches) {
        if (!is_huge || batch.max_rows <= 16) add(batch);
      }
      if (c.is_invariance_case) add(kManyRows);
      if (c.name.find("gemm") != std::string::npos) add(kTileRows);
      if (c.roomy_rows > 0) {
        const std::string in_room = std::to_string(c.num_in_room) + "roomy";
        add({in_room.c_str(), c.num_in_room, c.roomy_rows});
      }
    }
    for (auto* const of_sequences :
         {attention_op_cases, state_op_cases, fork_op_cases, moe_op_cases, recurrent_op_cases}) {
      for (OpCase& c : of_sequences()) all.push_back(std::move(c));
    }
    return all;
  }();
  return cases;
}

}  // namespace paceline::testing
