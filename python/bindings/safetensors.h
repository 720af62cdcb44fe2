// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include <paceline/error.h>

#include "base/json.h"
#include "bindings.h"
#include "model/weights/safetensors_file.h"

namespace paceline::python {

// A file that knows its path.
struct PySafetensorsFile {
  explicit PySafetensorsFile(const std::string& file_path) : path(file_path), file(file_path) {}

  // Throws ModelFileError when the file has no such tensor.
  [[nodiscard]] StoredTensor tensor(const std::string& name) const {
    const std::optional<StoredTensor> found = file.find(name);
    if (!found) {
      throw ModelFileError(path + " has no tensor " + quoted(name) + "; it has " +
                           std::to_string(file.names().size()) + " others");
    }
    return *found;
  }

  std::string path;
  SafetensorsFile file;
};

}  // namespace paceline::python
