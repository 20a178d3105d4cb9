#include "pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace flipgrad {
namespace {

constexpr int64_t kMostThreads = 256;

class Pool {
 public:
  explicit Pool(pid_t owner) : owner_(owner) {}

  bool belongs_to(pid_t process) const { return owner_ == process; }

  // False if another caller has the pool: the caller then does its tasks alone.
  bool try_run(int64_t tasks, int64_t threads, Task task, void* context) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return false;
    grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      tasks_ = tasks;
      next_.store(0, std::memory_order_relaxed);
      wanted_ = std::min(threads - 1, workers_);
      running_ = wanted_;
      ++generation_;
    }
    start_.notify_all();
    work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    return true;
  }

 private:
  void grow(int64_t workers) {
    while (workers_ < workers) {
      const int64_t id = workers_ + 1;
      // Read here, not in the thread: it must not miss the next generation.
      const uint64_t seen = generation_;
      try {
        std::thread([this, id, seen] { wait_for_work(id, seen); }).detach();
      } catch (const std::system_error&) {
        // The system gives no more threads: the others do the work.
        return;
      }
      ++workers_;
    }
  }

  void wait_for_work(int64_t id, uint64_t seen) {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        start_.wait(lock, [&] { return generation_ != seen; });
        seen = generation_;
        if (id > wanted_) continue;
      }
      work(id);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  void work(int64_t thread) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) task_(context_, i, thread);
  }

  const pid_t owner_;
  std::mutex turn_, mutex_;
  std::condition_variable start_, done_;
  int64_t workers_ = 0, wanted_ = 0, running_ = 0, tasks_ = 0;
  uint64_t generation_ = 0;
  std::atomic<int64_t> next_{0};
  Task task_ = nullptr;
  void* context_ = nullptr;
};

// One piece of work for all threads of a team, who take numbers as they come.
struct Shared {
  const int64_t tasks;
  const Task task;
  void* const context;
  std::atomic<int64_t> next_task{0}, next_thread{0};

  static void work(void* data) {
    Shared& shared = *static_cast<Shared*>(data);
    const int64_t thread = shared.next_thread.fetch_add(1, std::memory_order_relaxed);
    for (int64_t i; (i = shared.next_task.fetch_add(1, std::memory_order_relaxed)) < shared.tasks;)
      shared.task(shared.context, i, thread);
  }
};

// Starts a team of OpenMP threads: GCC's interface, which LLVM's and Intel's runtimes have as well.
using StartTeam = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

// A child of fork has none of its parent's threads, of which OpenMP knows nothing.
std::atomic<bool> forked{false};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

// The OpenMP runtime that torch has loaded, if any. Its threads stay awake for a while between torch's operations: they are at
// once at work here, while threads of our own would have to wait until they leave the cores.
StartTeam start_team() {
  static const auto found = reinterpret_cast<StartTeam>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return forked ? nullptr : found;
}

std::atomic<Pool*> current{nullptr};

// The pool of this process. A child of fork inherits the pool without its threads, and perhaps with a locked mutex: it
// leaves that one alone and makes its own. Pools are never destroyed, since their threads wait until the process ends.
Pool& pool() {
  const pid_t process = getpid();
  Pool* found = current.load();
  while (found == nullptr || !found->belongs_to(process)) {
    Pool* made = new Pool(process);
    if (current.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *found;
}

}  // namespace

int64_t thread_limit(int64_t threads, int64_t tasks) { return std::max<int64_t>(1, std::min({threads, tasks, kMostThreads})); }

void run(int64_t tasks, int64_t threads, Task task, void* context) {
  threads = thread_limit(threads, tasks);
  if (threads > 1) {
    if (const StartTeam start = start_team()) {
      Shared shared{tasks, task, context};
      return start(Shared::work, &shared, static_cast<unsigned>(threads), 0);
    }
    if (pool().try_run(tasks, threads, task, context)) return;
  }
  for (int64_t i = 0; i < tasks; ++i) task(context, i, 0);
}

}  // namespace flipgrad
