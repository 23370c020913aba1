// Quantizing as kernel ops: codes of a tensor, their numbers, and what turns the product of codes
// into numbers.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// The codes of x, their scales and its amax, as the quantizer says: x ~= decode(codes) *
/// dequant_scale.
///
/// given: a scale of the past or a seed, as the quantizer takes it (given_to).
/// output_mask: not by result, but row codes with their scale, column codes with theirs, amax. What
/// is masked out is empty, and so are the amaxes of rows and columns unless the format has a second
/// level of scale. Where one value serves both directions, it is that of rows, written if either is
/// wanted.
/// Shapes: x any -> codes like x, uint8, never transposed, or packed; these and scales as the
///         format's layout says; amax [], float32, those of rows and columns [1].
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

/// y = decode(codes) * dequant_scale in float32, rounded once to `dtype`; `column` says which
/// direction the codes are of, `amax` is what comes with codes that have one. Packed codes have
/// numbers of more than one size: `sizes` says which, without it the padding is there too.
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

/// An operand of an emulated product as float32, exactly: decode(codes), times its scales unless
/// those apply at the product's end; of packed codes with their padding.
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

/// y = (product * a_scale) * b_scale in float32, rounded once to `dtype`; a scale that is absent
/// was applied before.
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

}  // namespace tandem::kernel_ops
