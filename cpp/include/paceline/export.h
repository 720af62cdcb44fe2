// SPDX-License-Identifier: Apache-2.0
#pragma once

// Marks the symbols that the library exports; all others have hidden visibility.
#if defined(__GNUC__)
#define PACELINE_API __attribute__((visibility("default")))
#else
#define PACELINE_API
#endif
