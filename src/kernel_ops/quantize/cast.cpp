#include "kernel_ops/quantize/cast.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ldexp.h>
#include <ATen/ops/nextafter.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include <cmath>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/gradient.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/random.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernels/cast.h"
#include "quantization/formats/format.h"

namespace tandem::kernel_ops {

namespace {

using kernels::CastFormat;

CastFormat format_of(const char* op, std::string_view name) {
  constexpr std::pair<std::string_view, CastFormat> kFormats[] = {{"e4m3", CastFormat::e4m3},
                                                                  {"e5m2", CastFormat::e5m2},
                                                                  {"e2m1", CastFormat::e2m1},
                                                                  {"e8m0", CastFormat::e8m0}};
  for (const auto& [known, format] : kFormats)
    if (known == name) return format;
  TORCH_CHECK_VALUE(false, op, ": expected a format among e4m3, e5m2, e2m1, e8m0, got \"",
                    std::string(name), "\". Name one of them.");
}

/// The FP8 or FP4 format of a cast to any format but e8m0.
constexpr kernels::Fp8Format fp8_format(CastFormat format) {
  return static_cast<kernels::Fp8Format>(format);
}
static_assert(fp8_format(CastFormat::e4m3) == kernels::Fp8Format::e4m3 &&
                  fp8_format(CastFormat::e5m2) == kernels::Fp8Format::e5m2 &&
                  fp8_format(CastFormat::e2m1) == kernels::Fp8Format::e2m1,
              "formats that both have are in the same order");

/// Computes in integers, because a logarithm is wrong near powers of two. float64 is rounded up to
/// float32, as E8M0 rounds up.
Tensor e8m0_codes(const Tensor& x) {
  const Tensor nearest = x.to(at::kFloat), infinity = at::full_like(nearest, INFINITY);
  const Tensor above = at::where(nearest < x, at::nextafter(nearest, infinity), nearest);
  const Tensor numbers = at::where(x < 0, 0.0f, above);
  const Tensor bits = numbers.contiguous().view(at::kInt).to(at::kLong).bitwise_and(0x7FFFFFFF);
  const Tensor code =
      at::clamp((bits + 0x7FFFFF).bitwise_right_shift(23), 0, int64_t{kernels::kE8m0Largest});
  const Tensor least = at::where(bits <= 0x00400000, 0, code);
  return at::where(bits > 0x7F800000, int64_t{kernels::kE8m0Nan}, least).to(at::kByte);
}

}  // namespace

Specs<1> CastToCodes::shapes(const Args& args) {
  check_floating(kName, args.x, "x");
  const CastFormat format = format_of(kName, args.format);
  if (args.seed) check_seed(kName, *args.seed);
  TORCH_CHECK_VALUE(!args.seed || format != CastFormat::e8m0, kName,
                    ": expected no seed for e8m0, which rounds up, got one. Leave it out.");
  return {like(args.x, at::kByte)};
}

void CastToCodes::cpu(const Args& args, std::span<Tensor> results) {
  kernels::Cast cast{format_of(kName, args.format), args.saturate};
  if (args.seed) {
    const Tensor numbers = args.seed->contiguous();
    const auto* words = numbers.const_data_ptr<int64_t>();
    cast.rounding = kernels::Rounding::stochastic;
    cast.seed = static_cast<uint64_t>(words[0]);
    if (numbers.numel() > 1) cast.offset = static_cast<uint32_t>(words[1]);
  }
  kernels::cpu::cast_to_codes(RowsIn(args.x), cast, results[0].data_ptr<uint8_t>());
}

Results<1> CastToCodes::reference(const Args& args) {
  check_no_gradient(kName, args.x);
  const CastFormat format = format_of(kName, args.format);
  if (format == CastFormat::e8m0) return {e8m0_codes(args.x)};
  Tensor words;
  if (args.seed)
    words = philox_words(*args.seed, args.x.sym_numel()).reshape_symint(args.x.sym_sizes());
  return {encode(args.x, fp8_format(format), args.saturate, words)};
}

Specs<1> CastFromCodes::shapes(const Args& args) {
  check_codes(kName, args.codes);
  check_decoded_dtype(kName, args.dtype);
  format_of(kName, args.format);
  return {like(args.codes, args.dtype)};
}

void CastFromCodes::cpu(const Args& args, std::span<Tensor> results) {
  const Tensor codes = args.codes.contiguous();
  kernels::cpu::cast_from_codes(codes.const_data_ptr<uint8_t>(), format_of(kName, args.format),
                                rows_out(results[0]));
}

Results<1> CastFromCodes::reference(const Args& args) {
  const CastFormat format = format_of(kName, args.format);
  if (format != CastFormat::e8m0)
    return {decode_values(args.codes, fp8_format(format)).to(args.dtype)};
  const Tensor exponent = args.codes.to(at::kDouble) - 127;
  const Tensor power = at::ldexp(at::scalar_tensor(1.0, exponent.options()), exponent);
  return {at::where(args.codes == int64_t{kernels::kE8m0Nan}, NAN, power).to(args.dtype)};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<CastToCodes>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kSeed>::these, CastToCodes::cpu}});
  register_kernel_op<CastFromCodes>(
      library, {{"cpu", at::kCPU, Takes<kCodes, kArithmetic>::these, CastFromCodes::cpu}});
}

}  // namespace tandem::kernel_ops
