// Derives the dispatcher registrations of a kernel op from its struct.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "kernel_ops/framework/gradient.h"
#include "kernel_ops/framework/kernel_op.h"
#include "kernel_ops/framework/memory.h"

namespace tandem::kernel_ops {

/// Names of the ops whose references can be traced: each reference is a decomposition.
TANDEM_API std::vector<std::string>& decomposable_ops();

namespace detail {

/// The kernel under is_grads_batched: calls the op once per gradient. torch's own kernel does this
/// too, but takes no lists of tensors.
TANDEM_API void run_each(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The results in the type that the dispatcher expects.
template <typename K, bool kWithCodes>
ReturnedOf<K, kWithCodes> returned(ResultsOf<K>&& results) {
  constexpr size_t kCount = kReturned<K, kWithCodes>;
  if constexpr (kCount == 1) {
    return std::move(results[0]);
  } else if constexpr (kCount != 0) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return ReturnedOf<K, kWithCodes>(std::move(results[I])...);
    }
    (std::make_index_sequence<kCount>());
  }
}

/// Calls `make(spec)` for each result of an overload that is not defined.
template <typename K, bool kWithCodes, typename Make>
void fill_in(const typename K::Args& args, ResultsOf<K>& results, Make&& make) {
  const auto last = results.begin() + kReturned<K, kWithCodes>;
  if (std::all_of(results.begin(), last, [](const Tensor& each) { return each.defined(); })) return;
  const auto specs = K::shapes(args);
  const auto fill = [&](const ResultSpec& spec, size_t place) {
    if (!results[place].defined()) results[place] = make(spec);
  };
  for (size_t i = 0; i < specs.size(); ++i) fill(specs[i], i);
  if constexpr (kWithCodes) {
    for_each_part<K>(args, specs, fill);
    for (size_t i = kMadeCount<K>; i < results.size(); ++i) {  // codes that are not requested
      const size_t part = (i - kMadeCount<K>) % group_size;
      const bool is_codes = part == row_codes || part == column_codes;
      fill({{0}, is_codes ? at::kByte : at::kFloat, false}, i);
    }
  }
}

/// Whether what is computed from the arguments is differentiated, in either mode. Below autograd it
/// is not: the caller provides the gradient itself.
template <typename Args>
bool is_differentiated(const Args& args) {
  if (is_below_autograd()) return false;
  bool is = false;
  for_each_tensor(args, [&](const Tensor* tensor) {
    is = is || (tensor != nullptr &&
                ((c10::GradMode::is_enabled() && tensor->requires_grad()) || has_tangent(*tensor)));
  });
  return is;
}

/// "(Tensor x, float eps) -> (Tensor y, Tensor inv_rms)"
template <typename K, bool kWithCodes>
std::string schema_of() {
  constexpr bool kIsNamed = kReturned<K, kWithCodes> != 1;
  std::string returns;
  const auto add = [&](const std::string& name) {
    returns.append(returns.empty() ? "Tensor" : ", Tensor");
    if (kIsNamed) returns.append(" ").append(name);
  };
  for (const char* const name : K::kResults) add(name);
  std::string_view names = K::Args::kMemberNames;
  for_each_type<MembersOf<typename K::Args>>([&]<typename Member>() {
    std::string_view name = take_name(names);
    if constexpr (kWithCodes && kIsCodes<Member>) {
      constexpr std::string_view kEnd = "codes";
      TORCH_INTERNAL_ASSERT(name.ends_with(kEnd), K::kName, ": ", name, " is not called codes");
      name.remove_suffix(kEnd.size());
      for (const char* const part : kGroupNames) add(std::string(name) + part);
    }
  });
  if (kIsNamed) returns = "(" + returns + ")";
  return "(" + schema_arguments<typename K::Args, kWithCodes>() + ") -> " + returns;
}

/// One overload of K.
template <typename K, bool kWithCodes,
          typename Given = typename MembersOf<typename K::Args, kWithCodes>::Dispatched>
struct Kernels;

template <typename K, bool kWithCodes, typename... Given>
struct Kernels<K, kWithCodes, std::tuple<Given...>> {
  using Args = typename K::Args;
  using Returned = ReturnedOf<K, kWithCodes>;

