// What a kernel op is: one struct with its arguments, shapes and composite reference, and a list of
// implementations. Everything else follows from them: schema, dispatcher kernels, shape function
// for tracing, autograd rule, and the direct call with buffers.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <span>
#include <utility>

#include "kernel_ops/framework/arguments.h"
#include "kernel_ops/framework/implementations.h"
#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/results.h"
#include "quantization/formats/format.h"

namespace tandem::kernel_ops {

// A kernel op K has
//   kName      its name in namespace `tandem`
//   Args       its arguments (arguments.h): tensors that K reads, `const Tensor&` or
//              std::optional<Tensor>; tensors that K writes, `Tensor&` or std::optional<Tensor>&;
//              quantizers, `const Quantizer&` or a pointer; numbers and texts. A member
//              `output_mask` says for each result whether it is wanted; results beyond its length
//              always are. The last members are CodesOf, one for each result that K may quantize
//   kResults   the names of its results, without codes
//   shapes     const Args& -> Specs: checks the arguments and returns sizes and dtypes of the
//              results, in SymInt so that tracing works
//   reference  const Args& -> Results: the results in differentiable ATen operations, on every
//              device and dtype; it promotes or raises as torch does
// and a list of implementations, whose first rows its registration gives (register.h). If K has
// `kOnManyDevices`, its tensors may lie on several devices. If it has `kIsUnseenByAutograd`,
// autograd passes the op by.

template <typename K>
inline constexpr size_t kMadeCount = K::kResults.size();
/// How many Groups of codes K may return, after its other results.
template <typename K>
inline constexpr size_t kGroupCount = detail::MembersOf<typename K::Args>::kGroups;
template <typename K>
inline constexpr size_t kResultCount = kMadeCount<K> + kGroupCount<K>* group_size;
template <typename K>
using ResultsOf = Results<kResultCount<K>>;

/// The tensors of the Group of codes `index` among the results.
template <typename K>
Group group_of(std::span<const Tensor> results, size_t index = 0) {
  Group group;
  std::copy_n(results.begin() + kMadeCount<K> + index * group_size, group_size, group.begin());
  return group;
}

/// An implementation of kernel op K. `accepts` is called only if all tensors among the arguments
/// are dense memory and lie on a device of type `device`; if K has kOnManyDevices, only the first
/// tensor must lie on such a device.
template <typename K>
struct Implementation {
  /// The name that `explain` prints; a string with static lifetime.
  std::string_view name;
  c10::DeviceType device;
  /// Whether it computes on arguments of these dtypes, shapes and strides.
  bool (*accepts)(const typename K::Args& args);
  /// Writes the results that are defined: contiguous tensors with the sizes and dtypes from
  /// shapes(). A result may share the memory of an operand of equal sizes and dtype, so an
  /// implementation must read an operand's element before it writes the result's element at that
  /// place.
  void (*run)(const typename K::Args& args, std::span<Tensor> results);
  /// Whether `run` also writes codes. If not, `accepts` and `run` get arguments without requested
  /// codes, and an implementation of Quantize quantizes the result afterwards.
  bool makes_codes = false;
};

namespace detail {

template <typename K>
const std::string& qualified_name() {
  static const auto& name = *new std::string(c10::str("tandem::", K::kName));
  return name;
}

/// How many results the overload of K with codes, or without, returns.
template <typename K, bool kWithCodes>
inline constexpr size_t kReturned = kWithCodes ? kResultCount<K> : kMadeCount<K>;

template <size_t kCount>
struct ReturnedBy {
  template <size_t>
  using TensorAt = Tensor;
  template <size_t... I>
  static std::tuple<TensorAt<I>...> of(std::index_sequence<I...>);
  using Type = decltype(of(std::make_index_sequence<kCount>()));
};
template <>
struct ReturnedBy<1> {
  using Type = Tensor;
};
template <>
struct ReturnedBy<0> {
  using Type = void;
};
template <typename K, bool kWithCodes>
using ReturnedOf = typename ReturnedBy<kReturned<K, kWithCodes>>::Type;

template <typename Returned, typename Given>
struct FunctionOf;
template <typename Returned, typename... Given>
struct FunctionOf<Returned, std::tuple<Given...>> {
  using Type = Returned(Given...);
};
/// The type of an overload of K as a function of the dispatcher.
template <typename K, bool kWithCodes>
using DispatchedOf =
    typename FunctionOf<ReturnedOf<K, kWithCodes>,
                        typename MembersOf<typename K::Args, kWithCodes>::Dispatched>::Type;

/// Throws c10::ValueError: the tensor's storage has been resized to nothing while the tensor kept
/// its shape.
[[noreturn]] TANDEM_API void refuse_without_memory(const Tensor& tensor);

/// Throws c10::ValueError unless all tensors lie on one device. `op` is the qualified name, whose
/// schema has the names of the arguments. Absent tensors are nullptr.
TANDEM_API void require_one_device(const std::string& op, c10::ArrayRef<const Tensor*> arguments);

/// Throws c10::ValueError if `requested` has a given tensor or wanted parts but no quantizer.
TANDEM_API void check_no_codes_asked(const char* op, const RequestedCodes& requested);

template <size_t N, typename T>
bool is_taken(const std::array<Dtypes, N>& takes, size_t& next, const T& argument) {
  if constexpr (std::is_same_v<T, Tensor>) {
    return takes[next++].has(argument.scalar_type());
  } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    const Dtypes& dtypes = takes[next++];
    return !argument || dtypes.has(argument->scalar_type());
  } else if constexpr (std::is_same_v<T, at::ScalarType>) {
    return takes[next++].has(argument);
  } else if constexpr (kIsCodes<T>) {
    return !argument.given || kGiven.has(argument.given->scalar_type());
  } else {
    return true;
  }
}

template <typename T>
inline constexpr bool kIsTyped =
    std::is_same_v<T, Tensor> || std::is_same_v<T, std::optional<Tensor>> ||
    std::is_same_v<T, at::ScalarType>;

}  // namespace detail

