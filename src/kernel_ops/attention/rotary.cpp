#include "kernel_ops/attention/rotary.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernels/rotary.h"

namespace tandem::kernel_ops {

namespace {

/// 0, 1, ... in float32.
Tensor counted(const Tensor& like, const c10::SymInt& count) {
  return like.new_ones_symint({count}, like.options().dtype(at::kFloat)).cumsum(0) - 1;
}

/// [positions, features / 2], with as many positions as a sequence has, or as x has rows.
Tensor angles_of(const Rotary::Args& args) {
  const Tensor& x = args.x;
  if (!args.positions) return rotary_angles(counted(x, x.sym_size(-2)), args.features, args.base);
  Tensor positions = args.positions->to(at::kFloat);
  if (positions.dim() > 1) {
    const auto sizes = x.sym_sizes();
    positions = positions.expand_symint(sizes.slice(0, sizes.size() - 1));
  }
  return rotary_angles(positions.flatten(), args.features, args.base);
}

}  // namespace

void check_heads(std::string_view op, const Tensor& x, const Heads& heads) {
  const auto& [num_heads, num_kv_heads, head_dim] = heads;
  check_floating(op, x, "x");
  TORCH_CHECK_VALUE(
      num_heads > 0 && head_dim > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0, op,
      ": expected num_kv_heads that divides num_heads, and a head_dim, got ", num_kv_heads, ", ",
      num_heads, " and ", head_dim, ". Heads share keys and values evenly.");
  TORCH_CHECK_VALUE(x.dim() >= 2 && x.sym_size(-1) == heads.all() * head_dim, op,
                    ": expected x [..., sequence, ", heads.all() * head_dim, "], ", num_heads,
                    " queries, ", num_kv_heads, " keys and as many values of ", head_dim,
                    " features, got ", x.sym_sizes(),
                    ". Let the product before it write (num_heads + 2 num_kv_heads) head_dim.");
}

c10::SymDimVector with_last(const Tensor& x, std::initializer_list<c10::SymInt> last) {
  c10::SymDimVector sizes = sizes_of(x);
  sizes.pop_back();
  sizes.append(last.begin(), last.end());
  return sizes;
}

Tensor rotary_angles(const Tensor& positions, int64_t features, double base) {
  const Tensor pairs = counted(positions, features / 2) * 2 / static_cast<double>(features);
  return at::outer(positions, at::pow(base, pairs).reciprocal());  // 1 / x would write in place
}

Tensor angles_of_features(const Tensor& angles, bool interleaved) {
  return interleaved ? at::stack({angles, angles}, -1).flatten(-2) : at::cat({angles, angles}, -1);
}

Tensor turned(const Tensor& t, const Tensor& angles, bool interleaved) {
  const int64_t features = angles.size(-1), all = t.size(-1);
  const Tensor own = t.narrow(-1, 0, features).to(angles.scalar_type());
  Tensor partner;
  if (interleaved) {
    const Tensor pairs = own.unflatten(-1, {-1, 2});
    partner = at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
  } else {
    const std::vector<Tensor> halves = own.chunk(2, -1);
    partner = at::cat({-halves[1], halves[0]}, -1);
  }
  const Tensor result = (own * angles.cos() + partner * angles.sin()).to(t.scalar_type());
  return features == all ? result : at::cat({result, t.narrow(-1, features, all - features)}, -1);
}

Specs<1> Rotary::shapes(const Args& args) {
  const Tensor& x = args.x;
  check_heads(kName, x, {args.num_heads, args.num_kv_heads, args.head_dim});
  TORCH_CHECK_VALUE(args.features > 0 && args.features % 2 == 0 && args.features <= args.head_dim,
                    "rotary: expected an even number of features to rotate, up to head_dim ",
                    args.head_dim, ", got ", args.features, ". Change rotated_features.");
  if (args.positions) {
    const auto sizes = args.positions->sym_sizes(), of_x = x.sym_sizes();
    const auto rows = of_x.slice(0, of_x.size() - 1);
    TORCH_CHECK_TYPE(!c10::isComplexType(args.positions->scalar_type()) &&
                         args.positions->scalar_type() != at::kBool,
                     "rotary: expected positions that are real numbers, got ",
                     dtype_name(args.positions->scalar_type()), ". Pass those of the rows of x.");
    TORCH_CHECK_VALUE(sizes.size() == 1 ? sizes[0] == rows.back()
                                        : !sizes.empty() && at::is_expandable_to(sizes, rows),
                      "rotary: expected positions of shape [", rows.back(),
                      "], or that broadcast to ", rows, ", got ", sizes,
                      ". Pass one for each row of x.");
  }
  return {like(x)};
}

void Rotary::cpu(const Args& args, std::span<Tensor> results) {
  const RowsIn x(args.x);
  const Tensor angles = angles_of(args), cosines = angles.cos(), sines = angles.sin();
  kernels::cpu::rotary({.x = x,
                        .cosines = cosines.const_data_ptr<float>(),
                        .sines = sines.const_data_ptr<float>(),
                        .positions = static_cast<size_t>(std::max<int64_t>(angles.size(0), 1)),
                        .heads = static_cast<size_t>(args.num_heads + args.num_kv_heads),
                        .head_dim = static_cast<size_t>(args.head_dim),
                        .features = static_cast<size_t>(args.features),
                        .interleaved = args.interleaved,
                        .inverse = args.inverse,
                        .y = rows_out(results[0])});
}

Results<1> Rotary::reference(const Args& args) {
  const Tensor& x = args.x;
  const Heads heads{args.num_heads, args.num_kv_heads, args.head_dim};
  const auto dtype = statistics(x.scalar_type());
  Tensor angles = angles_of_features(angles_of(args), args.interleaved).to(dtype);
  const bool are_by_row = args.positions && args.positions->dim() > 1;
  angles =
      are_by_row ? angles.reshape_symint(with_last(x, {1, args.features})) : angles.unsqueeze(-2);
  if (args.inverse) angles = -angles;
  const Tensor by_head = x.reshape_symint(with_last(x, {heads.all(), heads.head_dim}));
  const int64_t count = heads.num_heads + heads.num_kv_heads;
  const Tensor y = at::cat({turned(by_head.narrow(-2, 0, count), angles, args.interleaved),
                            by_head.narrow(-2, count, heads.num_kv_heads)},
                           -2);
  return {y.reshape_symint(x.sym_sizes())};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<Rotary>(
      library, {{"cpu", at::kCPU,
                 [](const Rotary::Args& args) { return kArithmetic.has(args.x.scalar_type()); },
                 Rotary::cpu}});
}

}  // namespace tandem::kernel_ops
