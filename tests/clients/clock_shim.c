// Preloaded into a server under test: shifts its wall clock by the nanoseconds at the start of the file named by
// K3_CLOCK_FILE, which the test changes while the server runs. Monotonic clocks stay as they are.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t* offset_file(void) {
  static volatile int64_t* mapped;
  if (mapped == NULL) {
    static int64_t zero;
    const char* path = getenv("K3_CLOCK_FILE");
    const int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    void* memory = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    mapped = memory == MAP_FAILED ? &zero : (volatile int64_t*)memory;
  }
  return mapped;
}

int clock_gettime(clockid_t clock, struct timespec* time) {
  static int (*real)(clockid_t, struct timespec*);
  if (real == NULL) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  const int result = real(clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    const int64_t all = (int64_t)time->tv_sec * 1000000000 + time->tv_nsec + *offset_file();
    time->tv_sec = all / 1000000000;
    time->tv_nsec = all % 1000000000;
  }
  return result;
}

int gettimeofday(struct timeval* restrict time, void* restrict zone) {
  (void)zone;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != NULL) *out = now.tv_sec;
  return now.tv_sec;
}
