# Targets that only those build who ask for them, and that leave nothing behind: the compiler reads the sources and warns.
#
#   headers  each header as a source of its own, twice, so that it includes what it needs of this project and may be included again. What of
#            torch and the standard library everything includes is precompiled: that is most of the time.
#   syntax   the extension and the command line: what a second compiler says of them
set(header_folders src include cli)
if(TANDEM_TESTS)
  list(APPEND header_folders tests)
endif()
add_library(headers OBJECT EXCLUDE_FROM_ALL)
set_target_properties(headers PROPERTIES UNITY_BUILD OFF)
target_link_libraries(headers PRIVATE tandem tandem_kernels tandem_options nlohmann_json::nlohmann_json)
target_include_directories(headers PRIVATE ${PROJECT_SOURCE_DIR} tests)
target_precompile_headers(
  headers PRIVATE ${PROJECT_SOURCE_DIR}/cmake/precompiled.h ${PROJECT_SOURCE_DIR}/cli/precompiled.h <torch/csrc/autograd/saved_variable.h>
                  <torch/csrc/autograd/function.h> <torch/csrc/utils/pybind.h> <torch/optim/adamw.h> <torch/serialize.h> <gmock/gmock.h>)
foreach(target tandem::torch_python Python::Module CLI11::CLI11 GTest::gmock)
  if(TARGET ${target})
    target_link_libraries(headers PRIVATE ${target})
  endif()
endforeach()
foreach(folder ${header_folders})
  file(GLOB_RECURSE paths RELATIVE ${PROJECT_SOURCE_DIR}/${folder} CONFIGURE_DEPENDS ${folder}/*.h)
  foreach(path ${paths})
    set(source ${PROJECT_BINARY_DIR}/headers/${folder}/${path}.cpp)
    file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${folder}/${path}\"\n#include \"${folder}/${path}\"\n")
    target_sources(headers PRIVATE ${source})
    set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS -fsyntax-only)  # not of the target: it precompiles
  endforeach()
endforeach()

if(TARGET _C AND TARGET tandem_cli)
  add_custom_target(syntax)
  foreach(target _C tandem_cli)
    get_target_property(sources ${target} SOURCES)
    add_library(syntax_${target} OBJECT EXCLUDE_FROM_ALL ${sources})
    target_compile_options(syntax_${target} PRIVATE -fsyntax-only)
    target_compile_definitions(syntax_${target} PRIVATE TORCH_EXTENSION_NAME=_C)
    target_link_libraries(
      syntax_${target} PRIVATE tandem tandem_options tandem::torch_python Python::Module CLI11::CLI11 nlohmann_json::nlohmann_json)
    add_dependencies(syntax syntax_${target})
  endforeach()
endif()
