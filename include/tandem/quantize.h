// Quantization outside pipelines: casts, quantizers with the names and arguments of
// TransformerEngine, and quantized tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>

#include <array>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/export.h"
#include "tandem/recipe.h"

namespace tandem {

struct Quantizer;
class StraightThrough;

struct CastOptions {
  /// Magnitudes that round above the format's largest number become this number; else they become
  /// NaN in E4M3 and infinity in E5M2. E2M1 and E8M0 always saturate.
  bool saturate = true;
  /// A seed for stochastic rounding, which is right on average: an int64 tensor of one number, or
  /// of a seed and an offset. E8M0 has no stochastic rounding.
  std::optional<at::Tensor> seed = std::nullopt;
};

/// codes = the nearest numbers of a format, with ties to even. NaN becomes 0x7F, in E8M0 0xFF, and
/// in E2M1, which has no NaN, 6. Signs are kept, also of zeros. E8M0 holds powers of two and rounds
/// up, as scales do; negative numbers become its least number.
///
/// `dtype` is at::kFloat8_e4m3fn, kFloat8_e5m2, kFloat8_e8m0fnu or, for E2M1,
/// at::ScalarType::Float4_e2m1fn_x2.
///
/// Shapes:  x any -> codes like x, one code in each byte.
/// Dtypes:  x float32, bfloat16, float16, or float64, which is rounded to float32 first; codes
///          uint8.
/// Error:   none; every device gives the same bits (tests Cast, CastFront).
/// Throws:  c10::ValueError (another dtype, a seed of another form, an undefined tensor),
///          c10::TypeError (x of another dtype), c10::NotImplementedError (a gradient of x is
///          recorded).
TANDEM_API at::Tensor cast(const at::Tensor& x, at::ScalarType dtype,
                           const CastOptions& options = {});

/// Returns the values of codes, one code in the low bits of each byte, rounded once to `to`.
/// `dtype` names the format as in `cast`.
///
/// Shapes:  codes any -> values like codes.
/// Dtypes:  codes uint8; `to` float32, bfloat16, float16 or float64.
/// Throws:  c10::ValueError (another dtype, an undefined tensor), c10::TypeError (codes that are
///          not uint8, another `to`).
TANDEM_API at::Tensor cast_back(const at::Tensor& codes, at::ScalarType dtype,
                                at::ScalarType to = at::kFloat);

// Quantizers. `fp8_dtype` is at::kFloat8_e4m3fn or at::kFloat8_e5m2. `rowwise` requests row codes
// and `columnwise` column codes; at least one must be true.

/// FP8 with one scale per tensor, from the tensor's own amax: scale = format max / amax.
struct Float8CurrentScalingQuantizer {
  at::ScalarType fp8_dtype = at::ScalarType::Undefined;
  bool rowwise = true, columnwise = true;
  /// Scales are rounded down to powers of two.
  bool force_pow_2_scales = false;
  /// The least amax, finite and at least 0.
  double amax_epsilon = 0;
};

/// FP8 with a scale of the caller: codes = cast(x * scale).
struct Float8Quantizer {
  /// One float32 each: the factor of x, and the largest amax of all tensors since the caller last
  /// set it to 0. Each quantization raises `amax` to the amax of x; NaN does not count.
  at::Tensor scale = {}, amax = {};
  at::ScalarType fp8_dtype = at::ScalarType::Undefined;
  bool rowwise = true, columnwise = true;
};

/// FP8 with one scale per block of 128 numbers of a row or of a column, or of 128 by 128 numbers.
struct Float8BlockQuantizer {
  at::ScalarType fp8_dtype = at::ScalarType::Undefined;
  /// False by default, because TransformerEngine has no defaults here: set at least one.
  bool rowwise = false, columnwise = false;
  /// The least amax of a block, finite and at least 0.
  double amax_epsilon = 0;
  /// Scales are rounded down to powers of two.
  bool force_pow_2_scales = true;
  /// 1: blocks of 128 numbers; 2: blocks of 128 by 128, whose row codes and column codes are equal.
  int64_t block_scaling_dim = 2;
};

/// FP8 with a power of two as the scale of each block of 32 numbers (OCP MX).
struct MXFP8Quantizer {
  at::ScalarType fp8_dtype = at::ScalarType::Undefined;
  bool rowwise = true, columnwise = true;
  /// Blocks are 32 by 32, so that row codes and column codes are equal.
  bool with_2d_quantization = false;
};

/// E2M1, four bits, with an E4M3 scale per block of 16 numbers and a float32 scale per tensor
/// (NVFP4).
struct NVFP4Quantizer {
  bool rowwise = true, columnwise = true;
  /// Column codes are codes of columns that a random Hadamard transform rotated, in bfloat16. The
  /// product of two rotated operands equals the product of the operands. `with_2d_quantization`
  /// excludes it.
  bool with_rht = false;
  /// The amax of column codes is measured after the rotation. The value must be that of `with_rht`.
  bool with_post_rht_amax = false;
  /// Blocks are 16 by 16, so that row codes and column codes are equal.
  bool with_2d_quantization = false;
  /// Codes are rounded stochastically, which is right on average, with a seed from the generator of
  /// x's device.
  bool stochastic_rounding = false;
  /// The largest number of a block becomes 6 or 4, whichever has the smaller error.
  /// `stochastic_rounding` excludes it.
  bool nvfp4_use_4over6 = false;
  /// The scale of a block whose amax is the amax of the tensor: 448, or with `nvfp4_use_4over6`
  /// also 256.
  int64_t nvfp4_e4m3_max = 448;
  /// The error that decides between 6 and 4: the sum of absolute errors of a block, or of their
  /// squares.
  NVFP4BlockScaling::ErrorMetric nvfp4_4over6_err_mode = NVFP4BlockScaling::ErrorMetric::mae;
};

/// Any quantizer. A copy has the same options and shares `scale` and `amax` of a Float8Quantizer. A
/// quantizer that was moved from may only be assigned to or destroyed.
///
/// Throws:  c10::ValueError for an option outside its values, for neither direction, for options
///          that exclude each other and for another use of a quantizer that was moved from;
///          c10::NotImplementedError where with_post_rht_amax differs from with_rht.
class TANDEM_API TensorQuantizer {
 public:
  // Implicit, so that a function that takes a quantizer takes each of these structs.
  TensorQuantizer(const Float8CurrentScalingQuantizer& options);  // NOLINT(*-explicit-*)
  TensorQuantizer(const Float8Quantizer& options);                // NOLINT(*-explicit-*)
  TensorQuantizer(const Float8BlockQuantizer& options);           // NOLINT(*-explicit-*)
  TensorQuantizer(const MXFP8Quantizer& options);                 // NOLINT(*-explicit-*)
  TensorQuantizer(const NVFP4Quantizer& options);                 // NOLINT(*-explicit-*)
  /// Selects the quantizer that kernel ops know by this text, such as "mxfp8_e4m3". A quantizer
  /// with a scale of the caller begins with the scale 1 and the amax 0.
  explicit TensorQuantizer(std::string_view text, bool rowwise = true, bool columnwise = true);

