// Derives the dispatcher registrations of a kernel op from its struct.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>

#include "kernel_ops/framework/gradient.h"
#include "kernel_ops/framework/kernel_op.h"
#include "kernel_ops/framework/memory.h"

namespace tandem::kernel_ops {

namespace detail {

template <size_t N>
auto returned(Results<N>&& results) {
  if constexpr (N == 1) {
    return std::move(results[0]);
  } else {
    return std::apply([](auto&&... each) { return std::make_tuple(std::move(each)...); },
                      std::move(results));
  }
}

/// Whether somebody differentiates what is computed from the argument, in either direction.
template <typename T>
bool is_differentiated([[maybe_unused]] const T& argument) {
  if constexpr (std::is_same_v<T, Tensor>) {
    return (c10::GradMode::is_enabled() && argument.requires_grad()) ||
           kernel_ops::has_tangent(argument);
  } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    return argument && is_differentiated(*argument);
  } else {
    return false;
  }
}

template <typename K, typename F>
struct Kernels;

template <typename K, size_t N, typename... Args>
struct Kernels<K, Specs<N> (*)(Args...)> {
  static auto run(SchemaArgument<Args>... args) { return run_best(from_schema<Args>(args)...); }
  static auto meta(SchemaArgument<Args>... args) { return run_meta(from_schema<Args>(args)...); }
  static auto reference(SchemaArgument<Args>... args) {
    return returned(run_reference<K>(from_schema<Args>(args)...));
  }

  /// The composite form is differentiable, so autograd of a kernel op that is called by itself is
  /// autograd of that form.
  static auto autograd(SchemaArgument<Args>... args) {
    if ((is_differentiated(args) || ...)) return reference(args...);
    at::AutoDispatchBelowADInplaceOrView below;
    return returned(dispatch<K>(args...));
  }

 private:
  template <typename... Given>
  static auto run_best(const Given&... args) {
    const Tensor& first = first_tensor(args...);
    Results<N> results = run_choice<K>(
        choose<K>(args...),
        [&](size_t, const ResultSpec& spec) {
          return empty_beside(first, C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype);
        },
        args...);
    if (!std::ranges::all_of(results, &Tensor::defined)) {  // a schema returns all of them
      const Specs<N> specs = K::shapes(args...);
      for (size_t i = 0; i < N; ++i)
        if (!results[i].defined()) results[i] = empty_beside(first, {0}, specs[i].dtype);
    }
    return returned(std::move(results));
  }

  template <typename... Given>
  static auto run_meta(const Given&... args) {
    check_devices<K>(args...);
    const Specs<N> specs = K::shapes(args...);
    Results<N> results;
    for (size_t i = 0; i < N; ++i)
      results[i] =
          at::empty_symint(specs[i].sizes, first_tensor(args...)
                                               .options()
                                               .dtype(specs[i].dtype)
                                               .memory_format(at::MemoryFormat::Contiguous));
    return returned(std::move(results));
  }
};

}  // namespace detail

template <typename K>
using KernelsOf = detail::Kernels<K, decltype(&K::shapes)>;

/// Schema, implementations (best first), shape function, and autograd through the reference.
template <typename K>
void register_kernel_op(torch::Library& library,
                        std::initializer_list<Implementation<K>> implementations) {
  for (auto row = implementations.end(); row != implementations.begin();)
    register_implementation<K>(*--row);
  library.def(K::kSchema, {at::Tag::pt2_compliant_tag});
  library.impl(K::kName, c10::DispatchKey::Meta, &KernelsOf<K>::meta);
  library.impl(K::kName, c10::DispatchKey::CompositeExplicitAutograd, &KernelsOf<K>::run);
  library.impl(K::kName, c10::DispatchKey::Autograd, &KernelsOf<K>::autograd);
}

}  // namespace tandem::kernel_ops
