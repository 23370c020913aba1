// Marks what libtandem.so shows to others: the C++ front, and what the Python extension and the
// program call.
#pragma once

#define TANDEM_API __attribute__((visibility("default")))
