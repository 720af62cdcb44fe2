// SPDX-License-Identifier: Apache-2.0
#pragma once

// The boundary of the library: what its public functions throw derives from Error.

#include <cxxabi.h>

#include <exception>

namespace paceline {

// An exception of a function that the caller gave. It passes the boundary as it was thrown.
struct CallersException {
  std::exception_ptr cause;
};

// Throws the Error that stands for the exception being handled. Exceptions that are no
// std::exception, such as the unwinding of a thread that ends, pass unchanged.
[[noreturn]] void rethrow_as_error();

// The body of a public function. Foreign exceptions, such as std::bad_alloc, leave it as an Error.
template <class Body>
auto at_boundary(Body body) {
  try {
    return body();
  } catch (...) {
    rethrow_as_error();
  }
}

// Calls a function of the caller inside of `at_boundary`.
template <class Call>
auto call_back(Call call) {
  try {
    return call();
  } catch (const abi::__forced_unwind&) {
    throw;
  } catch (...) {
    throw CallersException{std::current_exception()};
  }
}

}  // namespace paceline
