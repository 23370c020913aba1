// Quantizing by hand: casts, quantizers with the names and arguments of TransformerEngine's, and
// tensors in codes.
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
  /// What rounds above the largest number becomes that number, or else NaN in E4M3 and infinity in
  /// E5M2. E2M1 and E8M0 always saturate.
  bool saturate = true;
  /// An int64, or two with an offset: rounded up or down by chance instead, right on average. E8M0
  /// is not.
  std::optional<at::Tensor> seed = std::nullopt;
};

/// codes = the nearest numbers of a format, ties to even. NaN gives 0x7F, in E8M0 0xFF; E2M1 has
/// none, and gives 6. Signs are kept, of zeros too. E8M0 holds powers of two and rounds up, as
/// scales are; negative numbers become its least.
///
/// dtype:   at::kFloat8_e4m3fn, kFloat8_e5m2, kFloat8_e8m0fnu or, for E2M1,
///          at::ScalarType::Float4_e2m1fn_x2.
/// Shapes:  x any -> codes like x, one each.
/// Dtypes:  float32, bfloat16, float16; float64 is rounded to float32 before. Codes are uint8.
/// Error:   none: bit by bit the same on every device (tests GoldenBlocks, QuantizeFront).
/// Throws:  c10::ValueError (another dtype, another seed, no tensor), c10::TypeError (x of no such
///          dtype), c10::NotImplementedError (a gradient of x is recorded).
TANDEM_API at::Tensor cast(const at::Tensor& x, at::ScalarType dtype,
                           const CastOptions& options = {});

/// The values of codes of a format, one code in the low bits of each byte, rounded once to `to`.
///
/// Dtypes:  `to` float32, bfloat16, float16 or float64.
/// Throws:  c10::ValueError (another dtype, no tensor), c10::TypeError (codes that are no uint8,
///          another `to`).
TANDEM_API at::Tensor cast_back(const at::Tensor& codes, at::ScalarType dtype,
                                at::ScalarType to = at::kFloat);

// Quantizers. Of all, `fp8_dtype` is at::kFloat8_e4m3fn or at::kFloat8_e5m2, and `rowwise` and
// `columnwise` say which codes are wanted, one of them at least.

/// FP8 with one scale per tensor, from the tensor's own amax: scale = format max / amax.
struct Float8CurrentScalingQuantizer {
  at::ScalarType fp8_dtype = at::ScalarType::Undefined;
  bool rowwise = true, columnwise = true;
  /// Scales are rounded down to powers of two.
  bool force_pow_2_scales = false;
  /// Least amax, finite and at least 0.
  double amax_epsilon = 0;
};

/// FP8 with a scale that is given: codes = cast(x * scale).
struct Float8Quantizer {
  /// One float32 each: what x is multiplied by, and the largest amax of all tensors since it was
  /// last set to 0, which each call raises to that of x; NaN counts as none.
  at::Tensor scale = {}, amax = {};
  at::ScalarType fp8_dtype = at::ScalarType::Undefined;
  bool rowwise = true, columnwise = true;
};

/// FP8 with one scale per block of 128 numbers of a row or a column, or of 128 by 128.
struct Float8BlockQuantizer {
  at::ScalarType fp8_dtype = at::ScalarType::Undefined;
  /// Without defaults in TransformerEngine: name those that are wanted.
  bool rowwise = false, columnwise = false;
  /// Least amax of a block, finite and at least 0.
  double amax_epsilon = 0;
  /// Scales are rounded down to powers of two.
  bool force_pow_2_scales = true;
  /// 1: lines; 2: squares, of which both directions have the same codes.
  int64_t block_scaling_dim = 2;
};

/// FP8 with one power of two as scale per block of 32 numbers (OCP MX).
struct MXFP8Quantizer {
  at::ScalarType fp8_dtype = at::ScalarType::Undefined;
  bool rowwise = true, columnwise = true;
  /// Blocks are 32 by 32, so that both directions have the same codes.
  bool with_2d_quantization = false;
};

/// E2M1, four bits, with one E4M3 scale per block of 16 numbers and one float32 per tensor (NVFP4).
struct NVFP4Quantizer {
  bool rowwise = true, columnwise = true;
  /// Codes of columns are of columns that a random Hadamard transform has rotated, in bfloat16.
  /// Their product with an operand that is rotated too is that of the numbers. Not with
  /// `with_2d_quantization`.
  bool with_rht = false;
  /// Their amax is that of the rotated columns: as `with_rht`; there is no other.
  bool with_post_rht_amax = false;
  /// Blocks are 16 by 16, so that both directions have the same codes.
  bool with_2d_quantization = false;
  /// Codes are rounded up or down by chance, right on average, by a seed from the generator of x's
  /// device.
  bool stochastic_rounding = false;
  /// The largest number of a block becomes 6 or 4, whichever errs less; not with
  /// `stochastic_rounding`.
  bool nvfp4_use_4over6 = false;
  /// What the scale of a block becomes whose amax is the tensor's: 448, or, with
  /// `nvfp4_use_4over6`, 256.
  int64_t nvfp4_e4m3_max = 448;
  /// What "errs" means: the sum over a block of absolute errors, or of their squares.
  NVFP4BlockScaling::ErrorMetric nvfp4_4over6_err_mode = NVFP4BlockScaling::ErrorMetric::mae;
};

