#include "kernel_ops/unit/activation_quantize.h"

#include <ATen/ops/empty.h>

#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernel_ops/unit/activation_function.h"
#include "quantization/formats/made.h"

namespace tandem::kernel_ops {

namespace {

template <typename Unit>
constexpr bool kIsGated = std::is_same_v<Unit, GluForward> || std::is_same_v<Unit, GluBackward>;

ResultSpec unwanted(at::ScalarType dtype) { return {{0}, dtype, false}; }
/// What is made.
kernels::Rows shape_of(const ResultSpec& spec, size_t rows, size_t cols) {
  return {nullptr, element_of(spec.dtype), rows, cols, cols};
}

}  // namespace

template <typename Forward>
c10::SymDimVector ThenQuantize<Forward>::sizes_of_y(const Tensor& x) {
  c10::SymDimVector sizes = sizes_of(x);
  if (kIsGated<Forward>) sizes.back() = sizes.back() / 2;
  return sizes;
}

template <typename Forward>
Specs<2 + group_size> ThenQuantize<Forward>::shapes(
    const Tensor& x, const std::optional<Tensor>& bias, const std::optional<Tensor>& given,
    std::string_view activation, const Quantizer& quantizer, std::array<bool, 5> output_mask) {
  auto [z, y] = Forward::shapes(x, bias, activation, {output_mask[1], true});
  // A view of the sizes of y, where they are not those of x.
  const Tensor like_y = kIsGated<Forward> ? x.slice_symint(-1, 0, y.sizes.back()) : x;
  auto group =
      group_specs("activation_quantize", like_y, given, quantizer, group_mask(output_mask));
  return joined(Specs<2>{output_mask[0] ? std::move(y) : unwanted(y.dtype), std::move(z)},
                std::move(group));
}

template <typename Forward>
void ThenQuantize<Forward>::cpu(const Tensor& x, const std::optional<Tensor>& bias,
                                const std::optional<Tensor>& given, std::string_view activation,
                                const Quantizer& quantizer, std::array<bool, 5>,
                                Results<2 + group_size>& results) {
  const ResultSpec spec = Forward::shapes(x, bias, activation, {false, true})[1];
  const ActivationFunction function(activation, kIsGated<Forward>);
  const RowsIn of_x(x);
  const VectorIn of_bias(bias);
  const kernels::ConstRows from = of_x;
  const kernels::Rows z = rows_out(results[1]),
                      y = shape_of(spec, from.rows, kIsGated<Forward> ? from.cols / 2 : from.cols);
  const auto run =
      kIsGated<Forward> ? &kernels::cpu::glu_forward : &kernels::cpu::activation_forward;
  const auto make = [&](size_t first, size_t count, void* to) {
    run(function.kernel(), rows_from(from, first, count), of_bias, y.element,
        rows_from(z, first, count), rows_at(to, y, count));
  };
  make_and_quantize({.y = y, .make = make, .sources = {from}}, results[0], spec.sizes, given,
                    &quantizer, group_of(results));
}

template <typename Forward>
Results<2 + group_size> ThenQuantize<Forward>::reference(
    const Tensor& x, const std::optional<Tensor>& bias, const std::optional<Tensor>& given,
    std::string_view activation, const Quantizer& quantizer, std::array<bool, 5> output_mask) {
  const auto [z, y] = Forward::reference(x, bias, activation, {output_mask[1], true});
  return joined(Results<2>{output_mask[0] ? y : masked_out(y), z},
                Quantize::reference(y, given, quantizer, group_mask(output_mask)));
}

template <typename Backward>
Specs<BackwardThenQuantize<Backward>::kResults> BackwardThenQuantize<Backward>::shapes(
    const Tensor& grad_y, const Tensor& z, const std::optional<Tensor>& given,
    const std::optional<Tensor>& y_given, std::string_view activation, const Quantizer* quantizer,
    const Quantizer* y_quantizer, std::array<bool, 9> output_mask) {
  constexpr const char* kOp = "activation_backward_quantize";
  auto [grad_z, grad_bias, y] =
      Backward::shapes(grad_y, z, activation, {output_mask[0], output_mask[2], output_mask[1]});
  return joined(
      joined(Specs<kMade>{std::move(grad_z), std::move(y), std::move(grad_bias)},
             group_specs(kOp, z, given, quantizer, group_mask(output_mask, 1))),
      group_specs(kOp, grad_y, y_given, y_quantizer, group_mask(output_mask)));  // y is as grad_y
}

template <typename Backward>
void BackwardThenQuantize<Backward>::cpu(const Tensor& grad_y, const Tensor& z,
                                         const std::optional<Tensor>& given,
                                         const std::optional<Tensor>& y_given,
                                         std::string_view activation, const Quantizer* quantizer,
                                         const Quantizer* y_quantizer, std::array<bool, 9>,
                                         Results<kResults>& results) {
  const ActivationFunction function(activation, kIsGated<Backward>);
  const RowsIn of_grad(grad_y), of_z(z);
  const kernels::ConstRows grads = of_grad, from = of_z;
  const kernels::Rows grad_z = shape_of(like(z), from.rows, from.cols);
  const kernels::Vector grad_bias = vector_out(results[2]);
  const SumsOfMade sums(from.rows, grad_bias.size);
  const CodesBeside of_y(shape_of(like(z), grads.rows, grads.cols), results[1], grad_y.sym_sizes(),
                         y_given, y_quantizer, group_of(results));
  const auto make = [&](size_t first, size_t count, void* to) {
    const kernels::Rows y = of_y.rows(first, count);
    kernels::cpu::some_rows_backward(function.kernel(), kIsGated<Backward>,
                                     rows_from(grads, first, count), rows_from(from, first, count),
                                     rows_at(to, grad_z, count), sums.from_row(first), y);
    of_y.take(y, first);
  };
  make_and_quantize({.y = grad_z,
                     .make = make,
                     .sources = {grads, from},
                     .in_order = sums.in_order(),
                     .together = of_y.together()},
                    results[0], z.sym_sizes(), given, quantizer, group_of(results, 1));
  sums.finish(grad_bias);
  of_y.finish();
}

template <typename Backward>
Results<BackwardThenQuantize<Backward>::kResults> BackwardThenQuantize<Backward>::reference(
    const Tensor& grad_y, const Tensor& z, const std::optional<Tensor>& given,
    const std::optional<Tensor>& y_given, std::string_view activation, const Quantizer* quantizer,
    const Quantizer* y_quantizer, std::array<bool, 9> output_mask) {
  const auto [grad_z, grad_bias, y] = Backward::reference(
      grad_y, z, activation, {true, output_mask[2], output_mask[1] || y_quantizer != nullptr});
  return joined(joined(Results<kMade>{output_mask[0] ? grad_z : masked_out(grad_z),
                                      output_mask[1] ? y : masked_out(y), grad_bias},
                       quantize_reference(grad_z, given, quantizer, group_mask(output_mask, 1))),
                quantize_reference(y, y_given, y_quantizer, group_mask(output_mask)));
}

template struct ThenQuantize<ActivationForward>;
template struct ThenQuantize<GluForward>;
template struct BackwardThenQuantize<ActivationBackward>;
template struct BackwardThenQuantize<GluBackward>;

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<ActivationQuantize>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kGiven>::these, ActivationQuantize::cpu}});
  register_kernel_op<GluQuantize>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kGiven>::these, GluQuantize::cpu}});
  register_kernel_op<ActivationBackwardQuantize>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kGiven, kGiven>::these,
                 ActivationBackwardQuantize::cpu}});
  register_kernel_op<GluBackwardQuantize>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kGiven, kGiven>::these,
                 GluBackwardQuantize::cpu}});
}

}  // namespace tandem::kernel_ops
