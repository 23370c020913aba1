#include "tandem/quantize.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/fmax.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <utility>

#include "autograd/straight_through.h"
#include "kernel_ops/framework/checks.h"
#include "kernel_ops/quantize/cast.h"
#include "kernel_ops/quantize/quantize.h"

namespace tandem {

namespace {

using at::Tensor;

// Casts.

constexpr std::pair<at::ScalarType, std::string_view> kCasts[] = {
    {at::kFloat8_e4m3fn, "e4m3"},
    {at::kFloat8_e5m2, "e5m2"},
    {at::kFloat8_e8m0fnu, "e8m0"},
    {at::ScalarType::Float4_e2m1fn_x2, "e2m1"}};

std::string name_of(at::ScalarType dtype) {
  return dtype == at::ScalarType::Undefined ? "none" : std::string(dtype_name(dtype));
}

void check_tensor(const char* function, const char* name, const Tensor& tensor,
                  const char* remedy) {
  TORCH_CHECK_VALUE(tensor.defined(), function, ": expected ", name,
                    " to be a tensor, got an undefined one. ", remedy);
}

std::string_view cast_format(const char* function, at::ScalarType dtype) {
  for (const auto& [known, format] : kCasts)
    if (known == dtype) return format;
  TORCH_CHECK_VALUE(false, function,
                    ": expected a dtype among float8_e4m3fn, float8_e5m2, float8_e8m0fnu and "
                    "float4_e2m1fn_x2, got ",
                    name_of(dtype), ". Pass one of them.");
}

// Quantizers.

std::string element_of(const char* name, at::ScalarType fp8_dtype) {
  TORCH_CHECK_VALUE(fp8_dtype == at::kFloat8_e4m3fn || fp8_dtype == at::kFloat8_e5m2, name,
                    ": expected fp8_dtype to be at::kFloat8_e4m3fn or at::kFloat8_e5m2, got ",
                    name_of(fp8_dtype), ". Pass one of them.");
  return fp8_dtype == at::kFloat8_e4m3fn ? "e4m3" : "e5m2";
}

/// The quantizer with the options that say how it chooses scales. `name`: the struct of `options`.
template <typename Options>
const Quantizer& with_scale_options(Quantizer made, const char* name, const Options& options) {
  TORCH_CHECK_VALUE(std::isfinite(options.amax_epsilon) && options.amax_epsilon >= 0, name,
                    ": expected amax_epsilon to be a finite number >= 0, got ",
                    options.amax_epsilon, ". It is the least amax.");
  made.amax_epsilon = options.amax_epsilon;
  made.power_of_two = options.force_pow_2_scales;
  return quantizer(made);
}

void check_directions(const char* name, bool rowwise, bool columnwise) {
  TORCH_CHECK_VALUE(rowwise || columnwise, name,
                    ": expected rowwise or columnwise codes to be wanted, got neither. Leave one "
                    "of them true.");
}

const Quantizer& core_of(const Float8CurrentScalingQuantizer& options) {
  constexpr const char* kName = "Float8CurrentScalingQuantizer";
  return with_scale_options(quantizer("fp8_" + element_of(kName, options.fp8_dtype) + ":current"),
                            kName, options);
}

const Quantizer& core_of(const Float8BlockQuantizer& options) {
  constexpr const char* kName = "Float8BlockQuantizer";
  TORCH_CHECK_VALUE(options.block_scaling_dim == 1 || options.block_scaling_dim == 2, kName,
                    ": expected block_scaling_dim to be 1 or 2, got ", options.block_scaling_dim,
                    ". 1: lines, 2: squares.");
  const char* const layout = options.block_scaling_dim == 2 ? "fp8_128x128_" : "fp8_1x128_";
  return with_scale_options(quantizer(layout + element_of(kName, options.fp8_dtype)), kName,
                            options);
}

const Quantizer& core_of(const MXFP8Quantizer& options) {
  Quantizer made = quantizer("mxfp8_" + element_of("MXFP8Quantizer", options.fp8_dtype));
  made.square_blocks = options.with_2d_quantization;
  return quantizer(made);
}

const Quantizer& core_of(const NVFP4Quantizer& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      options.with_post_rht_amax == options.with_rht,
      "NVFP4Quantizer: expected with_post_rht_amax=", options.with_rht ? "true" : "false",
      ", as with_rht, got ", options.with_post_rht_amax ? "true" : "false",
      ". This version knows the amax of the rotated columns only.");
  TORCH_CHECK_VALUE(
      options.nvfp4_e4m3_max == 448 || (options.nvfp4_use_4over6 && options.nvfp4_e4m3_max == 256),
      "NVFP4Quantizer: expected nvfp4_e4m3_max to be 448, or, with nvfp4_use_4over6, 256, got ",
      options.nvfp4_e4m3_max, ". Without nvfp4_use_4over6 no scale needs room above it.");
  Quantizer made = quantizer(options.nvfp4_e4m3_max == 448 ? "nvfp4" : "nvfp4_256");
  made.square_blocks = options.with_2d_quantization;
  made.hadamard = options.with_rht;
  made.stochastic_rounding = options.stochastic_rounding;
  if (options.nvfp4_use_4over6)
    made.four_over_six = options.nvfp4_4over6_err_mode == NVFP4BlockScaling::ErrorMetric::mae
                             ? kernels::FourOverSix::mae
                             : kernels::FourOverSix::mse;
  return quantizer(made);
}

void check_one_number(const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.defined() && tensor.scalar_type() == at::kFloat && tensor.numel() == 1,
      "Float8Quantizer: expected ", name, " to be a tensor of one float32, got ",
      tensor.defined() ? name_of(tensor.scalar_type()) : std::string("an undefined tensor"),
      " of shape ", tensor.defined() ? tensor.sizes() : at::IntArrayRef(),
      ". Pass at::ones({1}) to begin with.");
}

