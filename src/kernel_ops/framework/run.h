// Running a kernel op below the dispatcher, where no step of a plan has memory for it.
#pragma once

#include "kernel_ops/framework/kernel_op.h"
#include "kernel_ops/framework/memory.h"

namespace tandem::kernel_ops {

/// Runs K by the first implementation that takes the arguments, whose name is added to `took`, into
/// `spare` where that is given.
template <typename K>
ResultsOf<K> run(ImplementationNames& took, const ResultsOf<K>& spare,
                 const typename K::Args& args) {
  const Choice<K> choice = choose<K>(args);
  took |= name_of<K>(choice);
  return run_choice<K>(
      choice,
      [&](size_t i, const ResultSpec& spec) {
        if (spare[i].defined()) return spare[i];
        return empty_beside(detail::first_tensor(args), C10_AS_INTARRAYREF_SLOW(spec.sizes),
                            spec.dtype);
      },
      args);
}

}  // namespace tandem::kernel_ops
