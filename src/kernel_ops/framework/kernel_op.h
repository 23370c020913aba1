// What a kernel op is: one struct that says its arguments, shapes and composite reference, and a
// list of implementations. Everything else (schema, dispatcher kernels, shape function for tracing,
// autograd rule, the direct call with buffers) follows from them.
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
//              `output_mask` says of each result whether it is wanted; results behind its end
//              always are. The last members are CodesOf the results that K may quantize
//   kResults   the names of its results, without codes
//   shapes     const Args& -> Specs: sizes and dtypes of the results; in SymInt, so that tracing
//              sees through it. Checks the arguments
//   reference  const Args& -> Results: the results in differentiable ATen operations, for every
//              device and dtype: promotes, or raises, as torch does
// and a list of implementations, which its registration begins (register.h). Where K has
// `kOnManyDevices`, its tensors may lie on several devices; where it has `kIsUnseenByAutograd`,
// autograd passes it by.

template <typename K>
inline constexpr size_t kMadeCount = K::kResults.size();
/// Codes that K may be asked for, each a Group behind the other results.
template <typename K>
inline constexpr size_t kGroupCount = detail::MembersOf<typename K::Args>::kGroups;
template <typename K>
inline constexpr size_t kResultCount = kMadeCount<K> + kGroupCount<K>* group_size;
template <typename K>
using ResultsOf = Results<kResultCount<K>>;

/// The tensors of codes number `index` among the results.
template <typename K>
Group group_of(std::span<const Tensor> results, size_t index = 0) {
  Group group;
  std::copy_n(results.begin() + kMadeCount<K> + index * group_size, group_size, group.begin());
  return group;
}

/// One way to compute kernel op K. It is asked where all tensors among the arguments are plain
/// memory, and the first one is on a device of its type, as all are unless K has kOnManyDevices.
template <typename K>
struct Implementation {
  /// What `explain` calls it; of a string that stays.
  std::string_view name;
  c10::DeviceType device;
  /// Whether it computes on arguments of these dtypes, shapes and strides.
  bool (*accepts)(const typename K::Args& args);
  /// Writes the results that are defined: tensors of the sizes and dtypes that shapes() says,
  /// contiguous. One may lie in the memory of an operand of its sizes and dtype: an element is read
  /// before the result's element in its place is written.
  void (*run)(const typename K::Args& args, std::span<Tensor> results);
  /// Whether it writes codes too. One that does not is asked as if there were none to write: what
  /// they are of is quantized behind it, by an implementation of Quantize.
  bool makes_codes = false;
};

