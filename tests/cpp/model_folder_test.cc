// SPDX-License-Identifier: Apache-2.0
// Model folders: they give the same bytes as putting each tensor, and no path leads out of a
// folder. Every hostile folder must end in ModelFileError.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>
#include <paceline/model.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "support/described_model.h"
#include "support/errors.h"
#include "support/format_tensors.h"
#include "support/safetensors_writer.h"

namespace paceline {
namespace {

using test::safetensors_bytes;
using test::TemporaryFolder;
using test::write_file;
using testing::build_tiny;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::tiny_part;
using testing::tiny_safetensors;

class Folder : public ::testing::Test {
 protected:
  static std::string alone(std::string_view target, std::string_view rest = "") {
    return concat(R"({"format": "paceline-folder-1", "stop_token_ids": [0, 4], "target": )", target,
                  rest, "}");
  }
  void describe(std::string_view json) { write_file(folder_.file("paceline.json"), json); }
  std::string error() {
    return message_of<ModelFileError>([&] { (void)load_model_folder(folder_.path()); });
  }

  TemporaryFolder folder_;
};

TEST_F(Folder, GivesTheSameBytesAsPut) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (DType stored : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (dtype == DType::kBFloat16 && stored == DType::kFloat16) continue;
      for (bool misalign : {false, true}) {
        write_file(folder_.file("target.safetensors"), tiny_safetensors(stored, misalign));
        describe(alone(tiny_part("target.safetensors", dtype_name(dtype))));
        const ModelFolder folder = load_model_folder(folder_.path());
        const auto expected = build_tiny(stored, dtype);
        EXPECT_TRUE(
            std::ranges::equal(model_weight_arena(*folder.target), model_weight_arena(*expected)));
        EXPECT_EQ(folder.draft, nullptr);
        EXPECT_EQ(folder.num_speculative_tokens, 0);
        EXPECT_THAT(folder.stop_token_ids, ElementsAre(0, 4));
      }
    }
  }
}

// The tensors of a description with every format, as a folder's file.
std::string format_safetensors(const testing::FormatTensors& tensors) {
  std::vector<test::WrittenTensor> written;
  for (const auto& [name, t] : tensors) {
    const std::string_view dtype = t.dtype == DType::kUInt8        ? "U8"
                                   : t.dtype == DType::kFloat8E4M3 ? "F8_E4M3"
                                   : t.dtype == DType::kFloat32    ? "F32"
                                                                   : "BF16";
    written.push_back({name, std::string(dtype), t.shape, t.bytes});
  }
  return safetensors_bytes(written);
}

TEST_F(Folder, ReadsFormats) {
  const std::string config = testing::mixture_config();
  testing::FormatTensors tensors = testing::format_tensors(config, 1);
  ModelBuilder builder(config, DType::kBFloat16);
  testing::put_all(builder, tensors);
  const auto expected = builder.finish();
  const std::string part =
      concat(R"({"weights": "t", "dtype": "bfloat16", "config": )", config, "}");
  describe(
      concat(R"({"format": "paceline-folder-1", "stop_token_ids": [], "target": )", part, "}"));
  write_file(folder_.file("t"), format_safetensors(tensors));
  const ModelFolder folder = load_model_folder(folder_.path());
  EXPECT_TRUE(
      std::ranges::equal(model_weight_arena(*folder.target), model_weight_arena(*expected)));

  tensors.at("layers.0.mlp.experts.down.scales").bytes[3] = '\xff';
  write_file(folder_.file("t"), format_safetensors(tensors));
  EXPECT_THAT(error(), HasSubstr(folder_.file("t") +
                                 ": 'layers.0.mlp.experts.down.scales'[0, 1, 0] is 255"));
}

TEST_F(Folder, ReadsADrafterAndLinksInside) {
  write_file(folder_.file("t"), tiny_safetensors(DType::kFloat32));
  std::filesystem::create_symlink("t", folder_.file("link"));
  describe(
      alone(tiny_part("t"), R"(, "num_speculative_tokens": 4, "draft": )" + tiny_part("link")));
  const ModelFolder folder = load_model_folder(folder_.path() + "/");
  ASSERT_NE(folder.draft, nullptr);
  EXPECT_EQ(folder.num_speculative_tokens, 4);
  EXPECT_TRUE(
      std::ranges::equal(model_weight_arena(*folder.target), model_weight_arena(*folder.draft)));
}

