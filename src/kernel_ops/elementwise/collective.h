// Collectives over a process group. Each is started by one function and waited for by another. They
// are torch's functional collectives, so compilers, tracing and every backend treat them as usual.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// The ranks that take part in a collective.
struct ProcessGroup {
  /// The group's name in torch.distributed.
  std::string name;
  int64_t size = 1;
};

/// Start a collective. The returned tensor holds its numbers once `wait` has returned it. All ranks
/// of the group must start their collectives in one order. For x [rows, ...] the results are
///
///   all_gather      [size * rows, ...], the rows of rank 0 first
///   reduce_scatter  [rows / size, ...], this rank's rows of the sum over ranks; throws
///                   c10::ValueError unless size divides rows
///   all_reduce      [rows, ...], the sum over ranks
///   all_reduce_max  [rows, ...], the maximum over ranks
at::Tensor start_all_gather(const at::Tensor& x, const ProcessGroup& group);
at::Tensor start_reduce_scatter(const at::Tensor& x, const ProcessGroup& group);
at::Tensor start_all_reduce(const at::Tensor& x, const ProcessGroup& group);
at::Tensor start_all_reduce_max(const at::Tensor& x, const ProcessGroup& group);
at::Tensor wait(const at::Tensor& started);

/// start_all_gather in backward, of what forward has gathered and not kept. Reading the gradient
/// `behind` stops compilers from merging both gathers, which would keep the first result alive.
struct AllGatherAgain {
  static constexpr const char* kName = "all_gather_again";
  static constexpr std::array kResults{"started"};
  static constexpr bool kIsUnseenByAutograd = true;
  struct Args {
    const Tensor &x, &behind;
    int64_t size;
    std::string_view group;
    TANDEM_ARGUMENTS(x, behind, size, group)
  };
  static Specs<1> shapes(const Args& args);
  static Results<1> reference(const Args& args);
};
at::Tensor start_all_gather_again(const at::Tensor& x, const at::Tensor& behind,
                                  const ProcessGroup& group);

}  // namespace tandem::kernel_ops
