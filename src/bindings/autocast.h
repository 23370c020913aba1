// Python's autocast regions. Each async context has its own chain, in a context variable.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "pipeline/autocast.h"

namespace tandem::bindings {

/// Puts the region of the Python context in force in this thread during a call. The caller must
/// hold the GIL for construction and destruction.
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