TEST_F(Folder, RefusesHostileDescriptions) {
  write_file(folder_.file("t"), tiny_safetensors(DType::kFloat32));
  write_file(folder_.file("half"), tiny_safetensors(DType::kFloat16));
  const TemporaryFolder elsewhere;
  write_file(elsewhere.file("t"), tiny_safetensors(DType::kFloat32));
  std::filesystem::create_symlink(elsewhere.file("t"), folder_.file("out"));
  std::filesystem::create_symlink("loop", folder_.file("loop"));
  std::filesystem::create_directory(folder_.file("d"));
  write_file(folder_.file("integers"),
             safetensors_bytes({{"embed.weight", "I16", {5, 6}, std::string(60, '\0')}}));
  write_file(folder_.file("few"),
             safetensors_bytes({{"final_norm.weight", "F32", {6}, std::string(24, '\0')}}));
  write_file(folder_.file("more"), safetensors_bytes({{"x", "F32", {1}, "1234"}}));
  write_file(folder_.file("shape"),
             safetensors_bytes({{"embed.weight", "F32", {6, 5}, std::string(120, '\0')}}));
  const std::string draft = R"(, "draft": )" + tiny_part("t");
  const std::vector<std::pair<std::string, std::string>> table = {
      {"", "byte 0"},
      {"[]", "the top level is a list"},
      {"{}", "format is missing"},
      {"{\"format\": \"paceline-folder-1\", \"target\": " + tiny_part("t") + "}",
       "stop_token_ids is m"},
      {alone("1"), "target is 1; allowed: an object"},
      {alone("{}"), "target.weights is missing"},
      {alone(tiny_part("t"), R"(, "x": 1)"), "x is an unknown key; allowed: format, target,"},
      {alone(tiny_part("t"), R"(, "num_speculative_tokens": 3)"), "no such key without a draft"},
      {alone(tiny_part("t"), R"(, "bos_token_id": 5)"),
       "bos_token_id is 5; allowed: an integer from 0"},
      {alone(R"({"architecture": 1, )" + tiny_part("t").substr(1)), "target.architecture is 1"},
      {alone(tiny_part("t"), draft), "num_speculative_tokens is missing"},
      {alone(tiny_part("t"), draft + R"(, "num_speculative_tokens": 17)"),
       "is 17; allowed: an integer"},
      {alone(tiny_part("t"), draft + R"(, "num_speculative_tokens": 0)"),
       "is 0; allowed: an integer"},
      {alone(tiny_part("t", "float16")),
       "target.dtype is 'float16'; allowed: 'float32', 'bfloat16'"},
      {alone(tiny_part("half", "bfloat16")), "use weight dtype float32"},
      {alone(tiny_part("")), "target.weights is ''; allowed: the plain name"},
      {alone(tiny_part(".")), "target.weights is '.'; allowed: the plain name"},
      {alone(tiny_part("..")), "target.weights is '..'; allowed: the plain name"},
      {alone(tiny_part("../t")), "target.weights is '../t'"},
      {alone(tiny_part("d/t")), "target.weights is 'd/t'"},
      {alone(tiny_part(elsewhere.file("t"))), "allowed: the plain name"},
      {alone(tiny_part("t\\u0000")), "target.weights is 't\\x00'; allowed: the plain name"},
      {alone(tiny_part("out")), "outside of"},
      {alone(tiny_part("loop")), "/loop: "},
      {alone(tiny_part("d")), "is a directory"},
      {alone(tiny_part("paceline.json")), "the header length is"},
      {alone(tiny_part("integers")), "'embed.weight' has dtype I16; allowed: F32, BF16, F16"},
      {alone(tiny_part("few")), "33 of 34 weights of tiny are missing"},
      {alone(tiny_part("more")), "no weight is named 'x'"},
      {alone(tiny_part("shape")), "has shape [6, 5]; allowed: [5, 6]"},
  };
  for (const auto& [json, expected] : table) {
    describe(json);
    const std::string message = error();
    EXPECT_THAT(message, HasSubstr(expected)) << json.substr(0, 120);
    EXPECT_THAT(message, HasSubstr(folder_.path())) << json.substr(0, 120);
  }
  std::string json = alone(tiny_part("t"));
  json.replace(json.find("[0, 4]"), 6, "[0, 5]");
  describe(json);
  EXPECT_THAT(error(), HasSubstr("stop_token_ids[1] is 5; allowed: an integer from 0 to 4"));
  json = alone(tiny_part("t"));
  json.replace(json.find("\"window\": 9"), 11, "\"window\": 0");
  describe(json);
  EXPECT_THAT(error(), HasSubstr("paceline.json: target.config: decoder config: layers[1].att"));
}

TEST_F(Folder, SaysWhenSomethingIsMissing) {
  const auto is_missing = [](const std::string& path) {
    try {
      (void)load_model_folder(path);
    } catch (const ModelFileError& failure) {
      return failure.is_missing();
    }
    return false;
  };
  EXPECT_TRUE(is_missing(folder_.path()));
  EXPECT_TRUE(is_missing(folder_.file("no-folder")));
  EXPECT_THAT(error(), HasSubstr("paceline convert"));
  describe(alone(tiny_part("t")));
  EXPECT_TRUE(is_missing(folder_.path()));
  EXPECT_THAT(error(), HasSubstr("/t: "));
  write_file(folder_.file("t"), "");
  EXPECT_FALSE(is_missing(folder_.path()));
}

}  // namespace
}  // namespace paceline
