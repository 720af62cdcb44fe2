// SPDX-License-Identifier: Apache-2.0

// Reads a folder that `paceline convert` wrote (docs/model-format.md). Its files may come from
// anywhere, so the reader trusts none of their sizes, names and paths.

#include <paceline/error.h>
#include <paceline/model.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <optional>
#include <system_error>

#include "base/boundary.h"
#include "base/canonical_json.h"
#include "base/check.h"
#include "base/json.h"
#include "base/sha256.h"
#include "model/weights/file_digest.h"
#include "model/weights/model_impl.h"
#include "model/weights/regular_file.h"
#include "model/weights/safetensors_file.h"
#include "wire/limits.h"

namespace paceline {
namespace {

constexpr int64_t kMaxDescriptionBytes = int64_t{64} << 20;

// Calls `step` and puts the name of a file before the messages of errors that do not name one.
template <class Step>
auto with_name(const std::string& name, Step step) {
  try {
    return step();
  } catch (const ModelFileError&) {
    throw;  // it names its file
  } catch (const InvalidArgument& error) {
    throw ModelFileError(concat(name, ": ", error.what()));
  }
}

// The path of a file beside paceline.json. A folder must not make the library read files elsewhere,
// so the name has no directories, and a link must point into the folder.
[[nodiscard]] std::string file_beside(const std::string& directory, const Json& name) {
  const std::string_view plain = name.as_string();
  const bool is_printable = std::all_of(plain.begin(), plain.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte >= 0x20 && byte != 0x7f;
  });
  if (plain.empty() || plain == "." || plain.find('/') != std::string_view::npos ||
      plain.find("..") != std::string_view::npos || !is_printable) {
    name.refuse("the plain name of a file beside paceline.json");
  }
  namespace fs = std::filesystem;
  const fs::path path = fs::path(directory) / plain;
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  if (error) {
    const bool is_missing = error == std::errc::no_such_file_or_directory;
    throw ModelFileError(concat(path.string(), ": ", error.message(),
                                "; paceline.json names it, so it must be there"),
                         is_missing);
  }
  const fs::path root = fs::canonical(directory, error);
  if (error ||
      std::mismatch(root.begin(), root.end(), real.begin(), real.end()).first != root.end()) {
    throw ModelFileError(concat(path.string(), ": links to ", real.string(), ", outside of ",
                                root.string(), "; allowed: files in the folder (copy it there)"));
  }
  return real.string();
}

[[nodiscard]] DType weight_dtype(const Json& name) {
  if (name.as_string() == "float32") return DType::kFloat32;
  if (name.as_string() == "bfloat16") return DType::kBFloat16;
  name.refuse("'float32', 'bfloat16'");
}

[[nodiscard]] std::optional<DType> stored_dtype(std::string_view name) {
  if (name == "F32") return DType::kFloat32;
  if (name == "BF16") return DType::kBFloat16;
  if (name == "F16") return DType::kFloat16;
  if (name == "I32") return DType::kInt32;
  if (name == "I64") return DType::kInt64;
  // Elements of mxfp4 are also stored as I8, and scales as F8_E8M0: the same bytes.
  if (name == "U8" || name == "I8" || name == "F8_E8M0") return DType::kUInt8;
  if (name == "F8_E4M3") return DType::kFloat8E4M3;
  return std::nullopt;
}

// Makes the builder of a model that has this description and dtype.
using MakeBuilder = std::function<ModelBuilder(std::string_view config_json, DType dtype)>;

// `role`: "target" or "draft". origin: gets what receipts say of the model; null: nothing.
[[nodiscard]] std::shared_ptr<const Model> load_model(const std::string& directory,
                                                      const std::string& description,
                                                      const Json& json, std::string_view role,
                                                      const MakeBuilder& make,
                                                      FolderOrigin* origin) {
  constexpr std::array<std::string_view, 3> kRequired = {"weights", "dtype", "config"};
  constexpr std::array<std::string_view, 1> kOptional = {"architecture"};
  json.check_keys(kRequired, kOptional);
  if (const std::optional<Json> architecture = json.find("architecture")) {
    static_cast<void>(architecture->as_string());
  }
  const DType dtype = weight_dtype(json.at("dtype"));
  const std::string path = file_beside(directory, json.at("weights"));
  if (origin != nullptr) *origin = {.directory = directory, .weights = file_stamp(path)};
  const SafetensorsFile file(path);
  auto builder = with_name(concat(description, ": ", role, ".config"),
                           [&] { return make(json.at("config").text(), dtype); });
  if (origin != nullptr) origin->config_digest = sha256_hex(canonical_json(json.at("config")));
  return with_name(path, [&] {
    for (std::string_view name : file.names()) {
      const StoredTensor tensor = *file.find(name);
      const std::optional<DType> stored = stored_dtype(tensor.dtype);
      if (!stored) {
        throw InvalidArgument(
            concat(quoted(name), " has dtype ", tensor.dtype,
                   "; allowed: F32, BF16, F16 (ids: I32, I64; formats: U8, I8, F8_E8M0, F8_E4M3)"));
      }
      builder.put(name, *stored, tensor.shape,
                  [&](int64_t first, std::span<std::byte> to) { file.read(tensor, first, to); });
    }
    return builder.finish();
  });
}

[[nodiscard]] ModelFolder load_folder(const std::string& directory, const MakeBuilder& make_target,
                                      const MakeBuilder& make_draft) {
  return at_boundary([&] {
    const std::string path = (std::filesystem::path(directory) / "paceline.json").string();
    const std::string text = [&] {
      try {
        return RegularFile(path).read_all(kMaxDescriptionBytes);
      } catch (const ModelFileError& error) {
        if (!error.is_missing()) throw;
        throw ModelFileError(concat(error.what(), "; `paceline convert` writes such a folder"),
                             /*is_missing=*/true);
      }
    }();
    try {
      const JsonDocument document(text, path, {.max_bytes = kMaxDescriptionBytes});
      const Json root = document.root();
      constexpr std::array<std::string_view, 3> kRequired = {"format", "target", "stop_token_ids"};
      constexpr std::array<std::string_view, 3> kOptional = {"draft", "num_speculative_tokens",
                                                             "bos_token_id"};
      root.check_keys(kRequired, kOptional);
      if (root.at("format").as_string() != "paceline-folder-1") {
        root.at("format").refuse("'paceline-folder-1'");
      }
      ModelFolder folder;
      const std::optional<Json> draft = root.find("draft");
      const std::optional<Json> num_tokens = root.find("num_speculative_tokens");
      if (draft) {
        folder.num_speculative_tokens =
            static_cast<int32_t>(root.at("num_speculative_tokens").as_int(1, kMaxDraftTokens));
      } else if (num_tokens) {
        num_tokens->refuse("no such key without a draft");
      }
      folder.target =
          load_model(directory, path, root.at("target"), "target", make_target, &folder.origin);
      const int32_t vocab_size = model_vocab_size(*folder.target);
      for (const Json& id : root.at("stop_token_ids").elements()) {
        folder.stop_token_ids.push_back(static_cast<int32_t>(id.as_int(0, vocab_size - 1)));
      }
      if (const std::optional<Json> bos = root.find("bos_token_id")) {
        static_cast<void>(bos->as_int(0, vocab_size - 1));
      }
      if (draft) {
        folder.draft = load_model(directory, path, *draft, "draft", make_draft, nullptr);
        // No other owner has the model yet.
        std::const_pointer_cast<Model>(folder.draft)->default_draft_tokens =
            folder.num_speculative_tokens;
      }
      return folder;
    } catch (const ModelFileError&) {
      throw;
    } catch (const InvalidArgument& error) {  // from the JSON reader, which also names the file
      throw ModelFileError(error.what());
    }
  });
}

}  // namespace

ModelFolder load_model_folder(const std::string& directory, Device device) {
  const auto make = [&](std::string_view config_json, DType dtype) {
    return ModelBuilder(config_json, dtype, device);
  };
  return load_folder(directory, make, make);
}

ModelFolder load_model_folder(const std::string& directory, std::span<const int32_t> gpus,
                              int32_t draft_tensor_parallel_size) {
  const auto make_target = [&](std::string_view config_json, DType dtype) {
    return ModelBuilder(config_json, dtype, gpus, GpuShare::kPart);
  };
  const auto make_draft = [&](std::string_view config_json, DType dtype) {
    const auto num_ranks = static_cast<int32_t>(gpus.size());
    return ModelBuilder(config_json, dtype, gpus,
                        drafter_share(config_json, dtype, num_ranks, draft_tensor_parallel_size));
  };
  return load_folder(directory, make_target, make_draft);
}

}  // namespace paceline