/// Whether any codes are requested.
template <typename Args>
bool asks_for_codes(const Args& args) {
  bool asks = false;
  detail::for_each_codes(args, [&](const auto& requested, size_t) {
    asks = asks || requested || requested.given || requested.wanted != GroupMask{};
  });
  return asks;
}

/// All results of one overload of K, through the dispatcher. Results that are not wanted are empty.
template <typename K, bool kWithCodes>
ResultsOf<K> dispatch_to(const typename K::Args& args) {
  static const auto handle =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(detail::qualified_name<K>().c_str(), kWithCodes ? "codes" : "")
          .template typed<detail::DispatchedOf<K, kWithCodes>>();
  const auto call = [](auto&... given) { return handle.call(given...); };
  auto given = detail::dispatched_of<kWithCodes>(args);
  constexpr size_t kCount = detail::kReturned<K, kWithCodes>;
  ResultsOf<K> results;
  if constexpr (kCount == 0) {
    std::apply(call, given);
  } else if constexpr (kCount == 1) {
    results[0] = std::apply(call, given);
  } else {
    auto returned = std::apply(call, given);
    [&]<size_t... I>(std::index_sequence<I...>) {
      ((results[I] = std::move(std::get<I>(returned))), ...);
    }
    (std::make_index_sequence<kCount>());
  }
  return results;
}

/// Calls K through the dispatcher, so that tracing, modes and subclasses see the call. Codes that
/// are not requested are undefined.
template <typename K>
ResultsOf<K> dispatch(const typename K::Args& args) {
  if constexpr (kGroupCount<K> != 0)
    if (asks_for_codes(args)) {
      ResultsOf<K> results = dispatch_to<K, true>(args);
      detail::for_each_codes(args, [&](const auto& requested, size_t index) {
        if (!requested)
          std::fill_n(results.begin() + kMadeCount<K> + index * group_size, group_size, Tensor());
      });
      return results;
    }
  return dispatch_to<K, false>(args);
}

/// An `accepts`: whether each tensor and dtype among the arguments, in order, has a dtype of its
/// set.
template <Dtypes... kSets>
struct Takes {
  template <typename Args>
  static bool these(const Args& args) {
    return std::apply(
        [](const auto&... member) {
          static_assert(
              sizeof...(kSets) == (size_t{0} + ... +
                                   size_t{detail::kIsTyped<std::remove_cvref_t<decltype(member)>>}),
              "one set per tensor and dtype");
          constexpr std::array<Dtypes, sizeof...(kSets)> kTakes{kSets...};
          size_t next = 0;
          return (detail::is_taken(kTakes, next, member) && ...);
        },
        args.members());
  }
};

/// Whether a kernel may read the tensor's memory as it lies there: dense, and not marked as
/// conjugate, negative or zero. Throws c10::ValueError if the memory was given back.
inline bool is_plain(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kMarks({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                        c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python});
  const c10::DispatchKeySet keys = tensor.key_set();
  if (!keys.has(c10::DispatchKey::Dense) || keys.has_any(kMarks)) return false;
  const at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage()) return false;
  if (!impl->storage_initialized()) detail::refuse_without_memory(tensor);
  return true;
}

