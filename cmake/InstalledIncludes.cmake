# Run by `cmake --install`: in installed headers, "core/call.h" is "tandem/extension/core/call.h". `any_folder` is a pattern of such folders.
file(GLOB_RECURSE headers "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/include/tandem/*.h")
foreach(header IN LISTS headers)
  file(READ "${header}" text)
  string(REGEX REPLACE "(#include \")((${any_folder})/)" "\\1tandem/extension/\\2" placed "${text}")
  if(NOT placed STREQUAL text)
    file(WRITE "${header}" "${placed}")
  endif()
endforeach()
