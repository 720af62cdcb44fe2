// SPDX-License-Identifier: Apache-2.0
#pragma once

// Marks functions that CPU ops and CUDA kernels share.
#ifdef __CUDACC__
#define PACELINE_HOST_DEVICE __host__ __device__
#else
#define PACELINE_HOST_DEVICE
#endif
