#include "quantization/formats/fp4_scaling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cfloat>

#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/random.h"
#include "kernels/nvfp4.h"
#include "quantization/formats/cpu_scaling.h"

namespace tandem {

namespace fp4_blocks {
namespace {

using at::Tensor;

constexpr int64_t kBlock = kernels::kFp4Block;

c10::SymInt up(const c10::SymInt& size, int64_t to) { return (size + (to - 1)) / to * to; }

c10::SymDimVector sizes_of_scales(const MatrixSize& size, Direction direction) {
  const auto blocks = [](const c10::SymInt& n) { return up(n, kBlock) / kBlock; };
  if (direction == Direction::row) return {up(size.rows, 128), up(blocks(size.cols), 4)};
  return {up(blocks(size.rows), 4), up(size.cols, 128)};
}

c10::SymDimVector packed_sizes(c10::SymIntArrayRef numbers, Direction direction) {
  if (direction == Direction::column) {
    const MatrixSize size(numbers);
    return {up(size.rows, kBlock) / 2, size.cols};
  }
  c10::SymDimVector sizes(numbers.begin(), numbers.end());
  if (sizes.empty()) sizes.push_back(1);
  sizes.back() = up(sizes.back(), kBlock) / 2;
  return sizes;
}

c10::SymDimVector unpacked_sizes(c10::SymIntArrayRef codes, Direction direction) {
  c10::SymDimVector sizes(codes.begin(), codes.end());
  c10::SymInt& packed = direction == Direction::row ? sizes.back() : sizes.front();
  packed = packed * 2;
  return sizes;
}

kernels::Fp4Direction kernel_direction(Direction direction) {
  return direction == Direction::row ? kernels::Fp4Direction::row : kernels::Fp4Direction::column;
}

void dequantize(const CodedMatrix& codes, const Tensor& y) {
  kernels::cpu::nvfp4_dequantize(
      codes.matrix.const_data_ptr<uint8_t>(), codes.dequant_scale->const_data_ptr<uint8_t>(),
      *codes.amax->const_data_ptr<float>(), codes.quantizer->format->layout.largest_scale,
      kernel_direction(codes.direction), kernel_ops::rows_out(y));
}

/// One code per byte. A byte holds neighbours along the last dimension, or along the first.
Tensor unpacked(const Tensor& codes, Direction direction) {
  const Tensor both[] = {codes.bitwise_and(0xF), codes.bitwise_right_shift(4)};
  if (direction == Direction::row) return at::stack(both, -1).flatten(-2);
  return at::stack(both, 1).flatten(0, 1);
}

/// Repeats the values of blocks for each of `size` elements along `dim`.
Tensor for_elements(const Tensor& of_blocks, int64_t dim, int64_t size) {
  return of_blocks.repeat_interleave(kBlock, dim).narrow(dim, 0, size);
}

template <int kLargestScale>
Tensor scales_of_elements(const CodedMatrix& of) {
  const auto sizes =
      C10_AS_INTARRAYREF_SLOW_ALLOC(unpacked_sizes(of.matrix.sym_sizes(), of.direction));
  const int64_t cols = sizes.back(), rows = c10::multiply_integers(sizes.begin(), sizes.end() - 1);
  const Tensor values = kernel_ops::decode_values(*of.dequant_scale, kernels::Fp8Format::e4m3);
  const Tensor of_elements = of.direction == Direction::row
                                 ? for_elements(values.narrow(0, 0, rows), 1, cols)
                                 : for_elements(values.narrow(1, 0, cols), 0, rows);
  return (of_elements * *of.amax * (1.0f / (6 * kLargestScale))).reshape(sizes);
}

kernels::Fp4Scaling scaling_of(const Quantizer& quantizer, const std::optional<Tensor>& given) {
  kernels::Fp4Scaling scaling{.options = quantizer,
                              .largest_scale = quantizer.format->layout.largest_scale};
  if (quantizer.stochastic_rounding) {
    const auto* words = given->const_data_ptr<int64_t>();
    scaling.seed = static_cast<uint64_t>(words[0]);
    if (given->numel() > 1) scaling.offset = static_cast<uint32_t>(words[1]);
  }
  return scaling;
}

kernels::Fp4Output output(GroupOut group, Direction direction) {
  const Tensor& codes = group[part_of(direction, 0)];
  if (!codes.defined()) return {};
  return {codes.data_ptr<uint8_t>(), group[part_of(direction, 1)].data_ptr<uint8_t>(),
          group[part_of(direction, 2)].data_ptr<float>()};
}

kernels::cpu::Seen quantize(const kernels::cpu::Input& x, const std::optional<Tensor>& given,
                            const Quantizer& quantizer, GroupOut group) {
  kernels::cpu::Seen seen;
  kernels::cpu::nvfp4_quantize(x, scaling_of(quantizer, given), output(group, Direction::row),
                               output(group, Direction::column), &seen.amax);
  return seen;
}

void quantize_seen(const kernels::ConstRows& y, const kernels::cpu::Seen& seen,
                   const std::optional<Tensor>& given, const Quantizer& quantizer, GroupOut group) {
  kernels::cpu::nvfp4_quantize_seen(y, seen, scaling_of(quantizer, given),
                                    output(group, Direction::row), output(group, Direction::column),
                                    nullptr);
}

/// Groups of 16 along the last dimension, rotated, with sums in float64 in the order of
/// kernels::hadamard.
Tensor rotated(const Tensor& groups) {
  const Tensor x = groups.to(at::kBFloat16).to(at::kDouble);
  std::vector<Tensor> y;
  for (size_t j = 0; j < kernels::kFp4Block; ++j) {
    Tensor sum = at::zeros({}, x.options());
    for (size_t i = 0; i < kernels::kFp4Block; ++i) {
      const Tensor term = x.select(-1, static_cast<int64_t>(i));
      sum = kernels::hadamard_is_negative(i, j) ? sum - term : sum + term;
    }
    y.push_back((sum * 0.25).to(at::kFloat).to(at::kBFloat16).to(at::kFloat));
  }
  return at::stack(y, -1);
}

/// kernels::Fp4TensorScale in ATen operations.
struct TensorScale {
  Tensor amax, scale, inverse;
  double divisor;
  TensorScale(const Tensor& of_tensor, double largest_scale)
      : amax(of_tensor), divisor(6 * largest_scale) {
    // A quotient of float32 numbers in float64, rounded to float32, is the correctly rounded
    // quotient.
    const Tensor bounded =
        at::clamp((at::full_like(amax, divisor, at::kDouble) / amax).to(at::kFloat), 0.0f,
                  double{FLT_MAX})
            .to(at::kFloat);
    scale = at::where((amax == 0).bitwise_or(bounded == 0), 1.0f, bounded).to(at::kFloat);
    inverse = scale.to(at::kDouble).reciprocal().to(at::kFloat);
  }
};

/// The codes of an operand under the given scales of its blocks.
struct BlockCodes {
  Tensor scales, codes;
  BlockCodes(const Tensor& x, Tensor of_blocks, const TensorScale& tensor, const Tensor& words = {})
      : scales(std::move(of_blocks)) {
    const Tensor decoded =
        kernel_ops::decode_values(scales, kernels::Fp8Format::e4m3) * tensor.inverse;
    const Tensor largest = at::zeros_like(decoded) + FLT_MAX;
    const Tensor factor =
        at::where(at::isnan(decoded), decoded,
                  at::minimum(decoded.to(at::kDouble).reciprocal().to(at::kFloat), largest));
    const Tensor scaled = x * for_elements(factor, 1, x.size(1));
    codes = kernel_ops::encode(scaled, kernels::Fp8Format::e2m1, /*saturate=*/true, words);
  }
};

/// Sums of the errors in each block, [outer, blocks], in the order of kernels::fp4_error.
Tensor errors_of_blocks(const Tensor& x, const BlockCodes& of, const TensorScale& tensor,
                        const Quantizer& quantizer, Direction direction) {
  const int64_t outer = x.size(0), inner = x.size(1);
  const Tensor values =
      kernel_ops::decode_values(of.codes, kernels::Fp8Format::e2m1) *
      for_elements(kernel_ops::decode_values(of.scales, kernels::Fp8Format::e4m3), 1, inner) *
      tensor.amax;
  const Tensor difference = (values.to(at::kDouble) / tensor.divisor).to(at::kFloat) - x;
  const Tensor error = quantizer.four_over_six == kernels::FourOverSix::mse
                           ? difference * difference
                           : at::abs(difference);
  const auto summed = [](const Tensor& terms) {
    Tensor sum = at::zeros_like(terms.select(-1, 0));
    for (int64_t k = 0; k < kBlock; ++k) sum = sum + terms.select(-1, k);
    return sum;
  };
  if (!quantizer.square_blocks) return summed(error.view({outer, inner / kBlock, kBlock}));
  const int64_t bands = (outer + kBlock - 1) / kBlock;
  const Tensor squares = at::constant_pad_nd(error, {0, 0, 0, bands * kBlock - outer})
                             .view({bands, kBlock, inner / kBlock, kBlock});
  // Sums are in the order of the rows of x, in both directions.
  Tensor sums =
      summed(direction == Direction::row ? squares.transpose(1, 2) : squares.permute({0, 2, 3, 1}));
  for (int64_t half = kBlock / 2; half > 0; half /= 2)
    sums = sums.narrow(-1, 0, half) + sums.narrow(-1, half, half);
  return for_elements(sums.squeeze(-1), 0, outer);
}

/// Codes, scales and amax of an operand [outer, contracted size in whole blocks] in float32.
struct Operand {
  Tensor codes, scales, amax;
  Operand(const Tensor& x, const Quantizer& quantizer, const std::optional<Tensor>& given,
          Direction direction) {
    const int64_t outer = x.size(0), inner = x.size(1);
    const Tensor magnitude = at::abs(x);
    amax = at::cat({at::where(at::isnan(magnitude), 0.0f, magnitude).flatten(),
                    at::zeros({1}, x.options())})
               .amax()
               .view({1});
    const TensorScale tensor(amax, quantizer.format->layout.largest_scale);
    // NaN counts as the largest, as in torch's amax.
    Tensor block = magnitude.view({outer, inner / kBlock, kBlock}).amax(2);
    if (quantizer.square_blocks) {
      const int64_t bands = (outer + kBlock - 1) / kBlock;
      block = at::constant_pad_nd(block, {0, 0, 0, bands * kBlock - outer})
                  .view({bands, kBlock, inner / kBlock})
                  .amax(1);
      block = for_elements(block, 0, outer);
    }
    const Tensor each = quantizer.four_over_six == kernels::FourOverSix::off
                            ? to_six(x, block, tensor, quantizer, given, direction)
                            : to_six_or_four(x, block, tensor, quantizer, direction);
    const Tensor pairs = each.view({outer, inner / 2, 2});
    codes = pairs.select(2, 0).bitwise_or(pairs.select(2, 1).bitwise_left_shift(4));
  }

