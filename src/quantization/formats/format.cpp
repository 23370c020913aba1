#include "quantization/formats/format.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/floor.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ldexp.h>
#include <ATen/ops/round.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/signbit.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <variant>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/gradient.h"
#include "kernel_ops/framework/random.h"
#include "kernel_ops/framework/shapes.h"
#include "quantization/formats/block_scaling.h"
#include "quantization/formats/fp4_scaling.h"
#include "quantization/formats/mx_scaling.h"
#include "quantization/formats/tensor_scaling.h"

namespace tandem {

namespace {

using kernels::Fp8Format;

constexpr const ScalingDef *kOfTensors[] = {&kCurrentScaling, &kDelayedScaling},
                           *kOfFp8Blocks[] = {&kBlockScaling}, *kOfMxBlocks[] = {&kMxScaling},
                           *kOfFp4Blocks[] = {&kFp4Scaling};

const FormatDef kFormats[] = {
    {"fp8_e4m3", Fp8Format::e4m3, kTensorScale, kOfTensors},
    {"fp8_e5m2", Fp8Format::e5m2, kTensorScale, kOfTensors},
    {"fp8_1x128_e4m3", Fp8Format::e4m3, kLineScale, kOfFp8Blocks},
    {"fp8_1x128_e5m2", Fp8Format::e5m2, kLineScale, kOfFp8Blocks},
    {"fp8_128x128_e4m3", Fp8Format::e4m3, kSquareScale, kOfFp8Blocks},
    {"fp8_128x128_e5m2", Fp8Format::e5m2, kSquareScale, kOfFp8Blocks},
    {"mxfp8_e4m3", Fp8Format::e4m3, kMxScale, kOfMxBlocks},
    {"mxfp8_e5m2", Fp8Format::e5m2, kMxScale, kOfMxBlocks},
    {"nvfp4", Fp8Format::e2m1, kFp4Scale, kOfFp4Blocks},
    {"nvfp4_256", Fp8Format::e2m1, kFp4Scale256, kOfFp4Blocks},
};

/// The values of "4over6" by kernels::FourOverSix.
constexpr std::string_view kFourOverSix[] = {"0", "mae", "mse"};

std::string joined(std::string text, std::string_view next) {
  if (!text.empty()) text += ", ";
  return text.append(next);
}

std::string format_names() {
  std::string names;
  for (const FormatDef& format : kFormats) names = joined(std::move(names), format.name);
  return names;
}

// The values of options as texts, and back. Parsing returns false for a text that is not valid.

std::string text_of(double number) {
  char text[32];
  return {text, std::to_chars(std::begin(text), std::end(text), number).ptr};
}
std::string text_of(bool flag) { return flag ? "1" : "0"; }
std::string text_of(kernels::FourOverSix metric) {
  return std::string(kFourOverSix[static_cast<size_t>(metric)]);
}

bool parse_value(std::string_view text, double& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}
bool parse_value(std::string_view text, bool& flag) {
  flag = text == "1";
  return flag || text == "0";
}
bool parse_value(std::string_view text, kernels::FourOverSix& metric) {
  const auto value = std::ranges::find(kFourOverSix, text);
  if (value == std::end(kFourOverSix)) return false;
  metric = static_cast<kernels::FourOverSix>(value - std::begin(kFourOverSix));
  return true;
}

/// An option of quantizers.
struct OptionRow {
  std::string_view name;
  std::variant<double Quantizer::*, bool Quantizer::*, kernels::FourOverSix Quantizer::*> member;
  /// Whether canonical texts contain the option even at its default.
  bool is_always_written = false;

