// SPDX-License-Identifier: Apache-2.0
//
// The source of the target whose precompiled headers the tests share (tests/CMakeLists.txt).
