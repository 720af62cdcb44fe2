// SPDX-License-Identifier: Apache-2.0
#pragma once

// Marks what is visible outside the library; everything else is built with hidden visibility.
#if defined(__GNUC__)
#define PACELINE_API __attribute__((visibility("default")))
#else
#define PACELINE_API
#endif