  bool is_of(const ScalingDef& scaling) const {
    return std::ranges::find(scaling.options, name) != scaling.options.end();
  }
  std::string text(const Quantizer& of) const {
    return std::visit([&](auto own) { return std::string(name) + "=" + text_of(of.*own); }, member);
  }
  bool parse(std::string_view value, Quantizer& parsed) const {
    return std::visit([&](auto own) { return parse_value(value, parsed.*own); }, member);
  }
  bool is_at_default(const Quantizer& of) const {
    return std::visit([&](auto own) { return of.*own == Quantizer().*own; }, member);
  }
};

/// The only list of options, in the order of canonical texts.
const OptionRow kOptions[] = {
    {"eps", &Quantizer::amax_epsilon, true}, {"pow2", &Quantizer::power_of_two, true},
    {"2d", &Quantizer::square_blocks},       {"rht", &Quantizer::hadamard},
    {"sr", &Quantizer::stochastic_rounding}, {"4over6", &Quantizer::four_over_six},
};

std::string option_names(const ScalingDef& scaling) {
  std::string names;
  for (const OptionRow& option : kOptions)
    if (option.is_of(scaling)) names = joined(std::move(names), option.name);
  return names.empty() ? "none" : names;
}

std::string name_of(const FormatDef& format, const ScalingDef& scaling) {
  std::string name(format.name);
  if (!scaling.name.empty()) name.append(":").append(scaling.name);
  return name;
}

std::string canonical(const Quantizer& of) {
  std::string text = name_of(*of.format, *of.scaling);
  for (const OptionRow& option : kOptions)
    if (option.is_of(*of.scaling) && (option.is_always_written || !option.is_at_default(of)))
      text += ":" + option.text(of);
  return text;
}

/// The parts of a text between colons, in order.
class Pieces {
 public:
  explicit Pieces(std::string_view text) : rest_(text) {}
  bool empty() const { return is_done_; }
  std::string_view front() const { return rest_.substr(0, rest_.find(':')); }
  void pop() {
    const size_t colon = rest_.find(':');
    is_done_ = colon == std::string_view::npos;
    rest_ = is_done_ ? std::string_view() : rest_.substr(colon + 1);
  }

