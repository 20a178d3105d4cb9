// Threads that share numbered tasks: those of torch where they can be had, else a pool of our own.
#pragma once

#include <cstdint>

namespace flipgrad {

// Does one task. `thread` is below the number of threads asked for, and is nobody else's meanwhile: it picks scratch memory.
using Task = void (*)(void* context, int64_t task, int64_t thread);

// The number of threads that `run` uses at most, for scratch memory.
int64_t thread_limit(int64_t threads, int64_t tasks);

// Runs tasks 0 .. tasks - 1 on the caller and up to `threads` - 1 others, and returns when all are done. Tasks must not throw.
void run(int64_t tasks, int64_t threads, Task task, void* context);

}  // namespace flipgrad
