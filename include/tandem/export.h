// Marks the symbols that libtandem.so exports: the C++ front, and what the Python extension and the
// program call.
#pragma once

#define TANDEM_API __attribute__((visibility("default")))
