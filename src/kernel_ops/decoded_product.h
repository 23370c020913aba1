// The product of decoded codes as a kernel op, so that compiled code has the bits of eager code.
#pragma once

#include "kernel_ops/kernel_op.h"

namespace tandem::kernel_ops {

/// a b of float32 matrices, with the same bits for any number of threads.
///
/// Shapes: a [m, k], b [k, n] -> [m, n].
/// Error:  k * 2^-23 * sum |a||b|.
/// Throws: c10::ValueError where a and b are no matrices that fit.
struct MultiplyDecoded {
  static constexpr const char* kName = "multiply_decoded";
  static constexpr const char* kQualifiedName = "tandem::multiply_decoded";
  static constexpr const char* kSchema = "multiply_decoded(Tensor a, Tensor b) -> Tensor";
  static Specs<1> shapes(const Tensor& a, const Tensor& b);
  static void cpu(const Tensor& a, const Tensor& b, Results<1>& results);
  static Results<1> reference(const Tensor& a, const Tensor& b);
};

}  // namespace tandem::kernel_ops