/// A quantizer, whichever it is. A copy has the same values and, of a Float8Quantizer, the same
/// tensors; one that was moved from may be assigned to or destroyed.
///
/// Throws: c10::ValueError on arguments that are none of those above, on no direction at all, on
///         two options that exclude each other and on any other use of one that was moved from;
///         c10::NotImplementedError on with_post_rht_amax that is not with_rht.
class TANDEM_API TensorQuantizer {
 public:
  // Each may be passed where a quantizer is asked for.
  TensorQuantizer(const Float8CurrentScalingQuantizer& options);  // NOLINT(*-explicit-*)
  TensorQuantizer(const Float8Quantizer& options);                // NOLINT(*-explicit-*)
  TensorQuantizer(const Float8BlockQuantizer& options);           // NOLINT(*-explicit-*)
  TensorQuantizer(const MXFP8Quantizer& options);                 // NOLINT(*-explicit-*)
  TensorQuantizer(const NVFP4Quantizer& options);                 // NOLINT(*-explicit-*)
  /// The one that kernel ops know by this text, "mxfp8_e4m3". One whose scale is given begins with
  /// the scale 1 and the amax 0.
  explicit TensorQuantizer(std::string_view text, bool rowwise = true, bool columnwise = true);

  TensorQuantizer(const TensorQuantizer&) = default;
  TensorQuantizer(TensorQuantizer&& other) noexcept;
  TensorQuantizer& operator=(const TensorQuantizer&) = default;
  TensorQuantizer& operator=(TensorQuantizer&& other) noexcept;
  ~TensorQuantizer() = default;

  /// What kernel ops know it by: "fp8_e4m3:current:eps=0:pow2=0".
  const std::string& text() const;
  bool rowwise_usage() const { return rowwise_; }
  bool columnwise_usage() const { return columnwise_; }
  /// Changes which codes are wanted of what is quantized from now on; nullopt: as it is.
  void set_usage(std::optional<bool> rowwise, std::optional<bool> columnwise);
  /// Of a Float8Quantizer; undefined of all others.
  const at::Tensor& scale() const { return scale_; }
  const at::Tensor& amax() const { return amax_; }

 private:
  friend class QuantizedTensor;
  TensorQuantizer() = default;
  TensorQuantizer(const char* name, const Quantizer& quantizer, bool rowwise, bool columnwise);
  const Quantizer& core() const;

  /// Null where there is none.
  const Quantizer* quantizer_ = nullptr;
  bool rowwise_ = true, columnwise_ = true;
  at::Tensor scale_, amax_;
};

/// What a tensor in codes consists of; undefined: absent.
struct QuantizedParts {
  /// Codes, uint8, of the shape of x, with blocks along its last dimension, and along the others;
  /// never transposed. With one scale per tensor or per square both may be the same tensor. Of four
  /// bits there are two codes in a byte, the first in the low half: neighbours of the last
  /// dimension, or, in columns of x as a matrix, of the first.
  at::Tensor rowwise_data = {}, columnwise_data = {};
  /// Their scales: x ~= decode(data) * scale_inv.
  at::Tensor rowwise_scale_inv = {}, columnwise_scale_inv = {};
  /// Of formats with a second level of scale the largest magnitudes that this comes from.
  at::Tensor amax_rowwise = {}, amax_columnwise = {};
};

/// A tensor in codes, as `quantize` makes it. A copy of this object has the same parts, as a copy
/// of an at::Tensor has the same memory.
///
/// The gradient of its numbers is that of what was quantized: rounding counts as none. It is no
/// at::Tensor: pipelines and torch take the numbers, `dequantize()`.
///
/// Throws: c10::ValueError on any use of an undefined one but to ask what it has, `defined`,
///         `parts`, `scalar_type` and `requires_grad`, to assign to it, load or print it.
class TANDEM_API QuantizedTensor {
 public:
  /// One that is undefined, for torch::load to write. One that was moved from is so, too.
  QuantizedTensor() = default;
  /// Puts parts together that belong together, such as those of another one. `sizes` and `dtype`
  /// are those of x. Where one set of codes serves both directions, that of columns is the same
  /// tensor as that of rows.
  ///
  /// Throws: c10::ValueError where there are no codes, where a part is missing, not strided or of
  ///         another shape or dtype than the quantizer writes, where codes of columns are another
  ///         tensor than those of rows that serve for both, and on sizes that no tensor has;
  ///         c10::TypeError on a dtype that has no codes.
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
  /// The one that made it. What it does to others, set_usage for one, it does to none of them.
  const TensorQuantizer& quantizer() const;
  at::ScalarType scalar_type() const { return defined() ? dtype_ : at::ScalarType::Undefined; }
  at::IntArrayRef sizes() const;
  /// Where the codes lie.
  at::Device device() const;
  /// Whether its numbers have a gradient, which is that of x.
  bool requires_grad() const { return history_ != nullptr; }

