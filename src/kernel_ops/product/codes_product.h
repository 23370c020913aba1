// The product of two operands in codes, by an implementation that multiplies codes, else of the
// dequantized operands. It is a kernel op too, so that compiled code computes as eager code does.
#pragma once

#include "kernel_ops/framework/kernel_op.h"
#include "kernel_ops/product/product.h"

namespace tandem::kernel_ops {

/// The matrix over a tensor's last dimension, with two dimensions, transposed or not.
at::Tensor turned(const at::Tensor& tensor, bool is_transposed);

/// The scale that is applied to a product of decoded codes, where the format has such a scale.
std::optional<at::Tensor> scale_at_end(const CodedMatrix& codes);

/// Cuts matrices [m, k] and [k, n] to a common k. A packed operand decodes to whole blocks and so
/// ends in zeros; the other operand may not.
void cut_padding(at::Tensor& a, const Quantizer& a_quantizer, at::Tensor& b,
                 const Quantizer& b_quantizer);

/// target = a b for operands in codes, each transposed or not. Without an implementation that
/// multiplies codes, they are decoded to float32, multiplied, scaled and rounded once. Returns the
/// implementations, and the reason if codes were decoded.
///
/// Shapes: dequantized and, if demanded, transposed: a [m, k], b [k, n] -> target [m, n],
///         contiguous.
/// Error:  k * 2^-23 * sum |a||b|, and one rounding to the dtype of target.
ImplementationNames multiply_codes(const CodedMatrix& a, bool a_transposed, const CodedMatrix& b,
                                   bool b_transposed, Rows rows, const at::Tensor& target);

/// multiply_codes as a kernel op. `column` says in which direction an operand's codes are, and
/// `amax` belongs to codes whose format has one.
///
/// Throws: c10::ValueError if a and b are no codes of these quantizers or do not fit;
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
  /// In ATen operations, unless the list of products has an implementation for the device.
  static Results<1> reference(const Args& args);
  /// The arguments for these operands.
  static Args of(const CodedMatrix& a, bool a_transposed, const CodedMatrix& b, bool b_transposed,
                 at::ScalarType dtype);
};

}  // namespace tandem::kernel_ops
