// Runs a kernel op without the dispatcher, outside of a plan's step.
#pragma once

#include "kernel_ops/framework/kernel_op.h"
#include "kernel_ops/framework/memory.h"

namespace tandem::kernel_ops {

/// Runs K by the first implementation that accepts the arguments and adds its name to `took`.
/// Results go into the tensors of `spare` that are defined.
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