// Quantized tensors.

/// In the order of the results of kernel_ops::Quantize.
constexpr std::array<Tensor QuantizedParts::*, group_amax> kParts = {
    &QuantizedParts::rowwise_data,         &QuantizedParts::rowwise_scale_inv,
    &QuantizedParts::amax_rowwise,         &QuantizedParts::columnwise_data,
    &QuantizedParts::columnwise_scale_inv, &QuantizedParts::amax_columnwise};
constexpr std::array<const char*, group_amax> kNames = {"rowwise_data",         "rowwise_scale_inv",
                                                        "amax_rowwise",         "columnwise_data",
                                                        "columnwise_scale_inv", "amax_columnwise"};

/// Whether quantizers take numbers of this dtype.
bool has_codes(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

void check_numbers(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(
      has_codes(dtype),
      "QuantizedTensor: expected numbers in float32, bfloat16, float16 or float64, got ",
      name_of(dtype), ". Call dequantize(), and convert what it returns.");
}

QuantizedParts parts_of(Codes codes) {
  QuantizedParts parts;
  for (size_t part = 0; part < kParts.size(); ++part)
    parts.*kParts[part] = std::move(codes.parts[part]);
  return parts;
}

/// Quantizes x, and raises `amax` to the amax of x where `amax` is defined.
QuantizedParts codes_of(const Tensor& x, const Quantizer& quantizer, bool rowwise, bool columnwise,
                        const Tensor& scale, const Tensor& amax) {
  std::optional<Tensor> given;
  if (given_to(quantizer) == Given::scale) given = scale;
  if (given_to(quantizer) == Given::seed)
    given = at::randint(std::numeric_limits<int64_t>::max(), {}, x.options().dtype(at::kLong));
  const c10::AutoGradMode no_grad(false);
  Group group = kernel_ops::dispatch<kernel_ops::Quantize>(
      {.x = x, .given = given, .quantizer = quantizer, .output_mask = {rowwise, columnwise, true}});
  // fmax keeps the amaxes of earlier calls of the step, and ignores NaN.
  if (amax.defined()) amax.copy_(at::fmax(amax, group[group_amax].view_as(amax)));
  return parts_of(codes_in(std::move(group), quantizer, rowwise, columnwise));
}

void copy_parts(const QuantizedParts& from, const QuantizedParts& to) {
  const c10::AutoGradMode no_grad(false);
  for (size_t part = 0; part < kParts.size(); ++part) {
    const Tensor& written = to.*kParts[part];
    const bool is_of_rows =
        part >= kPartsOfCodes && written.is_same(to.*kParts[part - kPartsOfCodes]);
    if (written.defined() && !is_of_rows) written.copy_(from.*kParts[part]);
  }
}

void check_sizes(at::IntArrayRef sizes) {
  bool are_sizes = std::ranges::all_of(sizes, [](int64_t size) { return size >= 0; });
  int64_t product = 1;
  for (const int64_t size : sizes)
    are_sizes = are_sizes && !c10::mul_overflows(product, size, &product);
  TORCH_CHECK_VALUE(are_sizes,
                    "QuantizedTensor: expected sizes of at least 0 whose product is below 2^63, "
                    "got ",
                    sizes, ". Pass those of x.");
}

/// Throws c10::ValueError unless the parts fit numbers of these sizes.
void check_parts(const QuantizedParts& parts, const Quantizer& quantizer, at::IntArrayRef sizes) {
  check_sizes(sizes);
  const CodeLayout& layout = quantizer.format->layout;
  const c10::SymDimVector numbers(sizes.begin(), sizes.end());
  for (size_t part = 0; part < kParts.size(); ++part) {
    const Tensor& tensor = parts.*kParts[part];
    const Direction direction = direction_of(part);
    const bool is_wanted = (parts.*kParts[part_of(direction, 0)]).defined() &&
                           (!is_amax_part(part) || layout.has_amax);
    TORCH_CHECK_VALUE(tensor.defined() == is_wanted, "QuantizedTensor: expected ",
                      is_wanted ? "" : "no ", kNames[part], " with these codes of ", quantizer.text,
                      ", got ", tensor.defined() ? "one" : "none",
                      ". Pass the parts that quantize made.");
    if (!is_wanted) continue;
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "QuantizedTensor: expected ", kNames[part],
                      " to be a strided tensor, got one of layout ", tensor.layout(),
                      ". Pass the parts that quantize made.");
    const c10::SymDimVector expected = sizes_of_part(quantizer, numbers, part);
    const at::ScalarType dtype = dtype_of_part(quantizer, part);
    const bool is_one = expected.empty() && tensor.numel() == 1;
    TORCH_CHECK_VALUE(tensor.scalar_type() == dtype &&
                          (is_one || tensor.sym_sizes() == c10::SymIntArrayRef(expected)),
                      "QuantizedTensor: expected ", kNames[part], " of shape ",
                      c10::SymIntArrayRef(expected), ", ", name_of(dtype),
                      ", for numbers of shape ", sizes, " in ", quantizer.text, ", got shape ",
                      tensor.sizes(), ", ", name_of(tensor.scalar_type()),
                      ". Pass the parts that quantize made.");
  }
  if (!serves_both_directions(quantizer) || !parts.rowwise_data.defined()) return;
  for (size_t part = part_of(Direction::column, 0); part < kParts.size(); ++part) {
    const Tensor& of_columns = parts.*kParts[part];
    TORCH_CHECK_VALUE(
        !of_columns.defined() || of_columns.is_same(parts.*kParts[part - kPartsOfCodes]),
        "QuantizedTensor: expected ", kNames[part], " to be ", kNames[part - kPartsOfCodes],
        ", as one set of codes serves both directions in ", quantizer.text,
        ", got another tensor. Pass the same tensor twice, or that of one direction.");
  }
}