  TensorQuantizer(const TensorQuantizer&) = default;
  TensorQuantizer(TensorQuantizer&& other) noexcept;
  TensorQuantizer& operator=(const TensorQuantizer&) = default;
  TensorQuantizer& operator=(TensorQuantizer&& other) noexcept;
  ~TensorQuantizer() = default;

  /// The text by which kernel ops know the quantizer, such as "fp8_e4m3:current:eps=0:pow2=0".
  const std::string& text() const;
  bool rowwise_usage() const { return rowwise_; }
  bool columnwise_usage() const { return columnwise_; }
  /// Sets the directions of later quantizations; nullopt leaves a direction unchanged.
  ///
  /// Throws:  c10::ValueError where neither direction would remain.
  void set_usage(std::optional<bool> rowwise, std::optional<bool> columnwise);
  /// The tensors of a Float8Quantizer; undefined in other quantizers.
  const at::Tensor& scale() const { return scale_; }
  const at::Tensor& amax() const { return amax_; }

 private:
  friend class QuantizedTensor;
  TensorQuantizer() = default;
  TensorQuantizer(const char* name, const Quantizer& quantizer, bool rowwise, bool columnwise);
  const Quantizer& core() const;

  /// Null after a move.
  const Quantizer* quantizer_ = nullptr;
  bool rowwise_ = true, columnwise_ = true;
  at::Tensor scale_, amax_;
};

/// The parts of a quantized tensor; an absent part is undefined.
struct QuantizedParts {
  /// Codes in the shape of x, never transposed: row codes have blocks along the last dimension,
  /// column codes along the other ones. With one scale per tensor or square blocks both may be one
  /// tensor. A byte holds two codes of four bits, the first one in its low half: two neighbours
  /// along the last dimension, or in column codes two neighbours along the first dimension of x as
  /// a matrix.
  ///
  /// Dtypes:  uint8.
  at::Tensor rowwise_data = {}, columnwise_data = {};
  /// Scales: x ~= decode(data) * scale_inv.
  at::Tensor rowwise_scale_inv = {}, columnwise_scale_inv = {};
  /// The amaxes from which the scale of the tensor is computed, in formats with two levels of
  /// scales.
  at::Tensor amax_rowwise = {}, amax_columnwise = {};
};

/// A quantized tensor. A copy of the object shares its parts, as a copy of an at::Tensor shares
/// memory.
///
/// The gradient of the dequantized values is the gradient of x, as if nothing were rounded. The
/// object is no at::Tensor; pipelines and torch take `dequantize()`.
///
/// Throws:  c10::ValueError for any use of an undefined object but `defined`, `parts`,
///          `scalar_type`, `requires_grad`, assignment, load and print.
class TANDEM_API QuantizedTensor {
 public:
  /// Creates an undefined object, such as torch::load takes. A moved-from object is undefined too.
  QuantizedTensor() = default;
  /// Joins parts that belong together, such as the parts of another quantized tensor. `sizes` and
  /// `dtype` are the sizes and the dtype of x. Where one set of codes serves both directions,
  /// column codes and row codes must be one tensor.
  ///
  /// Throws:  c10::ValueError where the parts have no codes; where a part is missing, is not
  ///          strided or has another shape or dtype than the quantizer writes; where column codes
  ///          are another tensor than row codes that serve both directions; for sizes that no
  ///          tensor has. c10::TypeError for a dtype that quantizers do not take.
  QuantizedTensor(const QuantizedParts& parts, const TensorQuantizer& quantizer,
                  at::ScalarType dtype, at::IntArrayRef sizes);

