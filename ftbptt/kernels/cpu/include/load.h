// Copied into compiled programs: ftbptt::load, the function of a library that was built beside the program.
#ifndef FTBPTT_LOAD
#define FTBPTT_LOAD
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>

namespace ftbptt {
using Run = void (*)(void* const*, const int64_t*);

inline Run load(const char* library) {
  static std::mutex mutex;
  static std::map<std::string, Run> loaded;
  const std::lock_guard<std::mutex> lock(mutex);
  Run& run = loaded[library];
  if (run == nullptr) {
    void* const handle = dlopen(library, RTLD_NOW);
    if (handle != nullptr) run = reinterpret_cast<Run>(dlsym(handle, "run"));
    if (run == nullptr) throw std::runtime_error(std::string("cannot load the kernel ") + library);
  }
  return run;
}
}  // namespace ftbptt
#endif