 private:
  Tensor to_six(const Tensor& x, const Tensor& block_amax, const TensorScale& tensor,
                const Quantizer& quantizer, const std::optional<Tensor>& given,
                Direction direction) {
    scales =
        kernel_ops::encode(block_amax * (tensor.scale * (1.0f / 6.0f)), kernels::Fp8Format::e4m3);
    Tensor words;
    if (quantizer.stochastic_rounding)
      words = kernel_ops::philox_words(*given, x.numel(), static_cast<int64_t>(direction))
                  .view(x.sizes());
    return BlockCodes(x, scales, tensor, words).codes;
  }

  Tensor to_six_or_four(const Tensor& x, const Tensor& block_amax, const TensorScale& tensor,
                        const Quantizer& quantizer, Direction direction) {
    const Tensor base = (block_amax.to(at::kDouble) / 6.0).to(at::kFloat) * tensor.scale;
    const BlockCodes six(x, kernel_ops::encode(base, kernels::Fp8Format::e4m3), tensor),
        four(x, kernel_ops::encode(base * 1.5f, kernels::Fp8Format::e4m3), tensor);
    const Tensor is_four = errors_of_blocks(x, four, tensor, quantizer, direction) <
                           errors_of_blocks(x, six, tensor, quantizer, direction);
    scales = at::where(is_four, four.scales, six.scales);
    return at::where(for_elements(is_four, 1, x.size(1)), four.codes, six.codes);
  }
};

Group reference(const Tensor& x, const std::optional<Tensor>& given, const Quantizer& quantizer,
                GroupMask mask) {
  const MatrixSize size(x.sym_sizes());
  const int64_t rows = size.rows.expect_int(), cols = size.cols.expect_int();
  const Tensor source = x.to(at::kFloat).reshape({rows, cols});
  Group group;
  for (const Direction direction : {Direction::row, Direction::column}) {
    if (!mask[static_cast<size_t>(direction)]) continue;
    const bool by_row = direction == Direction::row;
    const Tensor lines = by_row ? source : source.t();
    Tensor operand = at::constant_pad_nd(lines, {0, (kBlock - lines.size(1) % kBlock) % kBlock});
    if (!by_row && quantizer.hadamard)
      operand = rotated(operand.view({lines.size(0), operand.size(1) / kBlock, kBlock}))
                    .view(operand.sizes());
    const Operand made(operand, quantizer, given, direction);
    const auto sizes = sizes_of_scales(size, direction);
    const auto packed = packed_sizes(x.sym_sizes(), direction);
    const Tensor scales = by_row ? made.scales : made.scales.t();
    group[part_of(direction, 0)] = (by_row ? made.codes : made.codes.t()).reshape_symint(packed);
    group[part_of(direction, 1)] = at::constant_pad_nd(
        scales,
        {0, sizes[1].expect_int() - scales.size(1), 0, sizes[0].expect_int() - scales.size(0)});
    group[part_of(direction, 2)] = made.amax;
  }
  const Tensor magnitude = at::abs(source);
  group[group_amax] = at::cat({at::where(at::isnan(magnitude), 0.0f, magnitude).flatten(),
                               at::zeros({1}, source.options())})
                          .amax();
  return group;
}

template <int kLargestScale>
constexpr CodeLayout layout() {
  return {
      .has_amax = true,
      .largest_scale = kLargestScale,
      .dtype = at::kByte,
      .sizes = sizes_of_scales,
      .packed_sizes = packed_sizes,
      .unpacked_sizes = unpacked_sizes,
      .unpacked = unpacked,
      .scales_of_elements = scales_of_elements<kLargestScale>,
  };
}

constexpr CpuScaling kOnCpu{
    .quantize = quantize, .dequantize = dequantize, .quantize_seen = quantize_seen};

}  // namespace
}  // namespace fp4_blocks

constexpr CodeLayout kFp4Scale = fp4_blocks::layout<448>(),
                     kFp4Scale256 = fp4_blocks::layout<256>();

const ScalingDef kFp4Scaling{
    .name = "",
    .class_name = "NVFP4Quantizer",
    .options = {"2d", "rht", "sr", "4over6"},
    .reference = fp4_blocks::reference,
    .cpu = &fp4_blocks::kOnCpu,
};

}  // namespace tandem