/// The implementation that `choose` found; nullptr: the reference.
template <typename K>
struct Choice {
  const detail::Listed<Implementation<K>>* listed = nullptr;
  /// Whether the row does not write the requested codes, so that Quantize must follow.
  bool quantizes_apart = false;
};
template <typename K>
ImplementationNames name_of(const Choice<K>& choice) {
  if (choice.listed == nullptr) return kReference;
  return choice.listed->bit | (choice.quantizes_apart ? kDispatcher : ImplementationNames{0});
}

namespace detail {

template <typename K>
concept OnManyDevices = requires {
  requires K::kOnManyDevices;
};

template <typename K>
bool are_plain(const typename K::Args& args, c10::Device device) {
  bool are_ready = true;
  for_each_tensor(args, [&](const Tensor* tensor) {
    are_ready =
        are_ready && (tensor == nullptr ||
                      ((OnManyDevices<K> || tensor->device() == device) && is_plain(*tensor)));
  });
  return are_ready;
}

template <typename K>
std::atomic<const void*>& list_of_op() {
  static std::atomic<const void*>& list = list_of(K::kName);
  return list;
}

/// The arguments without requested codes. The results that the codes were of become wanted.
template <typename K>
typename K::Args without_codes(const typename K::Args& args) {
  typename K::Args plain = args;
  const auto forget = [&](auto& member) {
    using Member = std::remove_cvref_t<decltype(member)>;
    if constexpr (kIsCodes<Member>) {
      if constexpr (requires { plain.output_mask; })
        if (member && Member::kResult < plain.output_mask.size())
          plain.output_mask[Member::kResult] = true;
      member = {};
    }
  };
  std::apply([&](auto&... member) { (forget(member), ...); }, plain.members());
  return plain;
}

/// The matrix whose codes a member requests.
template <typename K, size_t kOf>
const Tensor& source_of(const CodesOf<kOf>& /*codes*/, const typename K::Args& args,
                        std::span<const Tensor> results) {
  if constexpr (kOf == kFirstOperand) {
    return first_tensor(args);
  } else {
    return results[kOf];
  }
}

/// The sizes of the matrix whose codes a member requests.
template <typename K, size_t kOf>
c10::SymIntArrayRef sizes_of_source(const CodesOf<kOf>& /*codes*/, const typename K::Args& args,
                                    const Specs<kMadeCount<K>>& specs) {
  if constexpr (kOf == kFirstOperand) {
    return first_tensor(args).sym_sizes();
  } else {
    return specs[kOf].sizes;
  }
}

/// Calls `use(spec, place)` for each tensor of requested codes; `place`: its index among the
/// results.
template <typename K, typename Use>
void for_each_part(const typename K::Args& args, const Specs<kMadeCount<K>>& specs, Use&& use) {
  for_each_codes(args, [&](const auto& requested, size_t index) {
    if (!requested) return check_no_codes_asked(K::kName, requested);
    const auto parts = group_specs(K::kName, sizes_of_source<K>(requested, args, specs),
                                   requested.given, *requested.quantizer, requested.wanted);
    for (size_t part = 0; part < group_size; ++part)
      use(parts[part], kMadeCount<K> + index * group_size + part);
  });
}

/// The codes of x by the kernel op Quantize.
TANDEM_API Group quantized(const Tensor& x, const RequestedCodes& requested);

/// Calls `quantize(source, requested)` for each member that requests codes and stores the groups
/// among the results.
template <typename K, typename Quantize>
void add_codes(const typename K::Args& args, ResultsOf<K>& results, Quantize&& quantize) {
  for_each_codes(args, [&](const auto& requested, size_t index) {
    if (!requested) return;
    Group group = quantize(source_of<K>(requested, args, results), requested);
    std::ranges::move(group, results.begin() + kMadeCount<K> + index * group_size);
  });
}

}  // namespace detail

/// Adds an implementation, which `choose` tries before the existing ones. Calls that are running
/// may still take an existing one.
template <typename K>
void register_implementation(const Implementation<K>& implementation) {
  TORCH_INTERNAL_ASSERT(!implementation.makes_codes || kGroupCount<K> != 0, K::kName,
                        " has no codes to make");
  detail::prepend(detail::list_of_op<K>(), implementation);
}

