// What a kernel op is: one struct that says schema, shapes and composite reference, and a list of
// implementations. Everything else (dispatcher kernels, shape function for tracing, autograd rule,
// the direct call with buffers) follows from them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernel_ops/framework/implementations.h"
#include "quantization/formats/quantizer.h"

namespace tandem::kernel_ops {

using at::Tensor;

/// Sizes and dtype of one result; `wanted` is false for a result that the caller masked out: it has
/// no elements and is not computed.
struct ResultSpec {
  c10::SymDimVector sizes;
  at::ScalarType dtype = at::kFloat;
  bool wanted = true;
};

/// A set of dtypes.
struct Dtypes {
  template <typename... Dtype>
  constexpr explicit Dtypes(Dtype... dtypes)
      : bits((uint64_t{0} | ... | (uint64_t{1} << static_cast<int>(dtypes)))) {}
  constexpr bool has(at::ScalarType dtype) const {
    return (bits >> static_cast<int>(dtype) & 1) != 0;
  }
  static_assert(static_cast<int>(at::ScalarType::NumOptions) <= 64, "a bit per dtype");
  uint64_t bits;
};

/// What kernels compute on, and what else they read.
inline constexpr Dtypes kArithmetic(at::kFloat, at::kBFloat16, at::kHalf), kStatistic(at::kFloat),
    kCodes(at::kByte), kScale(at::kFloat, at::kByte), kSeed(at::kLong);

/// A kernel op K has
///   kName, kSchema                        name and schema in namespace `tandem`
///   shapes(args...) -> Specs<N>           sizes and dtypes of the results; SymInt, so that tracing
///                                         sees through it; checks arguments
///   reference(args...) -> Results<N>      the results in differentiable ATen operations, for every
///                                         device and dtype: promotes, or raises, as torch does
/// and a list of implementations, which its registration begins (register.h).
template <size_t N>
using Specs = std::array<ResultSpec, N>;
template <size_t N>
using Results = std::array<Tensor, N>;

namespace detail {

/// Arguments as the schema has them: a quantizer is its text, and is found by it; one that may be
/// absent is null.
template <typename Argument>
using SchemaArgument =
    std::conditional_t<std::is_same_v<Argument, const Quantizer&>, std::string_view,
                       std::conditional_t<std::is_same_v<Argument, const Quantizer*>,
                                          std::optional<std::string_view>, Argument>>;
template <typename T>
const T& to_schema(const T& argument) {
  return argument;
}
inline std::string_view to_schema(const Quantizer& argument) { return argument.text; }
inline std::optional<std::string_view> to_schema(const Quantizer* argument) {
  return argument == nullptr ? std::nullopt : std::optional<std::string_view>(argument->text);
}
template <typename Argument, typename Given>
decltype(auto) from_schema(const Given& given) {
  if constexpr (std::is_same_v<Argument, const Quantizer&>) {
    return quantizer(std::string_view(given));
  } else if constexpr (std::is_same_v<Argument, const Quantizer*>) {
    return given ? &quantizer(std::string_view(*given)) : static_cast<const Quantizer*>(nullptr);
  } else {
    return (given);
  }
}

template <typename F>
struct Signature;
template <size_t N, typename... Args>
struct Signature<Specs<N> (*)(Args...)> {
  static constexpr size_t kResults = N;
  template <size_t>
  using TensorAt = Tensor;
  template <size_t... I>
  static std::tuple<TensorAt<I>...> tuple_of(std::index_sequence<I...>);
  using Returned =
      std::conditional_t<N == 1, Tensor, decltype(tuple_of(std::make_index_sequence<N>()))>;
  using Function = Returned(SchemaArgument<Args>...);
  using Accepts = bool(Args...);
  using Run = void(Args..., Results<N>&);
};
}  // namespace detail

template <typename K>
using SignatureOf = detail::Signature<decltype(&K::shapes)>;
template <typename K>
inline constexpr size_t kResultCount = SignatureOf<K>::kResults;
template <typename K>
using ResultsOf = Results<kResultCount<K>>;

/// One way to compute kernel op K. It is asked where all tensors among the arguments are plain
/// memory of one device of its type.
template <typename K>
struct Implementation {
  /// What `explain` calls it; of a string that stays.
  std::string_view name;
  c10::DeviceType device;
  /// Whether it computes on arguments of these dtypes, shapes and strides.
  typename SignatureOf<K>::Accepts* accepts;
  /// Writes the results that are wanted: tensors of the sizes and dtypes that shapes() says,
  /// contiguous. One may lie in the memory of an operand of its sizes and dtype: an element is read
  /// before the result's element in its place is written.
  typename SignatureOf<K>::Run* run;
};

/// Calls K through the dispatcher, which is what lets tracing, modes and subclasses see it.
template <typename K, typename... Args>
ResultsOf<K> dispatch(const Args&... args) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow(K::kQualifiedName, "")
                                 .template typed<typename SignatureOf<K>::Function>();
  if constexpr (kResultCount<K> == 1) {
    return {handle.call(detail::to_schema(args)...)};
  } else {
    return std::apply([](auto&&... results) { return ResultsOf<K>{std::move(results)...}; },
                      handle.call(detail::to_schema(args)...));
  }
}

