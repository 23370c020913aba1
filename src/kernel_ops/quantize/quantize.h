// Quantizing as kernel ops: codes of a tensor, their dequantized values, and the scaling of a
// product of codes.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// The codes of x, their scales and its amax, as the quantizer says: x ~= decode(codes) *
/// dequant_scale.
///
/// given: a scale or a seed, if the quantizer needs one (given_to).
/// output_mask: whether row codes with their scale, column codes with their scale, and the amax are
/// wanted. Results that are not wanted are empty, and so are row_amax and column_amax unless the
/// format has a second level of scale. If one value serves both directions, it is returned as row
/// codes if either direction is wanted.
/// Shapes: x any -> codes like x, uint8, never transposed; packed codes and scales as the format's
///         layout says; amax [], float32; row_amax, column_amax [1].
/// Error:  none: bitwise what the numerics page specifies (test GoldenQuantize).
struct Quantize {
  static constexpr const char* kName = "quantize";
  static constexpr std::array kResults = kGroupNames;
  struct Args {
    const Tensor& x;
    std::optional<Tensor> given = {};
    const Quantizer& quantizer;
    GroupMask output_mask;
    TANDEM_ARGUMENTS(x, given, quantizer, output_mask)
  };
  static Specs<group_size> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<group_size> reference(const Args& args);
};

/// y = decode(codes) * dequant_scale in float32, rounded once to `dtype`. `column` says in which
/// direction the codes are, and `amax` belongs to codes whose format has one. Packed codes do not
/// determine the sizes of their dequantized values: `sizes` does; without it y includes the
/// padding.
///
/// Throws:  c10::TypeError on a dtype other than float32, bfloat16, float16 and float64.
struct Dequantize {
  static constexpr const char* kName = "dequantize";
  static constexpr std::array kResults{"y"};
  struct Args {
    const Tensor& codes;
    const Tensor& dequant_scale;
    const Quantizer& quantizer;
    bool column;
    at::ScalarType dtype;
    std::optional<Tensor> amax = {};
    at::OptionalSymIntArrayRef sizes = {};
    TANDEM_ARGUMENTS(codes, dequant_scale, quantizer, column, dtype, amax, sizes)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

/// An operand of an emulated product in float32, exactly: decode(codes), times the scales unless
/// these apply to the product. Packed codes give their padding too.
struct Decode {
  static constexpr const char* kName = "decode";
  static constexpr std::array kResults{"numbers"};
  struct Args {
    const Tensor& codes;
    const Tensor& dequant_scale;
    const Quantizer& quantizer;
    bool column;
    std::optional<Tensor> amax = {};
    TANDEM_ARGUMENTS(codes, dequant_scale, quantizer, column, amax)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

/// y = (product * a_scale) * b_scale in float32, rounded once to `dtype`. A scale is absent if the
/// operand already includes it.
struct ScaleProduct {
  static constexpr const char* kName = "scale_product";
  static constexpr std::array kResults{"y"};
  struct Args {
    const Tensor& product;
    std::optional<Tensor> a_scale = {};
    std::optional<Tensor> b_scale = {};
    at::ScalarType dtype;
    TANDEM_ARGUMENTS(product, a_scale, b_scale, dtype)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

/// The arguments that dequantize or decode an operand in codes.
inline Dequantize::Args dequantizing(const CodedMatrix& codes, at::ScalarType dtype,
                                     at::OptionalSymIntArrayRef sizes = {}) {
  return {codes.matrix,
          *codes.dequant_scale,
          *codes.quantizer,
          codes.is_column(),
          dtype,
          codes.maybe_amax(),
          sizes};
}
inline Decode::Args decoding(const CodedMatrix& codes) {
  return {codes.matrix, *codes.dequant_scale, *codes.quantizer, codes.is_column(),
          codes.maybe_amax()};
}

}  // namespace tandem::kernel_ops
