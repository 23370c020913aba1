#include "kernel_ops/fp4_scaling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cfloat>

#include "kernel_ops/made.h"
#include "kernel_ops/operands.h"
#include "kernel_ops/random.h"
#include "kernels/nvfp4.h"

namespace tandem {

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

void dequantize(const Codes& codes, kernels::Fp8Format, const Tensor& y) {
  kernels::cpu::nvfp4_dequantize(codes.codes.const_data_ptr<uint8_t>(),
                                 codes.dequant_scale.const_data_ptr<uint8_t>(),
                                 *codes.amax->const_data_ptr<float>(),
                                 kernel_direction(codes.direction), kernel_ops::rows_out(y));
}

/// Neighbours along the last dimension, or along the first, one by one.
Tensor unpacked(const Tensor& codes, Direction direction) {
  const Tensor both[] = {codes.bitwise_and(0xF), codes.bitwise_right_shift(4)};
  if (direction == Direction::row) return at::stack(both, -1).flatten(-2);
  return at::stack(both, 1).flatten(0, 1);
}

/// What blocks have, for each of `size` elements along `dim`.
Tensor for_elements(const Tensor& of_blocks, int64_t dim, int64_t size) {
  return of_blocks.repeat_interleave(kBlock, dim).narrow(dim, 0, size);
}

Tensor scales_of_elements(const Codes& of) {
  const auto sizes =
      C10_AS_INTARRAYREF_SLOW_ALLOC(unpacked_sizes(of.codes.sym_sizes(), of.direction));
  const int64_t cols = sizes.back(), rows = c10::multiply_integers(sizes.begin(), sizes.end() - 1);
  const Tensor values = kernel_ops::decode_values(of.dequant_scale, kernels::Fp8Format::e4m3);
  const Tensor of_elements = of.direction == Direction::row
                                 ? for_elements(values.narrow(0, 0, rows), 1, cols)
                                 : for_elements(values.narrow(1, 0, cols), 0, rows);
  return (of_elements * *of.amax * (1.0f / 2688.0f)).reshape(sizes);
}

kernels::Fp4Scaling scaling_of(const Quantizer& quantizer, const std::optional<Tensor>& given) {
  kernels::Fp4Scaling scaling{.square_blocks = quantizer.square_blocks,
                              .rotates_columns = quantizer.hadamard,
                              .stochastic = quantizer.stochastic_rounding};
  if (scaling.stochastic) {
    const auto* words = given->const_data_ptr<int64_t>();
    scaling.seed = static_cast<uint64_t>(words[0]);
    if (given->numel() > 1) scaling.offset = static_cast<uint32_t>(words[1]);
  }
  return scaling;
}

kernels::Fp4Output output(const Group& group, Direction direction) {
  const Tensor& codes = group[part_of(direction, 0)];
  if (!codes.defined()) return {};
  return {codes.data_ptr<uint8_t>(), group[part_of(direction, 1)].data_ptr<uint8_t>(),
          group[part_of(direction, 2)].data_ptr<float>()};
}
float* amax_in(const Group& group) {
  const Tensor& amax = group[group_amax];
  return amax.defined() ? amax.data_ptr<float>() : nullptr;
}

void quantize(const Tensor& x, const std::optional<Tensor>& given, const Quantizer& quantizer,
              Group& group) {
  kernels::cpu::nvfp4_quantize(kernel_ops::RowsIn(x), scaling_of(quantizer, given),
                               output(group, Direction::row), output(group, Direction::column),
                               amax_in(group));
}

void quantize_made(const kernels::cpu::MadeRows& made, const std::optional<Tensor>& given,
                   const Quantizer& quantizer, Group& group) {
  const kernel_ops::MadeInMemory kept(made);  // the scale of the tensor comes before the first code
  kernels::cpu::nvfp4_quantize_made(kept.rows(), scaling_of(quantizer, given),
                                    output(group, Direction::row), output(group, Direction::column),
                                    amax_in(group));
}

/// Groups of 16 of the last dimension, rotated: sums in float64 in the order of kernels::hadamard.
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

/// Codes, scales and amax of an operand [outer, whole blocks of what is contracted] in float32.
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
    const Tensor tensor = amax.to(at::kDouble);
    // Quotients of float32 numbers in float64, rounded, are the rounded float32 quotients.
    const Tensor quotient =
        at::clamp((2688.0 / tensor).to(at::kFloat), 0.0f, double{FLT_MAX}).to(at::kFloat);
    const Tensor scale =
        at::where((amax == 0).bitwise_or(quotient == 0), 1.0f, quotient).to(at::kFloat);
    const Tensor per_amax = scale * (1.0f / 6.0f),
                 inverse = (1.0 / scale.to(at::kDouble)).to(at::kFloat);
    // NaN is the largest, as amax of torch has it.
    Tensor block = magnitude.view({outer, inner / kBlock, kBlock}).amax(2);
    if (quantizer.square_blocks) {
      const int64_t bands = (outer + kBlock - 1) / kBlock;
      block = at::constant_pad_nd(block, {0, 0, 0, bands * kBlock - outer})
                  .view({bands, kBlock, inner / kBlock})
                  .amax(1);
      block = for_elements(block, 0, outer);
    }
    scales = kernel_ops::encode(block * per_amax, kernels::Fp8Format::e4m3);
    const Tensor decoded = kernel_ops::decode_values(scales, kernels::Fp8Format::e4m3) * inverse;
    const Tensor largest = at::zeros_like(decoded) + FLT_MAX;
    const Tensor factor =
        at::where(at::isnan(decoded), decoded,
                  at::minimum((1.0 / decoded.to(at::kDouble)).to(at::kFloat), largest));
    const Tensor scaled = x * for_elements(factor, 1, inner);
    Tensor words;
    if (quantizer.stochastic_rounding)
      words = kernel_ops::philox_words(*given, x.numel(), static_cast<int64_t>(direction))
                  .view(x.sizes());
    const Tensor each =
        kernel_ops::encode(scaled, kernels::Fp8Format::e2m1, /*saturate=*/true, words);
    const Tensor pairs = each.view({outer, inner / 2, 2});
    codes = pairs.select(2, 0).bitwise_or(pairs.select(2, 1).bitwise_left_shift(4));
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
      operand = rotated(operand.view({lines.size(0), -1, kBlock})).view(operand.sizes());
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

}  // namespace

const CodeLayout kFp4Scale{
    .has_amax = true,
    .dtype = at::kByte,
    .sizes = sizes_of_scales,
    .packed_sizes = packed_sizes,
    .unpacked_sizes = unpacked_sizes,
    .dequantize = dequantize,
    .unpacked = unpacked,
    .scales_of_elements = scales_of_elements,
};

const ScalingDef kFp4Scaling{
    .name = "",
    .has_square_blocks = true,
    .has_hadamard = true,
    .has_stochastic_rounding = true,
    .quantize = quantize,
    .reference = reference,
    .quantize_made = quantize_made,
};

}  // namespace tandem