namespace detail {

/// Throws c10::ValueError: the memory was given back behind the tensor's shape, as storages can be
/// resized to nothing.
[[noreturn]] TANDEM_API void refuse_without_memory(const Tensor& tensor);

template <size_t N, typename T>
bool is_taken(const std::array<Dtypes, N>& takes, size_t& next, const T& argument) {
  if constexpr (std::is_same_v<T, Tensor>) {
    return takes[next++].has(argument.scalar_type());
  } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    const Dtypes& dtypes = takes[next++];
    return !argument || dtypes.has(argument->scalar_type());
  } else if constexpr (std::is_same_v<T, at::ScalarType>) {
    return takes[next++].has(argument);
  } else {
    return true;
  }
}

template <typename T>
inline constexpr bool kIsTyped =
    std::is_same_v<T, Tensor> || std::is_same_v<T, std::optional<Tensor>> ||
    std::is_same_v<T, at::ScalarType>;

/// Tensors among the arguments by position; an absent one is null.
inline const Tensor* tensor_in(const Tensor& argument) { return &argument; }
inline const Tensor* tensor_in(const std::optional<Tensor>& argument) {
  return argument ? &*argument : nullptr;
}
template <typename T>
const Tensor* tensor_in(const T&) {
  return nullptr;
}

/// The first tensor among the arguments. Every kernel op has one.
template <typename First, typename... Rest>
const Tensor& first_tensor(const First& first, const Rest&... rest) {
  if constexpr (std::is_same_v<First, Tensor>) {
    return first;
  } else {
    return first_tensor(rest...);
  }
}

/// Throws c10::ValueError unless all tensors lie on one device. `op` is the qualified name, whose
/// schema names the arguments.
TANDEM_API void require_one_device(const char* op, c10::ArrayRef<const Tensor*> arguments);

}  // namespace detail

/// As `accepts`: whether the tensors and dtypes among the arguments, in their order, have one of
/// these dtypes each.
template <Dtypes... kSets>
struct Takes {
  template <typename... Args>
  static bool these(Args... args) {
    static_assert(
        sizeof...(kSets) == (size_t{0} + ... + size_t{detail::kIsTyped<std::remove_cvref_t<Args>>}),
        "one set per tensor and dtype");
    constexpr std::array kTakes{kSets...};
    size_t next = 0;
    return (detail::is_taken(kTakes, next, args) && ...);
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
using Choice = const detail::Listed<Implementation<K>>*;
template <typename K>
ImplementationNames name_of(Choice<K> choice) {
  return choice == nullptr ? kReference : choice->bit;
}

namespace detail {
template <typename T>
bool is_plain_on(c10::Device device, const T& argument) {
  const Tensor* tensor = tensor_in(argument);
  return tensor == nullptr || (tensor->device() == device && is_plain(*tensor));
}

template <typename K>
std::atomic<const void*>& list_of_op() {
  static std::atomic<const void*>& list = list_of(K::kName);
  return list;
}
}  // namespace detail

/// Adds an implementation, which is asked before those that K has. Calls that are under way may
/// still take another one.
template <typename K>
void register_implementation(const Implementation<K>& implementation) {
  detail::prepend(detail::list_of_op<K>(), implementation);
}

/// The first implementation that takes these arguments.
template <typename K, typename... Args>
Choice<K> choose(const Args&... args) {
  const c10::Device device = detail::first_tensor(args...).device();
  auto* next = static_cast<Choice<K>>(detail::list_of_op<K>().load(std::memory_order_acquire));
  while (next != nullptr && next->row.device != device.type()) next = next->next;
  if (next == nullptr || !(detail::is_plain_on(device, args) && ...)) return nullptr;
  for (; next != nullptr; next = next->next)
    if (next->row.device == device.type() && next->row.accepts(args...)) return next;
  return nullptr;
}

/// Throws c10::ValueError unless all tensors among the arguments lie on one device.
template <typename K, typename... Args>
void check_devices(const Args&... args) {
  detail::require_one_device(K::kQualifiedName, {detail::tensor_in(args)...});
}

/// The composite form: what every implementation of K returns, contiguous and in the dtypes that
/// shapes() says.
template <typename K, typename... Args>
ResultsOf<K> run_reference(const Args&... args) {
  check_devices<K>(args...);
  const auto specs = K::shapes(args...);
  ResultsOf<K> results = K::reference(args...);
  for (size_t i = 0; i < specs.size(); ++i) {
    TORCH_INTERNAL_ASSERT(results[i].scalar_type() == specs[i].dtype, K::kName, ": result ", i,
                          " is ", results[i].scalar_type(), ", not ", specs[i].dtype);
    if (results[i].layout() == at::kStrided) results[i] = results[i].contiguous();
  }
  return results;
}

/// Runs what was chosen for these arguments. `allocate(i, spec)` gives the memory of result i where
/// it is wanted; the reference has its own.
template <typename K, typename Allocate, typename... Args>
ResultsOf<K> run_choice(Choice<K> choice, Allocate&& allocate, const Args&... args) {
  if (choice == nullptr) return run_reference<K>(args...);
  const auto specs = K::shapes(args...);
  ResultsOf<K> results;
  for (size_t i = 0; i < specs.size(); ++i)
    if (specs[i].wanted) results[i] = allocate(i, specs[i]);
  choice->row.run(args..., results);
  return results;
}

}  // namespace tandem::kernel_ops
