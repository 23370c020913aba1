#include "kernel_ops/elementwise/modulate.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernels/modulate.h"

namespace tandem::kernel_ops {

namespace {

void check_broadcasts(const Tensor& x, const Tensor& vector, std::string_view name) {
  check_floating("modulate", vector, name);
  TORCH_CHECK_VALUE(
      at::is_expandable_to(vector.sym_sizes(), x.sym_sizes()), "modulate: expected ", name,
      " that broadcasts to x ", x.sym_sizes(), ", got ", vector.sym_sizes(),
      ". One row for each sequence of x [batch, sequence, hidden] is [batch, 1, hidden].");
}

/// Whether `vector` equals x in its first dimensions and has one element in every other but the
/// last: then the rows of x that share a row of it are adjacent.
bool is_by_groups(const Tensor& x, const Tensor& vector) {
  if (vector.dim() == 0 || vector.size(-1) != x.size(-1)) return false;
  bool is_repeated = false;
  for (int64_t d = 0, missing = x.dim() - vector.dim(); d + 1 < x.dim(); ++d) {
    if (x.size(d) == 1) continue;
    const bool is_one = d < missing || vector.size(d - missing) == 1;
    if (is_repeated && !is_one) return false;
    is_repeated = is_one;
  }
  return true;
}

at::ScalarType promoted(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& shift) {
  const at::ScalarType dtype = c10::promoteTypes(x.scalar_type(), scale.scalar_type());
  return shift ? c10::promoteTypes(dtype, shift->scalar_type()) : dtype;
}

}  // namespace

bool Modulate::takes(const Args& args) {
  return Takes<kArithmetic, kArithmetic, kArithmetic>::these(args) &&
         is_by_groups(args.x, args.scale) &&
         (!args.shift ||
          (is_by_groups(args.x, *args.shift) && args.shift->numel() == args.scale.numel()));
}

Specs<1> Modulate::shapes(const Args& args) {
  check_floating("modulate", args.x, "x");
  check_broadcasts(args.x, args.scale, "scale");
  if (args.shift) check_broadcasts(args.x, *args.shift, "shift");
  return {like(args.x, promoted(args.x, args.scale, args.shift))};
}

void Modulate::cpu(const Args& args, std::span<Tensor> results) {
  kernels::cpu::modulate(RowsIn(args.x), RowsIn(args.scale), static_cast<float>(args.offset),
                         RowsIn(args.shift), rows_out(results[0]));
}

Results<1> Modulate::reference(const Args& args) {
  const auto& [x, scale, shift, offset] = args;
  const at::ScalarType dtype = promoted(x, scale, shift), computed = wide(dtype);
  const Tensor y = x.to(computed) * (scale.to(computed) + offset);
  return {(shift ? y + shift->to(computed) : y).to(dtype)};
}

Specs<4> ModulateBackward::shapes(const Args& args) {
  const auto& [grad_y, x, scale, shift, offset, output_mask] = args;
  const Specs<1> forward =
      Modulate::shapes({.x = x, .scale = scale, .shift = shift, .offset = offset});
  check_same_shape("modulate_backward", grad_y, "grad_y", x, "x");
  const Tensor& of_shift = shift ? *shift : scale;
  return {like(x, x.scalar_type(), output_mask[grad_x]),
          like(scale, scale.scalar_type(), output_mask[grad_scale]),
          like(of_shift, of_shift.scalar_type(), output_mask[grad_shift] && shift),
          like(x, forward[0].dtype, output_mask[y])};
}

void ModulateBackward::cpu(const Args& args, std::span<Tensor> results) {
  const auto& [grad_y, x, scale, shift, offset, output_mask] = args;
  if (results[grad_scale].defined() || results[grad_shift].defined())
    kernels::cpu::modulate_sums(RowsIn(grad_y), RowsIn(x), rows_out(results[grad_scale]),
                                rows_out(results[grad_shift]));
  const auto factor = static_cast<float>(offset);
  if (results[y].defined())
    kernels::cpu::modulate(RowsIn(x), RowsIn(scale), factor, RowsIn(shift), rows_out(results[y]));
  if (results[grad_x].defined())
    kernels::cpu::modulate(RowsIn(grad_y), RowsIn(scale), factor, {}, rows_out(results[grad_x]));
}

Results<4> ModulateBackward::reference(const Args& args) {
  const auto& [grad_y, x, scale, shift, offset, output_mask] = args;
  const Modulate::Args forward{.x = x, .scale = scale, .shift = shift, .offset = offset};
  const at::ScalarType computed = wide(promoted(x, scale, shift));
  const Tensor grad = grad_y.to(computed);
  const Tensor& of_shift = shift ? *shift : scale;
  const auto summed = [](const Tensor& product, const Tensor& vector) {
    return at::sum_to(product, vector.sym_sizes(), /*always_return_non_view=*/true)
        .to(vector.scalar_type());
  };
  return {
      output_mask[grad_x] ? (grad * (scale.to(computed) + offset)).to(x.scalar_type())
                          : masked_out(x),
      output_mask[grad_scale] ? summed(grad * x.to(computed), scale) : masked_out(scale),
      output_mask[grad_shift] && shift ? summed(grad, *shift) : masked_out(of_shift),
      output_mask[y] ? Modulate::reference(forward)[0] : masked_out(x, promoted(x, scale, shift))};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<Modulate>(library, {{"cpu", at::kCPU, Modulate::takes, Modulate::cpu}});
  register_kernel_op<ModulateBackward>(
      library, {{"cpu", at::kCPU,
                 [](const ModulateBackward::Args& args) {
                   return kArithmetic.has(args.grad_y.scalar_type()) &&
                          Modulate::takes({args.x, args.scale, args.shift, args.offset});
                 },
                 ModulateBackward::cpu}});
}

}  // namespace tandem::kernel_ops
