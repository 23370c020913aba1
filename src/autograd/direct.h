// Whether device kernels may run directly on tensors, or each operation must be seen.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace tandem {

/// Dispatch keys that a dense tensor does not have.
inline constexpr c10::DispatchKeySet kNotPlain(
    {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
     c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched,
     c10::DispatchKey::Batched, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
     c10::DispatchKey::ZeroTensor});
/// Dispatch keys of thread-local state while every operation must be seen.
inline constexpr c10::DispatchKeySet kWatching(
    {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
     c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
     c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::FuncTorchVmapMode,
     c10::DispatchKey::VmapMode, c10::DispatchKey::PythonDispatcher, c10::DispatchKey::Fake,
     c10::DispatchKey::Tracer});

/// Whether functorch, a mode or a tracer sees the operations of this thread.
inline bool is_watched() {
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(kWatching) ||
         c10::impl::TorchDispatchModeTLS::any_modes_set();
}

/// Whether the operations of this thread are recorded, or computed on shapes only: what they write
/// has no values yet.
inline bool is_recorded() {
  using c10::impl::TorchDispatchModeKey;
  if (c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Tracer)) return true;
  for (const auto mode :
       {TorchDispatchModeKey::FAKE, TorchDispatchModeKey::PROXY, TorchDispatchModeKey::FUNCTIONAL})
    if (c10::impl::TorchDispatchModeTLS::get_mode(mode).has_value()) return true;
  return false;
}

/// Whether the tensor is strided and its memory holds its elements, on any device.
inline bool is_plain(const at::Tensor& tensor) {
  return !tensor.key_set().has_any(kNotPlain) && tensor.layout() == at::kStrided &&
         tensor.unsafeGetTensorImpl()->has_storage() && !tensor.is_meta();
}

/// Whether forward-mode differentiation follows the tensor.
bool has_tangent(const at::Tensor& tensor);

/// Whether two tensors are one object or views of one storage.
inline bool shares_memory(const at::Tensor& a, const at::Tensor& b) {
  const at::TensorImpl *one = a.unsafeGetTensorImpl(), *other = b.unsafeGetTensorImpl();
  if (one == other) return true;
  if (!one->has_storage() || !other->has_storage()) return false;
  return one->unsafe_storage().unsafeGetStorageImpl() ==
         other->unsafe_storage().unsafeGetStorageImpl();
}

}  // namespace tandem