/// Whether two tensors from an archive have equal bytes, as if one tensor had been written twice.
bool are_one(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined() || a.layout() != at::kStrided || b.layout() != at::kStrided ||
      a.device() != b.device() || a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes())
    return false;
  const auto bytes = [](const Tensor& x) { return x.contiguous().flatten().view(at::kByte); };
  return at::equal(bytes(a), bytes(b));
}

}  // namespace

Tensor cast(const Tensor& x, at::ScalarType dtype, const CastOptions& options) {
  check_tensor("cast", "x", x, "Pass the numbers.");
  if (options.seed)
    check_tensor("cast", "a seed", *options.seed, "Leave it out to round to nearest.");
  return kernel_ops::dispatch<kernel_ops::CastToCodes>({.x = x,
                                                        .format = cast_format("cast", dtype),
                                                        .saturate = options.saturate,
                                                        .seed = options.seed})[0];
}

Tensor cast_back(const Tensor& codes, at::ScalarType dtype, at::ScalarType to) {
  check_tensor("cast_back", "codes", codes, "Pass what cast has made.");
  return kernel_ops::dispatch<kernel_ops::CastFromCodes>(
      {.codes = codes, .format = cast_format("cast_back", dtype), .dtype = to})[0];
}

TensorQuantizer::TensorQuantizer(const char* name, const Quantizer& quantizer, bool rowwise,
                                 bool columnwise)
    : quantizer_(&quantizer), rowwise_(rowwise), columnwise_(columnwise) {
  check_directions(name, rowwise, columnwise);
}

