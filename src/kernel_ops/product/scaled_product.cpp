#include "kernel_ops/product/scaled_product.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_scaled_mm_v2.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>

#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/operands.h"
#include "quantization/formats/block_scaling.h"
#include "quantization/formats/fp4_scaling.h"
#include "quantization/formats/mx_scaling.h"
#include "quantization/formats/tensor_scaling.h"

/// The CUDA runtime and cuBLASLt, if torch has loaded them. The symbols are weak, so that this
/// library loads with a torch that lacks them.
extern "C" __attribute__((weak)) int cudaDeviceGetAttribute(int* value, int attribute, int device);
extern "C" __attribute__((weak)) size_t cublasLtGetVersion();

namespace tandem::kernel_ops {

namespace {

using at::Tensor;
using kernels::Fp8Format;

enum class Family : uint8_t { tensor, line, square, mx, fp4 };

/// The scales of a format as torch numbers them: their kind (at::blas::ScalingType) and their order
/// (at::blas::SwizzleType).
struct Recipe {
  Family family;
  int64_t scaling, swizzle;
};

Recipe recipe_of(const Quantizer& quantizer) {
  const CodeLayout* layout = &quantizer.format->layout;
  if (layout == &kTensorScale) return {Family::tensor, 0, 0};
  if (layout == &kLineScale) return {Family::line, 4, 0};
  if (layout == &kSquareScale) return {Family::square, 5, 0};
  if (layout == &kMxScale) return {Family::mx, 3, 1};
  return {Family::fp4, 2, 1};
}

bool is_of_lines(Family family) { return family == Family::line || family == Family::square; }

at::ScalarType dtype_of(Fp8Format element) {
  switch (element) {
    case Fp8Format::e4m3:
      return at::kFloat8_e4m3fn;
    case Fp8Format::e5m2:
      return at::kFloat8_e5m2;
    default:
      return at::kFloat4_e2m1fn_x2;
  }
}

std::string_view refusal_of_tensors(const ProductType& type, const ScaledMmDevice& device) {
  if (device.capability < 89) return "FP8 is multiplied from compute capability 8.9 on";
  if (type.a.quantizer->format->element == Fp8Format::e5m2 &&
      type.b.quantizer->format->element == Fp8Format::e5m2)
    return "both operands are E5M2";
  if (type.a.cols % 16 != 0) return "k is no multiple of 16";
  return {};
}

std::string_view refusal_of_lines(const ProductType& type, const ScaledMmDevice& device,
                                  bool are_squares) {
  if (device.capability != 90)
    return "FP8 under blocks of 128 is multiplied at compute capability 9.0 alone";
  if (device.cuda < 12090 || device.cublas_lt < 120900)
    return "FP8 under blocks of 128 is multiplied from CUDA 12.9 on";
  if (are_squares) return "both operands have squares of 128";
  if (type.a.cols % 128 != 0) return "k is no multiple of 128";
  if (type.a.rows % 4 != 0) return "m is no multiple of 4";
  return {};
}

std::string_view refusal_of_small_blocks(const ProductType& type, const ScaledMmDevice& device) {
  if (device.capability < 100)
    return "MXFP8 and NVFP4 are multiplied from compute capability 10.0 on";
  if (device.cuda < 12080 || device.cublas_lt < 120800)
    return "MXFP8 and NVFP4 are multiplied from CUDA 12.8 on";
  const int64_t numbers_of_code = is_packed(*type.a.quantizer) ? 2 : 1;
  if (type.a.cols * numbers_of_code % 32 != 0) return "k is no multiple of 32";
  return {};
}

constexpr int64_t kRowAlignment = 16;

/// An operand with its contracted dimension contiguous, in rows aligned as cuBLASLt needs them.
Tensor aligned_rows(const Tensor& lines) {
  const int64_t cols = lines.size(1);
  const c10::DimVector strides = strides_of(lines);
  const bool is_aligned = reinterpret_cast<uintptr_t>(lines.const_data_ptr()) % kRowAlignment == 0;
  if (strides[1] != 1 || !is_aligned || cols % kRowAlignment != 0 || strides[0] < cols ||
      strides[0] % kRowAlignment != 0)
    return lines.clone(at::MemoryFormat::Contiguous);
  return at::native::as_strided_tensorimpl(lines, lines.sizes(), strides);
}

/// The scales of 128x128 blocks, [ceil(outer, 128), up(k / 128, 4)], for codes [outer, k].
Tensor scales_of_squares(const Tensor& lines, const Tensor& scale) {
  const c10::DimVector strides = strides_of(lines);
  if (strides[0] >= strides[1]) return scale.contiguous();
  const int64_t across = (lines.size(0) + 127) / 128, along = scale.size(0);
  Tensor turned = at::zeros({across, (along + 3) / 4 * 4}, scale.options());
  turned.narrow(1, 0, along).copy_(scale.narrow(1, 0, across).t());
  return turned;
}

/// The scales of small blocks, [up(outer, 128), up(blocks of k, 4)].
Tensor by_rows(const CodedMatrix& read) {
  return read.is_column() ? read.dequant_scale->t() : *read.dequant_scale;
}

Tensor scale_of(Family family, const CodedMatrix& read, const Tensor& lines) {
  switch (family) {
    case Family::tensor:
      return *read.dequant_scale;
    case Family::line:
      return read.dequant_scale->contiguous().narrow(1, 0, lines.size(0)).t();
    case Family::square:
      return scales_of_squares(lines, *read.dequant_scale).t();
    case Family::mx:
      return swizzled(by_rows(read)).view(at::kFloat8_e8m0fnu);
    default:
      return swizzled(by_rows(read)).view(at::kFloat8_e4m3fn);
  }
}

/// The compute capability of a device, queried once; 0 if it is unknown.
int capability_of(c10::DeviceIndex index) {
  constexpr size_t kMostDevices = 64;
  constexpr int kMajor = 75, kMinor = 76;  // numbers in cudaDeviceAttr
  static std::array<std::atomic<int>, kMostDevices> known{};
  const auto place = static_cast<size_t>(index);
  if (cudaDeviceGetAttribute == nullptr || place >= kMostDevices) return 0;
  int capability = known[place].load(std::memory_order_relaxed);
  if (capability != 0) return capability;
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, kMajor, index) != 0 ||
      cudaDeviceGetAttribute(&minor, kMinor, index) != 0)
    return 0;
  capability = 10 * major + minor;
  known[place].store(capability, std::memory_order_relaxed);
  return capability;
}

