# Install layout, relative to the prefix. In a wheel the prefix is site-packages/tandem and the program goes beside python.
#
#   lib/libtandem.so   include/tandem/**.h   lib/cmake/tandem/*.cmake   bin/tandem
#   (wheel only: _C.<abi>.so, the package tandem_train beside tandem, bin/tandem-train)
#
# Nothing installed names a folder of the build machine where torch lies beside tandem; elsewhere torch's folder is written down.
include(CMakePackageConfigHelpers)
set(package_dir lib/cmake/tandem)
if(SKBUILD)
  set(torch_rpath)
  set(program_dir ${SKBUILD_SCRIPTS_DIR})
  set(python_lib lib/python${Python_VERSION_MAJOR}.${Python_VERSION_MINOR})
  foreach(packages site-packages dist-packages)  # Debian's own Python says dist-packages outside of a venv
    list(APPEND program_rpath $ORIGIN/../${python_lib}/${packages}/tandem/lib $ORIGIN/../${python_lib}/${packages}/torch/lib)
  endforeach()
else()
  set(torch_rpath ${TANDEM_TORCH_LIB_DIR})
  set(program_dir bin)
  set(program_rpath $ORIGIN/../lib ${torch_rpath})
endif()

set_target_properties(tandem PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib;${torch_rpath}")
install(TARGETS tandem EXPORT tandemTargets LIBRARY DESTINATION lib)
install(DIRECTORY include/tandem DESTINATION include FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_BINARY_DIR}/generated/tandem/version.h DESTINATION include/tandem)
# What tandem/extension.h includes: the tables that an op or a fusion of one's own becomes an entry of. Others have folders called core too:
# installed, these headers include each other by their place below tandem/.
set(extension_folders core kernel_ops planner quantization kernels)
foreach(folder ${extension_folders})
  install(DIRECTORY src/${folder} DESTINATION include/tandem/extension FILES_MATCHING PATTERN "*.h" PATTERN "cpu" EXCLUDE)
endforeach()
list(JOIN extension_folders "|" any_extension_folder)
install(CODE "set(any_folder \"${any_extension_folder}\")")
install(SCRIPT cmake/InstalledIncludes.cmake)
if(TARGET tandem_cli)
  set_target_properties(tandem_cli PROPERTIES INSTALL_RPATH "${program_rpath}")
  install(TARGETS tandem_cli RUNTIME DESTINATION ${program_dir})
endif()
if(TARGET _C AND SKBUILD)
  install(FILES data/kjv.txt DESTINATION ${SKBUILD_PLATLIB_DIR}/tandem_train/data)  # the text that the trainer reads
  set_target_properties(_C PROPERTIES INSTALL_RPATH "$ORIGIN/lib;$ORIGIN/../torch/lib")
  install(TARGETS _C LIBRARY DESTINATION .)
  configure_file(cmake/_build.py.in ${PROJECT_BINARY_DIR}/generated/_build.py @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/generated/_build.py DESTINATION .)
endif()

install(EXPORT tandemTargets NAMESPACE tandem:: DESTINATION ${package_dir})
configure_package_config_file(cmake/tandemConfig.cmake.in ${PROJECT_BINARY_DIR}/tandemConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tandemConfig.cmake ${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake DESTINATION ${package_dir})
install(FILES cmake/Torch.cmake DESTINATION ${package_dir} RENAME tandemTorch.cmake)