  bool defined() const { return quantizer_.quantizer_ != nullptr; }
  const QuantizedParts& parts() const { return parts_; }
  const at::Tensor& rowwise_data() const { return parts_.rowwise_data; }
  const at::Tensor& columnwise_data() const { return parts_.columnwise_data; }
  const at::Tensor& rowwise_scale_inv() const { return parts_.rowwise_scale_inv; }
  const at::Tensor& columnwise_scale_inv() const { return parts_.columnwise_scale_inv; }
  const at::Tensor& amax_rowwise() const { return parts_.amax_rowwise; }
  const at::Tensor& amax_columnwise() const { return parts_.amax_columnwise; }
  /// The quantizer that computed the codes. Changes of this copy, such as set_usage, change no
  /// tensor.
  const TensorQuantizer& quantizer() const;
  at::ScalarType scalar_type() const { return defined() ? dtype_ : at::ScalarType::Undefined; }
  at::IntArrayRef sizes() const;
  /// The device of the codes.
  at::Device device() const;
  /// Whether dequantized values have a gradient, which goes to x.
  bool requires_grad() const { return history_ != nullptr; }

  /// y = decode(data) * scale_inv in float32, rounded once to `dtype`, by default the dtype of x.
  /// Row codes are read; column codes are read with `columnwise`, or where the object has no row
  /// codes. Rotated column codes give rotated columns, as a matrix whose rows are padded to a
  /// multiple of 16, and have no gradient.
  ///
  /// Shapes:  y like x, but for rotated columns.
  /// Dtypes:  float32, bfloat16, float16, float64.
  /// Error:   none; the numerics page specifies every bit (tests GoldenQuantize, QuantizeFront).
  /// Throws:  c10::ValueError where these codes are absent, and where only rotated codes are there
  ///          and `columnwise` is false; c10::TypeError for another dtype.
  at::Tensor dequantize(bool columnwise = false,
                        std::optional<at::ScalarType> dtype = std::nullopt) const;