namespace detail {

template <typename K>
const std::string& qualified_name() {
  static const auto& name = *new std::string(c10::str("tandem::", K::kName));
  return name;
}

/// Results of the overload of K with codes, or without.
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
/// An overload of K as a function of the dispatcher.
template <typename K, bool kWithCodes>
using DispatchedOf =
    typename FunctionOf<ReturnedOf<K, kWithCodes>,
                        typename MembersOf<typename K::Args, kWithCodes>::Dispatched>::Type;

/// Throws c10::ValueError: the memory was given back behind the tensor's shape, as storages can be
/// resized to nothing.
[[noreturn]] TANDEM_API void refuse_without_memory(const Tensor& tensor);

/// Throws c10::ValueError unless all tensors lie on one device. `op` is the qualified name, whose
/// schema names the arguments; absent tensors are null.
TANDEM_API void require_one_device(const std::string& op, c10::ArrayRef<const Tensor*> arguments);

/// Throws c10::ValueError where something is given or wanted of codes that no quantizer makes.
TANDEM_API void check_no_codes_asked(const char* op, const AskedCodes& asked);

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

/// Whether any codes are asked for.
template <typename Args>
bool asks_for_codes(const Args& args) {
  bool asks = false;
  detail::for_each_codes(args, [&](const auto& asked, size_t) {
    asks = asks || asked || asked.given || asked.wanted != GroupMask{};
  });
  return asks;
}

/// All results of one overload of K through the dispatcher, those that nobody wants empty.
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

/// Calls K through the dispatcher, which is what lets tracing, modes and subclasses see it. Codes
/// that are not asked for are undefined.
template <typename K>
ResultsOf<K> dispatch(const typename K::Args& args) {
  if constexpr (kGroupCount<K> != 0)
    if (asks_for_codes(args)) {
      ResultsOf<K> results = dispatch_to<K, true>(args);
      detail::for_each_codes(args, [&](const auto& asked, size_t index) {
        if (!asked)
          std::fill_n(results.begin() + kMadeCount<K> + index * group_size, group_size, Tensor());
      });
      return results;
    }
  return dispatch_to<K, false>(args);
}

/// As `accepts`: whether the tensors and dtypes among the arguments, in their order, have one of
/// these dtypes each.
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

/// Memory that a kernel may read as it lies there: dense, and not marked as conjugate, negative or
/// zero. Throws c10::ValueError where it was given back.
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

/// A row of K's list, or null for the reference.
template <typename K>
struct Choice {
  const detail::Listed<Implementation<K>>* listed = nullptr;
  /// The row makes no codes: what it makes is quantized behind it, by the dispatcher's Quantize.
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

/// The arguments where no codes are asked for: what these were of is wanted.
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

/// What codes of a member are of.
template <typename K, size_t kOf>
const Tensor& source_of(const CodesOf<kOf>& /*codes*/, const typename K::Args& args,
                        std::span<const Tensor> results) {
  if constexpr (kOf == kFirstOperand) {
    return first_tensor(args);
  } else {
    return results[kOf];
  }
}

/// Sizes of what codes of a member are of.
template <typename K, size_t kOf>
c10::SymIntArrayRef sizes_of_source(const CodesOf<kOf>& /*codes*/, const typename K::Args& args,
                                    const Specs<kMadeCount<K>>& specs) {
  if constexpr (kOf == kFirstOperand) {
    return first_tensor(args).sym_sizes();
  } else {
    return specs[kOf].sizes;
  }
}

/// Calls `use(spec, place)` for each tensor of the codes that are asked for, by its place among the
/// results.
template <typename K, typename Use>
void for_each_part(const typename K::Args& args, const Specs<kMadeCount<K>>& specs, Use&& use) {
  for_each_codes(args, [&](const auto& asked, size_t index) {
    if (!asked) return check_no_codes_asked(K::kName, asked);
    const auto parts = group_specs(K::kName, sizes_of_source<K>(asked, args, specs), asked.given,
                                   *asked.quantizer, asked.wanted);
    for (size_t part = 0; part < group_size; ++part)
      use(parts[part], kMadeCount<K> + index * group_size + part);
  });
}

/// The codes of x by the kernel op Quantize.
TANDEM_API Group quantized(const Tensor& x, const AskedCodes& asked);

/// Calls `quantize(source, asked)` for the codes that are asked for and puts the groups among the
/// results.
template <typename K, typename Quantize>
void add_codes(const typename K::Args& args, ResultsOf<K>& results, Quantize&& quantize) {
  for_each_codes(args, [&](const auto& asked, size_t index) {
    if (!asked) return;
    Group group = quantize(source_of<K>(asked, args, results), asked);
    std::ranges::move(group, results.begin() + kMadeCount<K> + index * group_size);
  });
}

}  // namespace detail

/// Adds an implementation, which is asked before those that K has. Calls that are under way may
/// still take another one.
template <typename K>
void register_implementation(const Implementation<K>& implementation) {
  TORCH_INTERNAL_ASSERT(!implementation.makes_codes || kGroupCount<K> != 0, K::kName,
                        " has no codes to make");
  detail::prepend(detail::list_of_op<K>(), implementation);
}

/// The first implementation that takes these arguments.
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

/// The composite form: what every implementation of K returns, contiguous and in the dtypes that
/// shapes() says.
template <typename K>
ResultsOf<K> run_reference(const typename K::Args& args) {
  check_devices<K>(args);
  const auto specs = K::shapes(args);
  detail::for_each_part<K>(args, specs, [](const ResultSpec&, size_t) {});  // checks what is asked
  ResultsOf<K> results;
  std::ranges::move(K::reference(detail::without_codes<K>(args)), results.begin());
  for (size_t i = 0; i < specs.size(); ++i) {
    TORCH_INTERNAL_ASSERT(results[i].scalar_type() == specs[i].dtype, K::kName, ": result ", i,
                          " is ", results[i].scalar_type(), ", not ", specs[i].dtype);
    if (results[i].layout() == at::kStrided) results[i] = results[i].contiguous();
  }
  detail::add_codes<K>(args, results, [](const Tensor& source, const AskedCodes& asked) {
    return group_reference(source, asked.given, *asked.quantizer, asked.wanted);
  });
  if constexpr (kGroupCount<K> != 0)
    for (size_t i = 0; i < specs.size(); ++i)
      if (!specs[i].wanted) results[i] = results[i].new_empty({0});
  return results;
}

/// For the `reference` of an op whose K::cpu computes every dtype on every device, as it calls only
/// what does: allocates the results and calls it.
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

/// Runs what was chosen for these arguments. `allocate(i, spec)` gives the memory of result i where
/// it is wanted; the reference has its own.
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
