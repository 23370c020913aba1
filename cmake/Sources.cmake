# tandem_find_sources(VARIABLE FOLDER): sets the variable to all C++ sources in and below a folder, in the order of their names. A new source
# needs no entry anywhere, because each build looks for it. Paths are relative to the folder of the calling CMakeLists.txt.
function(tandem_find_sources variable folder)
  file(GLOB_RECURSE sources RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS ${folder}/*.cpp)
  if(NOT sources)
    message(FATAL_ERROR "tandem: expected C++ sources in ${CMAKE_CURRENT_SOURCE_DIR}/${folder}, got none. Restore the folder.")
  endif()
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()

# tandem_sources(TARGET FOLDER...): adds these sources to a target.
function(tandem_sources target)
  foreach(folder ${ARGN})
    tandem_find_sources(sources ${folder})
    list(TRANSFORM sources PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)  # targets of other folders copy the list (Headers.cmake)
    target_sources(${target} PRIVATE ${sources})
  endforeach()
endfunction()
