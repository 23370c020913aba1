// Operands of steps that multiply groups of rows, for GroupedLinear and its fusions.
#pragma once

#include <vector>

#include "core/call.h"
#include "kernel_ops/grouped/grouped.h"
#include "tandem/export.h"
#include "tandem/op_options.h"

namespace tandem::ops {

/// The number of tensors that hold the operands of delayed gradients: grad_y, x, splits, the
/// arguments of the quantizers of grad_y and x, and a text. The first line of the text has the
/// versions of x and splits; the next two have the texts of the quantizers, and are empty without
/// one.
inline constexpr size_t kDeferred = 6;

/// Returns a tensor as a matrix over its last dimension.
at::Tensor as_matrix(const at::Tensor& x);

/// Returns a read with one number per row as a vector; nullopt where it is absent.
std::optional<at::Tensor> flat(const Call& call, size_t read);

/// Returns the quantizer with which the step itself quantizes the operand of its contract `place`.
kernel_ops::GroupQuantizer quantizer_at(const Call& call, size_t place);
/// Returns quantizer_at for an operand in rows, and writes the groups' amaxes where they are
/// requested. On the direct path the product that quantizes the rows writes them, unless `later`
/// says that no product of this step does.
kernel_ops::GroupQuantizer rows_quantizer_at(Call& call, size_t place, const at::Tensor& rows,
                                             const at::Tensor& splits, int64_t groups,
                                             bool later = false);

/// Computes the requested amaxes of the groups of `rows`.
void write_amaxes(Call& call, size_t place, const at::Tensor& rows, const at::Tensor& splits,
                  int64_t groups);
/// Writes zeros as the requested amaxes; each product that quantizes with `how` then overwrites the
/// amax of its group.
void collect_amaxes(Call& call, size_t place, const at::Tensor& like, int64_t groups,
                    kernel_ops::GroupQuantizer& how);

/// Returns a list operand by group. A packed tensor is split along its first dimension.
std::vector<at::Tensor> by_group(const Call& call, size_t list, bool is_packed);

/// Returns weights by group, in numbers or, in a list, codes. `quantizer` quantizes packed weights.
kernel_ops::GroupMatrices matrices_of(const Call& call, size_t list, bool is_packed,
                                      kernel_ops::GroupQuantizer quantizer = {});

/// Returns the biases by group, and the factors of the biases of rows. Throws c10::ValueError
/// unless there is a factor for each row of the read `x`.
kernel_ops::GroupBiases biases_of(const Call& call, size_t list, size_t scales,
                                  const GroupedLinearOptions& options, size_t x = 0);

/// Throws c10::ValueError unless the weights in `list`, and the biases in the list after it, lie on
/// the device of x, which is the first read, and the read `splits` has numbers where x has.
void check_devices(const Call& call, size_t list, size_t splits,
                   const GroupedLinearOptions& options);

/// Throws c10::ValueError unless `list` has a weight for each group, all of one shape [out, in],
/// and `in` is the last of the sizes `x`.
void check_features(const Call& call, c10::SymIntArrayRef x, size_t list,
                    const GroupedLinearOptions& options);

/// Writes part(g) to each demanded write of group g, or whole() to the write of a packed tensor.
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

/// The tensors for gradients by group, allocated before the groups are visited. Groups without rows
/// get zeros.
class Targets {
 public:
  /// `sizes` are the sizes of all groups together: [groups, ...].
  Targets(Call& call, bool is_packed, at::IntArrayRef sizes, const at::Tensor& like,
          const std::vector<int64_t>& offsets, size_t list = 0);
  /// Undefined where the group's gradient is not demanded.
  const at::Tensor& operator[](size_t group) const { return targets_[group]; }

 private:
  std::vector<at::Tensor> targets_;
};

/// Whether any write of the list is demanded.
bool wants_any(const Call& call, size_t list);

/// Checks the main_grads among the step's mutations from `first` on. Throws c10::ValueError unless
/// each has the shape of its weight [out, in].
void check_main_grads(Call& call, const GroupedLinearOptions& options, const c10::SymInt& out,
                      const c10::SymInt& in, size_t first = 0);
/// Returns the main_grad of a group's weight.
at::Tensor main_grad_of_group(const Call& call, const GroupedLinearOptions& options, size_t group,
                              size_t first = 0);
/// Adds the gradients [groups, out, in] to the main_grads, or overwrites these.
void accumulate_all(const Call& call, const GroupedLinearOptions& options, const at::Tensor& all,
                    size_t first = 0);
/// Increases the versions of the written main_grads for autograd, and writes the dummy gradients.
void finish_main_grads(Call& call, const GroupedLinearOptions& options, const at::Tensor& like,
                       size_t first = 0, size_t list = 0);

/// The operands of delayed gradients of weights.
struct Deferred {
  at::Tensor grad_y, x, splits;
  kernel_ops::GradQuantizers quantizers;
};
/// Stores the operands in the step's mutations from `first` on, with the versions of x and splits.
/// Throws c10::NotImplementedError off the direct path.
void defer(const Call& call, const Deferred& deferred, size_t first = 0);
/// Computes the gradients of weights from the operands that `defer` stored.
///
/// Shapes:  [groups, out_features, in_features].
/// Throws:  c10::Error where x or splits was written in place since.
TANDEM_API at::Tensor left_grad_weights(at::TensorList left);

}  // namespace tandem::ops
