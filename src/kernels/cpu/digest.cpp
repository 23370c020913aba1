#include "kernels/digest.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "kernels/parallel.h"

namespace tandem::kernels::cpu {

namespace {

constexpr size_t kPiece =
    1 << 18;                  // bytes that one digest is made of, whatever the number of threads
constexpr size_t kLanes = 8;  // products of one lane wait for each other
constexpr uint64_t kFactor = 0x9e3779b97f4a7c15ULL;  // 2^64 / golden ratio, odd: a bijection

/// A bijection of `state` for each word, and of `word` for each state. A product moves no bit down,
/// so the upper half is folded into the lower half. Otherwise the top bit of a word would affect
/// only one bit of the state, and another word could undo that.
uint64_t mix(uint64_t state, uint64_t word) {
  word *= kFactor;
  return std::rotl(state, 29) * kFactor + (word ^ word >> 32);
}

uint64_t digest_piece(const char* data, size_t size) {
  uint64_t lanes[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = size + lane;
  size_t at = 0;
  for (; at + sizeof lanes <= size; at += sizeof lanes) {
    uint64_t words[kLanes];
    std::memcpy(words, data + at, sizeof words);
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = mix(lanes[lane], words[lane]);
  }
  uint64_t state = 0;
  for (const uint64_t lane : lanes) state = mix(state, lane);
  for (; at < size; at += sizeof state) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, std::min(sizeof word, size - at));
    state = mix(state, word);
  }
  return state;
}

}  // namespace

uint64_t digest(const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  if (size <= kPiece) return digest_piece(bytes, size);
  std::vector<uint64_t> pieces((size + kPiece - 1) / kPiece);
  parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t first, int64_t last) {
    for (auto piece = static_cast<size_t>(first); piece < static_cast<size_t>(last); ++piece)
      pieces[piece] = digest_piece(bytes + piece * kPiece, std::min(kPiece, size - piece * kPiece));
  });
  return digest_piece(reinterpret_cast<const char*>(pieces.data()),
                      pieces.size() * sizeof pieces[0]);
}

}  // namespace tandem::kernels::cpu
