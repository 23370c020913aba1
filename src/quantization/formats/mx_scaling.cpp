#include "quantization/formats/mx_scaling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ldexp.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/shapes.h"
#include "kernels/mxfp8.h"
#include "quantization/formats/cpu_scaling.h"

namespace tandem {

namespace mx_blocks {
namespace {

using at::Tensor;

constexpr int64_t kBlock = kernels::kMxBlock;

c10::SymInt blocks_in(const c10::SymInt& size) { return (size + (kBlock - 1)) / kBlock; }
c10::SymInt up(const c10::SymInt& size, int64_t to) { return (size + (to - 1)) / to * to; }

c10::SymDimVector sizes_of_scales(const MatrixSize& size, Direction direction) {
  if (direction == Direction::row) return {up(size.rows, 128), up(blocks_in(size.cols), 4)};
  return {up(blocks_in(size.rows), 4), up(size.cols, 128)};
}

kernels::MxDirection kernel_direction(Direction direction) {
  return direction == Direction::row ? kernels::MxDirection::row : kernels::MxDirection::column;
}

void dequantize(const CodedMatrix& codes, const Tensor& y) {
  kernels::cpu::mxfp8_dequantize(
      codes.matrix.const_data_ptr<uint8_t>(), codes.dequant_scale->const_data_ptr<uint8_t>(),
      codes.quantizer->format->element, kernel_direction(codes.direction), kernel_ops::rows_out(y));
}

/// 2^exponent in float32, exactly.
Tensor power_of_two(const Tensor& exponent) {
  const Tensor one = at::scalar_tensor(1.0, exponent.options().dtype(at::kDouble));
  return at::ldexp(one, exponent.to(at::kDouble)).to(at::kFloat);
}

/// Repeats the values of blocks for each of `size` elements along `dim`.
Tensor for_elements(const Tensor& of_blocks, int64_t dim, int64_t size) {
  return of_blocks.repeat_interleave(kBlock, dim).narrow(dim, 0, size);
}

Tensor scales_of_elements(const CodedMatrix& codes) {
  const int64_t cols = codes.matrix.dim() == 0 ? 1 : codes.matrix.size(-1);
  const int64_t rows = kernel_ops::rows_of(codes.matrix).expect_int();
  const Tensor scales = codes.is_column()
                            ? for_elements(codes.dequant_scale->narrow(1, 0, cols), 0, rows)
                            : for_elements(codes.dequant_scale->narrow(0, 0, rows), 1, cols);
  const Tensor values =
      at::where(scales == kernels::kE8m0Nan, std::numeric_limits<float>::quiet_NaN(),
                power_of_two(scales.to(at::kInt) - 127));
  return values.view(codes.matrix.sizes());
}

kernels::Mxfp8Output output(GroupOut group, Direction direction) {
  const Tensor &codes = group[part_of(direction, 0)], &scale = group[part_of(direction, 1)];
  if (!codes.defined()) return {};
  return {codes.data_ptr<uint8_t>(), scale.data_ptr<uint8_t>()};
}

kernels::cpu::Seen quantize(const kernels::cpu::Input& x, const std::optional<Tensor>&,
                            const Quantizer& quantizer, GroupOut group) {
  kernels::cpu::Seen seen;
  kernels::cpu::mxfp8_quantize(x, {quantizer.format->element, quantizer},
                               output(group, Direction::row), output(group, Direction::column),
                               &seen.amax);
  return seen;
}

/// The least power of two not below each number, which must not be NaN, in E8M0: computed in
/// integers, as the kernel does.
Tensor e8m0_of(const Tensor& numbers) {
  const Tensor bits = numbers.contiguous().view(at::kInt).to(at::kLong);
  const Tensor code =
      at::clamp((bits + 0x7FFFFF).bitwise_right_shift(23), 0, int64_t{kernels::kE8m0Largest});
  return at::where(bits <= 0x00400000, 0, code);
}

/// Codes and scales of one direction of `source`, a float32 matrix.
std::pair<Tensor, Tensor> quantized(const Tensor& source, const Tensor& magnitude,
                                    const Quantizer& quantizer, Direction direction) {
  const int64_t rows = source.size(0), cols = source.size(1);
  const int64_t row_blocks = (rows + kBlock - 1) / kBlock,
                col_blocks = (cols + kBlock - 1) / kBlock;
  const Tensor blocks =
      at::constant_pad_nd(magnitude, {0, col_blocks * kBlock - cols, 0, row_blocks * kBlock - rows})
          .view({row_blocks, kBlock, col_blocks, kBlock});
  const bool is_row = direction == Direction::row, is_square = quantizer.square_blocks;
  const float per_max = 1.0f / kernels::fp8_max(quantizer.format->element);
  Tensor codes_of_blocks;  // [rows, col_blocks] or [row_blocks, cols]
  if (is_square) {
    const Tensor e = e8m0_of(blocks.amax({1, 3}) * per_max);
    codes_of_blocks = is_row ? for_elements(e, 0, rows) : for_elements(e, 1, cols);
  } else if (is_row) {
    codes_of_blocks = e8m0_of(
        blocks.amax(3).view({row_blocks * kBlock, col_blocks}).narrow(0, 0, rows) * per_max);
  } else {
    codes_of_blocks = e8m0_of(
        blocks.amax(1).view({row_blocks, col_blocks * kBlock}).narrow(1, 0, cols) * per_max);
  }
  const Tensor of_elements =
      is_row ? for_elements(codes_of_blocks, 1, cols) : for_elements(codes_of_blocks, 0, rows);
  const Tensor codes = kernel_ops::encode(source * power_of_two(at::rsub(of_elements, 127)),
                                          quantizer.format->element);
  const auto sizes = sizes_of_scales(MatrixSize(source.sym_sizes()), direction);
  const Tensor scales = at::constant_pad_nd(codes_of_blocks.to(at::kByte),
                                            {0, sizes[1].expect_int() - codes_of_blocks.size(1), 0,
                                             sizes[0].expect_int() - codes_of_blocks.size(0)});
  return {codes, scales};
}

Group reference(const Tensor& x, const std::optional<Tensor>&, const Quantizer& quantizer,
                GroupMask mask) {
  const MatrixSize size(x.sym_sizes());
  const Tensor source = x.to(at::kFloat).reshape({size.rows.expect_int(), size.cols.expect_int()});
  const Tensor absolute = at::abs(source);
  const Tensor magnitude = at::where(at::isnan(absolute), 0.0f, absolute);
  Group group;
  for (const Direction direction : {Direction::row, Direction::column}) {
    if (!mask[static_cast<size_t>(direction)]) continue;
    auto [codes, scales] = quantized(source, magnitude, quantizer, direction);
    group[part_of(direction, 0)] = codes.view(x.sizes());
    group[part_of(direction, 1)] = scales;
  }
  group[group_amax] = at::cat({magnitude.flatten(), at::zeros({1}, magnitude.options())}).amax();
  return group;
}

constexpr CpuScaling kOnCpu{
    .quantize = quantize, .dequantize = dequantize, .band_rows = kernels::kMxBlock};

}  // namespace
}  // namespace mx_blocks

const CodeLayout kMxScale{
    .dtype = at::kByte,
    .sizes = mx_blocks::sizes_of_scales,
    .scales_of_elements = mx_blocks::scales_of_elements,
};

const ScalingDef kMxScaling{
    .name = "",
    .class_name = "MXFP8Quantizer",
    .options = {"2d"},
    .reference = mx_blocks::reference,
    .cpu = &mx_blocks::kOnCpu,
};

}  // namespace tandem
