// Casts of numbers to the elements of low-precision formats and back, without a scale, as kernel
// ops.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// codes = the nearest numbers of a format, ties to even: "e4m3", "e5m2", "e2m1", or "e8m0", powers
/// of two, which round up. Results are bitwise equal on every device.
///
/// saturate: a number that rounds above the largest one, such as an infinity, becomes the largest;
/// if false, NaN in E4M3 and infinity in E5M2. E2M1 and E8M0 always saturate. NaN of either sign
/// becomes 0x7F; in E2M1 0x7, which is 6, and in E8M0 0xFF. Signs are kept, but E8M0 has none:
/// negative numbers become its least number.
/// seed: one int64, or two with an offset: rounds up or down at random, right on average
/// (kernels/cast.h); not for E8M0.
///
/// Shapes:  x any -> codes like x, uint8, one code per byte.
/// Dtypes:  float32, bfloat16, float16, float64.
/// Error:   none: bitwise what the numerics page specifies (tests Cast, CastFront).
/// Throws:  c10::ValueError on another format or seed.
struct CastToCodes {
  static constexpr const char* kName = "cast_to_codes";
  static constexpr std::array kResults{"codes"};
  struct Args {
    const Tensor& x;
    std::string_view format;
    bool saturate = true;
    std::optional<Tensor> seed = {};
    TANDEM_ARGUMENTS(x, format, saturate, seed)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

/// The values of codes, rounded once to `dtype`: float32, bfloat16, float16 or float64.
///
/// Throws:  c10::ValueError on another format, c10::TypeError on another dtype.
struct CastFromCodes {
  static constexpr const char* kName = "cast_from_codes";
  static constexpr std::array kResults{"numbers"};
  struct Args {
    const Tensor& codes;
    std::string_view format;
    at::ScalarType dtype;
    TANDEM_ARGUMENTS(codes, format, dtype)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
