// A kernel op's CPU kernel against its composite reference.
#pragma once

#include "kernel_ops/framework/kernel_op.h"
#include "support/tensors.h"

namespace tandem::testing {

/// What the dispatcher's CPU kernel returns for these arguments must be what the composite form
/// returns. `magnitude`: of terms that cancel.
template <typename K>
::testing::AssertionResult matches_reference_at(double magnitude, const typename K::Args& args) {
  const auto got = kernel_ops::dispatch<K>(args);
  auto expected = kernel_ops::run_reference<K>(args);
  return near(got, expected, magnitude);
}
template <typename K>
::testing::AssertionResult matches_reference(const typename K::Args& args) {
  return matches_reference_at<K>(0, args);
}

/// Calls `check(x)` for every dtype, layout, row count and width that kernels treat differently.
template <typename Check>
void for_every_case(int64_t width_step, Check&& check) {
  for (const at::ScalarType dtype : kKernelDtypes)
    for (const Layout& layout : layouts())
      for (const int64_t rows : {0, 1, 7})
        for (const int64_t width : {1, 7, 16, 67}) {
          SCOPED_TRACE(::testing::Message()
                       << dtype << " " << layout << " " << rows << "x" << width * width_step);
          check(layout.make(dtype, rows, width * width_step, 3));
        }
}

}  // namespace tandem::testing
