// A bounded cache of immutable objects, most of which are read without a lock.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tandem {

/// Maps keys to immutable objects. The first `kLasting` objects stay as long as the cache, and
/// readers find them without a lock. A program that adds more usually never stops adding; of the
/// later objects only the `kRecent` that were used last stay, behind a lock. A user of an object
/// holds a shared pointer to it.
template <typename Key, typename T>
class Cache {
 public:
  using Made = std::shared_ptr<const T>;
  static constexpr size_t kLasting = 32, kRecent = 32;

  /// Returns null where the key is unknown.
  Made find(const Key& key) const {
    for (const Entry* entry = newest_.load(std::memory_order_acquire); entry != nullptr;
         entry = entry->older)
      if (entry->key == key) return entry->made;
    if (!overflows_.load(std::memory_order_acquire)) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    return find_recent(key);
  }

  /// Adds an object unless another thread has added one for the key, and returns the object in the
  /// cache.
  Made insert(Key key, Made made) const {
    Made dropped;  // destroyed after the lock, as its members may use this cache
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Entry& entry : lasting_)
      if (entry.key == key) return entry.made;
    if (Made known = find_recent(key)) return known;
    if (lasting_.size() < kLasting) {
      lasting_.push_back({std::move(key), made, newest_.load(std::memory_order_relaxed)});
      newest_.store(&lasting_.back(), std::memory_order_release);
      return made;
    }
    recent_.emplace_front(std::move(key), made);
    if (recent_.size() > kRecent) {
      dropped = std::move(recent_.back().second);
      recent_.pop_back();
    }
    overflows_.store(true, std::memory_order_release);
    return made;
  }

  /// Returns the lasting objects in the order of their insertion, then the recent ones.
  std::vector<Made> all() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Made> all;
    for (const Entry& entry : lasting_) all.push_back(entry.made);
    for (auto recent = recent_.rbegin(); recent != recent_.rend(); ++recent)
      all.push_back(recent->second);
    return all;
  }

 private:
  struct Entry {
    Key key;
    Made made;
    const Entry* older;
  };

  Made find_recent(const Key& key) const {
    for (auto recent = recent_.begin(); recent != recent_.end(); ++recent) {
      if (!(recent->first == key)) continue;
      recent_.splice(recent_.begin(), recent_, recent);
      return recent_.front().second;
    }
    return nullptr;
  }

  mutable std::mutex mutex_;
  mutable std::atomic<const Entry*> newest_{nullptr};
  mutable std::atomic<bool> overflows_{false};
  mutable std::deque<Entry> lasting_;
  /// The object that was used last comes first.
  mutable std::list<std::pair<Key, Made>> recent_;
};

}  // namespace tandem
