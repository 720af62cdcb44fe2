// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "executor/receipt_parts.h"
#include "model/weights/file_digest.h"

namespace paceline::python {

void register_receipts(py::module_& module) {
  module.def(
      "device_class", [](const std::string& device) { return device_class(parse_device(device)); },
      py::arg("device"),
      "Describes what decides the last bits of logits: the device, and which instructions it has.");
  module.def(
      "receipt_chain",
      [](const std::string& header, const std::vector<int64_t>& tokens,
         const std::string& finish_reason) {
        const GilRelease release;
        ReceiptChain chain = receipt_chain(header, tokens, finish_reason);
        return std::pair(std::move(chain.first), std::move(chain.last));
      },
      py::arg("header"), py::arg("tokens"), py::arg("finish_reason"),
      "Computes the first and the last link of a receipt's hash chain, in hexadecimal.");
  module.def(
      "file_digest",
      [](const std::string& path, int64_t size, int64_t mtime_ns, int64_t ctime_ns,
         uint64_t inode) {
        const GilRelease release;
        return file_digest({.path = path,
                            .bytes = size,
                            .modified_ns = mtime_ns,
                            .changed_ns = ctime_ns,
                            .inode = inode});
      },
      py::arg("path"), py::kw_only(), py::arg("size"), py::arg("mtime_ns"), py::arg("ctime_ns"),
      py::arg("inode"), R"doc(Returns the SHA-256 of a file, from the cache or computed.

Args:
    path: The file, as bytes.
    size, mtime_ns, ctime_ns, inode: What `os.stat` said when the file was opened.

Raises:
    ModelFileError: The file cannot be read, or is not that one.
)doc");
}

}  // namespace paceline::python