TensorQuantizer::TensorQuantizer(const Float8CurrentScalingQuantizer& options)
    : TensorQuantizer("Float8CurrentScalingQuantizer", core_of(options), options.rowwise,
                      options.columnwise) {}

TensorQuantizer::TensorQuantizer(const Float8Quantizer& options)
    : TensorQuantizer(
          "Float8Quantizer",
          tandem::quantizer("fp8_" + element_of("Float8Quantizer", options.fp8_dtype) + ":delayed"),
          options.rowwise, options.columnwise) {
  check_one_number("scale", options.scale);
  check_one_number("amax", options.amax);
  scale_ = options.scale;
  amax_ = options.amax;
}

TensorQuantizer::TensorQuantizer(const Float8BlockQuantizer& options)
    : TensorQuantizer("Float8BlockQuantizer", core_of(options), options.rowwise,
                      options.columnwise) {}

TensorQuantizer::TensorQuantizer(const MXFP8Quantizer& options)
    : TensorQuantizer("MXFP8Quantizer", core_of(options), options.rowwise, options.columnwise) {}

TensorQuantizer::TensorQuantizer(const NVFP4Quantizer& options)
    : TensorQuantizer("NVFP4Quantizer", core_of(options), options.rowwise, options.columnwise) {}

TensorQuantizer::TensorQuantizer(std::string_view text, bool rowwise, bool columnwise)
    : TensorQuantizer("TensorQuantizer", tandem::quantizer(text), rowwise, columnwise) {
  if (given_to(*quantizer_) != Given::scale) return;
  scale_ = at::ones({1});
  amax_ = at::zeros({1});
}

TensorQuantizer::TensorQuantizer(TensorQuantizer&& other) noexcept { *this = std::move(other); }

TensorQuantizer& TensorQuantizer::operator=(TensorQuantizer&& other) noexcept {
  if (this == &other) return *this;
  quantizer_ = std::exchange(other.quantizer_, nullptr);
  rowwise_ = other.rowwise_;
  columnwise_ = other.columnwise_;
  scale_ = std::move(other.scale_);
  amax_ = std::move(other.amax_);
  return *this;
}

const Quantizer& TensorQuantizer::core() const {
  TORCH_CHECK_VALUE(quantizer_ != nullptr,
                    "TensorQuantizer: expected a quantizer, got one that was moved from. Make "
                    "another, or assign one to it.");
  return *quantizer_;
}

const std::string& TensorQuantizer::text() const { return core().text; }

