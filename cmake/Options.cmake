# Options of the build, and the flags that all targets of Tandem share (target tandem_options).
option(TANDEM_TESTS "Build the C++ tests" OFF)
option(TANDEM_BENCHMARKS "Build the C++ benchmarks" OFF)
option(TANDEM_PYTHON "Build the Python extension" ON)
option(TANDEM_CLI "Build the command line, the program tandem" ON)
option(TANDEM_WERROR "Treat warnings as errors (g++ 12 and clang++ 14)" OFF)
option(TANDEM_SANITIZE "Build with AddressSanitizer and UndefinedBehaviorSanitizer" OFF)
option(TANDEM_TSAN "Build with ThreadSanitizer" OFF)
option(TANDEM_FUZZ "Build the fuzz targets too, and the library with what guides them (clang++, with TANDEM_SANITIZE)" OFF)
option(TANDEM_FEW_KERNELS "Compile kernels for AVX2 alone, with ASan and without most of UBSan, in a tenth of the time" OFF)
option(CMAKE_UNITY_BUILD "Compile sources in groups of eight: a third of the time from nothing, more after an edit" ON)
set(CMAKE_UNITY_BUILD_BATCH_SIZE 8)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_library(tandem_options INTERFACE)
target_compile_options(
  tandem_options
  INTERFACE -Wall -Wextra
            -ffp-contract=off  # equal bits on every processor: products and sums are fused only where the source says so
            -ffile-prefix-map=${PROJECT_SOURCE_DIR}/=  # what is installed names no folder of the build machine
            # gcc instantiates SIMD vectors without the target attribute of the function they stand in
            $<$<CXX_COMPILER_ID:GNU>:-Wno-psabi -Wno-ignored-attributes>)
# Only with the compilers that CI builds with: a newer one may know warnings that this source has never met.
string(REGEX MATCH "^[A-Za-z]+-[0-9]+" compiler "${CMAKE_CXX_COMPILER_ID}-${CMAKE_CXX_COMPILER_VERSION}")
if(TANDEM_WERROR AND compiler MATCHES "^(GNU-12|Clang-14)$")
  target_compile_options(tandem_options INTERFACE -Werror)
endif()
if(TANDEM_SANITIZE AND TANDEM_TSAN)
  message(FATAL_ERROR "tandem: expected one of TANDEM_SANITIZE and TANDEM_TSAN, got both. Build each in a folder of its own.")
endif()
# -Wno-tsan: it does not know the fences by which libtorch counts references to Python objects, of which there are none.
set(tandem_tsan_options -fsanitize=thread -fno-omit-frame-pointer -O1 -g1 $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
if(TANDEM_TSAN)
  target_compile_options(tandem_options INTERFACE ${tandem_tsan_options})
  target_link_options(tandem_options INTERFACE -fsanitize=thread)
endif()
if(TANDEM_SANITIZE)
  set(is_kernels $<STREQUAL:$<TARGET_PROPERTY:NAME>,tandem_kernels>)
  # vptr: the type information of libtorch's classes is hidden in libtorch.
  set(sanitize -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all)
  target_compile_options(tandem_options INTERFACE ${sanitize} -fno-omit-frame-pointer -O1 -g1)
  target_link_options(tandem_options INTERFACE ${sanitize})
  if(TANDEM_FUZZ)
    # A fuzzer looks for ways through the reading and the planning of descriptions: those of the kernels would lead it astray.
    target_compile_options(tandem_options INTERFACE $<$<NOT:${is_kernels}>:-fsanitize=fuzzer-no-link>)
  endif()
  if(TANDEM_FEW_KERNELS)  # checks of addresses as calls: inline, and with all of UBSan, kernels take five times as long to compile
    target_compile_options(
      tandem_options INTERFACE $<${is_kernels}:-fno-sanitize=undefined>
                               $<${is_kernels}:-fsanitize=shift,signed-integer-overflow,integer-divide-by-zero>
                               "$<${is_kernels}:SHELL:-mllvm -asan-instrumentation-with-call-threshold=0>")
  endif()
endif()

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # ccache accepts precompiled headers only when told that times and defines in them do not count.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE_PROGRAM})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(tandem_options INTERFACE -fpch-preprocess)
  else()
    target_compile_options(tandem_options INTERFACE "SHELL:-Xclang -fno-pch-timestamp")
  endif()
endif()

find_program(MOLD_PROGRAM mold)
find_program(LLD_PROGRAM ld.lld)
if(MOLD_PROGRAM)
  add_link_options(-fuse-ld=mold)
elseif(LLD_PROGRAM)
  add_link_options(-fuse-ld=lld)
endif()
