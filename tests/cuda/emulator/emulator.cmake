# The kernels that are emulated, and their tests. A kernel that uses wgmma, TMA or other
# instructions without a stand-in in include/ is not in the list; its ops are in not_emulated.cc.
set(emulated_kernels
  attention/latent_attention.cu
  attention/latent_portable.cu
  attention/latent_rows.cu
  attention/paged_attention.cu
  compressed/choose_entries.cu
  compressed/compress.cu
  compressed/compressed_attention.cu
  compressed/compressed_rows.cu
  compressed/index_scores.cu
  elementwise/block_conv.cu
  elementwise/elementwise.cu
  elementwise/markov.cu
  fork/fork.cu
  gather/gather.cu
  gather/gathered_norm.cu
  gemm/expert_gemm.cu
  gemm/float_gemm.cu
  gemm/gemm.cu
  gemm/portable_gemm.cu
  gemm/portable_packed.cu
  metadata/group_metadata.cu
  moe/combine.cu
  moe/routing.cu
  norm/rms_norm.cu
  recurrent/gated_delta.cu
  recurrent/gated_delta_any.cu
  recurrent/gated_delta_portable.cu
  rope/qk_norm_rope_append.cu
  sample/accept.cu
  sample/adjust.cu
  sample/candidates.cu
  sample/clusters.cu
  sample/count.cu
  sample/draw.cu
  sample/logprobs.cu
  sample/markov_draft.cu
  sample/proposals.cu
  sample/reject.cu
  sample/truncate.cu
  speculate/row_ops.cu
  streams/join_streams.cu
  streams/mix_streams.cu
  streams/streams.cu)

# Compiled by the host compiler with stand-ins for the headers of the CUDA toolkit.
function(paceline_emulate target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_include_directories(${target} BEFORE PRIVATE cuda/emulator/include)
  target_include_directories(${target} PRIVATE cuda/emulator ${PROJECT_SOURCE_DIR}/cuda
    ${PROJECT_SOURCE_DIR}/cpp/include ${PROJECT_SOURCE_DIR}/cpp/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${target} PRIVATE paceline_build_flags)
  # - no extern TLS wrappers: dynamic shared memory has no constructor
  # - all thread_local memory is that of the executable
  # - no contraction: the results do not depend on the machine
  # - no warnings about pragmas of nvcc, about variables that g++ takes for uninitialised, and about
  #   the range of shared memory, which is not one object
  target_compile_options(${target} PRIVATE -fno-extern-tls-init -ftls-model=local-exec -ffp-contract=off
    -U_FORTIFY_SOURCE -Wno-unknown-pragmas -Wno-maybe-uninitialized -Wno-array-bounds)
endfunction()

# Shared memory is what the linker places between first_shared.cc and last_shared.cc.
set(emulated_sources cuda/emulator/first_shared.cc)
foreach(kernel IN LISTS emulated_kernels)
  list(APPEND emulated_sources ${PROJECT_SOURCE_DIR}/cuda/${kernel})
  set_source_files_properties(${PROJECT_SOURCE_DIR}/cuda/${kernel} PROPERTIES LANGUAGE CXX)
endforeach()
list(APPEND emulated_sources cuda/emulator/last_shared.cc)
add_library(emulated_kernels OBJECT ${emulated_sources})
paceline_emulate(emulated_kernels)
# Indices beyond arrays of known size, such as static shared memory, and misaligned accesses, which a
# GPU refuses, end the test.
target_compile_options(emulated_kernels PRIVATE -xc++ -fsanitize=bounds,alignment
  -fno-sanitize-recover=bounds,alignment)

add_library(emulator STATIC
  cuda/emulator/barriers.cc
  cuda/emulator/emulator.cc
  cuda/emulator/guarded_memory.cc
  cuda/emulator/lanes.cc
  cuda/emulator/shared_memory.cc)
paceline_emulate(emulator)

paceline_test(NAME op_emulation_test SOURCES cuda/op_emulation_test.cc
  cuda/emulator/not_emulated.cc $<TARGET_OBJECTS:emulated_kernels>)
target_include_directories(op_emulation_test PRIVATE ${PROJECT_SOURCE_DIR}/cuda)
target_link_libraries(op_emulation_test PRIVATE emulator op_cases)
target_link_options(op_emulation_test PRIVATE -fsanitize=bounds,alignment)
set_tests_properties(op_emulation_test PROPERTIES COST 100)  # the longest test starts first

paceline_test(NAME gather_emulation_test SOURCES cuda/gather_emulation_test.cc
  cuda/emulator/not_emulated.cc $<TARGET_OBJECTS:emulated_kernels>)
target_include_directories(gather_emulation_test PRIVATE ${PROJECT_SOURCE_DIR}/cuda)
target_link_libraries(gather_emulation_test PRIVATE emulator op_cases)
target_link_options(gather_emulation_test PRIVATE -fsanitize=bounds,alignment)

paceline_test(NAME emulator_test SOURCES cuda/emulator/first_shared.cc cuda/emulator_test.cc
  cuda/emulator/last_shared.cc OWN_FLAGS)
paceline_emulate(emulator_test)
target_link_libraries(emulator_test PRIVATE emulator)

paceline_test(NAME nvfp4_lines_test SOURCES cuda/emulator/first_shared.cc cuda/nvfp4_lines_test.cc
  cuda/emulator/last_shared.cc OWN_FLAGS)
paceline_emulate(nvfp4_lines_test)
target_link_libraries(nvfp4_lines_test PRIVATE emulator)
