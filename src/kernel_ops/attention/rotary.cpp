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

/// 0, 1, ..., count - 1 in float32.
Tensor counted(const Tensor& like, const c10::SymInt& count) {
  return like.new_ones_symint({count}, like.options().dtype(at::kFloat)).cumsum(0) - 1;
}

/// Cosines and sines of the angles of features.
struct Tables {
  Tensor cosines, sines;
};

/// Tables [..., features] that broadcast to the rows of x.
Tables tables_of(const Rotary::Args& args, at::ScalarType dtype) {
  if (args.cosines) return {args.cosines->to(dtype), args.sines->to(dtype)};
  const Tensor positions = counted(args.x, args.x.sym_size(-2));
  const Tensor angles =
      angles_of_features(rotary_angles(positions, args.features, args.base), args.interleaved)
          .to(dtype);
  return {angles.cos(), angles.sin()};
}

/// A table [n, features] such that row r of x, in row-major order, uses row r % n of it. It is not
/// copied if it is equal for all of x's first dimensions.
Tensor repeating(Tensor table, at::IntArrayRef rows) {
  while (table.dim() > 1 && table.size(0) == 1) table = table.select(0, 0);
  const auto own = table.sizes().slice(0, table.dim() - 1);
  if (own.empty() || own != rows.slice(rows.size() - own.size())) {
    c10::DimVector sizes(rows);
    sizes.push_back(table.size(-1));
    table = table.expand(sizes);
  }
  return table.reshape({-1, table.size(-1)}).contiguous();
}

void check_tables(const Rotary::Args& args) {
  const Tensor &x = args.x, &cosines = *args.cosines, &sines = *args.sines;
  for (const Tensor* table : {&cosines, &sines})
    TORCH_CHECK_TYPE(table->is_floating_point(),
                     "rotary: expected cosines and sines of a floating dtype, got ",
                     dtype_name(table->scalar_type()), ". Pass those of the angles.");
  const auto sizes = cosines.sym_sizes();
  TORCH_CHECK_VALUE(!sizes.empty() && sizes == sines.sym_sizes() && sizes.back() == args.features &&
                        at::is_expandable_to(sizes, with_last(x, {args.features})),
                    "rotary: expected cosines and sines of shape [", x.sym_size(-2), ", ",
                    args.features, "], or alike and such that they broadcast to ",
                    c10::SymIntArrayRef(with_last(x, {args.features})), ", got ", sizes, " and ",
                    sines.sym_sizes(), ". Pass one for each position and feature that is turned.");
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

Tensor turned(const Tensor& t, const Tensor& cosines, const Tensor& sines, bool interleaved,
              bool inverse) {
  const int64_t features = cosines.size(-1), all = t.size(-1);
  const auto partner_of = [&](const Tensor& own) {
    if (interleaved) {
      const Tensor pairs = own.unflatten(-1, {-1, 2});
      return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
    }
    const std::vector<Tensor> halves = own.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  };
  const Tensor own = t.narrow(-1, 0, features).to(cosines.scalar_type());
  const Tensor sum =
      inverse ? own * cosines - partner_of(own * sines) : own * cosines + partner_of(own) * sines;
  const Tensor result = sum.to(t.scalar_type());
  return features == all ? result : at::cat({result, t.narrow(-1, features, all - features)}, -1);
}

Specs<1> Rotary::shapes(const Args& args) {
  const Tensor& x = args.x;
  check_heads(kName, x, {args.num_heads, args.num_kv_heads, args.head_dim});
  TORCH_CHECK_VALUE(args.features > 0 && args.features % 2 == 0 && args.features <= args.head_dim,
                    "rotary: expected an even number of features to rotate, up to head_dim ",
                    args.head_dim, ", got ", args.features, ". Change rotated_features.");
  TORCH_CHECK_VALUE(args.cosines.has_value() == args.sines.has_value(),
                    "rotary: expected cosines and sines, or neither, got one of them. Pass both.");
  if (args.cosines) check_tables(args);
  return {like(x)};
}

void Rotary::cpu(const Args& args, std::span<Tensor> results) {
  const RowsIn x(args.x);
  const Tables tables = tables_of(args, at::kFloat);
  const auto rows = args.x.sizes().slice(0, args.x.dim() - 1);
  const Tensor cosines = repeating(tables.cosines, rows), sines = repeating(tables.sines, rows);
  kernels::cpu::rotary({.x = x,
                        .cosines = cosines.const_data_ptr<float>(),
                        .sines = sines.const_data_ptr<float>(),
                        .positions = static_cast<size_t>(std::max<int64_t>(cosines.size(0), 1)),
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
  const Tables tables = tables_of(args, statistics(x.scalar_type()));
  const Tensor cosines = tables.cosines.unsqueeze(-2), sines = tables.sines.unsqueeze(-2);
  const Tensor by_head = x.reshape_symint(with_last(x, {heads.all(), heads.head_dim}));
  const int64_t count = heads.num_heads + heads.num_kv_heads;
  const Tensor own = by_head.narrow(-2, 0, count);
  const Tensor y = at::cat({turned(own, cosines, sines, args.interleaved, args.inverse),
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
