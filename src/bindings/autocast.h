// Autocast regions of Python: each async context has its own chain, in a context variable.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "pipeline/autocast.h"

namespace tandem::bindings {

/// Puts the region of the Python context in force in this thread for the length of a call. The GIL
/// is held where one is made and ended.
class ContextRegion {
 public:
  ContextRegion();
  ~ContextRegion();
  ContextRegion(const ContextRegion&) = delete;
  ContextRegion& operator=(const ContextRegion&) = delete;

 private:
  bool is_exchanged_ = false;
  RegionPtr before_;
};

void bind_autocast(pybind11::module_& module);

}  // namespace tandem::bindings
