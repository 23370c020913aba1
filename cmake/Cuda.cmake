# TANDEM_WITH_NVCC: the CUDA kernels are compiled. TANDEM_WITH_CUDA: they are linked into the library too, and the folders of src/ add
# what calls them; only where the installed torch has CUDA.
set(tandem_cuda_sources)
include(${PROJECT_SOURCE_DIR}/src/kernels/cuda/sources.cmake OPTIONAL)  # sets tandem_cuda_sources, relative to its folder
list(TRANSFORM tandem_cuda_sources PREPEND ${PROJECT_SOURCE_DIR}/src/kernels/cuda/)

set(TANDEM_WITH_NVCC OFF)
set(TANDEM_WITH_CUDA OFF)
if(tandem_cuda_sources AND (TANDEM_CUDA STREQUAL "ON" OR (TANDEM_CUDA STREQUAL "AUTO" AND TANDEM_TORCH_HAS_CUDA)))
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
    endif()
    set(CMAKE_CUDA_STANDARD ${CMAKE_CXX_STANDARD})
    enable_language(CUDA)
    if(NOT CMAKE_CUDA${CMAKE_CUDA_STANDARD}_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has C++20
      set(CMAKE_CUDA${CMAKE_CUDA_STANDARD}_STANDARD_COMPILE_OPTION -std=c++${CMAKE_CUDA_STANDARD})
      set(CMAKE_CUDA${CMAKE_CUDA_STANDARD}_EXTENSION_COMPILE_OPTION -std=c++${CMAKE_CUDA_STANDARD})
    endif()
    set(TANDEM_WITH_NVCC ON)
    set(TANDEM_WITH_CUDA ${TANDEM_TORCH_HAS_CUDA})
  elseif(TANDEM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "tandem: expected nvcc on PATH or in CUDACXX for TANDEM_CUDA=ON, got none. "
                        "Install the CUDA toolkit or configure with -DTANDEM_CUDA=OFF.")
  endif()
endif()
