// What a kernel op is: one struct that says schema, shapes, CPU kernel and composite reference. Everything else (dispatcher kernels,
// shape function for tracing, autograd rule, the direct call with buffers) follows from it.
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

#include "kernel_ops/quantizer.h"

namespace tandem::kernel_ops {

using at::Tensor;

/// Sizes and dtype of one result; `wanted` is false for a result that the caller masked out: it has no elements and is not computed.
struct ResultSpec {
  c10::SymDimVector sizes;
  at::ScalarType dtype = at::kFloat;
  bool wanted = true;
};

/// A set of dtypes.
class Dtypes {
 public:
  template <typename... Dtype>
  constexpr explicit Dtypes(Dtype... dtypes)
      : bits_((uint64_t{0} | ... | (uint64_t{1} << static_cast<int>(dtypes)))) {}
  constexpr bool has(at::ScalarType dtype) const {
    return (bits_ >> static_cast<int>(dtype) & 1) != 0;
  }

 private:
  static_assert(static_cast<int>(at::ScalarType::NumOptions) <= 64, "a bit per dtype");
  uint64_t bits_;
};

/// What CPU kernels compute on, and what else they read.
inline constexpr Dtypes kArithmetic(at::kFloat, at::kBFloat16, at::kHalf), kStatistic(at::kFloat),
    kCodes(at::kByte), kScale(at::kFloat, at::kByte), kSeed(at::kLong);

/// A kernel op K has
///   kName, kSchema                        name and schema in namespace `tandem`
///   kTakes                                dtypes that cpu() takes, one set per tensor and dtype among the arguments, in their order
///   shapes(args...) -> Specs<N>           sizes and dtypes of the results; SymInt, so that tracing sees through it; checks arguments
///   cpu(args..., Results<N>& results)     writes the allocated results; called only where has_cpu_kernel<K>(args...)
///   reference(args...) -> Results<N>      the same in differentiable ATen operations, for every device and dtype: promotes, or
///                                         raises, as torch does
template <size_t N>
using Specs = std::array<ResultSpec, N>;
template <size_t N>
using Results = std::array<Tensor, N>;

namespace detail {

/// Arguments as the schema has them: a quantizer is its text, and is found by it.
template <typename Argument>
using SchemaArgument =
    std::conditional_t<std::is_same_v<Argument, const Quantizer&>, std::string_view, Argument>;
template <typename T>
const T& to_schema(const T& argument) {
  return argument;
}
inline std::string_view to_schema(const Quantizer& argument) { return argument.text; }
template <typename Argument, typename Given>
const std::remove_cvref_t<Argument>& from_schema(const Given& given) {
  if constexpr (std::is_same_v<Argument, const Quantizer&>) {
    return quantizer(std::string_view(given));
  } else {
    return given;
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
};
}  // namespace detail

template <typename K>
using SignatureOf = detail::Signature<decltype(&K::shapes)>;
template <typename K>
inline constexpr size_t kResultCount = SignatureOf<K>::kResults;
template <typename K>
using ResultsOf = Results<kResultCount<K>>;

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

/// Throws c10::ValueError: the memory was given back behind the tensor's shape, as storages can be resized to nothing.
[[noreturn]] void refuse_without_memory(const Tensor& tensor);

/// Memory that a kernel may read as it lies there: dense, on the CPU, and not marked as conjugate, negative or zero.
inline bool is_plain_cpu(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kMarks({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                        c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python});
  const c10::DispatchKeySet keys = tensor.key_set();
  if (!keys.has(c10::DispatchKey::CPU) || keys.has_any(kMarks)) return false;
  if (!tensor.unsafeGetTensorImpl()->storage_initialized()) refuse_without_memory(tensor);
  return true;
}

template <size_t N, typename T>
bool is_taken(const std::array<Dtypes, N>& takes, size_t& next, const T& argument) {
  if constexpr (std::is_same_v<T, Tensor>) {
    return takes[next++].has(argument.scalar_type()) && is_plain_cpu(argument);
  } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    const Dtypes& dtypes = takes[next++];
    return !argument || (dtypes.has(argument->scalar_type()) && is_plain_cpu(*argument));
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

/// Throws c10::ValueError unless all tensors lie on one device. `op` is the qualified name, whose schema names the arguments.
void require_one_device(const char* op, c10::ArrayRef<const Tensor*> arguments);

}  // namespace detail

/// Whether K's CPU kernel takes these arguments; else the composite reference does.
template <typename K, typename... Args>
bool has_cpu_kernel(const Args&... args) {
  static_assert(K::kTakes.size() == (size_t{0} + ... + size_t{detail::kIsTyped<Args>}),
                "kTakes has one set per tensor and dtype");
  size_t next = 0;
  return (detail::is_taken(K::kTakes, next, args) && ...);
}

/// Throws c10::ValueError unless all tensors among the arguments lie on one device.
template <typename K, typename... Args>
void check_devices(const Args&... args) {
  detail::require_one_device(K::kQualifiedName, {detail::tensor_in(args)...});
}

/// The composite form: what every implementation of K returns, contiguous and in the dtypes that shapes() says.
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

}  // namespace tandem::kernel_ops
