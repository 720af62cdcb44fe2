// SPDX-License-Identifier: Apache-2.0
#pragma once
// Stands in for the CUDA toolkit's header of this name.
#include <cuda_runtime.h>
