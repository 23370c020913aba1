# Targets for the libtorch inside a torch wheel, by its folders alone: torch's own CMake package asks for every CUDA library that torch
# was built with, also of those who need none of them.
#
#   tandem::libtorch      headers (as SYSTEM), c10, torch_cpu and torch; torch brings CUDA in where the wheel has it
#   tandem::torch_python  libtorch with Python
#
# The folder is TANDEM_TORCH_DIR if set, else the torch beside the installed tandem, else the torch that Python imports. The installed
# CMake package uses this file too.
if(NOT TANDEM_TORCH_DIR)
  get_filename_component(beside "${CMAKE_CURRENT_LIST_DIR}/../../../../torch" ABSOLUTE)
  if(EXISTS "${beside}/include/ATen/ATen.h")
    set(TANDEM_TORCH_DIR "${beside}")
  else()
    if(NOT Python_EXECUTABLE)
      find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
    endif()
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import importlib.util, os; print(os.path.dirname(importlib.util.find_spec('torch').origin))"
      OUTPUT_VARIABLE TANDEM_TORCH_DIR
      OUTPUT_STRIP_TRAILING_WHITESPACE
      RESULT_VARIABLE failed
      ERROR_QUIET)
    if(failed)
      message(FATAL_ERROR "tandem: expected a Python with torch, got ${Python_EXECUTABLE} without it. "
                          "Set Python_EXECUTABLE to one that imports torch, or TANDEM_TORCH_DIR to a torch folder.")
    endif()
  endif()
endif()
if(NOT EXISTS "${TANDEM_TORCH_DIR}/include/ATen/ATen.h")
  message(FATAL_ERROR "tandem: expected a torch folder with include/ATen/ATen.h, got ${TANDEM_TORCH_DIR}. "
                      "Set TANDEM_TORCH_DIR to the folder that `python -c 'import torch; print(torch.__path__[0])'` prints.")
endif()

set(TANDEM_TORCH_LIB_DIR "${TANDEM_TORCH_DIR}/lib")
set(TANDEM_TORCH_VERSION "unknown")
if(EXISTS "${TANDEM_TORCH_DIR}/version.py")
  file(STRINGS "${TANDEM_TORCH_DIR}/version.py" torch_version_line REGEX "^__version__ = ")
  string(REGEX REPLACE ".*'([0-9.]+).*" "\\1" TANDEM_TORCH_VERSION "${torch_version_line}")
endif()

if(NOT TARGET tandem::libtorch)
  foreach(library c10 torch_cpu)
    add_library(tandem::${library} SHARED IMPORTED)
    set_target_properties(tandem::${library} PROPERTIES IMPORTED_LOCATION "${TANDEM_TORCH_LIB_DIR}/lib${library}.so"
                                                        IMPORTED_NO_SONAME ON)
  endforeach()
  add_library(tandem::libtorch INTERFACE IMPORTED)
  set_target_properties(
    tandem::libtorch PROPERTIES INTERFACE_INCLUDE_DIRECTORIES
                                "${TANDEM_TORCH_DIR}/include;${TANDEM_TORCH_DIR}/include/torch/csrc/api/include")
  target_link_directories(tandem::libtorch INTERFACE "${TANDEM_TORCH_LIB_DIR}")
  # libtorch.so has no symbols of its own: it loads torch_cpu, and torch_cuda where there is one.
  target_link_options(tandem::libtorch INTERFACE LINKER:-rpath-link,${TANDEM_TORCH_LIB_DIR})
  target_link_libraries(
    tandem::libtorch INTERFACE tandem::torch_cpu tandem::c10 -Wl,--push-state,--no-as-needed
                               "${TANDEM_TORCH_LIB_DIR}/libtorch.so" -Wl,--pop-state)
  add_library(tandem::torch_python INTERFACE IMPORTED)
  target_link_libraries(tandem::torch_python INTERFACE "${TANDEM_TORCH_LIB_DIR}/libtorch_python.so" tandem::libtorch)
endif()
