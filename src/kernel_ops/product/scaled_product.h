// Products of codes by torch's scaled_mm: which products it accepts, and operands in the layouts
// that it reads.
#pragma once

#include "kernel_ops/product/product.h"

namespace tandem::kernel_ops {

/// What decides, besides the product, whether scaled_mm can compute it.
struct ScaledMmDevice {
  /// Compute capability, 89 for 8.9; 0: unknown.
  int capability = 0;
  /// The CUDA version that torch is built with and the cuBLASLt version that is loaded, as they
  /// number themselves: 12090 and 120900 for 12.9. 0: none.
  int64_t cuda = 0, cublas_lt = 0;
  bool is_rocm = false;
};

/// Why scaled_mm does not multiply this product of codes on the device, as a string with static
/// lifetime; empty if it does. With dequantized sizes a [m, k] and b [k, n]:
///
///   format        compute capability  CUDA   k of  n of  m of  elements
///   one scale     from 8.9            any    16    16    any   not two E5M2
///   1x128         9.0                 12.9   128   16    4     E4M3
///   128x128       9.0                 12.9   128   16    4     E4M3, one operand at most
///   MXFP8         from 10.0           12.8   32    16    any   E4M3
///   NVFP4         from 10.0           12.8   32    16    any   E2M1
///
/// It is stricter than torch where torch's tests end: k must be a multiple of the block, and m a
/// multiple of 4, for which Tandem's layout and cuBLASLt's agree on the stride of 1x128 scales.
/// Source: aten/src/ATen/native/cuda/ScaledBlas.cpp and test/test_scaled_matmul_cuda.py of PyTorch.
std::string_view refusal_of_scaled_mm(const ProductType& type, const ScaledMmDevice& device);

/// An operand as scaled_mm reads it.
struct ScaledOperand {
  /// [m, k] or [k, n] in torch's dtype of the element; NVFP4 has two numbers per element. The
  /// contracted dimension is contiguous; the bytes and strides of its rows are multiples of 16.
  at::Tensor codes;
  /// One scale: one float32. 1x128: float32 [m or n, k / 128] with strides (1, m or n). 128x128:
  /// float32 [up(k / 128, 4), ceil(m or n, 128)] with strides (1, up(k / 128, 4)). MXFP8 and NVFP4:
  /// `swizzled`, in float8_e8m0fnu and float8_e4m3fn.
  at::Tensor scale;
  /// Values of at::blas::ScalingType and at::blas::SwizzleType.
  int64_t scaling, swizzle;
  /// NVFP4: the factor of the product, amax / (6 * largest scale), [1]; else undefined.
  at::Tensor factor;
};

/// The operand of a product that scaled_mm accepts. It copies codes whose contracted dimension is
/// not contiguous (column codes, and codes for both directions if columns are contracted), reading
/// and writing one byte per number. It also copies scales of MXFP8 and NVFP4, and those of
/// transposed 128x128 codes.
ScaledOperand scaled_operand(const CodedMatrix& read, bool is_left);

/// Scales [128 i, 4 j] in the order in which cuBLASLt reads them: tiles of 128 by 4 row by row,
/// within a tile the scale (r, c) at 16 (r mod 32) + 4 (r / 32) + c.
at::Tensor swizzled(const at::Tensor& scales);

/// result = a b of codes by torch's scaled_mm, without fast accumulation: in float32, rounded once
/// to the result's dtype.
///
/// Error: that of a sum in float32, if the device sums in float32: at compute capability 9.0 its
///        tensor cores keep fewer bits between the sums that go to float32 (DeepSeek-V3,
///        arXiv:2412.19437, 3.3.2). The device applies two scales of tensors in an order of its
///        own. NVFP4's factors are applied last, one after the other: a product whose decoded
///        operands would overflow need not overflow here.
void multiply_by_scaled_mm(const Product& product, const at::Tensor& result);

/// The implementation "scaled_mm", for CUDA.
extern const ProductImplementation kScaledMm;

}  // namespace tandem::kernel_ops
