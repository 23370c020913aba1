// Tensors in codes, part by part.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "support/tensors.h"
#include "tandem/quantize.h"

namespace tandem::testing {

/// In the order of a group.
inline std::vector<at::Tensor> parts_of(const QuantizedTensor& x) {
  return {x.rowwise_data(),    x.rowwise_scale_inv(),    x.amax_rowwise(),
          x.columnwise_data(), x.columnwise_scale_inv(), x.amax_columnwise()};
}

inline ::testing::AssertionResult same_parts(const QuantizedTensor& got,
                                             const QuantizedTensor& expected) {
  const auto a = parts_of(got), b = parts_of(expected);
  for (size_t part = 0; part < a.size(); ++part) {
    if (a[part].defined() != b[part].defined())
      return ::testing::AssertionFailure() << "part " << part << " is absent in one";
    if (!a[part].defined()) continue;
    if (const auto result = same(a[part], b[part]); !result) return result;
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tandem::testing
