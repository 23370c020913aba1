// The signs of a weight: what is observed of it without reading its bytes. Compared with the stamp
// of a workspace, they show whether the codes in it are the weight's.
#pragma once

#include <array>
#include <initializer_list>
#include <mutex>
#include <optional>

#include "kernel_ops/weights/weights.h"

namespace tandem::kernel_ops {

/// Held while a workspace is written: two threads may call one pipeline. It also guards the numbers
/// of storages and version counters.
std::mutex& workspace_mutex();

/// Indices of a stamp.
enum Stamp : int64_t {
  storage,
  data_pointer,
  version_counter,
  version,
  /// Steps of optimizers and known changes of the weight (weights_changed, note_read).
  epoch,
  /// The autocast region.
  stamped_region,
  /// A hash of the quantizer.
  made_by,
  layout,
  /// Digest of the weight's bytes when its codes were made.
  content,
  /// What the caller has declared for the next call, and for the last one.
  said_for_next,
  said_last,
  /// How forward and backward have last obtained the codes.
  in_forward,
  in_backward,
  stamp_places
};
static_assert(kStampSize == stamp_places, "a stamp has one number for each of its places");
/// The fields of a stamp before `content`.
using Signs = std::array<int64_t, content>;

/// The signs of a weight.
Signs signs_of(Pieces weight, const Quantizer& quantizer, GroupMask mask);
/// Notes that a weight's bytes were read or its codes made. `content`: the digest of the bytes, or
/// 0 if they were not read. If the bytes differ from those that were read before, or are not read
/// but declared new (`is_said_new`), the signs in stamps of other workspaces become outdated, and
/// `signs` becomes current.
void note_read(Pieces weight, int64_t content, bool is_said_new, Signs& signs);
/// Whether the stamp has these signs in the given fields.
bool agree(const int64_t* stamp, const Signs& signs, std::initializer_list<Stamp> fields);

bool are_on_host(Pieces weight);
/// Whether the bytes of a weight can be read at once: on an accelerator the host would wait for the
/// device.
bool is_readable(Pieces weight);
/// A digest of the bytes; 0 if they are not readable.
int64_t content_of(Pieces weight);
int64_t hash_of(const Quantizer& quantizer);
/// Whether the device records its work into a graph, whose replays do not return to the host: then
/// the graph must contain the computation of the codes.
bool is_recorded(Pieces weight);

/// Whether the codes that a workspace with this stamp holds are the weight's: by the signs and, if
/// needed, the bytes, whose digest is then stored in `content_now`.
bool are_codes_of(Pieces weight, const int64_t* stamp, const Signs& signs, Said said, bool backward,
                  std::optional<int64_t>& content_now);
/// Why the codes that a workspace with this stamp holds are not the weight's.
CodesWere reason(Pieces weight, const int64_t* stamp, const Signs& signs, Said said, bool backward);

/// Which parts of a group a workspace has room for.
GroupMask mask_of(const Workspace& workspace);

}  // namespace tandem::kernel_ops