  /// y = decode(data) * scale_inv in float32, rounded once to `dtype`, without it to that of x:
  /// those of rows, or, with `columnwise` or where these are all, of columns. Rotated columns stay
  /// rotated, as a matrix whose number of rows is padded to 16, and have no gradient.
  ///
  /// Error:  none: bitwise what the numerics page specifies (tests GoldenQuantize, QuantizeFront).
  /// Throws: c10::ValueError where these codes are absent, or rotated and not asked for;
  ///         c10::TypeError on a dtype other than float32, bfloat16, float16 and float64.
  at::Tensor dequantize(bool columnwise = false,
                        std::optional<at::ScalarType> dtype = std::nullopt) const;

  /// The same parts, without a gradient.
  QuantizedTensor detach() const;
  /// Parts of its own.
  QuantizedTensor clone() const;
  /// The same codes elsewhere; itself where they lie there. A scale that is given stays where it
  /// is.
  QuantizedTensor to(at::Device device) const;
  /// The same codes, of numbers in another dtype, in memory of its own; itself where it has that
  /// one. Throws c10::TypeError on a dtype that has no codes.
  QuantizedTensor to(at::ScalarType dtype) const;

  /// Writes the codes of x, such as a master copy that an optimizer has stepped, in the directions
  /// that are there. Whoever has the same parts sees it. Has no gradient then.
  ///
  /// Shapes: x broadcasts to sizes().
  /// Throws: c10::ValueError on any other x.
  QuantizedTensor& quantize_(const at::Tensor& x);
  QuantizedTensor& copy_(const at::Tensor& x) { return quantize_(x); }
  /// The codes of another one, where the same quantizer has made the same parts; else its numbers
  /// are quantized.
  QuantizedTensor& copy_(const QuantizedTensor& x);

  /// Drops the codes of a direction, for false, or gives those that are to be there, for true,
  /// where one set of codes serves both; nullopt: as it is. Changes this object alone.
  ///
  /// Throws: c10::ValueError where none would be left; c10::Error where codes are not there.
  void update_usage(std::optional<bool> rowwise_usage = std::nullopt,
                    std::optional<bool> columnwise_usage = std::nullopt);

  /// What torch::save and torch::load come to: the parts as plain tensors under the names of
  /// QuantizedParts, "quantizer" its text, "dtype" and "sizes" of x and, of a Float8Quantizer,
  /// "scale" and "amax". Archives nest: codes.save(own), then archive.write("codes", own).
  ///
  /// Throws: c10::ValueError where the archive holds no such tensor, or what its constructor
  ///         refuses; it is as it was then.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  friend TANDEM_API QuantizedTensor quantize(const at::Tensor& x, const TensorQuantizer& quantizer);
  static QuantizedTensor made_of(const at::Tensor& x, const TensorQuantizer& quantizer);

  void check_defined() const;
  bool is_rotated() const;
  /// The same with each part changed, one that serves both directions once.
  template <typename Change>
  QuantizedTensor with(Change&& change) const;

  QuantizedParts parts_;
  TensorQuantizer quantizer_;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
  std::vector<int64_t> sizes_;
  /// That of x, for its numbers; null: none.
  std::shared_ptr<const StraightThrough> history_;
};

/// x in the codes that a quantizer makes of it.
///
///   const auto codes = tandem::quantize(x, tandem::MXFP8Quantizer{at::kFloat8_e4m3fn});
///
/// Shapes:  x any -> codes and scales as the quantizer's format says.
/// Dtypes:  float32, bfloat16, float16, float64.
/// Error:   none: bitwise what the numerics page specifies (tests GoldenQuantize, QuantizeFront).
/// Throws:  c10::ValueError (no tensor), c10::TypeError (dtypes), c10::NotImplementedError (x has a
///          tangent of forward-mode differentiation).
TANDEM_API QuantizedTensor quantize(const at::Tensor& x, const TensorQuantizer& quantizer);

/// QuantizedTensor::save and load, as torch::save and torch::load call them.
TANDEM_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                       const QuantizedTensor& x);
TANDEM_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                      QuantizedTensor& x);

/// "QuantizedTensor([4, 64], dtype=float32, quantizer=mxfp8_e4m3)".
TANDEM_API std::ostream& operator<<(std::ostream& out, const QuantizedTensor& x);

}  // namespace tandem