/// The first implementation that accepts these arguments.
template <typename K>
Choice<K> choose(const typename K::Args& args) {
  const c10::Device device = detail::first_tensor(args).device();
  const auto* first = static_cast<const detail::Listed<Implementation<K>>*>(
      detail::list_of_op<K>().load(std::memory_order_acquire));
  while (first != nullptr && first->row.device != device.type()) first = first->next;
  if (first == nullptr || !detail::are_plain<K>(args, device)) return {};
  const bool asks = asks_for_codes(args);
  const auto find = [&](const typename K::Args& these, bool with_codes) {
    const auto* next = first;
    while (next != nullptr && (next->row.device != device.type() ||
                               (with_codes && !next->row.makes_codes) || !next->row.accepts(these)))
      next = next->next;
    return next;
  };
  if (const auto* found = find(args, asks)) return {found};
  if (asks)
    if (const auto* found = find(detail::without_codes<K>(args), false)) return {found, true};
  return {};
}

/// Throws c10::ValueError unless all tensors among the arguments lie on one device.
template <typename K>
void check_devices(const typename K::Args& args) {
  if constexpr (!detail::OnManyDevices<K>) {
    c10::SmallVector<const Tensor*, 12> tensors;
    detail::for_each_tensor(args, [&](const Tensor* tensor) { tensors.push_back(tensor); });
    detail::require_one_device(detail::qualified_name<K>(), tensors);
  }
}

/// Runs the composite form. Its results are contiguous and have the dtypes from shapes(), like the
/// results of every implementation.
template <typename K>
ResultsOf<K> run_reference(const typename K::Args& args) {
  check_devices<K>(args);
  const auto specs = K::shapes(args);
  detail::for_each_part<K>(args, specs, [](const ResultSpec&, size_t) {});  // checks
  ResultsOf<K> results;
  std::ranges::move(K::reference(detail::without_codes<K>(args)), results.begin());
  for (size_t i = 0; i < specs.size(); ++i) {
    TORCH_INTERNAL_ASSERT(results[i].scalar_type() == specs[i].dtype, K::kName, ": result ", i,
                          " is ", results[i].scalar_type(), ", not ", specs[i].dtype);
    if (results[i].layout() == at::kStrided) results[i] = results[i].contiguous();
  }
  detail::add_codes<K>(args, results, [](const Tensor& source, const RequestedCodes& requested) {
    return group_reference(source, requested.given, *requested.quantizer, requested.wanted);
  });
  if constexpr (kGroupCount<K> != 0)
    for (size_t i = 0; i < specs.size(); ++i)
      if (!specs[i].wanted) results[i] = results[i].new_empty({0});
  return results;
}

/// The `reference` of an op whose K::cpu computes every dtype on every device because it calls only
/// functions that do: allocates the results and calls K::cpu.
template <typename K>
Results<kMadeCount<K>> made_by_cpu(const typename K::Args& args) {
  const Tensor& first = detail::first_tensor(args);
  const auto specs = K::shapes(args);
  Results<kMadeCount<K>> results;
  for (size_t i = 0; i < specs.size(); ++i)
    if (specs[i].wanted)
      results[i] = empty_beside(first, C10_AS_INTARRAYREF_SLOW(specs[i].sizes), specs[i].dtype);
  K::cpu(args, results);
  for (size_t i = 0; i < specs.size(); ++i)
    if (!specs[i].wanted) results[i] = empty_beside(first, {0}, specs[i].dtype);
  return results;
}

/// Runs the chosen implementation. `allocate(i, spec)` returns the memory of a wanted result i; the
/// reference allocates its own.
template <typename K, typename Allocate>
ResultsOf<K> run_choice(const Choice<K>& choice, Allocate&& allocate,
                        const typename K::Args& args) {
  if (choice.listed == nullptr) return run_reference<K>(args);
  const auto specs = K::shapes(args);
  ResultsOf<K> results;
  for (size_t i = 0; i < specs.size(); ++i)
    if (specs[i].wanted) results[i] = allocate(i, specs[i]);
  if constexpr (kGroupCount<K> != 0) {
    if (choice.quantizes_apart) {
      detail::for_each_part<K>(args, specs, [](const ResultSpec&, size_t) {});  // checks
      const typename K::Args plain = detail::without_codes<K>(args);
      const auto all = K::shapes(plain);
      for (size_t i = 0; i < all.size(); ++i)
        if (all[i].wanted && !results[i].defined()) results[i] = allocate(i, all[i]);
      choice.listed->row.run(plain, results);
      detail::add_codes<K>(args, results, detail::quantized);
      for (size_t i = 0; i < specs.size(); ++i)
        if (!specs[i].wanted) results[i] = Tensor();
      return results;
    }
    detail::for_each_part<K>(args, specs, [&](const ResultSpec& spec, size_t place) {
      if (spec.wanted) results[place] = allocate(place, spec);
    });
  }
  choice.listed->row.run(args, results);
  return results;
}

}  // namespace tandem::kernel_ops