  static Returned run(Given... given) {
    const Args args = args_from<Args, kWithCodes>(std::forward_as_tuple(given...));
    return finish(args, run_choice<K>(
                            choose<K>(args),
                            [&](size_t, const ResultSpec& spec) {
                              return empty_beside(first_tensor(args),
                                                  C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype);
                            },
                            args));
  }

  static Returned meta(Given... given) {
    const Args args = args_from<Args, kWithCodes>(std::forward_as_tuple(given...));
    check_devices<K>(args);
    if constexpr (kReturned<K, kWithCodes> == 0) {
      K::shapes(args);  // checks
    } else {
      const auto options = first_tensor(args).options().requires_grad(false).memory_format(
          at::MemoryFormat::Contiguous);
      ResultsOf<K> results;
      fill_in<K, kWithCodes>(args, results, [&](const ResultSpec& spec) {
        const c10::SymInt none = 0;
        return at::empty_symint(
            spec.wanted ? c10::SymIntArrayRef(spec.sizes) : c10::SymIntArrayRef(none),
            options.dtype(spec.dtype));
      });
      return returned<K, kWithCodes>(std::move(results));
    }
  }

  /// A kernel op that is called outside a pipeline is differentiated through its composite form.
  static Returned autograd(Given... given) {
    const Args args = args_from<Args, kWithCodes>(std::forward_as_tuple(given...));
    if (is_differentiated(args)) return finish(args, run_reference<K>(args));
    const at::AutoDispatchBelowADInplaceOrView below;
    return returned<K, kWithCodes>(dispatch_to<K, kWithCodes>(args));
  }

  static void add_to(torch::Library& library, const std::vector<at::Tag>& tags) {
    const std::string name = std::string(K::kName) + (kWithCodes ? ".codes" : "");
    library.def((name + schema_of<K, kWithCodes>()).c_str(), tags);
    library.impl(name.c_str(), c10::DispatchKey::Meta, &meta);
    library.impl(name.c_str(), c10::DispatchKey::CompositeExplicitAutograd, &run);
    if constexpr (requires { requires K::kIsUnseenByAutograd; }) {
      library.impl(name.c_str(), c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
    } else {
      library.impl(name.c_str(), c10::DispatchKey::Autograd, &autograd);
      library.impl(name.c_str(), c10::DispatchKey::Batched,
                   torch::CppFunction::makeFromBoxedFunction<&run_each>());
    }
  }

 private:
  static Returned finish(const Args& args, ResultsOf<K>&& results) {
    fill_in<K, kWithCodes>(args, results, [&](const ResultSpec& spec) {
      return empty_beside(first_tensor(args), {0}, spec.dtype);
    });
    return returned<K, kWithCodes>(std::move(results));
  }
};

template <typename K>
void add_overloads(torch::Library& library,
                   std::initializer_list<Implementation<K>> implementations,
                   const std::vector<at::Tag>& tags) {
  for (auto row = implementations.end(); row != implementations.begin();)
    register_implementation<K>(*--row);
  Kernels<K, false>::add_to(library, tags);
  if constexpr (kGroupCount<K> != 0) Kernels<K, true>::add_to(library, tags);
}

}  // namespace detail

/// Registers K: schema, implementations (best first), shape function, and autograd through the
/// reference, unless K has kIsUnseenByAutograd.
template <typename K>
void register_kernel_op(torch::Library& library,
                        std::initializer_list<Implementation<K>> implementations,
                        const std::vector<at::Tag>& tags = {at::Tag::pt2_compliant_tag}) {
  detail::add_overloads<K>(library, implementations, tags);
  decomposable_ops().emplace_back(K::kName);
}

/// Registers an op that K::cpu computes for all dtypes. Its effect depends on the contents of its
/// tensors, so its reference cannot be traced.
template <typename K>
void register_of_all_dtypes(torch::Library& library,
                            const std::vector<at::Tag>& tags = {at::Tag::pt2_compliant_tag}) {
  detail::add_overloads<K>(
      library, {{"cpu", at::kCPU, [](const typename K::Args&) { return true; }, K::cpu}}, tags);
}

}  // namespace tandem::kernel_ops
