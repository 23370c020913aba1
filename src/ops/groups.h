// Operands of steps that multiply groups of rows, for the op and for fusions of it.
#pragma once

#include <vector>

#include "core/call.h"
#include "kernel_ops/grouped/grouped.h"
#include "tandem/export.h"
#include "tandem/op_options.h"

namespace tandem::ops {

/// How many tensors hold what delayed gradients of weights are computed from: grad_y, x, splits,
/// what the quantizers of the first two are given, and a text: the versions of x and splits, the
/// texts of the two quantizers, empty where there is none, one per line.
inline constexpr size_t kDeferred = 6;

/// A tensor as a matrix over its last dimension.
at::Tensor as_matrix(const at::Tensor& x);

/// A read of one number per row as a vector; nullopt where it is absent.
std::optional<at::Tensor> flat(const Call& call, size_t read);

/// How a step quantizes by itself what its contract at `place` names.
kernel_ops::GroupQuantizer quantizer_at(const Call& call, size_t place);
/// The same of rows, whose amaxes it writes where they are asked for: here, or, on the direct path,
/// where the product quantizes them. `later`: none does in this step.
kernel_ops::GroupQuantizer rows_quantizer_at(Call& call, size_t place, const at::Tensor& rows,
                                             const at::Tensor& splits, int64_t groups,
                                             bool later = false);

/// Writes those amaxes, where they are asked for, of rows that are there.
void write_amaxes(Call& call, size_t place, const at::Tensor& rows, const at::Tensor& splits,
                  int64_t groups);
/// Zeros instead, which each product that quantizes by `how` writes those of its group into.
void collect_amaxes(Call& call, size_t place, const at::Tensor& like, int64_t groups,
                    kernel_ops::GroupQuantizer& how);

/// The elements of a list operand by group, those of a packed one too.
std::vector<at::Tensor> by_group(const Call& call, size_t list, bool is_packed);

/// The same of weights, which are numbers or, in a list, codes; `quantizer`: of packed ones.
kernel_ops::GroupMatrices matrices_of(const Call& call, size_t list, bool is_packed,
                                      kernel_ops::GroupQuantizer quantizer = {});

/// Of an op with these options, and what multiplies its biases.
/// Throws c10::ValueError unless there is a number for each row of the read `x`.
kernel_ops::GroupBiases biases_of(const Call& call, size_t list, size_t scales,
                                  const GroupedLinearOptions& options, size_t x = 0);

/// Throws unless weights, a list of the step's reads, and the biases in the list behind them lie on
/// the device of its first read, x, and `splits`, another read, has numbers if x has.
void check_devices(const Call& call, size_t list, size_t splits,
                   const GroupedLinearOptions& options);

/// Throws c10::ValueError unless the list has a weight for each group, all [out, in], and x
/// of these sizes has as many features.
void check_features(const Call& call, c10::SymIntArrayRef x, size_t list,
                    const GroupedLinearOptions& options);

/// Gives each wanted write of the list its group's part, or the whole where it is packed.
template <typename Part, typename Whole>
void write_groups(Call& call, bool is_packed, Part&& part, Whole&& whole, size_t place = 0) {
  const ListRange& list = call.write_list(place);
  if (is_packed) {
    if (list.count != 0 && call.wants(list.first)) call.out(list.first, whole());
    return;
  }
  for (size_t g = 0; g < list.count; ++g)
    if (call.wants(list.first + g)) call.out(list.first + g, part(g));
}

/// What the list of gradients by group is written into, made before the groups are visited; zeros
/// for groups without rows.
class Targets {
 public:
  /// `sizes`: [groups, ...] of all.
  Targets(Call& call, bool is_packed, at::IntArrayRef sizes, const at::Tensor& like,
          const std::vector<int64_t>& offsets, size_t list = 0);
  /// Undefined where it is not wanted.
  const at::Tensor& operator[](size_t group) const { return targets_[group]; }

 private:
  std::vector<at::Tensor> targets_;
};

/// Whether any write of the list is wanted.
bool wants_any(const Call& call, size_t list);

/// Of a step that mutates main_grad, from `first` on: throws c10::ValueError unless each has the
/// shape of its weight [out, in].
void check_main_grads(const Call& call, const GroupedLinearOptions& options, const c10::SymInt& out,
                      const c10::SymInt& in, size_t first = 0);
/// What the gradient of a group's weight goes into.
at::Tensor main_grad_of_group(const Call& call, const GroupedLinearOptions& options, size_t group,
                              size_t first = 0);
/// Adds the gradients of all groups, [groups, out, in], or puts them in their place.
void accumulate_all(const Call& call, const GroupedLinearOptions& options, const at::Tensor& all,
                    size_t first = 0);
/// Once they are written: tells autograd, and writes what is returned beside them.
void finish_main_grads(Call& call, const GroupedLinearOptions& options, const at::Tensor& like,
                       size_t first = 0, size_t list = 0);

/// What gradients of weights that are computed later need.
struct Deferred {
  at::Tensor grad_y, x, splits;
  kernel_ops::GradQuantizers quantizers;
};
/// Puts it into the tensors of the caller that the step mutates, from `first` on; of x and splits
/// the version is written down.
/// Throws c10::NotImplementedError where the call does not take the direct path.
void defer(const Call& call, const Deferred& deferred, size_t first = 0);
/// The gradients of weights that `defer` has left: [groups, out_features, in_features].
///
/// Throws: c10::Error where x or splits was written in place since.
TANDEM_API at::Tensor left_grad_weights(at::TensorList left);

}  // namespace tandem::ops