void TensorQuantizer::set_usage(std::optional<bool> rowwise, std::optional<bool> columnwise) {
  core();
  const bool row = rowwise.value_or(rowwise_), column = columnwise.value_or(columnwise_);
  check_directions("set_usage", row, column);
  rowwise_ = row;
  columnwise_ = column;
}

QuantizedTensor::QuantizedTensor(const QuantizedParts& parts, const TensorQuantizer& quantizer,
                                 at::ScalarType dtype, at::IntArrayRef sizes)
    : parts_(parts), quantizer_(quantizer), dtype_(dtype), sizes_(sizes.vec()) {
  TORCH_CHECK_VALUE(parts.rowwise_data.defined() || parts.columnwise_data.defined(),
                    "QuantizedTensor: expected codes of rows or of columns, got neither. Pass "
                    "rowwise_data or columnwise_data.");
  check_numbers(dtype);
  check_parts(parts, quantizer.core(), sizes);
}

void QuantizedTensor::check_defined() const {
  TORCH_CHECK_VALUE(defined(),
                    "QuantizedTensor: expected one with codes, got an undefined one. Make it with "
                    "quantize, or read it with torch::load.");
}

const TensorQuantizer& QuantizedTensor::quantizer() const {
  check_defined();
  return quantizer_;
}

at::IntArrayRef QuantizedTensor::sizes() const {
  check_defined();
  return sizes_;
}

at::Device QuantizedTensor::device() const {
  check_defined();
  return (parts_.rowwise_data.defined() ? parts_.rowwise_data : parts_.columnwise_data).device();
}

bool QuantizedTensor::is_rotated() const { return quantizer_.quantizer_->hadamard; }

Tensor QuantizedTensor::dequantize(bool columnwise, std::optional<at::ScalarType> dtype) const {
  check_defined();
  const bool has_rows = parts_.rowwise_data.defined();
  TORCH_CHECK_VALUE(columnwise || has_rows || !is_rotated(),
                    "dequantize: expected codes of rows, got rotated ones of columns, which do not "
                    "tell the numbers. Pass columnwise=true for those.");
  const bool column = columnwise || !has_rows;
  const Direction direction = column ? Direction::column : Direction::row;
  const Tensor &data = parts_.*kParts[part_of(direction, 0)],
               &scale = parts_.*kParts[part_of(direction, 1)],
               &amax = parts_.*kParts[part_of(direction, 2)];
  TORCH_CHECK_VALUE(data.defined(),
                    "dequantize: expected columnwise codes, got a tensor quantized without. Build "
                    "the quantizer with columnwise=true.");
  const bool rotated = column && is_rotated();
  const c10::SymDimVector sizes(sizes_.begin(), sizes_.end());
  Tensor numbers;
  {
    const c10::AutoGradMode no_grad(false);
    numbers = kernel_ops::dispatch<kernel_ops::Dequantize>(kernel_ops::dequantizing(
        {data, quantizer_.quantizer_, direction, &scale, amax.defined() ? &amax : nullptr},
        dtype.value_or(dtype_),
        rotated ? at::OptionalSymIntArrayRef() : c10::SymIntArrayRef(sizes)))[0];
  }
  if (history_ && !rotated) history_->give_to(numbers);
  return numbers;
}

template <typename Change>
QuantizedTensor QuantizedTensor::with(Change&& change) const {
  check_defined();
  const c10::AutoGradMode no_grad(false);
  QuantizedTensor made = *this;
  for (size_t part = 0; part < kParts.size(); ++part) {
    const Tensor& own = parts_.*kParts[part];
    if (!own.defined()) continue;
    const bool is_of_rows =
        part >= kPartsOfCodes && own.is_same(parts_.*kParts[part - kPartsOfCodes]);
    made.parts_.*kParts[part] =
        is_of_rows ? made.parts_.*kParts[part - kPartsOfCodes] : change(own);
  }
  return made;
}

