#include "planner/program.h"

#include <c10/util/Exception.h>

#include <list>
#include <unordered_map>

#include "planner/planner.h"
#include "planner/registry.h"

namespace tandem {

namespace {
std::atomic<int64_t> made{0}, living{0};

/// Marks the current thread as the planning one during its lifetime.
struct Planner {
  explicit Planner(std::atomic<std::thread::id>& planner) : planner(planner) {
    planner = std::this_thread::get_id();
  }
  Planner(const Planner&) = delete;
  Planner& operator=(const Planner&) = delete;
  ~Planner() { planner = std::thread::id(); }
  std::atomic<std::thread::id>& planner;
};

/// All living programs by their text, and the recent ones. No program is destroyed under the lock:
/// its destructor takes the lock, and may run Python.
class Programs {
 public:
  using Pointer = std::shared_ptr<Program>;

  static Programs& all() {
    static auto& programs = *new Programs;  // never destroyed: static objects may hold programs
    return programs;
  }

  Pointer find(std::string_view text) {
    std::list<Pointer> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(text);
    Pointer program = found == known_.end() ? nullptr : found->second.program.lock();
    if (program) use(program, dropped);
    return program;
  }

  /// Returns the program that is kept: another thread may have added one with an equal text.
  Pointer add(const Pointer& program) {
    std::list<Pointer> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(program->text());
    Pointer known = found == known_.end() ? nullptr : found->second.program.lock();
    if (!known) {
      if (found != known_.end()) known_.erase(found);  // of a dying program, whose text is the key
      known_.emplace(program->text(), Known{program, program.get(), recent_.end()});
      known = program;
    }
    use(known, dropped);
    return known;
  }

  void forget(const Program& program) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(program.text());
    if (found != known_.end() && found->second.address == &program) known_.erase(found);
  }

  template <typename IsOutdated>
  void drop(IsOutdated&& is_outdated) {
    std::list<Pointer> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto program = recent_.begin(); program != recent_.end();) {
      const auto next = std::next(program);
      if (is_outdated((*program)->description())) take(program, dropped);
      program = next;
    }
  }

 private:
  using Recent = std::list<Pointer>;
  struct Known {
    std::weak_ptr<Program> program;
    const Program* address;
    /// Its position in the list of recent programs, or the end.
    Recent::iterator recent;
  };

  void use(const Pointer& program, Recent& dropped) {
    Known& known = known_.find(program->text())->second;
    if (known.recent != recent_.end()) {
      recent_.splice(recent_.begin(), recent_, known.recent);
      return;
    }
    recent_.push_front(program);
    known.recent = recent_.begin();
    bytes_ += program->text().size();
    while (recent_.size() > kRecentPrograms || (recent_.size() > 1 && bytes_ > kRecentProgramBytes))
      take(std::prev(recent_.end()), dropped);
  }

  void take(Recent::iterator program, Recent& dropped) {
    bytes_ -= (*program)->text().size();
    known_.find((*program)->text())->second.recent = recent_.end();
    dropped.splice(dropped.end(), recent_, program);
  }

  std::mutex mutex_;
  /// Each key views the text of its program.
  std::unordered_map<std::string_view, Known> known_;
  /// The most recently used program comes first.
  Recent recent_;
  size_t bytes_ = 0;
};
}  // namespace

Program::Program(std::string text)
    : text_(std::move(text)), description_(parse_description(text_)) {
  ++living;
}

Program::~Program() {
  Programs::all().forget(*this);
  --living;
}

std::shared_ptr<const Plan> Program::make(const PlanKey& key) {
  TORCH_CHECK_VALUE(planner_.load() != std::this_thread::get_id(),
                    "pipeline: expected fusion functions that do not call the pipeline that is "
                    "being planned, got a call of it. Call another pipeline, or none.");
  const std::lock_guard<std::mutex> lock(mutex_);
  if (auto known = plans_.find(key)) return known;
  const Planner planner(planner_);
  std::shared_ptr<const Plan> plan = make_plan(*description_, key, user_fusions());
  ++made;
  return plans_.insert(key, std::move(plan));
}

int64_t Program::plans_made() { return made.load(); }

int64_t Program::alive() { return living.load(); }

namespace {
std::shared_ptr<Program> find_or_make(std::string_view description) {
  Programs& programs = Programs::all();
  if (auto known = programs.find(description)) return known;
  return programs.add(std::make_shared<Program>(std::string(description)));
}
}  // namespace

std::shared_ptr<Program> program_of(std::string_view description) {
  // Most calls of a thread repeat the last description: comparing texts is faster than hashing.
  thread_local std::weak_ptr<Program> last;
  if (auto known = last.lock(); known && known->text() == description) return known;
  auto program = find_or_make(description);
  last = program;
  return program;
}

void drop_outdated_programs(uint64_t fusions_version) {
  Programs::all().drop([&](const Description& description) {
    return description.fusions_version != 0 && description.fusions_version != fusions_version;
  });
}

}  // namespace tandem
