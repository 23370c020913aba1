// What is seen of a weight: by these signs, in the stamp of a workspace, codes are known to be its
// own.
#pragma once

#include <array>
#include <initializer_list>
#include <mutex>
#include <optional>

#include "kernel_ops/weights/weights.h"

namespace tandem::kernel_ops {

/// Two threads that call one pipeline must not write one workspace at once. Numbers of storages and
/// version counters are given under it too.
std::mutex& workspace_mutex();

/// Places in a stamp.
enum Stamp : int64_t {
  storage,
  data_pointer,
  version_counter,
  version,
  /// Of optimizers.
  epoch,
  /// Of autocast.
  stamped_region,
  /// Which quantizer.
  made_by,
  layout,
  /// What the weight's bytes were.
  content,
  /// What the next call and the last one are told of the weight.
  said_for_next,
  said_last,
  /// How each has last come by the codes.
  in_forward,
  in_backward,
  stamp_places
};
static_assert(kStampSize == stamp_places, "a stamp has one number for each of its places");
/// The first of them.
using Signs = std::array<int64_t, content>;

/// All that is seen of a weight without a look at its bytes.
Signs signs_of(Pieces weight, const Quantizer& quantizer, GroupMask mask);
/// To be called by whoever has read a weight's bytes to make codes of them: `content` is their
/// digest, or 0. Where they are others than those that were read before, or, unread, `is_said_new`,
/// the signs in stamps of other workspaces are the weight's no more; those given become so.
void note_read(Pieces weight, int64_t content, bool is_said_new, Signs& signs);
/// Whether the stamp has these signs.
bool agree(const int64_t* stamp, const Signs& signs, std::initializer_list<Stamp> fields);

bool are_on_host(Pieces weight);
/// Whether the bytes of a weight can be compared: on an accelerator that would wait for the device.
bool is_readable(Pieces weight);
/// A digest of the bytes; 0 where they cannot be read.
int64_t content_of(Pieces weight);
int64_t hash_of(const Quantizer& quantizer);
/// Whether the device records what it is given, to run it again when nobody asks here: then the
/// codes are part of what is recorded.
bool is_recorded(Pieces weight);

/// Whether the codes serve, by the signs and, where that is needed, the bytes, which `content_now`
/// then is the digest of.
bool are_codes_of(Pieces weight, const int64_t* stamp, const Signs& signs, Said said, bool backward,
                  std::optional<int64_t>& content_now);
/// Why codes that do not serve do not.
CodesWere reason(Pieces weight, const int64_t* stamp, const Signs& signs, Said said, bool backward);

/// Which codes a workspace has room for.
GroupMask mask_of(const Workspace& workspace);

}  // namespace tandem::kernel_ops