QuantizedTensor QuantizedTensor::detach() const {
  check_defined();
  QuantizedTensor made = *this;
  made.history_ = nullptr;
  return made;
}

QuantizedTensor QuantizedTensor::clone() const {
  return with([](const Tensor& part) { return part.clone(); });
}

QuantizedTensor QuantizedTensor::to(at::Device device) const {
  return with([&](const Tensor& part) { return part.to(device); });
}

QuantizedTensor QuantizedTensor::to(at::ScalarType dtype) const {
  check_defined();
  check_numbers(dtype);
  if (dtype == dtype_) return *this;
  QuantizedTensor made = clone();
  made.dtype_ = dtype;
  return made;
}

QuantizedTensor& QuantizedTensor::quantize_(const Tensor& x) {
  check_defined();
  TORCH_CHECK_VALUE(x.defined() && at::is_expandable_to(x.sizes(), sizes_),
                    "quantize_: expected x that broadcasts to shape ", at::IntArrayRef(sizes_),
                    ", got ", x.defined() ? "shape " : "an undefined tensor",
                    x.defined() ? c10::str(x.sizes()) : std::string(),
                    ". Quantize it into a new one.");
  const Tensor numbers = x.detach().to(device(), dtype_).expand(sizes_);
  copy_parts(codes_of(numbers, *quantizer_.quantizer_, parts_.rowwise_data.defined(),
                      parts_.columnwise_data.defined(), quantizer_.scale_, quantizer_.amax_),
             parts_);
  history_ = nullptr;
  return *this;
}

QuantizedTensor& QuantizedTensor::copy_(const QuantizedTensor& x) {
  check_defined();
  x.check_defined();
  const bool has_same_parts = quantizer_.quantizer_ == x.quantizer_.quantizer_ &&
                              sizes_ == x.sizes_ &&
                              std::ranges::all_of(kParts, [&](Tensor QuantizedParts::*part) {
                                return (parts_.*part).defined() == (x.parts_.*part).defined();
                              });
  if (!has_same_parts) return quantize_(x.detach().dequantize());
  copy_parts(x.parts_, parts_);
  if (quantizer_.amax_.defined()) quantizer_.amax_.copy_(x.quantizer_.amax_);
  history_ = nullptr;
  return *this;
}

void QuantizedTensor::update_usage(std::optional<bool> rowwise_usage,
                                   std::optional<bool> columnwise_usage) {
  check_defined();
  const std::array wanted{rowwise_usage.value_or(parts_.rowwise_data.defined()),
                          columnwise_usage.value_or(parts_.columnwise_data.defined())};
  TORCH_CHECK_VALUE(wanted[0] || wanted[1],
                    "update_usage: expected codes of rows or of columns to be kept, got neither. "
                    "Leave one of them true.");
  for (const Direction direction : {Direction::row, Direction::column}) {
    const Direction other = direction == Direction::row ? Direction::column : Direction::row;
    if (!wanted[static_cast<size_t>(direction)] ||
        (parts_.*kParts[part_of(direction, 0)]).defined())
      continue;
    const char* const names[] = {"rowwise", "columnwise"};
    TORCH_CHECK(serves_both_directions(*quantizer_.quantizer_), "update_usage: expected ",
                names[static_cast<size_t>(direction)], " codes that are there or the same as ",
                names[static_cast<size_t>(other)], " ones, got a tensor of ", quantizer_.text(),
                " without. Quantize with ", names[static_cast<size_t>(direction)], "=true.");
    for (const size_t part : {size_t{0}, size_t{1}})
      parts_.*kParts[part_of(direction, part)] = parts_.*kParts[part_of(other, part)];
  }
  for (size_t part = 0; part < kParts.size(); ++part)
    if (!wanted[static_cast<size_t>(direction_of(part))]) parts_.*kParts[part] = Tensor();
}