  /// Returns an object that shares the parts and has no gradient.
  QuantizedTensor detach() const;
  /// Returns an object with copies of the parts.
  QuantizedTensor clone() const;
  /// Returns an object with the codes on `device`, or a copy of this object where the codes lie
  /// there. The scale of a Float8Quantizer stays on its device.
  QuantizedTensor to(at::Device device) const;
  /// Returns an object with copies of the codes that dequantizes to `dtype`, or a copy of this
  /// object where `dtype` is unchanged.
  ///
  /// Throws:  c10::TypeError for a dtype that quantizers do not take.
  QuantizedTensor to(at::ScalarType dtype) const;

  /// Writes codes of x into the existing parts, for example of a master weight after an optimizer's
  /// step. Objects that share the parts change too. This object has no gradient then.
  ///
  /// Shapes:  x broadcasts to sizes().
  /// Throws:  c10::ValueError where x is undefined or does not broadcast.
  QuantizedTensor& quantize_(const at::Tensor& x);
  QuantizedTensor& copy_(const at::Tensor& x) { return quantize_(x); }
  /// Copies the codes of `x` where both objects have the same quantizer, sizes and parts; else
  /// quantizes the dequantized values of `x`.
  QuantizedTensor& copy_(const QuantizedTensor& x);

  /// Drops the codes of a direction for false. For true, shares the codes of the other direction
  /// where one set of codes serves both; nullopt leaves a direction unchanged. Other objects do not
  /// change.
  ///
  /// Throws:  c10::ValueError where no codes would remain; c10::Error where the codes of a
  ///          direction are absent and cannot be shared.
  void update_usage(std::optional<bool> rowwise_usage = std::nullopt,
                    std::optional<bool> columnwise_usage = std::nullopt);

  /// torch::save and torch::load call these. An archive has the parts as tensors under the names of
  /// QuantizedParts, the text of the quantizer as "quantizer", "dtype" and "sizes" of x and, for a
  /// Float8Quantizer, "scale" and "amax". Archives nest: codes.save(own), then
  /// archive.write("codes", own).
  ///
  /// Throws:  c10::ValueError where the archive has no quantized tensor, and as the constructor.
  ///          The object is unchanged then.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  friend TANDEM_API QuantizedTensor quantize(const at::Tensor& x, const TensorQuantizer& quantizer);
  static QuantizedTensor made_of(const at::Tensor& x, const TensorQuantizer& quantizer);

  void check_defined() const;
  bool is_rotated() const;
  /// Returns an object with `change` applied to each part, once to a part that serves both
  /// directions.
  template <typename Change>
  QuantizedTensor with(Change&& change) const;

  QuantizedParts parts_;
  TensorQuantizer quantizer_;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
  std::vector<int64_t> sizes_;
  /// The gradient of x, for dequantized values; null: no gradient.
  std::shared_ptr<const StraightThrough> history_;
};

/// codes = x quantized by `quantizer`.
///
///   const auto codes = tandem::quantize(x, tandem::MXFP8Quantizer{at::kFloat8_e4m3fn});
///
/// Shapes:  x any -> codes and scales in the shapes of the quantizer's format.
/// Dtypes:  float32, bfloat16, float16, float64.
/// Error:   none; the numerics page specifies every bit (tests GoldenQuantize, QuantizeFront).
/// Throws:  c10::ValueError (an undefined tensor), c10::TypeError (another dtype),
///          c10::NotImplementedError (x has a tangent of forward-mode differentiation).
TANDEM_API QuantizedTensor quantize(const at::Tensor& x, const TensorQuantizer& quantizer);

/// QuantizedTensor::save and load, in the form that torch::save and torch::load call.
TANDEM_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                       const QuantizedTensor& x);
TANDEM_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                      QuantizedTensor& x);

/// Prints a text such as "QuantizedTensor([4, 64], dtype=float32, quantizer=mxfp8_e4m3)".
TANDEM_API std::ostream& operator<<(std::ostream& out, const QuantizedTensor& x);

}  // namespace tandem