ScaledMmDevice scaled_mm_device(c10::Device device) {
  static const ScaledMmDevice libraries = [] {
    const auto& hooks = at::detail::getCUDAHooks();
    ScaledMmDevice found;
    found.is_rocm = hooks.hasROCM();
    if (hooks.hasCUDA() && !found.is_rocm) found.cuda = hooks.versionCUDART();
    if (cublasLtGetVersion != nullptr) found.cublas_lt = static_cast<int64_t>(cublasLtGetVersion());
    return found;
  }();
  ScaledMmDevice result = libraries;
  result.capability = capability_of(device.index());
  return result;
}

std::string_view refusal(const ProductType& type) {
  return refusal_of_scaled_mm(type, scaled_mm_device(type.device));
}

}  // namespace

std::string_view refusal_of_scaled_mm(const ProductType& type, const ScaledMmDevice& device) {
  if (type.a.quantizer == nullptr || type.b.quantizer == nullptr || type.beta != 0 ||
      type.alpha != 1 || type.has_epilogue())
    return "it multiplies codes, and adds them to nothing";
  if (device.is_rocm) return "ROCm is not covered";
  if (device.capability == 0) return "the compute capability is unknown";
  if (type.a.rows == 0 || type.a.cols == 0 || type.b.cols == 0) return "a product without numbers";
  const Family a = recipe_of(*type.a.quantizer).family, b = recipe_of(*type.b.quantizer).family;
  if (a != b && !(is_of_lines(a) && is_of_lines(b))) return "the operands have scales of two kinds";
  if (a != Family::tensor && (type.a.quantizer->format->element == Fp8Format::e5m2 ||
                              type.b.quantizer->format->element == Fp8Format::e5m2))
    return "E5M2 has one scale per tensor, or is decoded";
  const std::string_view why = a == Family::tensor ? refusal_of_tensors(type, device)
                               : is_of_lines(a)
                                   ? refusal_of_lines(type, device, a == b && a == Family::square)
                                   : refusal_of_small_blocks(type, device);
  if (!why.empty()) return why;
  return type.b.cols % 16 != 0 ? "n is no multiple of 16" : std::string_view();
}

Tensor swizzled(const Tensor& scales) {
  return scales.reshape({scales.size(0) / 128, 4, 32, scales.size(1) / 4, 4})
      .permute({0, 3, 2, 1, 4})
      .contiguous()
      .flatten();
}

ScaledOperand scaled_operand(const CodedMatrix& read, bool is_left) {
  const FormatDef& format = *read.quantizer->format;
  const auto [family, scaling, swizzle] = recipe_of(*read.quantizer);
  const Tensor lines = is_left ? read.matrix : read.matrix.t();
  const Tensor codes = aligned_rows(lines).view(dtype_of(format.element));
  ScaledOperand operand{is_left ? codes : codes.t(), scale_of(family, read, lines), scaling,
                        swizzle, Tensor()};
  if (format.layout.has_amax)
    operand.factor = at::mul(*read.amax, 1.0f / (6 * format.layout.largest_scale));
  return operand;
}

void multiply_by_scaled_mm(const Product& product, const Tensor& result) {
  const ScaledOperand a = scaled_operand(product.a, true), b = scaled_operand(product.b, false);
  const bool has_factors = a.factor.defined();
  const bool is_direct =
      result.scalar_type() == at::kFloat || (result.scalar_type() == at::kBFloat16 && !has_factors);
  Tensor sums = is_direct ? result : empty_beside(result, result.sizes(), at::kFloat);
  at::_scaled_mm_v2_out(sums, a.codes, b.codes, {a.scale}, a.scaling, a.swizzle, {b.scale},
                        b.scaling, b.swizzle, /*bias=*/{}, sums.scalar_type(),
                        /*contraction_dim=*/{}, /*use_fast_accum=*/false);
  if (has_factors) sums.mul_(a.factor).mul_(b.factor);
  if (!is_direct) result.copy_(sums);
}

constinit const ProductImplementation kScaledMm{
    .name = "scaled_mm",
    .device = at::kCUDA,
    .accepts = [](const ProductType& type) { return refusal(type).empty(); },
    .run = multiply_by_scaled_mm,
    .reason = refusal,
};

}  // namespace tandem::kernel_ops
