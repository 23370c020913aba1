#include "quantization/formats/block_scaling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ldexp.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "kernel_ops/framework/operands.h"
#include "kernels/fp8_block.h"
#include "quantization/formats/cpu_scaling.h"

namespace tandem {

at::Tensor inverse_of(const at::Tensor& scale) {
  // A float64 quotient of two float32 numbers, rounded to float32, is the correctly rounded float32
  // quotient.
  return scale.to(at::kDouble).reciprocal().to(at::kFloat);
}

at::Tensor scale_from_amax(const at::Tensor& amax, const Quantizer& quantizer, double big) {
  const at::Tensor bounded = at::clamp(amax, static_cast<float>(quantizer.amax_epsilon));
  const double largest = kernels::fp8_max(quantizer.format->element);
  const at::Tensor quotient =
      (at::scalar_tensor(largest, bounded.options().dtype(at::kDouble)) / bounded.to(at::kDouble))
          .to(at::kFloat);
  at::Tensor scale = at::where(at::isinf(quotient), big, quotient).to(at::kFloat);
  if (quantizer.power_of_two) {
    const at::Tensor exponent = std::get<1>(at::frexp(scale)) - 1;
    scale = at::ldexp(at::scalar_tensor(1.0, scale.options().dtype(at::kDouble)),
                      exponent.to(at::kDouble))
                .to(at::kFloat);
  }
  return at::where((bounded == 0).bitwise_or(at::isinf(bounded)), 1.0f, scale).to(at::kFloat);
}

namespace line_blocks {
namespace {

using at::Tensor;
using kernels::Fp8BlockShape;

constexpr int64_t kBlock = kernels::kFp8Block;

c10::SymInt blocks_in(const c10::SymInt& size) { return (size + (kBlock - 1)) / kBlock; }
c10::SymInt up_to_four(const c10::SymInt& size) { return (size + 3) / 4 * 4; }

c10::SymDimVector sizes_of_lines(const MatrixSize& size, Direction direction) {
  if (direction == Direction::row) return {blocks_in(size.cols), up_to_four(size.rows)};
  return {blocks_in(size.rows), up_to_four(size.cols)};
}
c10::SymDimVector sizes_of_squares(const MatrixSize& size, Direction) {
  return {blocks_in(size.rows), up_to_four(blocks_in(size.cols))};
}

bool is_square(const Quantizer& quantizer) {
  return quantizer.format->layout.serves_both_directions;
}

void dequantize(const CodedMatrix& codes, const Tensor& y) {
  const Fp8BlockShape shape = is_square(*codes.quantizer) ? Fp8BlockShape::square
                              : codes.is_column()         ? Fp8BlockShape::column
                                                          : Fp8BlockShape::row;
  kernels::cpu::fp8_block_dequantize(
      codes.matrix.const_data_ptr<uint8_t>(), codes.dequant_scale->const_data_ptr<float>(),
      codes.quantizer->format->element, shape, kernel_ops::rows_out(y));
}

/// Repeats the values of blocks for each of `size` elements along `dim`.
Tensor for_elements(const Tensor& of_blocks, int64_t dim, int64_t size) {
  return of_blocks.repeat_interleave(kBlock, dim).narrow(dim, 0, size);
}

struct IntSize {
  explicit IntSize(const Tensor& x) {
    const MatrixSize size(x.sym_sizes());
    rows = size.rows.expect_int();
    cols = size.cols.expect_int();
  }
  int64_t rows, cols;
};

template <bool kSquare>
Tensor scales_of_elements(const CodedMatrix& codes) {
  const IntSize size(codes.matrix);
  const Tensor& scale = *codes.dequant_scale;
  Tensor values;
  if (kSquare) {
    values = for_elements(for_elements(scale, 1, size.cols), 0, size.rows);
  } else if (codes.is_column()) {
    values = for_elements(scale.narrow(1, 0, size.cols), 0, size.rows);
  } else {
    values = for_elements(scale.narrow(1, 0, size.rows).t(), 1, size.cols);
  }
  return values.reshape(codes.matrix.sizes());
}

kernels::Fp8BlockOutput output(GroupOut group, Direction direction) {
  const Tensor &codes = group[part_of(direction, 0)], &scale = group[part_of(direction, 1)];
  if (!codes.defined()) return {};
  return {codes.data_ptr<uint8_t>(), scale.data_ptr<float>()};
}

kernels::cpu::Seen quantize(const kernels::cpu::Input& x, const std::optional<Tensor>&,
                            const Quantizer& quantizer, GroupOut group) {
  kernels::Fp8BlockOutput row, square;
  (is_square(quantizer) ? square : row) = output(group, Direction::row);
  kernels::cpu::Seen seen;
  kernels::cpu::fp8_block_quantize(x, {quantizer.format->element, quantizer}, row,
                                   output(group, Direction::column), square, &seen.amax);
  return seen;
}

/// Codes and scales of one shape of blocks of `source`, a float32 matrix.
std::pair<Tensor, Tensor> quantized(const Tensor& source, const Tensor& magnitude, double big,
                                    const Quantizer& quantizer, Direction direction) {
  const int64_t rows = source.size(0), cols = source.size(1);
  const int64_t row_blocks = (rows + kBlock - 1) / kBlock,
                col_blocks = (cols + kBlock - 1) / kBlock;
  const Tensor blocks =
      at::constant_pad_nd(magnitude, {0, col_blocks * kBlock - cols, 0, row_blocks * kBlock - rows})
          .view({row_blocks, kBlock, col_blocks, kBlock});
  Tensor scale, of_elements;  // in the layout of the blocks
  if (is_square(quantizer)) {
    scale = scale_from_amax(blocks.amax({1, 3}), quantizer, big);
    of_elements = for_elements(for_elements(scale, 1, cols), 0, rows);
  } else if (direction == Direction::row) {
    const Tensor amax = blocks.amax(3).view({row_blocks * kBlock, col_blocks}).narrow(0, 0, rows);
    scale = scale_from_amax(amax.t(), quantizer, big);
    of_elements = for_elements(scale.t(), 1, cols);
  } else {
    const Tensor amax = blocks.amax(1).view({row_blocks, col_blocks * kBlock}).narrow(1, 0, cols);
    scale = scale_from_amax(amax, quantizer, big);
    of_elements = for_elements(scale, 0, rows);
  }
  return {kernel_ops::encode(source * of_elements, quantizer.format->element),
          at::constant_pad_nd(inverse_of(scale), {0, (4 - scale.size(1) % 4) % 4})};
}

Group reference(const Tensor& x, const std::optional<Tensor>&, const Quantizer& quantizer,
                GroupMask mask) {
  const IntSize size(x);
  const Tensor source = x.to(at::kFloat).reshape({size.rows, size.cols});
  const Tensor absolute = at::abs(source);
  const Tensor magnitude = at::where(at::isnan(absolute), 0.0f, absolute);
  const kernels::Element element = x.scalar_type() == at::kBFloat16 ? kernels::Element::bfloat16
                                   : x.scalar_type() == at::kHalf   ? kernels::Element::float16
                                                                    : kernels::Element::float32;
  Group group;
  for (const Direction direction : {Direction::row, Direction::column}) {
    if (!mask[static_cast<size_t>(direction)]) continue;
    auto [codes, scales] =
        quantized(source, magnitude, kernels::largest_of(element), quantizer, direction);
    group[part_of(direction, 0)] = codes.view(x.sizes());
    group[part_of(direction, 1)] = scales;
  }
  group[group_amax] = at::cat({magnitude.flatten(), at::zeros({1}, magnitude.options())}).amax();
  return group;
}

constexpr CpuScaling kOnCpu{
    .quantize = quantize, .dequantize = dequantize, .band_rows = kernels::kFp8Block};

}  // namespace
}  // namespace line_blocks

const CodeLayout kLineScale{
    .dtype = at::kFloat,
    .sizes = line_blocks::sizes_of_lines,
    .scales_of_elements = line_blocks::scales_of_elements<false>,
};

const CodeLayout kSquareScale{
    .serves_both_directions = true,
    .dtype = at::kFloat,
    .sizes = line_blocks::sizes_of_squares,
    .scales_of_elements = line_blocks::scales_of_elements<true>,
};

const ScalingDef kBlockScaling{
    .name = "",
    .class_name = "Float8BlockQuantizer",
    .options = {"eps", "pow2"},
    .reference = line_blocks::reference,
    .cpu = &line_blocks::kOnCpu,
};

}  // namespace tandem
