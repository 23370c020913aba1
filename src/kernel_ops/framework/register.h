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

/// Results as the dispatcher wants them: all of them, and lists that are empty where no codes were
/// asked for.
template <typename K>
ReturnedOf<K> returned(const typename K::Args& args, ResultsOf<K>&& results) {
  if constexpr (kResultCount<K> == 1) {
    return std::move(results[0]);
  } else if constexpr (kResultCount<K> != 0) {
    std::array<std::vector<Tensor>, kGroupCount<K>> lists;
    for_each_codes(args, [&](const auto& asked, size_t index) {
      auto* const group = results.begin() + kMadeCount<K> + index * group_size;
      if (asked)
        lists[index].assign(std::make_move_iterator(group),
                            std::make_move_iterator(group + group_size));
    });
    return [&]<size_t... I, size_t... J>(std::index_sequence<I...>, std::index_sequence<J...>) {
      return ReturnedOf<K>(std::move(results[I])..., std::move(lists[J])...);
    }
    (std::make_index_sequence<kMadeCount<K>>(), std::make_index_sequence<kGroupCount<K>>());
  }
}

/// Calls `make(spec)` for each result that is not defined.
template <typename K, typename Make>
void fill_in(const typename K::Args& args, ResultsOf<K>& results, Make&& make) {
  if (std::ranges::all_of(results, &Tensor::defined)) return;
  const auto specs = K::shapes(args);
  const auto fill = [&](const ResultSpec& spec, size_t place) {
    if (!results[place].defined()) results[place] = make(spec);
  };
  for (size_t i = 0; i < specs.size(); ++i) fill(specs[i], i);
  for_each_part<K>(args, specs, fill);
}

/// Whether somebody differentiates what is computed from the arguments, in either direction. Below
/// autograd nobody does: whoever calls has the gradient in hand.
template <typename Args>
bool is_differentiated(const Args& args) {
  if (is_below_autograd()) return false;
  return std::ranges::any_of(tensors_in(args), [](const Tensor* tensor) {
    return tensor != nullptr &&
           ((c10::GradMode::is_enabled() && tensor->requires_grad()) || has_tangent(*tensor));
  });
}

template <typename K, typename Given = typename MembersOf<typename K::Args>::Given>
struct Kernels;

template <typename K, typename... Given>
struct Kernels<K, std::tuple<Given...>> {
  using Args = typename K::Args;

  static ReturnedOf<K> run(Given... given) {
    const Args args = args_from<Args>(std::forward_as_tuple(given...));
    const Tensor& first = first_tensor(args);
    ResultsOf<K> results = run_choice<K>(
        choose<K>(args),
        [&](size_t, const ResultSpec& spec) {
          return empty_beside(first, C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype);
        },
        args);
    fill_in<K>(args, results,
               [&](const ResultSpec& spec) { return empty_beside(first, {0}, spec.dtype); });
    return returned<K>(args, std::move(results));
  }

  static ReturnedOf<K> meta(Given... given) {
    const Args args = args_from<Args>(std::forward_as_tuple(given...));
    check_devices<K>(args);
    if constexpr (kResultCount<K> == 0) {
      K::shapes(args);  // checks
    } else {
      const auto options = first_tensor(args).options().requires_grad(false).memory_format(
          at::MemoryFormat::Contiguous);
      ResultsOf<K> results;
      fill_in<K>(args, results, [&](const ResultSpec& spec) {
        const c10::SymInt none = 0;
        return at::empty_symint(
            spec.wanted ? c10::SymIntArrayRef(spec.sizes) : c10::SymIntArrayRef(none),
            options.dtype(spec.dtype));
      });
      return returned<K>(args, std::move(results));
    }
  }

  /// The composite form is differentiable, so autograd of a kernel op that is called by itself is
  /// autograd of that form.
  static ReturnedOf<K> autograd(Given... given) {
    const Args args = args_from<Args>(std::forward_as_tuple(given...));
    if (is_differentiated(args)) return returned<K>(args, run_reference<K>(args));
    const at::AutoDispatchBelowADInplaceOrView below;
    return returned<K>(args, dispatch<K>(args));
  }
};

/// "rms_norm(Tensor x, float eps) -> (Tensor y, Tensor inv_rms)"
template <typename K>
std::string schema_of() {
  std::string returns;
  const auto add = [&](std::string_view type, std::string_view name) {
    returns.append(returns.empty() ? "" : ", ").append(type);
    if (kResultCount < K >> 1) returns.append(" ").append(name);
  };
  for (const std::string_view name : K::kResults) add("Tensor", name);
  std::string_view names = K::Args::kMemberNames;
  using Members = MembersOf<typename K::Args>;
  [&]<size_t... I>(std::index_sequence<I...>) {
    const auto visit = [&](bool is_codes) {
      const std::string_view name = take_name(names);
      if (is_codes) add("Tensor[]", name);
    };
    (visit(kIsCodes<typename Members::template At<I>>), ...);
  }
  (std::make_index_sequence<Members::kCount>());
  if (kResultCount<K> != 1) returns = "(" + returns + ")";
  return std::string(K::kName) + "(" + schema_arguments<typename K::Args>() + ") -> " + returns;
}

}  // namespace detail

/// Schema, implementations (best first), shape function, and autograd through the reference. Of an
/// op that writes its arguments autograd is none: it falls through.
template <typename K>
void register_kernel_op(torch::Library& library,
                        std::initializer_list<Implementation<K>> implementations,
                        const std::vector<at::Tag>& tags = {at::Tag::pt2_compliant_tag}) {
  using Kernels = detail::Kernels<K>;
  for (auto row = implementations.end(); row != implementations.begin();)
    register_implementation<K>(*--row);
  library.def(detail::schema_of<K>().c_str(), tags);
  library.impl(K::kName, c10::DispatchKey::Meta, &Kernels::meta);
  library.impl(K::kName, c10::DispatchKey::CompositeExplicitAutograd, &Kernels::run);
  if constexpr (requires { K::kIsUnseenByAutograd; }) {
    library.impl(K::kName, c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
  } else {
    library.impl(K::kName, c10::DispatchKey::Autograd, &Kernels::autograd);
  }
}

/// Registers an op that K::cpu computes whatever the dtypes.
template <typename K>
void register_of_all_dtypes(torch::Library& library,
                            const std::vector<at::Tag>& tags = {at::Tag::pt2_compliant_tag}) {
  register_kernel_op<K>(
      library, {{"cpu", at::kCPU, [](const typename K::Args&) { return true; }, K::cpu}}, tags);
}

}  // namespace tandem::kernel_ops
