// Products of codes by torch's scaled_mm, which multiplies them as they are: what it takes, and
// operands in the layouts that it reads.
#pragma once

#include "kernel_ops/product/product.h"

namespace tandem::kernel_ops {

/// What scaled_mm can do depends on, beside the product.
struct ScaledMmDevice {
  /// Compute capability, 89 for 8.9; 0: unknown.
  int capability = 0;
  /// The CUDA that torch is built with and the cuBLASLt that is loaded, as they number themselves:
  /// 12090 and 120900 for 12.9. 0: none.
  int64_t cuda = 0, cublas_lt = 0;
  bool is_rocm = false;
};

/// Why scaled_mm does not multiply this product of codes there, of a text that stays; empty where
/// it does. With a [m, k] and b [k, n], in numbers:
///
///   format        compute capability  CUDA   k of  n of  m of  elements
///   one scale     from 8.9            any    16    16    any   not two E5M2
///   1x128         9.0                 12.9   128   16    4     E4M3
///   128x128       9.0                 12.9   128   16    4     E4M3, one operand at most
///   MXFP8         from 10.0           12.8   32    16    any   E4M3
///   NVFP4         from 10.0           12.8   32    16    any   E2M1
///
/// Stricter than torch where its tests stop: k in whole blocks, and m a multiple of 4, at which the
/// scales of 1x128 have one stride in Tandem's layout and in cuBLASLt's.
/// Source: aten/src/ATen/native/cuda/ScaledBlas.cpp and test/test_scaled_matmul_cuda.py of PyTorch.
std::string_view refusal_of_scaled_mm(const ProductType& type, const ScaledMmDevice& device);

/// An operand as scaled_mm reads it.
struct ScaledOperand {
  /// [m, k] or [k, n] in torch's dtype of the element, NVFP4 two to an element; what is contracted
  /// is contiguous, in rows whose bytes and strides are multiples of 16.
  at::Tensor codes;
  /// One float32; 1x128 [m or n, k / 128] with the strides (1, m or n), float32; 128x128 [up(k /
  /// 128, 4), ceil(m or n, 128)] with the strides (1, up(k / 128, 4)), float32; MXFP8 and NVFP4
  /// `swizzled`, in float8_e8m0fnu and float8_e4m3fn.
  at::Tensor scale;
  /// Numbers of at::blas::ScalingType and SwizzleType.
  int64_t scaling, swizzle;
  /// NVFP4: what the product is multiplied by, amax / (6 * largest scale), [1]; else undefined.
  at::Tensor factor;
};

/// A factor of a product that scaled_mm takes. Copies codes that lie otherwise (column codes, and
/// codes that serve both directions where columns are contracted, are turned: one byte per number
/// is read and written), scales of MXFP8 and NVFP4, and those of squares that are turned.
ScaledOperand scaled_operand(const Factor& factor, bool is_left);

/// Scales [128 i, 4 j] in the order in which cuBLASLt reads them: tiles of 128 by 4 row by row,
/// within a tile the scale (r, c) at 16 (r mod 32) + 4 (r / 32) + c.
at::Tensor swizzled(const at::Tensor& scales);

/// result = a b of codes, by torch's scaled_mm, without fast accumulation. In float32, rounded once
/// to the result's dtype.
///
/// Error: that of a sum in float32, where the device sums so: at compute capability 9.0 its tensor
///        cores keep fewer bits between the sums that go to float32 (DeepSeek-V3, arXiv:2412.19437,
///        3.3.2). Two scales of tensors are the device's to apply, in any order. NVFP4 has those
///        last, one after the other: decoded numbers that overflow alone need not do so here.
void multiply_by_scaled_mm(const Product& product, const at::Tensor& result);

/// "scaled_mm", for CUDA.
extern const ProductImplementation kScaledMm;

}  // namespace tandem::kernel_ops