QuantizedTensor QuantizedTensor::made_of(const Tensor& x, const TensorQuantizer& quantizer) {
  TORCH_CHECK_VALUE(x.defined(),
                    "quantize: expected a tensor, got an undefined one. Pass the numbers.");
  check_floating("quantize", x, "x");
  QuantizedTensor made;
  made.history_ = StraightThrough::of(x);
  made.parts_ = codes_of(x.detach(), quantizer.core(), quantizer.rowwise_, quantizer.columnwise_,
                         quantizer.scale_, quantizer.amax_);
  made.quantizer_ = quantizer;
  made.dtype_ = x.scalar_type();
  made.sizes_ = x.sizes().vec();
  return made;
}

void QuantizedTensor::save(torch::serialize::OutputArchive& archive) const {
  check_defined();
  archive.write("quantizer", c10::IValue(quantizer_.text()));
  archive.write("dtype", c10::IValue(name_of(dtype_)));
  archive.write("sizes", c10::IValue(sizes_));
  for (size_t part = 0; part < kParts.size(); ++part)
    if (const Tensor& tensor = parts_.*kParts[part]; tensor.defined())
      archive.write(kNames[part], tensor, /*is_buffer=*/true);
  if (quantizer_.scale_.defined()) {
    archive.write("scale", quantizer_.scale_, /*is_buffer=*/true);
    archive.write("amax", quantizer_.amax_, /*is_buffer=*/true);
  }
}

void QuantizedTensor::load(torch::serialize::InputArchive& archive) {
  c10::IValue text, dtype, sizes;
  TORCH_CHECK_VALUE(archive.try_read("quantizer", text) && text.isString() &&
                        archive.try_read("dtype", dtype) && dtype.isString() &&
                        archive.try_read("sizes", sizes) && sizes.isIntList(),
                    "QuantizedTensor: expected an archive that torch::save wrote of one, got one "
                    "without quantizer, dtype and sizes. Load what was saved.");
  QuantizedParts parts;
  for (size_t part = 0; part < kParts.size(); ++part)
    archive.try_read(kNames[part], parts.*kParts[part], /*is_buffer=*/true);
  TensorQuantizer made(text.toStringRef());
  if (serves_both_directions(made.core()))
    for (size_t part = part_of(Direction::column, 0); part < kParts.size(); ++part)
      if (const Tensor& of_rows = parts.*kParts[part - kPartsOfCodes];
          are_one(of_rows, parts.*kParts[part]))
        parts.*kParts[part] = of_rows;
  made.rowwise_ = parts.rowwise_data.defined();
  made.columnwise_ = parts.columnwise_data.defined();
  if (made.scale_.defined()) {
    Tensor scale, amax;
    archive.try_read("scale", scale, /*is_buffer=*/true);
    archive.try_read("amax", amax, /*is_buffer=*/true);
    check_one_number("scale", scale);
    check_one_number("amax", amax);
    made.scale_ = scale;
    made.amax_ = amax;
  }
  const auto& dtypes = c10::getStringToDtypeMap();
  const auto found = dtypes.find(dtype.toStringRef());
  TORCH_CHECK_VALUE(found != dtypes.end() && has_codes(found->second),
                    "QuantizedTensor: expected an archive whose dtype is float32, bfloat16, "
                    "float16 or float64, got \"",
                    dtype.toStringRef(), "\". Load what was saved.");
  *this = QuantizedTensor(parts, made, found->second, sizes.toIntVector());
}

QuantizedTensor quantize(const Tensor& x, const TensorQuantizer& quantizer) {
  return QuantizedTensor::made_of(x, quantizer);
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const QuantizedTensor& x) {
  x.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           QuantizedTensor& x) {
  x.load(archive);
  return archive;
}

std::ostream& operator<<(std::ostream& out, const QuantizedTensor& x) {
  if (!x.defined()) return out << "QuantizedTensor()";
  return out << "QuantizedTensor(" << x.sizes() << ", dtype=" << name_of(x.scalar_type())
             << ", quantizer=" << x.quantizer().text() << ")";
}

}  // namespace tandem
