// Collectives over a process group: each is started, and waited for later. The ops are torch's
// functional collectives, so that compilers, tracing and gloo, NCCL, ... are the same as
// everywhere.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// Who takes part.
struct ProcessGroup {
  /// As torch.distributed knows it.
  std::string name;
  int64_t size = 1;
};

/// Each gives a tensor that holds its numbers once `wait` has returned it, on every rank of the
/// group in the same order. x [rows, ...]:
///
/// all_gather:      [size * rows, ...], those of rank 0 first
/// reduce_scatter:  [rows / size, ...], the rank's rows of the sum over ranks. Throws
/// c10::ValueError unless size divides rows.
/// all_reduce:      [rows, ...], the sum over ranks
/// all_reduce_max:  [rows, ...], the largest over ranks
at::Tensor start_all_gather(const at::Tensor& x, const ProcessGroup& group);
at::Tensor start_reduce_scatter(const at::Tensor& x, const ProcessGroup& group);
at::Tensor start_all_reduce(const at::Tensor& x, const ProcessGroup& group);
at::Tensor start_all_reduce_max(const at::Tensor& x, const ProcessGroup& group);
at::Tensor wait(const at::Tensor& started);

/// start_all_gather where backward wants again what forward has let go. `behind`, a gradient, keeps
/// compilers from taking the two for one and the result of the first from being kept.
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
