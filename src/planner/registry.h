// Fusions that users register, from C++ and Python.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "core/fusion.h"
#include "planner/fuse.h"
#include "tandem/export.h"

namespace tandem {

/// A registered fusion; `remove()` or destruction takes it out again. Whatever is cached is planned
/// anew either way.
class TANDEM_API FusionHandle {
 public:
  explicit FusionHandle(uint64_t id) : id_(id) {}
  FusionHandle(FusionHandle&& other) noexcept : id_(std::exchange(other.id_, 0)) {}
  FusionHandle& operator=(FusionHandle&& other) noexcept {
    remove();
    id_ = std::exchange(other.id_, 0);
    return *this;
  }
  ~FusionHandle() { remove(); }
  void remove();
  /// Leaves the fusion registered for the life of the process.
  void release() { id_ = 0; }

 private:
  uint64_t id_;
};

/// Registers a fusion after (`prepend`: before) the user fusions of its pass. Throws
/// c10::ValueError if the name is taken or the fusion has no pattern, no implementation, or, joint,
/// no backward half; if the pattern names a step that no registered op has in this pass, or reaches
/// one through what it does not have.
TANDEM_API FusionHandle register_fusion(Fusion fusion, bool prepend = false);

namespace detail {
struct FusionRegistration {
  explicit FusionRegistration(Fusion fusion) { register_fusion(std::move(fusion)).release(); }
};
}  // namespace detail

/// Registers a tandem::Fusion, named by a variable, when its library is loaded, and for the life of
/// the process. Ops that its pattern names must be there: those of the same file stand above it.
#define TANDEM_REGISTER_FUSION(fusion) \
  static const ::tandem::detail::FusionRegistration tandem_fusion_registration_##fusion { fusion }

/// Changes with every registration and removal; part of every description.
TANDEM_API uint64_t fusions_version();

/// The user fusions as they are now. Plans hold those that they may still apply.
TANDEM_API UserFusions user_fusions();

/// How a front that has fusions over op lists is asked for them.
TANDEM_API void set_group_fusions(decltype(UserFusions::groups) groups);
/// To be called by such a front whenever its fusions change.
TANDEM_API void bump_fusions_version();

}  // namespace tandem
