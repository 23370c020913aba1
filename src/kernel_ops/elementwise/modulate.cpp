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

Specs<1> ModulateScaleBackward::shapes(const Args& args) {
  const auto& [grad_y, x, scale] = args;
  check_floating("modulate", x, "x");
  check_broadcasts(x, scale, "scale");
  check_same_shape(kName, grad_y, "grad_y", x, "x");
  return {like(scale)};
}

void ModulateScaleBackward::cpu(const Args& args, std::span<Tensor> results) {
  kernels::cpu::modulate_sums(RowsIn(args.grad_y), RowsIn(args.x), rows_out(results[0]));
}

Results<1> ModulateScaleBackward::reference(const Args& args) {
  const auto& [grad_y, x, scale] = args;
  const at::ScalarType computed =
      wide(c10::promoteTypes(promoted(x, scale, {}), grad_y.scalar_type()));
  return {at::sum_to(grad_y.to(computed) * x.to(computed), scale.sym_sizes(),
                     /*always_return_non_view=*/true)
              .to(scale.scalar_type())};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<Modulate>(library, {{"cpu", at::kCPU, Modulate::takes, Modulate::cpu}});
  register_kernel_op<ModulateScaleBackward>(
      library, {{"cpu", at::kCPU,
                 [](const ModulateScaleBackward::Args& args) {
                   return Takes<kArithmetic, kArithmetic, kArithmetic>::these(args) &&
                          is_by_groups(args.x, args.scale);
                 },
                 ModulateScaleBackward::cpu}});
}

}  // namespace tandem::kernel_ops