 private:
  std::string_view rest_;
  bool is_done_ = false;
};

void parse_option(std::string_view piece, Quantizer& parsed) {
  const size_t sign = piece.find('=');
  const std::string_view name = piece.substr(0, sign),
                         value = sign == std::string_view::npos ? "" : piece.substr(sign + 1);
  const ScalingDef& scaling = *parsed.scaling;
  const auto option = std::ranges::find(kOptions, name, &OptionRow::name);
  const bool is_known =
      option != std::end(kOptions) && option->is_of(scaling) && option->parse(value, parsed);
  TORCH_CHECK_VALUE(is_known, "quantizer: expected options of ", parsed.format->name, " among ",
                    option_names(scaling), " with a number, 0 or 1 (4over6: 0, mae or mse), got \"",
                    piece, "\". Write them as in \"fp8_e4m3:current:eps=0:pow2=1\".");
}

Quantizer parse(std::string_view text) {
  Pieces pieces(text);
  Quantizer parsed;
  const auto format = std::ranges::find(kFormats, pieces.front(), &FormatDef::name);
  TORCH_CHECK_VALUE(format != std::end(kFormats), "quantizer: expected a format among ",
                    format_names(), ", got \"", text, "\". Begin with the format's name.");
  parsed.format = format;
  parsed.scaling = format->scalings.front();
  pieces.pop();
  if (!pieces.empty() && pieces.front().find('=') == std::string_view::npos) {
    const auto scaling = std::ranges::find_if(
        format->scalings, [&](const ScalingDef* def) { return def->name == pieces.front(); });
    TORCH_CHECK_VALUE(scaling != format->scalings.end() && !pieces.front().empty(),
                      "quantizer: expected a kind of scale that ", format->name, " has, got \"",
                      pieces.front(), "\". Leave it out: it has \"", parsed.scaling->name, "\".");
    parsed.scaling = *scaling;
    pieces.pop();
  }
  for (; !pieces.empty(); pieces.pop()) parse_option(pieces.front(), parsed);
  return parsed;
}

/// All quantizers by every text that named them. They are never removed, because plans and tensors
/// hold their addresses.
class Interned {
 public:
  const Quantizer* find(std::string_view text) const {
    const std::shared_lock lock(mutex_);
    const auto known = by_text_.find(text);
    return known == by_text_.end() ? nullptr : known->second;
  }
  const Quantizer& add(std::string_view alias, Quantizer quantizer) {
    const std::unique_lock lock(mutex_);
    const auto [place, is_new] = by_text_.try_emplace(quantizer.text, nullptr);
    if (is_new) {
      owned_.push_back(std::make_unique<const Quantizer>(std::move(quantizer)));
      place->second = owned_.back().get();
    }
    by_text_.try_emplace(std::string(alias), place->second);
    return *place->second;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::map<std::string, const Quantizer*, std::less<>> by_text_;
  std::vector<std::unique_ptr<const Quantizer>> owned_;
};

Interned& interned() {
  static auto& table = *new Interned;
  return table;
}

}  // namespace

Codes codes_in(Group group, const Quantizer& quantizer, bool row, bool column) {
  Codes made{.quantizer = &quantizer};
  const bool is_shared = serves_both_directions(quantizer);
  for (size_t part = 0; part < tensors_of_codes(quantizer); ++part) {
    at::Tensor &of_rows = group[part_of(Direction::row, part)],
               &of_columns = is_shared ? of_rows : group[part_of(Direction::column, part)];
    if (column)
      made.parts[part_of(Direction::column, part)] =
          is_shared && row ? of_rows : std::move(of_columns);
    if (row) made.parts[part_of(Direction::row, part)] = std::move(of_rows);
  }
  return made;
}

const Quantizer& quantizer(std::string_view text) {
  if (const Quantizer* known = interned().find(text)) return *known;
  return interned().add(text, quantizer(parse(text)));
}

const Quantizer& quantizer(Quantizer options) {
  TORCH_INTERNAL_ASSERT(options.format != nullptr, "a quantizer has a format");
  if (options.scaling == nullptr) options.scaling = options.format->scalings.front();
  for (const OptionRow& option : kOptions)
    TORCH_CHECK_VALUE(option.is_of(*options.scaling) || option.is_at_default(options),
                      "quantizer: expected options that ",
                      name_of(*options.format, *options.scaling), " has, which are ",
                      option_names(*options.scaling), ", got ", option.text(options),
                      ". Leave it at its default.");
  TORCH_CHECK_VALUE(options.amax_epsilon >= 0 && std::isfinite(options.amax_epsilon),
                    "quantizer: expected eps >= 0 and finite, got ", options.amax_epsilon,
                    ". 0 sets no lower bound of amax.");
  TORCH_CHECK_VALUE(!options.square_blocks || !options.hadamard,
                    "quantizer: expected squares (2d) or rotated columns (rht), got both. Lines of "
                    "columns are rotated, squares have none.");
  TORCH_CHECK_VALUE(
      options.four_over_six == kernels::FourOverSix::off || !options.stochastic_rounding,
      "quantizer: expected 4over6 or rounding by chance (sr), got both. What is rounded by chance "
      "errs by chance: leave one of them out.");
  options.text = canonical(options);
  const std::string text = options.text;
  return interned().add(text, std::move(options));
}

double unit_of(const Quantizer& quantizer) {
  return std::ldexp(1.0, -kernels::traits_of(quantizer.format->element).mantissa_bits - 1);
}

bool serves_both_directions(const Quantizer& quantizer) {
  return quantizer.format->layout.serves_both_directions;
}

size_t tensors_of_codes(const Quantizer& quantizer) {
  return quantizer.format->layout.has_amax ? kPartsOfCodes : kPartsOfCodes - 1;
}

std::string_view format_name(const Quantizer& quantizer) { return quantizer.format->name; }

MatrixSize::MatrixSize(c10::SymIntArrayRef sizes)
    : rows(1), cols(sizes.empty() ? c10::SymInt(1) : sizes.back()) {
  for (size_t d = 0; d + 1 < sizes.size(); ++d) rows = rows * sizes[d];
}

c10::SymDimVector sizes_of_codes(const Quantizer& quantizer, c10::SymIntArrayRef numbers,
                                 Direction direction) {
  if (is_packed(quantizer)) return quantizer.format->layout.packed_sizes(numbers, direction);
  return {numbers.begin(), numbers.end()};
}

c10::SymDimVector sizes_of_numbers(const Quantizer& quantizer, c10::SymIntArrayRef codes,
                                   Direction direction) {
  if (is_packed(quantizer)) return quantizer.format->layout.unpacked_sizes(codes, direction);
  return {codes.begin(), codes.end()};
}

c10::SymDimVector sizes_of_part(const Quantizer& quantizer, c10::SymIntArrayRef numbers,
                                size_t group_part) {
  if (group_part == group_amax) return {};
  if (is_amax_part(group_part)) return {1};
  const Direction direction = direction_of(group_part);
  if (group_part == part_of(direction, 0)) return sizes_of_codes(quantizer, numbers, direction);
  return quantizer.format->layout.sizes(MatrixSize(numbers), direction);
}

OfRows rows_of_part(const Quantizer& quantizer, size_t group_part) {
  constexpr int64_t kSome = 1024;  // whole blocks of every format
  const auto sizes = [&](int64_t rows) {
    return sizes_of_part(quantizer, c10::SymDimVector{rows, kSome}, group_part);
  };
  const auto few = sizes(kSome), many = sizes(2 * kSome);
  for (size_t dim = 0; dim < few.size(); ++dim)
    if (const auto more = (many[dim] - few[dim]).expect_int(); more != 0)
      return {static_cast<int64_t>(dim), kSome / more};
  return {};
}

std::span<const FormatDef> formats() { return kFormats; }

namespace kernel_ops {

Specs<group_size> group_specs(const char* op, c10::SymIntArrayRef sizes,
                              const std::optional<Tensor>& given, const Quantizer& quantizer,
                              GroupMask mask) {
  const Given takes = given_to(quantizer);
  TORCH_CHECK_VALUE(
      given.has_value() == (takes != Given::nothing), op, ": expected ",
      takes == Given::scale  ? "a scale"
      : takes == Given::seed ? "a seed"
                             : "no scale and no seed",
      " for ", quantizer.text, ", got ", given ? "one" : "none",
      ". Only scales that are kept from call to call are passed in, and seeds of rounding.");
  if (takes == Given::scale) check_one_element(op, *given, "scale");
  if (takes == Given::seed) check_seed(op, *given);
  const GroupMask written = written_of(quantizer, mask);
  Specs<group_size> specs;
  for (size_t part = 0; part < group_size; ++part)
    specs[part] = {sizes_of_part(quantizer, sizes, part), dtype_of_part(quantizer, part),
                   is_written(quantizer, written, part)};
  return specs;
}

Group group_reference(const Tensor& x, const std::optional<Tensor>& given,
                      const Quantizer& quantizer, GroupMask mask) {
  check_no_gradient("quantize", x);
  const GroupMask written = written_of(quantizer, mask);
  Group group = quantizer.scaling->reference(x, given, quantizer, written);
  for (size_t part = 0; part < group.size(); ++part)
    group[part] = is_written(quantizer, written, part)
                      ? group[part].contiguous()
                      : at::empty({0}, x.options().dtype(dtype_of_part(quantizer, part)));
  return group;
}

/// Computes in float64, where no operation rounds but the intended one.
Tensor encode(const Tensor& scaled, kernels::Fp8Format format, bool saturate, const Tensor& words) {
  const kernels::Fp8Traits& f = kernels::traits_of(format);
  const bool saturates = saturate || f.above == f.sign();
  // A format that does not saturate has room for at least one code above its largest number.
  const Tensor x = scaled.to(at::kDouble),
               magnitude = at::clamp(at::abs(x), 0, saturates ? f.max : 2 * f.max);
  // frexp gives zero the exponent 0, as if it lay in [0.5, 1).
  const Tensor exponent =
      at::where(magnitude == 0, f.min_exponent(),
                at::clamp(std::get<1>(at::frexp(magnitude)) - 1, f.min_exponent()));
  const Tensor quantum =
      at::ldexp(at::scalar_tensor(1.0, x.options()), (exponent - f.mantissa_bits).to(at::kDouble));
  const Tensor quotient = magnitude / quantum;
  Tensor steps;
  if (words.defined()) {
    const Tensor low = at::floor(quotient);
    const Tensor chance = words.bitwise_right_shift(8).to(at::kDouble) * 0x1p-24;
    steps = low.to(at::kLong) + (chance < quotient - low).to(at::kLong);
  } else {
    steps = at::round(quotient).to(at::kLong);  // to nearest even, as at::round does
  }
  const Tensor code =
      ((exponent - f.min_exponent()).to(at::kLong) * (int64_t{1} << f.mantissa_bits) + steps);
  const Tensor bounded =
      at::where(code > int64_t{f.largest}, int64_t{saturates ? f.largest : f.above}, code);
  const Tensor with_sign =
      at::bitwise_or(bounded, at::signbit(x).to(at::kLong) * int64_t{f.sign()});
  return at::where(at::isnan(x), int64_t{f.nan_code()}, with_sign).to(at::kByte);
}

Tensor decode_values(const Tensor& codes, kernels::Fp8Format format) {
  const kernels::Fp8Traits& f = kernels::traits_of(format);
  const int64_t implicit = int64_t{1} << f.mantissa_bits;
  const Tensor code = codes.to(at::kLong), magnitude = code.bitwise_and(int64_t{f.nan_code()}),
               field = magnitude.bitwise_right_shift(f.mantissa_bits),
               mantissa = magnitude.bitwise_and(implicit - 1),
               significand = at::where(field > 0, mantissa + implicit, mantissa),
               exponent = at::clamp(field, 1) + (f.min_exponent() - f.mantissa_bits - 1);
  const Tensor finite = at::ldexp(significand.to(at::kDouble), exponent.to(at::kDouble)),
               bounded = at::where(magnitude > int64_t{f.largest}, INFINITY, finite),
               with_sign =
                   at::where(code.bitwise_and(int64_t{f.sign()}) != 0, bounded.neg(), bounded);
  return at::where(magnitude >= int64_t{f.first_nan}, NAN, with_sign).to(at::kFloat);
}

}  // namespace kernel_ops
}  // namespace tandem
