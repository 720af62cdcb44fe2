// SPDX-License-Identifier: Apache-2.0
#include <new>
#include <system_error>

#include "base/boundary.h"
#include "base/check.h"

namespace paceline {
namespace {

// Made when the library is loaded, because a process without memory could not make it. A copy
// shares its message.
const OutOfMemory kOutOfHostMemory(
    "the process is out of memory; free some, or ask for less at once (requests, logprobs, logits "
    "of prompts)");

[[noreturn]] void throw_foreign(const std::exception& error) {
  try {
    if (dynamic_cast<const std::system_error*>(&error) != nullptr) {
      throw DeviceError(concat("the system refuses a call: ", error.what()));
    }
    throw InternalError(concat("internal error, please report: ", error.what()));
  } catch (const std::bad_alloc&) {  // from making the message
    throw OutOfMemory(kOutOfHostMemory);
  }
}

}  // namespace

void throw_check_failure(const char* condition, const std::string& message,
                         std::source_location where) {
  throw InternalError(concat("internal error, please report: ", condition, " does not hold at ",
                             where.file_name(), ":", where.line(), message.empty() ? "" : ": ",
                             message));
}

std::string message_of(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of an unknown type";
  }
}

void rethrow_as_error() {
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const CallersException& error) {
    std::rethrow_exception(error.cause);
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(kOutOfHostMemory);
  } catch (const std::exception& error) {
    throw_foreign(error);
  }
}

}  // namespace paceline
