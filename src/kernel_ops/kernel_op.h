// What a kernel op is: one struct that says schema, shapes, CPU kernel and composite reference. Everything else (dispatcher kernels,
// shape function for tracing, autograd rule, the direct call with buffers) follows from it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

namespace tandem::kernel_ops {

using at::Tensor;

/// Sizes and dtype of one result; `wanted` is false for a result that the caller masked out: it has no elements and is not computed.
struct ResultSpec {
  c10::SymDimVector sizes;
  at::ScalarType dtype = at::kFloat;
  bool wanted = true;
};

/// A kernel op K has
///   kName, kSchema                        name and schema in namespace `tandem`
///   shapes(args...) -> Specs<N>           sizes and dtypes of the results; SymInt, so that tracing sees through it; checks arguments
///   cpu(args..., Results<N>& results)     writes the allocated results; float32, bfloat16 and float16
///   reference(args...) -> Results<N>      the same in differentiable ATen operations, for every device and dtype
template <size_t N>
using Specs = std::array<ResultSpec, N>;
template <size_t N>
using Results = std::array<Tensor, N>;

namespace detail {
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
  using Function = Returned(Args...);
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
    return {handle.call(args...)};
  } else {
    return std::apply([](auto&&... results) { return ResultsOf<K>{std::move(results)...}; },
                      handle.call(args...));
  }
}

/// True for the dtypes that CPU kernels compute on; anything else goes to the composite reference.
inline bool has_cpu_kernel(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kByte || dtype == at::kLong;
}

}  // namespace tandem::kernel_ops
