// The product of two operands in codes: as they are where an implementation takes them, else
// decoded. As a kernel op too, so that compiled code computes as eager code does.
#pragma once

#include "kernel_ops/framework/kernel_op.h"
#include "kernel_ops/product/product.h"

namespace tandem::kernel_ops {

/// A matrix over its last dimension: numbers, or codes, their scale and the amax behind that.
struct CodedMatrix {
  at::Tensor matrix;
  /// Null: numbers.
  const Quantizer* quantizer = nullptr;
  Direction direction = Direction::row;
  at::Tensor scale = {}, amax = {};
};
/// Its rows and columns, transposed or not.
at::Tensor turned(const CodedMatrix& operand, bool is_transposed);

/// Cuts matrices [m, k] and [k, n] of numbers to the same k where one was packed, and so ends in
/// zeros that fill its last block, and the other was not.
void cut_padding(at::Tensor& a, const Quantizer& a_quantizer, at::Tensor& b,
                 const Quantizer& b_quantizer);

/// target = a b of codes, each transposed or not: multiplied as they are, or decoded in float32,
/// multiplied, scaled and rounded once. Returns who did, and why codes were decoded.
///
/// Shapes: a [m, k], b [k, n], in numbers, if need be transposed -> target [m, n], contiguous.
/// Error:  k * 2^-23 * sum |a||b|, and one rounding to the dtype of target.
ImplementationNames multiply_codes(const CodedMatrix& a, bool a_transposed, const CodedMatrix& b,
                                   bool b_transposed, Rows rows, const at::Tensor& target);

/// The same as a kernel op. `column` says which direction codes are of, `amax` is what comes with
/// codes that have one.
///
/// Throws: c10::ValueError where a and b are no codes of these quantizers, or do not fit;
///         c10::TypeError for a dtype that no product has.
struct MultiplyCodes {
  static constexpr const char* kName = "multiply_codes";
  static constexpr std::array kResults{"product"};
  struct Args {
    const Tensor& a;
    const Tensor& a_scale;
    std::optional<Tensor> a_amax = {};
    const Quantizer& a_quantizer;
    bool a_column;
    bool a_transposed;
    const Tensor& b;
    const Tensor& b_scale;
    std::optional<Tensor> b_amax = {};
    const Quantizer& b_quantizer;
    bool b_column;
    bool b_transposed;
    at::ScalarType dtype;
    TANDEM_ARGUMENTS(a, a_scale, a_amax, a_quantizer, a_column, a_transposed, b, b_scale, b_amax,
                     b_quantizer, b_column, b_transposed, dtype)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  /// In ATen operations, unless the product's list has an implementation for the device.
  static Results<1> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
