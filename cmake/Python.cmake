# The Python whose torch the library is built against: Python_EXECUTABLE, else the repository's .venv, else the one on PATH.
if(NOT Python_EXECUTABLE AND EXISTS ${PROJECT_SOURCE_DIR}/.venv/bin/python)
  set(Python_EXECUTABLE ${PROJECT_SOURCE_DIR}/.venv/bin/python CACHE FILEPATH "Python interpreter")
endif()
if(TANDEM_PYTHON)
  find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
  if(NOT Python_Development.Module_FOUND)
    message(FATAL_ERROR "tandem: expected Python 3.10 or newer with Python.h, got ${Python_EXECUTABLE} ${Python_VERSION}. "
                        "Run: apt-get install python3-dev")
  endif()
else()
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
endif()
